"""What pages of metrics say: sums, quantiles and rates over processes that come, go and start anew."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from request_manager.scaler.samples import Page, Snapshot, Span, quantile
from request_manager.scaler.signals import (
    BUSY,
    QUEUE,
    REQUESTS,
    TTFT,
    WORKERS,
    Aims,
    MetricMissing,
    ssm_reading,
    verifier_reading,
)
from treecore.service.operations import metrics_page

AIMS = Aims(queue_s=0.5, ttft_s=2.0, quantile=0.9, utilisation=0.5)
BOUNDS_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Process:
    """A gateway with its manager, and an SSM worker, in one."""

    def __init__(self, without: str = "") -> None:
        self.registry = CollectorRegistry()
        self._without = without
        self.requests = self._add(REQUESTS, lambda r: Gauge(REQUESTS, "", ["state"], registry=r))
        self.workers = self._add(WORKERS, lambda r: Gauge(WORKERS, "", ["kind", "name"], registry=r))
        self.queue = self._add(QUEUE, lambda r: Histogram(QUEUE, "", buckets=BOUNDS_S, registry=r))
        self.ttft = self._add(TTFT, lambda r: Histogram(TTFT, "", ["model"], buckets=BOUNDS_S, registry=r))
        self.busy = self._add(BUSY, lambda r: Counter(BUSY, "", ["kind", "name"], registry=r))

    def _add(self, name: str, make: Callable[[CollectorRegistry], object]) -> object:
        return make(CollectorRegistry() if name == self._without else self.registry)

    def load(self, running: int, waiting: int, live: int = 1) -> "Process":
        """Tell so many."""
        self.requests.labels("running").set(running)
        self.requests.labels("waiting").set(waiting)
        self.workers.labels("verifier", "llm").set(live)
        self.workers.labels("ssm", "default").set(9)
        return self

    def serve(self, num: int, queue_s: float, ttft_s: float) -> None:
        """So many requests have begun."""
        for _ in range(num):
            self.queue.observe(queue_s)
            self.ttft.labels("m").observe(ttft_s)

    def work(self, busy_s: float, name: str = "default") -> None:
        """Compute drafts."""
        self.busy.labels("ssm", name).inc(busy_s)

    def page(self) -> Page:
        """Its metrics now."""
        return Page.parse(metrics_page(self.registry).decode())


def look(at_s: float, **processes: Process) -> Snapshot:
    """What all of them tell at `at_s`."""
    return Snapshot(at_s, {name: process.page() for name, process in processes.items()})


def test_the_load_is_the_sum_over_processes() -> None:
    """Requests add up; live groups do not: each manager hears of the same ones."""
    a, b = Process().load(3, 1, live=2), Process().load(4, 0, live=1)
    before = look(0, a=a, b=b)
    a.serve(9, 0.1, 0.4)
    b.serve(1, 3.0, 3.4)
    reading = verifier_reading(replace(AIMS, quantile=0.95), Span(before, look(15, a=a, b=b)))
    assert (reading.at_s, reading.running, reading.waiting, reading.live) == (15, 7, 1, 2)
    assert reading.pressure == pytest.approx((2.0 + 2.0 / 2) / 0.5)  # the tenth request's bucket, halfway
    assert reading.is_significant
    assert reading.is_whole


def test_only_the_last_period_counts() -> None:
    """A bad morning is no reason to scale at noon."""
    a = Process().load(2, 0)
    a.serve(100, 7.0, 7.0)
    before = look(0, a=a)
    a.serve(10, 0.1, 0.1)
    reading = verifier_reading(AIMS, Span(before, look(15, a=a)))
    assert reading.pressure is not None
    assert reading.pressure < 0.5


def test_the_worse_of_queue_time_and_ttft_counts() -> None:
    """Both in shares of their aims."""
    a = Process().load(2, 0)
    before = look(0, a=a)
    a.serve(10, 0.1, 7.9)
    pressure = verifier_reading(AIMS, Span(before, look(15, a=a))).pressure
    assert pressure == pytest.approx((4.0 + 4.0 * 0.9) / 2.0)


def test_a_quantile_of_few_is_not_significant() -> None:
    """Four requests are, at most, four long prompts."""
    a = Process().load(2, 0)
    before = look(0, a=a)
    a.serve(4, 0.1, 7.9)
    assert not verifier_reading(AIMS, Span(before, look(15, a=a))).is_significant


@pytest.mark.parametrize(("waiting", "pressure"), [(0, 0.0), (3, None)])
def test_nobody_began(waiting: int, pressure: float | None) -> None:
    """Without anybody who waits that is rest; else it is a standstill, which nothing can be measured of."""
    a = Process().load(2, waiting)
    assert verifier_reading(AIMS, Span(look(0, a=a), look(15, a=a))).pressure == pressure


def test_a_process_that_starts_anew_or_vanishes_is_not_counted_backwards() -> None:
    """Its numbers before are not the period's, nor is their difference; and the evidence is not whole."""
    a, b = Process().load(1, 0), Process().load(1, 0)
    a.serve(50, 7.0, 7.0)
    before = look(0, a=a, b=b)
    b.serve(10, 0.1, 0.1)
    anew = Process().load(0, 0)
    anew.serve(20, 7.0, 7.0)
    for now in (look(15, a=anew, b=b), look(15, b=b)):
        reading = verifier_reading(AIMS, Span(before, now))
        assert not reading.is_whole
        assert reading.pressure is not None
        assert reading.pressure < 0.5
    assert verifier_reading(AIMS, Span(look(0, b=b), look(15, a=a, b=b))).is_whole


@pytest.mark.parametrize("missing", [REQUESTS, QUEUE, TTFT, WORKERS])
def test_a_metric_that_nobody_exposes_is_an_error(missing: str) -> None:
    """Not a zero: it was renamed, or another port is scraped."""
    a = Process(without=missing).load(0, 0)
    with pytest.raises(MetricMissing, match=f"{missing}$"):
        verifier_reading(AIMS, Span(look(0, a=a), look(15, a=a)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("metric", [REQUESTS, WORKERS])
def test_what_is_no_number_is_missing(metric: str, value: float) -> None:
    """An error of this target, not the end of the scaler."""
    a = Process().load(2, 0)
    gauge, series = {
        REQUESTS: (a.requests, [("running",), ("waiting",)]),
        WORKERS: (a.workers, [("verifier", "llm"), ("ssm", "default")]),
    }[metric]
    for labels in series:
        gauge.labels(*labels).set(value)
    with pytest.raises(MetricMissing, match=f"{metric}$"):
        verifier_reading(AIMS, Span(look(0, a=a), look(15, a=a)))


def test_metrics_may_be_spread_over_gateways_and_managers() -> None:
    """It is enough that somebody exposes each; a histogram that appears within the period began at zero."""
    gateway, manager = Process(without=QUEUE), Process(without=TTFT).load(2, 0)
    before = look(0, g=gateway, m=manager)
    gateway.serve(10, 0.0, 7.9)
    assert verifier_reading(AIMS, Span(before, look(15, g=gateway, m=manager))).pressure == pytest.approx(3.8)


def test_utilisation_is_the_mean_of_the_workers_that_were_there() -> None:
    """A worker that has just come is live, but has no rate yet; others' SSMs do not count."""
    load, one, two, new = Process().load(5, 2), Process(), Process(), Process()
    one.work(100.0)
    two.work(0.0)
    loads, before = look(0, l=load), look(0, one=one, two=two)
    one.work(15.0)
    one.work(15.0, "other")
    two.work(3.0)
    new.work(1000.0)
    reading = ssm_reading(
        AIMS, "default", Span(loads, look(15, l=load)), Span(before, look(15, one=one, two=two, n=new))
    )
    assert reading.pressure == pytest.approx((1.0 + 0.2) / 2 / 0.5)
    assert (reading.running, reading.waiting, reading.live) == (5, 0, 3)
    assert reading.is_whole


def test_an_ssm_s_evidence_is_as_whole_and_as_old_as_its_worse_half() -> None:
    """Managers tell what runs, workers how busy they are."""
    m, w = Process().load(5, 0), Process()
    w.work(1.0)
    loads, works = Span(look(1, m=m), look(14, m=m)), Span(look(0, w=w), look(15, w=w))
    reading = ssm_reading(AIMS, "default", loads, works)
    assert (reading.at_s, reading.is_whole) == (14, True)
    assert ssm_reading(AIMS, "default", replace(loads, now=look(16, m=m)), works).at_s == 15
    gone = look(0, m=m, n=m)
    assert not ssm_reading(AIMS, "default", replace(loads, before=gone), works).is_whole
    assert not ssm_reading(AIMS, "default", loads, replace(works, before=gone)).is_whole


def test_a_rate_is_never_negative_nor_above_all_of_the_time() -> None:
    """A worker that started anew; an address that another worker has got, which has worked for longer."""
    load, before, after = Process().load(5, 0), Process(), Process()
    loads = Span(look(0, l=load), look(15, l=load))
    before.work(100.0)
    after.work(3.0)
    reading = ssm_reading(AIMS, "default", loads, Span(look(0, w=before), look(15, w=after)))
    assert (reading.pressure, reading.is_whole) == (None, False)
    after.work(1e6)
    reading = ssm_reading(AIMS, "default", loads, Span(look(0, w=before), look(15, w=after)))
    assert reading.pressure == 1.0 / AIMS.utilisation


def test_without_busy_time_an_ssm_is_not_steered() -> None:
    """Its workers expose something else."""
    a = Process(without=BUSY).load(0, 0)
    with pytest.raises(MetricMissing, match=BUSY):
        ssm_reading(AIMS, "default", Span(look(0, a=a), look(15, a=a)), Span(look(0, a=a), look(15, a=a)))


@pytest.mark.parametrize("text", ["<html>no</html>", "espalier_requests{state= 3\n", "espalier_requests x\n"])
def test_what_is_no_page_is_refused(text: str) -> None:
    """By a ValueError, which the scraper tells."""
    with pytest.raises(ValueError, match=r".*"):
        Page.parse(text)


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=50), st.sampled_from([0.125, 0.5, 0.75, 0.9375]))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    """The oracle sorts all values."""
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in (*BOUNDS_S, float("inf"))}
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = quantile(share, buckets)
    assert found is not None
    bounds = [0.0, *BOUNDS_S]
    low = max([bound for bound in bounds if bound < exact], default=0.0)
    high = min([bound for bound in bounds if bound >= exact], default=BOUNDS_S[-1])
    assert low <= found <= high


def test_a_quantile_of_nothing_is_none() -> None:
    """No buckets, or empty ones."""
    assert quantile(0.9, {}) is None
    assert quantile(0.9, {1.0: 0.0, float("inf"): 0.0}) is None
