"""Whether a process has started, can work and lives: said by its event loop, read by another thread.

Knows clocks and asyncio; must not know who asks, or what the process does.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_BEAT_S = 0.2  # how old an answer may be, where the event loop turns
_MAX_WORK_S = 300.0  # as long as a manager waits for an answer; who works longer is stuck


class Vitals:
    """Written in the event loop's thread, read in any.

    live_timeout_s: how long the event loop may stand still. clock: seconds, monotonic.
    """

    def __init__(self, live_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._live_timeout_s = live_timeout_s
        self._clock = clock
        self._can_work: Callable[[], bool] | None = None
        self._is_ready = False
        self._turned_s = clock()
        self._works_since_s: float | None = None

    @property
    def has_started(self) -> bool:
        """Whether all that is done once is done."""
        return self._can_work is not None

    @property
    def is_ready(self) -> bool:
        """Whether it could do its work when the event loop last turned, which was lately."""
        return self._is_ready and self.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the event loop has turned lately, or computes and may do so."""
        now_s, works_since_s = self._clock(), self._works_since_s
        if works_since_s is not None and now_s - works_since_s < _MAX_WORK_S:
            return True
        return now_s - self._turned_s < self._live_timeout_s

    def start(self, can_work: Callable[[], bool]) -> None:
        """Start-up is over. From now on `can_work` is asked in the event loop; may be called from another thread."""
        self._can_work = can_work

    @contextmanager
    def working(self) -> Iterator[None]:
        """The body computes in the event loop's own thread, which therefore stands still."""
        self._works_since_s = self._clock()
        try:
            yield
        finally:
            self._turned_s, self._works_since_s = self._clock(), None

    def beat(self) -> None:
        """The event loop turns."""
        self._turned_s = self._clock()
        self._is_ready = self._can_work is not None and self._can_work()

    async def beat_on(self) -> None:
        """Beat until cancelled; raises what `can_work` raised, and who waits for that sees the process die."""
        while True:
            self.beat()
            await asyncio.sleep(_BEAT_S)
