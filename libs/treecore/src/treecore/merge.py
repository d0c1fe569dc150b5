"""Several trees become one (SpecInfer, Definition 3.2): the union of their root-to-node sequences.

Nothing is lost, nothing is added; equal sequences become one node that keeps every try.
"""

from collections.abc import Sequence

import numpy as np

from treecore.tree import TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """The merged tree of `trees` (at least one), which share their root token.

    Siblings keep the order in which they were first proposed.
    """
    if len(trees) == 1 and _siblings_differ(trees[0]):
        return trees[0]
    roots = {int(tree.tokens[0]) for tree in trees}
    assert len(roots) == 1, f"trees of different roots: {roots}"
    index: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, tries = [roots.pop()], [-1], [()]  # type: tuple[list[int], list[int], list[tuple[int, ...]]]
    for tree in trees:
        placed = [0] * len(tree)
        for node in range(1, len(tree)):
            key = (placed[tree.parents[node]], int(tree.tokens[node]))
            if key not in index:
                index[key] = len(tokens)
                tokens.append(key[1])
                parents.append(key[0])
                tries.append(())
            placed[node] = index[key]
            tries[placed[node]] += tree.tries[node]
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), tuple(tries))


def prune(tree: TokenTree, max_nodes: int, max_depth: int) -> TokenTree:
    """The nodes of depth <= `max_depth`, breadth first, at most `max_nodes` with the root; ancestors always stay.

    Nodes keep their order. Levels are kept whole from the top, so each kept node's parent is kept.
    """
    order = np.argsort(tree.depths, kind="stable")
    order = np.sort(order[tree.depths[order] <= max_depth][:max_nodes])
    if len(order) == len(tree):
        return tree
    renumbered = np.full(len(tree), -1, np.int32)
    renumbered[order] = np.arange(len(order), dtype=np.int32)
    parents = np.where(tree.parents[order] >= 0, renumbered[tree.parents[order]], -1).astype(np.int32)
    return TokenTree(tree.tokens[order], parents, tuple(tree.tries[node] for node in order))


def _siblings_differ(tree: TokenTree) -> bool:
    return len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree)
