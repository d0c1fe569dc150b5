"""What a gateway's end of the relay counts. Knows numbers only."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class RelayMetrics:
    """Requests as a gateway sees them that has no manager of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._readmitted = Counter(
            "espalier_readmissions", "Requests that a manager has gone on with behind another one", registry=registry
        )
        self._streams = Gauge("espalier_streams", "Requests of this gateway", ["state"], registry=registry)

    def on_readmitted(self) -> None:
        """Count a request that was admitted again."""
        self._readmitted.inc()

    def watch_streams(self, load: Callable[[], tuple[int, int]]) -> None:
        """Show how many requests a manager has, and how many none has: what `load` says whenever somebody looks."""
        self._streams.labels("placed").set_function(lambda: load()[0])
        self._streams.labels("waiting").set_function(lambda: load()[1])
