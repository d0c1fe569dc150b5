"""The manager's end: admits what gateways ask for and sends them what steps commit, a message a step and gateway.

Owns which request belongs to which gateway. Must not know steps, text or HTTP. A gateway that falls silent, or that no
longer lists a request, has left it: it is cancelled.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from request_manager.contract import Generation
from request_manager.manager.request import Outbox, Outcome, Request
from request_manager.relay.wire import DeltaPlace, failure, generation_of, to_wire, verdict_of
from treecore.codec import decode, encode
from treecore.errors import EspalierError, Unavailable, WireError
from treecore.messages import RequestId, WorkerId
from treecore.service.bus import Bus
from treecore.service.telemetry import log_event
from treecore.service.tracing import below
from treecore.streams import (
    Admission,
    AdmissionReply,
    Delta,
    Deltas,
    GatewayId,
    OpenStream,
    OpenStreams,
    StreamsReply,
    admit_subject,
    deltas_subject,
    streams_subject,
)

logger = logging.getLogger(__name__)

GATEWAY_SILENCE_S = 5.0
"""A gateway that has not told its open streams for so long is gone."""
_CHECK_S = 1.0
_RETRY_S = 0.1


class Admitting(Protocol):
    """What the desk needs of a Coordinator."""

    def submit(self, generation: Generation, outbox: Outbox, output: Sequence[int]) -> Request:
        """See Coordinator.submit."""

    def cancel(self, request: Request) -> None:
        """See Coordinator.cancel."""


@dataclass(slots=True)
class _Ticket:
    """A request that was admitted. It is its outbox: outcomes go to the gateway, in order."""

    place: DeltaPlace
    client: "_Client"
    request: Request | None = None
    num_sent: int = 0
    is_over: bool = False

    def put_nowait(self, outcome: Outcome) -> None:
        """See Outbox."""
        place = DeltaPlace(self.place.request_id, self.place.number, self.num_sent)
        if isinstance(outcome, EspalierError):
            self.is_over = True
            self.client.put(failure(place, outcome))
            return
        self.num_sent += len(outcome.tokens)
        self.is_over = outcome.finish_reason is not None
        self.client.put(to_wire(place, outcome))


@dataclass(slots=True)
class _Client:
    """What one gateway has here: its open requests, and what it has yet to be sent."""

    heard_s: float
    tickets: dict[RequestId, _Ticket] = field(default_factory=dict)
    unsent: list[Delta] = field(default_factory=list)
    has_unsent: asyncio.Event = field(default_factory=asyncio.Event)
    sending: asyncio.Task[None] | None = None

    def put(self, delta: Delta) -> None:
        """To be sent with the next message."""
        self.unsent.append(delta)
        self.has_unsent.set()

    def sent_of(self, stream: OpenStream) -> int:
        """How many tokens of it were put, -1 if it is not here."""
        ticket = self.tickets.get(stream.request_id)
        return ticket.num_sent if ticket and ticket.place.number == stream.number else -1


class Desk:
    """Admits for one manager. `run` is someone's task; clock: seconds, monotonic."""

    def __init__(self, bus: Bus, manager: Admitting, manager_id: WorkerId, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._manager = manager
        self._manager_id = manager_id
        self._clock = clock
        self._clients: dict[GatewayId, _Client] = {}

    async def run(self) -> None:
        """Serve until cancelled; raises what a sender raised."""
        await self._bus.subscribe(admit_subject(self._manager_id), self._on_admission)
        await self._bus.subscribe(streams_subject(self._manager_id), self._on_streams)
        try:
            while True:
                await asyncio.sleep(_CHECK_S)
                self._close_silent()
                for client in self._clients.values():
                    if client.sending is not None and client.sending.done():
                        client.sending.result()
        finally:
            for gateway_id in list(self._clients):
                self._close(gateway_id)

    async def _on_admission(self, body: bytes) -> bytes:
        try:
            self._admit(decode(body, Admission))
        except (EspalierError, ValueError) as error:
            refusal = verdict_of(error if isinstance(error, EspalierError) else WireError(str(error)))
            return encode(AdmissionReply(refusal))
        return encode(AdmissionReply(None))

    def _admit(self, admission: Admission) -> None:
        client = self._client(admission.gateway_id)
        earlier = client.tickets.get(admission.request_id)
        if earlier is not None:
            if earlier.place.number >= admission.number:
                return
            self._cancel(client, earlier)
        if not len(admission.prompt) or len(admission.output) >= admission.max_tokens:
            raise WireError("a request without a prompt, or with all of its output")
        place = DeltaPlace(admission.request_id, admission.number, len(admission.output))
        ticket = _Ticket(place, client, num_sent=place.start)
        with below(admission.trace):
            ticket.request = self._manager.submit(generation_of(admission), ticket, admission.output.tolist())
        client.tickets[admission.request_id] = ticket

    async def _on_streams(self, body: bytes) -> bytes | None:
        try:
            told = decode(body, OpenStreams)
        except WireError as error:
            log_event(logger, logging.WARNING, "open streams refused", error=error)
            return None
        client = self._client(told.gateway_id)
        wanted = {(stream.request_id, stream.number) for stream in told.items}
        for ticket in list(client.tickets.values()):
            place = ticket.place
            if ticket.is_over:
                del client.tickets[place.request_id]
            elif place.number < told.number and (place.request_id, place.number) not in wanted:
                self._cancel(client, ticket)
        return encode(StreamsReply(tuple(client.sent_of(stream) for stream in told.items)))

    def _client(self, gateway_id: GatewayId) -> _Client:
        client = self._clients.get(gateway_id)
        if client is None:
            client = self._clients[gateway_id] = _Client(self._clock())
            client.sending = asyncio.create_task(self._send(gateway_id, client), name=f"deltas {gateway_id}")
        client.heard_s = self._clock()
        return client

    def _cancel(self, client: _Client, ticket: _Ticket) -> None:
        del client.tickets[ticket.place.request_id]
        if ticket.request is not None and not ticket.is_over:
            self._manager.cancel(ticket.request)

    def _close_silent(self) -> None:
        oldest = self._clock() - GATEWAY_SILENCE_S
        for gateway_id in [gateway_id for gateway_id, client in self._clients.items() if client.heard_s < oldest]:
            log_event(logger, logging.WARNING, "gateway gone", gateway_id=gateway_id)
            self._close(gateway_id)

    def _close(self, gateway_id: GatewayId) -> None:
        client = self._clients.pop(gateway_id)
        for ticket in list(client.tickets.values()):
            self._cancel(client, ticket)
        if client.sending is not None:
            client.sending.cancel()

    async def _send(self, gateway_id: GatewayId, client: _Client) -> None:
        """All that is there goes into one message. What cannot be sent now is once the link is back."""
        while True:
            await client.has_unsent.wait()
            client.has_unsent.clear()
            deltas, client.unsent = client.unsent, []
            while not await self._publish(gateway_id, deltas):  # noqa: ASYNC110 - the link has no event
                await asyncio.sleep(_RETRY_S)

    async def _publish(self, gateway_id: GatewayId, deltas: Sequence[Delta]) -> bool:
        try:
            body = encode(Deltas(tuple(deltas)))
        except WireError:
            if len(deltas) == 1:
                log_event(logger, logging.ERROR, "delta too large", request_id=deltas[0].request_id)
                return True
            half = len(deltas) // 2
            return await self._publish(gateway_id, deltas[:half]) and await self._publish(gateway_id, deltas[half:])
        try:
            await self._bus.publish(deltas_subject(gateway_id), body)
        except Unavailable:
            return False
        return True
