"""Figures of a set of rounds, with bootstrap intervals over prompts. Pure; knows no text, file or system.

All comparisons are paired: a prompt counts only if every configuration gave it at least two tokens (a rate needs two).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier_local.bench.speculate.records import Decoded, Round
from espalier_local.bench.speculate.totals import StepTotals

_RESAMPLES = 2000
_CONFIDENCE = 0.95

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Statistic = Callable[[Indices], Floats]
"""Of resampled prompts, [R, n] indices into those measured, a value each, [R]."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its bootstrap interval of 95 % over prompts."""

    value: float
    low: float
    high: float


def bootstrap(num_prompts: int, statistic: Statistic) -> Interval:
    """The statistic of all prompts, and between what values it is in 95 % of resampled sets (percentile method).

    The same resamples for every statistic of as many prompts.
    """
    drawn = np.random.default_rng(0).integers(num_prompts, size=(_RESAMPLES, num_prompts))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(statistic(drawn), [tail, 100 - tail])
    (value,) = statistic(np.arange(num_prompts)[None, :])
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Column:
    """One configuration over n prompts, float64 [n] each: tokens and LLM steps behind the first token, ms per token.

    totals: of its steps, all prompts together.
    """

    tokens: Floats
    steps: Floats
    ms_per_token: Floats
    totals: StepTotals

    @property
    def tokens_per_step(self) -> Interval:
        """All tokens by all steps."""
        return bootstrap(len(self.tokens), lambda drawn: _sums(self.tokens, drawn) / _sums(self.steps, drawn))

    @property
    def median_ms(self) -> Interval:
        """Of the prompts' ms per token."""
        return bootstrap(len(self.tokens), lambda drawn: _medians(self.ms_per_token, drawn))

    @property
    def step_ms(self) -> float:
        """Mean wall time of a step as the client sees it."""
        return float((self.ms_per_token * self.tokens).sum() / self.steps.sum())

    def faster_than(self, other: "Column") -> Interval:
        """The median of the prompts' ratios of the other's time to this one's: 2 is twice as fast."""
        ratios = other.ms_per_token / self.ms_per_token
        return bootstrap(len(ratios), lambda drawn: _medians(ratios, drawn))

    def more_per_step_than(self, other: "Column") -> Interval:
        """The ratio of this one's tokens per step to the other's."""

        def ratio(drawn: Indices) -> Floats:
            ours = _sums(self.tokens, drawn) / _sums(self.steps, drawn)
            return ours * _sums(other.steps, drawn) / _sums(other.tokens, drawn)

        return bootstrap(len(self.tokens), ratio)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Columns by configuration over the same prompts. same_output: prompts to which all gave the same tokens."""

    columns: dict[str, Column]
    num_prompts: int
    same_output: int


def sheet(rounds: Sequence[Round]) -> Sheet | None:
    """The rounds' answers, a row a prompt; None if no prompt counts. All rounds have the same configurations."""
    names = list(rounds[0].runs) if rounds else []
    rows = [
        [each.runs[name].answers[idx] for name in names]
        for each in rounds
        for idx in range(each.batch)
        if min(each.runs[name].answers[idx].num_tokens for name in names) > 1
    ]
    if not rows:
        return None
    columns = {name: _column([row[idx] for row in rows], rounds, name) for idx, name in enumerate(names)}
    return Sheet(columns, len(rows), sum(len({answer.checksum for answer in row}) == 1 for row in rows))


def _column(answers: Sequence[Decoded], rounds: Sequence[Round], name: str) -> Column:
    return Column(
        tokens=_floats(answer.num_tokens - 1 for answer in answers),
        steps=_floats(max(1, answer.num_steps - 1) for answer in answers),
        ms_per_token=_floats(answer.ms_per_token for answer in answers),
        totals=sum((each.runs[name].totals for each in rounds), StepTotals()),
    )


def _floats(values: Any) -> Floats:
    return np.array(list(values), np.float64)


def _sums(values: Floats, drawn: Indices) -> Floats:
    sums: Floats = values[drawn].sum(axis=1)
    return sums


def _medians(values: Floats, drawn: Indices) -> Floats:
    return np.asarray(np.median(values[drawn], axis=1), np.float64)
