"""What a link to the broker tells of itself, against a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats.errors
import pytest
from prometheus_client import CollectorRegistry

from treecore.errors import Unavailable, Unreachable
from treecore.service.bus import Broker, NatsBus
from treecore.service.bus_metrics import BusMetrics
from treecore.testing.nats import NatsServer

SOON_S = 10.0


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[tuple[NatsBus, CollectorRegistry]]:
    """A client of `server` and its metrics."""
    registry = CollectorRegistry()
    bus = await NatsBus.connect(Broker(server.url, "test"), "test", asyncio.Event(), registry)
    try:
        yield bus, registry
    finally:
        await bus.close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """Of a metric of the bus."""
    found = registry.get_sample_value(f"espalier_bus_{name}", labels)
    assert found is not None, name
    return found


async def test_requests_without_an_answer(nats_server: NatsServer) -> None:
    """Nobody there, and nobody who answers, are told apart; neither is a round trip."""

    async def deaf(_body: bytes) -> None:
        """Say nothing."""

    async with connected(nats_server) as (bus, registry):
        await bus.subscribe("deaf", deaf)
        with pytest.raises(Unreachable):
            await bus.request("nobody", b"abc", SOON_S)
        with pytest.raises(Unavailable):
            await bus.request("deaf", b"defg", 0.01)
    assert value(registry, "failed_requests_total", reason="unreachable") == 1
    assert value(registry, "failed_requests_total", reason="unanswered") == 1
    assert value(registry, "messages_total", call="request", direction="sent") == 2
    assert value(registry, "messages_total", call="request", direction="received") == 0
    assert value(registry, "bytes_total", call="request", direction="sent") == 7


async def test_publications(nats_server: NatsServer) -> None:
    """Sent here, received there; a handler without an answer sends none."""
    heard = asyncio.Event()

    async def hear(_body: bytes) -> None:
        heard.set()

    async with connected(nats_server) as (bus, registry), connected(nats_server) as (other, others):
        await other.subscribe("a", hear)
        await bus.publish("a", b"12345")
        async with asyncio.timeout(SOON_S):
            await heard.wait()
    assert value(registry, "bytes_total", call="publish", direction="sent") == 5
    assert value(others, "bytes_total", call="subscription", direction="received") == 5
    assert value(others, "messages_total", call="subscription", direction="sent") == 0


async def test_a_link_that_breaks_and_comes_back(nats_server: NatsServer) -> None:
    """Down while it is down; one reconnect; what is asked meanwhile was not sent."""
    async with connected(nats_server) as (bus, registry):
        assert value(registry, "connected") == 1
        back = asyncio.Event()
        bus.on_reconnect(back.set)
        nats_server.kill()
        async with asyncio.timeout(SOON_S):
            while bus.is_connected:  # noqa: ASYNC110 - the client tells nobody at once
                await asyncio.sleep(0)
            with pytest.raises(Unreachable):
                await bus.request("a", b"x", SOON_S)
            nats_server.start()
            await back.wait()
        assert value(registry, "connected") == 1
        assert value(registry, "reconnects_total") == 1
        assert value(registry, "messages_total", call="request", direction="sent") == 0
        assert value(registry, "failed_requests_total", reason="unreachable") == 1
    assert value(registry, "connected") == 0


def test_slow_consumers_are_told_apart() -> None:
    """As nats-py reports messages that it dropped, and as the broker words it; all else is one kind."""
    registry = CollectorRegistry()
    metrics = BusMetrics(registry)
    slow = nats.errors.SlowConsumerError("test.a", b"reply", 1, None)  # type: ignore[no-untyped-call]
    for error in (slow, nats.errors.Error("nats: Slow Consumer"), nats.errors.StaleConnectionError(), OSError("no")):
        metrics.on_error(error)
    assert value(registry, "errors_total", kind="slow_consumer") == 2
    assert value(registry, "errors_total", kind="other") == 2
