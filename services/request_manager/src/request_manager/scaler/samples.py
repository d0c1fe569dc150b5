"""What counters and histograms of several processes did between two scrapes.

Knows Prometheus' text format. Must not know which metrics there are, nor where they come from.

Counters of a process that was not there at the first scrape, or has started anew since, tell nothing about the time in
between: such a process is left out of differences, so none is negative, and none is what was counted before.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Series = tuple[str, Labels]  # a sample's name and labels

_COUNTING = ("_total", "_bucket", "_count")


@dataclass(frozen=True, slots=True)
class Page:
    """What one process exposes. `families`: the names of its metrics, of those without a sample too.

    Values that are no finite numbers are left out, and so is a metric that has no others.
    """

    families: frozenset[str]
    values: Mapping[Series, float]

    @classmethod
    def parse(cls, text: str) -> "Page":
        """The page; raises ValueError if the text is not in the format."""
        families: set[str] = set()
        values: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            finite = [sample for sample in family.samples if math.isfinite(sample.value)]
            values.update(((sample.name, frozenset(sample.labels.items())), sample.value) for sample in finite)
            if finite or not family.samples:
                families.add(family.name)
        return cls(frozenset(families), values)

    def select(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[Series, float]]:
        """The samples of that name which carry these labels, and perhaps others."""
        wanted = labels.items()
        return ((series, value) for series, value in self.values.items() if series[0] == name and wanted <= series[1])

    def total(self, name: str, labels: Mapping[str, str]) -> float:
        """The sum of those samples."""
        return sum(value for _, value in self.select(name, labels))

    def continues(self, before: "Page") -> bool:
        """Whether this is the process of `before`, some time later: nothing that it counts became less."""
        counts = ((series, value) for series, value in before.values.items() if series[0].endswith(_COUNTING))
        return all(self.values.get(series, 0.0) >= value for series, value in counts)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pages of all processes at `at_s`, by address."""

    at_s: float
    pages: Mapping[str, Page]

    def has(self, family: str) -> bool:
        """Whether any process exposes the metric."""
        return any(family in page.families for page in self.pages.values())

    def total(self, name: str, labels: Mapping[str, str]) -> float:
        """The sum over all processes."""
        return sum(page.total(name, labels) for page in self.pages.values())

    def count(self, name: str, labels: Mapping[str, str]) -> int:
        """How many processes expose it."""
        return sum(any(True for _ in page.select(name, labels)) for page in self.pages.values())

    def highest(self, name: str, labels: Mapping[str, str]) -> float:
        """What the process that knows of most tells."""
        return max((page.total(name, labels) for page in self.pages.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """The time between two snapshots."""

    before: Snapshot
    now: Snapshot

    @property
    def is_whole(self) -> bool:
        """Whether every process of the first snapshot is still there, and has not started anew."""
        return len(self._lasting()) == len(self.before.pages)

    def growth(self, name: str, labels: Mapping[str, str]) -> list[float]:
        """By how much the counter grew in each process that exposes it and was there all the time."""
        lasting = [(old, new) for old, new in self._lasting() if any(True for _ in new.select(name, labels))]
        return [new.total(name, labels) - old.total(name, labels) for old, new in lasting]

    def buckets(self, histogram: str) -> dict[float, float]:
        """Observations of the time between, by upper bound (inclusive), cumulative, over all labels and processes."""
        counts: dict[float, float] = {}
        for old, new in self._lasting():
            for series, value in new.select(f"{histogram}_bucket", {}):
                bound = float(dict(series[1])["le"])
                counts[bound] = counts.get(bound, 0.0) + value - old.values.get(series, 0.0)
        return counts

    def _lasting(self) -> list[tuple[Page, Page]]:
        pairs = [(old, self.now.pages.get(address)) for address, old in self.before.pages.items()]
        return [(old, new) for old, new in pairs if new is not None and new.continues(old)]


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The value below which `share` of the observations are, by linear interpolation in its bucket, as Prometheus does.

    None without an observation. Beyond the last finite bound: that bound.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    rank, low, below = share * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (buckets[bound] - below)
        low, below = (low if math.isinf(bound) else bound), buckets[bound]
    return low
