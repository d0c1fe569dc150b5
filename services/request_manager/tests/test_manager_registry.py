"""Who is alive, as announcements tell, and placement of requests on replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from request_manager.contract import Generation
from request_manager.manager.registry import Registry
from request_manager.manager.testing import POLICY, Recorder, running_stage
from request_manager.roster import Watch, watch
from treecore.codec import MAX_PAYLOAD_BYTES, decode, encode
from treecore.expand import Expansion
from treecore.messages import ANNOUNCE, HELLO, Announcement, BlockUsage, Hello, RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.service.presence import SILENCE_IS_LOSS_S
from treecore.testing.bus import Call, FakeBus, Fate
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

LLM = ScriptedModel(20)
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))


def verifier(name: str = "v") -> FakeVerifier:
    """The LLM."""
    return FakeVerifier(LLM, WorkerId(name), "llm")


def ssm(name: str, model_name: str = "ssm", model: ScriptedModel = LLM, context_len: int = 4096) -> FakeSsm:
    """A worker of the SSM `model_name`."""
    return FakeSsm(model, WorkerId(name), model_name, FakeSize(context_len=context_len))


class Clock:
    """Time, by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_workers_come_and_go_by_their_announcements() -> None:
    """Known from the first announcement to the last, in the order of appearance, by kind."""
    clock = Clock()
    registry = Registry(clock, "me")
    for worker in (verifier("v1"), ssm("s1"), verifier("v2")):
        registry.hear(worker.announcement())
    assert [worker.worker_id for worker in registry.live("verifier")] == ["v1", "v2"]
    first = registry.live("verifier")[0]
    registry.hear(verifier("v1").announcement(leaving=True))
    registry.hear(verifier("nobody").announcement(leaving=True))
    assert [worker.worker_id for worker in registry.live("verifier")] == ["v2"]
    assert not first.life.is_cut, "it owes an answer to whoever asked before"
    clock.now_s += SILENCE_IS_LOSS_S + 0.01
    registry.expire()
    assert first.life.is_cut
    assert registry.losses == {("verifier", "left"): 1, ("verifier", "silent"): 1, ("ssm", "silent"): 1}


def test_silence_is_loss_and_an_announcement_is_life() -> None:
    """Exactly behind the limit; whoever spoke in between stays; who comes back is new."""
    clock = Clock()
    registry = Registry(clock, "me")
    registry.hear(verifier("quiet").announcement())
    registry.hear(verifier("alive").announcement())
    quiet = registry.live("verifier")[0]
    clock.now_s += SILENCE_IS_LOSS_S
    registry.expire()
    assert not quiet.life.is_cut
    registry.hear(verifier("alive").announcement())
    clock.now_s += 0.01
    registry.expire()
    assert quiet.life.is_cut
    assert registry.losses == {("verifier", "silent"): 1}
    assert [worker.worker_id for worker in registry.live("verifier")] == ["alive"]
    registry.hear(verifier("quiet").announcement())
    assert not registry.live("verifier")[1].life.is_cut


def test_a_later_announcement_brings_later_facts() -> None:
    """Block usage moves; `changed` tells of comings and goings only."""
    registry = Registry(Clock(), "me")
    registry.hear(verifier().announcement())
    registry.changed.clear()
    usage = BlockUsage(1, 2, 3, 6, 4)
    registry.hear(replace(verifier().announcement(), blocks=usage))
    assert registry.live("verifier")[0].announcement.blocks == usage
    assert not registry.changed.is_set()


@asynccontextmanager
async def watching(
    bus: FakeBus, recorder: Recorder | None = None
) -> AsyncIterator[tuple[Registry, asyncio.Queue[str]]]:
    """A watched registry, and the Hellos that it sends."""
    registry, hellos = Registry(asyncio.get_running_loop().time, "me"), asyncio.Queue[str]()

    async def on_hello(body: bytes) -> None:
        hellos.put_nowait(decode(body, Hello).sender)

    await bus.subscribe(HELLO, on_hello)
    who = Watch(ANNOUNCE, Announcement, "me", (recorder or Recorder()).on_dropped)
    task = asyncio.create_task(watch(registry, bus, who))
    try:
        yield registry, hellos
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


async def test_watching_greets_and_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hello at the start and behind each reconnect; nonsense on the subject is survived, and counted."""
    monkeypatch.setattr("request_manager.roster.ANNOUNCE_INTERVAL_S", 0.0)
    bus, recorder = FakeBus(), Recorder()
    async with watching(bus, recorder) as (registry, hellos), asyncio.timeout(10):
        assert await hellos.get() == "me"
        for body in (b"", b"nonsense", encode(Hello("x")), encode(verifier().announcement())):
            await bus.publish(ANNOUNCE, body)
        await registry.changed.wait()
        assert recorder.dropped["malformed_message"] == 3
        bus.disconnect()
        await asyncio.sleep(0)
        bus.reconnect()
        assert await hellos.get() == "me"


def generation(idx: int, prompt_len: int = 4, max_tokens: int = 9) -> Generation:
    """A greedy request."""
    prompt = (np.arange(prompt_len, dtype=np.int32) + idx) % 20
    return Generation(RequestId(f"r{idx}"), prompt, GREEDY, max_tokens)


async def test_requests_spread_over_replicas_and_stay_there() -> None:
    """Two workers of one SSM share the requests; each request's tree comes from one of them."""
    replicas = [ssm("one"), ssm("two")]
    async with running_stage(verifier(), *replicas) as stage:
        outcomes = asyncio.gather(*[stage.outcome(generation(idx)) for idx in range(4)])
        await stage.until(lambda: all(len(replica.held_ids) == 2 for replica in replicas))
        placed = [replica.held_ids for replica in replicas]
        assert not placed[0] & placed[1]
        await outcomes
        await stage.settle()


async def test_several_ssms_draft_for_every_request() -> None:
    """Two SSMs of different names: both hold every request, and the merged tree keeps the budget."""
    ssms = [ssm("one", "a"), ssm("two", "b", ScriptedModel(20, seed=5))]
    policy = replace(POLICY, expansion=Expansion((3, 2)), max_tree_nodes=8)
    async with running_stage(verifier(), *ssms, policy=policy) as stage:
        outcomes = asyncio.gather(*[stage.outcome(generation(idx)) for idx in range(2)])
        await stage.until(lambda: all(worker.held_ids == {"r0", "r1"} for worker in ssms))
        await outcomes
        assert max(record.num_drafted for record in stage.recorder.steps) == 2 * 7


async def test_a_request_is_drafted_for_by_the_ssms_that_it_names() -> None:
    """Others never hear of it; a name that is not here costs its part of the tree only."""
    ssms = {name: ssm(f"w-{name}", name) for name in ("a", "b")}
    named = (frozenset({"a"}), frozenset({"b", "gone"}), frozenset({"gone"}))
    heard: dict[str, set[str]] = {name: set() for name in ssms}
    asks = [replace(generation(idx), ssms=names) for idx, names in enumerate(named)]

    async with running_stage(verifier(), *ssms.values()) as stage:

        def listen(_call: Call) -> Fate:
            for name, worker in ssms.items():
                heard[name] |= worker.held_ids
            return Fate.DELIVER

        stage.bus.rule = listen
        outcomes = await asyncio.gather(*[stage.outcome(ask) for ask in asks])
    assert heard == {"a": {"r0"}, "b": {"r1"}}
    assert len({len(outcome.tokens) for outcome in outcomes}) == 1
    assert outcomes[0].steps < len(outcomes[0].tokens) == outcomes[2].steps


async def test_an_ssm_of_another_vocabulary_is_not_asked() -> None:
    """Its tokens would mean other words."""
    other = FakeSsm(ScriptedModel(21), WorkerId("s"), "other")
    async with running_stage(verifier(), other) as stage:
        await stage.outcome(generation(0))
    assert other.num_steps == 0


async def test_a_prompt_beyond_the_ssms_context_is_decoded_without_it() -> None:
    """The text goes on where the SSM's context ends; other requests are drafted for as before."""
    small = ssm("s", context_len=12)
    async with running_stage(verifier(), small) as stage:
        outcomes = await asyncio.gather(
            stage.outcome(generation(0, prompt_len=40)), stage.outcome(generation(1, max_tokens=30))
        )
        await stage.settle()
    assert [len(outcome.tokens) for outcome in outcomes] == [9, 30]
    assert sum(record.num_accepted for record in stage.recorder.steps) > 0
    assert not stage.bus.failures


async def test_drafts_too_large_for_a_message_cost_the_draft_only() -> None:
    """The SSM lost a prompt that no single message can carry: the steps go on with the root alone."""
    prompt = np.zeros(MAX_PAYLOAD_BYTES // 4, np.int32)
    size = FakeSize(context_len=2 * len(prompt), num_blocks=len(prompt))
    policy = replace(POLICY, step_rows=len(prompt) // 2)
    drafter = FakeSsm(LLM, WorkerId("s"), "ssm", size)

    def forgetful(_call: Call) -> Fate:
        drafter.forget()
        return Fate.DELIVER

    async with running_stage(FakeVerifier(LLM, WorkerId("v"), "llm", size), drafter, policy=policy) as stage:
        stage.bus.rule = forgetful
        outcome = await stage.outcome(Generation(RequestId("long"), prompt, GREEDY, 5))
        await stage.settle()
    assert len(outcome.tokens) == 5
    assert stage.recorder.dropped["no_draft"] > 0
