"""A token tree while an SSM grows it: level by level (SpecInfer, section 3) or best first, and what stays of it later.

Pure: knows tokens, scores and plans. Must not know models or caches; which children a node gets is in treecore.sprout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treecore.child_laws import ChildLaw
from treecore.errors import WireError
from treecore.expand import MAX_WORKER_NODES, Expansion, Growth, num_nodes
from treecore.messages import DraftedItem, DraftItem
from treecore.sprout import Children, pack_laws


@dataclass(slots=True)
class Sapling:
    """Node 0 is the root, node i is `tokens[i - 1]` behind `parents[i - 1]`, a smaller number. Siblings differ.

    paths: each node's tokens below the root. inner: the nodes that were given children (perhaps none), in that order;
    a cache that holds their rows numbers them so. scores: as DraftedItem tells them; totals: their sums along each
    path. Both are told of trees that grow best first alone.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0])
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    laws: dict[int, ChildLaw] = field(default_factory=dict)
    inner: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.paths)

    def sprout(self, nodes: Sequence[int], families: Sequence[Children]) -> None:
        """Give each of `nodes` its children."""
        for node, children in zip(nodes, families, strict=True):
            scores = children.scores
            self._add(
                node, children.tokens.tolist(), [0.0] * len(children.tokens) if scores is None else scores.tolist()
            )
            if children.law is not None and len(children.tokens):
                self.laws[node] = children.law
        self.inner += nodes

    def _add(self, parent: int, tokens: list[int], scores: list[float]) -> None:
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.scores += scores
        self.totals += [self.totals[parent] + score for score in scores]
        self.paths += [(*self.paths[parent], token) for token in tokens]

    def inner_below(self, path: Sequence[int]) -> list[int]:
        """Places in `inner` of the node that `path` leads to, first, and of those below it; none if it is not inner."""
        return [place for place, node in enumerate(self.inner) if self.paths[node][: len(path)] == tuple(path)]

    def below(self, places: Sequence[int]) -> "Sapling":
        """The subtree whose inner nodes are those at `places`, its root first; of no places: a root alone."""
        kept = Sapling()
        renumbered = {self.inner[place]: 0 for place in places[:1]}
        inner = {self.inner[place] for place in places}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            if parent in inner:
                renumbered[node] = len(kept)
                kept._add(renumbered[parent], [token], [self.scores[node - 1]])
        kept.inner = [renumbered[self.inner[place]] for place in places]
        return kept

    def drafted(self, item: DraftItem) -> DraftedItem:
        """The tree as it answers `item`."""
        told = self._told(item.growth)
        places = np.zeros(len(self), np.int32)
        places[told] = np.arange(1, len(told) + 1)
        tokens = np.array(self.tokens, np.int32)[told - 1]
        parents = places[np.array(self.parents, np.intp)[told - 1]]
        scores = None if item.growth is None else np.array(self.scores, np.float32)[told - 1]
        return DraftedItem(item.request_id, item.step, tokens, parents, pack_laws(self.laws), scores)

    def _told(self, growth: Growth | None) -> NDArray[np.intp]:
        """All nodes below the root, or the most likely, best first: no node stands before its ancestors."""
        if growth is None:
            return np.arange(1, len(self))
        return np.argsort(-np.array(self.totals[1:]), kind="stable")[: growth.max_nodes] + 1


def check_item(item: DraftItem, vocab_size: int, context_len: int) -> None:
    """Raises WireError for what no worker of these sizes could draft. Inner nodes need a position, leaves none."""
    tokens, expansion = item.tokens, item.expansion
    if len(tokens) == 0 or item.start < 0 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise WireError("tokens outside the vocabulary")
    if any(width < 1 for width in expansion) or num_nodes(expansion) > MAX_WORKER_NODES:
        raise WireError("a level without children, or too many of them")
    if item.start + len(tokens) + max(0, len(expansion) - 1) > context_len:
        raise WireError("a tree beyond the model's context")
    if item.growth is not None and expansion:
        raise WireError("a tree that grows best first, and by an expansion")


class Plan(Protocol):
    """How a sapling grows."""

    width: int

    def next_nodes(self, sapling: Sapling) -> list[int]:
        """The nodes that get up to `width` children each now; none: the tree is complete. Called once a round."""


def plan_of(item: DraftItem, sapling: Sapling, context_len: int) -> Plan:
    """How `sapling` grows to answer `item`; a node that grows needs a position."""
    if item.growth is None:
        return LevelByLevel(item.expansion)
    return BestFirst(item.growth, sapling, context_len - item.start - len(item.tokens))


class LevelByLevel:
    """A static expansion <k1..km>."""

    def __init__(self, expansion: Expansion) -> None:
        self._widths = list(reversed(expansion))
        self._first = 0

    def next_nodes(self, sapling: Sapling) -> list[int]:
        """See Plan."""
        if not self._widths:
            return []
        self.width = self._widths.pop()
        level = range(self._first, len(sapling))
        self._first = len(sapling)
        return list(level)


class BestFirst:
    """A growth, see there. Nodes at `max_depth` stay leaves, and so do those too unlikely to change what is told."""

    def __init__(self, growth: Growth, sapling: Sapling, max_depth: int) -> None:
        self.width = growth.num_children
        self._growth = growth
        self._max_depth = max_depth
        self._num_rounds = 0
        self._num_seen = 0
        self._inner = set(sapling.inner)
        self._leaves: list[tuple[float, int]] = []  # a heap of (-total, node)

    def next_nodes(self, sapling: Sapling) -> list[int]:
        """See Plan."""
        if self._num_rounds == self._growth.num_forwards:
            return []
        self._num_rounds += 1
        self._see(sapling)
        num_nodes = min(self._growth.width, (MAX_WORKER_NODES - len(sapling)) // self.width)
        least = self._least_told(sapling)
        nodes: list[int] = []
        while self._leaves and len(nodes) < num_nodes and -self._leaves[0][0] >= least:
            nodes.append(heappop(self._leaves)[1])
        return nodes

    def _see(self, sapling: Sapling) -> None:
        for node in range(self._num_seen, len(sapling)):
            if node not in self._inner and len(sapling.paths[node]) <= self._max_depth:
                heappush(self._leaves, (-sapling.totals[node], node))
        self._num_seen = len(sapling)

    def _least_told(self, sapling: Sapling) -> float:
        """The total of the last node that would be told now: children of a less likely one are not told either."""
        max_nodes = self._growth.max_nodes
        if len(sapling) - 1 <= max_nodes:
            return -np.inf
        return float(np.partition(sapling.totals[1:], -max_nodes)[-max_nodes])
