"""SSMs that answer oddly, or not at all, cost speed: the text stays, and what is learned stays usable."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from request_manager.contract import Generation
from request_manager.manager.testing import POLICY, FakeAny, Outcome, Stage, running_stage
from treecore.errors import Unavailable
from treecore.expand import Expansion
from treecore.messages import (
    DraftedItem,
    DraftReply,
    DraftRequest,
    RefusedItem,
    RequestId,
    VerifyReply,
    VerifyRequest,
    WorkerId,
)
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate, Verdict
from treecore.testing.scripted import AgreeingModel, ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

VOCAB_SIZE = 20
LLM = ScriptedModel(VOCAB_SIZE, spread=24.0)  # sure of itself, as are its SSMs
DYNAMIC = replace(POLICY, dynamic=True, max_tree_nodes=32)
SMALL = FakeSize(forward_ms=2.0)

Answer = Callable[[DraftReply], DraftReply]


@dataclass(slots=True)
class OddSsm(FakeSsm):
    """An SSM whose replies are changed on their way."""

    odd: Answer = lambda reply: reply

    def step(self, request: DraftRequest) -> DraftReply:
        """See FakeSsm."""
        return self.odd(FakeSsm.step(self, request))


def verifier(name: str = "verifier", forward_ms: float = 20.0) -> FakeVerifier:
    """The LLM."""
    return FakeVerifier(LLM, WorkerId(name), "llm", FakeSize(forward_ms=forward_ms))


def ssm(name: str, agreement: float, size: FakeSize = SMALL, odd: Answer = lambda reply: reply) -> OddSsm:
    """An SSM that agrees with the greedy LLM behind a share of all contexts."""
    model = AgreeingModel(LLM, ScriptedModel(VOCAB_SIZE, sum(name.encode()), spread=24.0), agreement)
    return OddSsm(model, WorkerId(f"{name}-worker"), name, size, odd=odd)


def generation(name: str, prompt_len: int = 4, temperature: float = 0.0, **fields: object) -> Generation:
    """A request of 30 tokens."""
    prompt = np.arange(prompt_len, dtype=np.int32) % VOCAB_SIZE
    params = SamplingParams(temperature, 0, 1.0, Seed(len(name)), prompt_len=prompt_len)
    one = Generation(RequestId(name), prompt, params, 30)
    return replace(one, **fields)  # type: ignore[arg-type]


BATCH = [
    generation("ahead"),
    generation("sampled", temperature=0.8),
    generation("waited", draft_ahead=False),
    generation("static", tree=Expansion((2, 1))),
    generation("alone", speculation=False),
    generation("nobody", ssms=frozenset({"gone"})),
    generation("long", prompt_len=70),
    generation("one", max_tokens=1),
    generation("two", max_tokens=2),
]


def check_text(asked: Generation, outcome: Outcome) -> None:
    """It is what the LLM alone would say."""
    tokens, _ = decode_alone(LLM, asked.prompt.tolist(), asked.params, asked.max_tokens)
    assert outcome.tokens == tokens, (asked.request_id, outcome)


async def check(stage: Stage, asked: list[Generation]) -> list[Outcome]:
    """Run them all at once: each has its text, and then nobody holds anything."""
    outcomes = await asyncio.gather(*[stage.outcome(one) for one in asked])
    for one, outcome in zip(asked, outcomes, strict=True):
        check_text(one, outcome)
    await stage.settle()
    return outcomes


def items(change: Callable[[DraftedItem], DraftedItem]) -> Answer:
    """Every tree is changed."""
    return lambda reply: replace(reply, items=tuple(map(change, reply.items)))


def scores(value: float) -> Answer:
    """Every score is `value`, also where none was asked for."""
    return items(lambda item: replace(item, scores=np.full(len(item.tokens), value, np.float32)))


def tree_of(num_nodes: int, *, is_chain: bool) -> Answer:
    """Every tree is a chain, or a root with its children, of the same token."""
    tokens, parents = np.full(num_nodes, 3, np.int32), np.arange(num_nodes, dtype=np.int32) * is_chain
    sure = np.zeros(num_nodes, np.float32)
    return items(lambda item: replace(item, tokens=tokens, parents=parents, scores=sure))


def times(forward_ms: float, sample_ms: float = 0.0) -> Answer:
    """Every forward seems to take so long."""
    return lambda reply: replace(reply, forward_ms=forward_ms, sample_ms=sample_ms)


ODD: dict[str, Answer] = {
    "infinite scores": scores(np.inf),
    "no numbers": scores(np.nan),
    "impossible": scores(-np.inf),
    "hopeless": scores(-1e30),
    "sure": scores(0.0),
    "unscored": items(lambda item: replace(item, scores=None)),
    "a score too few": items(lambda item: replace(item, scores=np.zeros(max(0, len(item.tokens) - 1), np.float32))),
    "deep": tree_of(4096, is_chain=True),
    "wide": tree_of(4096, is_chain=False),
    "twins": tree_of(8, is_chain=False),
    "cycles": items(lambda item: replace(item, parents=item.parents + 1)),
    "tokens that are none": items(lambda item: replace(item, tokens=item.tokens + VOCAB_SIZE)),
    "empty": items(lambda item: replace(item, tokens=item.tokens[:0], parents=item.parents[:0], scores=None)),
    "nothing": lambda reply: replace(reply, items=()),
    "thrice": lambda reply: replace(reply, items=reply.items * 3),
    "no time": times(np.nan),
    "for ever": times(np.inf),
    "as good as for ever": times(1.7e308),
    "back in time": times(-1.7e308, -5.0),
    "in no time": times(5e-324),
}


@pytest.mark.parametrize("name", ODD)
async def test_an_odd_ssm_costs_its_part_of_the_tree_only(name: str) -> None:
    """Beside a good one: the text stays, and nothing that was learned breaks the steps behind."""
    odd, good = ssm("odd", 1.0, odd=ODD[name]), ssm("good", 0.7)
    async with running_stage(verifier(), odd, good, policy=DYNAMIC) as stage:
        await check(stage, BATCH)
        proposed = [step.proposed for step in stage.recorder.steps]
    assert any(step.get("good") for step in proposed)


async def test_more_nodes_than_were_asked_for_are_not_looked_at() -> None:
    """Whoever tells too many would make the manager's own part of a step long."""
    async with running_stage(verifier(), ssm("odd", 1.0, odd=ODD["deep"]), policy=DYNAMIC) as stage:
        await check(stage, [generation("r")])
        assert not any(step.num_drafted for step in stage.recorder.steps)
        assert stage.recorder.dropped["malformed_message"] > 0


@pytest.mark.parametrize(
    "size", [FakeSize(context_len=1), FakeSize(context_len=80), FakeSize(num_blocks=6), FakeSize(num_blocks=12)]
)
async def test_an_ssm_may_be_smaller_than_the_llm(size: FakeSize) -> None:
    """What does not fit into its context or cache goes without its drafts."""
    async with running_stage(verifier(), ssm("small", 0.8, replace(size, forward_ms=2.0)), policy=DYNAMIC) as stage:
        await check(stage, BATCH)


@pytest.mark.parametrize("other", [{"prompt_len": 230}, {"ssms": frozenset({"gone"})}])
@pytest.mark.parametrize("draft_ahead", [True, False])
async def test_who_cannot_be_drafted_for_is_not_waited_for(other: dict[str, object], draft_ahead: bool) -> None:
    """A request beyond every SSM's context, or with no SSM of its own, says nothing of what drafts are worth."""
    small = ssm("ssm", 1.0, FakeSize(context_len=200, forward_ms=5.0))
    policy = replace(DYNAMIC, draft_ahead=draft_ahead)
    async with running_stage(verifier(forward_ms=100.0), small, policy=policy) as stage:
        await check(stage, [generation("other", **other)])  # type: ignore[arg-type]
        assert not stage.recorder.dropped
        (outcome,) = await check(stage, [generation("r")])
    assert outcome.steps < 30


def often_late(every: int) -> Callable[[Call], Verdict]:
    """Each `every`-th draft comes when the next steps are over."""
    num_drafts = 0

    def rule(call: Call) -> Verdict:
        nonlocal num_drafts
        num_drafts += call.subject.startswith("ssm")
        if not call.subject.startswith("ssm") or num_drafts % every:
            return Fate.DELIVER
        answered = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, answered.set)
        return answered

    return rule


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_drafts_of_steps_that_are_over_are_followed_or_dropped(every: int) -> None:
    """An answer about an older root holds the newer one's tree, or does not."""
    policy = replace(DYNAMIC, draft_deadline_s=0.002)
    async with running_stage(verifier(), ssm("a", 0.9), policy=policy, rule=often_late(every)) as stage:
        await check(stage, BATCH)


async def test_an_answer_that_does_not_come_is_waited_for_once() -> None:
    """Not in every step that it is missing from: a worker that hangs is not lost for a long time."""

    def rule(call: Call) -> Verdict:
        return Fate.DROP if call.subject.startswith("ssm") else Fate.DELIVER

    policy = replace(DYNAMIC, draft_deadline_s=0.5)
    async with running_stage(verifier(forward_ms=2000.0), ssm("hangs", 1.0), policy=policy, rule=rule) as stage:
        started = asyncio.get_running_loop().time()
        outcome = await stage.outcome(generation("r"))
        took_s = asyncio.get_running_loop().time() - started
    assert outcome.steps == 30
    assert took_s < 4.0  # not 30 times half a second


async def test_who_drafts_for_a_verifier_that_is_not_in_use_drafts_for_nobody() -> None:
    """Another model with another vocabulary waits beside this one, with its SSM: its tokens are none of this one's."""
    model = ScriptedModel(2 * VOCAB_SIZE)
    other = FakeVerifier(model, WorkerId("other"), "other", SMALL)
    theirs = FakeSsm(model, WorkerId("theirs"), "theirs", SMALL)
    async with running_stage(verifier(), other, theirs, policy=DYNAMIC) as stage:
        await check(stage, BATCH)
        assert not any(step.num_drafted for step in stage.recorder.steps)


@dataclass(slots=True)
class TreelessVerifier(FakeVerifier):
    """A verifier that refuses every tree."""

    def step(self, request: VerifyRequest) -> VerifyReply:
        """See FakeVerifier."""
        reply = FakeVerifier.step(self, request)
        has_tree = {item.request_id for item in request.items if len(item.tree_tokens)}
        refused = [RefusedItem(item.request_id, item.step, 0, "malformed_message") for item in request.items]
        return replace(
            reply,
            items=tuple(item for item in reply.items if item.request_id not in has_tree),
            refused=tuple(item for item in refused if item.request_id in has_tree),
        )


async def test_refused_again_and_again_is_an_error_and_not_a_request_for_ever() -> None:
    """Reading the prompt again after each refusal is no progress, however many chunks of it are."""
    refusing = TreelessVerifier(LLM, WorkerId("v"), "llm", FakeSize(forward_ms=20.0))
    async with running_stage(refusing, ssm("a", 1.0), policy=DYNAMIC) as stage:
        outcome = await stage.outcome(generation("r", prompt_len=70))
    assert isinstance(outcome.error, Unavailable)


class _Chaos:
    """Disturbs a stage at random: workers die, come back, forget, are taken for dead; clients go."""

    def __init__(self, stage: Stage, seed: int, running: list[asyncio.Task[Outcome]]) -> None:
        self._stage, self._rng, self._running = stage, random.Random(seed), running
        self._dead: list[FakeAny] = []
        self._num_verifiers = 0

    async def disturb(self) -> None:
        """Once, a few turns of the event loop later."""
        for _ in range(self._rng.randrange(1, 40)):
            await asyncio.sleep(0)
        act = self._rng.choice([self._kill_ssm, self._forget, self._lose, self._cancel, self._kill_verifier])
        act()
        if self._dead and self._rng.random() < 0.7:
            await self._stage.add(self._dead.pop())

    def _kill_ssm(self) -> None:
        ssms = [worker for worker in self._stage.workers if isinstance(worker, FakeSsm)]
        if ssms:
            self._dead.append(self._rng.choice(ssms))
            self._stage.kill(self._dead[-1])

    def _forget(self) -> None:
        for worker in self._stage.workers[:1]:
            worker.forget()

    def _lose(self) -> None:
        for worker in self._stage.workers[-1:]:
            self._stage.registry.lose(worker.worker_id)

    def _cancel(self) -> None:
        if self._rng.random() < 0.1:
            self._rng.choice(self._running).cancel()

    def _kill_verifier(self) -> None:
        if self._rng.random() < 0.2:
            self._num_verifiers += 1
            old = [worker for worker in self._stage.workers if isinstance(worker, FakeVerifier)]
            for worker in old:
                self._stage.kill(worker)
            self._dead.append(verifier(f"verifier-{self._num_verifiers}"))


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_while_drafts_are_under_way(seed: int) -> None:
    """Each request that is not cancelled has its text or one error; then everything is free."""
    policy = replace(DYNAMIC, draft_deadline_s=0.05)
    async with running_stage(verifier(), ssm("a", 0.8), ssm("b", 0.5), policy=policy) as stage:
        running = [asyncio.create_task(stage.outcome(one)) for one in BATCH]
        chaos = _Chaos(stage, seed, running)
        while not all(task.done() for task in running):
            await chaos.disturb()
        for one, task in zip(BATCH, running, strict=True):
            if not task.cancelled() and task.result().error is None:
                check_text(one, task.result())
        if not any(isinstance(worker, FakeVerifier) for worker in stage.workers):
            await stage.add(verifier("last"))
        await check(stage, [generation("then")])  # whoever was taken for dead hears of its new session
