"""Speculation is invisible: through the real coordinator, every request gets what incremental decoding would give."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from request_manager.contract import Generation, TokenLogprob
from request_manager.manager.testing import POLICY, Outcome, Stage, running_stage
from treecore.expand import Expansion
from treecore.law import Paths, adjusted, logprobs
from treecore.messages import DraftReply, DraftRequest, RequestId, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.bus import Call, Fate, Rule, Verdict
from treecore.testing.scripted import AgreeingModel, ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

VOCAB_SIZE = 20
EOS = (3,)
LLM = ScriptedModel(VOCAB_SIZE)
SIZE = FakeSize(eos_token_ids=EOS)
GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0), end_token_ids=EOS)


def verifier(model: ScriptedModel = LLM) -> FakeVerifier:
    """The LLM."""
    return FakeVerifier(model, WorkerId("verifier"), "llm", SIZE)


def ssm(agreement: float, name: str = "ssm", llm: ScriptedModel = LLM) -> FakeSsm:
    """An SSM that agrees with the LLM behind a share of all contexts."""
    model = AgreeingModel(llm, ScriptedModel(VOCAB_SIZE, seed=sum(name.encode())), agreement)
    return FakeSsm(model, WorkerId(f"{name}-worker"), name, SIZE)


def alone(generation: Generation, llm: ScriptedModel = LLM) -> Outcome:
    """What must come out; steps are free."""
    tokens, reason = decode_alone(llm, generation.prompt.tolist(), generation.params, generation.max_tokens)
    return Outcome(tokens, reason, logprobs=logprobs_alone(llm, generation, tokens))


def logprobs_alone(llm: ScriptedModel, generation: Generation, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    """Position by position, each on its own."""
    params, context, found = generation.params, generation.prompt.tolist(), []
    for token in tokens if params.num_logprobs is not None else ():
        table = logprobs(adjusted(llm.logits(context)[None], None, params, Paths(context, ((),)))[0]).astype(np.float32)
        best = sorted(range(VOCAB_SIZE), key=lambda other: (-table[other], other))[: params.num_logprobs]
        found.append(TokenLogprob(float(table[token]), tuple((other, float(table[other])) for other in best)))
        context.append(token)
    return tuple(found)


async def run_all(stage: Stage, generations: list[Generation]) -> list[Outcome]:
    """All at once, to their ends; then nothing may be held by anyone."""
    outcomes = await asyncio.gather(*[stage.outcome(generation) for generation in generations])
    await stage.settle()
    return [replace(outcome, steps=0) for outcome in outcomes]


@st.composite
def sampling(draw: st.DrawFn, prompt_len: int) -> SamplingParams:
    """Every parameter that tokens depend on, each off now and then."""
    biases = draw(st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=3))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.3])),
        seed=Seed(draw(st.integers(0, 2**64 - 1))),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -2.0, 0.5, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.7, 0.4, 2.0])),
        bias_ids=tuple(biases),
        biases=tuple(biases.values()),
        prompt_len=prompt_len,
        min_tokens=draw(st.sampled_from([0, 0, 3, 20])),
        end_token_ids=draw(st.sampled_from([(), EOS, (*EOS, 7, 8)])),
        num_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        rule=draw(st.sampled_from(["coupled", "coupled", "naive"])),
    )


trees = st.none() | st.just("dynamic") | st.lists(st.integers(1, 3), max_size=4).map(lambda w: Expansion(tuple(w)))


@st.composite
def batches(draw: st.DrawFn) -> list[Generation]:
    """1 to 16 requests of all kinds."""
    prompts = draw(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), min_size=1, max_size=16))
    return [
        Generation(
            RequestId(f"r{idx}"),
            np.array(prompt, np.int32),
            draw(sampling(len(prompt))),
            draw(st.integers(1, 12)),
            draw(st.integers(0, 4)) > 0,
            draw(trees),
            draw(st.sampled_from([None, None, True, False])),
            draw(st.sampled_from([None, None, frozenset({"ssm0"}), frozenset()])),
        )
        for idx, prompt in enumerate(prompts)
    ]


def losing(seed: int) -> Rule:
    """A third of all messages to SSMs are refused, or answered in vain."""
    rng = np.random.default_rng(seed)

    def rule(call: Call) -> Verdict:
        if not call.subject.startswith("ssm"):
            return Fate.DELIVER
        return (Fate.REFUSE, Fate.LOSE_REPLY, Fate.DELIVER, Fate.DELIVER, Fate.DELIVER)[rng.integers(5)]

    return rule


@settings(max_examples=300)
@given(
    generations=batches(),
    llm_seed=st.integers(0, 99),
    agreements=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), max_size=3),
    step_rows=st.sampled_from([1, 7, 32, 500]),
    loss_seed=st.none() | st.integers(0, 99),
    is_dynamic=st.booleans(),
)
def test_on_equals_off_token_for_token(
    generations: list[Generation],
    llm_seed: int,
    agreements: list[float],
    step_rows: int,
    loss_seed: int | None,
    *,
    is_dynamic: bool,
) -> None:
    """Any parameters, any trees (dynamic, drafted ahead), several SSMs, batches of 1-16, SSM losses: no change.

    And the same log-probs, bit for bit, since the scripted model's logits do not depend on the batch.
    """
    llm = ScriptedModel(VOCAB_SIZE, llm_seed)
    ssms = [ssm(agreement, f"ssm{idx}", llm) for idx, agreement in enumerate(agreements)]

    async def scenario() -> list[Outcome]:
        policy = replace(POLICY, step_rows=step_rows, dynamic=is_dynamic)
        async with running_stage(verifier(llm), *ssms, policy=policy) as stage:
            if loss_seed is not None:
                stage.bus.rule = losing(loss_seed)
            return await run_all(stage, generations)

    assert asyncio.run(scenario()) == [alone(generation, llm) for generation in generations]


def generation(prompt: list[int], max_tokens: int, **more: object) -> Generation:
    """A greedy request unless told otherwise."""
    asked = Generation(RequestId("one"), np.array(prompt, np.int32), GREEDY, max_tokens)
    return replace(asked, **more)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Line:
    """A model that speaks one line, whatever the prompt's content: token i of it behind i generated tokens."""

    tokens: tuple[int, ...]
    prompt_len: int
    vocab_size: int = VOCAB_SIZE

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """All mass on the line's next token."""
        row = np.zeros(VOCAB_SIZE, np.float32)
        row[self.tokens[min(len(context) - self.prompt_len, len(self.tokens) - 1)]] = 9.0
        return row


async def speak(line: tuple[int, ...], max_tokens: int, widths: tuple[int, ...]) -> Outcome:
    """The outcome of a perfect SSM and an LLM that speak `line`; the prompt has 4 tokens."""
    model = Line(line, 4)
    workers = FakeVerifier(model, WorkerId("v"), "llm", SIZE), FakeSsm(model, WorkerId("s"), "ssm", SIZE)
    async with running_stage(*workers) as stage:
        outcome = await stage.outcome(generation([9, 9, 9, 9], max_tokens, tree=Expansion(widths)))
        await stage.settle()
    return outcome


async def test_eos_inside_an_accepted_run_ends_the_text() -> None:
    """Nothing behind EOS is told, though the tree went on; EOS itself is."""
    outcome = await speak((5, 6, 3, 7, 8, 9), 20, (1, 1, 1, 1))
    assert (outcome.tokens, outcome.finish_reason, outcome.steps) == ((5, 6, 3), "stop", 2)


async def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    """The text ended by itself, not by the limit."""
    outcome = await speak((5, 6, 7, 3, 8), 4, (1, 1, 1, 1))
    assert (outcome.tokens, outcome.finish_reason) == ((5, 6, 7, 3), "stop")


async def test_the_limit_cuts_before_eos() -> None:
    """One token fewer than EOS needs: `length`."""
    outcome = await speak((5, 6, 7, 3, 8), 3, (1, 1, 1, 1))
    assert (outcome.tokens, outcome.finish_reason) == ((5, 6, 7), "length")


@pytest.mark.parametrize("first", [5, 3])
async def test_one_token(first: int) -> None:
    """max_tokens 1 is a prefill and nothing else; EOS at once is a stop."""
    outcome = await speak((first, 6), 1, (3, 2))
    assert outcome == Outcome((first,), "stop" if first == 3 else "length", None, 1)


@pytest.mark.parametrize("max_tokens", range(2, 9))
async def test_a_perfect_ssm_is_accepted_whole(max_tokens: int) -> None:
    """SSM == LLM: a first step of one token, then whole trees; the last tree is no deeper than what remains."""
    outcome = await speak((5, 6, 7, 8, 9, 10, 11, 12, 13), max_tokens, (1, 1))
    assert outcome.tokens == (5, 6, 7, 8, 9, 10, 11, 12, 13)[:max_tokens]
    assert outcome.steps == 1 + -(-(max_tokens - 1) // 3)


async def test_rubbish_drafts_cost_nothing_but_speed() -> None:
    """An SSM that is never right: one token a step, the same text."""
    right, wrong = Line((5, 6, 7, 8, 9, 10), 4), Line((1, 1, 1, 1, 1, 1), 4)
    workers = FakeVerifier(right, WorkerId("v"), "llm", SIZE), FakeSsm(wrong, WorkerId("s"), "ssm", SIZE)
    async with running_stage(*workers) as stage:
        outcome = await stage.outcome(generation([9] * 4, 6, tree=Expansion((1, 1))))
        assert (outcome.tokens, outcome.steps) == ((5, 6, 7, 8, 9, 10), 6)
        assert [record.num_accepted for record in stage.recorder.steps] == [0] * 6


async def test_speculation_off_asks_no_ssm() -> None:
    """No draft message at all, and no prompt sent to the SSM."""
    drafter = ssm(1.0)
    async with running_stage(verifier(), drafter) as stage:
        await stage.outcome(generation([1, 2, 4], 9, speculation=False))
        await stage.settle()
    assert drafter.num_steps == 0


async def test_the_ssm_reads_the_prompt_while_the_llm_does() -> None:
    """The first draft request already finds the prompt in the SSM's cache."""
    sent: list[DraftRequest] = []

    class Listening(FakeSsm):
        def step(self, request: DraftRequest) -> DraftReply:
            sent.append(request)
            return super().step(request)

    async with running_stage(verifier(), Listening(LLM, WorkerId("s"), "ssm", SIZE)) as stage:
        await stage.outcome(generation([1, 2, 4, 5, 6], 9))
    with_items = [request.items[0] for request in sent if request.items]
    assert [(item.start, len(item.tokens), item.expansion) for item in with_items[:2]] == [(0, 5, ()), (5, 1, (2, 1))]


async def test_records_add_up() -> None:
    """What the observer counts is what the client got; nothing accepted was not drafted."""
    async with running_stage(verifier(), ssm(0.8)) as stage:
        outcomes = [await stage.outcome(generation([seed, 2, 4], 30, request_id=f"r{seed}")) for seed in range(4, 9)]
    records = stage.recorder.steps
    assert sum(record.num_committed for record in records) == sum(len(outcome.tokens) for outcome in outcomes)
    assert all(record.num_accepted <= record.num_drafted for record in records)
    assert all(0 <= record.parts.overhead <= record.parts.total for record in records)
    assert sum(record.num_accepted for record in records) > 0
