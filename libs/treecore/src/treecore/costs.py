"""What steps cost: ms of a forward by its rows, as measured at start and as seen since.

Knows rows and times; must not know trees, probabilities or who runs the forwards. Mutable: each object has one owner.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import overload

import numpy as np
from numpy.typing import NDArray

from treecore.messages import ForwardCost

Ms = NDArray[np.float64]
Rows = int | NDArray[np.int64] | NDArray[np.float64]

_WINDOW = 64  # half of it must change before an estimate follows: 32 stalls go unnoticed, 33 are the new normal
_FITS_A_WINDOW = 16  # a fit takes as long as merging a step's drafts
_ROUNDS = 4  # of reweighting; each brings the fit nearer to least absolute, not squared, errors
_NEAR = 0.03  # relative errors below this count alike
_LEAST_MS, _MOST_MS = 1e-3, 1e8  # what a clock cannot tell from nothing, and longer than anybody waits
_TRUST = np.array([0.01, 0.1])  # in observations: how firmly level and slope stay put where the others leave them open


class ForwardCosts:
    """ms of a model's forward: `level * measured(rows) + slope * rows`.

    measured: the points announced, straight lines between, the last line beyond; a constant if there are none. Fewer
    rows never cost more: where they seemed to, the machine stalled. Level and slope follow the last 64 observations,
    those at start included, with the least relative absolute error, so that a minority (a machine that stalls, prompts)
    moves nothing. Where all had the same rows, the level explains them.
    """

    def __init__(self, points: Sequence[ForwardCost] = ()) -> None:
        known = sorted((float(point.num_rows), _believed(point.ms)) for point in points)
        self._rows = np.array([rows for rows, _ in known], np.float64)
        self._ms = np.minimum.accumulate(np.array([ms for _, ms in known[::-1]], np.float64))[::-1]
        self._seen: deque[tuple[float, float]] = deque(known, maxlen=_WINDOW)
        self._num_unfitted = 0
        self._factors = self._prior = np.array([1.0, 0.0])
        self._by_rows: dict[int, float] = {}  # what was asked since the last fit

    @overload
    def ms(self, num_rows: int) -> float: ...
    @overload
    def ms(self, num_rows: NDArray[np.int64] | NDArray[np.float64]) -> Ms: ...
    def ms(self, num_rows: Rows) -> float | Ms:
        """Of one forward over so many rows."""
        if not isinstance(num_rows, int):
            return self._curve(num_rows.astype(np.float64))
        if num_rows not in self._by_rows:
            self._by_rows[num_rows] = float(self._curve(np.array([num_rows], np.float64))[0])
        return self._by_rows[num_rows]

    def observe(self, num_rows: int, ms: float) -> None:
        """A forward over so many rows (>= 1) took `ms`."""
        self._seen.append((num_rows, _believed(ms)))
        self._num_unfitted += 1
        if self._num_unfitted >= len(self._seen) // _FITS_A_WINDOW:
            self._fit()

    def _fit(self) -> None:
        self._num_unfitted = 0
        rows, seen = np.array(self._seen, np.float64).T
        if not len(self._rows):  # nothing was measured: half of it is taken to grow with the rows until more is known
            self._prior = np.array([np.median(seen) / 2, np.median(seen / rows) / 2])
        self._factors = _fitted(np.stack([self._measured(rows), rows]) / seen, self._prior)
        self._by_rows.clear()

    def _curve(self, rows: Ms) -> Ms:
        found: Ms = self._factors[0] * self._measured(rows) + self._factors[1] * rows
        return found

    def _measured(self, rows: Ms) -> Ms:
        if not len(self._rows):
            return np.ones_like(rows)
        found: Ms = np.interp(rows, self._rows, self._ms)
        if len(self._rows) == 1:
            return found
        slope = float(self._ms[-1] - self._ms[-2]) / float(self._rows[-1] - self._rows[-2])
        found += slope * np.maximum(rows - self._rows[-1], 0.0)
        return found


class Typical:
    """The median of the last 64 values: what a part of a step takes, say, whatever stalls now and then."""

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, value: float) -> None:
        """Take in the latest."""
        self._seen.append(value)
        self.value = median(self._seen)


def _believed(ms: float) -> float:
    """What workers tell, within what can be computed with."""
    return min(max(ms, _LEAST_MS), _MOST_MS)


def _fitted(features: Ms, prior: Ms) -> Ms:
    """Factors >= 0, fp64 [2], with features.T @ factors near 1, and near `prior` where features leave it open.

    features: fp64 [2, n], > 0.
    """
    scale: Ms = features.mean(axis=1)
    unit, wanted, factors = features / scale[:, None], prior * scale, prior * scale
    for _ in range(_ROUNDS):
        weights = 1.0 / np.maximum(np.abs(factors @ unit - 1.0), _NEAR) * _NEAR
        weighted = unit * weights
        gram, target = weighted @ unit.T + np.diag(_TRUST), weighted.sum(axis=1) + _TRUST * wanted
        factors = _solved(gram, target)
    factors /= scale
    return factors


def _solved(gram: Ms, target: Ms) -> Ms:
    """The least-squares factors that are >= 0 (two of them, so trying each alone is enough)."""
    found = np.linalg.solve(gram, target).astype(np.float64)
    for negative in np.flatnonzero(found < 0.0)[:1]:
        found[negative] = 0.0
        found[1 - negative] = target[1 - negative] / gram[1 - negative, 1 - negative]
    return found
