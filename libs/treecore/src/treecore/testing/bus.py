"""A bus inside one event loop, with the face of NatsBus and faults on demand. Nothing in it waits for a clock.

Knows subjects and bytes; must not know messages. One FakeBus stands for the broker and everybody's link to it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, TypeVar

from treecore.errors import Unavailable, Unlinked, Unreachable
from treecore.service.bus import Handler

T = TypeVar("T")


class Fate(Enum):
    """What becomes of a call."""

    DELIVER = auto()
    REFUSE = auto()  # nobody receives it and the caller is told so at once
    LOSE_REPLY = auto()  # it is received and acted upon, but the caller is told that it failed
    DROP = auto()  # nobody receives it and nobody is told: a request waits for its deadline, or for the link to break


@dataclass(frozen=True, slots=True)
class Call:
    """One request or publication; `number` counts all of them from 1."""

    number: int
    kind: Literal["request", "publish"]
    subject: str
    body: bytes


Verdict = Fate | asyncio.Event  # an event: delivered once it is set
Rule = Callable[[Call], Verdict]


def deliver_all(_call: Call) -> Verdict:
    """The rule of a healthy bus."""
    return Fate.DELIVER


def fail_nth(number: int, fate: Fate = Fate.REFUSE) -> Rule:
    """Only the call of this number meets `fate`. Raise it from 1 until `FakeBus.num_calls` stays below it."""
    return lambda call: fate if call.number == number else Fate.DELIVER


@dataclass(slots=True)
class _Listener:
    """A subscription: its handler, called for one message at a time."""

    handler: Handler
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class FakeBus:
    """A treecore.service.bus.Bus. `rule` decides each call's fate; `failures` are the exceptions of handlers."""

    def __init__(self, rule: Rule = deliver_all) -> None:
        self.rule = rule
        self.num_calls = 0
        self.failures: list[Exception] = []
        self._listeners: dict[str, list[_Listener]] = defaultdict(list)
        self._callbacks: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lost = asyncio.Event()

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """See Bus.request."""
        verdict = self._judge("request", subject, body)
        listeners = self._listeners.get(subject)
        if not listeners:
            raise Unreachable(f"nobody listens on {subject}")
        if verdict is Fate.REFUSE:
            raise Unreachable(f"refused by the rule: {subject}")
        lost = self._spawn(self._lost.wait())
        answering = self._spawn(self._answer(listeners[0], body, verdict))
        try:
            await asyncio.wait({answering, lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or self._lost.is_set():
                raise Unavailable(f"no answer on {subject}")
            return answering.result()
        finally:
            lost.cancel()

    async def publish(self, subject: str, body: bytes) -> None:
        """See Bus.publish."""
        verdict = self._judge("publish", subject, body)
        if verdict is Fate.REFUSE:
            raise Unreachable(f"refused by the rule: {subject}")
        for listener in self._listeners.get(subject, ()):
            self._spawn(self._answer(listener, body, verdict))

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """See Bus.subscribe."""
        self._listeners[subject].append(_Listener(handler))

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """See Bus.on_reconnect."""
        self._callbacks.append(callback)

    def silence(self, subject: str) -> None:
        """Whoever listened there is dead: it takes no further message. What it has begun is never answered."""
        for listener in self._listeners.pop(subject, []):
            listener.handler = _never

    def disconnect(self) -> None:
        """The broker is gone: all waits end at once, all calls fail until `reconnect`."""
        self._lost.set()

    def reconnect(self) -> None:
        """The broker is back: subscriptions are as before, callbacks are called."""
        self._lost = asyncio.Event()
        for callback in self._callbacks:
            callback()

    async def close(self) -> None:
        """End everything that is still under way; then raise the first exception that a handler raised."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failures:
            raise self.failures[0]

    def _judge(self, kind: Literal["request", "publish"], subject: str, body: bytes) -> Verdict:
        if self._lost.is_set():
            raise Unlinked("no link to the broker")
        self.num_calls += 1
        return self.rule(Call(self.num_calls, kind, subject, body))

    async def _answer(self, listener: _Listener, body: bytes, verdict: Verdict) -> bytes:
        """The handler's reply. Waits for ever where none will come, as a caller on a real bus would."""
        if isinstance(verdict, asyncio.Event):
            await verdict.wait()
        elif verdict is Fate.DROP:
            return await _never(body)
        async with listener.turn:
            try:
                reply = await listener.handler(body)
            except Exception as error:
                self.failures.append(error)
                reply = None
        if verdict is Fate.LOSE_REPLY:
            raise Unavailable("the reply was lost")
        return await _never(body) if reply is None else reply

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has seen it; nobody may be left to


async def _never(_body: bytes) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
