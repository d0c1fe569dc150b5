"""Several trees become one (SpecInfer, Definition 3.2): the union of their root-to-node sequences.

Nothing is lost, nothing is added; equal sequences become one node that keeps every try.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from treecore.child_laws import ChildLaw
from treecore.tree import TokenTree, Try


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The merged tree of `trees` (at least one), which share their root token.

    Siblings keep the order in which they were first proposed. Where one SSM drew the same sequence twice, the children
    that it drew behind the first count: those behind the second came from the same noise, and are no further draws.
    """
    if len(trees) == 1 and _siblings_differ(trees[0]):
        return trees[0]
    roots = {int(tree.tokens[0]) for tree in trees}
    assert len(roots) == 1, f"trees of different roots: {roots}"
    union = _Union([roots.pop()])
    for tree in trees:
        union.add(tree)
    return union.tree()


def prune(tree: TokenTree, max_nodes: int, max_depth: int) -> TokenTree:
    """The nodes of depth <= `max_depth`, breadth first, at most `max_nodes` with the root; ancestors always stay.

    Nodes keep their order. Levels are kept whole from the top, so each kept node's parent is kept. Where children are
    draws, what is cut are tries, the last of the last level first, and nodes without a try; there, a token that was
    drawn twice counts twice, because a draw that is kept for its value is no draw any more.
    """
    if tree.laws:
        return _prune_tries(tree, max_nodes, max_depth)
    order = np.argsort(tree.depths, kind="stable")
    order = np.sort(order[tree.depths[order] <= max_depth][:max_nodes])
    if len(order) == len(tree):
        return tree
    tries = [tree.tries[node] for node in order.tolist()]
    return TokenTree(tree.tokens[order], _renumbered(tree, order)[tree.parents[order]], tuple(tries))


@dataclass(slots=True)
class _Union:
    """A tree in the making."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    tries: list[tuple[Try, ...]] = field(default_factory=lambda: [()])
    laws: dict[tuple[int, int], ChildLaw] = field(default_factory=dict)
    index: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node, in the order of nodes

    def add(self, tree: TokenTree) -> None:
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        placed = self._place(tokens, parents)
        repeated = self._take_laws(tree, placed)
        tries = tree.tries
        if repeated:
            tries = tuple(
                tuple(proposal for proposal in own if (parent, proposal.ssm_idx) not in repeated)
                for parent, own in zip(parents, tries, strict=True)
            )
        for node, own in zip(placed, tries, strict=True):
            self.tries[node] += own

    def tree(self) -> TokenTree:
        return TokenTree(
            np.array(self.tokens, np.int32), np.array(self.parents, np.int32), tuple(self.tries), self.laws
        )

    def _place(self, tokens: list[int], parents: list[int]) -> list[int]:
        """Which node of the union each node is."""
        placed, index, first = [0], self.index, len(self.tokens)
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            placed.append(index.setdefault((placed[parent], token), len(index) + 1))
        for parent, token in islice(index, first - 1, None):
            self.parents.append(parent)
            self.tokens.append(token)
        self.tries += [()] * (len(self.tokens) - first)
        return placed

    def _take_laws(self, tree: TokenTree, placed: list[int]) -> set[tuple[int, int]]:
        """The (node, SSM) pairs of `tree` whose draws the union has already."""
        repeated = set()
        for (node, ssm_idx), law in tree.laws.items():
            if self.laws.setdefault((placed[node], ssm_idx), law) is not law:
                repeated.add((node, ssm_idx))
        return repeated


def _prune_tries(tree: TokenTree, max_nodes: int, max_depth: int) -> TokenTree:
    """What stays at a level follows from the levels above it alone, never from the tokens drawn there."""
    if max(sum(map(len, tree.tries)), len(tree) - 1) < max_nodes and int(tree.depths.max()) <= max_depth:
        return tree
    kept: dict[int, tuple[Try, ...]] = {0: ()}
    level = [0]
    for _ in range(min(max_depth, int(tree.depths.max()))):
        proposals = [pair for node in level for pair in tree.tries_at(node)][: max_nodes - len(kept)]
        level = sorted({child for _, child in proposals})
        kept |= dict.fromkeys(level, ())
        for proposal, child in proposals:
            kept[child] += (proposal,)
    return _subtree(tree, dict(sorted(kept.items())))


def _subtree(tree: TokenTree, tries: dict[int, tuple[Try, ...]]) -> TokenTree:
    """The nodes (ascending) and tries given; laws without a try are left out."""
    order = np.fromiter(tries, np.intp, len(tries))
    renumbered = _renumbered(tree, order)
    parents = tree.parents[order]
    drawn = {
        (parent, proposal.ssm_idx)
        for parent, kept in zip(parents.tolist(), tries.values(), strict=True)
        for proposal in kept
    }
    laws = {(int(renumbered[node]), ssm_idx): tree.laws[node, ssm_idx] for node, ssm_idx in tree.laws.keys() & drawn}
    return TokenTree(tree.tokens[order], renumbered[parents], tuple(tries.values()), laws)


def _renumbered(tree: TokenTree, order: NDArray[np.intp]) -> NDArray[np.int32]:
    """By node of `tree`, its place in `order`; -1 for the others and, at the end, for the parent of the root."""
    places = np.full(len(tree) + 1, -1, np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _siblings_differ(tree: TokenTree) -> bool:
    return len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree)
