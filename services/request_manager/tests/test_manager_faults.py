"""The manager under faults: each request gets its full right text or one typed error; every cache comes back empty."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from request_manager.contract import Generation
from request_manager.manager.testing import POLICY, Outcome, Stage, running_stage
from treecore.errors import Overloaded, Unavailable
from treecore.messages import DraftedItem, DraftItem, RefusedItem, RequestId, VerifiedItem, VerifyItem, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate, Rule, Verdict, fail_nth
from treecore.testing.scripted import AgreeingModel, ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

VOCAB_SIZE = 20
LLM = ScriptedModel(VOCAB_SIZE)
SSM = AgreeingModel(LLM, ScriptedModel(VOCAB_SIZE, seed=1), 0.7)
SIZE = FakeSize()
MAX_TOKENS = 10


def verifier(name: str = "verifier", size: FakeSize = SIZE) -> FakeVerifier:
    """The LLM."""
    return FakeVerifier(LLM, WorkerId(name), "llm", size)


def ssm(name: str = "ssm") -> FakeSsm:
    """An SSM that is right two times out of three."""
    return FakeSsm(SSM, WorkerId(name), name, SIZE)


def generation(idx: int, max_tokens: int = MAX_TOKENS, prompt_len: int | None = None) -> Generation:
    """Request `idx`: every second one is greedy; prompts of different lengths, one of them in several chunks."""
    prompt = np.arange(prompt_len or 3 + 31 * (idx % 3), dtype=np.int32) % VOCAB_SIZE
    params = SamplingParams(0.9 * (idx % 2), 0, 1.0, Seed(idx))
    return Generation(RequestId(f"r{idx}"), prompt, params, max_tokens)


def alone(asked: Generation) -> Outcome:
    """What must come out; steps are free."""
    return Outcome(*decode_alone(LLM, asked.prompt.tolist(), asked.params, asked.max_tokens))


BATCH = [generation(idx) for idx in range(4)]


async def check_all(stage: Stage, asked: list[Generation] = BATCH) -> None:
    """Everyone gets the right text, and then nobody holds anything."""
    outcomes = await asyncio.gather(*[stage.outcome(one) for one in asked])
    assert [replace(outcome, steps=0) for outcome in outcomes] == [alone(one) for one in asked]
    await stage.settle()


@pytest.mark.parametrize("fate", [Fate.REFUSE, Fate.LOSE_REPLY])
async def test_any_one_call_may_fail(fate: Fate) -> None:
    """The n-th message is refused, or answered in vain, for n = 1, 2, ... until no call is left to fail."""
    number, num_calls = 1, 1
    while number <= num_calls:
        async with running_stage(verifier(), ssm("a"), ssm("b"), rule=fail_nth(number, fate)) as stage:
            await check_all(stage)
        number, num_calls = number + 1, stage.bus.num_calls
    assert number > 10


def at_call(number: int, act: Callable[[], object], verdict: Verdict = Fate.DELIVER) -> Rule:
    """Something happens just before the n-th message goes out."""

    def rule(call: Call) -> Verdict:
        if call.number != number:
            return Fate.DELIVER
        act()
        return verdict

    return rule


async def at_every_call(disturb: Callable[[Stage, int], None], *makers: Callable[[], FakeSsm | FakeVerifier]) -> None:
    """Run BATCH with a disturbance at call 1, 2, ..., until one comes too late to be noticed."""
    number, num_calls = 1, 1
    while number <= num_calls:
        policy = replace(POLICY, draft_deadline_s=0.02)
        async with running_stage(*[make() for make in makers], policy=policy) as stage:
            disturb(stage, number)
            await check_all(stage)
        number, num_calls = number + 1, stage.bus.num_calls


async def test_workers_may_forget_everything_at_any_time() -> None:
    """StateMissing: the tokens are sent again, whole; the text does not change."""

    def forget(stage: Stage, number: int) -> None:
        stage.bus.rule = at_call(number, lambda: [worker.forget() for worker in stage.workers])

    await at_every_call(forget, verifier, ssm)


async def test_the_verifier_may_die_in_mid_step() -> None:
    """It never answers again; another one takes over with a prefill from the manager's own tokens."""
    tasks: set[asyncio.Task[None]] = set()

    async def replace_it(stage: Stage) -> None:
        stage.kill(stage.workers[0])
        await stage.add(verifier("next"))

    def die(stage: Stage, number: int) -> None:
        def act() -> None:
            tasks.add(asyncio.create_task(replace_it(stage)))

        stage.bus.rule = at_call(number, act)

    await at_every_call(die, verifier)
    await asyncio.gather(*tasks)


async def test_the_ssm_may_die_at_any_time() -> None:
    """Only speed is lost, whether it dies before it answers or after."""

    def die(stage: Stage, number: int) -> None:
        stage.bus.rule = at_call(number, lambda: asyncio.get_running_loop().call_soon(stage.kill, stage.workers[1]))

    await at_every_call(die, verifier, ssm)


async def test_the_link_may_break_at_any_time() -> None:
    """A broker restart: what is under way fails at once, and everything goes on when the link is back."""

    def blink(stage: Stage, number: int) -> None:
        def act() -> None:
            stage.bus.disconnect()
            asyncio.get_running_loop().call_soon(stage.bus.reconnect)

        stage.bus.rule = at_call(number, act)

    await at_every_call(blink, verifier, ssm)


async def test_an_ssm_that_is_lost_for_a_while_frees_what_is_over() -> None:
    """It was only silent and holds its requests still; when it is back it forgets those that ended meanwhile."""
    drafter = ssm()
    async with running_stage(verifier(), drafter) as stage:
        stage.bus.rule = at_call(5, lambda: stage.kill(drafter))
        await check_all(stage)
        assert drafter.held_ids
        await stage.add(drafter)
        await check_all(stage, [generation(9)])


async def test_a_verifier_that_is_lost_for_a_while_frees_what_is_over() -> None:
    """Requests move to the other verifier and end there; the first one forgets them as soon as it is used again."""
    first = verifier("first")
    async with running_stage(first, verifier("second")) as stage:
        stage.bus.rule = at_call(4, lambda: stage.kill(first), Fate.REFUSE)
        await check_all(stage)
        assert first.held_ids
        await stage.add(first)
        stage.kill(stage.workers[0])
        await check_all(stage, [generation(9)])
        assert stage.workers == [first]


async def test_a_smaller_verifier_serves_everyone_in_turn() -> None:
    """Not all requests that run fit into the next verifier: they take turns, and one that can never fit is told so."""
    small = verifier("small", FakeSize(num_blocks=14))
    asked = [*BATCH, generation(7, max_tokens=400)]
    async with running_stage(verifier()) as stage:

        def swap() -> None:
            stage.kill(stage.workers[0])
            asyncio.get_running_loop().create_task(stage.add(small))

        stage.bus.rule = at_call(3, swap)
        outcomes = await asyncio.gather(*[stage.outcome(one) for one in asked])
        await stage.settle()
    assert [replace(outcome, steps=0) for outcome in outcomes[:-1]] == [alone(one) for one in BATCH]
    assert isinstance(outcomes[-1].error, Unavailable)


# -- late drafts ------------------------------------------------------------------------------------------------------


def hold_ssms_from(number: int, gate: asyncio.Event) -> Rule:
    """Messages to SSMs wait for `gate` from the n-th call on."""
    return lambda call: gate if call.subject.startswith("ssm") and call.number >= number else Fate.DELIVER


@pytest.mark.parametrize("number", range(1, 6))
async def test_late_drafts_are_not_waited_for(number: int) -> None:
    """Past the deadline the root alone is verified; nobody is asked twice while an answer is owed."""
    gate = asyncio.Event()
    policy = replace(POLICY, draft_deadline_s=0.0)
    async with running_stage(verifier(), ssm(), policy=policy, rule=hold_ssms_from(number, gate)) as stage:
        outcomes = await asyncio.gather(*[stage.outcome(one) for one in BATCH])
        assert [replace(outcome, steps=0) for outcome in outcomes] == [alone(one) for one in BATCH]
        assert stage.recorder.dropped["no_draft"] > 0
        gate.set()
        await stage.settle()


async def test_an_ssm_that_comes_too_late_to_be_told_is_told_when_it_answers() -> None:
    """It was busy when the last request ended: its cache is freed without a new request coming in."""
    gate = asyncio.Event()
    drafter = ssm()
    policy = replace(POLICY, draft_deadline_s=0.0)
    async with running_stage(verifier(), drafter, policy=policy) as stage:
        stage.bus.rule = hold_ssms_from(1, gate)
        await stage.outcome(generation(2))
        assert not drafter.held_ids
        gate.set()
        await stage.until(lambda: drafter.num_steps > 0)
        await stage.settle()


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_a_request_may_be_cancelled_at_any_time() -> None:
    """Cancelled just before the n-th message, for every n: the others are untouched, its cache is freed."""
    number, num_calls = 1, 1
    while number <= num_calls:
        async with running_stage(verifier(), ssm()) as stage:
            tasks = [asyncio.create_task(stage.outcome(one)) for one in BATCH]
            stage.bus.rule = at_call(number, tasks[1].cancel)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await stage.settle()
        others = [replace(outcome, steps=0) for outcome in outcomes if isinstance(outcome, Outcome)]
        assert [alone(BATCH[idx]) for idx in (0, 2, 3)] == [other for other in others if other != alone(BATCH[1])]
        number, num_calls = number + 1, stage.bus.num_calls


@pytest.mark.parametrize("num_deltas", range(4))
async def test_closing_the_iterator_cancels(num_deltas: int) -> None:
    """The gateway closes the stream behind its n-th delta: nothing runs on."""
    async with running_stage(verifier(), ssm()) as stage:
        stream = stage.manager.generate(generation(1, max_tokens=3000))
        for _ in range(num_deltas):
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await stage.settle()
        assert sum(record.num_committed for record in stage.recorder.steps) < 100


async def test_a_waiting_request_may_be_cancelled() -> None:
    """It never ran, and nobody hears of it."""
    async with running_stage(verifier(), policy=replace(POLICY, max_batch=1)) as stage:
        tasks = [asyncio.create_task(stage.outcome(one)) for one in BATCH]
        await stage.until(lambda: stage.recorder.load == (1, 3))
        tasks[2].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await stage.settle()
    assert [isinstance(outcome, Outcome) for outcome in outcomes] == [True, True, False, True]


# -- overload, and workers that misbehave -----------------------------------------------------------------------------


async def test_overload_is_told_at_once_and_admits_nothing() -> None:
    """More than may wait are refused; those who were admitted are served."""
    async with running_stage(verifier(), policy=replace(POLICY, max_batch=1, max_waiting=2)) as stage:
        outcomes = await asyncio.gather(*[stage.outcome(one) for one in BATCH])
        await stage.settle()
    errors = [outcome.error for outcome in outcomes]
    assert [isinstance(error, Overloaded) for error in errors] == [False, False, True, True]
    assert all(error.retry_after_s > 0 for error in errors if isinstance(error, Overloaded))


async def test_a_request_that_can_never_fit_is_told_so() -> None:
    """Longer than the whole cache: one typed error; the next in line is served."""
    async with running_stage(verifier(size=FakeSize(num_blocks=8)), ssm()) as stage:
        outcomes = await asyncio.gather(stage.outcome(generation(0, max_tokens=500)), stage.outcome(BATCH[0]))
        await stage.settle()
    assert isinstance(outcomes[0].error, Unavailable)
    assert replace(outcomes[1], steps=0) == alone(BATCH[0])


@dataclass(slots=True)
class WildSsm(FakeSsm):
    """Proposes whatever a broken SSM might: ids outside the vocabulary, negative ones, no trees, far too much."""

    def _draft(self, item: DraftItem, ssm_idx: int) -> DraftedItem | RefusedItem:
        rng = np.random.default_rng(item.step)
        num = int(rng.integers(1, 3 if item.step % 2 else 500))
        tokens = rng.integers(-1 if item.step % 3 == 0 else 0, VOCAB_SIZE + 3, num)
        parents = [int(rng.integers(0, node + 1 + (item.step % 5 == 0))) for node in range(num)]
        return DraftedItem(item.request_id, item.step, tokens.astype(np.int32), np.array(parents, np.int32))


async def test_a_broken_ssm_harms_nobody() -> None:
    """Beside a sound SSM: the text is right and the budget of nodes holds."""
    wild = WildSsm(SSM, WorkerId("wild"), "wild", SIZE)
    async with running_stage(verifier(), wild, ssm()) as stage:
        await check_all(stage, [generation(idx, max_tokens=40) for idx in range(4)])
        assert stage.recorder.dropped["malformed_message"] > 0
        assert all(
            record.num_drafted <= record.num_requests * (POLICY.max_tree_nodes - 1) for record in stage.recorder.steps
        )


Spoil = Callable[[VerifiedItem], VerifiedItem | RefusedItem]


@dataclass(slots=True)
class WildVerifier(FakeVerifier):
    """Answers request r1 wrongly, every time."""

    spoil: Spoil = lambda answer: answer

    def _verify(self, item: VerifyItem) -> VerifiedItem | RefusedItem:
        answer = super(WildVerifier, self)._verify(item)
        return self.spoil(answer) if item.request_id == "r1" and isinstance(answer, VerifiedItem) else answer


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: replace(answer, step=answer.step + 1),
        lambda answer: replace(answer, request_id=RequestId("nobody")),
        lambda answer: replace(answer, tokens=np.append(answer.tokens, np.int32(1))),
        lambda answer: replace(answer, tokens=np.full(len(answer.tokens) or 1, -1, np.int32)),
        lambda answer: replace(answer, tokens=np.full(len(answer.tokens) or 1, VOCAB_SIZE, np.int32)),
        lambda answer: RefusedItem(answer.request_id, answer.step, 0, "out_of_blocks"),
        lambda answer: RefusedItem(answer.request_id, answer.step, 10**6, "malformed_message"),
        lambda answer: RefusedItem(answer.request_id, answer.step, -7, "state_missing"),
    ],
    ids=["step", "request", "too many", "negative", "vocabulary", "out of blocks", "malformed", "state missing"],
)
async def test_a_request_that_is_always_answered_wrongly_ends_with_one_error(spoil: Spoil) -> None:
    """Retried a few times, then told; nothing wrong is committed and the others do not notice."""
    async with running_stage(WildVerifier(LLM, WorkerId("v"), "llm", SIZE, spoil=spoil), ssm()) as stage:
        outcomes = await asyncio.gather(*[stage.outcome(one) for one in BATCH])
        await stage.settle()
    assert isinstance(outcomes[1].error, Unavailable)
    assert outcomes[1].tokens == ()
    for idx in (0, 2, 3):
        assert replace(outcomes[idx], steps=0) == alone(BATCH[idx])


async def test_a_verifier_that_stumbles_now_and_then_is_borne_with() -> None:
    """Every second answer is of another step: dropped, counted, asked again."""
    stumbles = iter(range(10**6))

    def spoil(answer: VerifiedItem) -> VerifiedItem:
        return replace(answer, step=answer.step + next(stumbles) % 2)

    async with running_stage(WildVerifier(LLM, WorkerId("v"), "llm", SIZE, spoil=spoil)) as stage:
        await check_all(stage)
        assert stage.recorder.dropped["other_step"] > 3


async def test_requests_wait_for_the_first_verifier() -> None:
    """Admitted before any verifier is there (a restart): a pause, not an error."""
    async with running_stage() as stage:
        request = stage.coordinator.submit(generation(0), asyncio.Queue())
        await asyncio.sleep(0)
        await stage.add(verifier())
        await stage.until(lambda: request.finish_reason is not None)
        await stage.settle()
    assert tuple(request.committed[3:]) == alone(generation(0)).tokens


async def test_no_model_card_without_a_verifier() -> None:
    """Unavailable until one announces itself; a restart later does not take the card away."""
    async with running_stage() as stage:
        assert not stage.manager.is_ready()
        with pytest.raises(Unavailable):
            stage.manager.card()
        first = verifier()
        await stage.add(first)
        card = stage.manager.card()
        stage.kill(first)
        assert stage.manager.card() == card
        assert not stage.manager.is_ready()
