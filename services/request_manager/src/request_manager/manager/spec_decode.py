"""The names under which load tools and autoscalers look for what speculation does: those of vLLM's V1 engine.

Same meanings, as far as a tree has them: a draft is one request's tree in one step, and `position` 0 is a child of the
root. Of a tree at most one node a depth can be accepted, so 1 + accepted / drafts is the mean length, as there.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from request_manager.manager.step_record import StepRecord
from treecore.messages import BlockUsage

_MAX_POSITIONS = 16
_LABELS = ("model_name", "engine")
_ENGINE = "0"


class SpecDecodeNames:
    """Counters and gauges of one manager, under the name of the LLM that it was last told of."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._of = ("", _ENGINE)
        self._drafts = Counter("vllm:spec_decode_num_drafts", "Trees verified", _LABELS, registry=registry)
        self._drafted = Counter("vllm:spec_decode_num_draft_tokens", "Nodes verified", _LABELS, registry=registry)
        self._accepted = Counter("vllm:spec_decode_num_accepted_tokens", "Nodes accepted", _LABELS, registry=registry)
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Nodes accepted, by depth - 1",
            [*_LABELS, "position"],
            registry=registry,
        )
        self._running = Gauge("vllm:num_requests_running", "Requests in steps", _LABELS, registry=registry)
        self._waiting = Gauge("vllm:num_requests_waiting", "Requests that wait", _LABELS, registry=registry)
        self._cache = Gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _LABELS, registry=registry)

    def on_step(self, record: StepRecord) -> None:
        """Count a committed step."""
        self._drafts.labels(*self._of).inc(record.num_trees)
        self._drafted.labels(*self._of).inc(record.num_drafted)
        self._accepted.labels(*self._of).inc(record.num_accepted)
        for position, count in enumerate(record.accepted_per_depth[:_MAX_POSITIONS]):
            self._per_position.labels(*self._of, str(position)).inc(count)

    def on_llm(self, name: str) -> None:
        """Whose steps these are from now on."""
        self._of = (name, _ENGINE)

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """Show the queue, of an LLM that is known."""
        if not self._of[0]:
            return
        self._running.labels(*self._of).set(num_running)
        self._waiting.labels(*self._of).set(num_waiting)

    def on_blocks(self, usage: BlockUsage) -> None:
        """Show the cache. What is cached and nobody uses counts as free, as there."""
        self._cache.labels(*self._of).set(usage.used / usage.total if usage.total else 0.0)

    def on_no_verifier(self) -> None:
        """Show no cache."""
        self._cache.clear()
