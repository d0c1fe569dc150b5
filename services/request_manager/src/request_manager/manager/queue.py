"""Who waits and who runs, both the oldest first. Owns the order; must not know steps, workers or why anybody moves."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from request_manager.manager.request import Request
from treecore.errors import Overloaded
from treecore.messages import RequestId

_RETRY_AFTER_S = 1


class RequestQueue:
    """Every request that is not over. At most `max_waiting` wait; who was preempted waits in front of all others."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[Request] = deque()
        self._running: dict[RequestId, Request] = {}

    def __iter__(self) -> Iterator[Request]:
        """All of them: who runs, then who waits."""
        yield from [*self._running.values(), *self._waiting]

    def __getitem__(self, request_id: RequestId) -> Request:
        """One that runs."""
        return self._running[request_id]

    @property
    def running(self) -> list[Request]:
        """Those that take part in steps."""
        return list(self._running.values())

    @property
    def num_waiting(self) -> int:
        """How many do not yet."""
        return len(self._waiting)

    def waiting(self, most: int) -> list[Request]:
        """The first `most` that wait."""
        return list(islice(self._waiting, most))

    def submit(self, request: Request) -> None:
        """The request waits behind all others; raises Overloaded if too many do."""
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded("too many requests are waiting", _RETRY_AFTER_S)
        self._waiting.append(request)

    def admit(self) -> Request:
        """The first that waits runs from now on."""
        request = self._waiting.popleft()
        self._running[request.request_id] = request
        return request

    def preempt(self, request: Request) -> None:
        """Who runs waits again, in front."""
        del self._running[request.request_id]
        self._waiting.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """A request that waits does so no longer."""
        self._waiting = deque(other for other in self._waiting if other is not request)

    def remove(self, request: Request) -> None:
        """The request is over, wherever it was."""
        self._running.pop(request.request_id, None)
        self.withdraw(request)
