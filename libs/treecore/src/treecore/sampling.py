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
    if params.is_greedy:
        return most_likely(laws, num_tokens)
    return _top_noisy(laws, params.seed, positions, num_tokens)


def most_likely(laws: Sequence[Distribution], count: int) -> list[Ids]:
    """The `count` most likely tokens of each law, most likely first; fewer if it has fewer."""
    return [_top(law.token_ids, law.logp, count) for law in laws]


def _top(token_ids: Ids, scores: Row, count: int) -> Ids:
    best = top_indices(scores, count)
    return token_ids[best[scores[best] > -np.inf]]  # p = 0 is no token, however few others there are


def _top_noisy(laws: Sequence[Distribution], seed: Seed, positions: Sequence[int], count: int) -> list[Ids]:
    """The top `count` of logp + G of each law, exactly, without drawing noise for tokens that cannot win.

    Noise is at most GUMBEL_MAX: once `count` tokens score at least s, a token with logp < s - GUMBEL_MAX is out.
    """
    first = [keep(law, _likely(law.logp, count)) for law in laws]
    contenders = [
        law if len(look.logp) == len(law.logp) else _contenders(law, np.partition(scores, -count)[-count])
        for law, look, scores in zip(laws, first, _scores(first, seed, positions), strict=True)
    ]
    scored = zip(contenders, _scores(contenders, seed, positions), strict=True)
    return [_top(law.token_ids, scores, count) for law, scores in scored]


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
