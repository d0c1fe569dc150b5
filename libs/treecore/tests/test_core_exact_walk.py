"""Greedy, coupled and naive by exact enumeration: one walk serves all three, and its output law is p."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from treecore.accept import Accepted, walk
from treecore.testing.fates import Fate, outcomes, random_law
from treecore.tree import TokenTree

V = 5
NUM_PAIRS = 200
CAUGHT = 1e-3
Law = NDArray[np.float64]


def all_trees() -> list[TokenTree]:
    """Every set of one to three children of the root."""
    sets = [tokens for count in (1, 2, 3) for tokens in combinations(range(V), count)]
    return [
        TokenTree.checked(np.array([0, *tokens], np.int32), np.array([-1] + [0] * len(tokens), np.int32), 0)
        for tokens in sets
    ]


def walked(tree: TokenTree, p: Law, fate: Fate) -> Accepted:
    """One draw from p behind the root, and any token behind the leaves."""
    return walk(tree, np.array([fate.choose(p)] + [0] * (len(tree) - 1), np.int32))


def walked_twice(tree: TokenTree, p: Law, fate: Fate) -> Accepted:
    """Mutant: where no child is the LLM's token, the LLM draws again."""
    first = walked(tree, p, fate)
    return first if first.nodes else walked(tree, p, fate)


def law_of_walks(step: Callable[[TokenTree, Law, Fate], Accepted], tree: TokenTree, p: Law) -> Law:
    """The next token's law over all that the LLM may draw, given the tree."""
    law = np.zeros(V)
    for chance, accepted in outcomes(lambda fate: step(tree, p, fate)):
        law[accepted.tokens[0]] += chance
    return law


def test_greedy_coupled_and_naive_are_exact() -> None:
    """Given any tree whatever the walk yields the LLM's own token, so its law given the tree is p.

    That settles `naive`, whose draw does not know the tree, and `greedy`, where p is one-hot. For `coupled`, tree and
    token share their noise; but every (tree, token) pair gives the token, so that the law of the output is the law of
    x_t however the two hang together: p, by the Gumbel-max identity (next test).
    """
    for seed in range(NUM_PAIRS):
        p = random_law(np.random.default_rng(seed), V)
        for tree in all_trees():
            for _, (token, accepted) in outcomes(lambda fate, tree=tree, p=p: token_and_walk(tree, p, fate)):  # type: ignore[misc]
                assert accepted.tokens[0] == token
        assert np.abs(law_of_walks(walked, all_trees()[seed % 25], p) - p).max() < 1e-12


def token_and_walk(tree: TokenTree, p: Law, fate: Fate) -> tuple[int, Accepted]:
    """The LLM's token and what the walk makes of it."""
    accepted = walked(tree, p, fate)
    return fate.taken[0], accepted


def test_gumbel_max_identity() -> None:
    """P(argmax log p + G = v) = p(v), integrated over v's noise: the density of G times what keeps the others below.

    The trapezoid rule on [-12, 48] (beyond, less than 1e-20) converges exponentially; sparse laws and ties included.
    """
    for seed in range(NUM_PAIRS):
        p = random_law(np.random.default_rng(seed), V)
        logp = np.log(p[p > 0.0])
        g, step = np.linspace(-12.0, 48.0, 12001, retstep=True)
        wins = [
            float((np.exp(-g) * np.exp(-np.exp(-(g + own - logp[:, None])).sum(axis=0))).sum() * step) for own in logp
        ]
        assert np.abs(np.array(wins) - p[p > 0.0]).max() < 1e-12


def test_naive_redraws_are_caught() -> None:
    """One draw from p a node, however many children it has: a draw for each try favours what was drafted."""
    p = random_law(np.random.default_rng(0), V)
    assert max(float(np.abs(law_of_walks(walked_twice, tree, p) - p).max()) for tree in all_trees()) > CAUGHT
