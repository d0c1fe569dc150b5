"""One request, one SSM worker and one verifier as the coordinator holds them, each alone."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from request_manager.contract import Generation, TokenDelta
from request_manager.manager.drafting import NOTHING, Drafter, DraftLink, DraftWish
from request_manager.manager.registry import Registry, Worker
from request_manager.manager.request import Request
from request_manager.manager.testing import Recorder, running_stage
from request_manager.manager.verifying import VerifierLink
from treecore.errors import Unavailable, Unreachable
from treecore.expand import NO_DRAFT, Expansion
from treecore.messages import DraftedItem, DraftItem, RefusedItem, RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, FakeBus, Fate, Verdict, fail_nth
from treecore.testing.scripted import ScriptedModel, decode_alone
from treecore.testing.workers import FakeSsm, FakeVerifier

LLM = ScriptedModel(20)
EOS = 3
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0), end_token_ids=(EOS,))
ONE = Expansion((1,))


async def some_turns() -> None:
    """Let everything that can go on go on; a fake exchange takes fewer turns of the event loop."""
    for _ in range(50):
        await asyncio.sleep(0)


def request(max_tokens: int = 5) -> Request:
    """A request with four prompt tokens."""
    return Request(Generation(RequestId("r"), np.array([9, 9, 9, 9], np.int32), GREEDY, max_tokens), asyncio.Queue())


# -- Request ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "kept", "reason"),
    [
        ((5,), (5,), None),
        ((5, 6, 7, 8), (5, 6, 7, 8), None),
        ((5, 6, 7, 8, 1), (5, 6, 7, 8, 1), "length"),
        ((5, 6, 7, 8, 1, 2, EOS), (5, 6, 7, 8, 1), "length"),
        ((5, EOS, 7), (5, EOS), "stop"),
        ((EOS, EOS), (EOS,), "stop"),
        ((5, 6, 7, 8, EOS), (5, 6, 7, 8, EOS), "stop"),
        ((5, 6, 7, 8, EOS, 9, 9), (5, 6, 7, 8, EOS), "stop"),
    ],
)
def test_commit_cuts_behind_eos_and_at_the_limit(
    accepted: tuple[int, ...], kept: tuple[int, ...], reason: str | None
) -> None:
    """Nothing behind EOS, nothing beyond max_tokens (5), EOS first; the client is told exactly what stays."""
    one = request()
    assert one.commit(accepted, len(accepted) - 1) == len(kept)
    assert one.committed == [9, 9, 9, 9, *kept]
    assert one.outbox.get_nowait() == TokenDelta(kept, reason, 1, min(len(accepted) - 1, len(kept)))  # type: ignore[arg-type]
    assert one.finish_reason == reason


def test_another_verifier_holds_nothing() -> None:
    """What one verifier holds says nothing of another."""
    one = request()
    one.holds(WorkerId("a"), 3)
    assert (one.held_len(WorkerId("a")), one.held_len(WorkerId("b"))) == (3, 0)
    assert one.tokens_between(3, 4).tolist() == [9]


# -- Drafter ----------------------------------------------------------------------------------------------------------


async def drafter_on(bus: FakeBus) -> tuple[Drafter, FakeSsm]:
    """A drafter and the SSM worker that it talks to."""
    ssm = FakeSsm(LLM, WorkerId("s"), "ssm")
    await ssm.attach(bus)
    return Drafter(DraftLink(bus, "me", Worker(ssm.announcement(), 0.0), 0, Recorder())), ssm


def wish(one: Request, expansion: Expansion = ONE) -> DraftWish:
    """A tree behind all that is committed."""
    return DraftWish(one, one.committed_len, expansion)


async def test_while_an_answer_is_owed_nobody_waits_or_asks_again() -> None:
    """Late once: further rounds get nothing at once, however much time they have, until it has answered."""
    gate = asyncio.Event()
    bus = FakeBus(lambda _call: gate)
    drafter, ssm = await drafter_on(bus)
    one = request()
    assert await drafter.draft([wish(one)], 0.0) == NOTHING
    assert drafter.is_late
    async with asyncio.timeout(10):
        assert await drafter.draft([wish(one)], 3600.0) == NOTHING
    drafter.begin([wish(one, NO_DRAFT)])
    assert bus.num_calls == 1
    gate.set()
    await some_turns()
    assert not drafter.is_late
    drafts = await drafter.draft([wish(one)], 3600.0)
    assert set(drafts.trees) == {"r"}
    assert ssm.num_steps == 2
    await bus.close()


async def test_a_draft_waits_for_a_prompt_that_is_being_read() -> None:
    """Priming is under way when the tree is wanted: one after the other, within the deadline."""
    bus = FakeBus()
    drafter, ssm = await drafter_on(bus)
    one = request()
    drafter.begin([wish(one, NO_DRAFT)])
    drafts = await drafter.draft([wish(one, Expansion((2, 1)))], 3600.0)
    assert len(drafts.trees[RequestId("r")]) == 5
    assert ssm.num_steps == 2
    await bus.close()


async def test_the_same_step_may_be_drafted_again() -> None:
    """The verifier failed behind the draft: the root is sent again, and the same tree comes back."""
    bus = FakeBus()
    drafter, _ = await drafter_on(bus)
    one = request()
    trees = [(await drafter.draft([wish(one, Expansion((2, 2)))], 3600.0)).trees[one.request_id] for _ in range(2)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    await bus.close()


async def test_nothing_is_owed_for_what_the_worker_never_heard_of() -> None:
    """A release of an unknown request sends nothing."""
    bus = FakeBus()
    drafter, _ = await drafter_on(bus)
    drafter.release(RequestId("unknown"))
    drafter.begin(())
    assert bus.num_calls == 0
    assert not drafter.owes_release
    await bus.close()


async def test_releases_survive_a_lost_message() -> None:
    """Told again with the next message, until the worker has heard it."""
    bus = FakeBus()
    drafter, ssm = await drafter_on(bus)
    one = request()
    await drafter.draft([wish(one)], 3600.0)
    drafter.release(one.request_id)
    bus.rule = fail_nth(bus.num_calls + 1)
    for _ in range(2):
        drafter.begin(())
        await some_turns()
    assert not drafter.owes_release
    assert not ssm.held_ids
    await bus.close()


# -- VerifierLink -----------------------------------------------------------------------------------------------------


async def test_a_verifier_out_of_reach_is_lost_until_it_speaks_again() -> None:
    """No hot loop against a dead worker: it has to announce itself."""
    bus, registry = FakeBus(), Registry(lambda: 0.0, "me")
    verifier = FakeVerifier(LLM, WorkerId("v"), "llm")
    registry.hear(verifier.announcement())
    link = VerifierLink(bus, registry)
    worker = await link.worker()
    assert worker is not None
    with pytest.raises(Unreachable):
        await link.ask(worker, ())
    assert registry.live("verifier") == []
    assert worker.life.is_cut
    assert await link.worker() is None
    await bus.close()


async def test_a_verifier_that_speaks_nonsense_is_lost_too() -> None:
    """Another protocol version, say: its answers cannot be read."""
    bus, registry = FakeBus(), Registry(lambda: 0.0, "me")
    verifier = FakeVerifier(LLM, WorkerId("v"), "llm")
    registry.hear(verifier.announcement())
    await bus.subscribe("verifier.v.step", lambda _body: asyncio.sleep(0, b"\x93\x01\x7f\x03"))
    link = VerifierLink(bus, registry)
    with pytest.raises(Unavailable, match="version"):
        await link.ask(registry.live("verifier")[0], ())
    assert registry.live("verifier") == []
    await bus.close()


async def test_a_failed_verification_does_not_cost_the_next_draft() -> None:
    """The step is planned again and drafted again: no SSM refuses it."""
    failed: list[int] = []

    def rule(call: Call) -> Verdict:
        if call.subject.startswith("verifier") and call.number > 6 and not failed:
            failed.append(call.number)
            return Fate.LOSE_REPLY
        return Fate.DELIVER

    workers = FakeVerifier(LLM, WorkerId("v"), "llm"), FakeSsm(LLM, WorkerId("s"), "ssm")
    async with running_stage(*workers, rule=rule) as stage:
        await stage.outcome(Generation(RequestId("r"), np.array([1, 2, 4], np.int32), GREEDY, 20))
        await stage.settle()
    assert failed
    assert stage.recorder.dropped["no_draft"] == 0


async def test_a_request_does_not_pay_for_a_verifier_that_nobody_can_reach() -> None:
    """Its steps never arrived, ten times in a row, so they say nothing of it: it is served once one does."""
    refused: list[int] = []

    def rule(call: Call) -> Verdict:
        if call.kind == "request" and len(refused) < 10:
            refused.append(call.number)
            return Fate.REFUSE
        return Fate.DELIVER

    async with running_stage(FakeVerifier(LLM, WorkerId("v"), "llm"), rule=rule) as stage:
        outcome = await stage.outcome(Generation(RequestId("r"), np.array([1, 2, 4], np.int32), GREEDY, 3))
    assert len(outcome.tokens) == 3
    assert len(refused) == 10


async def test_laws_of_what_was_not_drawn_are_no_draft() -> None:
    """A stale SSM that draws for a greedy request: its tree is left out, and the tokens stay greedy."""

    class Drawing(FakeSsm):
        def _draft(self, item: DraftItem, ssm_idx: int) -> DraftedItem | RefusedItem:
            drawn = None if item.params is None else replace(item.params, temperature=1.0, rule="multi_step")
            return super()._draft(replace(item, params=drawn), ssm_idx)

    asked = Generation(RequestId("r"), np.array([1, 2, 4], np.int32), GREEDY, 12)
    async with running_stage(FakeVerifier(LLM, WorkerId("v"), "llm"), Drawing(LLM, WorkerId("s"), "ssm")) as stage:
        outcome = await stage.outcome(asked)
        assert stage.recorder.dropped["no_draft"] > 0
    assert outcome.tokens == decode_alone(LLM, [1, 2, 4], GREEDY, 12)[0]
