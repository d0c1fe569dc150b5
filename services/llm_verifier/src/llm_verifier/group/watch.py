"""Whether all ranks are alive, in a thread of its own: what computes may be stuck in a collective for long.

Knows frames, heartbeats and evidence; must not know what is computed. Every rank has a wire to rank 0: a dead process
closes it at once, a hung machine falls silent. Rank 0 decides who is to blame and tells all others, who end with it.
"""

import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

from llm_verifier.group.collectives import Activity
from llm_verifier.group.fate import Ending, Evidence, Kind, verdict
from llm_verifier.group.wire import Frame, Wire, packed
from treecore.errors import GroupFailed, WireError

OnEnd = Callable[[Ending], None]
"""Called once, in the watching thread, when the group has failed. At the process's edge it does not return."""

_BEAT_S = 0.5
_SETTLE_S = 1.0  # a broken collective may be known before the death that broke it
_VERDICT_S = 3.0  # a rank that reported a failure and hears nothing of rank 0 ends by itself
_GOODBYE_S = 5.0


def _failure(ending: Ending | None) -> GroupFailed:
    return GroupFailed(f"rank {ending.rank} {ending.reason}" if ending else "the group has ended")


class LeaderWatch:
    """Rank 0's watch over all others."""

    def __init__(
        self,
        wires: Mapping[int, Wire],
        activity: Activity,
        timeout_s: float,
        on_end: OnEnd,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        """on_leaving: a rank was asked to stop and cannot do so alone; called in the watching thread."""
        self._wires = dict(wires)
        self._activity = activity
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._on_leaving = on_leaving
        self._evidence: list[Evidence] = []
        self._heard = dict.fromkeys(wires, time.monotonic())
        self._is_computing = dict.fromkeys(wires, False)
        self._ready: dict[int, dict[str, Any]] = {}
        self._settled_at = 0.0
        self._is_stopping = False
        self._over = threading.Event()
        self._ending: Ending | None = None
        self._thread = threading.Thread(target=self._watch, name="group watch", daemon=True)
        self._thread.start()

    def command(self, command: list[Any]) -> None:
        """Have all others do this."""
        frame = packed("do", command)
        for rank, wire in list(self._wires.items()):
            try:
                wire.send_packed(frame)
            except OSError as error:
                self.fail("broken", f"rank {rank} cannot be reached: {error}")

    def wait_ready(self, is_stopped: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """What each rank tells of itself, once all are ready. Raises GroupFailed if that will not be."""
        while len(self._ready) < len(self._heard):
            if self._over.wait(_BEAT_S / 5) or is_stopped():
                raise GroupFailed("stopped before all ranks were ready")
        return self._ready

    def fail(self, kind: Kind, text: str) -> NoReturn:
        """Have the group end: something has failed here, or was noticed to have failed elsewhere."""
        self._evidence.append(Evidence(0, kind, text))
        self._over.wait()
        raise _failure(self._ending)

    def stop(self) -> None:
        """End the group in peace: all others finish what they were told, and go."""
        self._is_stopping = True
        self._tell_all("stop")
        self._thread.join(_GOODBYE_S)

    def abandon(self, reason: str, *, is_refusal: bool) -> None:
        """Rank 0 goes because of an error that it reports itself; the others end with it."""
        self._is_stopping = True
        self._tell_all("ended", 0, reason, is_refusal)

    def _watch(self) -> None:
        next_beat = 0.0
        while self._wires and not self._over.is_set():
            ready, _, _ = select.select(list(self._wires.values()), [], [], _BEAT_S / 2)
            for rank in [rank for rank, wire in self._wires.items() if wire in ready]:
                self._hear(rank)
            if time.monotonic() >= next_beat and not self._is_stopping:
                next_beat = time.monotonic() + _BEAT_S
                self._tell_all("beat")
            self._judge()
        for wire in self._wires.values():
            wire.close()
        self._over.set()

    def _hear(self, rank: int) -> None:
        try:
            frame = self._wires[rank].receive()
        except (OSError, WireError):
            self._wires.pop(rank).close()
            if not self._is_stopping:
                self._evidence.append(Evidence(rank, "gone"))
            return
        self._heard[rank] = time.monotonic()
        self._take(rank, frame)

    def _take(self, rank: int, frame: Frame) -> None:
        match frame:
            case Frame("beat", [is_computing]):
                self._is_computing[rank] = bool(is_computing)
            case Frame("ready", [facts]):
                self._ready[rank] = facts
            case Frame("failed", [kind, text]):
                self._evidence.append(Evidence(rank, kind, text))
            case Frame("leaving", _):
                self._on_leaving()

    def _judge(self) -> None:
        """End the group once the evidence is strong, or old enough that no stronger will come."""
        now = time.monotonic()
        silent = [rank for rank, heard in self._heard.items() if now - heard > self._timeout_s]
        self._evidence += [Evidence(rank, "silent") for rank in silent if not self._is_stopping]
        if not self._evidence:
            self._settled_at = now + _SETTLE_S
        elif now >= self._settled_at or any(each.is_strong for each in self._evidence):
            self._end(verdict(self._evidence, self._late(now), self._timeout_s))

    def _late(self, now: float) -> list[int]:
        hung = {rank for rank, heard in self._heard.items() if now - heard > 4 * _BEAT_S}
        computing = {rank for rank, is_computing in self._is_computing.items() if is_computing}
        here = {0} if self._activity.is_computing else set()
        return sorted((hung | computing | here) - {each.rank for each in self._evidence})

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        self._tell_all("ended", ending.rank, ending.reason, ending.is_refusal)
        self._on_end(ending)
        self._over.set()

    def _tell_all(self, kind: str, *fields: Any) -> None:
        for wire in list(self._wires.values()):
            with suppress(OSError):  # what does not hear us is noticed by what it does not say
                wire.send(kind, *fields)


class FollowerWatch:
    """Another rank's watch over rank 0, through which its commands come."""

    def __init__(self, rank: int, wire: Wire, activity: Activity, timeout_s: float, on_end: OnEnd) -> None:
        self._rank = rank
        self._wire = wire
        self._activity = activity
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._commands: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._over = threading.Event()
        self._ending: Ending | None = None
        self._thread = threading.Thread(target=self._watch, name="group watch", daemon=True)
        self._thread.start()

    def next_command(self) -> list[Any] | None:
        """Wait, for hours if need be; None: the group ends in peace."""
        return self._commands.get()

    def tell_ready(self, facts: dict[str, Any]) -> None:
        """Ready to compute."""
        self._tell("ready", facts)

    def tell_leaving(self) -> None:
        """Asked to stop: have rank 0 end the group in peace."""
        self._tell("leaving")

    def fail(self, kind: Kind, text: str) -> NoReturn:
        """Have the group end: something has failed here, or was noticed to have failed elsewhere."""
        self._tell("failed", kind, text)
        if not self._over.wait(_VERDICT_S):
            self._end(Ending(self._rank, text))
        raise _failure(self._ending)

    def close(self) -> None:
        """Leave; the group is over."""
        self._over.set()
        self._thread.join(_GOODBYE_S)
        self._wire.close()

    def _watch(self) -> None:
        next_beat, heard = 0.0, time.monotonic()
        while not self._over.is_set():
            if select.select([self._wire], [], [], _BEAT_S / 2)[0]:
                heard = time.monotonic()
                self._hear()
            elif time.monotonic() - heard > self._timeout_s:
                self._end(Ending(0, f"has said nothing for {self._timeout_s:g} s"))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_S
                self._tell("beat", self._activity.is_computing)

    def _hear(self) -> None:
        try:
            frame = self._wire.receive()
        except (OSError, WireError):
            self._end(Ending(0, "is gone: its connection has closed"))
            return
        match frame:
            case Frame("do", [command]):
                self._commands.put(command)
            case Frame("stop", _):
                self._commands.put(None)
                self._over.set()
            case Frame("ended", [rank, reason, is_refusal]):
                self._end(Ending(rank, reason, is_refusal))

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        self._on_end(ending)
        self._over.set()
        self._commands.put(None)

    def _tell(self, kind: str, *fields: Any) -> None:
        with suppress(OSError):  # the watch notices what that means
            self._wire.send(kind, *fields)
