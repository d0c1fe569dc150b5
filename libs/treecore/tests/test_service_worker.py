"""A worker on the bus: it announces itself, answers steps one after another, and never leaves a caller waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from treecore.codec import MAX_PAYLOAD_BYTES, decode, encode
from treecore.errors import Unavailable, WireError
from treecore.messages import (
    ANNOUNCE,
    HELLO,
    Announcement,
    Hello,
    RequestId,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
    WorkerId,
    step_subject,
)
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.service.bus import Broker, NatsBus
from treecore.service.operations import Operations
from treecore.service.presence import Announcer
from treecore.service.settings import ServiceSettings
from treecore.service.tasks import first_of
from treecore.service.worker import serve_worker, take_steps
from treecore.testing.bus import FakeBus, Fate
from treecore.testing.nats import NatsServer
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeVerifier

SUBJECT = step_subject("verifier", WorkerId("v"))
SOON_S = 10.0
LONG_S = 60.0


def worker() -> FakeVerifier:
    """A scripted verifier; how it is served is what is tested."""
    return FakeVerifier(ScriptedModel(20), WorkerId("v"), "llm")


def question(name: str = "r") -> VerifyRequest:
    """One greedy request with two prompt tokens."""
    params = SamplingParams(0.0, 0, 1.0, Seed(0))
    empty = np.empty(0, np.int32)
    return VerifyRequest(
        "me", (), (VerifyItem(RequestId(name), 0, 0, np.array([1, 2], np.int32), params, empty, empty, True),)
    )


class Audience:
    """Hears announcements."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Announcement] = asyncio.Queue()

    async def __call__(self, body: bytes) -> None:
        self.heard.put_nowait(decode(body, Announcement))

    async def next(self) -> Announcement:
        """The next announcement, soon."""
        async with asyncio.timeout(SOON_S):
            return await self.heard.get()


Step = Callable[[VerifyRequest], VerifyReply]


@asynccontextmanager
async def served(bus: FakeBus, step: Step) -> AsyncIterator[tuple[Audience, asyncio.Event, asyncio.Task[None]]]:
    """A worker that serves `step` on `bus`; stopped afterwards unless the test did it."""
    audience, stop, me = Audience(), asyncio.Event(), worker()
    await bus.subscribe(ANNOUNCE, audience)

    async def serve() -> None:
        crashed = await take_steps(bus, me.announcement(), VerifyRequest, step)
        announcer = Announcer(bus, lambda leaving: me.announcement(leaving=leaving))
        await first_of(stop.wait(), announcer.run(), crashed)

    serving = asyncio.create_task(serve())
    try:
        yield audience, stop, serving
    finally:
        stop.set()
        await asyncio.gather(serving, return_exceptions=True)
        await bus.close()


async def test_it_announces_itself_answers_and_says_goodbye() -> None:
    """The whole of a worker's life."""
    bus = FakeBus()
    async with served(bus, worker().step) as (audience, stop, serving):
        assert not (await audience.next()).leaving
        reply = decode(await bus.request(SUBJECT, encode(question()), LONG_S), VerifyReply)
        assert [item.request_id for item in reply.items] == ["r"]
        stop.set()
        await serving
        while not (last := await audience.next()).leaving:
            pass
        assert last.worker_id == "v"


@pytest.mark.parametrize("body", [b"", b"nonsense", encode(Hello("me"))])
async def test_what_is_no_step_is_refused_at_once(body: bytes) -> None:
    """The caller gets something that is no message, long before its deadline; the worker goes on."""
    bus = FakeBus()
    async with served(bus, worker().step), asyncio.timeout(SOON_S):
        while True:
            try:
                answer = await bus.request(SUBJECT, body, LONG_S)
                break
            except Unavailable:  # not subscribed yet
                await asyncio.sleep(0)
        with pytest.raises(WireError):
            decode(answer, VerifyReply)
        assert decode(await bus.request(SUBJECT, encode(question()), LONG_S), VerifyReply).items


async def test_a_step_that_crashes_ends_the_process_with_its_error() -> None:
    """State may be broken: it says goodbye, so that nobody waits, and raises for the supervisor to see."""

    def crash(_request: VerifyRequest) -> VerifyReply:
        raise RuntimeError("a bug")

    bus = FakeBus()
    async with served(bus, crash) as (audience, _, serving):
        await audience.next()
        asking = asyncio.create_task(bus.request(SUBJECT, encode(question()), LONG_S))
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(serving, SOON_S)
        assert (await audience.next()).leaving
        asking.cancel()


async def test_a_reply_too_large_for_a_message_is_refused_and_the_worker_lives() -> None:
    """More was asked for than a message can hold: no answer to that, and the next step as always."""
    me = worker()

    def step(request: VerifyRequest) -> VerifyReply:
        reply = me.step(request)
        if request.session != "greedy for more":
            return reply
        tokens = np.zeros(MAX_PAYLOAD_BYTES, np.int32)
        return replace(reply, items=(replace(reply.items[0], tokens=tokens),))

    bus = FakeBus()
    async with served(bus, step) as (audience, _, _serving):
        await audience.next()
        huge = await bus.request(SUBJECT, encode(replace(question(), session="greedy for more")), LONG_S)
        with pytest.raises(WireError):
            decode(huge, VerifyReply)
        assert decode(await bus.request(SUBJECT, encode(question()), LONG_S), VerifyReply).items


async def test_steps_are_computed_one_after_another() -> None:
    """Two messages at once never meet in the model."""
    inside, most, me = 0, 0, worker()

    def step(request: VerifyRequest) -> VerifyReply:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        reply = me.step(request)
        inside -= 1
        return reply

    bus = FakeBus()
    async with served(bus, step) as (audience, _, _serving):
        await audience.next()
        bodies = [encode(question(f"r{idx}")) for idx in range(8)]
        await asyncio.gather(*[bus.request(SUBJECT, body, LONG_S) for body in bodies])
    assert most == 1


# -- Announcer --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def announcing(bus: FakeBus) -> AsyncIterator[Audience]:
    """An Announcer that has made its first announcement."""
    audience, me = Audience(), worker()
    await bus.subscribe(ANNOUNCE, audience)
    running = asyncio.create_task(Announcer(bus, lambda leaving: me.announcement(leaving=leaving)).run())
    try:
        await audience.next()
        yield audience
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bus.close()


async def test_hello_and_reconnect_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next interval, which is made far longer than the test."""
    monkeypatch.setattr("treecore.service.presence.ANNOUNCE_INTERVAL_S", 3600.0)
    bus = FakeBus()
    async with announcing(bus) as audience:
        await bus.publish(HELLO, encode(Hello("manager")))
        assert not (await audience.next()).leaving
        bus.disconnect()
        bus.reconnect()
        assert not (await audience.next()).leaving


async def test_it_announces_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a publication that fails does not end it."""
    monkeypatch.setattr("treecore.service.presence.ANNOUNCE_INTERVAL_S", 0.0)
    bus = FakeBus(lambda call: Fate.REFUSE if call.number % 2 else Fate.DELIVER)
    async with announcing(bus) as audience:
        for _ in range(5):
            assert not (await audience.next()).leaving


async def test_it_says_goodbye_when_cancelled_in_any_state() -> None:
    """Cancelled right behind its first announcement."""
    bus = FakeBus()
    audience, me = Audience(), worker()
    await bus.subscribe(ANNOUNCE, audience)
    running = asyncio.create_task(Announcer(bus, lambda leaving: me.announcement(leaving=leaving)).run())
    await audience.next()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await audience.next()).leaving
    await bus.close()


# -- over a real broker -----------------------------------------------------------------------------------------------


async def test_a_step_that_computes_does_not_hold_up_announcements(nats_server: NatsServer) -> None:
    """A long prefill does not look like a death: a Hello is answered in the middle of it."""
    begun, release, me = threading.Event(), threading.Event(), worker()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()  # a step blocks the loop that it runs in, so not this one

    def slow(request: VerifyRequest) -> VerifyReply:
        begun.set()
        assert release.wait(SOON_S)
        return me.step(request)

    bus = await NatsBus.connect(Broker(nats_server.url, "t"), "manager", asyncio.Event())
    audience = Audience()
    await bus.subscribe(ANNOUNCE, audience)
    settings = ServiceSettings(nats_url=nats_server.url, subject_prefix="t")
    work = serve_worker(
        settings, lambda leaving: me.announcement(leaving=leaving), VerifyRequest, slow, stop, Operations(1.0)
    )
    serving = asyncio.create_task(asyncio.to_thread(loop.run_until_complete, work))
    await audience.next()
    asking = asyncio.create_task(bus.request(SUBJECT, encode(question()), LONG_S))
    assert await asyncio.to_thread(begun.wait, SOON_S)
    while not audience.heard.empty():
        audience.heard.get_nowait()
    await bus.publish(HELLO, encode(Hello("manager")))
    assert not (await audience.next()).leaving
    assert not asking.done()
    release.set()
    async with asyncio.timeout(SOON_S):
        assert decode(await asking, VerifyReply).items
        loop.call_soon_threadsafe(stop.set)
        await serving
    loop.close()
    await bus.close()


async def test_a_worker_survives_the_broker(nats_server: NatsServer) -> None:
    """serve_worker over NATS: started before the broker, killed broker, announced again, goodbye heard by others."""
    nats_server.stop()
    me, stop = worker(), asyncio.Event()
    settings = ServiceSettings(nats_url=nats_server.url, subject_prefix="t")
    serving = asyncio.create_task(
        serve_worker(
            settings, lambda leaving: me.announcement(leaving=leaving), VerifyRequest, me.step, stop, Operations(1.0)
        )
    )
    nats_server.start()
    bus = await NatsBus.connect(Broker(nats_server.url, "t"), "manager", stop)
    audience = Audience()
    await bus.subscribe(ANNOUNCE, audience)
    back = asyncio.Event()
    bus.on_reconnect(back.set)
    await audience.next()
    assert decode(await bus.request(SUBJECT, encode(question()), LONG_S), VerifyReply).items
    nats_server.kill()
    nats_server.start()
    await asyncio.wait_for(back.wait(), SOON_S)
    while not audience.heard.empty():
        audience.heard.get_nowait()
    await audience.next()
    assert decode(await bus.request(SUBJECT, encode(question("s")), LONG_S), VerifyReply).items
    stop.set()
    await asyncio.wait_for(serving, SOON_S)
    while not (await audience.next()).leaving:
        pass
    await bus.close()
