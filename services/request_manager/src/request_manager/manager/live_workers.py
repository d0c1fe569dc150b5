"""How many workers are alive, read from the registry whenever somebody looks. Must not know what they do."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from request_manager.manager.registry import Registry
from treecore.messages import WorkerKind
from treecore.service.labels import FewLabels

_KINDS: tuple[WorkerKind, ...] = ("verifier", "ssm")
_MAX_NAMES = 16


class LiveWorkers(Collector):
    """espalier_workers. Who was there once is shown as 0 when gone: nothing that can be seen looks like all is well."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._label = FewLabels(_MAX_NAMES)
        self._seen: set[tuple[WorkerKind, str]] = set()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """As prometheus_client asks."""
        live = Counter(
            (kind, self._label(worker.announcement.name)) for kind in _KINDS for worker in self._registry.live(kind)
        )
        self._seen |= live.keys()
        family = GaugeMetricFamily("espalier_workers", "Live workers", labels=["kind", "name"])
        for key in sorted(self._seen):
            family.add_metric(key, live[key])
        yield family
