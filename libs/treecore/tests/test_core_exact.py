"""The multi_step rules' output law by exact enumeration of all draws and coins, and the mutants that it catches.

Nothing is sampled here: `outcomes` runs the production functions (draw, checked, merge, prune, supports, the walk) once
for each way in which their random choices can fall, and adds up the chances. V = 5, 200 random pairs of laws.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from treecore import drafts, multi_step
from treecore import merge as merging
from treecore.accept import Accepted
from treecore.child_laws import ChildLaw
from treecore.merge import merge, prune
from treecore.multi_step import Attempt, follow, supports_of
from treecore.sparse import DraftLaws, Supports
from treecore.testing.fates import Fate, outcomes, random_law
from treecore.tree import TokenTree

V = 5
NUM_PAIRS = 200
CAUGHT = 1e-3
Law = NDArray[np.float64]


@dataclass(frozen=True)
class Game:
    """Two laws behind every path of at most one token, the SSMs' and the LLM's, and how children are drawn.

    widths: by SSM, its children a level; each SSM has a q of its own.
    """

    p: dict[tuple[int, ...], Law]
    q: dict[tuple[int, tuple[int, ...]], ChildLaw]
    widths: tuple[tuple[int, ...], ...]
    is_iid: bool
    max_nodes: int = 64

    def draft(self, ssm_idx: int, fate: Fate) -> TokenTree:
        """One SSM's tree, as it comes over the wire."""
        tokens, parents, paths = [0], [-1], [()]  # type: tuple[list[int], list[int], list[tuple[int, ...]]]
        inner: list[tuple[int, ChildLaw]] = []
        for depth, width in enumerate(self.widths[ssm_idx]):
            for node in [node for node, path in enumerate(paths) if len(path) == depth]:
                law = self.q[ssm_idx, paths[node]]
                inner.append((node, law))
                for column in drafts.draw(drafts.exact(law.q), width, self.is_iid, fate.pick):
                    tokens.append(int(law.token_ids[column]))
                    parents.append(node)
                    paths.append((*paths[node], tokens[-1]))
        lengths = np.array([len(law.q) for _, law in inner], np.int32)
        supports = Supports(
            np.array([node for node, _ in inner], np.int32),
            lengths,
            np.concatenate([law.token_ids for _, law in inner]),
        )
        laws = DraftLaws(supports, np.concatenate([law.q for _, law in inner]))
        return TokenTree.checked(np.array(tokens, np.int32), np.array(parents, np.int32), ssm_idx, laws)

    def tree(self, fate: Fate) -> TokenTree:
        """What is verified."""
        return prune(merge([self.draft(ssm_idx, fate) for ssm_idx in range(len(self.widths))]), self.max_nodes, 8)

    def walk(self, tree: TokenTree, fate: Fate) -> Accepted:
        """The acceptance on exact p; the LLM's own tokens are drawn where and when the walk needs them."""
        paths = list(tree.paths())
        supports = supports_of(tree)
        assert supports is not None
        known: dict[int, tuple[NDArray[np.int32], Law]] = {}
        for node, ids in zip(supports.nodes.tolist(), _split(supports), strict=True):
            known[node] = (ids, self.p[paths[node]][ids])
        return follow(tree, _Verified(self, paths, known, fate), known.get, self.is_iid, fate)  # type: ignore[arg-type]


def _split(supports: Supports) -> list[NDArray[np.int32]]:
    return np.split(supports.token_ids, supports.lengths.cumsum()[:-1])


@dataclass
class _Verified:
    """The LLM's token behind a node: from p outside the support, or from p; -1 where nothing is outside."""

    game: Game
    paths: list[tuple[int, ...]]
    known: dict[int, tuple[NDArray[np.int32], Law]]
    fate: Fate
    drawn: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, node: int) -> int:
        if node not in self.drawn:
            self.drawn[node] = self._draw(self.paths[node], self.known.get(node))
        return self.drawn[node]

    def _draw(self, path: tuple[int, ...], known: tuple[NDArray[np.int32], Law] | None) -> int:
        if path not in self.game.p:
            return 0  # beyond the tokens that are looked at
        rest = self.game.p[path].copy()
        if known is not None:
            rest[known[0]] = 0.0
        return self.fate.choose(rest) if rest.any() else -1


def output_law(game: Game, num_tokens: int = 1) -> Law:
    """The law of the next `num_tokens` (1 or 2) tokens, [V] or [V, V]; plain decoding goes on where a step ends."""
    law = np.zeros((V,) * num_tokens)
    for draft_chance, tree in outcomes(game.tree):
        for chance, accepted in outcomes(lambda fate, tree=tree: game.walk(tree, fate)):  # type: ignore[misc]
            add(law, game.p, accepted.tokens, draft_chance * chance)
    return law


def add(law: Law, p: dict[tuple[int, ...], Law], tokens: tuple[int, ...], chance: float) -> None:
    """Where the step gave one token of two, the next is one of p."""
    if len(tokens) >= law.ndim:
        law[tokens[: law.ndim]] += chance
    else:
        law[tokens] += chance * p[tokens]


def wanted_law(game: Game, num_tokens: int = 1) -> Law:
    """Plain decoding."""
    if num_tokens == 1:
        return game.p[()]
    return np.stack([game.p[()][first] * game.p[first,] for first in range(V)])


def as_child_law(law: Law, keep: int) -> ChildLaw:
    """The `keep` most likely tokens, normalised, as they travel."""
    ids = np.sort(np.argsort(-law, kind="stable")[:keep])
    ids = ids[law[ids] > 0.0]
    return ChildLaw(ids.astype(np.int32), (law[ids] / law[ids].sum()).astype(np.float32))


def random_game(seed: int, widths: tuple[tuple[int, ...], ...], is_iid: bool, max_nodes: int = 64) -> Game:
    """A pair of laws; every fourth SSM is the LLM itself, up to its rounding."""
    rng = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = [(), *[(token,) for token in range(V)]]
    p = {path: random_law(rng, V) for path in paths}
    keep = int(rng.integers(2, V + 1))
    laws = {
        (ssm_idx, path): as_child_law(p[path] if rng.integers(4) == 0 else random_law(rng, V), keep)
        for ssm_idx in range(len(widths))
        for path in (paths if len(widths[ssm_idx]) > 1 else paths[:1])
    }
    return Game(p, laws, widths, is_iid, max_nodes)


def worst(games: Iterator[Game] | Sequence[Game], num_tokens: int = 1) -> float:
    """The largest deviation of any game's output law."""
    return max(float(np.abs(output_law(game, num_tokens) - wanted_law(game, num_tokens)).max()) for game in games)


SHAPES = [
    pytest.param(((1,),), False, 64, id="one-try"),
    pytest.param(((2,),), False, 64, id="two-without-replacement"),
    pytest.param(((3,),), False, 64, id="three-without-replacement"),
    pytest.param(((2,),), True, 64, id="two-iid"),
    pytest.param(((1,), (1,)), False, 64, id="two-ssms"),
    pytest.param(((2,),), True, 2, id="pruned-iid"),
]


@pytest.mark.parametrize(("widths", "is_iid", "max_nodes"), SHAPES)
def test_multi_step_is_exact(widths: tuple[tuple[int, ...], ...], is_iid: bool, max_nodes: int) -> None:
    """200 pairs: the next token's law is p to 1e-12, whatever was drafted, merged, cut and rejected."""
    assert worst([random_game(seed, widths, is_iid, max_nodes) for seed in range(NUM_PAIRS)]) < 1e-12


@pytest.mark.parametrize(
    ("widths", "is_iid", "max_nodes", "num_pairs"),
    [
        pytest.param(((3,),), True, 64, 40, id="three-iid"),
        pytest.param(((2,), (1,)), True, 64, 40, id="two-ssms-iid"),
        pytest.param(((3,),), True, 3, 40, id="three-iid-pruned-to-two"),
        pytest.param(((2,), (2,)), False, 64, 8, id="two-ssms-two-tries"),
    ],
)
def test_multi_step_with_many_tries_is_exact(
    widths: tuple[tuple[int, ...], ...], is_iid: bool, max_nodes: int, num_pairs: int
) -> None:
    """The same where an enumeration has thousands of ways."""
    assert worst([random_game(seed, widths, is_iid, max_nodes) for seed in range(num_pairs)]) < 1e-12


@pytest.mark.parametrize(
    ("widths", "is_iid", "max_nodes", "num_pairs"),
    [
        pytest.param(((1, 1),), False, 64, 40, id="chain"),
        pytest.param(((2, 1),), True, 64, 4, id="iid-with-twins"),
        pytest.param(((2, 1),), True, 4, 4, id="iid-with-twins-pruned"),
        pytest.param(((1, 1), (1,)), False, 64, 8, id="two-ssms"),
    ],
)
def test_paths_of_two_tokens_are_exact(
    widths: tuple[tuple[int, ...], ...], is_iid: bool, max_nodes: int, num_pairs: int
) -> None:
    """The joint law of two tokens, over a tree of two levels, is p(x) p(y | x) to 1e-12."""
    games = [random_game(seed, widths, is_iid, max_nodes) for seed in range(num_pairs)]
    assert worst(games, 2) < 1e-12


def most_likely_columns(q: Law, count: int, is_iid: bool, pick: drafts.Pick) -> list[int]:
    """Mutant: children are the top k of q, verified as if they had been drawn."""
    best: list[int] = np.argsort(-q, kind="stable")[:count].tolist()
    return best


def distinct_tries(
    attempts: Callable[..., Iterator[Attempt]],
) -> Callable[..., Iterator[Attempt]]:
    """Mutant: a token is tried once, however often it was drawn, and by however many SSMs."""

    def mutant(*args: object) -> Iterator[Attempt]:
        seen: set[int] = set()
        for attempt in attempts(*args):
            if attempt.child not in seen:
                yield attempt
            seen.add(attempt.child)

    return mutant


def first_columns_cut(tree: TokenTree, max_nodes: int, max_depth: int) -> TokenTree:
    """Mutant: a budget in nodes, where a token drawn twice costs one (chosen by value)."""
    children = list(dict.fromkeys(child for _, child in tree.tries_at(0)))[: max_nodes - 1]
    return merging._subtree(tree, {0: (), **{child: tree.tries[child] for child in sorted(children)}})


def plain_law(q: Law, drawn: Sequence[int]) -> Law:
    """Mutant: the ratio takes q as it was before the earlier siblings were drawn."""
    return q


def unnormalised(residual: Law, q: Law) -> Law:
    """Mutant: what a rejection leaves is not scaled up."""
    left = np.maximum(residual - q, 0.0)
    return left if left.any() else residual


@dataclass(frozen=True)
class Mutant:
    """One production function replaced, and the shape in which it shows."""

    module: object
    name: str
    function: object
    widths: tuple[tuple[int, ...], ...]
    is_iid: bool = False
    max_nodes: int = 64


DISTINCT = distinct_tries(multi_step.attempts_at)
MUTANTS = {
    "q-ratios-on-top-k": Mutant(drafts, "draw", most_likely_columns, ((2,),)),
    "q-ratios-on-top-1": Mutant(drafts, "draw", most_likely_columns, ((1,),), is_iid=True),
    "duplicates-collapsed": Mutant(multi_step, "attempts_at", DISTINCT, ((2,),), is_iid=True),
    "merged-equals-tried-once": Mutant(multi_step, "attempts_at", DISTINCT, ((1,), (1,))),
    "plain-q-without-replacement": Mutant(multi_step, "law_left", plain_law, ((2,),)),
    "residual-not-renormalised": Mutant(multi_step, "shrunk", unnormalised, ((2,),)),
    "pruned-by-value": Mutant(merging, "_prune_tries", first_columns_cut, ((2,),), is_iid=True, max_nodes=2),
}


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=name) for name, mutant in MUTANTS.items()])
def test_planted_mutants_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measure, far above its bound, on the first few pairs already."""
    games = [random_game(seed, mutant.widths, mutant.is_iid, mutant.max_nodes) for seed in range(16)]
    assert worst(games) < 1e-12
    monkeypatch.setattr(mutant.module, mutant.name, mutant.function)
    assert worst(games) > CAUGHT


def redrawn(game: Game, fate: Fate) -> Accepted:
    """Mutant: a step that accepted nothing is done again, with draws of its own."""
    first = game.walk(game.tree(fate), fate)
    return first if first.nodes else game.walk(game.tree(fate), fate)


def test_redraw_on_retry_is_caught() -> None:
    """A retry must repeat the same draws: a second chance for the drafts is one too many."""
    deviations = []
    for game in [random_game(seed, ((1,),), False) for seed in range(16)]:
        law = np.zeros(V)
        for chance, accepted in outcomes(lambda fate, game=game: redrawn(game, fate)):  # type: ignore[misc]
            law[accepted.tokens[0]] += chance
        deviations.append(float(np.abs(law - wanted_law(game)).max()))
    assert max(deviations) > CAUGHT
