"""The scaler's own metrics. Sees decisions and failures; decides nothing."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from request_manager.scaler.policy import Decision


class ScalerMetrics:
    """espalier_scaler_leader, _replicas{target}, _changes_total{target,reason}, _failures_total{part}."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._leader = Gauge("espalier_scaler_leader", "1 while this scaler holds the lease", registry=registry)
        self._replicas = Gauge(
            "espalier_scaler_replicas", "Replicas that a target should have", ["target"], registry=registry
        )
        self._changes = Counter(
            "espalier_scaler_changes", "Changes of replicas, by reason", ["target", "reason"], registry=registry
        )
        failures = Counter("espalier_scaler_failures", "Looks and calls that failed", ["part"], registry=registry)
        self._scrapes, self._targets = failures.labels("scrape"), failures.labels("target")

    def on_turn(self, leads: bool) -> None:
        """A turn begins."""
        self._leader.set(leads)
        if not leads:  # the leader's numbers are the true ones
            self._replicas.clear()

    def on_decision(self, target: str, decision: Decision) -> None:
        """Decided, and carried out if it is a change."""
        self._replicas.labels(target).set(decision.replicas)
        if decision.is_change:
            self._changes.labels(target, decision.reason).inc()

    def on_scrape_failed(self) -> None:
        """A source could not be scraped."""
        self._scrapes.inc()

    def on_target_failed(self) -> None:
        """A target could not be measured, read or changed."""
        self._targets.inc()
