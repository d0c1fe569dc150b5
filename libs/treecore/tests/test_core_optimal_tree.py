"""Static trees for measured rates: Sequoia's dynamic programme and the best <k1..km>, against brute force."""

import heapq
from itertools import count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.expand import num_nodes
from treecore.optimal_tree import Rates, best_expansion, expected_tokens, optimal_tree

rates_of = st.integers(1, 3).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(0.0, 1.0 / width), min_size=width, max_size=width), min_size=1, max_size=3
    )
)


def all_trees(rates: Rates, max_nodes: int) -> list[list[int]]:
    """Every tree within depth, ranks and budget, nodes in the order of their making."""
    found, seen, todo = [], set(), [[]]  # type: tuple[list[list[int]], set[tuple[int, ...]], list[list[int]]]
    while todo:
        parents = todo.pop()
        if tuple(parents) in seen:
            continue
        seen.add(tuple(parents))
        found.append(parents)
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        for node in range(len(parents) + 1):
            fits = depths[node] < len(rates) and parents.count(node) < len(rates[depths[node]])
            if fits and len(parents) + 2 <= max_nodes and (not parents or node >= parents[-1]):
                todo.append([*parents, node])
    return found


@given(rates_of, st.integers(1, 7))
def test_no_tree_within_the_budget_has_more_tokens(rates: list[list[float]], max_nodes: int) -> None:
    """Also where a later rank is better than an earlier one, which best first cannot plan for."""
    parents = optimal_tree(rates, max_nodes)
    trees = all_trees(rates, max_nodes)
    assert parents.tolist() in trees
    most = max(expected_tokens(np.array(tree, np.int32), rates) for tree in trees)
    assert expected_tokens(parents, rates) == pytest.approx(most)


@given(rates_of, st.integers(1, 12))
def test_no_expansion_within_the_budget_has_more_tokens(rates: list[list[float]], max_nodes: int) -> None:
    """Against all <k1..km>."""

    def tokens(widths: tuple[int, ...]) -> float:
        total, reached = 1.0, 1.0
        for width, by_rank in zip(widths, rates, strict=False):
            reached *= sum(by_rank[:width])
            total += reached
        return total

    every = [
        widths
        for depth in range(len(rates) + 1)
        for widths in product(range(1, len(rates[0]) + 1), repeat=depth)
        if num_nodes(widths) <= max_nodes
    ]
    found = best_expansion(rates, max_nodes)
    assert found in every
    assert tokens(found) == pytest.approx(max(map(tokens, every)))


def test_expected_tokens_by_hand() -> None:
    """The root's token, two children, and one below the first: 1 + .5 + .2 + .5 * .4."""
    assert expected_tokens(np.array([0, 0, 1], np.int32), [[0.5, 0.2], [0.4]]) == pytest.approx(1.9)


def test_a_large_tree_is_the_best_first_one() -> None:
    """Where rates fall with the rank, the best n nodes are the n most likely: 64 nodes, 8 deep, 8 wide."""
    rates = [[0.48, 0.13, 0.065, 0.04, 0.035, 0.02, 0.015, 0.01]] * 8
    order = count()
    heap, total, num_taken = [(-1.0, next(order), 0)], 0.0, 0
    while num_taken < 64:
        reached, _, depth = heapq.heappop(heap)
        total -= reached
        num_taken += 1
        if depth < 8:
            for rate in rates[depth]:
                heapq.heappush(heap, (reached * rate, next(order), depth + 1))
    parents = optimal_tree(rates, 64)
    assert len(parents) == 63
    assert expected_tokens(parents, rates) == pytest.approx(total)
    widths = best_expansion(rates, 64)
    assert 1.0 < expected_tokens(optimal_tree(rates, num_nodes(widths)), rates) <= total
