"""docs/metrics.md has every metric with its type and labels, and no other: whoever renames one changes the page."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from request_manager.gateway.metrics import GatewayMetrics
from request_manager.gateway.transcript import Transcript
from request_manager.manager.metrics import ManagerMetrics
from request_manager.manager.registry import Registry
from request_manager.manager.step_record import StepParts, StepRecord
from request_manager.relay.metrics import RelayMetrics
from request_manager.roster_metrics import RosterMetrics
from request_manager.scaler.metrics import ScalerMetrics
from request_manager.scaler.policy import Decision, Reason
from request_manager.scaler.samples import Page, Snapshot, Span
from request_manager.scaler.signals import WORKERS, Aims, ssm_reading, verifier_reading
from treecore.costs import ForwardCosts
from treecore.errors import Unavailable
from treecore.messages import BlockUsage, DraftReply, DraftRequest, RefusedItem, RequestId, WorkerId
from treecore.service.bus_metrics import BusMetrics
from treecore.service.operations import Operations, metrics_page
from treecore.service.worker_metrics import WorkerMetrics
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeSsm

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([a-z_:0-9]+)` \| (counter|gauge|histogram) \|([a-z_, ]*)\| ", re.MULTILINE)
BLOCKS = BlockUsage(1, 2, 3, 6, 16)

Metrics = dict[str, tuple[str, frozenset[str]]]


def documented() -> Metrics:
    """Type and labels by name, as the page has them."""
    rows = ROW.findall(PAGE.read_text())
    found = {name: (kind, frozenset(labels.replace(",", " ").split())) for name, kind, labels in rows}
    assert len(found) == len(rows), "a metric twice"
    return found


def exposed(registry: CollectorRegistry) -> Metrics:
    """Type and labels by name, as Prometheus gets them. What was never counted has no labels to show."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in registry.collect()
    }


def manage(registry: CollectorRegistry) -> None:
    """A manager to whom everything happened once."""
    metrics = ManagerMetrics(registry)
    metrics.on_llm("llm")
    metrics.on_step(StepRecord(1, 1, (1,), 2, StepParts(), proposed={"s": 1}, accepted={"s": 1}))
    metrics.on_admitted(0.1)
    metrics.on_retried("lost")
    metrics.on_blocks(WorkerId("v"), BLOCKS)
    metrics.on_load(1, 1)
    metrics.on_costs("draft", "s", ForwardCosts())
    metrics.on_preempted()
    metrics.on_dropped("no_draft")
    metrics.on_failed(Unavailable.code)
    workers = Registry(lambda: 0.0, "me")
    workers.hear(worker().announcement())
    registry.register(RosterMetrics(workers, ("ssm",)))


def serve(registry: CollectorRegistry) -> None:
    """A gateway with one answer and one error."""
    RelayMetrics(registry).watch_streams(lambda: (1, 0))
    metrics = GatewayMetrics(registry)
    metrics.count_request("/", 200)
    metrics.count_error(Unavailable.code)
    metrics.observe_answer("llm", [Transcript(tokens=[1, 2], first_s=0.0, last_s=1.0)], 0.0, 1.0)


def worker() -> FakeSsm:
    """Any."""
    return FakeSsm(ScriptedModel(9), WorkerId("s"), "s")


def draft(registry: CollectorRegistry) -> None:
    """A worker that refused an item."""
    refused = RefusedItem(RequestId("r"), 0, 0, "malformed_message")
    reply = DraftReply(WorkerId("s"), (), (refused,), 1.0, 1.0, BLOCKS)
    WorkerMetrics(registry, worker().announcement()).on_step(DraftRequest("me", 0, (), ()), reply)


def steer(registry: CollectorRegistry) -> None:
    """A scaler that has acted."""
    ScalerMetrics(registry).on_decision("verifier", Decision(1, 2, Reason.REQUESTS))


def test_the_page_has_what_the_processes_expose() -> None:
    """Names, types and labels, both ways."""
    registry = Operations(1.0).registry
    BusMetrics(registry)
    for part in (manage, serve, draft, steer):
        part(registry)
    assert exposed(registry) == documented()


def test_the_scaler_reads_metrics_that_are_there() -> None:
    """With the labels that it selects by. A renamed metric would stop it from scaling."""
    registry = CollectorRegistry()
    for part in (manage, serve, draft):
        part(registry)
    page = {"a": Page.parse(metrics_page(registry).decode())}
    span = Span(Snapshot(0.0, {"a": Page(page["a"].families, {})}), Snapshot(15.0, page))
    reading = verifier_reading(Aims(queue_s=0.1, ttft_s=0.1), span)
    assert (reading.running, reading.waiting) == (1, 1)
    assert reading.pressure
    assert ssm_reading(Aims(), "s", span, span).live == 1
    assert documented()[WORKERS] == ("gauge", {"kind", "name"})


def test_parts_of_a_step_are_on_the_page() -> None:
    """Each of them, by name."""
    page = PAGE.read_text()
    assert all(f"`{part}`" in page for part in StepParts.__slots__)


def test_queries_on_the_page_ask_for_metrics_that_are_there() -> None:
    """A histogram's by its sum, count or buckets."""
    known = documented()
    asked = set(re.findall(r"(?:espalier_|vllm:)[a-z_]+", PAGE.read_text().split("## Often asked")[1]))
    assert len(asked) > 8
    for name in asked:
        base = re.sub(r"_(sum|count|bucket)$", "", name)
        assert name in known or known[base][0] == "histogram", name
