"""Which candidates of a step are worth their verification: as many as give the most tokens per ms.

Knows probabilities, bounds and prices; must not know where they come from. Pure.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.costs import ForwardCosts
from treecore.forest import Forest, Places, num_equal_before

Probabilities = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a choice must keep to. max_nodes (root included) and max_depth: of each tree, for all or int [R].

    max_rows: of the whole message, roots and other rows included.
    """

    max_nodes: int | NDArray[np.int64]
    max_depth: int | NDArray[np.int64]
    max_rows: int


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step costs: the verifier's forward over all rows, and `fixed_ms` whatever is chosen (bus, drafting, ...).

    Other rows (prompts, static trees) share the forward, and yield other tokens.
    """

    verify: ForwardCosts
    fixed_ms: float
    num_other_rows: int = 0
    num_other_tokens: float = 0.0

    def plain_rate(self, num_requests: int) -> float:
        """Tokens per ms of this step if it verifies roots alone."""
        ms = self.fixed_ms + self.verify.ms(num_requests + self.num_other_rows)
        return (num_requests + self.num_other_tokens) / ms

    def usual_rate(self, num_requests: int) -> float:
        """Tokens per ms of verifying roots alone once all prompts are read: what time is worth, now and then."""
        num_roots = num_requests + min(self.num_other_rows, round(self.num_other_tokens))
        return num_roots / (self.fixed_ms + self.verify.ms(num_roots))


@dataclass(frozen=True, slots=True)
class Choice:
    """kept: bool [M], all roots and what is verified below them; the rows, tokens and ms that the step should have."""

    kept: NDArray[np.bool_]
    num_rows: int
    num_tokens: float
    ms: float


def choose(forest: Forest, path_p: Probabilities, bounds: Bounds, price: StepPrice) -> Choice:
    """The nodes that make (tokens expected) / (ms) largest within the bounds; with a node always its ancestors.

    path_p: fp64 [M], chance that the LLM's path goes through a node: 1 for roots, never more than the parent's. Of all
    sets of n nodes the n most likely bring most, and parents stand before children there, also among equals, because
    the sort is stable. So one pass over n finds the best set there is; 0 nodes may well be it.
    """
    R = forest.num_requests
    if len(forest) == R:
        return _roots_alone(R, price)
    order = _most_likely(forest, path_p, bounds, max(0, bounds.max_rows - R - price.num_other_rows))
    rows = R + price.num_other_rows + np.arange(len(order) + 1)
    tokens = R + price.num_other_tokens + np.concatenate([[0.0], np.cumsum(path_p[order])])
    ms = price.fixed_ms + price.verify.ms(rows)
    best = int(np.argmax(tokens / ms))
    kept = np.zeros(len(forest), np.bool_)
    kept[:R] = True
    kept[order[:best]] = True
    return Choice(kept, int(rows[best]), float(tokens[best]), float(ms[best]))


def _roots_alone(num_requests: int, price: StepPrice) -> Choice:
    num_rows = num_requests + price.num_other_rows
    ms = price.fixed_ms + price.verify.ms(num_rows)
    return Choice(np.ones(num_requests, np.bool_), num_rows, num_requests + price.num_other_tokens, ms)


def _most_likely(forest: Forest, path_p: Probabilities, bounds: Bounds, count: int) -> Places:
    """The `count` most likely candidates within the bounds of their trees, the most likely first."""
    R = forest.num_requests
    max_depth, most = (np.broadcast_to(bound, R) for bound in (bounds.max_depth, np.subtract(bounds.max_nodes, 1)))
    nodes = R + np.flatnonzero(forest.depths[R:] <= max_depth[forest.requests[R:]])
    is_free = (np.bincount(forest.requests[nodes], minlength=R) <= most).all()
    if is_free and 0 < count < len(nodes):  # sort only those as likely as the last that there is room for
        nodes = nodes[path_p[nodes] >= -np.partition(-path_p[nodes], count - 1)[count - 1]]
    order = nodes[np.argsort(-path_p[nodes], kind="stable")]
    if not is_free:
        order = order[num_equal_before(forest.requests[order]) < most[forest.requests[order]]]
    return order[:count]
