"""How a group comes together: rank 0 listens, the others join in any order, and nobody goes on before all are there.

Knows connections and facts that must agree; must not know models. What does not belong to the group is refused by
name. An old leader and new workers are no group either, but not for good: in a roll-out a new leader is about to come.
"""

import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NoReturn

from llm_verifier.group.fingerprint import difference
from llm_verifier.group.seat import Seat, is_loopback
from llm_verifier.group.wire import Frame, Wire
from treecore.errors import ConfigError, GroupFailed, WireError
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

Facts = dict[str, str]

GENERATION = "group_generation"

_POLL_S = 0.2
_HELLO_S = 5.0  # a connection that says nothing for so long is none of ours


@dataclass(frozen=True, slots=True)
class Patience:
    """complete_s: until the group must be complete. silence_s: see Wire. is_stopped: give up at once."""

    complete_s: float
    silence_s: float
    is_stopped: Callable[[], bool]

    def check(self, deadline: float) -> None:
        """Raises GroupFailed once it is at an end."""
        if self.is_stopped() or time.monotonic() > deadline:
            raise GroupFailed(f"the group was not complete within {self.complete_s:g} s")


def gather_ranks(seat: Seat, facts: Facts, patience: Patience, store_port: int) -> dict[int, Wire]:
    """Rank 0: wait for all others and tell them that the group is formed. Raises GroupFailed naming who is missing."""
    with closing(_listen(seat.rendezvous)) as door:
        lobby = _Lobby(door, seat, facts, patience.silence_s)
        deadline = time.monotonic() + patience.complete_s
        while lobby.missing():
            lobby.wait()
            lobby.check(patience, deadline)
    return lobby.formed(store_port)


def join_ranks(seat: Seat, facts: Facts, patience: Patience) -> tuple[Wire, int]:
    """Another rank: find rank 0, wherever it is in its start. Returns the wire and the port of rank 0's store.

    Raises ConfigError, with rank 0's words, if it does not take us; GroupFailed after `complete_s`.
    """
    deadline = time.monotonic() + patience.complete_s
    while True:
        with suppress(OSError):  # not there yet, of another generation, or gone before the group was complete
            return _join_once(seat, facts, patience, deadline)
        patience.check(deadline)
        time.sleep(_POLL_S)


def _join_once(seat: Seat, facts: Facts, patience: Patience, deadline: float) -> tuple[Wire, int]:
    wire = Wire(socket.create_connection(seat.rendezvous, timeout=_HELLO_S), patience.silence_s)
    try:
        wire.send("hello", seat.rank, facts)
        while not _is_readable(wire):
            patience.check(deadline)
        return wire, _store_port(wire.receive(), seat)
    except BaseException:
        wire.close()
        raise


def _store_port(frame: Frame, seat: Seat) -> int:
    if frame.kind == "formed":
        return int(frame.fields[0])
    if frame.kind == "refused":
        raise ConfigError(str(frame.fields[0]))
    if frame.kind == "later":
        raise ConnectionError(str(frame.fields[0]))
    raise ConfigError(f"what listens at {_spelled(seat.rendezvous)} is no leader of a verifier group")


class _Lobby:
    """Rank 0's view of who has joined. A rank that goes away again has not."""

    def __init__(self, door: socket.socket, seat: Seat, facts: Facts, silence_s: float) -> None:
        self._door = door
        self._seat = seat
        self._facts = facts
        self._silence_s = silence_s
        self._joined: dict[int, Wire] = {}

    def missing(self) -> list[int]:
        """The ranks that are not here."""
        return [rank for rank in range(1, self._seat.size) if rank not in self._joined]

    def wait(self) -> None:
        """For whoever comes or goes, not for long."""
        everyone: list[socket.socket | Wire] = [self._door, *self._joined.values()]
        ready, _, _ = select.select(everyone, [], [], _POLL_S)
        for rank in [rank for rank, wire in self._joined.items() if wire in ready]:
            self._joined.pop(rank).close()  # before the group is formed a rank has nothing to say but goodbye
        if self._door in ready:
            self._admit()

    def check(self, patience: Patience, deadline: float) -> None:
        """Raises GroupFailed naming who is missing, and sends the others away, once patience is at an end."""
        try:
            patience.check(deadline)
        except GroupFailed as error:
            for wire in self._joined.values():
                wire.close()
            raise GroupFailed(f"{error}: missing ranks {', '.join(map(str, self.missing()))}") from None

    def formed(self, store_port: int) -> dict[int, Wire]:
        """Tell everyone. One who has gone in this moment is noticed when the group first works."""
        for wire in self._joined.values():
            with suppress(OSError):
                wire.send("formed", store_port)
        return self._joined

    def _admit(self) -> None:
        connection, address = self._door.accept()
        wire = Wire(connection, _HELLO_S)
        try:
            rank = self._checked(wire.receive())
        except _OtherGeneration as error:
            _send_away(wire, "later", error)
        except (OSError, WireError, ConfigError) as error:
            log_event(logger, logging.WARNING, "rank refused", address=address[0], reason=error)
            _send_away(wire, "refused", error)
        else:
            connection.settimeout(self._silence_s)
            self._joined[rank] = wire

    def _checked(self, frame: Frame) -> int:
        if frame.kind != "hello" or len(frame.fields) != 2:
            raise WireError("no rank of a verifier group")
        rank, facts = frame.fields
        if not isinstance(rank, int) or not isinstance(facts, dict):
            raise WireError("no rank of a verifier group")
        if facts.get(GENERATION) != self._facts.get(GENERATION):
            raise _OtherGeneration(f"rank {rank} is of generation {facts.get(GENERATION)!r}")
        if differs := difference(self._facts, facts):
            raise ConfigError(f"rank {rank} does not belong to this group: {differs}")
        if not 0 < rank < self._seat.size:
            raise ConfigError(f"rank {rank}: the group has ranks 0 to {self._seat.size - 1}")
        if rank in self._joined:
            raise ConfigError(f"rank {rank} is taken: two processes were started with this rank")
        return rank


class _OtherGeneration(Exception):
    """A rank from before a roll-out, or from behind it."""


def _send_away(wire: Wire, kind: str, reason: Exception) -> None:
    with suppress(OSError):
        wire.send(kind, str(reason))
    wire.close()


def _listen(at: tuple[str, int]) -> socket.socket:
    """On the loopback if the rendezvous is there, else on all addresses: a pod need not be able to resolve itself."""
    host = at[0] if is_loopback(at[0]) else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, at[1]), family=family)
    except OSError as error:
        _refuse(at, error)


def _refuse(at: tuple[str, int], error: OSError) -> NoReturn:
    raise ConfigError(f"--rendezvous {_spelled(at)}: cannot listen there: {error.strerror}") from error


def _is_readable(wire: Wire) -> bool:
    return bool(select.select([wire], [], [], _POLL_S)[0])


def _spelled(at: tuple[str, int]) -> str:
    return f"{at[0]}:{at[1]}"
