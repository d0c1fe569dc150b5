"""A worker's life on the bus: announce, take step requests one after another, compute in one thread, reply.

Knows messages as bytes with a type; must not know what a step does. The event loop stays free while a step computes,
so announcements go on and a long prefill does not look like a death.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from treecore.codec import decode, encode
from treecore.errors import WireError
from treecore.messages import Announcement, DraftReply, DraftRequest, VerifyReply, VerifyRequest, step_subject
from treecore.service.bus import Bus, NatsBus
from treecore.service.presence import Announcer
from treecore.service.settings import ServiceSettings
from treecore.service.telemetry import log_event

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
) -> None:
    """Connect to the broker and serve steps until `stop`."""
    first = describe(False)
    bus = await NatsBus.connect(settings.nats_url, first.worker_id, settings.subject_prefix, stop)
    try:
        await serve_steps(bus, describe, kind, step, stop)
    finally:
        await bus.close()


async def serve_steps(
    bus: Bus,
    describe: Callable[[bool], Announcement],
    kind: type[StepRequest],
    step: Step[StepRequest],
    stop: asyncio.Event,
) -> None:
    """Serve steps on `bus` until `stop`; says goodbye before it returns."""
    me = describe(False)
    loop = asyncio.get_running_loop()
    crashed: asyncio.Future[None] = loop.create_future()
    with ThreadPoolExecutor(1, thread_name_prefix="step") as thread:

        async def answer(body: bytes) -> bytes | None:
            try:
                request = decode(body, kind)
            except WireError as error:
                log_event(logger, logging.WARNING, "step refused", error=error)
                return NO_MESSAGE
            try:
                return encode(await loop.run_in_executor(thread, step, request))
            except Exception as error:  # a bug of ours: state may be broken, so the process ends and starts afresh
                if not crashed.done():
                    crashed.set_exception(error)
                return None

        await bus.subscribe(step_subject(me.kind, me.worker_id), answer)
        log_event(logger, logging.INFO, "worker ready", worker_id=me.worker_id, model=me.name)
        announcer = asyncio.create_task(Announcer(bus, describe).run())
        await _first_of(asyncio.create_task(_returns_on(stop)), announcer, crashed)


async def _returns_on(stop: asyncio.Event) -> None:
    await stop.wait()


async def _first_of(*futures: asyncio.Future[None]) -> None:
    """Wait for the first to end, cancel the others, and raise what it raised."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
    for future in done:
        future.result()
