"""Which manager brought each request to a worker, and whose requests are over. Pure but for the clock."""

from collections.abc import Callable

from treecore.messages import RequestId

LEASE_S = 3.0
"""How long after its last step a manager that sends nothing keeps a verifier group."""

SILENCE_S = 60.0
"""A manager of which a worker has not heard for so long is gone, and so are its requests."""


def manager_of(owner: str) -> str:
    """The manager of an owner, `manager.session`."""
    return owner.rpartition(".")[0]


class Owners:
    """Owns that knowledge. An owner is `manager.session`: a new session's requests start from nothing.

    Other managers' requests stay. clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, tuple[str, float]] = {}  # by manager: session, when it was last heard
        self._managers: dict[RequestId, str] = {}
        self._manager = ""

    def begin_step(self, owner: str) -> list[RequestId]:
        """A message of this owner has come; returns the requests that nobody will ask for again."""
        self._manager, session = manager_of(owner), owner
        before, now = self._sessions.get(self._manager), self._clock()
        gone = {manager for manager, (_, heard_s) in self._sessions.items() if heard_s < now - SILENCE_S}
        if before is not None and before[0] != session:
            gone.add(self._manager)
        for manager in gone:
            del self._sessions[manager]
        self._sessions[self._manager] = session, now
        return [request_id for request_id, manager in self._managers.items() if manager in gone]

    def take(self, request_id: RequestId) -> None:
        """The request is the current owner's."""
        self._managers[request_id] = self._manager

    def forget(self, request_id: RequestId) -> None:
        """The request is over."""
        self._managers.pop(request_id, None)
