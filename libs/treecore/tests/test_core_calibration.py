"""Calibration: finds a planted law of scores, ranks, depths and agreement, and finds it again when it changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.calibration import Calibration
from treecore.forest import Forest, ScoredDraft, merge_drafts

R = 16
NEAR, FAR = 11, 2**31 + 5


def bush(rng: np.random.Generator, ssm_idx: int, tokens: tuple[int, ...] = (1, 2, 3)) -> ScoredDraft:
    """Children of the root, best first, with a child each."""
    shares = np.sort(rng.dirichlet(np.ones(len(tokens) + 1)))[::-1][: len(tokens)]
    scores = np.log(np.concatenate([shares, rng.uniform(0.02, 0.98, len(tokens))]))
    parents = np.concatenate([np.zeros(len(tokens)), np.arange(1, len(tokens) + 1)])
    every = np.array((*tokens, *[token + 10 for token in tokens]), np.int32)
    return ScoredDraft(ssm_idx, every, parents.astype(np.int32), scores.astype(np.float32))


def committed(rng: np.random.Generator, forest: Forest, law: np.ndarray) -> list[list[int]]:
    """What an LLM commits that takes each node behind its parent with chance `law` [M]; token 99 is in no draft."""
    paths = []
    for request in range(forest.num_requests):
        node, path = request, list[int]()
        while True:
            children = np.flatnonzero(forest.parents == node)
            left = 1.0 - law[children].sum()
            assert left > -1e-9
            chosen = rng.choice([*children.tolist(), -1], p=[*law[children], max(left, 0.0)])
            if chosen < 0:
                break
            node = int(chosen)
            path.append(int(forest.tokens[node]))
        paths.append([*path, 99])
    return paths


def chances(calibration: Calibration, forest: Forest) -> np.ndarray:
    """The estimates behind each parent, by candidate."""
    path_p = calibration.path_probabilities(forest)
    return path_p[R:] / path_p[forest.parents[R:]]


def planted(forest: Forest, power: float, by_rank: tuple[float, ...]) -> np.ndarray:
    """A law of score and rank, by node; roots have 1. One proposal a node."""
    law = np.ones(len(forest))
    told = forest.tries
    law[told.nodes] = np.exp(told.scores) ** power * np.array(by_rank)[told.ranks]
    return law


def taught(calibration: Calibration, seed: int, power: float, by_rank: tuple[float, ...], steps: int = 150) -> float:
    """Mean absolute error of the estimates after `steps` steps under the law; SSMs draft in turn, apart."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        forest = merge_drafts([0] * R, [[bush(rng, NEAR)] for _ in range(R)])
        calibration.observe(forest, committed(rng, forest, planted(forest, power, by_rank)))
    forest = merge_drafts([0] * R, [[bush(rng, NEAR)] for _ in range(R)])
    return float(np.abs(chances(calibration, forest) - planted(forest, power, by_rank)[R:]).mean())


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_law_is_found_and_found_again_when_it_changes(seed: int) -> None:
    """Scores that overclaim, ranks that count; then a better SSM, then a useless one."""
    calibration = Calibration()
    assert taught(calibration, seed, 2.0, (0.9, 0.5, 0.3), steps=0) > 0.1
    assert taught(calibration, seed, 2.0, (0.9, 0.5, 0.3)) < 0.07
    assert taught(calibration, seed, 1.0, (0.99, 0.99, 0.99), steps=250) < 0.07
    assert taught(calibration, seed, 1.0, (0.1, 0.1, 0.1), steps=250) < 0.07


def test_the_first_estimate_is_the_score_shrunk() -> None:
    """Before anything was seen, more is claimed than will come."""
    rng = np.random.default_rng(0)
    forest = merge_drafts([0] * R, [[bush(rng, NEAR)] for _ in range(R)])
    assert chances(Calibration(), forest) == pytest.approx(0.85 * np.exp(forest.tries.scores), rel=1e-5)


def test_each_ssm_has_its_own_law() -> None:
    """What one SSM's scores are worth says nothing of another's."""
    rng, calibration = np.random.default_rng(1), Calibration()
    taught(calibration, 1, 1.0, (0.1, 0.1, 0.1))
    near, far = ([[bush(rng, ssm)] for _ in range(R)] for ssm in (NEAR, FAR))
    for forest, worth in ((merge_drafts([0] * R, near), 0.1), (merge_drafts([0] * R, far), 0.85)):
        assert chances(calibration, forest).mean() == pytest.approx(worth * np.exp(forest.tries.scores).mean(), rel=0.2)


def test_what_agreement_is_worth_is_learned() -> None:
    """Two SSMs that say the same because they copy each other: the second adds nothing in the end."""
    rng, calibration = np.random.default_rng(2), Calibration()

    def copies() -> Forest:
        drafts = [bush(rng, NEAR) for _ in range(R)]
        return merge_drafts([0] * R, [[one, ScoredDraft(FAR, one.tokens, one.parents, one.scores)] for one in drafts])

    def law(forest: Forest) -> np.ndarray:
        first = forest.tries.scores[forest.starts]
        return np.concatenate([np.ones(R), 0.9 * np.exp(first.astype(np.float64))])

    forest = copies()
    assert np.mean(chances(calibration, forest) - law(forest)[R:]) > 0.05
    for _ in range(150):
        forest = copies()
        calibration.observe(forest, committed(rng, forest, law(forest)))
    forest = copies()
    assert np.abs(chances(calibration, forest) - law(forest)[R:]).mean() < 0.03


def test_several_proposals_make_a_node_likelier() -> None:
    """Noisy or: missed only if all of them err; children of one parent never share more than 1."""
    rng = np.random.default_rng(3)
    drafts = [[bush(rng, NEAR), bush(rng, FAR)] for _ in range(R)]

    def estimates(batch: list[list[ScoredDraft]]) -> np.ndarray:
        forest = merge_drafts([0] * R, batch)
        return chances(Calibration(), forest)[np.lexsort((forest.tokens[R:], forest.requests[R:]))].reshape(R, 6)

    alone = [estimates([[own[ssm]] for own in drafts]) for ssm in (0, 1)]
    expected = 1.0 - (1.0 - alone[0]) * (1.0 - alone[1])
    expected[:, :3] /= np.maximum(expected[:, :3].sum(axis=1, keepdims=True), 1.0)
    assert estimates(drafts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "behind"),
    [([], []), ([99], [0, 1, 2]), ([2], [0, 1, 2]), ([2, 12, 99], [0, 1, 2, 4]), ([2, 99], [0, 1, 2, 4])],
)
def test_only_what_stands_behind_the_path_is_learned_from(path: list[int], behind: list[int]) -> None:
    """As if the other candidates had not been there; a step without tokens teaches nothing, a bonus token counts."""
    rng = np.random.default_rng(4)
    whole = bush(rng, NEAR)
    part = ScoredDraft(NEAR, whole.tokens[behind], np.minimum(whole.parents[behind], 2), whole.scores[behind])
    probe = merge_drafts([0] * R, [[bush(rng, NEAR)] for _ in range(R)])

    def taught_by(draft: ScoredDraft) -> np.ndarray:
        calibration, forest = Calibration(), merge_drafts([0, 0], [[draft], []])
        for _ in range(20):
            calibration.observe(forest, [path, [7, 7, 7, 7]])
        return chances(calibration, probe)

    assert taught_by(whole) == pytest.approx(taught_by(part))
    assert np.array_equal(taught_by(whole), chances(Calibration(), probe)) == (not path)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(0, 30))
def test_path_probabilities_fall_along_every_path(seed: int, steps: int) -> None:
    """Whatever was learned, also from nonsense: within (0, 1], and never more than the parent's."""
    rng, calibration = np.random.default_rng(seed), Calibration()
    for _ in range(steps):
        forest = merge_drafts([0, 0], [[bush(rng, NEAR), bush(rng, FAR, (1, 5))], []])
        calibration.observe(forest, [rng.choice([1, 2, 5, 11, 12, 99], rng.integers(0, 4)).tolist(), [1, 2, 3]])
    sure = ScoredDraft(NEAR, np.array([1, 2, 3], np.int32), np.array([0, 1, 2], np.int32), np.zeros(3, np.float32))
    forest = merge_drafts([0, 0], [[sure, bush(rng, FAR)], [bush(rng, NEAR)]])
    path_p = calibration.path_probabilities(forest)
    assert np.all(path_p[:2] == 1.0)
    assert np.all((path_p > 0.0) & (path_p <= 1.0))
    assert np.all(path_p[2:] <= path_p[forest.parents[2:]])


def test_a_forest_of_roots() -> None:
    """Nothing drafted: roots are certain, and there is nothing to learn."""
    calibration, forest = Calibration(), merge_drafts([1, 2], [(), ()])
    calibration.observe(forest, [[5], []])
    assert calibration.path_probabilities(forest).tolist() == [1.0, 1.0]
