"""p_t: from a model's logits behind a node to the distribution that its next token is drawn from (architecture 4).

Order: grammar, bias, minimum tokens, repetition penalty, presence and frequency penalty (then log-probs are taken),
temperature, min_p, top_k, top_p; all in fp32. Everything is a function of (logits, parameters, the node's own path):
the same code serves the LLM and the SSMs, with speculation and without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.params import SamplingParams
from treecore.sparse import Ids

Row = NDArray[np.float32]


_TINY = np.finfo(np.float32).tiny  # what fp32 would round to 0: as good as greedy, for a temperature
_FIRST_LOOK = 64


@dataclass(frozen=True, slots=True)
class Paths:
    """What stands before the tokens that are to be chosen behind n nodes.

    committed: prompt and output, int32 or ints. below: each node's tokens below the root. masks: bool [n, V], the
    tokens that the grammar allows behind each node, or None where there is none. A node behind which nothing is allowed
    is closed: no token follows it.
    """

    committed: Sequence[int] | Ids
    below: Sequence[tuple[int, ...]]
    masks: NDArray[np.bool_] | None = None

    @property
    def is_closed(self) -> NDArray[np.bool_]:
        """Whether no token may follow a node, bool [n]."""
        if self.masks is None:
            return np.zeros(len(self.below), np.bool_)
        is_closed: NDArray[np.bool_] = np.logical_not(self.masks.any(axis=1))
        return is_closed

    @property
    def positions(self) -> list[int]:
        """The absolute position of each token to be chosen."""
        return [len(self.committed) + len(path) for path in self.below]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Unnormalised log-probabilities of the tokens that truncation left: int32 [n] ascending, fp32 [n]."""

    token_ids: Ids
    logp: Row


@dataclass(frozen=True, slots=True)
class _Said:
    """Tokens that were said: distinct ids, ascending; how often in the output (0: in the prompt alone)."""

    ids: Ids
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, prompt: Ids, output: Ids) -> "_Said":
        ids, inverse = np.unique(np.concatenate([output, prompt]), return_inverse=True)
        counts = np.bincount(inverse[: len(output)], minlength=len(ids))
        return cls(ids, counts)

    def with_path(self, path: Sequence[int]) -> "_Said":
        """And the tokens of a path behind it."""
        if not path:
            return self
        ids = np.union1d(self.ids, np.array(path, np.int32))
        counts = np.zeros(len(ids), np.int64)
        counts[np.searchsorted(ids, self.ids)] = self.counts
        np.add.at(counts, np.searchsorted(ids, path), 1)
        return _Said(ids, counts)


def adjusted(
    logits: NDArray[np.float32], token_ids: Ids | None, params: SamplingParams, paths: Paths
) -> NDArray[np.float32]:
    """Logits as they are before temperature, fp32 [n, V]; `logits` itself, untouched, where nothing is to be done.

    token_ids: int32 [V] ascending, the token of each column, or None where the index is the id (a trimmed head).
    """
    if paths.masks is None and not (params.bias_ids or params.min_tokens or params.has_penalties):
        return logits
    rows = logits.copy()
    if paths.masks is not None:
        _mask(rows, paths.masks if token_ids is None else paths.masks[:, token_ids])
    _bias(rows, token_ids, params)
    for row, path in zip(rows, paths.below, strict=True):
        _forbid_ends(row, token_ids, params, len(paths.committed) - params.prompt_len + len(path))
    if params.has_penalties:
        committed = np.asarray(paths.committed, np.int32)
        said = _Said.of(committed[: params.prompt_len], committed[params.prompt_len :])
        for row, path in zip(rows, paths.below, strict=True):
            _penalise(row, token_ids, params, said.with_path(path))
    return rows


def processed(row: Row, token_ids: Ids | None, params: SamplingParams) -> Distribution:
    """The law of one adjusted row, fp32 [V]: temperature, then min_p, top_k, top_p."""
    ids = np.arange(len(row), dtype=np.int32) if token_ids is None else token_ids
    if params.is_greedy:
        return Distribution(ids, row)
    law = Distribution(ids, _scaled(row, params.temperature))
    if params.min_p > 0.0:
        law = keep(law, np.flatnonzero(law.logp >= np.log(max(np.float32(params.min_p), _TINY))))  # the best is at 0
    if 0 < params.top_k < len(law.logp):
        law = keep(law, top_indices(law.logp, params.top_k))
    if params.top_p < 1.0:
        law = keep(law, _nucleus(law.logp, params.top_p))
    return law


def logprobs(row: Row) -> NDArray[np.float64]:
    """Log p of every token under the adjusted row, before temperature: float64 [V]."""
    shifted = row.astype(np.float64) - float(row.max())
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def keep(law: Distribution, indices: NDArray[np.intp]) -> Distribution:
    """The law on `indices` alone (any order)."""
    indices = np.sort(indices)
    return Distribution(law.token_ids[indices], law.logp[indices])


def top_indices(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, largest first; equal values in index order."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def _mask(rows: NDArray[np.float32], allowed: NDArray[np.bool_]) -> None:
    """A closed node's row stays as it is, so that its law is one; nobody asks for it."""
    allowed = allowed | ~allowed.any(axis=1, keepdims=True)
    rows[~allowed] = -np.inf


def _bias(rows: NDArray[np.float32], token_ids: Ids | None, params: SamplingParams) -> None:
    if params.bias_ids:
        columns, found = _columns(np.array(params.bias_ids, np.int32), token_ids)
        rows[:, columns] += np.array(params.biases, np.float32)[found]


def _forbid_ends(row: Row, token_ids: Ids | None, params: SamplingParams, output_len: int) -> None:
    """No end before min_tokens, unless the grammar leaves nothing else."""
    if output_len >= params.min_tokens or not params.end_token_ids:
        return
    columns, _ = _columns(np.array(params.end_token_ids, np.int32), token_ids)
    saved = row[columns]
    row[columns] = -np.inf
    if row.max() == -np.inf:
        row[columns] = saved


def _penalise(row: Row, token_ids: Ids | None, params: SamplingParams, said: _Said) -> None:
    """repetition_penalty as in CTRL (arXiv 1909.05858, with division only towards less likely), then OpenAI's two."""
    columns, found = _columns(said.ids, token_ids)
    values, counts = row[columns], said.counts[found]
    factor = np.float32(params.repetition_penalty)
    values = np.where(values > 0, values / factor, values * factor)
    values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    values -= np.float32(params.presence_penalty) * (counts > 0).astype(np.float32)
    row[columns] = values


def _columns(ids: Ids, token_ids: Ids | None) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The columns of those `ids` that have one, and which of them have."""
    if token_ids is None:
        return ids.astype(np.intp), np.ones(len(ids), np.bool_)
    columns = np.searchsorted(token_ids, ids)
    found = np.zeros(len(ids), np.bool_)
    inside = columns < len(token_ids)
    found[inside] = token_ids[columns[inside]] == ids[inside]
    return columns[found], found


def _scaled(row: Row, temperature: float) -> Row:
    """(row - max) / temperature: the best token is at 0, so that no temperature, however small, makes inf - inf."""
    with np.errstate(over="ignore"):
        scaled: Row = (row - row.max()) / max(np.float32(temperature), _TINY)
    return scaled


def _nucleus(logp: Row, top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of most likely tokens whose mass reaches `top_p` (the crossing token included)."""
    mass = np.exp((logp - logp.max()).astype(np.float64))
    wanted = top_p * mass.sum()
    count = _FIRST_LOOK
    while True:
        order = top_indices(logp, count)
        reached = np.cumsum(mass[order])
        if reached[-1] >= wanted or len(order) == len(logp):
            return order[: int(np.searchsorted(reached, wanted)) + 1]
        count *= 4
