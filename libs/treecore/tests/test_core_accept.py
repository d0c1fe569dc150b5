"""The walk of acceptance against plain incremental decoding: the tree must never show in the tokens."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treecore.accept import walk
from treecore.tree import TokenTree, chain

VOCAB_SIZE = 3


def next_token(seed: int, context: tuple[int, ...]) -> int:
    """A deterministic 'LLM' that depends on its whole context."""
    return hashlib.blake2b(repr((seed, context)).encode(), digest_size=1).digest()[0] % VOCAB_SIZE


def incremental(seed: int, context: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The oracle: one token at a time."""
    found: list[int] = []
    for _ in range(count):
        found.append(next_token(seed, (*context, *found)))
    return tuple(found)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Trees over a tiny vocabulary, so that the LLM often agrees."""
    below = draw(st.integers(0, 30))
    parents = [-1] + [draw(st.integers(max(0, node - 3), node)) for node in range(below)]
    tokens = [draw(st.integers(0, VOCAB_SIZE - 1)) for _ in range(below + 1)]
    return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), 0)


@given(trees(), st.integers(0, 10**6))
def test_walk_yields_what_incremental_decoding_yields(tree: TokenTree, seed: int) -> None:
    """Any tree: the accepted tokens and the bonus are the next tokens of incremental decoding, at least one."""
    root = int(tree.tokens[0])
    answers = np.array([next_token(seed, (root, *path)) for path in tree.paths()], np.int32)
    accepted = walk(tree, answers)
    assert accepted.tokens == incremental(seed, (root,), len(accepted.tokens))
    assert len(accepted.tokens) == len(accepted.nodes) + 1


@given(trees(), st.integers(0, 10**6))
def test_walk_is_maximal_and_its_nodes_are_a_path(tree: TokenTree, seed: int) -> None:
    """The nodes lead down from the root and carry the tokens; it stops only where no child fits."""
    answers = np.array([next_token(seed, (int(tree.tokens[0]), *path)) for path in tree.paths()], np.int32)
    accepted = walk(tree, answers)
    parent = 0
    for node, token in zip(accepted.nodes, accepted.tokens, strict=False):
        assert tree.parents[node] == parent
        assert tree.tokens[node] == token
        parent = node
    assert accepted.tokens[-1] not in {int(tree.tokens[child]) for child in tree.children[parent]}


def test_root_only_yields_the_bonus_alone() -> None:
    """Incremental decoding is the walk over the root-only tree."""
    accepted = walk(TokenTree.of_root(4), np.array([9], np.int32))
    assert (accepted.nodes, accepted.tokens) == ((), (9,))


def test_perfect_draft_is_accepted_whole() -> None:
    """SSM == LLM: every drafted token, then the bonus."""
    accepted = walk(chain([0, 5, 6, 7]), np.array([5, 6, 7, 8], np.int32))
    assert (accepted.nodes, accepted.tokens) == ((1, 2, 3), (5, 6, 7, 8))


def test_a_match_below_a_rejected_node_does_not_count() -> None:
    """A right word behind a wrong one must not survive (a fault seen in the wild: its continuation was kept)."""
    tree = chain([0, 5, 6])
    accepted = walk(tree, np.array([4, 6, 8], np.int32))
    assert (accepted.nodes, accepted.tokens) == ((), (4,))


def test_a_node_that_nothing_may_follow_ends_the_walk_without_a_bonus() -> None:
    """A closed node behind an accepted run: its token counts, and no other comes."""
    accepted = walk(chain([9, 4, 5, 6]), np.array([4, 5, -1, 7], np.int32))
    assert (accepted.nodes, accepted.tokens) == ((1, 2), (4, 5))
