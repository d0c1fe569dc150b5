"""Keeps children alive: starts them again with back-off, gives up with one clear line, stops them in reverse order.

Knows children and when they die; must not know what they do.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from espalier_local.child import Child, ChildExit, ChildSpec, LineSink
from treecore.errors import EspalierError

_REFUSED = 1  # the exit status of a program that says: do not try again
_KILLED_S = 5.0


class ChildFailed(EspalierError):
    """A child cannot be kept alive; the message is the one line that the user sees."""

    code = "child_failed"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from first_delay_s to max_delay_s; `max_deaths` within `window_s` are too many.

    follow_s: how long the others of a group have to say why they go, too.
    """

    first_delay_s: float = 0.2
    max_delay_s: float = 5.0
    max_deaths: int = 5
    window_s: float = 60.0
    follow_s: float = 5.0

    def delay_s(self, deaths: Sequence[float], now: float) -> float | None:
        """How long to wait after the deaths at these times, the last of them just now; None: give up."""
        recent = sum(now - death <= self.window_s for death in deaths)
        if recent >= self.max_deaths:
            return None
        return float(min(self.first_delay_s * 2 ** max(recent - 1, 0), self.max_delay_s))


@dataclass(slots=True)
class _Kept:
    """A child, or a group that lives and dies together, through all lives. Written by its own task, and by `start`."""

    specs: tuple[ChildSpec, ...]
    children: list[Child]
    deaths: deque[float]
    was_ready: bool = False
    lives: int = 1
    task: asyncio.Task[None] | None = field(default=None)

    @property
    def name(self) -> str:
        """The first child's."""
        return self.specs[0].name

    async def ended(self, follow_s: float) -> ChildExit:
        """How the first of them ended, once all are gone: the others are given a moment to say why they go, too."""
        waits = [asyncio.create_task(child.wait()) for child in self.children]
        first, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(waits, timeout=follow_s)
        await _kill_all(self.children)
        return min((wait.result() for wait in first), key=lambda end: end.code != _REFUSED)


class Supervisor:
    """Owns children until `stop`. One asyncio task a child starts it again when it dies."""

    def __init__(
        self,
        sink: LineSink,
        policy: RestartPolicy | None = None,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._failed = asyncio.Event()
        self._failure: ChildFailed | None = None

    async def start(self, *specs: ChildSpec) -> None:
        """Start a child and keep it alive; several are a group: when one ends, all end and are started again.

        Raises ChildFailed if a program cannot be run.
        """
        kept = _Kept(specs, [], deque(maxlen=self._policy.max_deaths))
        self._kept[kept.name] = kept
        await self._spawn_all(kept)
        kept.task = asyncio.create_task(self._keep(kept), name=f"keep {kept.name}")

    def mark_ready(self, name: str) -> None:
        """The child or group has worked once: from now on exit status 1 is a death like any other."""
        self._kept[name].was_ready = True

    def names(self) -> tuple[str, ...]:
        """The children in the order of their start."""
        return tuple(spec.name for kept in self._kept.values() for spec in kept.specs)

    def pid(self, name: str) -> int:
        """The process id of the child's present (or, between two lives, last) life."""
        children = [child for kept in self._kept.values() for child in kept.children]
        return next(child.pid for child in children if child.spec.name == name)

    async def failure(self) -> NoReturn:
        """Wait until a child has given up and raise its ChildFailed."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def stop(self) -> None:
        """Stop all children, the last started first and a group's together. Cancelled: kill all at once.

        Each child or group has the grace period.
        """
        kept = list(reversed(self._kept.values()))
        await self._dismiss(kept)
        children = [child for each in kept for child in each.children]
        try:
            for each in kept:
                await asyncio.gather(*[child.stop(self._grace_s) for child in each.children])
        finally:
            await _kill_all(children)

    async def _dismiss(self, kept: Sequence[_Kept]) -> None:
        """End the tasks that would start children again."""
        tasks = [each.task for each in kept if each.task is not None]
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _spawn_all(self, kept: _Kept) -> None:
        for idx, spec in enumerate(kept.specs):
            try:
                kept.children[idx : idx + 1] = [await Child.spawn(spec, self._sink)]
            except OSError as error:
                raise ChildFailed(f"{spec.name} cannot be started: {error}") from error

    async def _keep(self, kept: _Kept) -> None:
        try:
            while True:
                await self._revive(kept, await kept.ended(self._policy.follow_s))
        except ChildFailed as failure:
            self._failure = self._failure or failure
            self._failed.set()

    async def _revive(self, kept: _Kept, end: ChildExit) -> None:
        delay_s = self._judge(kept, end)
        self._sink("espalier", f"{kept.name} died ({end.describe()}); starting it again in {delay_s:.1f} s")
        await asyncio.sleep(delay_s)
        await self._spawn_all(kept)
        kept.lives += 1

    def _judge(self, kept: _Kept, end: ChildExit) -> float:
        """Seconds until the next life; raises ChildFailed if there shall be none."""
        if _is_refusal(kept, end):
            raise ChildFailed(end.line or f"{kept.name} ended at once without a word")
        now = self._clock()
        kept.deaths.append(now)
        delay_s = self._policy.delay_s(kept.deaths, now)
        if delay_s is None:
            raise ChildFailed(
                f"{kept.name} died {len(kept.deaths)} times within {self._policy.window_s:.0f} s,"
                f" last with {end.describe()}"
            )
        return delay_s


def _is_refusal(kept: _Kept, end: ChildExit) -> bool:
    """Whether the child said that it cannot start, as against having died at work."""
    if end.code != _REFUSED or kept.lives > 1:
        return False
    return not kept.was_ready or end.line.startswith(f"{kept.specs[0].speaks_as}: ")


async def _kill_all(children: Sequence[Child]) -> None:
    for child in children:
        child.kill()
    if children:
        await asyncio.wait([asyncio.ensure_future(child.wait()) for child in children], timeout=_KILLED_S)
