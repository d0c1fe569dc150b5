"""Chunked prefill: a long prompt takes its time, and nobody else's. Counted in steps, so that no clock is asked."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from request_manager.contract import Generation
from request_manager.manager.testing import POLICY, running_stage
from treecore.expand import Expansion
from treecore.messages import RequestId, VerifyItem, VerifyReply, VerifyRequest, WorkerId
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.testing.scripted import AgreeingModel, ScriptedModel, decode_alone
from treecore.testing.workers import FakeSize, FakeSsm, FakeVerifier

LLM = ScriptedModel(20)
SSM = AgreeingModel(LLM, ScriptedModel(20, seed=1), 0.7)
STEP_ROWS = 96
LONG = RequestId("long")
STREAMS = [RequestId(f"stream{idx}") for idx in range(4)]


@dataclass(slots=True)
class Watched(FakeVerifier):
    """Remembers what it was asked in each step."""

    asked: list[dict[RequestId, VerifyItem]] = field(default_factory=list)

    def step(self, request: VerifyRequest) -> VerifyReply:
        self.asked.append({item.request_id: item for item in request.items})
        return super(Watched, self).step(request)


def generation(request_id: RequestId, prompt_len: int, max_tokens: int) -> Generation:
    """A greedy request."""
    prompt = np.arange(prompt_len, dtype=np.int32) % LLM.vocab_size
    return Generation(request_id, prompt, SamplingParams(0.0, 0, 1.0, Seed(0)), max_tokens)


async def test_a_long_prompt_beside_four_streams_does_not_stop_their_tokens() -> None:
    """1,500 tokens with 96 rows a step: in every step until its first token, each stream is verified with a tree."""
    verifier = Watched(LLM, WorkerId("v"), "llm", FakeSize())
    policy = replace(POLICY, step_rows=STEP_ROWS, expansion=Expansion((2, 1)))
    async with running_stage(verifier, FakeSsm(SSM, WorkerId("s"), "ssm", FakeSize()), policy=policy) as stage:
        streams = [asyncio.create_task(stage.outcome(generation(name, 3, 400))) for name in STREAMS]
        await stage.until(lambda: len(verifier.asked) > 3)
        long = generation(LONG, 1500, 5)
        outcome = await stage.outcome(long)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await stage.settle()
    assert outcome.tokens == decode_alone(LLM, long.prompt.tolist(), long.params, 5)[0]
    reading = [items for items in verifier.asked if LONG in items and items[LONG].start < len(long.prompt)]
    chunks = [items[LONG] for items in reading]
    assert [item.start for item in chunks[1:]] == [item.start + len(item.tokens) for item in chunks[:-1]]
    assert all((item.start + len(item.tokens)) % FakeSize().block_len == 0 for item in chunks[:-1])
    for items in reading:
        assert all(items[name].wants_token for name in STREAMS), "each stream gets a token at least"
        assert sum(len(item.tokens) + len(item.tree_tokens) for item in items.values()) <= STEP_ROWS
    decoding = 4 * (3 + 4)  # an accepted run and a full tree each
    assert len(reading) <= -(-1500 // (STEP_ROWS - decoding - FakeSize().block_len))
    assert sum(len(items[name].tree_tokens) > 0 for items in reading for name in STREAMS) > 3 * len(reading)
