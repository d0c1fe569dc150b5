"""A worker's life on the bus: announce, take step requests one after another, compute, reply.

Knows messages as bytes with a type; must not know what a step does. A step computes in the event loop's own thread,
which saves two thread switches a step; announcements come from another thread, so that a long prefill does not look
like a death.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry.trace import SpanKind

from treecore.codec import decode, encode
from treecore.errors import WireError
from treecore.messages import Announcement, DraftReply, DraftRequest, VerifyReply, VerifyRequest, step_subject
from treecore.service.bus import Bus, NatsBus
from treecore.service.operations import Operations
from treecore.service.presence import announce_from_thread
from treecore.service.settings import ServiceSettings
from treecore.service.tasks import first_of
from treecore.service.telemetry import log_event
from treecore.service.tracing import parent, tracer
from treecore.service.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

NO_MESSAGE = b""  # the reply to what is no message: a WireError for the caller at once, not silence until its deadline

StepRequest = TypeVar("StepRequest", DraftRequest, VerifyRequest)
Step = Callable[[StepRequest], DraftReply | VerifyReply]


async def serve_worker(
    settings: ServiceSettings,
    describe: Callable[[bool], Announcement],
    kind: type[StepRequest],
    step: Step[StepRequest],
    stop: asyncio.Event,
    operations: Operations,
) -> None:
    """Connect to the broker and serve steps until `stop`; then say goodbye and answer what has come.

    `describe(leaving)` is called in another thread.
    """
    me = describe(False)
    metrics = WorkerMetrics(operations.registry, me)

    def watched(request: StepRequest) -> DraftReply | VerifyReply:
        with operations.vitals.working(), metrics.busy(), _span(request):
            reply = step(request)
        metrics.on_step(request, reply)
        return reply

    bus = await NatsBus.connect(settings.broker, me.worker_id, stop, operations.registry)
    try:
        crashed = await take_steps(bus, me, kind, watched)
        operations.vitals.start(lambda: bus.is_connected and not stop.is_set())
        await first_of(stop.wait(), announce_from_thread(settings, describe), crashed)
        await bus.drain()
    finally:
        await bus.close()


async def take_steps(bus: Bus, me: Announcement, kind: type[StepRequest], step: Step[StepRequest]) -> Awaitable[None]:
    """Answer step requests from now on. What is returned raises once a step has crashed."""
    crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def answer(body: bytes) -> bytes | None:
        try:
            request = decode(body, kind)
        except WireError as error:
            log_event(logger, logging.WARNING, "step refused", error=error)
            return NO_MESSAGE
        try:
            reply = step(request)
        except Exception as error:  # a bug of ours: state may be broken, so the process ends and starts afresh
            if not crashed.done():
                crashed.set_exception(error)
            return None
        try:
            return encode(reply)
        except WireError as error:  # more than a message can hold was asked for
            log_event(logger, logging.WARNING, "reply not sent", error=error)
            return NO_MESSAGE

    await bus.subscribe(step_subject(me.kind, me.worker_id), answer)
    log_event(logger, logging.INFO, "worker ready", worker_id=me.worker_id, model=me.name)
    return crashed


@contextmanager
def _span(request: DraftRequest | VerifyRequest) -> Iterator[None]:
    """The body is the worker's part of a step that is traced, or of one that is not."""
    if not request.trace:
        yield
        return
    name = "draft" if isinstance(request, DraftRequest) else "verify"
    attributes = {"espalier.step.requests": len(request.items)}
    with tracer().start_as_current_span(name, parent(request.trace), SpanKind.SERVER, attributes):
        yield
