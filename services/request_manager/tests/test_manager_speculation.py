"""Dynamic trees through the real coordinator: drafted ahead, merged from SSMs that come and go, chosen by cost."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from request_manager.contract import Generation
from request_manager.manager.ahead import DraftingAhead
from request_manager.manager.economy import DraftedFor, Economy, StepTimes, Wanted
from request_manager.manager.testing import POLICY, Outcome, Stage, running_stage
from treecore.choice import Bounds, StepPrice
from treecore.codec import decode
from treecore.costs import ForwardCosts
from treecore.forest import Forest, ScoredDraft, merge_drafts
from treecore.messages import Announcement, BlockUsage, DraftRequest, ForwardCost, RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate, Verdict
from treecore.testing.scripted import AgreeingModel, ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

VOCAB_SIZE = 20
LLM = ScriptedModel(VOCAB_SIZE, spread=24.0)  # sure of itself, as are its SSMs
LARGE, SMALL = FakeSize(forward_ms=20.0), FakeSize(forward_ms=2.0)
DYNAMIC = replace(POLICY, dynamic=True, max_tree_nodes=32)
NUM_TOKENS = 40


def verifier() -> FakeVerifier:
    """The LLM."""
    return FakeVerifier(LLM, WorkerId("verifier"), "llm", LARGE)


def ssm(agreement: float, name: str = "ssm") -> FakeSsm:
    """An SSM that agrees with the greedy LLM behind a share of all contexts."""
    model = AgreeingModel(LLM, ScriptedModel(VOCAB_SIZE, sum(name.encode()), spread=24.0), agreement)
    return FakeSsm(model, WorkerId(f"{name}-worker"), name, SMALL)


def generation(name: str = "r", prompt_len: int = 4, **fields: object) -> Generation:
    """A greedy request of NUM_TOKENS tokens."""
    prompt = np.array([*[1] * (prompt_len - 3), 2, 3, len(name)], np.int32)
    params = SamplingParams(0.0, 0, 1.0, Seed(5), prompt_len=prompt_len)
    one = Generation(RequestId(name), prompt, params, NUM_TOKENS)
    return replace(one, **fields)  # type: ignore[arg-type]


async def check(stage: Stage, *generations: Generation) -> list[Outcome]:
    """Run them all at once; each gets what the LLM alone would say."""
    outcomes = await asyncio.gather(*[stage.outcome(one) for one in generations])
    for one, outcome in zip(generations, outcomes, strict=True):
        tokens, _ = decode_alone(LLM, one.prompt.tolist(), one.params, one.max_tokens)
        assert outcome.tokens == tokens
    await stage.settle()
    return outcomes


async def test_drafts_are_made_while_the_llm_is_at_work() -> None:
    """With an SSM that is always right, all trees but the first were drafted ahead, and few steps are left."""
    async with running_stage(verifier(), ssm(1.0), policy=DYNAMIC) as stage:
        (outcome,) = await check(stage, generation())
        steps = stage.recorder.steps
    assert outcome.steps < NUM_TOKENS / 2
    assert sum(step.num_hidden for step in steps) >= sum(step.num_trees for step in steps) - 2 > 0


async def test_a_request_can_do_without_drafts_ahead() -> None:
    """Its trees are all asked for, and waited for, in the step."""
    async with running_stage(verifier(), ssm(1.0), policy=DYNAMIC) as stage:
        await check(stage, generation(draft_ahead=False))
        steps = stage.recorder.steps
    assert sum(step.num_hidden for step in steps) == 0 < sum(step.num_trees for step in steps)


async def test_ssms_come_and_go_while_requests_run() -> None:
    """A second SSM is used as soon as it is there, and missed by nobody when it is gone; each is counted by name."""
    first, second = ssm(0.3, "first"), ssm(1.0, "second")
    async with running_stage(verifier(), first, policy=DYNAMIC) as stage:
        running = asyncio.create_task(check(stage, *[generation(f"r{idx}", max_tokens=200) for idx in range(3)]))
        await stage.until(lambda: len(stage.recorder.steps) > 10)
        assert all(set(step.proposed) <= {"first"} for step in stage.recorder.steps)
        await stage.add(second)
        await stage.until(lambda: any(step.accepted.get("second") for step in stage.recorder.steps))
        stage.kill(second)
        num_steps = len(stage.recorder.steps)
        await running
        late = stage.recorder.steps[num_steps + 2 :]
    assert late
    assert not any(step.proposed.get("second") for step in late)


@pytest.mark.parametrize("prompt_len", [4, 150])
async def test_a_slow_ssm_costs_its_part_of_the_tree_only(prompt_len: int) -> None:
    """While one SSM's answers never come, the other drafts on."""
    slow, quick = ssm(1.0, "slow"), ssm(1.0, "quick")

    def rule(call: Call) -> Verdict:
        return Fate.LOSE_REPLY if call.subject.startswith("ssm.slow") else Fate.DELIVER

    async with running_stage(verifier(), slow, quick, policy=replace(DYNAMIC, draft_deadline_s=0.2)) as stage:
        stage.bus.rule = rule
        (outcome,) = await check(stage, generation(prompt_len=prompt_len))
        accepted = [step.accepted for step in stage.recorder.steps]
    assert outcome.steps < NUM_TOKENS
    assert any(step.get("quick") for step in accepted)
    assert not any(step.get("slow") for step in accepted)


async def test_no_tree_is_asked_for_behind_a_prompt_that_the_ssm_has_yet_to_read() -> None:
    """It reads beside the LLM, then drafts: no step waits for the reading."""
    brought: list[int] = []

    def rule(call: Call) -> Verdict:
        if call.subject.startswith("ssm."):
            items = decode(call.body, DraftRequest).items
            brought.extend(len(item.tokens) for item in items if item.growth is not None)
        return Fate.DELIVER

    async with running_stage(verifier(), ssm(1.0), policy=DYNAMIC) as stage:
        stage.bus.rule = rule
        (outcome,) = await check(stage, generation(prompt_len=150))
    assert outcome.steps < NUM_TOKENS / 2
    assert max(brought) <= 64


async def test_where_no_draft_pays_ssms_read_for_one_request_at_a_time() -> None:
    """An SSM that shares the LLM's cores must not slow it down by reading what nobody will ask it for."""
    read: set[RequestId] = set()

    def rule(call: Call) -> Verdict:
        if call.subject.startswith("ssm."):
            read.update(item.request_id for item in decode(call.body, DraftRequest).items)
        return Fate.DELIVER

    dear = FakeVerifier(LLM, WorkerId("verifier"), "llm", FakeSize(forward_ms=20.0, row_ms=20.0))
    async with running_stage(dear, ssm(1.0), policy=DYNAMIC) as stage:
        stage.bus.rule = rule
        running = asyncio.create_task(check(stage, *[generation(f"r{idx}", 150, max_tokens=99) for idx in range(4)]))
        await stage.until(lambda: sum(step.num_requests == 4 for step in stage.recorder.steps) > 40)
        assert len(read) == 1
        await running


# -- what is learned ------------------------------------------------------------------------------------------------

BLOCKS = BlockUsage(1, 0, 0, 1, 16)


def announcement(kind: str, costs: dict[int, float]) -> Announcement:
    """A worker whose forwards cost so much, by rows."""
    points = tuple(ForwardCost(rows, ms) for rows, ms in costs.items())
    return Announcement(WorkerId(kind), kind, kind, VOCAB_SIZE, 99, (), BLOCKS, leaving=False, costs=points)  # type: ignore[arg-type]


def likely(p: float) -> Forest:
    """A chain of three nodes, each as likely behind the one before."""
    draft = ScoredDraft(
        1, np.array([4, 5, 6], np.int32), np.arange(3, dtype=np.int32), np.full(3, np.log(p), np.float32)
    )
    return merge_drafts([3], [[draft]])


ONE, NONE = np.array([True]), np.array([False])
NOBODY = DraftedFor((), NONE, NONE, NONE)
BOUNDS = Bounds(32, 8, 512)


def num_chosen(economy: Economy, llm: Announcement, forest: Forest) -> int:
    """How many nodes are verified below the root."""
    return economy.choose(forest, BOUNDS, economy.price(llm, 0, 0), 0.0).choice.num_rows - 1


def test_nodes_are_verified_where_they_pay() -> None:
    """Where rows are nearly free all are, unless they are hopeless; where each costs a step none is."""
    free, dear = announcement("verifier", {1: 20.0, 64: 20.5}), announcement("verifier", {1: 20.0, 2: 40.0, 64: 1280.0})
    assert num_chosen(Economy(), free, likely(0.5)) == 3
    assert num_chosen(Economy(), dear, likely(0.6)) == 0
    assert num_chosen(Economy(), free, likely(1e-9)) == 0


def test_what_is_expected_is_of_nodes_alone() -> None:
    """Roots, and requests whose trees are not chosen, bring a token whatever is chosen; it is not counted."""
    economy, llm = Economy(), announcement("verifier", {1: 20.0, 64: 20.5})
    for num_others in (0, 3):
        chosen = economy.choose(likely(0.5), BOUNDS, economy.price(llm, num_others, num_others), 0.0)
        p = 0.85 * 0.5 / (1 - 0.85 * 0.5)  # odds of a node, as little as is believed before anything was seen
        p /= 1 + p
        assert chosen.num_expected == pytest.approx(p + p**2 + p**3)
    dear = announcement("other", {1: 20.0, 2: 40.0, 64: 1280.0})
    assert economy.choose(likely(0.5), BOUNDS, economy.price(dear, 0, 0), 0.0).num_expected == 0


def test_an_ssm_that_is_never_right_is_not_believed_for_long() -> None:
    """Its claims stay what they were; what they are worth is learned."""
    economy, llm = Economy(), announcement("verifier", {1: 20.0, 4: 24.0, 64: 200.0})
    assert num_chosen(economy, llm, likely(0.6)) > 0
    for _ in range(60):
        chosen = economy.choose(likely(0.6), BOUNDS, economy.price(llm, 0, 0), 0.0)
        economy.learn(llm, chosen, NOBODY, [[9]], StepTimes(23.0, 20.0, 0.0))
    assert num_chosen(economy, llm, likely(0.6)) == 0


def ahead_after(share: float, beside_ms: float = 25.0, late_ms: float = 0.0) -> DraftingAhead:
    """Having drafted ahead for 200 steps: of nodes that likely, beside an LLM that takes 25 ms alone."""
    ahead = DraftingAhead()
    for _ in range(200):
        ahead.learn_drafts(likely(share), np.array([1.0, share, share**2, share**3]), ONE, 1, late_ms)
        ahead.learn_forward(FLAT, 1, 25.0, beside_drafts=False)
        ahead.learn_forward(FLAT, 1, beside_ms, beside_drafts=True)
    return ahead


def num_asked(ahead: DraftingAhead, verify: ForwardCosts, num_requests: int = 1) -> int:
    """In how many of 64 steps."""
    price = StepPrice(verify, 2.0)
    return sum(ahead.is_due(pays=ahead.pays(price, num_requests)) for _ in range(64))


FLAT, STEEP = ForwardCosts([ForwardCost(1, 25.0)]), ForwardCosts([ForwardCost(1, 25.0), ForwardCost(2, 50.0)])


def test_drafting_ahead_stops_where_it_brings_nothing_but_is_tried_again() -> None:
    """An SSM that shares the LLM's cores must not slow it down for nothing."""
    assert num_asked(DraftingAhead(), FLAT) >= 60
    assert 1 <= num_asked(ahead_after(0.01), FLAT) <= 8


@pytest.mark.parametrize(("beside_ms", "pays"), [(25.0, True), (50.0, False)])
def test_drafting_ahead_stops_where_it_slows_the_llm_more_than_it_brings(beside_ms: float, pays: bool) -> None:
    """The same gain pays beside an LLM that does not notice, and not beside one that takes twice as long."""
    found = num_asked(ahead_after(0.4, beside_ms), FLAT)
    assert (found >= 60) == pays
    assert 0 < found < 64, "the other way is tried now and then"


def test_waiting_for_late_drafts_is_a_cost_of_drafting_ahead() -> None:
    """As is a slower LLM."""
    assert num_asked(ahead_after(0.6), FLAT) >= 60
    assert num_asked(ahead_after(0.6, late_ms=60.0), FLAT) < 8


def test_the_llm_is_not_slowed_down_by_being_dearer_than_was_known() -> None:
    """What forwards beside drafts took is held against what forwards are known to cost by now, not then."""
    ahead = DraftingAhead()
    for _ in range(200):
        ahead.learn_drafts(likely(0.4), np.array([1.0, 0.4, 0.16, 0.064]), ONE, 1, 0.0)
    for _ in range(64):
        ahead.learn_forward(FLAT, 1, 50.0, beside_drafts=True)
    for _ in range(64):
        ahead.learn_forward(ForwardCosts([ForwardCost(1, 50.0)]), 1, 50.0, beside_drafts=False)
    assert num_asked(ahead, FLAT) >= 60


def test_a_slow_minute_of_the_machine_is_not_what_drafts_ahead_cost() -> None:
    """Forwards beside drafts that fell into it are held against those alone that did, not against later ones."""
    ahead = ahead_after(0.4)
    for step in range(200):
        ahead.learn_forward(FLAT, 1, 50.0, beside_drafts=step % 32 != 0)
    for _ in range(200):
        ahead.learn_forward(FLAT, 1, 25.0, beside_drafts=False)
    assert num_asked(ahead, FLAT) >= 60


def test_what_drafts_ahead_are_worth_holds_for_any_load() -> None:
    """Where every row costs its full price they do not pay; they do again as soon as that is over."""
    ahead = ahead_after(0.6)
    assert num_asked(ahead, STEEP, num_requests=8) < 8
    assert num_asked(ahead, FLAT) >= 60


def test_late_drafts_are_waited_for_as_long_as_they_are_worth() -> None:
    """Never longer than half a verification; not at all where nothing is to come of them. A standard error is added."""
    price = StepPrice(FLAT, 0.0)
    assert ahead_after(0.9).patience_ms(price, 1) == pytest.approx(12.5)
    assert ahead_after(0.2).patience_ms(price, 1) == pytest.approx(25.0 * (0.2 + 0.04 + 0.008) * 1.16, rel=0.05)
    assert ahead_after(0.9).patience_ms(StepPrice(STEEP, 0.0), 8) < 1.0


def test_rows_that_the_llm_had_in_its_cache_are_not_what_its_time_went_into() -> None:
    """Prompts that are found, 400 rows of 500, say nothing of what rows cost."""
    economy, llm = Economy(), announcement("verifier", {1: 20.0, 100: 120.0})
    for _ in range(100):
        chosen = economy.choose(likely(0.01), BOUNDS, economy.price(llm, 500, 8), 0.0)
        economy.learn(llm, chosen, NOBODY, [[9]], StepTimes(125.0, 120.0, 0.0, num_found=chosen.choice.num_rows - 100))
    assert economy.price(llm, 0, 0).verify.ms(1) == pytest.approx(20.0, rel=0.05)


def test_what_slow_ssms_cost_is_not_held_against_others() -> None:
    """An SSM beside which the LLM crawls, and one that it does not notice: only the second one drafts ahead."""
    economy, llm = Economy(), announcement("verifier", {1: 25.0})
    slow, quick = announcement("slow", {1: 4.0}), announcement("quick", {1: 4.0})
    for _ in range(100):
        for ssm, beside_ms in ((slow, 100.0), (quick, 25.0)):
            chosen = economy.choose(likely(0.4), BOUNDS, economy.price(llm, 0, 0), 0.0)
            drafted, hit = DraftedFor([ssm], NONE, ONE, ONE), int(chosen.forest.tokens[1])
            for ms, beside in ((beside_ms, True), (25.0, False)):
                economy.learn(llm, chosen, drafted, [[hit, 9]], StepTimes(ms + 2.0, ms, 0.0, beside_drafts=beside))
    asked = [
        sum(economy.beside_llm(llm, [ssm], 1, 1, 1).growth is not None for _ in range(64)) for ssm in (slow, quick)
    ]
    assert asked[0] < 8
    assert asked[0] < asked[1]


def test_what_is_drafted_ahead_fits_into_the_verification() -> None:
    """Fewer forwards of a slower SSM, one at least; as wide as makes most nodes in that time, but not too flat."""
    llm = announcement("verifier", {1: 30.0})

    def asked(costs: dict[int, float]) -> tuple[int, int]:
        growth = Economy().beside_llm(llm, [announcement("ssm", costs)], 1, 1, 1).growth
        assert growth is not None
        return growth.num_forwards, growth.width

    assert asked({1: 4.0, 8: 4.4}) == (5, 8)
    assert asked({1: 4.0, 2: 4.4, 4: 6.3, 8: 8.0}) == (3, 6)
    assert asked({1: 4.0, 2: 8.0, 4: 16.0, 8: 32.0}) == (5, 1)
    assert asked({1: 70.0, 4: 280.0}) == (1, 1)


def test_a_draft_is_waited_for_where_the_llm_is_slow() -> None:
    """A draft that takes as long as the LLM is not worth its wait; one that takes a twentieth is."""
    llm = announcement("verifier", {1: 100.0, 64: 120.0})

    def waits(ssm_ms: float) -> bool:
        economy = Economy()
        price = economy.price(llm, 0, 0)
        return economy.growth_to_wait_for(price, [announcement("ssm", {1: ssm_ms})], Wanted(1, 1, 1, 8)) is not None

    assert waits(5.0)
    assert not waits(100.0)
    assert Economy().growth_to_wait_for(Economy().price(llm, 0, 0), [], Wanted(1, 1, 1, 8)) is None
