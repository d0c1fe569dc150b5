"""A gateway's end and managers' ends over one bus: the same tokens whatever is lost between them, and nothing left."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, TokenDelta
from request_manager.manager.coordinator import Policy
from request_manager.manager.testing import POLICY, Stage
from request_manager.relay.desk import Desk
from request_manager.relay.metrics import RelayMetrics
from request_manager.relay.remote import Patience, RemoteManager
from request_manager.roster import Roster, Watch, watch
from treecore.errors import EspalierError, Overloaded, Unavailable
from treecore.messages import RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.service.presence import Announcer
from treecore.streams import (
    ANNOUNCE_MANAGER,
    GatewayId,
    ManagerAnnouncement,
    ModelCard,
    admit_subject,
    streams_subject,
)
from treecore.testing.bus import Call, FakeBus, Fate, Rule, Verdict, deliver_all
from treecore.testing.scripted import ScriptedModel, decode_alone
from treecore.testing.workers import FakeSsm, FakeVerifier

LLM = ScriptedModel(20)
PARAMS = SamplingParams(0.8, 0, 1.0, Seed(7), num_logprobs=2)
PROMPT = np.array([1, 2, 4], np.int32)
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a clock: what is done now and then is done at every turn of the event loop."""
    for name in (
        "request_manager.relay.remote._TELL_S",
        "request_manager.relay.remote._RETRY_S",
        "request_manager.relay.desk._RETRY_S",
        "request_manager.relay.desk._CHECK_S",
        "request_manager.roster.ANNOUNCE_INTERVAL_S",
        "treecore.service.presence.ANNOUNCE_INTERVAL_S",
    ):
        monkeypatch.setattr(name, 0.0)


def generation(max_tokens: int = 12, **changes: object) -> Generation:
    """A sampled request with log-probabilities."""
    params = replace(PARAMS, prompt_len=len(PROMPT))
    return replace(Generation(RequestId("r"), PROMPT, params, max_tokens), **changes)


def alone(one: Generation) -> tuple[int, ...]:
    """What the LLM says alone."""
    return decode_alone(LLM, one.prompt.tolist(), one.params, one.max_tokens)[0]


@dataclass(slots=True)
class Clock:
    """Time, by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class ManagerEnd:
    """A manager with workers of its own, behind a desk."""

    name: str
    bus: FakeBus
    stage: Stage
    clock: Clock = field(default_factory=Clock)
    is_ready: bool = True
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """It announces itself and admits."""
        for worker in (FakeVerifier(LLM, WorkerId(f"v-{self.name}"), "llm"), FakeSsm(LLM, WorkerId(f"s-{self.name}"))):
            await self.stage.add(worker)
        desk = Desk(self.bus, self.stage.coordinator, WorkerId(self.name), self.clock)
        announcer = Announcer(self.bus, self.describe, ANNOUNCE_MANAGER)
        self.tasks = [asyncio.create_task(part) for part in (self.stage.coordinator.run(), desk.run(), announcer.run())]

    def describe(self, leaving: bool) -> ManagerAnnouncement:
        """Its announcement."""
        card = ModelCard("llm", LLM.vocab_size, 4096, (), 16)
        return ManagerAnnouncement(WorkerId(self.name), leaving, self.is_ready, *self.stage.coordinator.load, card)

    async def leave(self) -> None:
        """It is told to stop: it says goodbye."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.deafen()

    def kill(self, managers: Roster[ManagerAnnouncement]) -> None:
        """It dies without a word, and the gateway's roster notices."""
        for task in self.tasks:
            task.cancel()
        self.deafen()
        managers.lose(WorkerId(self.name))

    def deafen(self) -> None:
        """Nobody listens where it did."""
        for subject in (admit_subject(WorkerId(self.name)), streams_subject(WorkerId(self.name))):
            self.bus.silence(subject)


@dataclass(slots=True)
class GatewayEnd:
    """A gateway's end and the managers that it may find."""

    bus: FakeBus
    managers: Roster[ManagerAnnouncement]
    remote: RemoteManager
    registry: CollectorRegistry
    ends: dict[str, ManagerEnd] = field(default_factory=dict)

    async def add(self, name: str, policy: Policy = POLICY) -> ManagerEnd:
        """A manager starts."""
        end = self.ends[name] = ManagerEnd(name, self.bus, Stage(policy, self.bus))
        await end.start()
        return end

    async def tokens(self, one: Generation) -> tuple[int, ...]:
        """All that it yields, checked for what every answer has."""
        async with asyncio.timeout(PATIENCE_S):
            deltas = [delta async for delta in self.remote.generate(one)]
        check_whole(one, deltas)
        return tuple(token for delta in deltas for token in delta.tokens)

    def value(self, name: str, **labels: str) -> float | None:
        """Of one of the gateway's metrics."""
        return self.registry.get_sample_value(f"espalier_{name}", labels)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the event loop turn until `reached()`."""
        async with asyncio.timeout(PATIENCE_S):
            while not reached():  # noqa: ASYNC110 - anything may bring it about
                await asyncio.sleep(0)


def check_whole(one: Generation, deltas: list[TokenDelta]) -> None:
    """One finish reason, at the end; log-probabilities for each token; steps that only grow."""
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas)
    assert all(len(entry.top) == one.params.num_logprobs for delta in deltas for entry in delta.logprobs)
    steps = [delta.steps for delta in deltas]
    assert steps == sorted(set(steps))


@asynccontextmanager
async def gateway(*names: str, rule: Rule = deliver_all, max_waiting: int = 8) -> AsyncIterator[GatewayEnd]:
    """A gateway's end with managers of these names."""
    bus = FakeBus(rule)
    managers = Roster[ManagerAnnouncement](lambda: 0.0)
    registry = CollectorRegistry()
    remote = RemoteManager(bus, managers, GatewayId("g"), Patience(PATIENCE_S, max_waiting), RelayMetrics(registry))
    end = GatewayEnd(bus, managers, remote, registry)
    tasks = [
        asyncio.create_task(part)
        for part in (remote.run(), watch(managers, bus, Watch(ANNOUNCE_MANAGER, ManagerAnnouncement, "g")))
    ]
    for name in names:
        await end.add(name)
    try:
        yield end
    finally:
        for task in (*tasks, *[task for one in end.ends.values() for task in one.tasks]):
            task.cancel()
        endings = await asyncio.gather(*tasks, return_exceptions=True)
        await bus.close()
    assert all(isinstance(ending, asyncio.CancelledError) for ending in endings), endings


async def test_a_remote_manager_says_what_a_local_one_does() -> None:
    """Tokens, log-probabilities and steps; and the card is the manager's."""
    async with gateway("m") as end:
        one = generation()
        assert await end.tokens(one) == alone(one)
        assert end.value("readmissions_total") == 0
        assert end.remote.card().vocab_size == LLM.vocab_size
        await end.ends["m"].stage.settle()


@pytest.mark.parametrize("fate", [Fate.REFUSE, Fate.LOSE_REPLY, Fate.DROP])
async def test_whatever_call_is_lost_the_answer_is_whole(fate: Fate) -> None:
    """The n-th admission, told stream or delta fails, n = 1, 2, ... until none does: the same tokens each time."""
    one, number = generation(), 0
    is_done = False
    while not is_done:
        number += 1
        seen = 0

        def rule(call: Call, number: int = number) -> Verdict:
            nonlocal seen
            if call.subject.startswith(("manager.", "gateway.")) and not call.subject.endswith("streams"):
                seen += 1
                return fate if seen == number else Fate.DELIVER
            return Fate.DELIVER

        async with gateway("m", rule=rule) as end:
            assert await end.tokens(one) == alone(one)
            await end.ends["m"].stage.settle()
        is_done = seen < number
    assert number > 5


@pytest.mark.parametrize("is_killed", [False, True])
async def test_another_manager_goes_on_behind_the_tokens_that_are_there(is_killed: bool) -> None:
    """A manager leaves or dies in mid-stream, at each possible moment: the next one finishes the same answer."""
    one = generation(max_tokens=200)
    for num_before in range(1, 5):
        async with gateway("old") as end:
            async with aclosing(end.remote.generate(one)) as stream, asyncio.timeout(PATIENCE_S):
                deltas = [await anext(stream) for _ in range(num_before)]
                await end.add("new")
                old = end.ends["old"]
                old.kill(end.managers) if is_killed else await old.leave()
                deltas += [delta async for delta in stream]
            check_whole(one, deltas)
            assert tuple(token for delta in deltas for token in delta.tokens) == alone(one)
            assert end.ends["new"].stage.recorder.steps
            assert end.value("readmissions_total") == 1


async def test_a_stream_leaves_a_manager_that_lost_its_verifier() -> None:
    """Where another manager can step, nobody waits for the first one's verifier to come back."""
    one = generation(max_tokens=30)
    async with gateway("old") as end:
        async with aclosing(end.remote.generate(one)) as stream, asyncio.timeout(PATIENCE_S):
            deltas = [await anext(stream)]
            old = end.ends["old"]
            old.stage.kill(next(worker for worker in old.stage.workers if isinstance(worker, FakeVerifier)))
            old.is_ready = False
            await end.add("new")
            deltas += [delta async for delta in stream]
        assert tuple(token for delta in deltas for token in delta.tokens) == alone(one)


async def test_closing_a_stream_cancels_it() -> None:
    """The manager forgets the request, and the workers' caches are free."""
    async with gateway("m") as end:
        async with aclosing(end.remote.generate(generation(max_tokens=4000))) as stream, asyncio.timeout(PATIENCE_S):
            await anext(stream)
        await end.ends["m"].stage.settle()
        assert end.ends["m"].stage.coordinator.load == (0, 0)


async def test_a_gateway_that_falls_silent_takes_its_requests_with_it() -> None:
    """Nobody would read the tokens."""
    async with gateway("m") as end:
        stream = end.remote.generate(generation(max_tokens=4000))
        await anext(stream)
        manager = end.ends["m"]
        end.bus.rule = lambda call: Fate.DROP if call.subject.startswith("manager.") else Fate.DELIVER
        manager.clock.now_s += 60.0
        await manager.stage.settle()
        await stream.aclose()


def is_full_for(num_admissions: int, end: ManagerEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager refuses so many requests for load, and then has room."""
    coordinator = end.stage.coordinator
    submit, refusals = coordinator.submit, iter(range(num_admissions))

    def refuse(*args: object) -> object:
        if next(refusals, None) is not None:
            raise Overloaded("full", 1)
        return submit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(coordinator, "submit", refuse)


async def test_overload_is_told_at_once_but_not_to_who_was_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request is refused; one whose manager went asks again until the next one has room."""
    one = generation(max_tokens=200)
    async with gateway("old") as end:
        async with aclosing(end.remote.generate(one)) as stream, asyncio.timeout(PATIENCE_S):
            deltas = [await anext(stream)]
            is_full_for(4, await end.add("new"), monkeypatch)
            await end.ends["old"].leave()
            with pytest.raises(Overloaded):
                await anext(end.remote.generate(generation(request_id=RequestId("other"))))
            deltas += [delta async for delta in stream]
        assert tuple(token for delta in deltas for token in delta.tokens) == alone(one)


async def test_who_waits_for_room_is_not_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the next manager is full and is told what is open: admitted again once, not given up."""
    monkeypatch.setattr("request_manager.relay.remote._RETRY_S", 0.02)
    one = generation(max_tokens=200)
    async with gateway("old") as end:
        async with aclosing(end.remote.generate(one)) as stream, asyncio.timeout(PATIENCE_S):
            deltas = [await anext(stream)]
            is_full_for(20, await end.add("new"), monkeypatch)
            await end.ends["old"].leave()
            deltas += [delta async for delta in stream]
        assert tuple(token for delta in deltas for token in delta.tokens) == alone(one)
        assert end.value("readmissions_total") == 1


async def test_a_loss_while_it_is_placed_does_not_eat_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost while an admission is under way that is never answered; the next one's short answer is there at once."""
    one = generation(max_tokens=1)
    async with gateway("m") as end:
        ask, num_admissions = end.bus.request, 0

        async def request(subject: str, body: bytes, timeout_s: float) -> bytes:
            nonlocal num_admissions
            if not subject.endswith("admit"):
                return await ask(subject, body, timeout_s)
            num_admissions += 1
            (stream,) = end.remote._streams.values()
            if num_admissions == 1:
                stream.lose()
                raise Unavailable("no answer")
            reply = await ask(subject, body, timeout_s)
            await end.until(lambda: stream.is_over)  # the reply and the deltas come together
            return reply

        monkeypatch.setattr(end.bus, "request", request)
        assert await end.tokens(one) == alone(one)


async def test_without_a_manager_requests_wait_and_too_many_are_refused() -> None:
    """They are served once one comes; beyond the bound 429 at once."""
    async with gateway(max_waiting=1) as end:
        one = generation()
        waiting = asyncio.create_task(end.tokens(one))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await anext(end.remote.generate(generation(request_id=RequestId("more"))))
        with pytest.raises(Unavailable):
            end.remote.card()
        assert (end.value("streams", state="placed"), end.value("streams", state="waiting")) == (0, 1)
        assert not end.remote.is_ready()
        await end.add("m")
        assert await waiting == alone(one)
        assert end.remote.is_ready()


async def test_a_gateway_without_a_link_has_not_lost_its_managers() -> None:
    """The broker restarts: the same manager goes on with the same request, and the gateway has lost nobody."""
    one = generation(max_tokens=60)
    async with gateway("m") as end:
        async with aclosing(end.remote.generate(one)) as stream, asyncio.timeout(PATIENCE_S):
            deltas = [await anext(stream)]
            (before,) = end.managers.members()
            end.bus.disconnect()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not before.life.is_cut
            end.bus.reconnect()
            deltas += [delta async for delta in stream]
        assert tuple(token for delta in deltas for token in delta.tokens) == alone(one)
        assert end.managers.members() == [before]


async def test_an_error_of_the_request_ends_it() -> None:
    """What the manager refuses for good is the client's to hear."""
    async with gateway("m") as end:
        with pytest.raises(EspalierError):
            await end.tokens(generation(max_tokens=0))
