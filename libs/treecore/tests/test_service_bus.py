"""NatsBus against a real nats-server: it answers, fails at once where nobody can answer, and survives the broker."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from treecore.codec import MAX_PAYLOAD_BYTES
from treecore.errors import Unavailable
from treecore.service.bus import Broker, NatsBus
from treecore.testing.nats import NatsServer

LONG_S = 60.0  # a deadline that no test may reach
SOON_S = 10.0


@asynccontextmanager
async def connected(server: NatsServer, prefix: str = "test") -> AsyncIterator[NatsBus]:
    """A client of `server`, closed afterwards."""
    bus = await NatsBus.connect(Broker(server.url, prefix), "test", asyncio.Event())
    try:
        yield bus
    finally:
        await bus.close()


async def echo(body: bytes) -> bytes:
    """Say it again."""
    return b"re:" + body


async def fails_soon(call: Awaitable[object]) -> None:
    """It raises Unavailable long before its deadline."""
    async with asyncio.timeout(SOON_S):
        with pytest.raises(Unavailable):
            await call


class Deaf:
    """A handler that takes a message and never answers; `busy` is set once it has one."""

    def __init__(self) -> None:
        self.busy = asyncio.Event()

    async def __call__(self, _body: bytes) -> bytes | None:
        self.busy.set()
        return None


async def kill_and_notice(server: NatsServer, bus: NatsBus) -> None:
    """The broker dies, and the client knows it: a request under way has failed."""
    deaf = Deaf()
    await bus.subscribe("deaf", deaf)
    waiting = asyncio.create_task(bus.request("deaf", b"x", LONG_S))
    await deaf.busy.wait()
    server.kill()
    await fails_soon(waiting)


async def reconnected(bus: NatsBus) -> asyncio.Event:
    """Set when the link is back."""
    back = asyncio.Event()
    bus.on_reconnect(back.set)
    return back


async def test_request_and_reply(nats_server: NatsServer) -> None:
    """Between two processes' links, empty bodies included."""
    async with connected(nats_server) as server, connected(nats_server) as client:
        await server.subscribe("a.b", echo)
        assert await client.request("a.b", b"hello", LONG_S) == b"re:hello"
        assert await client.request("a.b", b"", LONG_S) == b"re:"


async def test_an_empty_reply_is_a_reply(nats_server: NatsServer) -> None:
    """It differs from nobody being there."""

    async def nothing(_body: bytes) -> bytes:
        return b""

    async with connected(nats_server) as bus:
        await bus.subscribe("a", nothing)
        assert await bus.request("a", b"x", LONG_S) == b""


async def test_the_largest_message_passes_both_ways(nats_server: NatsServer) -> None:
    """What the codec lets through, the broker does too, and the link survives it."""
    async with connected(nats_server) as bus:
        await bus.subscribe("a", lambda body: asyncio.sleep(0, body))
        body = b"\x07" * MAX_PAYLOAD_BYTES
        assert await bus.request("a", body, LONG_S) == body
        assert await bus.request("a", b"still there", LONG_S) == b"still there"


async def test_prefixes_keep_deployments_apart(nats_server: NatsServer) -> None:
    """Two deployments on one broker do not hear each other."""
    async with connected(nats_server, "one") as one, connected(nats_server, "two") as two:
        await one.subscribe("a", echo)
        await fails_soon(two.request("a", b"x", LONG_S))


async def test_messages_of_a_subscription_come_one_after_another(nats_server: NatsServer) -> None:
    """In order, and the next only when the handler has returned."""
    heard: list[bytes] = []
    done = asyncio.Event()

    async def slow(body: bytes) -> None:
        heard.append(b"+" + body)
        await asyncio.sleep(0)
        heard.append(b"-" + body)
        if body == b"2":
            done.set()

    async with connected(nats_server) as bus:
        await bus.subscribe("a", slow)
        for number in (b"0", b"1", b"2"):
            await bus.publish("a", number)
        async with asyncio.timeout(SOON_S):
            await done.wait()
    assert heard == [b"+0", b"-0", b"+1", b"-1", b"+2", b"-2"]


async def test_nobody_there_fails_at_once(nats_server: NatsServer) -> None:
    """Not at the deadline."""
    async with connected(nats_server) as bus:
        await fails_soon(bus.request("nobody", b"x", LONG_S))


async def test_the_deadline_ends_the_wait(nats_server: NatsServer) -> None:
    """Somebody listens and does not answer."""
    async with connected(nats_server) as bus:
        await bus.subscribe("a", Deaf())
        await fails_soon(bus.request("a", b"x", 0.05))


async def test_a_handler_that_raises_does_not_end_the_subscription(nats_server: NatsServer) -> None:
    """Its caller gets no answer; the next one does."""

    async def moody(body: bytes) -> bytes:
        if body == b"bad":
            raise RuntimeError("a bug")
        return body

    async with connected(nats_server) as bus:
        await bus.subscribe("a", moody)
        await fails_soon(bus.request("a", b"bad", 0.05))
        assert await bus.request("a", b"good", LONG_S) == b"good"


async def test_a_broker_that_dies_ends_the_wait_at_once(nats_server: NatsServer) -> None:
    """In the middle of a request; further calls fail at once as well, and nothing is buffered."""
    async with connected(nats_server) as bus:
        await kill_and_notice(nats_server, bus)
        await fails_soon(bus.request("a", b"x", LONG_S))
        await fails_soon(bus.publish("a", b"x"))


@pytest.mark.parametrize("is_killed", [True, False])
async def test_after_a_restart_everything_is_as_before(nats_server: NatsServer, is_killed: bool) -> None:
    """Subscriptions are there again without doing anything, and whoever wants to know is told. Twice."""
    async with connected(nats_server) as bus:
        await bus.subscribe("a", echo)
        back = await reconnected(bus)
        for _ in range(2):
            nats_server.kill() if is_killed else nats_server.stop()
            nats_server.start()
            async with asyncio.timeout(SOON_S):
                await back.wait()
            back.clear()
            assert await bus.request("a", b"again", LONG_S) == b"re:again"


async def test_clients_may_start_before_the_broker(nats_server: NatsServer) -> None:
    """They wait for it, however long."""
    nats_server.stop()
    connecting = asyncio.create_task(NatsBus.connect(Broker(nats_server.url, "test"), "early", asyncio.Event()))
    done, _ = await asyncio.wait({connecting}, timeout=0.3)
    assert not done
    nats_server.start()
    async with asyncio.timeout(SOON_S):
        bus = await connecting
    await bus.subscribe("a", echo)
    assert await bus.request("a", b"x", LONG_S) == b"re:x"
    await bus.close()


async def test_a_stop_ends_waiting_for_the_broker(nats_server: NatsServer) -> None:
    """SIGTERM while the broker is not there: the process must not hang."""
    nats_server.stop()
    stop = asyncio.Event()
    connecting = asyncio.create_task(NatsBus.connect(Broker(nats_server.url, "test"), "early", stop))
    await asyncio.wait({connecting}, timeout=0.3)
    stop.set()
    await fails_soon(connecting)


async def test_subscribing_while_the_broker_is_away_takes_effect_later(nats_server: NatsServer) -> None:
    """A manager that starts in the middle of a broker restart must not die of it."""
    async with connected(nats_server) as bus, connected(nats_server) as other:
        back, other_back = await reconnected(bus), await reconnected(other)
        await kill_and_notice(nats_server, bus)
        await bus.subscribe("a", echo)
        nats_server.start()
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(back.wait(), other_back.wait())
        assert await other.request("a", b"x", LONG_S) == b"re:x"


async def test_closing_ends_what_is_in_flight(nats_server: NatsServer) -> None:
    """And may be done twice."""
    async with connected(nats_server) as bus:
        deaf = Deaf()
        await bus.subscribe("a", deaf)
        waiting = asyncio.create_task(bus.request("a", b"x", LONG_S))
        await deaf.busy.wait()
        await bus.close()
        await fails_soon(waiting)
        await fails_soon(bus.request("a", b"x", LONG_S))


async def test_a_stop_that_meets_a_refused_attempt_ends_the_wait() -> None:
    """With nobody at the address; nats-py swallows such a cancellation."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # ours, and nobody listens there
        stop = asyncio.Event()
        stop.set()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(20):
                await NatsBus.connect(Broker(f"nats://127.0.0.1:{bound.getsockname()[1]}", "test"), "late", stop)
