"""A request that kills the verifier: it ends with one error, and takes nobody with it."""

import asyncio

import numpy as np

from request_manager.contract import Generation
from request_manager.manager.testing import Outcome, running_stage
from treecore.codec import decode
from treecore.errors import Unavailable
from treecore.messages import RequestId, VerifyRequest, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate, Verdict
from treecore.testing.scripted import ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeVerifier

LLM = ScriptedModel(20)
POISON = "poison"


def asked(name: str) -> Generation:
    """A greedy request."""
    return Generation(RequestId(name), np.arange(5, dtype=np.int32), SamplingParams(0.0, 0, 1.0, Seed(0)), 8)


def refuse_poison(call: Call) -> Verdict:
    """A verifier that dies of every step that the poisoned request takes part in."""
    if call.kind != "request":
        return Fate.DELIVER
    asked_for = {item.request_id for item in decode(call.body, VerifyRequest).items}
    return Fate.LOSE_REPLY if POISON in asked_for else Fate.DELIVER


async def test_poison_ends_alone() -> None:
    """The innocent get their full text; the guilty one error, after a bounded number of tries."""
    wanted = decode_alone(LLM, asked("x").prompt.tolist(), asked("x").params, 8)
    names = ["good", POISON, "fine"]
    async with running_stage(FakeVerifier(LLM, WorkerId("v"), "llm", FakeSize()), rule=refuse_poison) as stage:
        outcomes = await asyncio.gather(*[stage.outcome(asked(name)) for name in names])
        assert isinstance(outcomes[1].error, Unavailable)
        for outcome in (outcomes[0], outcomes[2]):
            assert (outcome.tokens, outcome.finish_reason) == (Outcome(*wanted).tokens, Outcome(*wanted).finish_reason)
        assert stage.recorder.dropped["lost_step"] <= 2 * len(names) + 2
