"""The best static tree for measured acceptance rates (Sequoia, arXiv 2402.12374, section 3.1), by dynamic programme.

Knows rates by depth and rank; must not know SSMs, scores or requests. Pure.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from treecore.expand import NO_DRAFT, Expansion
from treecore.forest import Ints

Rates = Sequence[Sequence[float]]
"""By depth (the root's children first) and rank: chance that the LLM takes the child when it is at the parent."""

_Values = NDArray[np.float64]
_Table = list[_Values]

_LEAST_RATE = 1e-12  # of a child that was never seen accepted: worth a node that would stay free, no other


def optimal_tree(rates: Rates, max_nodes: int) -> Ints:
    """The tree of at most `max_nodes` with the most expected tokens, as DraftedItem's parents: int32, level by level.

    The root counts as a node and is left out. Nodes go no deeper than `rates`, and a node has an n-th child only beside
    the n - 1 before it. With T(n) the tokens of the best subtree of n nodes, and F(r, m) those of the best children of
    ranks >= r with m nodes together: T(n) = 1 + F(0, n - 1) and F(r, m) = max_j p_r T_below(j) + F(r + 1, m - j).
    """
    tables: list[_Table] = []
    subtree = _just(1.0, max_nodes)  # at [n - 1] T(n), -inf where no such tree exists; here of the deepest level
    for by_rank in reversed(rates):
        tables.insert(0, _children_table(by_rank, subtree))
        subtree = 1.0 + tables[0][0]
    return _parents(tables, rates, int(np.argmax(subtree)))


def best_expansion(rates: Rates, max_nodes: int) -> Expansion:
    """The <k1..km> of at most `max_nodes` (the root included) with the most expected tokens."""

    @cache
    def best(depth: int, budget: int) -> tuple[float, tuple[int, ...]]:
        found: tuple[float, tuple[int, ...]] = (1.0, NO_DRAFT)
        if depth == len(rates):
            return found
        for width in range(1, min(len(rates[depth]), budget - 1) + 1):
            tokens, widths = best(depth + 1, (budget - 1) // width)
            found = max(found, (1.0 + sum(rates[depth][:width]) * tokens, (width, *widths)), key=lambda one: one[0])
        return found

    return Expansion(best(0, max_nodes)[1])


def expected_tokens(parents: Ints, rates: Rates) -> float:
    """Tokens that a step with this tree yields on average, the bonus token included. parents: as in DraftedItem."""
    reached, depths, num_children = [1.0], [0], [0]
    for parent in parents.tolist():
        reached.append(reached[parent] * rates[depths[parent]][num_children[parent]])
        depths.append(depths[parent] + 1)
        num_children[parent] += 1
        num_children.append(0)
    return sum(reached)


def _just(value: float, size: int) -> _Values:
    return np.concatenate([[value], np.full(size - 1, -np.inf)])


def _children_table(by_rank: Sequence[float], subtree: _Values) -> _Table:
    """F: by rank, then by the number of nodes; behind the last rank no node at all."""
    table = [_just(0.0, len(subtree))]
    for rate in reversed(by_rank):
        best = [0.0] + [_splits(rate, subtree, table[0], m).max() for m in range(1, len(subtree))]
        table.insert(0, np.array(best))
    return table


def _splits(rate: float, subtree: _Values, rest: _Values, m: int) -> _Values:
    """Of m nodes 1..m go to one child, the rest to its later siblings: tokens of each split."""
    tokens: _Values = max(rate, _LEAST_RATE) * subtree[:m] + rest[m - 1 :: -1]
    return tokens


def _parents(tables: list[_Table], rates: Rates, num_below: int) -> Ints:
    """Follow the best splits from the root, level by level."""
    parents: list[int] = []
    level = [(0, num_below)]  # (node, nodes below it)
    for table, by_rank, below in zip(tables, rates, [*tables[1:], None], strict=True):
        subtree = _just(1.0, len(table[0])) if below is None else 1.0 + below[0]
        deeper = []
        for node, num_left in level:
            left = num_left
            for rank, rate in enumerate(by_rank):
                if left == 0:
                    break
                size = 1 + int(np.argmax(_splits(rate, subtree, table[rank + 1], left)))
                parents.append(node)
                deeper.append((len(parents), size - 1))
                left -= size
        level = deeper
    return np.array(parents, np.int32)
