"""What the manager tells of its steps: by name, in full, in few series, and as the load tools of others expect it."""

import asyncio
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation
from request_manager.manager.metrics import ManagerMetrics
from request_manager.manager.step_record import StepParts, StepRecord
from request_manager.manager.testing import POLICY, running_stage
from request_manager.roster_metrics import RosterMetrics
from treecore.costs import ForwardCosts
from treecore.messages import BlockUsage, ForwardCost, RequestId, WorkerId, step_subject
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.service.buckets import ANSWER_S, LATENCY_S, STEP_S
from treecore.service.labels import OTHER
from treecore.service.operations import metrics_page
from treecore.testing.bus import Call, Fate
from treecore.testing.scripted import AgreeingModel, ScriptedModel
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

VOCAB_SIZE = 20
LLM = ScriptedModel(VOCAB_SIZE, spread=24.0)
NUM_TOKENS = 40
DYNAMIC = replace(POLICY, dynamic=True, max_tree_nodes=32)
BLOCKS = BlockUsage(3, 4, 2, 9, 16)
PARTS = StepParts(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
RECORD = StepRecord(
    2, 10, (2, 1), 5, PARTS, num_asked=40, num_found=32, num_trees=2, num_hidden=1, num_expected=3.5, num_met=3,
    proposed={"a": 10, "b": 4}, accepted={"a": 3},
)  # fmt: skip


def verifier(size: FakeSize | None = None) -> FakeVerifier:
    """The LLM, whose forwards seem to take a while."""
    return FakeVerifier(LLM, WorkerId("v"), "llm", size or FakeSize(forward_ms=20.0))


def ssm(agreement: float = 1.0, name: str = "ssm", forward_ms: float = 2.0) -> FakeSsm:
    """An SSM that agrees with the greedy LLM behind a share of all contexts."""
    model = AgreeingModel(LLM, ScriptedModel(VOCAB_SIZE, sum(name.encode()), spread=24.0), agreement)
    return FakeSsm(model, WorkerId(f"{name}-worker"), name, FakeSize(forward_ms=forward_ms))


def generation(name: str = "r", max_tokens: int = NUM_TOKENS) -> Generation:
    """A greedy request."""
    prompt = np.array([1, 2, 3, len(name)], np.int32)
    return Generation(RequestId(name), prompt, SamplingParams(0.0, 0, 1.0, Seed(5), prompt_len=4), max_tokens)


def value(registry: CollectorRegistry, metric: str, **labels: str) -> float:
    """Of a metric that there must be."""
    found = registry.get_sample_value(metric, labels)
    assert found is not None, (metric, labels)
    return found


# -- names and values -------------------------------------------------------------------------------------------------


def test_everything_that_is_heard_can_be_read() -> None:
    """By its name."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    metrics.on_llm("llm")
    metrics.on_step(RECORD)
    metrics.on_blocks(WorkerId("v"), BLOCKS)
    metrics.on_load(2, 1)
    metrics.on_admitted(0.25)
    metrics.on_retried("lost")
    metrics.on_preempted()
    metrics.on_dropped("state_missing")
    metrics.on_failed("unavailable")
    wanted = {
        ("espalier_tokens_committed_total", ()): 5,
        ("espalier_steps_total", ()): 1,
        ("espalier_steps_retried_total", (("reason", "lost"),)): 1,
        ("espalier_draft_tokens_total", ()): 10,
        ("espalier_accepted_tokens_total", (("depth", "1"),)): 2,
        ("espalier_accepted_tokens_total", (("depth", "2"),)): 1,
        ("espalier_ssm_draft_tokens_total", (("ssm", "a"),)): 10,
        ("espalier_ssm_accepted_tokens_total", (("ssm", "a"),)): 3,
        ("espalier_expected_tokens_total", ()): 3.5,
        ("espalier_expected_accepted_tokens_total", ()): 3,
        ("espalier_trees_total", (("drafted", "ahead"),)): 1,
        ("espalier_trees_total", (("drafted", "in_step"),)): 1,
        ("espalier_draft_hidden_ratio", ()): 0.5,
        ("espalier_answers_dropped_total", (("reason", "state_missing"),)): 1,
        ("espalier_kv_blocks", (("state", "used"),)): 4,
        ("espalier_kv_blocks", (("state", "cached"),)): 2,
        ("espalier_prompt_tokens_total", ()): 40,
        ("espalier_cached_prompt_tokens_total", ()): 32,
        ("espalier_preemptions_total", ()): 1,
        ("espalier_requests", (("state", "waiting"),)): 1,
        ("espalier_requests_failed_total", (("code", "unavailable"),)): 1,
        ("espalier_queue_seconds_sum", ()): 0.25,
        ("espalier_step_seconds_sum", ()): 0.045,
        ("espalier_step_overhead_seconds_sum", ()): 0.027,
        ("espalier_step_requests_sum", ()): 2,
        ("espalier_step_nodes_sum", ()): 10,
        ("espalier_step_tokens_sum", ()): 5,
        **{
            ("espalier_step_part_seconds_sum", (("part", part.name),)): getattr(PARTS, part.name) / 1e3
            for part in fields(StepParts)
        },
    }
    found = {name: registry.get_sample_value(name[0], dict(name[1])) for name in wanted}
    assert found == pytest.approx(wanted)


async def test_who_has_no_verifier_shows_no_cache() -> None:
    """Another manager may be showing the same one: sums over managers stay right."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    metrics.on_llm("llm")
    metrics.on_blocks(WorkerId("v"), BLOCKS)
    metrics.on_no_verifier()
    assert registry.get_sample_value("espalier_kv_blocks", {"state": "used"}) is None
    assert b"kv_cache_usage_perc{" not in metrics_page(registry)
    metrics.on_blocks(WorkerId("v"), BLOCKS)
    assert value(registry, "espalier_kv_blocks", state="used") == BLOCKS.used


def test_load_tools_find_what_they_know() -> None:
    """Names, labels and meanings are those of vLLM: drafts are trees, positions count from 0, and there is no more."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    metrics.on_load(9, 9)
    assert "model_name" not in metrics_page(registry).decode(), "of no model yet"
    metrics.on_llm("llm")
    for _ in range(2):
        metrics.on_step(RECORD)
    metrics.on_load(3, 4)
    metrics.on_blocks(WorkerId("v"), BLOCKS)
    page = metrics_page(registry).decode()
    shown = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[:5] == "vllm:"}
    model = 'engine="0",model_name="llm"'
    assert shown == {
        f"vllm:spec_decode_num_drafts_total{{{model}}}": 4,
        f"vllm:spec_decode_num_draft_tokens_total{{{model}}}": 20,
        f"vllm:spec_decode_num_accepted_tokens_total{{{model}}}": 6,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{model},position="0"}}': 4,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{model},position="1"}}': 2,
        f"vllm:num_requests_running{{{model}}}": 3,
        f"vllm:num_requests_waiting{{{model}}}": 4,
        f"vllm:kv_cache_usage_perc{{{model}}}": pytest.approx(4 / 9),
    }


def test_costs_are_those_of_now() -> None:
    """The gauges follow what is learned; a model that is met again is another one's heir."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    costs = ForwardCosts((ForwardCost(1, 10.0), ForwardCost(64, 136.0)))

    def shown(rows: str) -> float:
        return value(registry, "espalier_forward_cost_seconds", model="verify", name="llm", rows=rows)

    metrics.on_costs("verify", "llm", costs)
    assert [shown(rows) for rows in ("1", "4", "16", "64")] == pytest.approx([0.010, 0.016, 0.040, 0.136])
    for _ in range(200):
        costs.observe(4, 32.0)
    assert shown("4") == pytest.approx(0.032, rel=0.05)
    metrics.on_costs("verify", "llm", ForwardCosts((ForwardCost(1, 7.0),)))
    assert shown("1") == pytest.approx(0.007)


def test_usual_events_are_series_before_the_first() -> None:
    """A rate does not see a series begin at 1."""
    registry = CollectorRegistry()
    ManagerMetrics(registry)
    assert value(registry, "espalier_answers_dropped_total", reason="no_draft") == 0
    for reason in ("lost", "unreachable"):
        assert value(registry, "espalier_steps_retried_total", reason=reason) == 0


def test_names_and_reasons_that_others_choose_stay_few() -> None:
    """A flood of SSMs, LLMs, refusals and depths makes no flood of series; what was there first stays told apart."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    for number in range(1000):
        name = f"name {number}"
        metrics.on_llm(name)
        metrics.on_load(1, 1)
        metrics.on_step(replace(RECORD, accepted_per_depth=(1,) * 100, proposed={name: 2}, accepted={name: 1}))
        metrics.on_costs("draft", name, ForwardCosts())
        metrics.on_dropped(f"reason {number}")
        metrics.on_failed(f"code {number}")
    assert len(metrics_page(registry).splitlines()) < 1500
    assert value(registry, "espalier_ssm_draft_tokens_total", ssm="name 0") == 2
    assert value(registry, "espalier_ssm_draft_tokens_total", ssm=OTHER) > 1900
    assert value(registry, "espalier_answers_dropped_total", reason="reason 0") == 1


@pytest.mark.parametrize(("buckets", "most"), [(LATENCY_S, 1.5), (ANSWER_S, 1.5), (STEP_S, 2)])
def test_buckets_grow_and_tell_near_values_apart(buckets: tuple[float, ...], most: float) -> None:
    """Each is at most so much larger than the one before, where values are to be expected."""
    assert list(buckets) == sorted(set(buckets))
    common = [bound for bound in buckets if 0.0005 <= bound <= 1]
    assert all(later / bound <= most + 1e-9 for bound, later in pairwise(common))


@pytest.mark.parametrize("name", ["espalier_queue_seconds", "espalier_step_seconds"])
def test_a_millisecond_is_resolved(name: str) -> None:
    """0.7, 1.2 and 1.7 ms lie in buckets of their own."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    for ms in (0.7, 1.2, 1.7):
        metrics.on_admitted(ms / 1e3)
        metrics.on_step(replace(RECORD, parts=StepParts(accept=ms)))
    counts = sorted(
        {
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == f"{name}_bucket" and float(sample.labels["le"]) <= 0.002
        }
    )
    assert counts == [0, 1, 2, 3]


async def test_workers_are_shown_while_they_live_and_as_none_when_they_are_gone() -> None:
    """By kind and name; two replicas of an SSM are one name."""
    registry = CollectorRegistry()
    async with running_stage(verifier(), ssm(name="a"), ssm(name="b")) as stage:
        registry.register(RosterMetrics(stage.registry, ("verifier", "ssm")))
        replica = FakeSsm(LLM, WorkerId("replica"), "a")
        await stage.add(replica)
        names = {("verifier", "llm"): 1, ("ssm", "a"): 2, ("ssm", "b"): 1}

        def shown() -> dict[tuple[str, str], float]:
            return {(kind, name): value(registry, "espalier_workers", kind=kind, name=name) for kind, name in names}

        assert shown() == names
        dead, left, gone = stage.workers[0], stage.workers[2], stage.workers[3]
        stage.kill(dead)
        for worker in (left, gone):
            del stage.registry.alive[worker.worker_id]
            stage.registry.hear(worker.announcement(leaving=True))
        assert shown() == {("verifier", "llm"): 0, ("ssm", "a"): 1, ("ssm", "b"): 0}
    losses = {("verifier", "unanswered"): 1, ("ssm", "left"): 2, ("ssm", "silent"): 0, ("verifier", "left"): 0}
    for (kind, reason), number in losses.items():
        assert value(registry, "espalier_worker_losses_total", kind=kind, reason=reason) == number


# -- through the coordinator ------------------------------------------------------------------------------------------


async def test_queue_time_is_told_once_a_request() -> None:
    """One at a time: the later ones wait for the earlier; who was preempted has already been in a step."""
    small = FakeSize(num_blocks=10, block_len=4)
    async with running_stage(verifier(small), policy=replace(POLICY, max_batch=2)) as stage:
        await asyncio.gather(*[stage.outcome(generation(f"r{number}", 24)) for number in range(4)])
        recorder = stage.recorder
    assert recorder.num_preempted > 0
    assert len(recorder.queued_s) == 4
    assert 0 <= min(recorder.queued_s) < max(recorder.queued_s)


async def test_estimates_meet_what_became_of_them() -> None:
    """An SSM that is always right: what is expected of its trees is what they bring; there are no other trees."""
    async with running_stage(verifier(), ssm(), policy=DYNAMIC) as stage:
        for number in range(6):
            await stage.outcome(generation(f"r{number}"))
        steps = stage.recorder.steps
    expected, met = sum(step.num_expected for step in steps), sum(step.num_met for step in steps)
    assert met == sum(step.num_accepted for step in steps) > 0
    assert 0.5 < expected / met < 1.5


async def test_static_trees_are_no_estimates() -> None:
    """Nobody chose their nodes by what they bring."""
    async with running_stage(verifier(), ssm(), policy=POLICY) as stage:
        await stage.outcome(generation())
        steps = stage.recorder.steps
    assert sum(step.num_accepted for step in steps) > 0
    assert all(step.num_expected == step.num_met == 0 for step in steps)


async def test_models_that_were_met_tell_their_costs() -> None:
    """The LLM's forwards and the SSM's, under their names."""
    async with running_stage(verifier(), ssm(), policy=DYNAMIC) as stage:
        await stage.outcome(generation())
        recorder = stage.recorder
    assert recorder.llm == "llm"
    assert set(recorder.costs) == {("verify", "llm"), ("draft", "ssm")}
    assert recorder.costs["verify", "llm"].ms(4) == pytest.approx(20.0, rel=0.2)


async def test_steps_that_come_again_are_counted() -> None:
    """A question that reached nobody, and one that was never answered."""
    subject = step_subject("verifier", WorkerId("v"))
    fates = iter([Fate.REFUSE, Fate.LOSE_REPLY])

    def rule(call: Call) -> Fate:
        return next(fates, Fate.DELIVER) if call.subject == subject else Fate.DELIVER

    async with running_stage(verifier(), rule=rule) as stage:
        await stage.outcome(generation())
        retried = dict(stage.recorder.retried)
    assert sum(retried.values()) == 2
    assert set(retried) <= {"unreachable", "lost"}


async def test_requests_that_end_with_an_error_are_counted_by_its_code() -> None:
    """One that fits into no cache."""
    async with running_stage(verifier(FakeSize(num_blocks=2))) as stage:
        outcome = await stage.outcome(generation())
        failed = dict(stage.recorder.failed)
    assert outcome.error is not None
    assert failed == {"unavailable": 1}


async def test_the_queue_is_shown_while_no_verifier_is_there() -> None:
    """Growing, and seen to."""
    async with running_stage() as stage:
        asking = asyncio.create_task(stage.outcome(generation()))
        await stage.until(lambda: stage.recorder.load == (0, 1))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_acceptance_by_ssm_and_hidden_drafts_are_metrics() -> None:
    """What the dashboards read."""
    registry = CollectorRegistry()
    metrics = ManagerMetrics(registry)
    async with running_stage(verifier(), ssm(1.0), policy=DYNAMIC) as stage:
        await stage.outcome(generation())
        for step in stage.recorder.steps:
            metrics.on_step(step)
    proposed, kept = (
        registry.get_sample_value(f"espalier_ssm_{what}_tokens_total", {"ssm": "ssm"}) for what in ("draft", "accepted")
    )
    assert proposed is not None
    assert kept is not None
    assert proposed >= kept > NUM_TOKENS / 2
    ratio = registry.get_sample_value("espalier_draft_hidden_ratio")
    assert ratio is not None
    assert 0.5 < ratio <= 1.0
