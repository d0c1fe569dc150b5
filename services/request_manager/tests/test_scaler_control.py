"""Turns of the scaler: real HTTP to metrics and to a Kubernetes API, a clock by hand, and everything failing once."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

import pytest
from prometheus_client import CollectorRegistry

from request_manager.scaler.control import Controller
from request_manager.scaler.kubernetes import Apps, connect
from request_manager.scaler.scrape import ScrapeFailed, Scraper
from request_manager.scaler.service import build_controller
from request_manager.scaler.settings import ScalerSettings, SsmTarget, VerifierTarget
from request_manager.scaler.signals import BUSY, QUEUE, REQUESTS, TTFT, WORKERS
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, Fault, Misbehaviour, fake_kubernetes, role

PERIOD_S = 15.0


@dataclass(slots=True)
class Process:
    """Something with metrics. `how`: None, or how it misbehaves."""

    running: int = 1
    waiting: int = 0
    busy_s: float = 0.0
    without: str = ""
    how: Misbehaviour | None = None
    num_scrapes: int = 0
    endpoint: str = ""

    def page(self) -> str:
        """Its metrics."""
        samples = {
            REQUESTS: ("gauge", [f'{{state="running"}} {self.running}', f'{{state="waiting"}} {self.waiting}']),
            WORKERS: ("gauge", ['{kind="verifier",name="llm"} 1']),
            QUEUE: ("histogram", ['_bucket{le="+Inf"} 0', "_count 0", "_sum 0"]),
            TTFT: ("histogram", ['_bucket{le="+Inf"} 0', "_count 0", "_sum 0"]),
            f"{BUSY}_total": ("counter", [f'{{kind="ssm",name="default"}} {self.busy_s}']),
        }
        return "".join(
            f"# TYPE {name} {kind}\n" + "".join(f"{name}{sample}\n" for sample in lines)
            for name, (kind, lines) in samples.items()
            if name != self.without
        )


@contextmanager
def served(process: Process) -> Iterator[Process]:
    """The process's metrics at its endpoint."""
    closing = Event()

    class Exchange(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            process.num_scrapes += 1
            if process.how == "hang":
                closing.wait()
            if process.how in ("hang", "hang up"):
                return
            text = process.page() if process.how is None else "<html>"
            self.send_response(process.how if isinstance(process.how, int) else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            """Nothing to tell."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
    server.daemon_threads, server.block_on_close = True, False
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    process.endpoint = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield process
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


class Cluster:
    """A cluster with two managers and an SSM worker, and the scaler in it, turned by hand."""

    def __init__(self, kubernetes: FakeKubernetes, managers: list[Process], worker: Process) -> None:
        self.kubernetes = kubernetes
        self.managers, self.worker = managers, worker
        self.now_s = 1000.0
        self.leads = True
        self.registry = CollectorRegistry()
        self.controller: Controller

    async def turn(self, num: int = 1) -> None:
        """So many turns, a period apart, in which the SSM worker is busy for half of the time."""
        for _ in range(num):
            self.now_s += PERIOD_S
            self.worker.busy_s += PERIOD_S / 2
            await self.controller.turn()

    def crowd(self) -> None:
        """More requests than fit."""
        for manager in self.managers:
            manager.running, manager.waiting = 8, 30

    @property
    def groups(self) -> int:
        """Verifier groups, of two pods each."""
        return self.kubernetes.replicas("statefulsets", "verifier") // 2

    @property
    def ssms(self) -> int:
        """Replicas of the SSM."""
        return self.kubernetes.replicas("deployments", "ssm")


@pytest.fixture
def parts() -> Iterator[tuple[FakeKubernetes, list[Process], Process]]:
    """What the scaler talks to."""
    with ExitStack() as stack:
        kubernetes = stack.enter_context(fake_kubernetes(role(["ssm"], ["verifier"], "lease")))
        kubernetes.add("deployments", "ssm", 1)
        kubernetes.add("statefulsets", "verifier", 2)
        managers = [stack.enter_context(served(Process())) for _ in range(2)]
        yield kubernetes, managers, stack.enter_context(served(Process()))


@pytest.fixture
def dry_run(request: pytest.FixtureRequest) -> bool:
    """Whether decisions are only told."""
    return bool(getattr(request, "param", False))


@pytest.fixture
async def cluster(
    parts: tuple[FakeKubernetes, list[Process], Process], dry_run: bool, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Cluster]:
    """The cluster and its scaler."""
    caplog.set_level(logging.INFO, logger="request_manager")
    cluster = Cluster(*parts)
    worker = cluster.worker.endpoint
    settings = ScalerSettings(
        namespace=NAMESPACE,
        load_endpoints=tuple(manager.endpoint for manager in cluster.managers),
        verifier=VerifierTarget(stateful_set="verifier", pods_per_group=2, max_replicas=3),
        ssms=(SsmTarget(name="default", deployment="ssm", endpoint=worker, max_replicas=4, requests_per_replica=8),),
        dry_run=dry_run,
    )

    def now_s() -> float:
        return cluster.now_s

    async with connect(cluster.kubernetes.url) as client, Scraper(now_s, timeout_s=20.0) as scraper:
        apps = Apps(client, NAMESPACE, lambda: cluster.leads, 20.0)
        cluster.controller = build_controller(settings, apps, scraper, now_s, cluster.registry)
        yield cluster


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The events since the last time."""
    events = [record.message for record in caplog.records]
    caplog.clear()
    return events


async def test_a_crowd_gets_replicas(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """The sum of both managers' requests, seen twice; all ranks of a group; one line a change, with its reason."""
    await cluster.turn(2)
    assert (cluster.groups, cluster.ssms, told(caplog)) == (1, 1, [])
    cluster.crowd()
    await cluster.turn()
    assert cluster.groups == 1
    await cluster.turn()
    assert (cluster.groups, cluster.ssms) == (2, 2)
    assert sorted(cluster.kubernetes.writes) == [("ssm", 2), ("verifier", 4)]
    fields = [vars(record)["fields"] for record in caplog.records]
    assert told(caplog) == ["scaled", "scaled"]
    decided = {"target": "verifier", "old": 1, "new": 2, "reason": "requests"}
    metric = cluster.registry.get_sample_value
    assert metric("espalier_scaler_leader") == 1
    assert metric("espalier_scaler_replicas", {"target": "verifier"}) == 2
    assert metric("espalier_scaler_changes_total", {"target": "verifier", "reason": "requests"}) == 1
    assert fields[0] == decided | {"running": 16, "waiting": 60, "live": 1, "pressure": None}


@pytest.mark.parametrize("how", [404, 500, "hang up", "html"])
async def test_a_process_that_does_not_answer_stops_scaling_by_it(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, how: Misbehaviour
) -> None:
    """The other manager's numbers are not the load. One line a turn; then it goes on."""
    await cluster.turn(2)
    cluster.crowd()
    cluster.managers[1].how = how
    await cluster.turn(5)
    assert (cluster.groups, cluster.ssms, told(caplog)) == (1, 1, ["scrape failed"] * 5)
    assert cluster.registry.get_sample_value("espalier_scaler_failures_total", {"part": "scrape"}) == 5
    cluster.managers[1].how = None
    await cluster.turn(4)
    assert cluster.groups > 1


async def test_a_process_that_never_answers_is_no_rest(cluster: Cluster) -> None:
    """Nor are its silent neighbours."""
    cluster.kubernetes.add("statefulsets", "verifier", 4)
    cluster.managers[1].how = 500
    await cluster.turn(60)
    assert cluster.groups == 2


async def test_an_ssm_that_cannot_be_measured_does_not_stop_the_others(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Verifiers are steered by what managers tell."""
    await cluster.turn(2)
    cluster.crowd()
    cluster.worker.without = f"{BUSY}_total"
    await cluster.turn(2)
    assert (cluster.groups, cluster.ssms) == (2, 1)
    assert told(caplog) == ["target not steered", "scaled", "target not steered"]


@pytest.mark.parametrize("missing", [REQUESTS, QUEUE, TTFT, WORKERS])
async def test_a_missing_metric_scales_nothing(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """Not down either, however long it lasts."""
    cluster.kubernetes.add("statefulsets", "verifier", 4)
    for manager in cluster.managers:
        manager.without = missing
    await cluster.turn(60)
    assert cluster.groups == 2
    assert "target not steered" in told(caplog)


@pytest.mark.parametrize("how", [403, 404, 409, 500, "hang up", "html", "nonsense"])
@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_an_api_that_fails_is_told_and_tried_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, method: str, how: Misbehaviour
) -> None:
    """One line; the other target is served; in the next turn it works."""
    await cluster.turn(2)
    cluster.crowd()
    await cluster.turn()
    cluster.kubernetes.faults += [Fault(method, "verifier", how)] * 2
    await cluster.turn()
    cluster.kubernetes.faults.clear()
    assert (cluster.groups, cluster.ssms) == (1, 2)
    assert told(caplog) == ["target not steered", "scaled"]
    await cluster.turn()
    assert cluster.groups == 2


async def test_who_does_not_lead_does_nothing(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """No scrape, no call; and its metrics say nothing that the leader's would contradict."""
    await cluster.turn(2)
    cluster.kubernetes.calls.clear()
    cluster.managers[0].num_scrapes = 0
    cluster.leads = False
    cluster.crowd()
    await cluster.turn(5)
    assert (cluster.kubernetes.calls, cluster.managers[0].num_scrapes, told(caplog)) == ([], 0, [])
    assert cluster.registry.get_sample_value("espalier_scaler_leader") == 0
    assert cluster.registry.get_sample_value("espalier_scaler_replicas", {"target": "verifier"}) is None


async def test_the_lease_lost_in_the_middle_of_a_turn(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written any more."""
    await cluster.turn(2)
    cluster.crowd()
    await cluster.turn()
    answers = iter([True, False, False])
    monkeypatch.setattr(Cluster, "leads", property(lambda _: next(answers), lambda *_: None), raising=False)
    await cluster.turn()
    assert cluster.kubernetes.writes == []
    assert told(caplog) == ["target not steered", "target not steered"]


@pytest.mark.parametrize("dry_run", [True], indirect=True)
async def test_a_dry_run_only_tells(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Again in each turn, since nothing changes."""
    await cluster.turn(2)
    cluster.crowd()
    await cluster.turn(3)
    assert cluster.kubernetes.writes == []
    assert told(caplog).count("would scale") >= 3
    assert cluster.registry.get_sample_value("espalier_scaler_replicas", {"target": "verifier"}) is None


async def test_after_a_long_gap_the_first_look_is_no_period(cluster: Cluster) -> None:
    """What happened in an hour without metrics says little about now."""
    await cluster.turn(2)
    cluster.crowd()
    cluster.now_s += 3600
    await cluster.turn(2)
    assert cluster.groups == 1
    await cluster.turn()
    assert cluster.groups == 2


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "nowhere.invalid:80"])
async def test_nobody_at_an_endpoint(endpoint: str) -> None:
    """The error names it, in one line."""
    async with Scraper(lambda: 0.0, timeout_s=20.0) as scraper:
        with pytest.raises(ScrapeFailed, match=endpoint.partition(":")[0]) as caught:
            await scraper.scrape((endpoint,))
    assert "\n" not in str(caught.value)


async def test_a_process_that_hangs_costs_a_timeout() -> None:
    """Not more; and a name with several addresses is all of them."""
    with served(Process(how="hang")) as stuck:
        async with Scraper(lambda: 0.0, timeout_s=0.1) as scraper:
            with pytest.raises(ScrapeFailed, match="no answer in time"):
                await scraper.scrape((stuck.endpoint,))
