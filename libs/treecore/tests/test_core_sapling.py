"""Trees that grow best first and stay between steps, against an oracle that knows texts alone; through FakeSsm."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.codec import decode, encode
from treecore.expand import NO_DRAFT, Expansion, Growth
from treecore.law import Distribution
from treecore.messages import DraftedItem, DraftItem, DraftReply, DraftRequest, RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.sampling import most_likely_shares
from treecore.testing.best_first import BestFirstOracle, told_paths
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeSize, FakeSsm

MODEL = ScriptedModel(vocab_size=13, seed=5)
CONTEXT_LEN = 24
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(1))
COUPLED = SamplingParams(0.8, 0, 1.0, Seed(2))
NAIVE = SamplingParams(0.8, 0, 1.0, Seed(3), rule="naive")

growths = st.builds(Growth, st.integers(0, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))


def ssm() -> FakeSsm:
    """A worker that holds nothing."""
    return FakeSsm(MODEL, WorkerId("s"), size=FakeSize(context_len=CONTEXT_LEN))


def item(committed: Sequence[int], growth: Growth | None, params: SamplingParams | None, start: int = 0) -> DraftItem:
    """Request r."""
    return DraftItem(RequestId("r"), 0, start, np.array(committed[start:], np.int32), params, NO_DRAFT, growth)


def step(worker: FakeSsm, *items: DraftItem, session: str = "me", released: tuple[str, ...] = ()) -> DraftReply:
    """One step, over the wire's bytes."""
    request = DraftRequest(session, 0, tuple(map(RequestId, released)), items)
    return decode(encode(worker.step(decode(encode(request), DraftRequest))), DraftReply)


def only(reply: DraftReply) -> DraftedItem:
    """Its one tree."""
    (drafted,) = reply.items
    return drafted


@pytest.mark.parametrize("params", [GREEDY, COUPLED, NAIVE], ids=["greedy", "coupled", "naive"])
@given(data=st.data(), prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20))
def test_growing_and_moving_on_equals_the_oracle(
    params: SamplingParams, prompt: list[int], data: st.DataObject
) -> None:
    """Steps with any growths, down told paths, beside them or nowhere: what is told is what the oracle tells."""
    worker, committed = ssm(), prompt
    oracle = BestFirstOracle(MODEL.logits, params, CONTEXT_LEN)
    for _ in range(data.draw(st.integers(1, 4))):
        growth = data.draw(growths)
        found = told_paths(only(step(worker, item(committed, growth, params))))
        expected = oracle.answer(committed, growth)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, abs=1e-4)
        moves = [(), *found, (data.draw(st.integers(0, 12)),)]
        committed = [*committed, *data.draw(st.sampled_from(moves))][:CONTEXT_LEN]


def test_a_step_sent_twice_grows_on() -> None:
    """The same tokens again: nothing is lost, and twice two forwards tell what four do."""
    worker, fresh = ssm(), ssm()
    two, four = Growth(2, 1, 3, 12), Growth(4, 1, 3, 12)
    step(worker, item([1, 2], two, COUPLED))
    again = told_paths(only(step(worker, item([1, 2], two, None, start=1))))
    assert again == told_paths(only(step(fresh, item([1, 2], four, COUPLED))))
    held = told_paths(only(step(worker, item([1, 2], Growth(0, 1, 3, 12), None, start=1))))
    assert held == again


@pytest.mark.parametrize("lost", ["release", "session", "static", "other parameters"])
def test_a_tree_is_dropped_with_what_it_hangs_on(lost: str) -> None:
    """Then no forwards tell no nodes."""
    worker, nothing = ssm(), Growth(0, 1, 1, 9)
    step(worker, item([1, 2], Growth(2, 2, 2, 9), COUPLED))
    if lost == "release":
        step(worker, released=("r",))
    if lost == "static":
        step(worker, DraftItem(RequestId("r"), 0, 1, np.array([2], np.int32), None, Expansion((1,))))
    params = GREEDY if lost == "other parameters" else COUPLED
    reply = step(worker, item([1, 2], nothing, params), session="next" if lost == "session" else "me")
    assert told_paths(only(reply)) == {}


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
def test_what_is_drawn_never_grows_by_its_scores(rule: Rule) -> None:
    """What is kept of draws must not depend on them: refused. A greedy request draws nothing."""
    drawing = SamplingParams(0.8, 0, 1.0, Seed(2), rule=rule)
    assert [refused.reason for refused in step(ssm(), item([1], Growth(1, 1, 2, 4), drawing)).refused] == [
        "malformed_message"
    ]
    greedy = SamplingParams(0.0, 0, 1.0, Seed(2), rule=rule)
    assert len(only(step(ssm(), item([1], Growth(1, 1, 2, 4), greedy))).tokens) == 2


def test_the_context_ends_a_tree() -> None:
    """The last position grows children; children beyond it do not."""
    full = [1] * CONTEXT_LEN
    assert set(map(len, told_paths(only(step(ssm(), item(full, Growth(5, 2, 2, 50), GREEDY)))))) == {1}
    assert set(map(len, told_paths(only(step(ssm(), item(full[1:], Growth(5, 2, 2, 50), GREEDY)))))) == {1, 2}


def test_shares_are_numbers_whatever_the_law() -> None:
    """A tiny temperature makes all others all but impossible; what has no mass is no child."""
    law = Distribution(np.arange(4, dtype=np.int32), np.array([-3e38, 0.0, -np.inf, -1e9], np.float32))
    tokens, shares = most_likely_shares(law, 4)
    assert tokens.tolist() == [1, 3, 0]
    assert shares.tolist() == [0.0, -1e4, -1e4]
