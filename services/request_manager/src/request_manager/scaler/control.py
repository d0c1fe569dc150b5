"""A turn of the scaler: look, decide, act. The only place where measurements, policy and Kubernetes meet.

Knows targets as things with a number of replicas. Must not know metrics' names or the API's objects. Whatever fails in
a turn is told in one line and tried again in the next turn; other targets are served all the same.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from request_manager.scaler.kubernetes import Scalable
from request_manager.scaler.metrics import ScalerMetrics
from request_manager.scaler.policy import Decision, Limits, Memory, Reading, acted, decide, remember
from request_manager.scaler.samples import Snapshot, Span
from request_manager.scaler.scrape import Scraper
from treecore.errors import Unavailable
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

Endpoints = tuple[str, ...]
Spans = Mapping[Endpoints, Span]


@dataclass(frozen=True, slots=True)
class Target:
    """What is steered. `read` makes a Reading of the spans of `sources`; it raises MetricMissing."""

    name: str
    limits: Limits
    scalable: Scalable
    sources: Sequence[Endpoints]
    read: Callable[[Spans], Reading]


class SourceWatch:
    """The last two snapshots of each source. A gap of more than `max_span_s` is no span."""

    def __init__(
        self, scraper: Scraper, sources: Sequence[Endpoints], max_span_s: float, metrics: ScalerMetrics
    ) -> None:
        self._scraper = scraper
        self._metrics = metrics
        self._sources = sources
        self._max_span_s = max_span_s
        self._last: dict[Endpoints, Snapshot] = {}

    async def look(self) -> Spans:
        """The sources that could be scraped now, and not long ago before."""
        spans = await asyncio.gather(*[self._look_at(source) for source in self._sources])
        return {source: span for source, span in zip(self._sources, spans, strict=True) if span is not None}

    async def _look_at(self, source: Endpoints) -> Span | None:
        try:
            now = await self._scraper.scrape(source)
        except Unavailable as error:
            log_event(logger, logging.WARNING, "scrape failed", error=error)
            self._metrics.on_scrape_failed()
            return None
        before, self._last[source] = self._last.get(source), now
        if before is None or now.at_s - before.at_s > self._max_span_s:
            return None
        return Span(before, now)


@dataclass(frozen=True, slots=True)
class Mode:
    """When to act, and whether to act or only to tell. `clock` is the one of the readings."""

    is_leader: Callable[[], bool]
    clock: Callable[[], float]
    dry_run: bool


class Controller:
    """Steers the targets."""

    def __init__(self, targets: Sequence[Target], watch: SourceWatch, mode: Mode, metrics: ScalerMetrics) -> None:
        self._targets = targets
        self._watch = watch
        self._mode = mode
        self._metrics = metrics
        self._memories: dict[str, Memory] = {}

    async def run(self, period_s: float) -> None:
        """Take a turn every `period_s`, for ever."""
        while True:
            begun_s = self._mode.clock()
            await self.turn()
            await asyncio.sleep(max(0.0, begun_s + period_s - self._mode.clock()))

    async def turn(self) -> None:
        """Look, and act on each target, or only wait to lead: what was seen before is then soon too old to count."""
        leads = self._mode.is_leader()
        self._metrics.on_turn(leads)
        if not leads:
            return
        spans = await self._watch.look()
        for target in self._targets:
            try:
                await self._steer(target, spans)
            except Unavailable as error:
                log_event(logger, logging.WARNING, "target not steered", target=target.name, error=error)
                self._metrics.on_target_failed()

    async def _steer(self, target: Target, spans: Spans) -> None:
        has_spans = all(source in spans for source in target.sources)
        reading = target.read(spans) if has_spans else None
        replicas = await target.scalable.replicas()
        memory = remember(target.limits, self._memories.get(target.name, Memory()), replicas, reading)
        self._memories[target.name] = memory
        decision = decide(target.limits, memory, self._mode.clock())
        if decision.is_change and not self._mode.dry_run:
            await target.scalable.scale(decision.current, decision.replicas)
            self._memories[target.name] = acted(memory, decision, self._mode.clock())
        self._tell(target, decision, reading)

    def _tell(self, target: Target, decision: Decision, reading: Reading | None) -> None:
        if not self._mode.dry_run:
            self._metrics.on_decision(target.name, decision)
        if not decision.is_change:
            return
        event = "would scale" if self._mode.dry_run else "scaled"
        seen = {name: getattr(reading, name) for name in ("running", "waiting", "live", "pressure")}
        change = {"old": decision.current, "new": decision.replicas, "reason": decision.reason}
        log_event(logger, logging.INFO, event, target=target.name, **change, **seen)
