"""What a worker tells of itself at its operations port: its steps, and whether it can take one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from prometheus_client import CollectorRegistry

from treecore.codec import decode, encode
from treecore.expand import Expansion
from treecore.messages import (
    Announcement,
    DraftItem,
    DraftReply,
    DraftRequest,
    RefusedItem,
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
from treecore.service.labels import OTHER, FewLabels
from treecore.service.operations import Operations, open_operations
from treecore.service.settings import ServiceSettings
from treecore.service.worker import serve_worker
from treecore.service.worker_metrics import WorkerMetrics
from treecore.testing.nats import NatsServer
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

SOON_S = 10.0
PARAMS = SamplingParams(0.0, 0, 1.0, Seed(0))
EMPTY = np.empty(0, np.int32)


def verifier(forward_ms: float = 0.0) -> FakeVerifier:
    """A scripted one."""
    return FakeVerifier(ScriptedModel(20), WorkerId("v"), "llm", FakeSize(forward_ms=forward_ms))


def question(start: int = 0, num_nodes: int = 0) -> VerifyRequest:
    """Three tokens of a prompt, and a chain of nodes behind them."""
    nodes, parents = np.ones(num_nodes, np.int32), np.arange(num_nodes, dtype=np.int32)
    tokens = np.array([1, 2, 3], np.int32)
    return VerifyRequest("me", (), (VerifyItem(RequestId("r"), 0, start, tokens, PARAMS, nodes, parents, True),))


def told(registry: CollectorRegistry, name: str, me: Announcement, **labels: str) -> float:
    """A worker's metric."""
    value = registry.get_sample_value(f"espalier_worker_{name}", {"kind": me.kind, "name": me.name, **labels})
    assert value is not None, name
    return value


def test_a_verifiers_steps_are_counted() -> None:
    """Items, tokens, nodes below roots, time, refusals, blocks."""
    registry, worker = CollectorRegistry(), verifier(forward_ms=250.0)
    me = worker.announcement()
    metrics = WorkerMetrics(registry, me)
    assert told(registry, "steps_total", me) == 0
    assert told(registry, "refused_items_total", me, reason="state_missing") == 0
    assert told(registry, "refused_items_total", me, reason="out_of_blocks") == 0
    for request in (question(num_nodes=4), question(start=90)):
        metrics.on_step(request, worker.step(request))
    wanted = {"steps": 2, "items": 2, "tokens": 6, "nodes": 4, "forward_seconds": 0.5, "sample_seconds": 0}
    assert {name: told(registry, f"{name}_total", me) for name in wanted} == wanted
    assert told(registry, "refused_items_total", me, reason="state_missing") == 1
    usage = worker.usage()
    assert told(registry, "kv_blocks", me, state="used") == usage.used == 1
    assert told(registry, "kv_blocks", me, state="free") == usage.free


def test_a_chunk_of_a_prompt_has_no_nodes() -> None:
    """Its answer has no token, not even for a root."""
    registry, worker = CollectorRegistry(), verifier()
    chunk = question()
    chunk = replace(chunk, items=(replace(chunk.items[0], wants_token=False),))
    WorkerMetrics(registry, worker.announcement()).on_step(chunk, worker.step(chunk))
    assert told(registry, "nodes_total", worker.announcement()) == 0


def test_an_ssms_nodes_are_those_that_it_drafted() -> None:
    """A draft has no entry for its root."""
    registry, worker = CollectorRegistry(), FakeSsm(ScriptedModel(20), WorkerId("s"), "small")
    item = DraftItem(RequestId("r"), 0, 0, np.array([1, 2], np.int32), PARAMS, Expansion((2, 1)))
    request = DraftRequest("me", 1, (), (item,))
    reply = worker.step(request)
    assert isinstance(reply, DraftReply)
    WorkerMetrics(registry, worker.announcement()).on_step(request, reply)
    assert told(registry, "nodes_total", worker.announcement()) == 4


def test_reasons_of_refusals_stay_few() -> None:
    """Whatever they are called."""
    registry, worker = CollectorRegistry(), verifier()
    metrics = WorkerMetrics(registry, worker.announcement())
    reply = worker.step(question())
    for number in range(1000):
        refused = RefusedItem(RequestId("r"), 0, 0, f"reason {number}")
        metrics.on_step(question(), replace(reply, refused=(refused,)))
    reasons = {
        sample.labels["reason"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "espalier_worker_refused_items_total"
    }
    assert len(reasons) < 20
    assert OTHER in reasons


def test_labels_keep_what_came_first() -> None:
    """And go on telling it apart when there is no more room."""
    label = FewLabels(2)
    assert [label(name) for name in ("a", "b", "c", "a", "", "d", "b")] == ["a", "b", OTHER, "a", OTHER, OTHER, "b"]


# -- over a real broker -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(server: NatsServer, stop: asyncio.Event) -> AsyncIterator[tuple[Operations, asyncio.Task[None]]]:
    """A worker's process with an operations port."""
    me = verifier()
    settings = ServiceSettings(nats_url=server.url, subject_prefix="t", operations_port=0)
    async with open_operations(settings) as operations:
        work = serve_worker(
            settings, lambda leaving: me.announcement(leaving=leaving), VerifyRequest, me.step, stop, operations
        )
        task = asyncio.create_task(work)
        try:
            yield operations, task
        finally:
            stop.set()
            await task


async def until_ready(operations: Operations, *, is_ready: bool) -> None:
    """Return once it says so."""
    async with asyncio.timeout(SOON_S):
        while operations.vitals.is_ready != is_ready:  # noqa: ASYNC110 - asked as a probe asks
            await asyncio.sleep(0)


async def test_a_worker_is_ready_while_it_has_a_broker(nats_server: NatsServer) -> None:
    """Not before there is one, not while it is gone, not once it is told to stop; started it stays."""
    nats_server.stop()
    stop = asyncio.Event()
    async with serving(nats_server, stop) as (operations, _):
        assert not operations.vitals.has_started
        nats_server.start()
        await until_ready(operations, is_ready=True)
        nats_server.kill()
        await until_ready(operations, is_ready=False)
        assert operations.vitals.has_started
        nats_server.start()
        await until_ready(operations, is_ready=True)
        stop.set()
        await until_ready(operations, is_ready=False)


async def test_a_worker_that_computes_is_alive(nats_server: NatsServer) -> None:
    """Even where the event loop may not stand still for any time at all, as it does in a step."""
    me, stop, operations = verifier(), asyncio.Event(), Operations(live_timeout_s=1e-9)
    alive: list[bool] = []

    def step(request: VerifyRequest) -> VerifyReply:
        alive.append(operations.vitals.is_alive)
        return me.step(request)

    settings = ServiceSettings(nats_url=nats_server.url, subject_prefix="t")
    work = serve_worker(
        settings, lambda leaving: me.announcement(leaving=leaving), VerifyRequest, step, stop, operations
    )
    serving = asyncio.create_task(work)
    while not operations.vitals.has_started:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0)
    bus = await NatsBus.connect(settings.broker, "manager", asyncio.Event())
    await bus.request(step_subject("verifier", WorkerId("v")), encode(question()), SOON_S)
    await bus.close()
    stop.set()
    await serving
    assert alive == [True]
    assert not operations.vitals.is_alive


async def test_steps_over_the_broker_are_counted(nats_server: NatsServer) -> None:
    """By the worker as work, and by both ends of the bus as messages and bytes."""
    stop, registry = asyncio.Event(), CollectorRegistry()
    async with serving(nats_server, stop) as (operations, _):
        await until_ready(operations, is_ready=True)
        bus = await NatsBus.connect(Broker(nats_server.url, "t"), "manager", asyncio.Event(), registry)
        body = encode(question())
        reply = await bus.request(step_subject("verifier", WorkerId("v")), body, SOON_S)
        await bus.close()
        assert decode(reply, VerifyReply).items
        me = verifier().announcement()
        assert told(operations.registry, "steps_total", me) == 1
        assert told(operations.registry, "busy_seconds_total", me) > 0
    flows = {("request", "sent"): len(body), ("request", "received"): len(reply)}
    for (call, direction), size in flows.items():
        labels = {"call": call, "direction": direction}
        assert registry.get_sample_value("espalier_bus_messages_total", labels) == 1
        assert registry.get_sample_value("espalier_bus_bytes_total", labels) == size
        mirrored = {"call": "subscription", "direction": "received" if direction == "sent" else "sent"}
        assert operations.registry.get_sample_value("espalier_bus_bytes_total", mirrored) == size
