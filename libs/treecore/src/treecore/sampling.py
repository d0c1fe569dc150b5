"""Sampling parameters and the token that they choose (architecture section 4).

    x_t = argmax_v [ log p_t(v) + G(s, t, v) ]   temperature > 0
    x_t = argmax_v   log p_t(v)                  temperature = 0, ties: lowest token id

The same functions serve the LLM (its token) and the SSMs (the top k children); both work on fp32 logits in numpy.
p_t need not be normalised: a constant does not move the argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.noise import GUMBEL_MAX, Seed, gumbel

_MIN_TEMPERATURE = np.finfo(np.float32).tiny  # what fp32 would round to 0 is as good as greedy
_FIRST_LOOK = 64  # how many of the best are looked at first where a sort is needed anyway
_NEAR = np.float32(3.0)  # tokens so close to the best have their noise drawn first: it rules out most of the rest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen. Validated at the gateway; travels once per request and worker.

    temperature 0 means greedy. top_k 0 and top_p 1 mean off. seed: 64 bits, unsigned. Raises ValueError for values
    that no worker could compute with.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: Seed

    def __post_init__(self) -> None:
        is_possible = (
            0.0 <= self.temperature < np.inf
            and 0 <= self.top_k < 2**63
            and 0.0 <= self.top_p <= 1.0
            and 0 <= self.seed < 2**64
        )
        if not is_possible:
            raise ValueError(f"impossible sampling parameters: {self}")

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is involved."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Distribution:
    """Unnormalised log-probabilities of the tokens that truncation left: int32 [n] ascending, fp32 [n]."""

    token_ids: NDArray[np.int32]
    logp: NDArray[np.float32]


def best_tokens(
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int32] | None,
    params: SamplingParams,
    position: int,
    num_tokens: int = 1,
) -> NDArray[np.int32]:
    """`best_tokens_of_nodes` for one node. logits: fp32 [V]."""
    return best_tokens_of_nodes(logits[None], token_ids, params, [position], num_tokens)[0]


def best_tokens_of_nodes(
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int32] | None,
    params: SamplingParams,
    positions: Sequence[int],
    num_tokens: int = 1,
) -> list[NDArray[np.int32]]:
    """Per node the first `num_tokens` tokens of the order by log p + G, best first; fewer if p has fewer.

    logits: fp32 [n, V], a row a node. positions: of the tokens to be chosen. token_ids: int32 [V] ascending, or None
    where the index is the id (a trimmed head). For the LLM, one token: x_t. For a coupled SSM, its k children.
    """
    if params.is_greedy and num_tokens == 1:
        best = logits.argmax(axis=1).astype(np.int32)
        return list((best if token_ids is None else token_ids[best])[:, None])
    laws = [processed(row, token_ids, params) for row in logits]
    if params.is_greedy:
        return [_top(law.token_ids, law.logp, num_tokens) for law in laws]
    return _top_noisy(laws, params.seed, positions, num_tokens)


def processed(logits: NDArray[np.float32], token_ids: NDArray[np.int32] | None, params: SamplingParams) -> Distribution:
    """p_t: temperature, then top_k, then top_p (architecture section 4)."""
    ids = np.arange(len(logits), dtype=np.int32) if token_ids is None else token_ids
    if params.is_greedy:
        return Distribution(ids, logits)
    law = Distribution(ids, _scaled(logits, params.temperature))
    if 0 < params.top_k < len(ids):
        law = _keep(law, _top_indices(law.logp, params.top_k))
    if params.top_p < 1.0:
        law = _keep(law, _nucleus(law.logp, params.top_p))
    return law


def _scaled(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """(logits - max) / temperature: the best token is at 0, so that no temperature, however small, makes inf - inf."""
    with np.errstate(over="ignore"):
        scaled: NDArray[np.float32] = (logits - logits.max()) / max(np.float32(temperature), _MIN_TEMPERATURE)
    return scaled


def _keep(law: Distribution, indices: NDArray[np.intp]) -> Distribution:
    indices = np.sort(indices)
    return Distribution(law.token_ids[indices], law.logp[indices])


def _top_indices(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, largest first; equal values in index order."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def _nucleus(logp: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of most likely tokens whose mass reaches `top_p` (the crossing token included)."""
    mass = np.exp((logp - logp.max()).astype(np.float64))
    wanted = top_p * mass.sum()
    count = _FIRST_LOOK
    while True:
        order = _top_indices(logp, count)
        reached = np.cumsum(mass[order])
        if reached[-1] >= wanted or len(order) == len(logp):
            return order[: int(np.searchsorted(reached, wanted)) + 1]
        count *= 4


def _top(token_ids: NDArray[np.int32], scores: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    best = _top_indices(scores, count)
    return token_ids[best[scores[best] > -np.inf]]  # p = 0 is no token, however few others there are


def _top_noisy(
    laws: Sequence[Distribution], seed: Seed, positions: Sequence[int], count: int
) -> list[NDArray[np.int32]]:
    """The top `count` of logp + G of each law, exactly, without drawing noise for tokens that cannot win.

    Noise is at most GUMBEL_MAX: once `count` tokens score at least s, a token with logp < s - GUMBEL_MAX is out.
    """
    first = [_keep(law, _likely(law.logp, count)) for law in laws]
    contenders = [
        law if len(look.logp) == len(law.logp) else _contenders(law, np.partition(scores, -count)[-count])
        for law, look, scores in zip(laws, first, _scores(first, seed, positions), strict=True)
    ]
    scored = zip(contenders, _scores(contenders, seed, positions), strict=True)
    return [_top(law.token_ids, scores, count) for law, scores in scored]


def _likely(logp: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """At least `count` indices of likely tokens, as far as there are so many; cheaper to find than the very best."""
    near = np.flatnonzero(logp >= logp.max() - _NEAR)
    return near if len(near) >= count else _top_indices(logp, max(_FIRST_LOOK, count))


def _contenders(law: Distribution, floor: np.float32) -> Distribution:
    return _keep(law, np.flatnonzero(law.logp >= floor - np.float32(GUMBEL_MAX)))


def _scores(laws: Sequence[Distribution], seed: Seed, positions: Sequence[int]) -> list[NDArray[np.float32]]:
    """Logp + G of every token of every law; the noise of all laws is drawn in one go."""
    lengths = [len(law.logp) for law in laws]
    noise = gumbel(seed, np.repeat(positions, lengths), np.concatenate([law.token_ids for law in laws]))
    parts = np.split(noise, np.cumsum(lengths)[:-1])
    return [law.logp + part for law, part in zip(laws, parts, strict=True)]
