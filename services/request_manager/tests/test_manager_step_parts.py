"""Where the time of a step goes: the parts are the whole, whatever workers say of themselves."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_manager.contract import Generation
from request_manager.manager.speculator import Drafted
from request_manager.manager.ssm_pool import DraftRound
from request_manager.manager.step_record import ModelTimes
from request_manager.manager.step_report import StepClock
from request_manager.manager.testing import POLICY, running_stage
from treecore.messages import BlockUsage, RequestId, VerifyReply, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate
from treecore.testing.scripted import ScriptedModel
from treecore.testing.workers import FakeSsm, FakeVerifier

LLM = ScriptedModel(20)
BLOCKS = BlockUsage(3, 4, 2, 9, 16)


def generation(max_tokens: int = 40) -> Generation:
    """A greedy request."""
    prompt = np.array([1, 2, 3, 4], np.int32)
    return Generation(RequestId("r"), prompt, SamplingParams(0.0, 0, 1.0, Seed(5), prompt_len=4), max_tokens)


def drafted(times: ModelTimes, waited_ms: float) -> Drafted:
    """A round of drafts that took so long."""
    return Drafted({}, 0, frozenset(), False, frozenset(), DraftRound({}, {}, times, ()), waited_ms, 0.0, ())


def reply(forward_ms: float, sample_ms: float) -> VerifyReply:
    """A verifier's, with its own word for how long it took."""
    return VerifyReply(WorkerId("v"), (), (), forward_ms, sample_ms, BLOCKS)


ms = st.floats(0, 1000)


@given(st.tuples(ms, ms, ms), st.tuples(ms, ms, ms), ms, ms, ms)
def test_parts_are_the_whole_step(
    draft: tuple[float, float, float], verify: tuple[float, float, float], wait: float, merge: float, accept: float
) -> None:
    """Whatever each took, it is told as itself, and nothing is left over."""
    waited_ms = wait + sum(draft)
    marks = np.cumsum([100.0, (waited_ms + merge) / 1e3, sum(verify) / 1e3, accept / 1e3]).tolist()
    clock = StepClock(*marks)
    parts = clock.parts(drafted(ModelTimes(*draft), waited_ms), reply(verify[0], verify[1]))
    assert parts.total == pytest.approx(clock.total_ms, abs=1e-6)
    told = [getattr(parts, part.name) for part in fields(parts)]
    assert told == pytest.approx([wait, *draft, merge, *verify, accept], abs=1e-6)
    assert parts.overhead == pytest.approx(wait + draft[2] + merge + verify[2] + accept, abs=1e-6)


@given(ms, ms)
def test_a_worker_that_boasts_makes_no_part_negative(forward_ms: float, sample_ms: float) -> None:
    """It says that it computed longer than it was waited for."""
    boast = ModelTimes.within(1.0, forward_ms, sample_ms)
    parts = StepClock(0.0, 0.001, 0.002, 0.003).parts(drafted(boast, 0.5), reply(forward_ms, sample_ms))
    assert all(getattr(parts, part.name) >= 0 for part in fields(parts))


async def test_a_step_that_waits_for_nothing_has_no_such_part() -> None:
    """Through the whole manager: without SSMs there are no drafts to wait for, and the parts of each step add up."""
    async with running_stage(FakeVerifier(LLM, WorkerId("v"))) as stage:
        await stage.outcome(generation())
        steps = [step.parts for step in stage.recorder.steps]
    assert all(step.draft_forward == step.draft_sample == step.draft_wire == 0 for step in steps)
    assert all(step.verify_wire > 0 and step.accept > 0 for step in steps)


async def test_an_ssm_that_does_not_answer_costs_a_wait() -> None:
    """Until the deadline, which is no draft."""
    policy = replace(POLICY, draft_deadline_s=0.05)

    def rule(call: Call) -> Fate:
        return Fate.DROP if call.subject.startswith("ssm.") else Fate.DELIVER

    async with running_stage(FakeVerifier(LLM, WorkerId("v")), FakeSsm(LLM, WorkerId("s")), policy=policy) as stage:
        stage.bus.rule = rule
        await stage.outcome(generation(max_tokens=3))
        waits = [step.parts.wait for step in stage.recorder.steps]
    assert max(waits) > 40
