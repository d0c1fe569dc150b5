"""The manager's metrics. Sees StepRecords; decides nothing. docs/metrics.md has all of them."""

from dataclasses import fields
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from request_manager.manager.spec_decode import SpecDecodeNames
from request_manager.manager.step_record import Model, Retry, StepParts, StepRecord
from treecore.costs import ForwardCosts
from treecore.messages import BlockUsage, WorkerId
from treecore.service.buckets import LATENCY_S, STEP_S
from treecore.service.labels import OTHER, FewLabels

_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_COST_ROWS = (1, 4, 16, 64)
_MAX_DEPTH_LABEL = 16
_MAX_NAMES, _MAX_REASONS = 16, 32


class ManagerMetrics:
    """An Observer that counts into `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = _Make(registry)
        self._name, self._reason = FewLabels(_MAX_NAMES), FewLabels(_MAX_REASONS)
        self._steps, self._drafts, self._spec_decode = (
            _Steps(make),
            _Drafts(make, self._name),
            SpecDecodeNames(registry),
        )
        self._tokens = make.counter("tokens_committed", "Tokens committed")
        self._asked = make.counter("prompt_tokens", "Tokens of prompts sent to the verifier")
        self._found = make.counter("cached_prompt_tokens", "Tokens of prompts that the verifier had cached")
        self._queued = make.histogram("queue_seconds", "From a request's arrival to its first step", LATENCY_S)
        self._requests = make.gauge("requests", "Requests in the manager", "state")
        self._preempted = make.counter("preemptions", "Requests that lost their blocks to others and waited again")
        self._failed = make.counter("requests_failed", "Requests that the manager ended with an error", "code")
        self._dropped = make.counter("answers_dropped", "Answers that could not be used", "reason")
        self._dropped.labels(self._reason("no_draft"))  # so that the first one shows in a rate
        self._blocks = make.gauge("kv_blocks", "Verifier KV cache blocks", "state")
        self._cost = make.gauge("forward_cost_seconds", "What a forward is taken to cost", "model", "name", "rows")
        self._costs: dict[tuple[Model, str], ForwardCosts] = {}

    def on_step(self, record: StepRecord) -> None:
        """Count a committed step."""
        self._tokens.inc(record.num_committed)
        self._asked.inc(record.num_asked)
        self._found.inc(record.num_found)
        self._steps.count(record)
        self._drafts.count(record)
        self._spec_decode.on_step(record)

    def on_admitted(self, queued_s: float) -> None:
        """Count a request that waits no longer."""
        self._queued.observe(queued_s)

    def on_retried(self, reason: Retry) -> None:
        """Count a step that comes again."""
        self._steps.retried[reason].inc()

    def on_blocks(self, worker_id: WorkerId, usage: BlockUsage) -> None:  # noqa: ARG002 - a manager has one verifier
        """Show the verifier's cache."""
        for state in ("free", "used", "cached", "total"):
            self._blocks.labels(state).set(getattr(usage, state))
        self._spec_decode.on_blocks(usage)

    def on_no_verifier(self) -> None:
        """Show no cache: another manager may be showing the same one."""
        self._blocks.clear()
        self._spec_decode.on_no_verifier()

    def on_llm(self, name: str) -> None:
        """Name what is counted as vLLM counts it."""
        self._spec_decode.on_llm(self._name(name))

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """Show the queue."""
        self._requests.labels("running").set(num_running)
        self._requests.labels("waiting").set(num_waiting)
        self._spec_decode.on_load(num_running, num_waiting)

    def on_costs(self, model: Model, name: str, costs: ForwardCosts) -> None:
        """Show what `costs` say whenever somebody looks."""
        label = self._name(name)
        if label == OTHER or self._costs.get((model, label)) is costs:
            return
        self._costs[model, label] = costs
        for num_rows in _COST_ROWS:
            self._cost.labels(model, label, str(num_rows)).set_function(partial(_cost_s, costs, num_rows))

    def on_preempted(self) -> None:
        """Count a preemption."""
        self._preempted.inc()

    def on_dropped(self, reason: str) -> None:
        """Count an unusable answer."""
        self._dropped.labels(self._reason(reason)).inc()

    def on_failed(self, code: str) -> None:
        """Count a request that ended with an error."""
        self._failed.labels(self._reason(code)).inc()


def _cost_s(costs: ForwardCosts, num_rows: int) -> float:
    return costs.ms(num_rows) / 1e3


class _Make:
    """Metrics of one registry, under our prefix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"espalier_{name}", meaning, labels, registry=self._registry)

    def gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"espalier_{name}", meaning, labels, registry=self._registry)

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"espalier_{name}", meaning, labels, buckets=buckets, registry=self._registry)


class _Steps:
    """How many steps, how large, and where their time went."""

    def __init__(self, make: _Make) -> None:
        self._steps = make.counter("steps", "LLM steps committed")
        retried = make.counter("steps_retried", "Steps that could not be verified and are planned again", "reason")
        self.retried: dict[Retry, Counter] = {reason: retried.labels(reason) for reason in get_args(Retry)}
        self._step = make.histogram("step_seconds", "A step, from its plan to its commit", STEP_S)
        self._overhead = make.histogram("step_overhead_seconds", "Of it, beside forwards and choosing tokens", STEP_S)
        parts = make.histogram("step_part_seconds", "Of it, by part; the parts do not overlap", STEP_S, "part")
        self._parts = {part.name: parts.labels(part.name) for part in fields(StepParts)}
        self._requests = make.histogram("step_requests", "Requests in a step", _COUNTS)
        self._nodes = make.histogram("step_nodes", "Nodes below roots, verified in a step", _COUNTS)
        self._tokens = make.histogram("step_tokens", "Tokens committed in a step", _COUNTS)

    def count(self, record: StepRecord) -> None:
        self._steps.inc()
        self._requests.observe(record.num_requests)
        self._nodes.observe(record.num_drafted)
        self._tokens.observe(record.num_committed)
        self._step.observe(record.parts.total / 1e3)
        self._overhead.observe(record.parts.overhead / 1e3)
        for part, histogram in self._parts.items():
            histogram.observe(getattr(record.parts, part) / 1e3)


class _Drafts:
    """What became of drafts."""

    def __init__(self, make: _Make, label: FewLabels) -> None:
        self._label = label
        self._drafted = make.counter("draft_tokens", "Drafted nodes verified")
        accepted = make.counter("accepted_tokens", "Drafted nodes accepted, by depth", "depth")
        self._accepted = [accepted.labels(str(depth)) for depth in range(1, _MAX_DEPTH_LABEL + 1)]
        self._proposed = make.counter("ssm_draft_tokens", "Verified nodes that an SSM proposed", "ssm")
        self._kept = make.counter("ssm_accepted_tokens", "Accepted nodes that an SSM proposed", "ssm")
        self._expected = make.counter(
            "expected_tokens", "Nodes that should be accepted, by the estimate that chose them"
        )
        self._met = make.counter("expected_accepted_tokens", "Nodes of those trees that were accepted")
        trees = make.counter("trees", "Trees verified", "drafted")
        self._ahead, self._in_step = trees.labels("ahead"), trees.labels("in_step")
        self._hidden_ratio = make.gauge(
            "draft_hidden_ratio", "Share of the trees verified so far whose draft was there before their step began"
        )
        self._num_trees, self._num_hidden = 0, 0

    def count(self, record: StepRecord) -> None:
        self._drafted.inc(record.num_drafted)
        self._expected.inc(record.num_expected)
        self._met.inc(record.num_met)
        for at_depth, count in zip(self._accepted, record.accepted_per_depth, strict=False):
            at_depth.inc(count)
        for by_ssm, counts in ((self._proposed, record.proposed), (self._kept, record.accepted)):
            for ssm, count in counts.items():
                by_ssm.labels(self._label(ssm)).inc(count)
        self._count_trees(record.num_trees, record.num_hidden)

    def _count_trees(self, num_trees: int, num_hidden: int) -> None:
        self._ahead.inc(num_hidden)
        self._in_step.inc(num_trees - num_hidden)
        self._num_trees += num_trees
        self._num_hidden += num_hidden
        if self._num_trees:
            self._hidden_ratio.set(self._num_hidden / self._num_trees)
