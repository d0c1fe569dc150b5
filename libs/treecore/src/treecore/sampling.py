"""The token that a law and the noise choose (architecture section 4).

    x_t = argmax_v [ log p_t(v) + G(s, t, v) ]   temperature > 0
    x_t = argmax_v   log p_t(v)                  temperature = 0, ties: lowest token id

The same functions serve the LLM (its token) and the SSMs (the top k children); both work on fp32 logits in numpy.
p_t need not be normalised: a constant does not move the argmax.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treecore.law import Distribution, Row, keep, processed, top_indices
from treecore.noise import GUMBEL_MAX, Seed, gumbel
from treecore.params import SamplingParams
from treecore.sparse import Ids

_FIRST_LOOK = 64  # how many of the best are looked at first where a sort is needed anyway
_LEAST_SHARE = np.float32(-1e4)  # of a token that a tiny temperature all but rules out
_NEAR = np.float32(3.0)  # tokens so close to the best have their noise drawn first: it rules out most of the rest


def best_tokens(row: Row, token_ids: Ids | None, params: SamplingParams, position: int, num_tokens: int = 1) -> Ids:
    """`best_tokens_of_nodes` for one node. row: fp32 [V]."""
    return best_tokens_of_nodes(row[None], token_ids, params, [position], num_tokens)[0]


def best_tokens_of_nodes(
    rows: NDArray[np.float32],
    token_ids: Ids | None,
    params: SamplingParams,
    positions: Sequence[int],
    num_tokens: int = 1,
) -> list[Ids]:
    """Per node the first `num_tokens` tokens of the order by log p + G, best first; fewer if p has fewer.

    rows: adjusted logits, fp32 [n, V], a row a node. positions: of the tokens to be chosen. token_ids: int32 [V]
    ascending, or None where the index is the id (a trimmed head). For the LLM, x_t. For a coupled SSM, its k children.
    """
    if params.is_greedy and num_tokens == 1:
        best = rows.argmax(axis=1).astype(np.int32)
        return list((best if token_ids is None else token_ids[best])[:, None])
    laws = [processed(row, token_ids, params) for row in rows]
    if not params.is_greedy:
        laws = noisy(laws, params.seed, positions, num_tokens)
    return [most_likely(law, num_tokens) for law in laws]


def most_likely(law: Distribution, count: int) -> Ids:
    """The `count` most likely tokens, most likely first; fewer if the law has fewer."""
    return law.token_ids[_most_likely(law, count)]


def most_likely_shares(law: Distribution, count: int) -> tuple[Ids, Row]:
    """As `most_likely`, and the log of each one's share of the law: finite, at most 0, fp32."""
    best = _most_likely(law, count)
    with np.errstate(over="ignore"):
        shifted = law.logp - law.logp.max()
    shares = shifted[best] - np.log(np.exp(shifted).sum())
    return law.token_ids[best], np.clip(shares, _LEAST_SHARE, 0.0)


def _most_likely(law: Distribution, count: int) -> NDArray[np.intp]:
    best = top_indices(law.logp, count)
    return best[law.logp[best] > -np.inf]  # p = 0 is no token, however few others there are


def noisy(laws: Sequence[Distribution], seed: Seed, positions: Sequence[int], count: int) -> list[Distribution]:
    """The law of logp + G on tokens that may be among its top `count`, for each law. Noise is drawn for few others.

    Noise is at most GUMBEL_MAX: once `count` tokens score at least s, a token with logp < s - GUMBEL_MAX is out.
    """
    first = [keep(law, _likely(law.logp, count)) for law in laws]
    contenders = [
        law if len(look.logp) == len(law.logp) else _contenders(law, np.partition(scores, -count)[-count])
        for law, look, scores in zip(laws, first, _scores(first, seed, positions), strict=True)
    ]
    scored = zip(contenders, _scores(contenders, seed, positions), strict=True)
    return [Distribution(law.token_ids, scores) for law, scores in scored]


def noisy_among(laws: Sequence[Distribution], seed: Seed, positions: Sequence[int], most: int) -> list[Distribution]:
    """As `noisy`, among the `most` likeliest tokens of each law alone: for drafts, which may be wrong.

    Noise can lift any of 16,000 unlikely tokens to the top; drawing it for all takes most of a small model's time.
    """
    likely = [keep(law, top_indices(law.logp, most)) for law in laws]
    scored = zip(likely, _scores(likely, seed, positions), strict=True)
    return [Distribution(law.token_ids, scores) for law, scores in scored]


def _likely(logp: Row, count: int) -> NDArray[np.intp]:
    """At least `count` indices of likely tokens, as far as there are so many; cheaper to find than the very best."""
    near = np.flatnonzero(logp >= logp.max() - _NEAR)
    return near if len(near) >= count else top_indices(logp, max(_FIRST_LOOK, count))


def _contenders(law: Distribution, floor: np.float32) -> Distribution:
    return keep(law, np.flatnonzero(law.logp >= floor - np.float32(GUMBEL_MAX)))


def _scores(laws: Sequence[Distribution], seed: Seed, positions: Sequence[int]) -> list[Row]:
    """Logp + G of every token of every law; the noise of all laws is drawn in one go."""
    lengths = [len(law.logp) for law in laws]
    noise = gumbel(seed, np.repeat(positions, lengths), np.concatenate([law.token_ids for law in laws]))
    parts = np.split(noise, np.cumsum(lengths)[:-1])
    return [law.logp + part for law, part in zip(laws, parts, strict=True)]
