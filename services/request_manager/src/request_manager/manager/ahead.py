"""Whether drafting while the LLM verifies pays: what it brings, against how far it slows the LLM down.

Where SSMs have cores or devices of their own it costs nothing; where they share the LLM's, each row takes it longer.
Must not know requests or links. Mutable: one owner.
"""

from collections import deque
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.costs import ForwardCosts
from treecore.draft_worth import DEEPEST, DraftWorth
from treecore.forest import Forest

_LEAST_GAIN = 0.03  # tokens a request and step, wherever the drafts may come from
_WINDOW = 64  # forwards that are remembered
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
        self._forwards = {beside: deque[tuple[int, float]](maxlen=_WINDOW) for beside in (True, False)}
        self._slowdown = 0.0  # of the LLM, beside drafts
        self._num_steps = 0
        self._probe_every = _PROBE_EVERY

    def pays(self, price: StepPrice, num_requests: int) -> bool:
        """Whether drafts for so many requests bring more than they cost."""
        rate, verify_ms = price.usual_rate(num_requests), price.verify.ms(num_requests)
        lost = rate * (self._slowdown * verify_ms + self._late_ms)
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
        self._forwards[beside_drafts].append((num_rows, max(ms, _LEAST_MS)))
        if all(self._forwards.values()):
            beside, alone = (_pace(verify, self._forwards[beside]) for beside in (True, False))
            self._slowdown = max(0.0, beside / alone - 1.0)

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


def _pace(verify: ForwardCosts, forwards: Collection[tuple[int, float]]) -> float:
    """What these took over what they are taken to cost by now, however little was known of that then."""
    rows, ms = np.array(forwards).T
    return float(np.median(ms / np.maximum(verify.ms(rows.astype(np.int64)), _LEAST_MS)))
