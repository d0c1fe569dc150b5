"""What a process sends and hears over the bus, counted. Must not know messages.

A round trip is a message that was received for a request; so round trips and bytes per token need no counters of their
own.
"""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Call = Literal["request", "publish", "subscription"]
Direction = Literal["sent", "received"]

_FLOWS: tuple[tuple[Call, Direction], ...] = (
    ("request", "sent"),
    ("request", "received"),
    ("publish", "sent"),
    ("subscription", "received"),
    ("subscription", "sent"),
)
_SLOW = "slow consumer"  # as nats-py and the broker both word it


class BusMetrics:
    """Counters of one link to the broker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["call", "direction"]
        num_messages = Counter("espalier_bus_messages", "Messages over the broker", labels, registry=registry)
        num_bytes = Counter("espalier_bus_bytes", "Bytes of messages' bodies", labels, registry=registry)
        self._flows = {flow: (num_messages.labels(*flow), num_bytes.labels(*flow)) for flow in _FLOWS}
        failed = Counter("espalier_bus_failed_requests", "Requests without an answer", ["reason"], registry=registry)
        self._failed = {reason: failed.labels(reason) for reason in ("unreachable", "unanswered")}
        errors = Counter("espalier_bus_errors", "Errors that the broker's client told of", ["kind"], registry=registry)
        self._errors = {kind: errors.labels(kind) for kind in ("slow_consumer", "other")}
        self._reconnects = Counter("espalier_bus_reconnects", "Times that a broken link came back", registry=registry)
        self._connected = Gauge("espalier_bus_connected", "1 while there is a link to the broker", registry=registry)

    def on_message(self, call: Call, direction: Direction, body: bytes) -> None:
        """A message went over the link."""
        num_messages, num_bytes = self._flows[call, direction]
        num_messages.inc()
        num_bytes.inc(len(body))

    def on_failed_request(self, *, was_sent: bool) -> None:
        """Nobody answered; or, if it was not sent, nobody was there to."""
        self._failed["unanswered" if was_sent else "unreachable"].inc()

    def on_error(self, error: Exception) -> None:
        """The client's error callback was called."""
        self._errors["slow_consumer" if _SLOW in str(error).lower() else "other"].inc()

    def on_link(self, *, is_up: bool) -> None:
        """The link is there, or broke."""
        self._connected.set(is_up)

    def on_reconnected(self) -> None:
        """A link that broke is back."""
        self._reconnects.inc()
        self.on_link(is_up=True)
