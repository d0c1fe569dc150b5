"""Who is alive, and how others were lost: read from a roster whenever somebody looks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, get_args

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from request_manager.roster import A, Kind, Loss, Roster
from treecore.service.labels import FewLabels

_LOSSES: tuple[Loss, ...] = get_args(Loss)
_MAX_NAMES = 16


class RosterMetrics(Collector, Generic[A]):
    """espalier_workers and espalier_worker_losses of `kinds`. Whoever was there once and is gone is a 0."""

    def __init__(self, roster: Roster[A], kinds: Sequence[Kind]) -> None:
        self._roster: Roster[A] = roster
        self._kinds = kinds
        self._label = FewLabels(_MAX_NAMES)
        self._seen: set[tuple[Kind, str]] = set()

    def collect(self) -> Iterable[Metric]:
        """As prometheus_client asks."""
        live = Counter((member.kind, self._label(member.announcement.name)) for member in self._roster.members())
        self._seen |= live.keys()
        workers = GaugeMetricFamily("espalier_workers", "Live workers", labels=["kind", "name"])
        for key in sorted(self._seen):
            workers.add_metric(key, live[key])
        losses = CounterMetricFamily("espalier_worker_losses", "Workers lost", labels=["kind", "reason"])
        for kind in self._kinds:
            for loss in _LOSSES:
                losses.add_metric((kind, loss), self._roster.losses[kind, loss])
        return workers, losses
