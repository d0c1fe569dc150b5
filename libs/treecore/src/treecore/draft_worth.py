"""What drafts are worth: how many nodes of which likelihood they have had by depth, whatever they cost.

Knows probabilities by depth and prices; must not know requests, workers or tokens. Mutable: one owner.
"""

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.forest import USUAL_RATES, Forest

DEEPEST = 16
"""Drafts are looked at down to this depth."""

_EDGES = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.16, 0.13, 0.1, 0.08, 0.06, 0.04, 0.02])  # of path_p
_NUM_BINS = len(_EDGES) + 1  # the likeliest first
_NEW = 0.1  # weight of the latest draft; one says little
_NUM_BEFORE = 4.0  # drafts that the guess before any counts as much as
_HOPE = 0.5  # of what drafts are worth, over the root of how many were seen
_FADING = 0.003  # part of those that is forgotten in a step without
_FALL = 0.6  # from depth to depth, before any draft


class DraftWorth:
    """Remembers, by depth, how many nodes of which likelihood recent drafts had.

    A draft of D forwards brings nodes of depth <= D as likely as those, and a step keeps the likely ones, of all
    requests. How many is a matter of its price: what is remembered holds for a batch of any size. Where little was seen
    lately more is hoped for, by one standard error, so that a few poor drafts are not the end of drafting.
    """

    def __init__(self) -> None:
        self._nodes = np.zeros((DEEPEST, _NUM_BINS))  # of a draft
        self._tokens = np.zeros((DEEPEST, _NUM_BINS))  # that they are expected to become
        path_p = np.multiply.outer(_FALL ** np.arange(DEEPEST), USUAL_RATES)
        self._add(np.repeat(np.arange(DEEPEST), len(USUAL_RATES)), path_p.ravel(), 1.0)
        self._num_seen = _NUM_BEFORE

    def observe(
        self, forest: Forest, path_p: Probabilities, drafted: NDArray[np.bool_], num_asked: int, num_levels: int
    ) -> None:
        """All candidates of a step. drafted: bool [R], whose count; of num_asked requests the others came to nothing.

        num_levels: how deep they could have been; nothing is said of what lies deeper.
        """
        if not num_asked:
            self._num_seen *= 1.0 - _FADING
            return
        R, num_levels = forest.num_requests, min(num_levels, DEEPEST)
        new = 1.0 - (1.0 - max(_NEW, 1.0 / (1.0 + self._num_seen))) ** num_asked  # a batch says more than one request
        self._num_seen = min(self._num_seen + num_asked, 1.0 / _NEW)
        self._nodes[:num_levels] *= 1.0 - new
        self._tokens[:num_levels] *= 1.0 - new
        counted = R + np.flatnonzero(drafted[forest.requests[R:]] & (forest.depths[R:] <= num_levels))
        self._add(forest.depths[counted] - 1, path_p[counted], new / num_asked)

    def gains(
        self, price: StepPrice, rate: float, num_requests: int, num_drafted: int, max_depth: int
    ) -> NDArray[np.float64]:
        """Tokens that drafts of 0, 1, .. max_depth forwards bring a step, less what their rows' time brings elsewhere.

        rate: of that, in tokens per ms. num_drafted of num_requests have drafts.
        """
        depth = min(max_depth, DEEPEST)
        nodes, tokens = (np.zeros((depth + 1, _NUM_BINS + 1)) for _ in range(2))  # [forwards, of so many bins]
        for kept, own in ((nodes, self._nodes), (tokens, self._tokens)):
            kept[1:, 1:] = own[:depth].cumsum(axis=0).cumsum(axis=1)
        hope = 1.0 + _HOPE / np.sqrt(self._num_seen)
        verify_ms = price.verify.ms(num_requests + price.num_other_rows + num_drafted * nodes)
        gained: NDArray[np.float64] = (hope * num_drafted * tokens - rate * (verify_ms - verify_ms[0, 0])).max(axis=1)
        return gained

    def _add(self, levels: NDArray[np.int64], path_p: Probabilities, weight: float) -> None:
        """levels: depth - 1."""
        cells = levels * _NUM_BINS + _NUM_BINS - 1 - np.searchsorted(_EDGES[::-1], path_p)
        for table, values in ((self._nodes, None), (self._tokens, path_p)):
            table.ravel()[:] += weight * np.bincount(cells, values, table.size)
