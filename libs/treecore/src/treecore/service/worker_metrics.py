"""What one worker did, counted from its step messages. Must not know models."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge

from treecore.errors import OutOfBlocks, StateMissing
from treecore.messages import Announcement, BlockUsage, DraftReply, DraftRequest, VerifyReply, VerifyRequest
from treecore.service.labels import FewLabels

_MAX_REASONS = 16


class WorkerMetrics:
    """Counters of the worker that `me` announces; kind and name are labels of all of them."""

    def __init__(self, registry: CollectorRegistry, me: Announcement) -> None:
        self._registry = registry
        self._me = {"kind": me.kind, "name": me.name}
        self._steps = self._counter("steps", "Steps answered")
        self._items = self._counter("items", "Requests in those steps")
        self._tokens = self._counter("tokens", "Committed tokens that came with them")
        self._nodes = self._counter("nodes", "Nodes below roots that were verified, or drafted")
        self._busy = self._counter("busy_seconds", "Time in steps")
        self._forward = self._counter("forward_seconds", "Time inside the model's forwards")
        self._sample = self._counter("sample_seconds", "Time choosing tokens from logits")
        self._refused = Counter(
            "espalier_worker_refused_items", "Items refused", [*self._me, "reason"], registry=registry
        )
        self._reason = FewLabels(_MAX_REASONS)
        for error in (StateMissing, OutOfBlocks):  # so that the first one shows in a rate
            self._refused.labels(**self._me, reason=self._reason(error.code))
        self._blocks = Gauge("espalier_worker_kv_blocks", "KV cache blocks", [*self._me, "state"], registry=registry)
        self._show_blocks(me.blocks)

    def on_step(self, request: DraftRequest | VerifyRequest, reply: DraftReply | VerifyReply) -> None:
        """Count a step."""
        self._steps.inc()
        self._items.inc(len(request.items))
        self._tokens.inc(sum(len(item.tokens) for item in request.items))
        self._nodes.inc(_num_nodes(reply))
        self._forward.inc(reply.forward_ms / 1e3)
        self._sample.inc(reply.sample_ms / 1e3)
        for item in reply.refused:
            self._refused.labels(**self._me, reason=self._reason(item.reason)).inc()
        self._show_blocks(reply.blocks)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the body's time."""
        started = time.perf_counter()
        yield
        self._busy.inc(time.perf_counter() - started)

    def _show_blocks(self, usage: BlockUsage) -> None:
        for state in ("free", "used", "cached", "total"):
            self._blocks.labels(**self._me, state=state).set(getattr(usage, state))

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"espalier_worker_{name}", meaning, list(self._me), registry=self._registry).labels(**self._me)


def _num_nodes(reply: DraftReply | VerifyReply) -> int:
    """Below the roots; an answer has a token for the root too."""
    num_roots = 0 if isinstance(reply, DraftReply) else 1
    return sum(max(0, len(item.tokens) - num_roots) for item in reply.items)
