"""Too little cache for everyone: preempted requests come back, finish, and say what they say alone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig
from llm_verifier.engine import Engine
from request_manager.contract import Generation
from request_manager.manager.testing import POLICY, Outcome, Stage, running_stage
from ssm_worker.grow import Grower
from treecore.codec import decode, encode
from treecore.expand import Expansion
from treecore.messages import (
    Announcement,
    BlockUsage,
    DraftRequest,
    RequestId,
    VerifyReply,
    VerifyRequest,
    WorkerId,
    WorkerKind,
    step_subject,
)
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.noise import Seed
from treecore.params import Rule, SamplingParams
from treecore.service.bus import Bus
from treecore.sessions import manager_of
from treecore.testing.tiny import VOCAB_SIZE

BLOCK_LEN = 8
PROMPT_LEN = 12
MAX_TOKENS = 90
NEED = -(-(PROMPT_LEN + MAX_TOKENS) // BLOCK_LEN)
TIGHT = NEED * 12 // 10  # 1.2 times what one request needs


@pytest.fixture(scope="module")
def llm(llm_dir: Path) -> Decoder:
    """The LLM."""
    return load_decoder(llm_dir, dtype="float32")


@pytest.fixture(scope="module")
def rubbish(rubbish_dir: Path) -> Decoder:
    """An SSM that is hardly ever right, so that most of what it drafts is rejected."""
    return load_decoder(rubbish_dir, dtype="float32")


@dataclass(slots=True)
class RealWorker:
    """A real worker on a Stage's bus; `replies` are a verifier's, in order."""

    worker_id: WorkerId
    kind: WorkerKind
    held: HeldRequests
    replies: list[VerifyReply]

    held_ids = ()

    def announcement(self) -> Announcement:
        return self.held.announcement(self.worker_id, self.kind, self.worker_id, leaving=False)

    def usage(self) -> BlockUsage:
        return self.held.usage()

    async def attach(self, bus: Bus) -> None:
        """Take steps from `bus`."""

        async def verify(body: bytes) -> bytes | None:
            request = decode(body, VerifyRequest)
            reply = Engine(self.worker_id, self.held, VOCAB_SIZE).step(request)
            self.replies.append(replace(reply, holder=manager_of(request.session)))
            return encode(self.replies[-1])

        async def draft(body: bytes) -> bytes | None:
            return encode(Grower(self.worker_id, self.held, VOCAB_SIZE, None).step(decode(body, DraftRequest)))

        await bus.subscribe(step_subject(self.kind, self.worker_id), verify if self.kind == "verifier" else draft)


def worker(decoder: Decoder, kind: WorkerKind, num_blocks: int) -> RealWorker:
    """One of a cache of `num_blocks`."""
    return RealWorker(WorkerId(f"{kind}-{num_blocks}"), kind, HeldRequests(decoder, num_blocks, BLOCK_LEN), [])


def asked(
    seed: int, *, prompt_len: int = PROMPT_LEN, max_tokens: int = MAX_TOKENS, rule: Rule = "coupled"
) -> Generation:
    """Request `seed`, with a prompt of its own; every second one is greedy."""
    prompt = np.random.default_rng(seed).integers(1, VOCAB_SIZE, prompt_len).astype(np.int32)
    params = SamplingParams(0.9 * (seed % 2), 0, 1.0, Seed(seed), prompt_len=prompt_len, rule=rule)
    return Generation(RequestId(f"r{seed}"), prompt, params, max_tokens)


@asynccontextmanager
async def staged(llm: Decoder, ssm: Decoder | None, num_blocks: int, **policy: object) -> AsyncIterator[Stage]:
    """A manager over a real verifier and perhaps an SSM, each with so many blocks; the books are checked at the end."""
    workers = [worker(llm, "verifier", num_blocks)]
    workers += [] if ssm is None else [worker(ssm, "ssm", num_blocks)]
    async with running_stage(*workers, policy=replace(POLICY, **policy)) as stage:  # type: ignore[arg-type]
        yield stage
        await stage.settle()
    for one in workers:
        usage = one.usage()
        assert (usage.used, usage.free + usage.cached) == (0, num_blocks)
    for reply in workers[0].replies:
        assert reply.blocks.room + reply.blocks.used == reply.blocks.total


def texts(outcomes: Sequence[Outcome]) -> list[tuple[tuple[int, ...], str | None]]:
    """Tokens and ends, none of which may be an error."""
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [(outcome.tokens, outcome.finish_reason) for outcome in outcomes]


async def alone(llm: Decoder, generations: Sequence[Generation]) -> list[tuple[tuple[int, ...], str | None]]:
    """Each by itself, in all the room it likes, without speculation."""
    async with staged(llm, None, 256) as stage:
        return texts([await stage.outcome(replace(one, speculation=False)) for one in generations])


@pytest.mark.parametrize("rule", ["coupled", "naive"])
async def test_eight_requests_in_room_for_one(llm: Decoder, rubbish: Decoder, rule: Rule) -> None:
    """All finish with the text that they have alone; some were preempted, none failed, nobody lives for ever."""
    generations = [asked(seed, rule=rule) for seed in range(8)]
    async with staged(llm, rubbish, TIGHT) as stage:
        found = texts(await asyncio.gather(*[stage.outcome(one) for one in generations]))
        assert stage.recorder.num_preempted > 0
        assert stage.recorder.dropped["out_of_blocks"] == 0, "the plan knew better than to ask for it"
        assert len(stage.recorder.steps) < 8 * (MAX_TOKENS + NEED)
    assert found == await alone(llm, generations)


async def test_drawn_trees_in_room_for_one(llm: Decoder) -> None:
    """Under multi_step the tokens depend on the trees, so only the end can be told: eight whole answers."""
    generations = [asked(2 * seed + 1, rule="multi_step") for seed in range(8)]
    async with staged(llm, llm, TIGHT) as stage:
        found = texts(await asyncio.gather(*[stage.outcome(one) for one in generations]))
        assert stage.recorder.num_preempted > 0
    assert all(reason == "stop" or len(tokens) == MAX_TOKENS for tokens, reason in found)


async def test_equal_prompts_share_what_one_alone_could_not_spare(llm: Decoder) -> None:
    """Four choices of 11 to 12 blocks each run together in 28: ten of the blocks are one and the same for all."""
    prompt = asked(1, prompt_len=82, max_tokens=10)
    generations = [replace(prompt, request_id=RequestId(f"c{idx}")) for idx in range(4)]
    async with staged(llm, None, 28, step_rows=512, max_tree_nodes=4) as stage:
        found = texts(await asyncio.gather(*[stage.outcome(one) for one in generations]))
        assert stage.recorder.num_preempted == 0
        assert max(record.num_requests for record in stage.recorder.steps) == 4
    assert found == await alone(llm, generations)


async def test_a_request_that_was_preempted_finds_what_it_had_computed(llm: Decoder) -> None:
    """Two that fit while they are short: when the younger comes back, the blocks that nobody took are there."""
    generations = [asked(2), asked(4)]
    async with staged(llm, None, NEED + 3) as stage:
        found = texts(await asyncio.gather(*[stage.outcome(one) for one in generations]))
        assert stage.recorder.num_preempted > 0
        verifier = stage.workers[0]
    assert found == await alone(llm, generations)
    assert sum(item.num_found for reply in verifier.replies for item in reply.items) > 0


async def test_the_pool_may_be_exactly_one_request(llm: Decoder, rubbish: Decoder) -> None:
    """Without room for a tree at its end, where it does without; one token more is refused."""
    longest = NEED * BLOCK_LEN - PROMPT_LEN
    generations = [asked(seed, max_tokens=longest) for seed in (3, 4)]
    async with staged(llm, rubbish, NEED) as stage:
        too_long = await stage.outcome(asked(5, max_tokens=longest + 1))
        assert too_long.error is not None
        assert too_long.error.code == "unavailable"
        assert stage.manager.card().context_len == NEED * BLOCK_LEN
        found = texts(await asyncio.gather(*[stage.outcome(one) for one in generations]))
    assert found == await alone(llm, generations)


async def test_a_long_prompt_under_pressure_from_all_sides(llm: Decoder, rubbish: Decoder) -> None:
    """Chunks, trees, preemption and equal beginnings in one: many lengths, arriving one after the other."""
    begin = asked(6, prompt_len=40).prompt
    generations = [
        replace(one, prompt=np.concatenate([begin[: 7 * (seed % 4)], one.prompt[7 * (seed % 4) :]]))
        for seed, one in ((seed, asked(seed, prompt_len=30 + 5 * seed, max_tokens=20 + seed)) for seed in range(10))
    ]
    async with staged(llm, rubbish, 15, step_rows=24, expansion=Expansion((2, 2))) as stage:
        tasks = []
        for one in generations:
            tasks.append(asyncio.create_task(stage.outcome(one)))
            num_steps = len(stage.recorder.steps)
            await stage.until(_after(stage, num_steps + 3))
        found = texts(await asyncio.gather(*tasks))
    assert found == await alone(llm, generations)


def _after(stage: Stage, num_steps: int) -> Callable[[], bool]:
    return lambda: len(stage.recorder.steps) >= num_steps


async def test_whole_processes_with_little_cache(
    llm_dir: Path, rubbish_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight clients of real processes whose caches hold 1.2 times one answer: each gets the answer it has alone."""
    little = {"KV_TOKENS": 12 * (PROMPT_LEN + MAX_TOKENS) // 10, "BLOCK_LEN": BLOCK_LEN, "MAX_TREE_NODES": 8}
    for name, value in little.items():
        monkeypatch.setenv(f"ESPALIER_{name}", str(value))
    config = SystemConfig(ServedModel("tiny", llm_dir), (ServedModel("rubbish", rubbish_dir),))
    async with LocalSystem(config) as system, httpx.AsyncClient(base_url=system.base_url, timeout=60) as client:

        async def ask(seed: int) -> list[int]:
            body = {"model": "tiny", "prompt": f"Prompt {seed:04d}", "max_tokens": MAX_TOKENS, "seed": seed}
            extension = {"return_token_ids": True}
            answer = await client.post("/v1/completions", json={**body, "temperature": 1, "espalier": extension})
            assert answer.status_code == 200, answer.text
            ids: list[int] = answer.json()["espalier"]["token_ids"][0]
            return ids

        together = await asyncio.gather(*[ask(seed) for seed in range(8)])
        assert together == [await ask(seed) for seed in range(8)]
        async with asyncio.timeout(10):  # the last release travels by itself
            while 'espalier_kv_blocks{state="used"} 0.0' not in (metrics := (await client.get("/metrics")).text):
                pass
    assert "espalier_preemptions_total 0.0" not in metrics
