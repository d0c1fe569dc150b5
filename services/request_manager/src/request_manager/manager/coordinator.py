"""The only loop: plan a step, have it drafted, merged and verified, accept, commit. The only writer of requests.

`_step` is the whole life of a step. Nothing here computes on models, text or HTTP.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from request_manager.contract import Generation
from request_manager.manager.queue import RequestQueue
from request_manager.manager.registry import Registry, Worker
from request_manager.manager.request import Outbox, Request
from request_manager.manager.scheduler import (
    DynamicTree,
    Limits,
    PlannedItem,
    Shape,
    Standing,
    StepPlan,
    fits_alone,
    plan_step,
)
from request_manager.manager.spans import describe_step, step_span
from request_manager.manager.speculator import Speculator, Turn
from request_manager.manager.ssm_pool import SsmPool
from request_manager.manager.step_record import Observer
from request_manager.manager.step_report import CommittedStep, StepClock
from request_manager.manager.trial import Trial
from request_manager.manager.verifying import KEEP_LEASE_S, VerifierLink
from treecore.accept import Accepted
from treecore.errors import (
    EspalierError,
    InvalidRequest,
    OutOfBlocks,
    Unavailable,
    Unreachable,
    WireError,
    code_of,
)
from treecore.expand import NO_DRAFT, Expansion
from treecore.messages import BlockUsage, RefusedItem, RequestId, VerifiedItem, VerifyItem, VerifyReply, WorkerId
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

_GRAMMAR_FAILED = "grammar_failed"
_RELEASE_RETRY_S = 0.1
_TURNS_TO_SEND = 2  # of the event loop, behind which a question is on the wire
_SUSPECT = 2  # fruitless steps after which a request steps alone, so that it cannot take others with it
_MAX_FRUITLESS = 3  # a worker that lost its state refuses once or twice; more is a request that can never be served

Trials = dict[RequestId, Trial]


@dataclass(frozen=True, slots=True)
class Policy:
    """How the coordinator runs: its batch and queue bounds, the default trees, the time that drafts get.

    dynamic: whether trees are shaped by what they cost and bring, unless a request says otherwise; `expansion` is then
    for those whose rule needs draws. draft_ahead: whether their SSMs draft while the LLM verifies.
    """

    max_batch: int
    max_waiting: int
    step_rows: int
    max_tree_nodes: int
    expansion: Expansion
    draft_deadline_s: float
    dynamic: bool = False
    draft_ahead: bool = True


class Coordinator:
    """Owns all requests of one verifier group."""

    def __init__(
        self, registry: Registry, verifier: VerifierLink, ssms: SsmPool, policy: Policy, observer: Observer
    ) -> None:
        self._registry = registry
        self._verifier = verifier
        self._ssms = ssms
        self._speculator = Speculator(
            ssms, policy.max_tree_nodes, policy.step_rows, policy.draft_deadline_s, policy.draft_ahead, observer
        )
        self._policy = policy
        self._observer = observer
        self._queue = RequestQueue(policy.max_waiting)
        self._blocks: tuple[WorkerId, BlockUsage] | None = None  # as the last reply told
        self._lesson: Callable[[], None] = _nothing
        self._wake = asyncio.Event()

    def submit(self, generation: Generation, outbox: Outbox, output: Sequence[int] = ()) -> Request:
        """Admit a request to the queue; raises Overloaded, with nothing admitted, if that is full.

        output: its first tokens, if another manager has committed some; the next come behind them.
        """
        request = Request(generation, outbox, output)
        self._queue.submit(request)
        self._wake.set()
        return request

    @property
    def load(self) -> tuple[int, int]:
        """Requests that take part in steps, and those that wait."""
        return len(self._queue.running), self._queue.num_waiting

    def cancel(self, request: Request) -> None:
        """The client is gone: the request takes part in no further step and its cache is freed."""
        request.is_cancelled = True
        request.end()
        self._queue.withdraw(request)
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled. If this fails, every request is told so."""
        try:
            while True:
                await self._run_once()
        except Exception as error:
            log_event(logger, logging.ERROR, "coordinator failed", error=repr(error))
            for request in self._queue:
                request.outbox.put_nowait(EspalierError("the request manager failed"))
            raise

    async def _run_once(self) -> None:
        self._drop_cancelled()
        self._show_load()
        worker = await self._verifier.worker()
        if worker is None:
            self._observer.on_no_verifier()
            return
        plan = self._plan(worker)
        if plan.items:
            with step_span([self._queue[item.request_id].span for item in plan.items]):
                await self._step(worker, plan)
        else:
            await self._idle(worker)

    async def _step(self, worker: Worker, plan: StepPlan) -> None:
        """Draft, merge, verify, accept, commit. A step that could not be verified is planned again, unchanged."""
        started = perf_counter()
        turns = [self._turn(item) for item in plan.items]
        found = await self._speculator.trees(turns, worker)
        drafted = perf_counter()
        trials = {turn.request_id: Trial(turn.request, turn.item, found.trees[turn.request_id]) for turn in turns}
        look_ahead = partial(self._speculator.look_ahead, turns, worker, found.num_rows)
        try:
            reply, beside_drafts = await self._ask(worker, [trial.question() for trial in trials.values()], look_ahead)
        except Unreachable:
            self._observer.on_retried("unreachable")
            return
        except (Unavailable, WireError):
            self._on_lost_step(plan)
            return
        verified = perf_counter()
        self._learn_blocks(reply)
        accepted = self._commit(worker, trials, reply)
        clock = StepClock(started, drafted, verified, perf_counter())
        step = CommittedStep(trials, found, reply, accepted, clock)
        times = step.times(beside_drafts=beside_drafts)
        self._lesson = partial(self._speculator.learn, found, worker, accepted, times)
        record = step.record(self._ssms.name_of)
        describe_step(record)
        self._observer.on_step(record)

    async def _ask(
        self, worker: Worker, questions: Sequence[VerifyItem], look_ahead: Callable[[], bool]
    ) -> tuple[VerifyReply, bool]:
        """The verifier's answer, and whether SSMs were at work beside it.

        Meanwhile it is said what they do, and what the last step taught is learned.
        """
        asking = asyncio.ensure_future(self._verifier.ask(worker, questions))
        try:
            await _send()
            beside_drafts = look_ahead()
            await _send()
            self._lesson()
            self._lesson = _nothing
            return await asking, beside_drafts
        finally:
            asking.cancel()

    # -- plan ---------------------------------------------------------------------------------------------------------

    def _plan(self, worker: Worker) -> StepPlan:
        self._observer.on_llm(worker.announcement.name)
        limits = self._limits(worker)
        self._fail_misfits(limits.blocks)
        suspects = [request for request in self._queue.running if request.num_fruitless >= _SUSPECT]
        running = suspects[:1] or self._queue.running
        waiting = [] if suspects else self._queue.waiting(limits.max_batch)
        plan = plan_step(
            [self._standing(request, worker) for request in running],
            [self._standing(request, worker) for request in waiting],
            limits,
        )
        for request_id in reversed(plan.preempted):
            self._preempt(self._queue[request_id])
        for _ in plan.admitted:
            self._admit()
        self._show_load()
        return plan

    def _show_load(self) -> None:
        self._observer.on_load(len(self._queue.running), self._queue.num_waiting)

    def _admit(self) -> None:
        request = self._queue.admit()
        if not request.was_admitted:
            request.was_admitted = True
            self._observer.on_admitted(perf_counter() - request.submitted_s)

    def _limits(self, worker: Worker) -> Limits:
        policy, blocks = self._policy, worker.announcement.blocks
        if self._blocks is not None and self._blocks[0] == worker.worker_id:
            blocks = self._blocks[1]  # fresher than what was announced
        num_ssms = len({ssm.announcement.name for ssm in self._registry.live("ssm")})
        return Limits(policy.max_batch, policy.step_rows, blocks, policy.max_tree_nodes, num_ssms)

    def _learn_blocks(self, reply: VerifyReply) -> None:
        self._blocks = reply.worker_id, reply.blocks
        self._observer.on_blocks(reply.worker_id, reply.blocks)

    def _fail_misfits(self, blocks: BlockUsage) -> None:
        """Those who could not be served even alone: too long for any plan, or a smaller verifier took over."""
        for request in self._queue:
            if not fits_alone(request.committed_len + request.remaining, blocks):
                self._fail(request, Unavailable("the request does not fit into the verifier's cache"))

    def _preempt(self, request: Request) -> None:
        """Its blocks go to older requests; it waits in front of all younger ones and is computed again."""
        self._observer.on_preempted()
        self._queue.preempt(request)
        request.holds(None, 0)
        self._release(request.request_id)

    def _standing(self, request: Request, worker: Worker) -> Standing:
        generation = request.generation
        return Standing(
            request.request_id,
            request.committed_len,
            request.held_len(worker.worker_id),
            request.held_rows(worker.worker_id),
            request.committed_len + request.remaining,
            self._shape(generation) if generation.speculation else NO_DRAFT,
        )

    def _shape(self, generation: Generation) -> Shape:
        """What tree the request may have. Draws need a shape that does not depend on them."""
        policy, tree = self._policy, generation.tree
        if isinstance(tree, tuple):
            return tree
        if not self._is_shaped(generation):
            return policy.expansion
        most = policy.step_rows // (2 * max(1, len(self._queue.running)))
        return DynamicTree(max(1, min(policy.max_tree_nodes - 1, most)), policy.max_tree_nodes - 1)

    def _is_shaped(self, generation: Generation) -> bool:
        """Whether its trees are shaped step by step."""
        wanted = generation.tree == "dynamic" or (generation.tree is None and self._policy.dynamic)
        return generation.speculation and wanted and not generation.params.draws_drafts

    def _turn(self, item: PlannedItem) -> Turn:
        request = self._queue[item.request_id]
        return Turn(request, item, self._is_shaped(request.generation))

    async def _idle(self, worker: Worker) -> None:
        """No step is due: have finished requests freed and keep the verifier, then sleep until there is work."""
        self._wake.clear()
        self._ssms.flush()
        with suppress(Unavailable):
            self._learn_blocks(await self._verifier.ask(worker, ()))
        with suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_RETRY_S if self._ssms.owes_release else KEEP_LEASE_S):
                await self._wake.wait()

    # -- verify, accept, commit ---------------------------------------------------------------------------------------

    def _commit(self, worker: Worker, trials: Trials, reply: VerifyReply) -> dict[RequestId, Accepted]:
        answers: dict[RequestId, VerifiedItem | RefusedItem] = {}
        answers.update((item.request_id, item) for item in reply.items)
        answers.update((item.request_id, item) for item in reply.refused)
        accepted: dict[RequestId, Accepted] = {}
        crowded_out: list[Request] = []
        for request_id, trial in trials.items():
            request, answer = trial.request, answers.get(request_id)
            if answer is None or answer.step != request.step:
                self._drop(request, "other_step")
            elif isinstance(answer, RefusedItem):
                request.holds(worker.worker_id, max(0, min(answer.held_len, request.committed_len - 1)))
                if answer.reason == OutOfBlocks.code:
                    crowded_out.append(request)
                else:
                    self._drop(request, answer.reason)
            elif path := self._commit_trial(trial, answer, worker):
                accepted[request_id] = path
        self._make_room(crowded_out)
        return accepted

    def _make_room(self, crowded_out: Sequence[Request]) -> None:
        """The plan was too hopeful: the youngest gives way, or all do if even the oldest did not get its blocks."""
        if not crowded_out:
            return
        oldest, *younger = self._queue.running
        for request in crowded_out:
            if request is oldest:
                self._drop(request, OutOfBlocks.code)
            else:
                self._observer.on_dropped(OutOfBlocks.code)
        for victim in younger[::-1] if any(request is oldest for request in crowded_out) else younger[-1:]:
            self._preempt(victim)

    def _on_lost_step(self, plan: StepPlan) -> None:
        """The verifier did not live to answer. If that goes on, one request of the batch may be what kills it."""
        self._blocks = None
        self._observer.on_retried("lost")
        for item in plan.items:
            self._drop(self._queue[item.request_id], "lost_step")

    def _drop(self, request: Request, reason: str) -> None:
        """An answer that cannot be used; the step is planned again, but not for ever."""
        self._observer.on_dropped(reason)
        if reason == _GRAMMAR_FAILED:
            self._fail(
                request, InvalidRequest("the output cannot follow its grammar any further", code=_GRAMMAR_FAILED)
            )
            return
        request.num_fruitless += 1
        if request.num_fruitless > _MAX_FRUITLESS:
            self._fail(request, Unavailable(f"the request failed: the verifier cannot serve it ({reason})"))

    def _fail(self, request: Request, error: EspalierError) -> None:
        log_event(logger, logging.WARNING, "request failed", request_id=request.request_id, error=error)
        self._observer.on_failed(code_of(error))
        request.outbox.put_nowait(error)
        request.end(error)
        self._forget(request)

    def _commit_trial(self, trial: Trial, answer: VerifiedItem, worker: Worker) -> Accepted | None:
        request, item = trial.request, trial.item
        try:
            found = trial.judge(answer, worker.announcement.vocab_size)
        except WireError as error:
            self._drop(request, error.code)
            return None
        request.holds(worker.worker_id, item.end, max(0, len(answer.tokens) - 1))
        if item.end > request.farthest:  # computing again what a refusal cost is no way out of being refused
            request.farthest, request.num_fruitless = item.end, 0
        if request.num_token_steps == 0:
            request.num_found = (request.num_found if item.start else 0) + trial.num_found(answer)
        request.step += 1
        if found is None:
            return None
        path = found.path
        num_kept = request.commit(path.tokens, len(path.nodes), found.logprobs)
        if request.finish_reason is not None:
            self._forget(request)
        return Accepted(path.nodes[:num_kept], path.tokens[:num_kept])

    def _drop_cancelled(self) -> None:
        for request in [request for request in self._queue.running if request.is_cancelled]:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """The request is over: its place is free."""
        request.end()
        self._queue.remove(request)
        self._release(request.request_id)

    def _release(self, request_id: RequestId) -> None:
        """The workers will hear with the next message that the request holds nothing any more."""
        self._verifier.release(request_id)
        self._ssms.release(request_id)


async def _send() -> None:
    """Let go out what was asked."""
    for _ in range(_TURNS_TO_SEND):
        await asyncio.sleep(0)


def _nothing() -> None:
    """The lesson of no step."""
