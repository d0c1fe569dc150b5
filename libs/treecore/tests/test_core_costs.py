"""Costs of forwards follow what is seen, and the choice of nodes is the best there is for its objective."""

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.choice import Bounds, StepPrice, choose
from treecore.costs import ForwardCosts, Typical
from treecore.forest import Forest, ScoredDraft, merge_drafts
from treecore.messages import ForwardCost

ANNOUNCED = [ForwardCost(1, 10.0), ForwardCost(8, 12.0), ForwardCost(16, 20.0)]


def announced_ms(num_rows: float) -> float:
    """What ANNOUNCED says, by hand."""
    return 10 + (num_rows - 1) * 2 / 7 if num_rows <= 8 else 12 + (num_rows - 8)


# -- costs -----------------------------------------------------------------------------------------------------------


def test_announced_points_are_joined_by_lines() -> None:
    """Between points as between, beyond the last as the last line; scalars and arrays alike."""
    costs = ForwardCosts(ANNOUNCED)
    for num_rows in (1, 4, 8, 12, 16, 40):
        assert costs.ms(num_rows) == pytest.approx(announced_ms(num_rows))
    assert costs.ms(np.array([1, 40])) == pytest.approx([10.0, 44.0])


def test_more_rows_never_cost_less() -> None:
    """Noise in the measured points is not believed."""
    costs = ForwardCosts([ForwardCost(1, 10.0), ForwardCost(2, 7.0), ForwardCost(4, 12.0)])
    assert np.all(np.diff(costs.ms(np.arange(1, 20))) >= 0)


def observe(costs: ForwardCosts, level: float, slope: float, seed: int, count: int = 64) -> None:
    """Forwards of a machine `level` times as slow as announced and `slope` ms more a row, a sixth of them stalled."""
    rng = np.random.default_rng(seed)
    for num_rows in rng.integers(1, 30, count).tolist():
        stall = rng.uniform(2, 30) if rng.random() < 1 / 6 else 1.0
        costs.observe(num_rows, (level * announced_ms(num_rows) + slope * num_rows) * rng.normal(1.0, 0.03) * stall)


@pytest.mark.parametrize("seed", range(5))
def test_a_drift_is_followed_and_stalls_are_not(seed: int) -> None:
    """Whatever the level was, 64 forwards later the estimate is within a twentieth, a sixth of them stalled or not."""
    costs = ForwardCosts(ANNOUNCED)
    for level, slope in ((1.0, 0.0), (3.0, 0.0), (0.4, 0.5)):
        observe(costs, level, slope, seed)
        for num_rows in (2, 8, 20):
            expected = level * announced_ms(num_rows) + slope * num_rows
            assert costs.ms(num_rows) == pytest.approx(expected, rel=0.05)


def test_a_stall_at_the_very_start_is_not_believed() -> None:
    """The first forward of a process is often slow."""
    costs = ForwardCosts(ANNOUNCED)
    costs.observe(4, 40 * announced_ms(4))
    assert costs.ms(4) < 1.5 * announced_ms(4)


def test_a_level_seen_at_one_size_holds_for_all() -> None:
    """A batch that never changes says how slow the machine is, not that rows became dear."""
    costs = ForwardCosts(ANNOUNCED)
    for _ in range(64):
        costs.observe(5, 2 * announced_ms(5))
    assert costs.ms(16) == pytest.approx(2 * announced_ms(16), rel=0.1)


def test_costs_are_learned_where_none_were_announced() -> None:
    """From observations alone: a line through what was seen."""
    costs = ForwardCosts()
    for num_rows in [1, 2, 9, 30] * 10:
        costs.observe(num_rows, 8.0 + 0.5 * num_rows)
    assert costs.ms(np.array([1, 20, 60])) == pytest.approx([8.5, 18.0, 38.0], rel=0.03)


odd_ms = st.floats(-1.0, 1e4) | st.sampled_from([-1e308, 5e-324, 1e300, 1.7e308])


@given(
    st.lists(st.tuples(st.integers(1, 400), odd_ms), max_size=20),
    st.dictionaries(st.integers(1, 10**6), odd_ms.filter(lambda ms: ms > 0), max_size=4),
)
def test_costs_stay_costs(seen: list[tuple[int, float]], announced: dict[int, float]) -> None:
    """Whatever is announced and observed: positive, finite, and never less for more rows."""
    costs = ForwardCosts([ForwardCost(*point) for point in sorted(announced.items())])
    for num_rows, ms in seen:
        costs.observe(num_rows, ms)
    found = costs.ms(np.arange(1, 100))
    assert np.all(np.isfinite(found))
    assert np.all(found > 0)
    assert np.all(np.diff(found) >= 0)


def test_a_typical_time_ignores_stalls_and_follows_changes() -> None:
    """The median of what was seen lately."""
    other = Typical(5.0)
    assert other.value == 5.0
    for ms in [1.0, 1.1, 0.9, 100.0] * 5:
        other.observe(ms)
    assert other.value == pytest.approx(1.05)
    for _ in range(64):
        other.observe(2.0)
    assert other.value == 2.0


# -- choice ----------------------------------------------------------------------------------------------------------


@st.composite
def priced(draw: st.DrawFn) -> tuple[Forest, np.ndarray]:
    """A small forest and falling path probabilities, often equal ones."""
    batch = []
    for _ in range(draw(st.integers(1, 3))):
        parents = [draw(st.integers(0, idx)) for idx in range(draw(st.integers(0, 4)))]
        batch.append([ScoredDraft(0, np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32))])
    forest = merge_drafts([0] * len(batch), batch)
    path_p = np.ones(len(forest))
    for node in range(forest.num_requests, len(forest)):
        path_p[node] = path_p[forest.parents[node]] * draw(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0]))
    return forest, path_p


def closed_sets(forest: Forest) -> list[tuple[int, ...]]:
    """All sets of candidates that hold each node's parent."""
    R = forest.num_requests
    nodes = range(R, len(forest))
    every = chain.from_iterable(combinations(nodes, size) for size in range(len(nodes) + 1))
    return [
        found for found in every if all(forest.parents[node] < R or forest.parents[node] in found for node in found)
    ]


@given(priced(), st.integers(1, 5), st.integers(0, 4), st.integers(1, 14), st.floats(0, 50), st.integers(0, 3))
def test_the_choice_is_the_best_closed_set_within_bounds(
    case: tuple[Forest, np.ndarray], max_nodes: int, max_depth: int, max_rows: int, fixed_ms: float, num_other: int
) -> None:
    """Against brute force over all sets: no bound is passed, ancestors stay, and no set has more tokens per ms."""
    forest, path_p = case
    R = forest.num_requests
    costs = ForwardCosts(ANNOUNCED)
    price = StepPrice(costs, fixed_ms, num_other, 0.5 * num_other)

    def rate(nodes: tuple[int, ...]) -> float:
        rows = R + num_other + len(nodes)
        return (R + 0.5 * num_other + path_p[list(nodes)].sum()) / (fixed_ms + announced_ms(rows))

    def fits(nodes: tuple[int, ...]) -> bool:
        sizes = np.bincount(forest.requests[list(nodes)].astype(int), minlength=R)
        deepest = max((int(forest.depths[node]) for node in nodes), default=0)
        within = R + num_other + len(nodes) <= max_rows or not nodes
        return bool(np.all(sizes < max_nodes)) and deepest <= max_depth and within

    choice = choose(forest, path_p, Bounds(max_nodes, np.full(R, max_depth), max_rows), price)
    kept = tuple((np.flatnonzero(choice.kept[R:]) + R).tolist())
    assert np.all(choice.kept[:R])
    allowed = [nodes for nodes in closed_sets(forest) if fits(nodes)]
    assert kept in allowed
    assert rate(kept) == pytest.approx(max(map(rate, allowed)))
    assert choice.num_rows == R + num_other + len(kept)
    assert choice.num_tokens / choice.ms == pytest.approx(rate(kept))
    forest.trees(choice.kept)


def test_no_node_is_worth_it_under_load() -> None:
    """Where a row costs more than its chance brings, the roots are verified alone."""
    draft = ScoredDraft(0, np.array([1], np.int32), np.array([0], np.int32))
    forest = merge_drafts([0] * 8, [[draft]] * 8)
    dear = StepPrice(ForwardCosts([ForwardCost(1, 1.0), ForwardCost(2, 2.0)]), 0.0)
    assert choose(forest, np.where(forest.depths == 0, 1.0, 0.9), Bounds(9, 9, 99), dear).kept.sum() == 8


def test_ancestors_are_kept_among_many_equals() -> None:
    """Where a whole batch is equally likely and the rows run out in its midst, trees are still trees."""
    chain_of = np.arange(64, dtype=np.int32)
    forest = merge_drafts([0] * 8, [[ScoredDraft(0, chain_of, chain_of)]] * 8)
    free = StepPrice(ForwardCosts([ForwardCost(1, 10.0)]), 0.0)
    for max_rows in (100, 300, 9999):
        path_p = 0.5 ** (forest.depths // 20)
        choice = choose(forest, path_p, Bounds(999, 60, max_rows), free)
        assert choice.num_rows == min(max_rows, 8 * 61)
        assert sum(map(len, forest.trees(choice.kept))) == choice.num_rows


def test_bounds_may_differ_by_request() -> None:
    """A request near its end, or with a small tree, does not bind the others."""
    draft = ScoredDraft(0, np.array([1, 2, 3], np.int32), np.array([0, 1, 2], np.int32))
    forest = merge_drafts([0, 0, 0], [[draft]] * 3)
    free = StepPrice(ForwardCosts([ForwardCost(1, 10.0)]), 0.0)
    choice = choose(forest, np.full(len(forest), 1.0), Bounds(np.array([9, 2, 9]), np.array([1, 9, 9]), 99), free)
    assert [len(tree) for tree in forest.trees(choice.kept)] == [2, 2, 4]
