"""A whole manager in one event loop: a real Coordinator over a FakeBus with fake workers. Ships for tests.

Knows how the parts are wired; must not know what a test expects of them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from request_manager.contract import FinishReason, Generation, TokenDelta, TokenLogprob
from request_manager.manager.coordinator import Coordinator, Policy
from request_manager.manager.local import LocalManager
from request_manager.manager.registry import Registry
from request_manager.manager.ssm_pool import SsmPool
from request_manager.manager.step_record import Model, Retry, StepRecord
from request_manager.manager.verifying import VerifierLink
from request_manager.roster import Loss
from treecore.costs import ForwardCosts
from treecore.errors import EspalierError
from treecore.expand import Expansion
from treecore.messages import BlockUsage, WorkerId, step_subject
from treecore.testing.bus import FakeBus, Rule, deliver_all
from treecore.testing.workers import FakeSsm, FakeVerifier

_PATIENCE_S = 20.0

OWNER = "manager-under-test"
POLICY = Policy(
    max_batch=16,
    max_waiting=64,
    step_rows=32,
    max_tree_nodes=16,
    expansion=Expansion((2, 1)),
    draft_deadline_s=5.0,
)

FakeAny = FakeVerifier | FakeSsm


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request got: tokens, and either a finish reason or the error that ended it."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    error: EspalierError | None = None
    steps: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Recorder:
    """An Observer that remembers."""

    steps: list[StepRecord] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    blocks: dict[WorkerId, BlockUsage] = field(default_factory=dict)
    load: tuple[int, int] = (0, 0)
    llm: str = ""
    num_preempted: int = 0
    queued_s: list[float] = field(default_factory=list)
    retried: Counter[Retry] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    costs: dict[tuple[Model, str], ForwardCosts] = field(default_factory=dict)

    def on_admitted(self, queued_s: float) -> None:
        """See Observer."""
        self.queued_s.append(queued_s)

    def on_step(self, record: StepRecord) -> None:
        """See Observer."""
        self.steps.append(record)

    def on_blocks(self, worker_id: WorkerId, usage: BlockUsage) -> None:
        """See Observer."""
        self.blocks[worker_id] = usage

    def on_no_verifier(self) -> None:
        """See Observer."""
        self.blocks.clear()

    def on_llm(self, name: str) -> None:
        """See Observer."""
        self.llm = name

    def on_load(self, num_running: int, num_waiting: int) -> None:
        """See Observer."""
        self.load = (num_running, num_waiting)

    def on_retried(self, reason: Retry) -> None:
        """See Observer."""
        self.retried[reason] += 1

    def on_costs(self, model: Model, name: str, costs: ForwardCosts) -> None:
        """See Observer."""
        self.costs[model, name] = costs

    def on_failed(self, code: str) -> None:
        """See Observer."""
        self.failed[code] += 1

    def on_preempted(self) -> None:
        """See Observer."""
        self.num_preempted += 1

    def on_dropped(self, reason: str) -> None:
        """See Observer."""
        self.dropped[reason] += 1


class _RevivingRegistry(Registry):
    """A Registry in which a worker that is wrongly held for lost announces itself again at once."""

    def __init__(self, clock: Callable[[], float], me: str) -> None:
        super().__init__(clock, me)
        self.alive: dict[WorkerId, FakeAny] = {}

    def lose(self, worker_id: WorkerId, loss: Loss = "unanswered") -> None:
        super().lose(worker_id, loss)
        asyncio.get_running_loop().call_soon(self._revive, worker_id)

    def _revive(self, worker_id: WorkerId) -> None:
        if worker_id in self.alive:
            self.hear(self.alive[worker_id].announcement())


class Stage:
    """A manager on a bus, with its workers. Its coordinator runs in `running_stage`."""

    def __init__(self, policy: Policy, bus: FakeBus) -> None:
        self.bus = bus
        self.recorder = Recorder()
        self.registry = _RevivingRegistry(asyncio.get_running_loop().time, OWNER)
        self.coordinator = Coordinator(
            self.registry,
            VerifierLink(self.bus, self.registry),
            SsmPool(self.bus, self.registry, self.recorder),
            policy,
            self.recorder,
        )
        self.manager = LocalManager(self.coordinator, self.registry, policy.max_tree_nodes)

    @property
    def workers(self) -> list[FakeAny]:
        """Those that live."""
        return list(self.registry.alive.values())

    async def add(self, worker: FakeAny) -> None:
        """A worker starts: it takes steps and announces itself."""
        await worker.attach(self.bus)
        self.registry.alive[worker.worker_id] = worker
        self.registry.hear(worker.announcement())

    def kill(self, worker: FakeAny) -> None:
        """A worker dies: it never answers again, and the registry notices."""
        del self.registry.alive[worker.worker_id]
        kind = worker.announcement().kind
        self.bus.silence(step_subject(kind, worker.worker_id))
        self.registry.lose(worker.worker_id)

    async def outcome(self, generation: Generation) -> Outcome:
        """Run one request to its end; raises TimeoutError if that never comes."""
        deltas: list[TokenDelta] = []
        error: EspalierError | None = None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                async for delta in self.manager.generate(generation):
                    deltas.append(delta)  # noqa: PERF401 - what came before an error counts
        except EspalierError as caught:
            error = caught
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        reason = deltas[-1].finish_reason if deltas else None
        assert (reason is None) == (error is not None), "a finish reason or an error, never both"
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        return Outcome(tokens, reason, error, deltas[-1].steps if deltas else 0, logprobs)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the event loop turn until `reached` holds; fails loudly if it never does."""
        async with asyncio.timeout(_PATIENCE_S):
            while not reached():  # noqa: ASYNC110 - anything may bring it about: there is no event
                await asyncio.sleep(0)

    async def settle(self) -> None:
        """Return once no live worker holds anything: every request is over and its cache free."""
        await self.until(lambda: not any(worker.usage().used or worker.held_ids for worker in self.workers))


@asynccontextmanager
async def running_stage(*workers: FakeAny, policy: Policy = POLICY, rule: Rule = deliver_all) -> AsyncIterator[Stage]:
    """A Stage with `workers` whose coordinator runs; raises whatever it or a worker raised."""
    stage = Stage(policy, FakeBus(rule))
    for worker in workers:
        await stage.add(worker)
    running = asyncio.create_task(stage.coordinator.run())
    try:
        yield stage
    finally:
        running.cancel()
        (ending,) = await asyncio.gather(running, return_exceptions=True)
        await stage.bus.close()
    assert isinstance(ending, asyncio.CancelledError), f"the coordinator ended: {ending!r}"
