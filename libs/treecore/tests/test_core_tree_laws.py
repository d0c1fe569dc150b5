"""Trees of draws: laws from the wire, tries that survive merging and pruning, supports; and degenerate trees."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.drafts import draw_children
from treecore.errors import WireError
from treecore.expand import num_nodes
from treecore.law import Distribution
from treecore.merge import merge, prune
from treecore.multi_step import supports_of
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.sparse import DraftLaws, Supports
from treecore.tree import TokenTree, Try

V = 6
COMMITTED_LEN = 9
Path = tuple[int, ...]
Wire = tuple[np.ndarray, np.ndarray, DraftLaws]


def law_behind(path: Path, ssm_idx: int, vocab_size: int = V) -> Distribution:
    """An SSM whose law depends on the whole path."""
    rng = np.random.default_rng([ssm_idx, 77, *path])
    return Distribution(np.arange(vocab_size, dtype=np.int32), rng.normal(size=vocab_size).astype(np.float32))


def drafted(widths: tuple[int, ...], rule: Rule, seed: int, ssm_idx: int, vocab_size: int = V) -> Wire:
    """What an SSM sends that grows every node, twins too."""
    params = SamplingParams(1.0, 0, 1.0, Seed(seed), rule=rule)
    tokens, parents, paths = [0], [-1], [()]  # type: tuple[list[int], list[int], list[Path]]
    inner = []
    for depth, width in enumerate(widths):
        for node in [node for node, path in enumerate(paths) if len(path) == depth]:
            law = law_behind(paths[node], ssm_idx, vocab_size)
            drawn = draw_children(law, width, params, COMMITTED_LEN + depth, ssm_idx)
            inner.append((node, drawn))
            for token in drawn.tokens.tolist():
                tokens.append(token)
                parents.append(node)
                paths.append((*paths[node], token))
    return np.array(tokens, np.int32), np.array(parents, np.int32), laws_of(inner) if inner else None


def laws_of(inner: list) -> DraftLaws:  # type: ignore[type-arg]
    """As it travels: (node, Drawn) pairs."""
    if not inner:
        none = np.empty(0, np.int32)
        return DraftLaws(Supports(none, none, none), np.empty(0, np.float32))
    nodes = np.array([node for node, _ in inner], np.int32)
    lengths = np.array([len(drawn.q) for _, drawn in inner], np.int32)
    ids = np.concatenate([drawn.token_ids for _, drawn in inner])
    return DraftLaws(Supports(nodes, lengths, ids), np.concatenate([drawn.q for _, drawn in inner]))


def tree_of(widths: tuple[int, ...], rule: Rule, seed: int, ssm_idx: int, vocab_size: int = V) -> TokenTree:
    """The same as the manager sees it."""
    tokens, parents, laws = drafted(widths, rule, seed, ssm_idx, vocab_size)
    return TokenTree.checked(tokens, parents, ssm_idx, laws)


def paths_of(tree: TokenTree) -> list[Path]:
    """Of each node."""
    return list(tree.paths())


def assert_law_of_each_try(tree: TokenTree) -> None:
    """Every try has its law, and the law has its token; every law has a try, and lies at its path."""
    paths = paths_of(tree)
    for node in range(len(tree)):
        for proposal, child in tree.tries_at(node):
            law = tree.laws[node, proposal.ssm_idx]
            assert int(tree.tokens[child]) in law.token_ids[law.q > 0.0]
    for (node, ssm_idx), law in tree.laws.items():
        assert any(proposal.ssm_idx == ssm_idx for proposal, _ in tree.tries_at(node))
        wanted = draw_children(law_behind(paths[node], ssm_idx), 0, SamplingParams(1.0, 0, 1.0, Seed(0)), 0, 0)
        np.testing.assert_array_equal(law.q, wanted.q)
        np.testing.assert_array_equal(law.token_ids, wanted.token_ids)


rules = st.sampled_from(["multi_step", "multi_step_iid"])
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
drafts = st.tuples(shapes, rules, st.integers(0, 2**16), st.integers(1, 3))


def trees_of(draft: tuple[tuple[int, ...], Rule, int, int]) -> list[TokenTree]:
    """One tree an SSM."""
    widths, rule, seed, num_ssms = draft
    return [tree_of(widths, rule, seed, ssm_idx) for ssm_idx in range(num_ssms)]


@given(drafts)
@settings(max_examples=60, deadline=None)
def test_merged_draws_are_the_draws_of_each_ssm(draft: tuple[tuple[int, ...], Rule, int, int]) -> None:
    """At each node the tries are, SSM by SSM, what that SSM draws behind this path: no more, no fewer, in order."""
    widths, rule, seed, _ = draft
    merged = merge(trees_of(draft))
    assert_law_of_each_try(merged)
    assert len(set(paths_of(merged))) == len(merged)
    params = SamplingParams(1.0, 0, 1.0, Seed(seed), rule=rule)
    for node, path in enumerate(paths_of(merged)):
        pairs = merged.tries_at(node)
        for ssm_idx in {proposal.ssm_idx for proposal, _ in pairs}:
            tokens = [int(merged.tokens[child]) for proposal, child in pairs if proposal.ssm_idx == ssm_idx]
            position = COMMITTED_LEN + len(path)
            drawn = draw_children(law_behind(path, ssm_idx), widths[len(path)], params, position, ssm_idx)
            assert tokens == drawn.tokens.tolist()
        assert pairs == sorted(pairs)


@given(drafts, st.integers(1, 40), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_pruned_tries_are_a_prefix(
    draft: tuple[tuple[int, ...], Rule, int, int], max_nodes: int, max_depth: int
) -> None:
    """Within both budgets; at each node the first tries stay; as many as the levels above leave room for."""
    merged = merge(trees_of(draft))
    pruned = prune(merged, max_nodes, max_depth)
    assert len(pruned) <= max_nodes
    assert int(pruned.depths.max()) <= max_depth
    assert_law_of_each_try(pruned)
    whole = {path: node for node, path in enumerate(paths_of(merged))}
    for node, path in enumerate(paths_of(pruned)):
        before = [(proposal, int(merged.tokens[child])) for proposal, child in merged.tries_at(whole[path])]
        after = [(proposal, int(pruned.tokens[child])) for proposal, child in pruned.tries_at(node)]
        assert after == before[: len(after)]
    for depth in range(min(max_depth, int(merged.depths.max()))):
        room = max_nodes - int((pruned.depths <= depth).sum())
        level = [whole[path] for path in paths_of(pruned) if len(path) == depth]
        proposed = sum(len(merged.tries_at(node)) for node in level)
        kept = sum(len(pruned.tries_at(node)) for node in range(len(pruned)) if pruned.depths[node] == depth)
        assert kept == min(room, proposed)


def test_a_token_drawn_twice_costs_two() -> None:
    """Root and room for two tries: the third is cut even where the second was the first again."""
    laws = DraftLaws(
        Supports(np.array([0], np.int32), np.array([2], np.int32), np.array([3, 4], np.int32)),
        np.array([0.5, 0.5], np.float32),
    )
    tree = merge([TokenTree.checked(np.array([0, 3, 3, 4], np.int32), np.array([-1, 0, 0, 0], np.int32), 0, laws)])
    assert tree.tries == ((), (Try(0, 0), Try(0, 1)), (Try(0, 2),))
    pruned = prune(tree, 3, 1)
    assert pruned.tokens.tolist() == [0, 3]
    assert pruned.tries == ((), (Try(0, 0), Try(0, 1)))
    assert prune(tree, 4, 1) is tree


def test_children_of_twins_count_once() -> None:
    """Both twins were grown from the same noise: their equal children are one draw, not two."""
    for seed in range(200):
        tree = tree_of((2, 2), "multi_step_iid", seed, 0)
        if tree.tokens[1] == tree.tokens[2]:
            break
    merged = merge([tree])
    twin = merged.child_with(0, int(tree.tokens[1]))
    assert twin is not None
    assert [proposal for proposal, _ in merged.tries_at(0)] == [Try(0, 0), Try(0, 1)]
    assert [proposal for proposal, _ in merged.tries_at(twin)] == [Try(0, 0), Try(0, 1)]


@pytest.mark.parametrize("widths", [(), (1, 1, 1), (5,), (63,), (3, 20), (3, 4, 4, 4)])
@pytest.mark.parametrize("num_ssms", [1, 2])
@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
def test_degenerate_trees(widths: tuple[int, ...], num_ssms: int, rule: Rule) -> None:
    """Root only, <1,1,1>, <k>, 64 nodes and far more: merged, cut to 64, and asked for where there are draws."""
    merged = merge([tree_of(widths, rule, 3, ssm_idx, vocab_size=90) for ssm_idx in range(num_ssms)])
    pruned = prune(merged, 64, 8)
    assert len(pruned) <= min(64, 1 + num_ssms * (num_nodes(widths) - 1))
    supports = supports_of(pruned)
    if not widths:
        assert supports is None
        return
    assert supports is not None
    inner = [node for node in range(len(pruned)) if pruned.children[node]]
    assert supports.nodes.tolist() == inner
    unions = np.split(supports.token_ids, supports.lengths.cumsum()[:-1])
    for node, union in zip(inner, unions, strict=True):
        laws = [law.token_ids.tolist() for (owner, _), law in pruned.laws.items() if owner == node]
        assert union.tolist() == sorted(set().union(*laws))
        assert union.dtype == np.int32


def test_trees_without_laws_need_no_masses() -> None:
    """Coupled, naive and greedy drafts."""
    tree = TokenTree.checked(np.array([0, 1], np.int32), np.array([-1, 0], np.int32), 0)
    assert supports_of(merge([tree, tree])) is None


def edited(laws: DraftLaws, **changes: object) -> DraftLaws:
    """The laws with some fields of theirs, or of their supports, replaced."""
    q = changes.pop("q", laws.q)
    return DraftLaws(replace(laws.supports, **changes), q)  # type: ignore[arg-type]


def with_entry(values: np.ndarray, place: int, value: float) -> np.ndarray:
    """A copy with one entry changed."""
    copy = values.copy()
    copy[place] = value
    return copy


FAULTS: dict[str, Callable[[DraftLaws], DraftLaws]] = {
    "node out of range": lambda laws: edited(laws, nodes=with_entry(laws.supports.nodes, -1, 99)),
    "node negative": lambda laws: edited(laws, nodes=with_entry(laws.supports.nodes, 0, -1)),
    "node twice": lambda laws: edited(laws, nodes=with_entry(laws.supports.nodes, 1, laws.supports.nodes[0])),
    "a length too many": lambda laws: edited(laws, lengths=np.append(laws.supports.lengths, np.int32(1))),
    "lengths too long": lambda laws: edited(laws, lengths=laws.supports.lengths + np.int32(1)),
    "length negative": lambda laws: edited(laws, lengths=with_entry(laws.supports.lengths, 0, -1)),
    "ids do not ascend": lambda laws: edited(laws, token_ids=with_entry(laws.supports.token_ids, 1, 0)),
    "id negative": lambda laws: edited(laws, token_ids=with_entry(laws.supports.token_ids, 0, -5)),
    "q too short": lambda laws: edited(laws, q=laws.q[:-1]),
    "q negative": lambda laws: edited(laws, q=with_entry(laws.q, 0, -0.1)),
    "q not a number": lambda laws: edited(laws, q=with_entry(laws.q, 2, np.nan)),
    "q infinite": lambda laws: edited(laws, q=with_entry(laws.q, 2, np.inf)),
    "q huge": lambda laws: edited(laws, q=np.full(len(laws.q), 3e38, np.float32)),
    "q does not sum to 1": lambda laws: edited(laws, q=laws.q * np.float32(0.9)),
    "no law at all": lambda _: laws_of([]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_laws_that_are_none_are_refused(fault: str) -> None:
    """Each way in which an SSM's laws can be wrong is a WireError; untouched they are taken."""
    tokens, parents, laws = drafted((2, 2), "multi_step", 5, 0)
    assert len(TokenTree.checked(tokens, parents, 0, laws)) == len(tokens)
    with pytest.raises(WireError):
        TokenTree.checked(tokens, parents, 0, FAULTS[fault](laws))


def test_a_child_that_its_law_does_not_have_is_refused() -> None:
    """Another token, and a token of mass 0."""
    tokens, parents, laws = drafted((2,), "multi_step", 5, 0)
    with pytest.raises(WireError, match="its law does not have"):
        TokenTree.checked(with_entry(tokens, 2, 50), parents, 0, laws)
    zero = edited(laws, q=np.eye(V, dtype=np.float32)[int(tokens[1])])
    with pytest.raises(WireError, match="its law does not have"):
        TokenTree.checked(tokens, parents, 0, zero)


wild = st.one_of(st.integers(-3, 8), st.integers(-(2**31), 2**31 - 1))
wild_floats = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(width=32))


def int32s(values: list[int]) -> np.ndarray:
    """An array from the wire."""
    return np.array(values, np.int32)


@given(
    st.lists(wild, max_size=4),
    st.lists(wild, max_size=4),
    st.lists(wild, max_size=6),
    st.lists(wild_floats, max_size=6),
)
def test_wild_laws_are_taken_or_a_wire_error(
    nodes: list[int], lengths: list[int], ids: list[int], q: list[float]
) -> None:
    """Whatever arrays arrive: a tree or a WireError, and no warning."""
    laws = DraftLaws(Supports(int32s(nodes), int32s(lengths), int32s(ids)), np.array(q, np.float32))
    try:
        TokenTree.checked(int32s([0, 1, 2]), int32s([-1, 0, 0]), 0, laws)
    except WireError:
        return
    assert nodes[0] == 0
    assert {1, 2} <= set(ids)
