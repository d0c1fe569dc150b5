"""The scheduler: budgets hold, prompts are covered exactly, nobody starves, and what is admitted always fits."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_manager.manager.scheduler import Limits, PlannedItem, Standing, StepPlan, plan_step, reserved_blocks
from treecore.expand import NO_DRAFT, Expansion
from treecore.messages import RequestId

EXPANSION = Expansion((2, 1, 1))

limits_of_all_kinds = st.builds(
    Limits,
    max_batch=st.integers(1, 5),
    prefill_rows=st.integers(1, 40),
    num_blocks=st.integers(12, 60),
    block_len=st.sampled_from([1, 4, 8]),
    max_tree_nodes=st.integers(1, 9),
)


@dataclass(slots=True)
class Life:
    """One request of the simulation."""

    request_id: RequestId
    prompt_len: int
    max_tokens: int
    held_len: int = 0
    num_generated: int = 0

    @property
    def final_len(self) -> int:
        return self.prompt_len + self.max_tokens

    @property
    def standing(self) -> Standing:
        committed_len = self.prompt_len + self.num_generated
        return Standing(self.request_id, committed_len, self.held_len, self.final_len, EXPANSION)

    def do(self, item: PlannedItem, num_accepted: int) -> None:
        """The step happened: what was sent is held, and a complete item yields tokens within its tree's depth."""
        assert item.start == self.held_len
        self.held_len = item.end
        if item.is_complete:
            gained = 1 + min(num_accepted, len(item.expansion))
            assert self.num_generated + gained <= self.max_tokens
            self.num_generated += gained


lives = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=8).map(
    lambda shapes: [Life(RequestId(f"r{idx}"), *shape) for idx, shape in enumerate(shapes)]
)


def check_plan(plan: StepPlan, running: list[Life], waiting: list[Life], limits: Limits) -> None:
    """All that must hold of one plan."""
    admitted = waiting[: len(plan.admitted)]
    assert [life.request_id for life in admitted] == list(plan.admitted), "admission in order"
    taking_part = {life.request_id: life for life in [*running, *admitted]}
    assert {item.request_id for item in plan.items} == set(taking_part), "everyone who runs takes part, once"
    assert len(plan.items) == len(taking_part) <= max(limits.max_batch, len(running))
    reserved = sum(reserved_blocks(life.final_len, limits) for life in taking_part.values())
    assert reserved <= limits.num_blocks, "what is admitted fits to its end"
    for item in plan.items:
        check_item(item, taking_part[item.request_id].standing)
    num_rows = sum(item.end - item.start for item in plan.items)
    assert num_rows <= limits.prefill_rows + len(plan.items), "a row each beyond the budget at most"


def check_item(item: PlannedItem, standing: Standing) -> None:
    """One item against the request's standing."""
    assert item.start == standing.held_len < item.end <= standing.committed_len, "something is always computed"
    assert item.is_complete == (item.end == standing.committed_len)
    remaining = standing.final_len - standing.committed_len
    assert item.expansion == NO_DRAFT or item.is_complete, "a tree grows behind all that is committed"
    assert len(item.expansion) <= remaining - 1 or item.expansion == NO_DRAFT, "no node deeper than can be used"
    assert item.expansion == EXPANSION[: len(item.expansion)]


@given(lives, limits_of_all_kinds, st.randoms(use_true_random=False))
def test_everyone_finishes_within_the_budgets(lives: list[Life], limits: Limits, random: "st.DataObject") -> None:
    """A whole run: each plan is sound, prompts are covered without gap or repetition, all that fit reach their end."""
    waiting = [life for life in lives if reserved_blocks(life.final_len, limits) <= limits.num_blocks]
    wanted, running, done = len(waiting), [], []
    bound = sum(life.final_len for life in waiting) + 1  # every step computes at least one row of each that runs
    for _ in range(bound):
        plan = plan_step([life.standing for life in running], [life.standing for life in waiting], limits)
        check_plan(plan, running, waiting, limits)
        running, waiting = [*running, *waiting[: len(plan.admitted)]], waiting[len(plan.admitted) :]
        by_id = {item.request_id: item for item in plan.items}
        for life in running:
            life.do(by_id[life.request_id], random.randint(0, 3))  # type: ignore[attr-defined]
        done += [life for life in running if life.num_generated == life.max_tokens]
        running = [life for life in running if life.num_generated < life.max_tokens]
    assert len(done) == wanted


def standing(name: str, committed_len: int, held_len: int, final_len: int) -> Standing:
    """A request that would draft EXPANSION."""
    return Standing(RequestId(name), committed_len, held_len, final_len, EXPANSION)


LIMITS = Limits(max_batch=4, prefill_rows=10, num_blocks=100, block_len=8, max_tree_nodes=4)


def planned(plan: StepPlan) -> dict[str, tuple[int, int, int, bool]]:
    """Item by request: start, end, depth, complete."""
    return {item.request_id: (item.start, item.end, len(item.expansion), item.is_complete) for item in plan.items}


def test_a_prompt_is_read_in_chunks() -> None:
    """25 tokens with a budget of 10 rows: 10, 10, and the last 5 with the tree already behind them."""
    chunks = [planned(plan_step([standing("a", 25, held, 40)], [], LIMITS))["a"] for held in (0, 10, 20)]
    assert chunks == [(0, 10, 0, False), (10, 20, 0, False), (20, 25, 3, True)]


def test_a_prompt_in_one_piece_is_not_drafted_for() -> None:
    """The SSM reads the prompt while the LLM does; the first tree comes with the second step."""
    assert planned(plan_step([], [standing("a", 9, 0, 40)], LIMITS)) == {"a": (0, 9, 0, True)}


def test_who_decodes_is_not_slowed_by_a_prompt_before_it() -> None:
    """A long prompt takes the rows that are left; an accepted run of 3 is still sent whole, with its tree."""
    plan = plan_step([standing("prompt", 500, 0, 600), standing("decoding", 53, 50, 90)], [], LIMITS)
    assert planned(plan) == {"prompt": (0, 7, 0, False), "decoding": (50, 53, 3, True)}


@pytest.mark.parametrize(("final_len", "depth"), [(31, 0), (32, 1), (33, 2), (34, 3), (99, 3)])
def test_trees_are_no_deeper_than_what_may_be_generated(final_len: int, depth: int) -> None:
    """The bonus token takes one of the remaining tokens."""
    assert planned(plan_step([standing("a", 30, 29, final_len)], [], LIMITS))["a"][2] == depth


def test_admission_is_in_order_and_stops_at_the_first_that_does_not_fit() -> None:
    """A small request does not overtake a large one for ever."""
    limits = Limits(max_batch=4, prefill_rows=10, num_blocks=20, block_len=8, max_tree_nodes=4)
    waiting = [standing("small", 8, 0, 12), standing("large", 60, 0, 156), standing("tiny", 1, 0, 2)]
    assert plan_step([], waiting, limits).admitted == ("small",)
    assert plan_step([], waiting[1:], limits).admitted == ("large",)


def test_nothing_to_do_is_an_empty_plan() -> None:
    """No requests, no step."""
    assert plan_step([], [], LIMITS) == StepPlan((), ())


def test_a_request_that_never_fits_is_not_admitted() -> None:
    """Its final length exceeds the whole cache."""
    assert plan_step([], [standing("huge", 10, 0, 10_000)], LIMITS).admitted == ()


def test_a_smaller_verifier_takes_the_first_that_fit() -> None:
    """The verifier was replaced by one of 8 blocks: two of three go on, the third sits out and nobody is admitted."""
    limits = Limits(max_batch=4, prefill_rows=100, num_blocks=8, block_len=8, max_tree_nodes=4)
    running = [standing(name, 10, 0, 20) for name in ("a", "b", "c")]
    plan = plan_step(running, [standing("d", 1, 0, 2)], limits)
    assert [item.request_id for item in plan.items] == ["a", "b"]
    assert plan.admitted == ()
