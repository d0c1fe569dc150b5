"""The policy against a recorded load: arrivals, queue, batches, replicas that take minutes to start, all simulated.

What the policy sees are pages in Prometheus' format, read as in a cluster. Time is simulated; nothing waits.
"""

import csv
import random
import runpy
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram

from request_manager.scaler.policy import Decision, Limits, Memory, Reading, acted, decide, remember
from request_manager.scaler.samples import Page, Snapshot, Span
from request_manager.scaler.signals import BUSY, QUEUE, REQUESTS, TTFT, WORKERS, Aims, ssm_reading, verifier_reading
from treecore.service.operations import metrics_page

RECORDED = Path(__file__).parent / "recorded" / "scaler_load.csv"
BIN_S = 5
TICK_S = 1.0
PERIOD_S = 15.0
CAPACITY = 16  # requests that a verifier group runs at once
SSM_REQUESTS = 24  # requests that keep an SSM worker busy all the time
VERIFIER = Limits(min_replicas=1, max_replicas=5, requests_per_replica=CAPACITY)
SSM = Limits(min_replicas=1, max_replicas=6, requests_per_replica=SSM_REQUESTS, step_up=2)
BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class Request:
    """A request: when it came, and the tokens that it still wants."""

    arrived_s: float
    tokens_left: float


@dataclass(slots=True)
class Replica:
    """A verifier group or an SSM worker; it works once it has loaded its weights."""

    ready_at_s: float
    running: list[Request] = field(default_factory=list)
    busy_s: float = 0.0


class Process:
    """A gateway and manager: what it tells. It may start anew."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Gauge(REQUESTS, "", ["state"], registry=self.registry)
        self.workers = Gauge(WORKERS, "", ["kind", "name"], registry=self.registry)
        self.queue = Histogram(QUEUE, "", buckets=BOUNDS_S, registry=self.registry)
        self.ttft = Histogram(TTFT, "", buckets=BOUNDS_S, registry=self.registry)

    def page(self, running: int, waiting: int, live: int) -> Page:
        """Its metrics."""
        self.requests.labels("running").set(running)
        self.requests.labels("waiting").set(waiting)
        self.workers.labels("verifier", "llm").set(live)
        return Page.parse(metrics_page(self.registry).decode())


class System:
    """Espalier under load, a second at a time: one queue, batches of CAPACITY, longer steps in larger ones."""

    def __init__(self, seed: int, verifier_start_s: float, ssm_start_s: float) -> None:
        self.chance = random.Random(seed)
        self.start_s = {"verifier": verifier_start_s, "ssm": ssm_start_s}
        self.now_s = 0.0
        self.replicas = {"verifier": [Replica(0.0)], "ssm": [Replica(0.0)]}
        self.processes = [Process(), Process()]
        self.waiting: deque[Request] = deque()
        self.ttfts_s: list[float] = []

    def tick(self, num_arrivals: int) -> None:
        """Let a second pass."""
        self.now_s += TICK_S
        for _ in range(num_arrivals):
            self.waiting.append(Request(self.now_s, self.chance.lognormvariate(4.8, 0.7)))
        self._admit()
        for replica in self.live("verifier"):
            tokens = TICK_S / (0.02 * (1 + len(replica.running) / CAPACITY))
            for request in replica.running:
                request.tokens_left -= tokens
            replica.running = [request for request in replica.running if request.tokens_left > 0]
        workers = self.live("ssm")
        for worker in workers:
            worker.busy_s += TICK_S * min(1.0, self.running / len(workers) / SSM_REQUESTS)

    def _admit(self) -> None:
        groups = self.live("verifier")
        while self.waiting and groups:
            group = min(groups, key=lambda group: len(group.running))
            if len(group.running) >= CAPACITY:
                return
            request = self.waiting.popleft()
            group.running.append(request)
            waited_s = self.now_s - request.arrived_s
            process = self.chance.choice(self.processes)
            process.queue.observe(waited_s)
            process.ttft.observe(waited_s + 0.3)
            self.ttfts_s.append(waited_s + 0.3)

    def live(self, kind: str) -> list[Replica]:
        """Those that have started."""
        return [replica for replica in self.replicas[kind] if replica.ready_at_s <= self.now_s]

    @property
    def running(self) -> int:
        """Requests in batches."""
        return sum(len(group.running) for group in self.replicas["verifier"])

    def scale(self, kind: str, num: int) -> None:
        """What Kubernetes does: add some that start, or stop the last ones. Their requests go to the others."""
        replicas = self.replicas[kind]
        stopped, self.replicas[kind] = replicas[num:], replicas[:num]
        missing = num - len(self.replicas[kind])
        self.replicas[kind] += [Replica(self.now_s + self.start_s[kind]) for _ in range(missing)]
        if kind == "verifier":
            moved = sum(len(group.running) for group in stopped)
            free = sum(CAPACITY - len(group.running) for group in self.live(kind))
            assert moved <= free, "a group was removed whose requests do not fit into the others"
        for group in stopped:
            self.waiting.extendleft(group.running)

    def load(self) -> Snapshot:
        """What the managers tell: each of its half of the requests."""
        halves = [(n // 2 + n % 2 * (1 - i)) for n in (self.running, len(self.waiting)) for i in (0, 1)]
        live = len(self.live("verifier"))
        pages = {f"m{i}": p.page(halves[i], halves[2 + i], live) for i, p in enumerate(self.processes)}
        return Snapshot(self.now_s, pages)

    def workers(self) -> Snapshot:
        """What the SSM workers that are ready tell."""
        line = f'# TYPE {BUSY}_total counter\n{BUSY}_total{{kind="ssm",name="default"}}'
        return Snapshot(
            self.now_s,
            {f"s{id(worker)}": Page.parse(f"{line} {worker.busy_s}\n") for worker in self.live("ssm")},
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed something."""

    at_s: float
    decision: Decision


class Scaled:
    """A system, and the policy that steers it. `faulty`: looks fail, are repeated, or miss a process."""

    def __init__(self, system: System, limits: dict[str, Limits], faulty: bool = False) -> None:
        self.system, self.limits = system, limits
        self.faulty = faulty
        self.chance = random.Random(7)
        self.memories = dict.fromkeys(limits, Memory())
        self.last: dict[str, Snapshot] = {}
        self.spans: dict[str, Span] = {}
        self.changes: dict[str, list[Change]] = {kind: [] for kind in limits}
        self.acted_at_s = dict.fromkeys(limits, 0.0)
        self.overloaded_since_s = 0.0
        self.num_replica_s = 0.0
        self.slowest_reaction_s = 0.0

    def run(self, arrivals: list[int]) -> None:
        """Serve them all, a turn every PERIOD_S."""
        for second, num in enumerate(arrivals):
            self.system.tick(num)
            self._note_overload()
            self.num_replica_s += len(self.system.replicas["verifier"]) * TICK_S
            if second % PERIOD_S == 0:
                self.turn()

    def turn(self) -> None:
        """Look and act."""
        spans = {kind: self._span(kind, look()) for kind, look in (("m", self.system.load), ("s", self.system.workers))}
        aims, m, s = Aims(), spans["m"], spans["s"]
        self._steer("verifier", m and verifier_reading(aims, m))
        self._steer("ssm", m and s and ssm_reading(aims, "default", m, s))

    def _span(self, kind: str, now: Snapshot) -> Span | None:
        before = self.last.get(kind)
        if self.faulty:
            fate = self.chance.random()
            if fate < 0.15:
                return None
            if fate < 0.25:
                return self.spans.get(kind)  # what was seen before, once more
            if fate < 0.3 and kind == "m":
                self.system.processes[0] = Process()  # a manager that has started anew
        self.last[kind] = now
        if before is not None:
            self.spans[kind] = Span(before, now)
        return self.spans.get(kind)

    def _steer(self, kind: str, reading: Reading | None) -> None:
        limits, current = self.limits[kind], len(self.system.replicas[kind])
        memory = remember(limits, self.memories[kind], current, reading)
        decision = decide(limits, memory, self.system.now_s)
        if decision.is_change:
            assert reading is not None
            assert reading.at_s > self.acted_at_s[kind], "acted twice on one reading"
            assert self.system.now_s - reading.at_s <= limits.stale_after_s
            self.acted_at_s[kind] = reading.at_s
            assert limits.min_replicas <= decision.replicas <= limits.max_replicas
            self.changes[kind].append(Change(self.system.now_s, decision))
            self.system.scale(kind, decision.replicas)
            if kind == "verifier":
                self._note_reaction()
        self.memories[kind] = acted(memory, decision, self.system.now_s)

    def _note_overload(self) -> None:
        """Since when there are more requests than the replicas that were asked for may have, with the band."""
        replicas, limits = len(self.system.replicas["verifier"]), self.limits["verifier"]
        present = self.system.running + len(self.system.waiting)
        if replicas == limits.max_replicas or present <= replicas * CAPACITY * (1 + limits.band):
            self._note_reaction()

    def _note_reaction(self) -> None:
        self.slowest_reaction_s = max(self.slowest_reaction_s, self.system.now_s - self.overloaded_since_s)
        self.overloaded_since_s = self.system.now_s


def recorded() -> list[int]:
    """Arrivals of each second: those of a bin, spread over it."""
    with RECORDED.open() as file:
        bins = [int(row["requests"]) for row in csv.DictReader(file)]
    return [requests // BIN_S + (i < requests % BIN_S) for requests in bins for i in range(BIN_S)]


def turns_around(changes: list[Change]) -> int:
    """How often the direction changed."""
    ups = [change.decision.replicas > change.decision.current for change in changes]
    return sum(a != b for a, b in pairwise(ups))


def steered(limits: dict[str, Limits], start_s: float = 180.0, seed: int = 1, faulty: bool = False) -> Scaled:
    """The recorded load, served with such limits."""
    scaled = Scaled(System(seed, start_s, 30.0), limits, faulty)
    scaled.run(recorded())
    return scaled


LIMITS = {"verifier": VERIFIER, "ssm": SSM}
NERVOUS = {kind: replace(limits, band=0.0, cooldown_up_s=0.0, cooldown_down_s=0.0) for kind, limits in LIMITS.items()}
FIXED = {kind: replace(limits, max_replicas=1) for kind, limits in LIMITS.items()}


def test_the_recorded_load_is_what_its_command_writes() -> None:
    """And it is bursty: the variance of arrivals is several times what a Poisson process has."""
    module = runpy.run_path(str(RECORDED.with_suffix(".py")))
    assert module["text"]() == RECORDED.read_text()
    arrivals = module["load"]()
    hour = arrivals[: len(arrivals) // 5]  # before the first crowd
    mean = sum(hour) / len(hour)
    assert sum((n - mean) ** 2 for n in hour) / len(hour) > 3 * mean


@pytest.mark.parametrize("start_s", [60.0, 180.0, 600.0])
def test_replicas_follow_the_recorded_load_without_flapping(start_s: float) -> None:
    """Three crowds and a wave: up within two periods of each overload, down late, few changes of direction."""
    scaled = steered(LIMITS, start_s)
    assert scaled.slowest_reaction_s <= 2 * PERIOD_S
    for kind, changes in scaled.changes.items():
        assert 2 <= turns_around(changes) <= 8
        for before, change in pairwise(changes):
            if change.decision.replicas < change.decision.current:
                assert change.at_s - before.at_s >= LIMITS[kind].cooldown_down_s
    assert {change.decision.replicas for change in scaled.changes["verifier"]} >= {2, 3, 4, 5}


def test_scaling_is_worth_it() -> None:
    """Waits are a fraction of one group's, with less than five; without band and cooldowns the same load flaps."""
    scaled, fixed, nervous = (steered(limits) for limits in (LIMITS, FIXED, NERVOUS))
    assert percentile(scaled.system.ttfts_s, 0.9) < percentile(fixed.system.ttfts_s, 0.9) / 10
    assert scaled.num_replica_s < 4 * len(recorded())
    assert turns_around(nervous.changes["verifier"]) > 3 * turns_around(scaled.changes["verifier"])


def test_lost_and_stale_metrics_are_safe() -> None:
    """Three looks of ten fail, are old, or miss a process: no change without a new reading, no request cut off."""
    scaled = steered(LIMITS, seed=4, faulty=True)
    assert max(change.decision.replicas for change in scaled.changes["verifier"]) == VERIFIER.max_replicas
    assert all(turns_around(changes) <= 8 for changes in scaled.changes.values())


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[int(share * len(values))]
