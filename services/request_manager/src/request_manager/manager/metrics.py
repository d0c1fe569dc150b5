"""The manager's metrics. Sees StepRecords; decides nothing."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from request_manager.manager.step_record import StepRecord
from treecore.messages import BlockUsage, WorkerId

_STEP_BUCKETS_MS = (
    *(0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
    *(150, 200, 300, 500, 1000, 2000, 5000),
)
_STEP_BUCKETS_S = tuple(bound / 1000 for bound in _STEP_BUCKETS_MS)
_MAX_DEPTH_LABEL = 16
_PARTS = ("draft", "verify", "draft_forward", "verify_forward", "sample", "overhead")


class ManagerMetrics:
    """An Observer that counts into `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter("espalier_tokens_committed", "Tokens committed", registry=registry)
        self._steps = Counter("espalier_steps", "LLM steps", registry=registry)
        self._drafted = Counter("espalier_draft_tokens", "Drafted nodes verified", registry=registry)
        self._accepted = Counter(
            "espalier_accepted_tokens", "Drafted nodes accepted, by depth", ["depth"], registry=registry
        )
        self._proposed = Counter(
            "espalier_ssm_draft_tokens", "Verified nodes that an SSM proposed", ["ssm"], registry=registry
        )
        self._kept = Counter(
            "espalier_ssm_accepted_tokens", "Accepted nodes that an SSM proposed", ["ssm"], registry=registry
        )
        self._trees = Counter("espalier_trees", "Trees verified", ["drafted"], registry=registry)
        self._hidden_ratio = Gauge(
            "espalier_draft_hidden_ratio",
            "Share of the trees verified so far whose draft was there before their step began",
            registry=registry,
        )
        self._num_trees, self._num_hidden = 0, 0
        self._asked = Counter("espalier_prompt_tokens", "Tokens of prompts sent to the verifier", registry=registry)
        self._found = Counter(
            "espalier_cached_prompt_tokens", "Tokens of prompts that the verifier had cached", registry=registry
        )
        self._preempted = Counter(
            "espalier_preemptions", "Requests that lost their blocks to others and waited again", registry=registry
        )
        seconds = Histogram(
            "espalier_step_part_seconds",
            "Time of a step by part",
            ["part"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._parts = {part: seconds.labels(part) for part in _PARTS}
        self._dropped = Counter(
            "espalier_answers_dropped", "Answers that could not be used", ["reason"], registry=registry
        )
        self._blocks = Gauge("espalier_kv_blocks", "Verifier KV cache blocks", ["state"], registry=registry)
        self._requests = Gauge("espalier_requests", "Requests in the manager", ["state"], registry=registry)

    def on_step(self, record: StepRecord) -> None:
        """Count a committed step."""
        self._steps.inc()
        self._tokens.inc(record.num_committed)
        self._drafted.inc(record.num_drafted)
        self._asked.inc(record.num_asked)
        self._found.inc(record.num_found)
        for depth, count in enumerate(record.accepted_per_depth[:_MAX_DEPTH_LABEL], start=1):
            self._accepted.labels(str(depth)).inc(count)
        for counter, counts in ((self._proposed, record.proposed), (self._kept, record.accepted)):
            for ssm, count in counts.items():
                counter.labels(ssm).inc(count)
        self._count_trees(record.num_trees, record.num_hidden)
        for part, histogram in self._parts.items():
            histogram.observe(getattr(record, f"{part}_ms") / 1e3)

    def _count_trees(self, num_trees: int, num_hidden: int) -> None:
        self._trees.labels("ahead").inc(num_hidden)
        self._trees.labels("in_step").inc(num_trees - num_hidden)
        self._num_trees += num_trees
        self._num_hidden += num_hidden
        if self._num_trees:
            self._hidden_ratio.set(self._num_hidden / self._num_trees)

    def on_blocks(self, worker_id: WorkerId, usage: BlockUsage) -> None:  # noqa: ARG002 - one verifier group so far
        """Show the verifier's cache."""
        self._blocks.labels("free").set(usage.free)
        self._blocks.labels("used").set(usage.used)
        self._blocks.labels("cached").set(usage.cached)
        self._blocks.labels("total").set(usage.total)

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """Show the queue."""
        self._requests.labels("running").set(num_running)
        self._requests.labels("waiting").set(num_waiting)

    def on_preempted(self) -> None:
        """Count a preemption."""
        self._preempted.inc()

    def on_dropped(self, reason: str) -> None:
        """Count an unusable answer."""
        self._dropped.labels(reason).inc()
