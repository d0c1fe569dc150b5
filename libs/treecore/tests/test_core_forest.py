"""Drafts of a batch, merged: the union of their sequences with every proposal, trees of what is kept, re-rooting."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore import forest as forest_module
from treecore.errors import WireError
from treecore.forest import Forest, ScoredDraft, merge_drafts

V = 5
Path = tuple[int, ...]
ROOTS = (90, 91, 92)


def draft_of(ssm_idx: int, entries: list[tuple[int, int, float]]) -> ScoredDraft:
    """A draft of (token, parent, score) entries."""
    tokens, parents, scores = zip(*entries, strict=True) if entries else ((), (), ())
    return ScoredDraft.checked(
        ssm_idx, np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32), V
    )


@st.composite
def drafts(draw: st.DrawFn, ssm_idx: int = 0, max_size: int = 12) -> ScoredDraft:
    """Any tree whose siblings differ."""
    seen: set[tuple[int, int]] = set()
    entries = []
    for _ in range(draw(st.integers(0, max_size))):
        pair = draw(st.tuples(st.integers(0, len(entries)), st.integers(0, V - 1)))
        if pair not in seen:
            seen.add(pair)
            entries.append((pair[1], pair[0], draw(st.floats(-9.0, 0.0, width=32))))
    return draft_of(ssm_idx, entries)


batches = st.lists(
    st.tuples(drafts(7), drafts(300)).map(list) | drafts(7).map(lambda one: [one]) | st.just([]), min_size=1
)

ways = st.sampled_from([0, 1000])  # all entries at once, or one by one


def proposals_of(draft: ScoredDraft) -> dict[Path, tuple[int, int, float]]:
    """By path (ssm_idx, rank, score), one entry after the other: the oracle."""
    paths: list[Path] = [()]
    counts: dict[int, int] = {}
    found = {}
    for idx, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        paths.append((*paths[parent], token))
        assert draft.scores is not None
        found[paths[-1]] = (draft.ssm_idx, counts.get(parent, 0), float(draft.scores[idx]))
        counts[parent] = counts.get(parent, 0) + 1
    return found


def merged(batch: list[list[ScoredDraft]], few: int = forest_module._FEW) -> Forest:
    """The batch under roots 50, 51, ..."""
    with patch.object(forest_module, "_FEW", few):
        return merge_drafts(list(range(50, 50 + len(batch))), batch)


def paths_of(forest: Forest) -> list[tuple[int, Path]]:
    """By node its request and the tokens from below the root to it."""
    known: list[tuple[int, Path]] = []
    for node, parent in enumerate(forest.parents.tolist()):
        request, path = known[parent] if parent >= 0 else (node, ())
        known.append((request, (*path, int(forest.tokens[node])) if parent >= 0 else ()))
    return known


@given(batches, ways)
def test_the_forest_is_the_union_and_keeps_every_proposal(batch: list[list[ScoredDraft]], few: int) -> None:
    """Definition 3.2 for each request: no sequence lost, added or doubled, and each keeps who proposed it and how."""
    forest = merged(batch, few)
    paths = paths_of(forest)
    expected = {(request, path) for request, own in enumerate(batch) for one in own for path in proposals_of(one)}
    assert set(paths[len(batch) :]) == expected
    assert len(paths) == len(batch) + len(expected)
    tries: dict[tuple[int, Path], list[tuple[int, int, float]]] = {}
    told = forest.tries
    for node, ssm, rank, score in zip(told.nodes, told.ssms, told.ranks, told.scores, strict=True):
        tries.setdefault(paths[node], []).append((forest.ssm_ids[ssm], int(rank), float(score)))
    for request, own in enumerate(batch):
        for path in {path for one in own for path in proposals_of(one)}:
            assert tries[request, path] == [proposals_of(one)[path] for one in own if path in proposals_of(one)]


@given(batches, ways)
def test_nodes_stand_level_by_level(batch: list[list[ScoredDraft]], few: int) -> None:
    """Depths, requests, levels and first proposals say what parents say."""
    forest = merged(batch, few)
    paths = paths_of(forest)
    assert forest.depths.tolist() == [len(path) for _, path in paths]
    assert forest.requests.tolist() == [request for request, _ in paths]
    assert np.all(np.diff(forest.depths) >= 0)
    for depth, level in enumerate(forest.levels, 1):
        assert np.all(forest.depths[level] == depth)
    assert forest.tries.nodes[forest.starts].tolist() == list(range(len(batch), len(forest)))
    assert np.all(np.diff(forest.tries.nodes) >= 0)


@given(batches, st.data())
def test_trees_are_what_was_kept(batch: list[list[ScoredDraft]], data: st.DataObject) -> None:
    """Each request's tree has its root and the kept sequences, with their tries."""
    forest = merged(batch)
    kept = np.zeros(len(forest), bool)
    kept[: len(batch)] = True
    for node in range(len(batch), len(forest)):
        kept[node] = kept[forest.parents[node]] and data.draw(st.booleans())
    trees = forest.trees(kept)
    paths = paths_of(forest)
    for request, tree in enumerate(trees):
        assert list(tree.paths()) == [path for node, (own, path) in enumerate(paths) if own == request and kept[node]]
        assert tree.tokens[0] == 50 + request
        assert tree.tokens.dtype == tree.parents.dtype == np.int32
        for path, tries in zip(tree.paths(), tree.tries, strict=True):
            proposals = [proposals_of(one).get(path) for one in batch[request]]
            assert [tuple(one) for one in tries] == [found[:2] for found in proposals if found is not None]


def test_a_node_without_its_parent_is_our_bug() -> None:
    """Closure is checked where trees are made."""
    forest = merged([[draft_of(0, [(1, 0, -1.0), (2, 1, -1.0)])]])
    with pytest.raises(AssertionError, match="without its parent"):
        forest.trees(np.array([True, False, True]))


@given(drafts(), st.data())
def test_below_keeps_the_subtree(draft: ScoredDraft, data: st.DataObject) -> None:
    """Re-rooted, a draft has the sequences behind the path, with their scores and ranks; off the draft it is None."""
    proposals = proposals_of(draft)
    path = data.draw(st.sampled_from([(), *proposals]) | st.lists(st.integers(0, V - 1), max_size=3).map(tuple))
    below = draft.below(path)
    if path and path not in proposals:
        assert below is None
        return
    expected = {known[len(path) :]: found for known, found in proposals.items() if known[: len(path)] == path != known}
    assert below is not None
    assert proposals_of(ScoredDraft.checked(0, below.tokens, below.parents, below.scores, V)) == expected


def test_a_draft_without_scores_gets_those_of_its_ranks() -> None:
    """An SSM that tells no scores takes part in the merge; its better siblings count more."""
    tokens, parents = np.arange(8, dtype=np.int32), np.zeros(8, np.int32)
    unscored = ScoredDraft.checked(3, tokens, parents, None, 8)
    scored = draft_of(4, [(1, 0, -0.5)])
    forest = merged([[unscored, scored]])
    is_unscored = forest.tries.ssms == 0
    scores = forest.tries.scores[is_unscored][np.argsort(forest.tries.ranks[is_unscored])]
    assert scores.dtype == np.float32
    assert np.exp(scores[0]) == pytest.approx(0.48)
    assert np.all(np.diff(scores) <= 0)
    assert forest.tries.scores[forest.tries.ssms == 1].tolist() == [-0.5]
    below = unscored.below((2,))
    assert below is not None
    assert below.scores is None


def test_paths_that_have_the_same_code_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that collide at first: the forest is what it would have been without."""
    batch = [[draft_of(7, [(1, 0, -1.0), (2, 0, -1.0), (3, 1, -1.0)]), draft_of(8, [(1, 0, -1.0), (3, 1, -2.0)])]] * 2
    expected = sorted(paths_of(merged(batch)))
    mixed = forest_module._mixed
    salts = []

    def colliding(values: np.ndarray, salt: int) -> np.ndarray:
        salts.append(salt)
        return mixed(values, salt) if salt > 2 else np.zeros(len(values), np.uint64)

    monkeypatch.setattr(forest_module, "_mixed", colliding)
    assert sorted(paths_of(merged(batch, few=0))) == expected
    assert max(salts) == 3


def test_no_drafts_at_all() -> None:
    """A step in which nobody drafted is a forest of roots."""
    forest = merge_drafts(ROOTS, [(), (), ()])
    assert (len(forest), forest.levels) == (3, [])
    assert [tree.tokens.tolist() for tree in forest.trees(np.ones(3, bool))] == [[90], [91], [92]]


@pytest.mark.parametrize(
    ("tokens", "parents", "scores"),
    [
        ([1, 2], [0], None),
        ([1], [0], [-1.0, -1.0]),
        ([1], [1], None),
        ([1], [-1], None),
        ([1, 2], [0, 2], None),
        ([-1], [0], None),
        ([V], [0], None),
        ([1], [0], [math.nan]),
        ([1], [0], [0.5]),
        ([1], [0], [-math.inf]),
    ],
)
def test_what_is_no_draft_is_refused(tokens: list[int], parents: list[int], scores: list[float] | None) -> None:
    """Wrong lengths, no tree, no token of the LLM, no score."""
    told = None if scores is None else np.array(scores, np.float32)
    with pytest.raises(WireError):
        ScoredDraft.checked(0, np.array(tokens, np.int32), np.array(parents, np.int32), told, V)
