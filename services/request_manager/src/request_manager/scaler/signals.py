"""What the metrics of the system say about a target: the one place that knows the metrics' names.

Knows snapshots. Must not know where they come from, nor what is decided.

A metric that no process exposes is `MetricMissing`: it was renamed, or the wrong port is scraped. Neither may look like
"no load".
"""

from dataclasses import dataclass

from request_manager.scaler.policy import Reading
from request_manager.scaler.samples import Snapshot, Span, quantile
from treecore.errors import Unavailable

REQUESTS = "espalier_requests"  # gauge {state="running"|"waiting"}, of managers
QUEUE = "espalier_queue_seconds"  # histogram, of managers
TTFT = "espalier_ttft_seconds"  # histogram, of gateways
WORKERS = "espalier_workers"  # gauge {kind, name}, of managers: live workers as the manager hears of them
BUSY = "espalier_worker_busy_seconds"  # counter {kind, name}, of workers

_LOAD = (REQUESTS, QUEUE, TTFT, WORKERS)
_MIN_OBSERVATIONS = 5  # a quantile of fewer requests is one request's prompt, not the system's load


class MetricMissing(Unavailable):
    """No process exposes the metric."""


@dataclass(frozen=True, slots=True)
class Aims:
    """What is to be held.

    queue_s, ttft_s: queue time and TTFT, in seconds, that `quantile` (a share) of a period's requests stay below.
    utilisation: the share of the time that SSM workers should be busy.
    """

    queue_s: float = 0.5
    ttft_s: float = 2.0
    quantile: float = 0.9
    utilisation: float = 0.6


def verifier_reading(aims: Aims, load: Span) -> Reading:
    """The load of the verifier groups in a period, from gateways and managers. Raises MetricMissing."""
    _check(load.now, *_LOAD)
    running, waiting = _requests(load.now)
    pressure, num_observed = _latency(aims, load)
    if pressure is None and not waiting:  # nobody began, and nobody waits to
        pressure = 0.0
    return Reading(
        at_s=load.now.at_s,
        running=running,
        waiting=waiting,
        live=int(load.now.highest(WORKERS, {"kind": "verifier"})),
        pressure=pressure,
        is_significant=num_observed >= _MIN_OBSERVATIONS,
        is_whole=load.is_whole,
    )


def ssm_reading(aims: Aims, name: str, load: Span, workers: Span) -> Reading:
    """The load of the SSM `name` in a period, from its workers, and from managers. Raises MetricMissing."""
    _check(load.now, REQUESTS)
    _check(workers.now, BUSY)
    running, _ = _requests(load.now)
    elapsed_s = workers.now.at_s - workers.before.at_s
    mine = {"kind": "ssm", "name": name}
    shares = [min(1.0, busy_s / elapsed_s) for busy_s in workers.growth(f"{BUSY}_total", mine)]
    return Reading(
        at_s=min(load.now.at_s, workers.now.at_s),
        running=running,
        waiting=0,  # nothing is drafted for requests that wait
        live=workers.now.count(f"{BUSY}_total", mine),
        pressure=sum(shares) / len(shares) / aims.utilisation if shares else None,
        is_whole=load.is_whole and workers.is_whole,
    )


def _check(snapshot: Snapshot, *families: str) -> None:
    for family in families:
        if not snapshot.has(family):
            raise MetricMissing(f"no process exposes {family}")


def _requests(load: Snapshot) -> tuple[int, int]:
    return int(load.total(REQUESTS, {"state": "running"})), int(load.total(REQUESTS, {"state": "waiting"}))


def _latency(aims: Aims, load: Span) -> tuple[float | None, int]:
    """The worse of queue time and TTFT in shares of its aim, and of how many observations the more frequent one is."""
    found = [(load.buckets(QUEUE), aims.queue_s), (load.buckets(TTFT), aims.ttft_s)]
    values = [(quantile(aims.quantile, buckets), aim_s) for buckets, aim_s in found]
    shares = [value_s / aim_s for value_s, aim_s in values if value_s is not None]
    return max(shares, default=None), int(max(max(buckets.values(), default=0) for buckets, _ in found))
