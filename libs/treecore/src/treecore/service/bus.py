"""The bus between processes: requests with a deadline, and subscriptions. Bytes in, bytes out.

Knows NATS and its traps (architecture section 7); must not know messages. Core NATS only: a step that is lost is
asked for again under the same step number, and every step is idempotent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from prometheus_client import CollectorRegistry

from treecore.errors import Unavailable, Unlinked, Unreachable
from treecore.service.bus_metrics import BusMetrics
from treecore.service.lifeline import Lifeline
from treecore.service.tasks import first_of
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes | None]]

_RETRY_S = 0.2
_PING_S = 2  # a half-open link is noticed after _PING_S * _MAX_PINGS seconds; the default is minutes
_MAX_PINGS = 2
_DRAIN_S = 5.0


class Bus(Protocol):
    """What the parts need of a broker. The shipped fake in treecore.testing has the same face."""

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """The one reply to `body`. Raises Unreachable (no link, nobody listens) or Unavailable (lost, or too late)."""

    async def publish(self, subject: str, body: bytes) -> None:
        """Send to whoever listens. Raises Unlinked while disconnected (nothing is buffered), else Unavailable."""

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Call `handler` for each message, one after another; what it returns is the reply."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the link is back."""


@dataclass(frozen=True, slots=True)
class Broker:
    """Where the broker is and how to come in. subject_prefix: the first token of every subject."""

    url: str
    subject_prefix: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)


class NatsBus:
    """A Bus over one NATS connection that never gives up reconnecting. `registry` gets the metrics of it, if given."""

    def __init__(self, broker: Broker, registry: CollectorRegistry | None = None) -> None:
        self._broker = broker
        self._metrics = BusMetrics(registry or CollectorRegistry())
        self._client = Client()
        self._link = Lifeline("the link to the broker broke")
        self._was_connected = False
        self._is_closing = False
        self._on_reconnect: list[Callable[[], None]] = []

    @classmethod
    async def connect(
        cls, broker: Broker, name: str, stop: asyncio.Event, registry: CollectorRegistry | None = None
    ) -> "NatsBus":
        """A connected bus, however late the broker appears; raises Unavailable only if `stop` is set meanwhile."""
        bus = cls(broker, registry)
        await bus.open(name, stop)
        return bus

    async def open(self, name: str, stop: asyncio.Event) -> None:
        """Connect; see `connect`. Until then every request and publish raises Unavailable."""
        await first_of(self._connecting(name), stop.wait())
        if not self._client.is_connected:
            raise Unavailable("stopped before the broker was there")
        self._was_connected = True
        self._metrics.on_link(is_up=True)

    @property
    def is_connected(self) -> bool:
        """Whether there is a link to the broker."""
        return self._client.is_connected

    async def _connecting(self, name: str) -> None:
        """`_connect`, and cancelled as often as it takes: nats-py loses a cancellation that meets a refused attempt."""
        connecting = asyncio.ensure_future(self._connect(name))
        try:
            await asyncio.shield(connecting)
        finally:
            while not connecting.done():
                connecting.cancel()
                await asyncio.wait({connecting}, timeout=_RETRY_S)

    async def _connect(self, name: str) -> None:
        """Never gives up: nats-py tries again every _RETRY_S, at the start as after a loss."""
        await self._client.connect(
            self._broker.url,
            name=name,
            user=self._broker.user,
            password=self._broker.password,
            ping_interval=_PING_S,
            max_outstanding_pings=_MAX_PINGS,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type]  # annotated int, slept as float
            allow_reconnect=True,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
        )

    async def request(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        """See Bus.request. A link that breaks ends the wait at once instead of at the deadline."""
        try:
            reply = await self._reply(subject, body, timeout_s)
        except Unavailable as error:
            self._metrics.on_failed_request(was_sent=not isinstance(error, Unreachable))
            raise
        self._metrics.on_message("request", "received", reply)
        return reply

    async def _reply(self, subject: str, body: bytes, timeout_s: float) -> bytes:
        self._check_connected()
        self._metrics.on_message("request", "sent", body)
        try:
            async with self._link.hold():
                return (await self._client.request(self._full(subject), body, timeout=timeout_s)).data
        except nats.errors.NoRespondersError as error:
            raise Unreachable(f"nobody listens on {subject}") from error
        except (nats.errors.Error, TimeoutError) as error:
            raise Unavailable(f"no answer on {subject}: {type(error).__name__}") from error

    async def publish(self, subject: str, body: bytes) -> None:
        """See Bus.publish."""
        self._check_connected()
        self._metrics.on_message("publish", "sent", body)
        try:
            await self._client.publish(self._full(subject), body)
        except nats.errors.Error as error:
            raise Unavailable(f"not sent on {subject}: {type(error).__name__}") from error

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """See Bus.subscribe. After a reconnect nats-py subscribes by itself, also what a dead link did not take."""

        async def answer(message: Msg) -> None:
            self._metrics.on_message("subscription", "received", message.data)
            reply = await handler(message.data)
            if reply is not None and message.reply and self._client.is_connected:
                self._metrics.on_message("subscription", "sent", reply)
                await message.respond(reply)

        await self._client.subscribe(self._full(subject), cb=answer)
        if self._client.is_connected:
            with suppress(nats.errors.Error):
                await self._client.flush()

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """See Bus.on_reconnect."""
        self._on_reconnect.append(callback)

    async def drain(self) -> None:
        """Take nothing new, answer what has come, and close the link."""
        self._is_closing = True
        with suppress(nats.errors.Error, TimeoutError):  # no link: then nobody waits for an answer
            async with asyncio.timeout(_DRAIN_S):
                await self._client.drain()
        await self._client.close()

    async def close(self) -> None:
        """Close the link; what is in flight is dropped."""
        self._is_closing = True
        await self._client.close()

    def _full(self, subject: str) -> str:
        return f"{self._broker.subject_prefix}.{subject}"

    def _check_connected(self) -> None:
        if not self._client.is_connected:
            raise Unlinked("no link to the broker")

    async def _on_error(self, error: Exception) -> None:
        self._metrics.on_error(error)
        level = logging.WARNING if self._was_connected else logging.DEBUG
        log_event(logger, level, "bus error", error=repr(error))

    async def _on_disconnected(self) -> None:
        self._link.cut()
        self._metrics.on_link(is_up=False)
        if not self._is_closing:
            log_event(logger, logging.WARNING, "bus disconnected")

    async def _on_reconnected(self) -> None:
        self._link.mend()
        self._metrics.on_reconnected()
        log_event(logger, logging.INFO, "bus reconnected")
        for callback in self._on_reconnect:
            callback()
