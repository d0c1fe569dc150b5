"""Who has announced itself on the bus: how the launcher knows that a worker can step.

Knows announcements; must not know processes.
"""

import asyncio

from treecore.codec import decode
from treecore.errors import WireError
from treecore.messages import ANNOUNCE, Announcement, WorkerKind
from treecore.service.bus import Broker, Bus, NatsBus

Who = tuple[WorkerKind, str]

SUBJECT_PREFIX = "espalier"  # a broker of our own: whatever the environment says, all parts agree


class RollCall:
    """Hears announcements. The events are set, and replaced, by the subscription's one callback."""

    def __init__(self) -> None:
        self._heard: dict[Who, asyncio.Event] = {}
        self._bus: NatsBus | None = None

    async def listen(self, url: str) -> None:
        """Connect to the broker at `url`, however long it takes to appear, and hear from now on."""
        self._bus = await NatsBus.connect(Broker(url, SUBJECT_PREFIX), "launcher", asyncio.Event())
        await self.attend(self._bus)

    async def attend(self, bus: Bus) -> None:
        """Hear what is announced on `bus`."""
        await bus.subscribe(ANNOUNCE, self._hear)

    async def close(self) -> None:
        """Hang up."""
        if self._bus is not None:
            await self._bus.close()

    async def next_announcement(self, kind: WorkerKind, name: str) -> None:
        """Wait until a worker of this kind and model name announces itself after this call."""
        await self._heard.setdefault((kind, name), asyncio.Event()).wait()

    async def _hear(self, body: bytes) -> None:
        try:
            announcement = decode(body, Announcement)
        except WireError:
            return
        if announcement.leaving:
            return
        event = self._heard.pop((announcement.kind, announcement.name), None)
        if event is not None:
            event.set()
