"""Whether drafting while the LLM verifies pays: what it brings, against how far it slows the LLM down.

Where SSMs have cores or devices of their own it costs nothing; where they share the LLM's, each row takes it longer.
Must not know requests or links. Mutable: one owner.
"""

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.costs import ForwardCosts
from treecore.draft_worth import DEEPEST, DraftWorth
from treecore.forest import Forest

_LEAST_GAIN = 0.03  # tokens a request and step, wherever the drafts may come from
_NUM_BEFORE, _NUM_CHANGES = 4, 16  # forwards that one is compared with; comparisons that are remembered
_LEAST_MS = 1e-3  # less is nothing
_NEW = 0.05  # weight of the latest wait
_PATIENCE = 0.5  # of a verification, at most
_PAUSE_EVERY = 32  # steps after which the LLM runs alone for once, to see how fast it is then
_PROBE_EVERY = 16  # steps after which drafts that do not pay are tried ...
_RAREST_PROBE = 64  # ... and less often the longer they do not


class DraftingAhead:
    """Remembers what drafts made ahead were worth and cost lately."""

    def __init__(self) -> None:
        self._worth = DraftWorth()
        self._late_ms = 0.0  # a step's wait for what was not there in time
        self._slowdown = _Slowdown()
        self._num_steps = 0
        self._probe_every = _PROBE_EVERY

    def pays(self, price: StepPrice, num_requests: int) -> bool:
        """Whether drafts for so many requests bring more than they cost."""
        rate, verify_ms = price.usual_rate(num_requests), price.verify.ms(num_requests)
        lost = rate * (self._slowdown.value * verify_ms + self._late_ms)
        return self._gain(price, num_requests) * num_requests > max(_LEAST_GAIN * num_requests, lost)

    def is_due(self, *, pays: bool) -> bool:
        """Whether to draft ahead in this step; asked once a step. Now and then it is the other way round."""
        self._num_steps += 1
        if pays:
            self._probe_every = _PROBE_EVERY
            return self._num_steps % _PAUSE_EVERY != 0
        if self._num_steps < self._probe_every:
            return False
        self._num_steps, self._probe_every = 0, min(_RAREST_PROBE, 2 * self._probe_every)
        return True

    def patience_ms(self, price: StepPrice, num_requests: int) -> float:
        """How long to wait for late ones: for what they bring, at the rate at which verifications bring tokens."""
        return min(_PATIENCE, self._gain(price, num_requests)) * price.verify.ms(num_requests)

    def learn_forward(self, verify: ForwardCosts, num_rows: int, ms: float, *, beside_drafts: bool) -> None:
        """A forward of the LLM over so many rows took so long, while SSMs were at work or not."""
        self._slowdown.observe(verify, num_rows, max(ms, _LEAST_MS), beside_drafts=beside_drafts)

    def learn_drafts(
        self, forest: Forest, path_p: Probabilities, drafted: NDArray[np.bool_], num_asked: int, late_ms: float
    ) -> None:
        """SSMs were asked for so many requests' drafts, for which the step waited.

        drafted: bool [R], where some is left of what they made.
        """
        self._worth.observe(forest, path_p, drafted, num_asked, DEEPEST)
        if num_asked:
            self._late_ms += _NEW * (late_ms - self._late_ms)

    def _gain(self, price: StepPrice, num_requests: int) -> float:
        """Tokens a request and step, less what their rows' time brings elsewhere."""
        rate = price.usual_rate(num_requests)
        return float(self._worth.gains(price, rate, num_requests, num_requests, DEEPEST)[-1]) / num_requests


class _Slowdown:
    """How much longer the LLM takes beside drafts, as a part of what it takes alone: `value`.

    Known from where one follows the other, in the same minute: a machine that is slow for a while slows both.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._latest: deque[tuple[int, float]] = deque(maxlen=_NUM_BEFORE)  # all beside drafts, or all alone
        self._is_beside = False
        self._changes: deque[float] = deque(maxlen=_NUM_CHANGES)

    def observe(self, verify: ForwardCosts, num_rows: int, ms: float, *, beside_drafts: bool) -> None:
        """Each forward by what its rows are taken to cost by now, however little was known of that then."""
        if beside_drafts != self._is_beside:
            if self._latest:
                before = median(_pace(verify, *forward) for forward in self._latest)
                change = _pace(verify, num_rows, ms) / before
                self._changes.append(change if beside_drafts else 1.0 / change)
                self.value = max(0.0, median(self._changes) - 1.0)
            self._latest.clear()
            self._is_beside = beside_drafts
        self._latest.append((num_rows, ms))


def _pace(verify: ForwardCosts, num_rows: int, ms: float) -> float:
    return ms / max(verify.ms(num_rows), _LEAST_MS)
