"""The scheduler: budgets hold, prompts are covered exactly, nobody starves, and a step always fits."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_manager.manager.scheduler import Limits, PlannedItem, Standing, StepPlan, fits_alone, plan_step
from treecore.expand import NO_DRAFT, Expansion
from treecore.messages import BlockUsage, RequestId

EXPANSION = Expansion((2, 1, 1))


def limits_of(max_batch: int, step_rows: int, num_blocks: int, block_len: int, max_tree_nodes: int) -> Limits:
    """For an empty cache, and one SSM."""
    return Limits(max_batch, step_rows, BlockUsage(num_blocks, 0, 0, num_blocks, block_len), max_tree_nodes)


limits_of_all_kinds = st.builds(
    limits_of,
    max_batch=st.integers(1, 5),
    step_rows=st.integers(1, 40),
    num_blocks=st.integers(12, 60),
    block_len=st.sampled_from([1, 4, 8]),
    max_tree_nodes=st.integers(1, 9),
)


@dataclass(slots=True)
class Life:
    """One request of the simulation. What it holds at the verifier, nobody else holds."""

    request_id: RequestId
    prompt_len: int
    max_tokens: int
    held_len: int = 0
    held_rows: int = 0
    num_generated: int = 0

    @property
    def final_len(self) -> int:
        return self.prompt_len + self.max_tokens

    @property
    def standing(self) -> Standing:
        committed_len = self.prompt_len + self.num_generated
        return Standing(self.request_id, committed_len, self.held_len, self.held_rows, self.final_len, EXPANSION)

    def do(self, item: PlannedItem, num_accepted: int, limits: Limits) -> None:
        """The step happened: what was sent is held, and a complete item yields tokens within its tree's depth."""
        assert item.start == self.held_len
        self.held_len, self.held_rows = item.end, item.end + limits.num_drafted(item.shape)
        if item.is_complete:
            gained = 1 + min(num_accepted, len(item.shape))
            assert self.num_generated + gained <= self.max_tokens
            self.num_generated += gained

    def lose(self) -> None:
        """It was preempted."""
        self.held_len = self.held_rows = 0


lives = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=8).map(
    lambda shapes: [Life(RequestId(f"r{idx}"), *shape) for idx, shape in enumerate(shapes)]
)


@dataclass(slots=True)
class Day:
    """A verifier's cache and the requests that share it. `over`: blocks of those who left, freed with a message."""

    limits: Limits
    waiting: list[Life]
    running: list[Life] = field(default_factory=list)
    over: int = 0

    def blocks(self) -> BlockUsage:
        held = sum(self.limits.blocks.holding(life.held_rows) for life in self.running)
        used, total = held + self.over, self.limits.blocks.total
        return BlockUsage(total - used, used, 0, total, self.limits.blocks.block_len)

    def step(self, accepted: Callable[[], int]) -> None:
        """Plan, check, do."""
        limits = replace(self.limits, blocks=self.blocks())
        plan = plan_step([life.standing for life in self.running], [life.standing for life in self.waiting], limits)
        check_plan(plan, self, limits)
        self._move(plan)
        by_id = {item.request_id: item for item in plan.items}
        for life in self.running:
            if life.request_id in by_id:
                life.do(by_id[life.request_id], accepted(), limits)
        self.over = 0
        assert self.blocks().free >= 0, "the verifier would have refused"
        done = [life for life in self.running if life.num_generated == life.max_tokens]
        self.over = sum(limits.blocks.holding(life.held_rows) for life in done)
        self.running = [life for life in self.running if life not in done]

    def _move(self, plan: StepPlan) -> None:
        lost = self.running[len(self.running) - len(plan.preempted) :]
        self.running = self.running[: len(self.running) - len(lost)] + self.waiting[: len(plan.admitted)]
        self.waiting = lost + self.waiting[len(plan.admitted) :]
        for life in lost:
            life.lose()


def check_plan(plan: StepPlan, day: Day, limits: Limits) -> None:
    """All that must hold of one plan."""
    num_staying = len(day.running) - len(plan.preempted)
    assert [life.request_id for life in day.waiting[: len(plan.admitted)]] == list(plan.admitted), "in order"
    assert [life.request_id for life in day.running[num_staying:]] == list(plan.preempted), "the youngest go"
    assert not (plan.admitted and plan.preempted), "nobody takes the place of one who has just lost it"
    assert num_staying >= min(1, len(day.running)), "the oldest stays"
    taking_part = [*day.running[:num_staying], *day.waiting[: len(plan.admitted)]]
    assert len(taking_part) <= max(limits.max_batch, len(day.running))
    by_id = {item.request_id: item for item in plan.items}
    assert len(by_id) == len(plan.items)
    assert not taking_part or taking_part[0].request_id in by_id, "the oldest gets on"
    for life in taking_part:
        if life.request_id in by_id:
            check_item(by_id[life.request_id], life.standing, limits)
        assert life.request_id in by_id or is_prompt(life, limits), "who decodes takes part"
    check_budget(plan, {life.request_id for life in taking_part if is_prompt(life, limits)}, limits)


def is_prompt(life: Life, limits: Limits) -> bool:
    """Whether it has more to compute than any accepted run."""
    return life.held_len == 0 or life.standing.num_uncached > limits.max_tree_nodes


def check_budget(plan: StepPlan, prompts: set[RequestId], limits: Limits) -> None:
    """Prompts get what decoding leaves, and a block if that is nothing."""
    rows = {item.request_id: item.end - item.start + limits.num_drafted(item.shape) for item in plan.items}
    decoding = sum(num for request_id, num in rows.items() if request_id not in prompts)
    reading = sum(num for request_id, num in rows.items() if request_id in prompts)
    tree = limits.num_drafted(EXPANSION)  # behind a prompt's last tokens
    assert reading <= max(limits.step_rows - decoding, limits.blocks.block_len) + tree


def check_item(item: PlannedItem, standing: Standing, limits: Limits) -> None:
    """One item against the request's standing."""
    assert item.start == standing.held_len < item.end <= standing.committed_len, "something is always computed"
    assert item.is_complete == (item.end == standing.committed_len)
    assert item.is_complete or item.end % limits.blocks.block_len == 0, "chunks end with a block"
    remaining = standing.final_len - standing.committed_len
    assert item.shape == NO_DRAFT or item.is_complete, "a tree grows behind all that is committed"
    assert len(item.shape) <= remaining - 1 or item.shape == NO_DRAFT, "no node deeper than can be used"
    assert item.shape == EXPANSION[: len(item.shape)]


@given(lives, limits_of_all_kinds, st.randoms(use_true_random=False))
def test_everyone_finishes_within_the_budgets(lives: list[Life], limits: Limits, random: Random) -> None:
    """A whole run: each plan is sound, prompts are covered without gap or repetition, all reach their end.

    In a pool that hardly holds one of them, too: nobody starves, no two evict each other for ever. Once a request is
    the oldest it needs a step for each of its rows at most, and in each step somebody is the oldest.
    """
    day = Day(limits, [life for life in lives if fits_alone(life.final_len, limits.blocks)])
    for _ in range(sum(life.final_len for life in day.waiting)):
        day.step(lambda: random.randint(0, 3))
    assert not day.running
    assert not day.waiting


def standing(name: str, committed_len: int, held_len: int, final_len: int) -> Standing:
    """A request that would draft EXPANSION; no tree is in the cache."""
    return Standing(RequestId(name), committed_len, held_len, held_len, final_len, EXPANSION)


LIMITS = limits_of(max_batch=4, step_rows=10, num_blocks=100, block_len=8, max_tree_nodes=4)


def planned(plan: StepPlan) -> dict[str, tuple[int, int, int, bool]]:
    """Item by request: start, end, depth, complete."""
    return {item.request_id: (item.start, item.end, len(item.shape), item.is_complete) for item in plan.items}


def test_a_prompt_is_read_in_chunks_that_end_with_a_block() -> None:
    """25 tokens with a budget of 10 rows and blocks of 8: three of them, and the last token with the tree behind it."""
    chunks = [planned(plan_step([standing("a", 25, held, 40)], [], LIMITS))["a"] for held in (0, 8, 16, 24)]
    assert chunks == [(0, 8, 0, False), (8, 16, 0, False), (16, 25, 3, True), (24, 25, 3, True)]


def test_a_prompt_in_one_piece_is_not_drafted_for() -> None:
    """The SSM reads the prompt while the LLM does; the first tree comes with the second step."""
    assert planned(plan_step([], [standing("a", 9, 0, 40)], LIMITS)) == {"a": (0, 9, 0, True)}


def test_who_decodes_is_not_slowed_by_a_prompt_before_it() -> None:
    """An accepted run of 3 is sent whole with its tree of 3 nodes at most; a prompt gets what is left of 24 rows."""
    limits = replace(LIMITS, step_rows=24)
    plan = plan_step([standing("prompt", 500, 0, 600), standing("decoding", 53, 50, 90)], [], limits)
    assert planned(plan) == {"decoding": (50, 53, 3, True), "prompt": (0, 16, 0, False)}


def test_a_prompt_gets_on_beside_any_number_of_others() -> None:
    """They take the whole budget: the first prompt gets a block, the next one waits."""
    running = [standing(name, 53, 50, 90) for name in "abcd"]
    prompts = [standing(name, 200, 0, 300) for name in "xy"]
    plan = planned(plan_step([*prompts, *running], [], LIMITS))
    assert plan == dict.fromkeys("abcd", (50, 53, 3, True)) | {"x": (0, 8, 0, False)}


@pytest.mark.parametrize(("final_len", "depth"), [(31, 0), (32, 1), (33, 2), (34, 3), (99, 3)])
def test_trees_are_no_deeper_than_what_may_be_generated(final_len: int, depth: int) -> None:
    """The bonus token takes one of the remaining tokens."""
    assert planned(plan_step([standing("a", 30, 29, final_len)], [], LIMITS))["a"][2] == depth


def test_admission_is_in_order_and_stops_at_the_first_that_does_not_fit() -> None:
    """A small request does not overtake a large one for ever."""
    limits = limits_of(max_batch=4, step_rows=10, num_blocks=20, block_len=8, max_tree_nodes=4)
    waiting = [standing("small", 8, 0, 12), standing("large", 150, 0, 156), standing("tiny", 1, 0, 2)]
    assert plan_step([], waiting, limits).admitted == ("small",)
    assert plan_step([], waiting[1:], limits).admitted == ("large",)


def test_blocks_are_promised_to_nobody_in_advance() -> None:
    """Four that may grow to the whole cache each run together while they are short."""
    limits = limits_of(max_batch=4, step_rows=10, num_blocks=20, block_len=8, max_tree_nodes=4)
    assert len(plan_step([], [standing(name, 9, 0, 160) for name in "abcd"], limits).admitted) == 4


def crowded(room: int, *, block_len: int = 8) -> Limits:
    """A cache of 20 blocks of which `room` can be had."""
    return replace(LIMITS, blocks=BlockUsage(room - room // 2, 20 - room, room // 2, 20, block_len))


def test_the_youngest_are_preempted_when_blocks_run_out() -> None:
    """Each of three needs one block more. None is left: the youngest's five serve the other two; with two left, too."""
    running = [standing(name, 41, 40, 90) for name in "abc"]
    for room in (0, 1, 2):
        plan = plan_step(running, [standing("d", 1, 0, 9)], crowded(room))
        assert [item.request_id for item in plan.items] == ["a", "b"]
        assert (plan.admitted, plan.preempted) == ((), ("c",))
    assert plan_step(running, [], crowded(3)).preempted == ()


def test_under_pressure_trees_go_first_and_the_oldest_keep_theirs() -> None:
    """Tokens fit without a new block, trees of 3 nodes need one each: one is left."""
    running = [standing(name, 40, 39, 90) for name in "abc"]
    plan = plan_step(running, [], crowded(1))
    assert [(item.request_id, len(item.shape)) for item in plan.items] == [("a", 3), ("b", 0), ("c", 0)]
    assert plan.preempted == ()


def test_each_ssm_brings_a_tree() -> None:
    """What must fit is the merged tree, up to the deployment's number of nodes."""
    limits = replace(LIMITS, num_ssms=2, max_tree_nodes=64)
    assert (limits.num_drafted(EXPANSION), replace(limits, max_tree_nodes=9).num_drafted(EXPANSION)) == (12, 8)


def test_nothing_to_do_is_an_empty_plan() -> None:
    """No requests, no step."""
    assert plan_step([], [], LIMITS) == StepPlan((), ())


def test_a_smaller_verifier_takes_the_oldest_that_fit() -> None:
    """The verifier was replaced by one of 5 blocks: two of three go on, the third waits and nobody is admitted."""
    limits = limits_of(max_batch=4, step_rows=100, num_blocks=5, block_len=8, max_tree_nodes=4)
    running = [standing(name, 10, 0, 20) for name in ("a", "b", "c")]
    plan = plan_step(running, [standing("d", 1, 0, 2)], limits)
    assert [item.request_id for item in plan.items] == ["a", "b"]
    assert (plan.admitted, plan.preempted) == ((), ("c",))
