"""What drafts are worth: how likely their best nodes have been, whatever they cost.

Knows probabilities by depth and prices; must not know requests, workers or tokens. Mutable: one owner.
"""

import numpy as np
from numpy.typing import NDArray

from treecore.choice import Probabilities, StepPrice
from treecore.forest import USUAL_RATES, Forest, num_equal_before

DEEPEST = 16
"""Drafts are looked at down to this depth."""

_WIDEST = len(USUAL_RATES)
_NEW = 0.1  # weight of the latest draft
_FALL = 0.6  # from depth to depth, before any draft


class DraftWorth:
    """Remembers, by depth, how likely the best nodes of recent drafts were.

    A draft of D forwards brings nodes of depth <= D as likely as those, and a step keeps those that are worth it. That
    is a matter of the step's price, and so it holds for a batch of any size.
    """

    def __init__(self) -> None:
        self._likely = np.multiply.outer(_FALL ** np.arange(DEEPEST), USUAL_RATES)  # [depth - 1, place]: mean path_p

    def observe(
        self, forest: Forest, path_p: Probabilities, drafted: NDArray[np.bool_], num_asked: int, num_levels: int
    ) -> None:
        """All candidates of a step. drafted: bool [R], whose count; of num_asked requests the others came to nothing.

        num_levels: how deep they could have been; nothing is said of what lies deeper.
        """
        R, num_levels = forest.num_requests, min(num_levels, DEEPEST)
        order = R + np.argsort(-path_p[R:], kind="stable")
        order = order[drafted[forest.requests[order]] & (forest.depths[order] <= num_levels)]
        places = num_equal_before(forest.requests[order] * (num_levels + 1) + forest.depths[order])
        order, places = order[places < _WIDEST], places[places < _WIDEST]
        seen = np.zeros((num_levels, _WIDEST))
        np.add.at(seen, (forest.depths[order] - 1, places), path_p[order])
        seen /= num_asked
        self._likely[:num_levels] += _NEW * (seen - self._likely[:num_levels])

    def gains(
        self, price: StepPrice, rate: float, num_requests: int, num_drafted: int, max_depth: int, max_nodes: int
    ) -> NDArray[np.float64]:
        """Tokens that drafts of 0, 1, .. max_depth forwards bring a step, less what their rows' time brings elsewhere.

        rate: of that, in tokens per ms. num_drafted of num_requests have drafts, of max_nodes at most (the root
        included).
        """
        most = min(max_depth, DEEPEST)
        within = np.repeat(np.tri(most + 1, most, -1), _WIDEST, axis=1)  # [forwards, node]: 1 where a draft has it
        likely = -np.sort(-within * self._likely[:most].ravel(), axis=1)[:, : max_nodes - 1]
        tokens = num_drafted * np.cumsum(np.pad(likely, ((0, 0), (1, 0))), axis=1)
        rows = num_requests + price.num_other_rows + num_drafted * np.arange(tokens.shape[1])
        verify_ms = price.verify.ms(rows)
        found: NDArray[np.float64] = (tokens - rate * (verify_ms - verify_ms[0])).max(axis=1)
        return found
