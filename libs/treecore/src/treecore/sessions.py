"""Which manager brought each request to a worker, and whose requests are over. Pure but for the clock."""

from collections.abc import Callable

from treecore.messages import RequestId

LEASE_S = 3.0
"""How long after its last step a manager that sends nothing keeps a verifier group."""

SILENCE_S = 60.0
"""A manager of which a worker has not heard for so long is gone, and so are its requests."""


def session_of(manager: str, number: int) -> str:
    """The name of a manager's session with a worker; another number: a new one."""
    return f"{manager}.{number}"


def manager_of(session: str) -> str:
    """Whose session it is."""
    return session.rpartition(".")[0]


class Sessions:
    """Owns that knowledge. A new session's requests start from nothing; other managers' stay.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, tuple[str, float]] = {}  # by manager: session, when it was last heard
        self._managers: dict[RequestId, str] = {}
        self._manager = ""

    def begin_step(self, session: str) -> list[RequestId]:
        """A message of this session has come; returns the requests that nobody will ask for again."""
        self._manager = manager_of(session)
        before, now = self._sessions.get(self._manager), self._clock()
        gone = {manager for manager, (_, heard_s) in self._sessions.items() if heard_s < now - SILENCE_S}
        if before is not None and before[0] != session:
            gone.add(self._manager)
        for manager in gone:
            del self._sessions[manager]
        self._sessions[self._manager] = session, now
        return [request_id for request_id, manager in self._managers.items() if manager in gone]

    def take(self, request_id: RequestId) -> None:
        """The request is the current manager's."""
        self._managers[request_id] = self._manager

    def forget(self, request_id: RequestId) -> None:
        """The request is over."""
        self._managers.pop(request_id, None)
