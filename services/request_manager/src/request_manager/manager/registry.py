"""The workers that a manager knows, by what they are for. Must not know what is asked of them."""

from collections.abc import Callable

from request_manager.roster import Member, Roster
from treecore.messages import Announcement, WorkerId, WorkerKind

Worker = Member[Announcement]


class Registry(Roster[Announcement]):
    """Live workers, as the manager `me` knows them.

    Who leaves takes no new step, but owes an answer to one that it has: its life is cut once it has been silent.
    """

    def __init__(self, clock: Callable[[], float], me: str) -> None:
        super().__init__(clock)
        self.me = me
        self._leaving: list[Worker] = []

    def leave(self, worker_id: WorkerId) -> None:
        """See Roster."""
        worker = self.drop(worker_id, "left")
        if worker is not None:
            self._leaving.append(worker)

    def expire(self) -> None:
        """See Roster."""
        super().expire()
        for worker in self.silent(self._leaving):
            self._leaving.remove(worker)
            worker.life.cut()

    def live(self, kind: WorkerKind) -> list[Worker]:
        """Live workers of a kind, in the order in which they appeared."""
        return [worker for worker in self.members() if worker.announcement.kind == kind]

    def verifiers(self) -> list[Worker]:
        """Live verifiers that this manager has or may have: its own first, none that serves another manager."""
        free = [worker for worker in self.live("verifier") if worker.announcement.holder in ("", self.me)]
        return sorted(free, key=lambda worker: not worker.announcement.holder)
