"""The multi_step rules through the whole manager: not the tokens of incremental decoding, but their law, exactly."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from request_manager.contract import Generation
from request_manager.manager.testing import POLICY, Stage, running_stage
from treecore.expand import Expansion
from treecore.law import logprobs
from treecore.messages import RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.testing.bus import Call, Fate, Verdict
from treecore.testing.scripted import AgreeingModel, ScriptedModel
from treecore.testing.statistics import chi_square, chi_square_limit
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

V = 4
LLM = ScriptedModel(V, seed=1, spread=1.5)
PROMPT = [1, 2]
NUM_REQUESTS = 4_000
FALSE_ALARM = 1e-5  # of each of the tests below


def law_of_ends(num_tokens: int) -> dict[tuple[int, ...], float]:
    """P of every continuation of the prompt, from the model alone."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*said, token): chance * float(p)
            for said, chance in law.items()
            for token, p in enumerate(np.exp(logprobs(LLM.logits([*PROMPT, *said]))))
        }
    ends: dict[tuple[int, ...], float] = {}
    for said, chance in law.items():
        ends[said[-2:]] = ends.get(said[-2:], 0.0) + chance
    return ends


def asked(seed: int, rule: Rule) -> Generation:
    """Three tokens: the first behind the prompt, the others over a tree."""
    params = SamplingParams(1.0, 0, 1.0, Seed(seed), prompt_len=len(PROMPT), rule=rule)
    return Generation(RequestId(f"r{seed}"), np.array(PROMPT, np.int32), params, 3, tree=Expansion((3,)))


async def histogram(stage: Stage, rule: Rule) -> dict[tuple[int, ...], int]:
    """How often each end came."""
    counts: dict[tuple[int, ...], int] = dict.fromkeys(law_of_ends(3), 0)
    for first in range(0, NUM_REQUESTS, 500):
        batch = [stage.outcome(asked(seed, rule)) for seed in range(first, first + 500)]
        for outcome in await asyncio.gather(*batch):
            counts[outcome.tokens[-2:]] += 1
    return counts


def lose_every_third(call: Call) -> Verdict:
    """Drafts are missing now and then: those steps verify the root alone."""
    return Fate.REFUSE if call.subject.startswith("ssm") and call.number % 3 == 0 else Fate.DELIVER


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
async def test_the_law_of_continuations_is_the_llms(rule: Rule) -> None:
    """Two SSMs of different quality, some of whose drafts are lost; tokens two and three."""
    models = [AgreeingModel(LLM, ScriptedModel(V, seed, spread=1.5), 0.5) for seed in (7, 8)]
    ssms = [FakeSsm(model, WorkerId(f"s{idx}"), f"ssm{idx}") for idx, model in enumerate(models)]
    verifier = FakeVerifier(LLM, WorkerId("v"), "llm", FakeSize(num_blocks=8192))
    policy = replace(POLICY, max_batch=128, max_waiting=600)
    async with running_stage(verifier, *ssms, policy=policy, rule=lose_every_third) as stage:
        counts = await histogram(stage, rule)
        accepted = sum(record.num_accepted for record in stage.recorder.steps)
    law = law_of_ends(3)
    assert accepted > NUM_REQUESTS / 2
    statistic = chi_square(list(counts.values()), [law[said] for said in counts])
    assert statistic < chi_square_limit(len(law), FALSE_ALARM)


@pytest.mark.parametrize("rule", ["multi_step", "multi_step_iid"])
async def test_log_probs_are_the_llms_behind_each_token(rule: Rule) -> None:
    """Of drafted tokens, of residual draws and of draws outside the support alike; drafts only decide which token."""
    ssm = FakeSsm(AgreeingModel(LLM, ScriptedModel(V, 7, spread=1.5), 0.5), WorkerId("s"), "ssm")
    async with running_stage(FakeVerifier(LLM, WorkerId("v"), "llm"), ssm) as stage:
        for seed in range(20):
            wanted = asked(seed, rule)
            outcome = await stage.outcome(replace(wanted, params=replace(wanted.params, num_logprobs=2)))
            assert len(outcome.logprobs) == len(outcome.tokens) == 3
            for idx, (token, told) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
                table = logprobs(LLM.logits([*PROMPT, *outcome.tokens[:idx]]))
                assert told.logprob == pytest.approx(table[token], abs=1e-6)
                assert [logprob for _, logprob in told.top] == pytest.approx(sorted(table)[:-3:-1], abs=1e-6)
