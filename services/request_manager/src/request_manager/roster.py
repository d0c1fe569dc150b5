"""Who is alive, from announcements: of workers (the manager's) or of managers (a gateway's). The only owner of that.

Knows announcements and a clock; must not know what they announce.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from treecore.codec import decode, encode
from treecore.errors import Unavailable, WireError
from treecore.messages import HELLO, Announcement, Hello, WorkerId, WorkerKind
from treecore.service.bus import Bus
from treecore.service.lifeline import Lifeline
from treecore.service.presence import ANNOUNCE_INTERVAL_S, SILENCE_IS_LOSS_S
from treecore.service.telemetry import log_event
from treecore.streams import ManagerAnnouncement

logger = logging.getLogger(__name__)

A = TypeVar("A", Announcement, ManagerAnnouncement)

Kind = WorkerKind | Literal["manager"]
Loss = Literal["left", "silent", "unanswered"]
"""Said goodbye; announced nothing for too long; was found dead, or not to be understood, by who asked it."""


@dataclass(slots=True)
class Member(Generic[A]):
    """Somebody who is there. `life` is cut once, when they fall silent or are found dead."""

    announcement: A
    last_seen_s: float
    life: Lifeline = field(default_factory=lambda: Lifeline("the worker is gone"))

    @property
    def kind(self) -> Kind:
        """What it is."""
        return self.announcement.kind

    @property
    def worker_id(self) -> WorkerId:
        """The identity; a restarted process has a new one."""
        return self.announcement.worker_id


class Roster(Generic[A]):
    """Members by id. `clock` is monotonic, in seconds. `changed` is set whenever one comes or goes. losses: so far."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[WorkerId, Member[A]] = {}
        self.losses = Counter[tuple[Kind, Loss]]()
        self.changed = asyncio.Event()

    def hear(self, announcement: A) -> None:
        """Take in one announcement."""
        if announcement.leaving:
            self.leave(announcement.worker_id)
            return
        member = self._members.get(announcement.worker_id)
        if member is None:
            self._members[announcement.worker_id] = Member(announcement, self._clock())
            self.changed.set()
            return
        member.announcement = announcement
        member.last_seen_s = self._clock()

    def lose(self, worker_id: WorkerId, loss: Loss = "unanswered") -> None:
        """Forget a member; whoever waits for it stops waiting. It may announce itself again."""
        member = self.drop(worker_id, loss)
        if member is not None:
            member.life.cut()

    def drop(self, worker_id: WorkerId, loss: Loss) -> Member[A] | None:
        """Forget a member, whose life goes on."""
        member = self._members.pop(worker_id, None)
        if member is not None:
            self.losses[member.kind, loss] += 1
            self.changed.set()
        return member

    def leave(self, worker_id: WorkerId) -> None:
        """A member has said goodbye."""
        self.lose(worker_id, "left")

    def expire(self) -> None:
        """Lose those who have been silent for too long."""
        for member in self.silent(self._members.values()):
            self.lose(member.worker_id, "silent")

    def silent(self, members: Iterable[Member[A]]) -> list[Member[A]]:
        """Those of `members` who have been."""
        oldest = self._clock() - SILENCE_IS_LOSS_S
        return [member for member in members if member.last_seen_s < oldest]

    def members(self) -> list[Member[A]]:
        """Those who are there, in the order in which they appeared."""
        return list(self._members.values())


@dataclass(frozen=True, slots=True)
class Watch(Generic[A]):
    """Who is watched: announcements of `kind` on `subject`; me: who asks. on_refused: told why one was unusable."""

    subject: str
    kind: type[A]
    me: str
    on_refused: Callable[[str], object] = lambda _reason: None


async def watch(roster: Roster[A], bus: Bus, who: Watch[A]) -> None:
    """Keep the roster true until cancelled: hear announcements, ask for them, notice silence."""

    async def on_announcement(body: bytes) -> bytes | None:
        try:
            roster.hear(decode(body, who.kind))
        except WireError as error:
            log_event(logger, logging.WARNING, "announcement refused", error=error)
            who.on_refused(error.code)
        return None

    await bus.subscribe(who.subject, on_announcement)
    greeted = asyncio.Event()
    bus.on_reconnect(greeted.clear)
    while True:
        if not greeted.is_set():
            await _greet(bus, who.me, greeted)
        await asyncio.sleep(ANNOUNCE_INTERVAL_S)
        roster.expire()


async def _greet(bus: Bus, me: str, greeted: asyncio.Event) -> None:
    try:
        await bus.publish(HELLO, encode(Hello(me)))
    except Unavailable:
        return
    greeted.set()
