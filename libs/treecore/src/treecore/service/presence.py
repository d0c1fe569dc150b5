"""How workers make themselves known: an Announcement now and then, at once when asked, and a last one on leaving."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from treecore.codec import encode
from treecore.errors import Unavailable
from treecore.messages import ANNOUNCE, HELLO, Announcement
from treecore.service.bus import Bus, NatsBus
from treecore.service.settings import ServiceSettings
from treecore.service.tasks import first_of
from treecore.service.telemetry import log_event
from treecore.streams import ManagerAnnouncement

logger = logging.getLogger(__name__)

ANNOUNCE_INTERVAL_S = 0.5
SILENCE_IS_LOSS_S = 5.0  # a starved machine may hold announcements back; the broker tells of most deaths at once


class Announcer:
    """Announces one worker, or one manager, until cancelled.

    `describe(leaving)` gives the current announcement, or None while there is nothing to tell.
    """

    def __init__(
        self, bus: Bus, describe: Callable[[bool], Announcement | ManagerAnnouncement | None], subject: str = ANNOUNCE
    ) -> None:
        self._bus = bus
        self._describe = describe
        self._subject = subject
        self._now = asyncio.Event()

    async def run(self) -> None:
        """Announce every ANNOUNCE_INTERVAL_S, at once on a Hello or a reconnect; when cancelled say goodbye."""
        self._bus.on_reconnect(self._now.set)
        await self._bus.subscribe(HELLO, self._on_hello)
        try:
            while True:
                await self._announce(leaving=False)
                await self._pause()
        finally:
            await self._announce(leaving=True)

    async def _on_hello(self, _body: bytes) -> None:
        self._now.set()

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_INTERVAL_S):
                await self._now.wait()
        self._now.clear()

    async def _announce(self, *, leaving: bool) -> None:
        announcement = self._describe(leaving)
        if announcement is None:
            return
        try:
            await self._bus.publish(self._subject, encode(announcement))
        except Unavailable as error:
            log_event(logger, logging.DEBUG, "not announced", error=error)


async def announce_from_thread(settings: ServiceSettings, describe: Callable[[bool], Announcement]) -> None:
    """Run an Announcer until cancelled, in a thread with a loop and a link of its own; raises what it raised."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def announce() -> None:
        name = f"{describe(False).worker_id}-presence"
        bus = await NatsBus.connect(settings.broker, name, stop)
        try:
            await first_of(Announcer(bus, describe).run(), stop.wait())
        finally:
            await bus.close()

    def run() -> None:
        try:
            loop.run_until_complete(announce())
        finally:
            loop.run_until_complete(_end_all())
            loop.close()

    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        with suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(stop.set)
        with suppress(Unavailable):  # stopped before the broker was there
            await running
        raise


async def _end_all() -> None:
    """End what a closed client leaves behind in this loop: an attempt to reconnect, say."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
