"""Token trees against slow oracles: merge (Definition 3.2), prune, topology and expansions."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treecore import topology
from treecore.errors import InvalidRequest, WireError
from treecore.expand import NO_DRAFT, expansion, num_nodes
from treecore.merge import merge, prune
from treecore.messages import join_tree, split_tree
from treecore.tree import TokenTree, Try, chain

ROOT_TOKEN = 7
Path = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24, vocab_size: int = 4, ssm_idx: int | None = None) -> TokenTree:
    """A tree with the common root; few token ids, so that equal siblings and equal sequences occur."""
    below = draw(st.integers(0, max_nodes - 1))
    parents = [-1] + [draw(st.integers(0, node)) for node in range(below)]
    tokens = [ROOT_TOKEN] + [draw(st.integers(0, vocab_size - 1)) for _ in range(below)]
    owner = draw(st.integers(0, 3)) if ssm_idx is None else ssm_idx
    return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), owner)


def walk_up(tree: TokenTree, node: int) -> list[int]:
    """Node, its parent, and so on to the root: the oracle for all that topology computes."""
    found = [node]
    while tree.parents[found[-1]] != -1:
        found.append(int(tree.parents[found[-1]]))
    return found


def path_of(tree: TokenTree, node: int) -> Path:
    """Tokens from the root to `node`."""
    return tuple(int(tree.tokens[idx]) for idx in reversed(walk_up(tree, node)))


def all_paths(tree: TokenTree) -> set[Path]:
    """The set of root-to-node sequences."""
    return {path_of(tree, node) for node in range(len(tree))}


def tries_by_path(tree: TokenTree) -> dict[Path, Counter[Try]]:
    """Every try, by the sequence that it proposed."""
    found: dict[Path, Counter[Try]] = {}
    for node in range(len(tree)):
        found.setdefault(path_of(tree, node), Counter()).update(tree.tries[node])
    return found


def assert_well_formed(tree: TokenTree) -> None:
    """A flat tree: one root first, parents before children, arrays of one length and of int32."""
    assert tree.tokens.dtype == tree.parents.dtype == np.int32
    assert len(tree.tokens) == len(tree.parents) == len(tree.tries)
    assert tree.parents[0] == -1
    assert all(0 <= tree.parents[node] < node for node in range(1, len(tree)))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merge_is_the_union_of_sequences(drafts: list[TokenTree]) -> None:
    """Definition 3.2: the set of root-to-node sequences is the union, each sequence exactly one node."""
    merged = merge(drafts)
    assert_well_formed(merged)
    assert all_paths(merged) == set().union(*map(all_paths, drafts))
    assert len(merged) == len(all_paths(merged))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_merge_keeps_every_try(drafts: list[TokenTree]) -> None:
    """No proposal is lost and none is invented: collapsing tries would bias `multi_step`."""
    wanted: dict[Path, Counter[Try]] = {}
    for draft in drafts:
        for path, tries in tries_by_path(draft).items():
            wanted.setdefault(path, Counter()).update(tries)
    assert tries_by_path(merge(drafts)) == wanted


@given(trees())
def test_merge_is_idempotent(draft: TokenTree) -> None:
    """Merging a merged tree alone changes nothing at all."""
    once = merge([draft])
    again = merge([once])
    np.testing.assert_array_equal(again.tokens, once.tokens)
    np.testing.assert_array_equal(again.parents, once.parents)
    assert again.tries == once.tries


@given(st.lists(trees(), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_merge_does_not_depend_on_order_as_a_set(drafts: list[TokenTree], random: "st.DataObject") -> None:
    """Which SSM answered first moves nodes, not sequences nor tries."""
    shuffled = list(drafts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert tries_by_path(merge(shuffled)) == tries_by_path(merge(drafts))


def test_merge_example() -> None:
    """Two chains that share their first token fork behind it; the shared node carries both tries."""
    merged = merge([chain([7, 1, 2], 0), chain([7, 1, 3], 1)])
    assert merged.tokens.tolist() == [7, 1, 2, 3]
    assert merged.parents.tolist() == [-1, 0, 1, 1]
    assert merged.tries == ((), (Try(0, 0), Try(1, 0)), (Try(0, 0),), (Try(1, 0),))


def test_merge_refuses_different_roots() -> None:
    """Trees of two requests in one merge are a bug of ours."""
    with pytest.raises(AssertionError, match="different roots"):
        merge([chain([1, 2]), chain([3, 2])])


@given(trees(), st.integers(1, 30), st.integers(0, 8))
def test_prune_keeps_budgets_ancestors_and_tries(tree: TokenTree, max_nodes: int, max_depth: int) -> None:
    """Within both budgets, closed under ancestors, breadth first; what stays is unchanged and keeps its order."""
    pruned = prune(tree, max_nodes, max_depth)
    assert_well_formed(pruned)
    rest = iter(range(len(tree)))
    for node in range(len(pruned)):
        assert any(path_of(tree, idx) == path_of(pruned, node) for idx in rest)
    shallow = [len(walk_up(tree, node)) - 1 for node in range(len(tree))]
    eligible = sorted(depth for depth in shallow if depth <= max_depth)
    assert sorted(pruned.depths.tolist()) == eligible[:max_nodes]
    whole = Counter((path_of(tree, node), tree.tries[node]) for node in range(len(tree)))
    left = Counter((path_of(pruned, node), pruned.tries[node]) for node in range(len(pruned)))
    assert left <= whole


@given(trees())
def test_prune_within_budget_is_the_same_tree(tree: TokenTree) -> None:
    """Nothing to cut: the very same object, no copy."""
    assert prune(tree, len(tree), len(tree)) is tree


@given(trees(max_nodes=40))
def test_depths_positions_children_and_paths_equal_walking_up(tree: TokenTree) -> None:
    """Every derived array equals what walking the parents gives."""
    depths = [len(walk_up(tree, node)) - 1 for node in range(len(tree))]
    assert tree.depths.tolist() == depths
    assert topology.positions(tree.parents, 8).tolist() == [7 + depth for depth in depths]
    for node, children in enumerate(tree.children):
        assert list(children) == [child for child in range(len(tree)) if tree.parents[child] == node]
    assert [(ROOT_TOKEN, *path) for path in tree.paths()] == [path_of(tree, node) for node in range(len(tree))]


def test_positions_example() -> None:
    """Architecture section 3: 8 committed tokens, depths 0,1,1,2 -> 7,8,8,9."""
    assert topology.positions(np.array([-1, 0, 0, 1], np.int32), 8).tolist() == [7, 8, 8, 9]


def unpacked(words: NDArray[np.int64], num: int) -> NDArray[np.bool_]:
    """Bit by bit with Python integers, so that no numpy shift can hide a mistake."""
    rows = [[int(word) & (2**64 - 1) for word in row] for row in words.tolist()]
    return np.array([[row[bit // 64] >> (bit % 64) & 1 for bit in range(num)] for row in rows], np.bool_)


@given(st.data(), st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200]))
def test_masks_equal_walking_up_at_word_borders(data: st.DataObject, num: int) -> None:
    """Packed masks, dense masks and walking parents agree, also beyond 64 nodes."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    deepness = data.draw(st.sampled_from([1, 3, num]))
    parents = [-1] + [int(rng.integers(max(0, node - deepness), node)) for node in range(1, num)]
    tree = TokenTree.checked(rng.integers(0, 9, num).astype(np.int32), np.array(parents, np.int32), 0)
    wanted = np.zeros((num, num), np.bool_)
    for node in range(num):
        wanted[node, walk_up(tree, node)] = True
    np.testing.assert_array_equal(topology.ancestor_mask(tree.parents), wanted)
    words = topology.ancestor_words(tree.parents)
    assert words.shape == (num, -(-num // 64))
    np.testing.assert_array_equal(unpacked(words, num), wanted)
    spare = unpacked(words, words.shape[1] * 64)[:, num:]
    assert not spare.any()


@given(st.lists(st.integers(1, 4), max_size=4))
def test_num_nodes_counts_the_full_tree(widths: list[int]) -> None:
    """The closed form equals counting all index paths."""
    levels = [len(list(product(*(range(width) for width in widths[:depth])))) for depth in range(len(widths) + 1)]
    assert num_nodes(widths) == sum(levels)
    assert expansion(widths, num_nodes(widths)) == tuple(widths)
    with pytest.raises(InvalidRequest) as caught:
        expansion(widths, num_nodes(widths) - 1)
    assert caught.value.param == "espalier.tree"


@pytest.mark.parametrize("widths", [[0], [2, 0], [-1], [3, -2, 1]])
def test_widths_below_one_are_refused(widths: list[int]) -> None:
    """A level without children is no level."""
    with pytest.raises(InvalidRequest):
        expansion(widths, 64)


def test_no_draft_is_the_root_alone() -> None:
    """The empty expansion is incremental decoding."""
    assert num_nodes(NO_DRAFT) == len(TokenTree.of_root(3)) == 1
    assert expansion([], 1) == NO_DRAFT


@given(trees())
def test_split_and_join_are_inverse(tree: TokenTree) -> None:
    """What travels below the root comes back as the same tree."""
    joined = join_tree(ROOT_TOKEN, *split_tree(tree), ssm_idx=2)
    np.testing.assert_array_equal(joined.tokens, tree.tokens)
    np.testing.assert_array_equal(joined.parents, tree.parents)
    for node in range(len(tree)):
        wanted = [(Try(2, order), child) for order, child in enumerate(tree.children[node])]
        assert joined.tries_at(node) == wanted


int32s = st.integers(-(2**31), 2**31 - 1)
small = st.integers(-3, 6)


@given(st.lists(st.one_of(small, int32s), max_size=8), st.lists(st.one_of(small, int32s), max_size=8))
def test_wild_arrays_are_a_tree_or_a_wire_error(tokens: list[int], parents: list[int]) -> None:
    """Any int32 arrays: either a well-formed tree comes out or a WireError, and exactly by the rules."""
    is_tree = (
        0 < len(tokens) == len(parents)
        and parents[0] == -1
        and all(0 <= parent < node for node, parent in enumerate(parents) if node)
        and all(token >= 0 for token in tokens)
    )
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32)
    if is_tree:
        assert_well_formed(TokenTree.checked(*arrays, 0))
    else:
        with pytest.raises(WireError):
            TokenTree.checked(*arrays, 0)
