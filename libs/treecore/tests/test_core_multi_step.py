"""The multi_step walk on given laws: what must, what must never be accepted, hostile masses, the verifier's part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.accept import Accepted
from treecore.errors import WireError
from treecore.law import Distribution
from treecore.multi_step import masses_at, outside_draw, shrunk, supports_of, walk_multi_step
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sparse import DraftLaws, Masses, Supports
from treecore.tree import TokenTree

NO_LOGPROBS = np.empty(0, np.float32)
PARAMS = SamplingParams(1.0, 0, 1.0, Seed(4), rule="multi_step")
NONE = Masses(np.empty(0, np.float32), NO_LOGPROBS)


def star(q: list[float], children: list[int]) -> TokenTree:
    """A root and children drawn from q over tokens 0, 1, ..."""
    ids = np.arange(len(q), dtype=np.int32)
    laws = DraftLaws(Supports(np.array([0], np.int32), np.array([len(q)], np.int32), ids), np.array(q, np.float32))
    parents = np.array([-1] + [0] * len(children), np.int32)
    return TokenTree.checked(np.array([9, *children], np.int32), parents, 0, laws)


def stepped(tree: TokenTree, p: list[float], outside: int, params: SamplingParams = PARAMS) -> Accepted:
    """The walk over a star; behind each child the LLM says 7."""
    llm_tokens = np.array([outside] + [7] * (len(tree) - 1), np.int32)
    masses = Masses(np.array(p, np.float32), NO_LOGPROBS)
    return walk_multi_step(tree, llm_tokens, masses, supports_of(tree), params, 12)


def seeded(seed: int) -> SamplingParams:
    """A request of its own."""
    return SamplingParams(1.0, 0, 1.0, Seed(seed), rule="multi_step")


def test_root_only_yields_the_llms_token() -> None:
    """Nothing was drawn: incremental decoding."""
    accepted = walk_multi_step(TokenTree.of_root(4), np.array([8], np.int32), None, None, PARAMS, 5)
    assert (accepted.nodes, accepted.tokens) == ((), (8,))


def test_the_llm_itself_as_ssm_is_always_accepted() -> None:
    """As q is p: the first try, then the bonus token."""
    for seed in range(200):
        accepted = stepped(star([0.5, 0.25, 0.25], [2, 1]), [0.5, 0.25, 0.25], -1, seeded(seed))
        assert (accepted.nodes, accepted.tokens) == ((1,), (2, 7))


def test_rubbish_is_never_accepted() -> None:
    """P has nothing on the drafts: what follows is the LLM's draw outside of them."""
    for seed in range(200):
        accepted = stepped(star([0.5, 0.5], [1, 0]), [0.0, 0.0], 5, seeded(seed))
        assert (accepted.nodes, accepted.tokens) == ((), (5,))


def test_mass_that_rounding_left_outside_is_not_drawn_from() -> None:
    """Nothing is outside (-1): the fp32 masses need not sum to 1 for a token to be found inside."""
    for seed in range(400):
        accepted = stepped(star([0.9, 0.1], [0]), [0.3, 0.6], -1, seeded(seed))
        assert accepted.tokens[0] in (0, 1)


def test_no_mass_is_left_but_a_rejection_falls() -> None:
    """Where r = q up to rounding, the residual stays as it was: its tokens all have p."""
    r = np.array([0.25, 0.75, 0.0])
    np.testing.assert_array_equal(shrunk(r, r), r)


def test_a_try_that_cannot_have_been_drawn_is_none() -> None:
    """An SSM that sends a token twice where it should draw without replacement: the second is not tried."""
    for seed in range(200):
        accepted = stepped(star([0.5, 0.5], [0, 0]), [0.1, 0.1], 5, seeded(seed))
        assert accepted.nodes in ((), (1,))


def test_retries_fall_the_same_way() -> None:
    """The same step twice: the same path."""
    for seed in range(50):
        tree = star([0.4, 0.3, 0.3], [0, 2])
        assert stepped(tree, [0.2, 0.2, 0.2], 6, seeded(seed)) == stepped(tree, [0.2, 0.2, 0.2], 6, seeded(seed))


@pytest.mark.parametrize(
    "p",
    [
        pytest.param([0.5], id="too-short"),
        pytest.param([0.5, 0.2, 0.1], id="too-long"),
        pytest.param([-0.1, 0.5], id="negative"),
        pytest.param([np.nan, 0.5], id="no-number"),
        pytest.param([np.inf, 0.5], id="infinite"),
        pytest.param([0.8, 0.8], id="above-1"),
    ],
)
def test_masses_that_are_none_are_refused(p: list[float]) -> None:
    """A WireError, not a token."""
    with pytest.raises(WireError):
        stepped(star([0.5, 0.5], [1]), p, 5)


def test_missing_masses_and_tokens_are_refused() -> None:
    """No masses where draws need them, masses where there are none, no token behind a leaf, no mass anywhere."""
    tree = star([0.5, 0.5], [1])
    llm_tokens = np.array([5, 5], np.int32)
    with pytest.raises(WireError):
        walk_multi_step(tree, llm_tokens, None, supports_of(tree), PARAMS, 5)
    with pytest.raises(WireError):
        walk_multi_step(TokenTree.of_root(1), llm_tokens[:1], NONE, None, PARAMS, 5)
    with pytest.raises(WireError):
        walk_multi_step(TokenTree.of_root(1), -llm_tokens[:1], None, None, PARAMS, 5)
    with pytest.raises(WireError):
        stepped(tree, [0.0, 0.0], -1)


@given(st.lists(st.sampled_from([-np.inf, -30.0, -2.0, 0.0, 1.5]), min_size=1, max_size=12), st.data())
def test_masses_and_outside_draws_share_the_law(values: list[float], data: st.DataObject) -> None:
    """Masses at all tokens sum to 1, 0 for what is not in the law; the draw lies outside, and is there if mass is."""
    logp = np.array([*values, 0.5], np.float32)
    ids = np.arange(len(logp), dtype=np.int32) * 3
    support = np.array(sorted(data.draw(st.sets(st.integers(0, 40), min_size=1))), np.int32)
    law = Distribution(ids, logp)
    everywhere = masses_at(law, np.arange(60, dtype=np.int32))
    assert abs(float(everywhere.sum()) - 1.0) < 1e-5
    np.testing.assert_array_equal(masses_at(law, support), everywhere[support])
    token = outside_draw(law, support, PARAMS, 17)
    possible = set(ids[logp > -np.inf].tolist()) - set(support.tolist())
    assert token in (possible or {-1})
