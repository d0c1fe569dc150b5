"""The gateway's end: a contract.Manager whose managers are other processes.

Owns the gateway's streams: the tokens that each has, and which manager goes on with it. A stream whose manager is gone,
or of which something was lost, is admitted again behind the tokens that are there; nobody sees a difference.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from request_manager.contract import Generation, ModelCard, TokenDelta
from request_manager.relay.metrics import RelayMetrics
from request_manager.relay.stream import Lost, ManagerMember, Stream
from request_manager.relay.wire import admission_of, error_of
from request_manager.roster import Roster
from treecore.codec import decode, encode
from treecore.errors import EspalierError, Overloaded, Unavailable, Unlinked, Unreachable, WireError
from treecore.messages import RequestId
from treecore.service.bus import Bus
from treecore.service.telemetry import log_event
from treecore.streams import (
    AdmissionReply,
    Deltas,
    GatewayId,
    ManagerAnnouncement,
    OpenStream,
    OpenStreams,
    StreamsReply,
    admit_subject,
    deltas_subject,
    streams_subject,
)

logger = logging.getLogger(__name__)

_TELL_S = 0.5  # how often managers are told which streams are open
_ADMIT_S = 5.0
_TOLD_S = 2.0  # with _TELL_S well below desk.GATEWAY_SILENCE_S: a manager that hangs keeps no other from hearing
_RETRY_S = 0.1
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Patience:
    """max_pause_s: a request that gets no token for so long fails. max_waiting: requests that no manager has."""

    max_pause_s: float
    max_waiting: int


class RemoteManager:
    """A contract.Manager over the managers of a roster. `run` is someone's task."""

    def __init__(
        self,
        bus: Bus,
        managers: Roster[ManagerAnnouncement],
        gateway_id: GatewayId,
        patience: Patience,
        metrics: RelayMetrics,
    ) -> None:
        self._bus = bus
        self._managers = managers
        self._gateway_id = gateway_id
        self._patience = patience
        self._streams: dict[RequestId, Stream] = {}
        self._numbers = count()
        self._tell_now = asyncio.Event()
        self._card: ModelCard | None = None
        self._metrics = metrics
        metrics.watch_streams(self._streams_by_place)

    def card(self) -> ModelCard:
        """See contract.Manager. A manager that restarts does not take the card away."""
        live = self._managers.members()
        if live:
            self._card = live[0].announcement.card
        if self._card is None:
            raise Unavailable("no request manager has announced itself yet")
        return self._card

    def is_ready(self) -> bool:
        """See contract.Manager."""
        return self._best() is not None

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta]:
        """See contract.Manager."""
        self._check_room()
        stream = Stream(generation)
        self._streams[stream.request_id] = stream
        try:
            while True:
                await self._place(stream)
                with suppress(Lost):
                    async for delta in self._follow(stream):
                        yield delta
                    return
        finally:
            del self._streams[stream.request_id]
            if not stream.is_over:
                self._tell_now.set()  # whoever has it may forget it

    async def run(self) -> None:
        """Hear deltas and tell managers what is open, until cancelled."""
        await self._bus.subscribe(deltas_subject(self._gateway_id), self._on_deltas)
        while True:
            self._tell_now.clear()
            await asyncio.gather(*[self._tell(manager) for manager in self._managers.members()])
            self._leave_idle_managers()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TELL_S):
                    await self._tell_now.wait()

    def _streams_by_place(self) -> tuple[int, int]:
        """Those that a manager has, and those that none has. May be called from another thread."""
        streams = list(self._streams.values())
        num_waiting = sum(not stream.is_placed for stream in streams)
        return len(streams) - num_waiting, num_waiting

    def _check_room(self) -> None:
        if self._streams_by_place()[1] >= self._patience.max_waiting:
            raise Overloaded("too many requests are waiting", _RETRY_AFTER_S)

    # -- placing ------------------------------------------------------------------------------------------------------

    async def _place(self, stream: Stream) -> None:
        """Have a manager admit it. Only one that has no token yet, and was never admitted, may be refused for load."""
        stream.num_steps_before = stream.num_steps
        is_new = stream.num_losses == 0 and not stream.output
        try:
            async with asyncio.timeout(self._patience.max_pause_s):
                while not (stream.is_over or await self._is_admitted(stream, is_new=is_new)):
                    await self._moment()
        except TimeoutError as error:
            raise Unavailable(f"no request manager for {self._patience.max_pause_s:g} s") from error

    async def _is_admitted(self, stream: Stream, *, is_new: bool) -> bool:
        manager = self._best()
        if manager is None:
            return False
        stream.number = next(self._numbers)
        admission = admission_of(stream.generation, self._gateway_id, stream.number, stream.output)
        stream.manager, stream.checked = manager, None
        try:
            body = await self._ask(manager, admit_subject(manager.worker_id), encode(admission), _ADMIT_S)
            refusal = decode(body, AdmissionReply).refusal
        except Unavailable:
            stream.number = -1  # whoever has it all the same may forget it
            return False
        except WireError as error:
            raise EspalierError(f"{stream.request_id} cannot be sent: {error}") from error
        if refusal is None:
            stream.is_placed = stream.number >= 0
            if not is_new:
                self._metrics.on_readmitted()
            return True
        reason = error_of(refusal)
        if isinstance(reason, Overloaded) and not is_new:
            stream.number = -1
            return False
        raise reason

    def _best(self) -> ManagerMember | None:
        """The ready manager with the least to do."""
        ready = [manager for manager in self._managers.members() if manager.announcement.is_ready]
        return min(ready, key=self._load, default=None)

    def _load(self, manager: ManagerMember) -> int:
        ours = sum(stream.manager is manager for stream in self._streams.values())
        return max(ours, manager.announcement.num_running + manager.announcement.num_waiting)

    async def _moment(self) -> None:
        self._managers.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S):
                await self._managers.changed.wait()

    # -- following ----------------------------------------------------------------------------------------------------

    async def _follow(self, stream: Stream) -> AsyncGenerator[TokenDelta]:
        """What its manager sends, up to the end. Raises Lost, and what ended the request."""
        assert stream.manager is not None
        while True:
            outcome = await self._next(stream, stream.manager)
            if isinstance(outcome, Lost) and stream.number >= 0:
                continue  # admitted again since
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.finish_reason is not None:
                return

    async def _next(self, stream: Stream, manager: ManagerMember) -> TokenDelta | Exception:
        if not stream.inbox.empty():
            return stream.inbox.get_nowait()
        try:
            async with asyncio.timeout(self._patience.max_pause_s), manager.life.hold():
                return await stream.inbox.get()
        except TimeoutError:
            return Unavailable(f"no token for {self._patience.max_pause_s:g} s")
        except Unavailable:  # the manager's life was cut
            stream.lose()
            return stream.inbox.get_nowait()

    async def _on_deltas(self, body: bytes) -> bytes | None:
        try:
            deltas = decode(body, Deltas)
        except WireError as error:
            log_event(logger, logging.WARNING, "deltas refused", error=error)
            return None
        for delta in deltas.items:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.take(delta)
        return None

    # -- telling ------------------------------------------------------------------------------------------------------

    async def _tell(self, manager: ManagerMember) -> None:
        """Tell a manager what is open there, and see whether it has sent what never came."""
        streams = [stream for stream in self._streams.values() if stream.manager is manager and stream.number >= 0]
        items = tuple(OpenStream(stream.request_id, stream.number) for stream in streams)
        told = OpenStreams(self._gateway_id, next(self._numbers), items)
        try:
            subject = streams_subject(manager.worker_id)
            reply = decode(await self._ask(manager, subject, encode(told), _TOLD_S), StreamsReply)
        except (Unavailable, WireError):
            return
        if len(reply.num_sent) == len(streams):
            self._check(streams, items, reply.num_sent)

    def _check(self, streams: Sequence[Stream], items: Sequence[OpenStream], num_sent: Sequence[int]) -> None:
        """Lost is what was sent, or over, at two checks and has not come between them."""
        for stream, item, sent in zip(streams, items, num_sent, strict=True):
            if stream.number != item.number or stream.is_over:
                continue
            is_behind = sent < 0 or sent > len(stream.output)
            now = (item.number, len(stream.output)) if is_behind else None
            if now is not None and now == stream.checked:
                log_event(logger, logging.WARNING, "tokens lost", request_id=stream.request_id)
                stream.lose()
            stream.checked = now

    def _leave_idle_managers(self) -> None:
        """A manager that has lost its verifier keeps its requests waiting; another one need not."""
        if self._best() is None:
            return
        for stream in self._streams.values():
            manager = stream.manager
            if manager is not None and stream.number >= 0 and not stream.is_over and not manager.announcement.is_ready:
                stream.lose()

    async def _ask(self, manager: ManagerMember, subject: str, body: bytes, timeout_s: float) -> bytes:
        """Raises Unavailable; whoever cannot be reached is no longer there."""
        try:
            async with manager.life.hold():
                return await self._bus.request(subject, body, timeout_s)
        except Unlinked:
            raise
        except Unreachable:
            self._managers.lose(manager.worker_id)
            raise
