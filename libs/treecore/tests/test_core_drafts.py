"""Draws of children: the law that travels, drawing order, and draws that repeat."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.drafts import DRAFT_SUPPORT, column_at, draw_children, exact, law_left
from treecore.law import Distribution
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams


def params_of(rule: Rule, seed: int = 0) -> SamplingParams:
    """Nothing but the rule and the seed matters here."""
    return SamplingParams(1.0, 0, 1.0, Seed(seed), rule=rule)


@st.composite
def laws(draw: st.DrawFn) -> Distribution:
    """Unnormalised log-probs with ties, impossible tokens and holes in the ids; one token at least is possible."""
    ids = np.array(sorted(draw(st.sets(st.integers(0, 200), min_size=1, max_size=60))), np.int32)
    values = st.sampled_from([0.0, -1.0, -3.5, -40.0, -200.0, -np.inf])
    logp = np.array([draw(values) for _ in ids], np.float32)
    logp[draw(st.integers(0, len(ids) - 1))] = 5.0
    return Distribution(ids, logp)


rules = st.sampled_from(["multi_step", "multi_step_iid"])


@given(laws(), st.integers(0, 40), rules, st.integers(0, 2**16))
def test_children_come_from_the_law_that_travels(law: Distribution, count: int, rule: Rule, seed: int) -> None:
    """The most likely tokens at most, normalised, all possible; every child is one of them."""
    drawn = draw_children(law, count, params_of(rule, seed), 5, 0)
    assert (drawn.tokens.dtype, drawn.token_ids.dtype, drawn.q.dtype) == (np.int32, np.int32, np.float32)
    assert 1 <= len(drawn.token_ids) == len(drawn.q) <= DRAFT_SUPPORT
    assert np.all(np.diff(drawn.token_ids) > 0)
    assert np.all(drawn.q > 0.0)
    assert abs(float(drawn.q.sum()) - 1.0) < 1e-5
    assert set(drawn.tokens.tolist()) <= set(drawn.token_ids.tolist())
    left_out = law.logp[~np.isin(law.token_ids, drawn.token_ids)]
    kept = law.logp[np.isin(law.token_ids, drawn.token_ids)]
    assert len(left_out) == 0 or left_out.max() <= kept.min()


@given(laws(), st.integers(0, 40), st.integers(0, 2**16))
def test_without_replacement_no_token_comes_twice(law: Distribution, count: int, seed: int) -> None:
    """And all of a small support come, if so many are wanted."""
    drawn = draw_children(law, count, params_of("multi_step", seed), 5, 0)
    assert len(set(drawn.tokens.tolist())) == len(drawn.tokens) == min(count, len(drawn.token_ids))


@given(laws(), st.integers(0, 12), rules, st.integers(0, 2**16))
def test_draws_repeat_and_do_not_depend_on_how_many(law: Distribution, count: int, rule: Rule, seed: int) -> None:
    """A retry draws the same children; the first ones are the same however many follow."""
    many = draw_children(law, 12, params_of(rule, seed), 5, 2)
    few = draw_children(law, count, params_of(rule, seed), 5, 2)
    np.testing.assert_array_equal(many.tokens[:count], few.tokens)


def test_iid_draws_all_of_them() -> None:
    """Duplicates stay: as many children as were asked for."""
    law = Distribution(np.array([4, 8], np.int32), np.zeros(2, np.float32))
    assert len(draw_children(law, 12, params_of("multi_step_iid"), 5, 0).tokens) == 12


def test_other_keys_draw_others() -> None:
    """Seeds, positions and SSMs draw independently: over a flat law of 32 they rarely agree."""
    law = Distribution(np.arange(32, dtype=np.int32), np.zeros(32, np.float32))
    keys = [(seed, position, ssm_idx) for seed in (0, 1) for position in (3, 4) for ssm_idx in (0, 1)]
    drawn = [draw_children(law, 4, params_of("multi_step", seed), *key).tokens.tobytes() for seed, *key in keys]
    assert len(set(drawn)) == len(keys)


@pytest.mark.parametrize("u", [2.0**-53, 0.25, 0.5, 1.0 - 2.0**-53])
def test_no_mass_is_never_picked(u: float) -> None:
    """Neither before, between nor behind the columns that have mass, at the ends of u's range too."""
    assert column_at(np.array([0.0, 0.3, 0.0, 1e-300, 0.2, 0.0, 0.0]), u) in (1, 3, 4)
    assert column_at(np.array([0.0, 1.0 + 2.0**-52, 0.0]), u) == 1


def test_law_left_after_nearly_everything_is_drawn() -> None:
    """The rest is renormalised without cancellation; nothing is left behind the last."""
    q = exact(np.array([1.0, 1e-30, 3e-30], np.float32))
    left = law_left(q, [0])
    assert left is not None
    np.testing.assert_allclose(left, [0.0, 0.25, 0.75], rtol=1e-6)
    assert law_left(q, [0, 1, 2]) is None
