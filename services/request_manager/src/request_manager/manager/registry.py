"""Which workers are alive, from their announcements. The only owner of that knowledge."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from request_manager.manager.step_record import Observer
from treecore.codec import decode, encode
from treecore.errors import Unavailable, WireError
from treecore.messages import ANNOUNCE, HELLO, Announcement, Hello, WorkerId, WorkerKind
from treecore.service.bus import Bus
from treecore.service.lifeline import Lifeline
from treecore.service.presence import ANNOUNCE_INTERVAL_S, SILENCE_IS_LOSS_S
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """A live worker. `life` is cut once, when it leaves, falls silent or is found dead."""

    announcement: Announcement
    last_seen_s: float
    life: Lifeline = field(default_factory=lambda: Lifeline("the worker is gone"))

    @property
    def worker_id(self) -> WorkerId:
        """The worker's identity; a restarted process has a new one."""
        return self.announcement.worker_id


class Registry:
    """Live workers by id. `clock` is monotonic, in seconds. `changed` is set whenever a worker comes or goes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[WorkerId, Worker] = {}
        self.changed = asyncio.Event()

    def hear(self, announcement: Announcement) -> None:
        """Take in one announcement."""
        if announcement.leaving:
            self.lose(announcement.worker_id)
            return
        worker = self._workers.get(announcement.worker_id)
        if worker is None:
            self._workers[announcement.worker_id] = Worker(announcement, self._clock())
            self.changed.set()
            return
        worker.announcement = announcement
        worker.last_seen_s = self._clock()

    def lose(self, worker_id: WorkerId) -> None:
        """Forget a worker; whoever waits for it stops waiting. It may announce itself again."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            worker.life.cut()
            self.changed.set()

    def expire(self) -> None:
        """Lose the workers that have been silent for too long."""
        oldest = self._clock() - SILENCE_IS_LOSS_S
        for worker in [worker for worker in self._workers.values() if worker.last_seen_s < oldest]:
            self.lose(worker.worker_id)

    def live(self, kind: WorkerKind) -> list[Worker]:
        """Live workers of a kind, in the order in which they appeared."""
        return [worker for worker in self._workers.values() if worker.announcement.kind == kind]


async def watch(registry: Registry, bus: Bus, owner: str, observer: Observer) -> None:
    """Keep the registry true until cancelled: hear announcements, ask for them, notice silence."""

    async def on_announcement(body: bytes) -> bytes | None:
        try:
            registry.hear(decode(body, Announcement))
        except WireError as error:
            log_event(logger, logging.WARNING, "announcement refused", error=error)
            observer.on_dropped(error.code)
        return None

    await bus.subscribe(ANNOUNCE, on_announcement)
    greeted = asyncio.Event()
    bus.on_reconnect(greeted.clear)
    while True:
        if not greeted.is_set():
            await _greet(bus, owner, greeted)
        await asyncio.sleep(ANNOUNCE_INTERVAL_S)
        registry.expire()


async def _greet(bus: Bus, owner: str, greeted: asyncio.Event) -> None:
    try:
        await bus.publish(HELLO, encode(Hello(owner)))
    except Unavailable:
        return
    greeted.set()
