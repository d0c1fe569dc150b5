"""Every parameter of the API, in any combination: speculation on gives what off gives, streamed or not.

The whole path in one event loop: HTTP bodies, the gateway, the manager, and the real workers' engines with tiny random
models, over a fake bus that loses drafts now and then.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from llm_verifier.engine import Engine
from llm_verifier.lease import Lease, Tenancy
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.text import TextCodec
from request_manager.grammars import ModelGrammars
from request_manager.manager.coordinator import Coordinator, Policy
from request_manager.manager.local import LocalManager
from request_manager.manager.registry import Registry
from request_manager.manager.ssm_pool import SsmPool
from request_manager.manager.testing import Recorder
from request_manager.manager.verifying import VerifierLink
from ssm_worker.grow import Grower
from treecore.codec import decode, encode
from treecore.expand import Expansion
from treecore.grammar import GrammarCompiler
from treecore.messages import Announcement, DraftRequest, VerifyRequest, WorkerId, step_subject
from treecore.model.decoder import Decoder
from treecore.model.held import HeldRequests
from treecore.model.load import load_decoder
from treecore.testing.bus import Call, FakeBus, Fate, Rule, Verdict
from treecore.testing.tiny import VOCAB_SIZE

Body = dict[str, Any]
M = TypeVar("M", DraftRequest, VerifyRequest)

MODEL = "tiny"
MAX_TREE_NODES = 40
SCHEMAS: list[Body] = [
    {"type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
]
PROMPTS = st.text("ab \n{é", min_size=1, max_size=40)


@dataclass(frozen=True, slots=True)
class Models:
    """What is loaded once: the LLM twice (as itself and as a perfect SSM), and an SSM that knows nothing."""

    directory: Path
    llm: Decoder
    rubbish: Decoder
    text: TextCodec
    compiler: GrammarCompiler


@pytest.fixture(scope="module")
def models(llm_dir: Path, rubbish_dir: Path) -> Models:
    """Tiny random models and their tokenizer."""
    llm = load_decoder(llm_dir, dtype="float32")
    compiler = GrammarCompiler.from_dir(llm_dir, llm.spec.vocab_size, llm.spec.eos_token_ids)
    return Models(llm_dir, llm, load_decoder(rubbish_dir, dtype="float32"), TextCodec.from_dir(llm_dir), compiler)


@dataclass(frozen=True, slots=True)
class System:
    """How one example is served: which SSMs, the default tree, what is lost, the largest batch."""

    perfect: bool
    rubbish: bool
    tree: Expansion
    max_batch: int
    step_rows: int
    loss_seed: int | None

    def rule(self) -> Rule:
        """A third of all messages to SSMs are lost, if any."""
        rng = np.random.default_rng(self.loss_seed)

        def lose(call: Call) -> Verdict:
            if self.loss_seed is None or not call.subject.startswith("ssm"):
                return Fate.DELIVER
            return (Fate.REFUSE, Fate.LOSE_REPLY, *[Fate.DELIVER] * 4)[rng.integers(6)]

        return lose


@asynccontextmanager
async def served(models: Models, system: System) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the whole system."""
    bus, registry = FakeBus(system.rule()), Registry(asyncio.get_running_loop().time, "manager")
    held = HeldRequests(models.llm, 512, 8, models.compiler.start)
    me = held.announcement(WorkerId("v"), "verifier", MODEL, leaving=False)
    tenancy = Tenancy(Engine(me.worker_id, held, VOCAB_SIZE), held, Lease(time.monotonic))
    await attach(bus, registry, me, tenancy.step, VerifyRequest)
    for name, decoder, is_there in (
        ("itself", models.llm, system.perfect),
        ("rubbish", models.rubbish, system.rubbish),
    ):
        if is_there:
            held = HeldRequests(decoder, 512, 8, models.compiler.start)
            me = held.announcement(WorkerId(name), "ssm", name, leaving=False)
            await attach(bus, registry, me, Grower(me.worker_id, held, VOCAB_SIZE, None).step, DraftRequest)
    policy = Policy(system.max_batch, 64, system.step_rows, MAX_TREE_NODES, system.tree, 5.0)
    recorder = Recorder()
    coordinator = Coordinator(registry, VerifierLink(bus, registry), SsmPool(bus, registry, recorder), policy, recorder)
    manager = LocalManager(coordinator, registry, MAX_TREE_NODES)
    grammars = ModelGrammars(manager, models.directory)
    app = create_app(manager, models.text, GatewaySettings(), CollectorRegistry(), grammars=grammars)
    running = asyncio.create_task(coordinator.run())
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bus.close()


async def attach(
    bus: FakeBus, registry: Registry, me: Announcement, step: Callable[[M], Any], message: type[M]
) -> None:
    """A worker takes steps and is known."""

    async def answer(body: bytes) -> bytes | None:
        return encode(step(decode(body, message)))

    await bus.subscribe(step_subject(me.kind, me.worker_id), answer)
    registry.hear(me)


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """A request that the API accepts, each parameter off now and then."""
    rare = st.sampled_from([False, False, False, True])
    fields: Body = {
        "model": MODEL,
        "prompt": draw(st.one_of(PROMPTS, st.lists(PROMPTS, min_size=2, max_size=2))),
        "max_tokens": draw(st.integers(1, 14)),
        "temperature": draw(st.sampled_from([0, 0, 0.5, 1.0, 2.0])),
        "seed": draw(st.integers(0, 2**32)),
    }
    choices: dict[str, st.SearchStrategy[Any]] = {
        "top_p": st.sampled_from([0.9, 0.4, 0.01]),
        "top_k": st.sampled_from([1, 3, 40]),
        "min_p": st.sampled_from([0.02, 0.5]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1).map(str), st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, fields["max_tokens"]),
        "stop": st.lists(st.text("abé \n", min_size=1, max_size=3), min_size=1, max_size=4),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 5),
        "echo": st.booleans(),
        "n": st.integers(2, 3),
    }
    fields |= {name: draw(choice) for name, choice in choices.items() if draw(rare)}
    structure: dict[str, st.SearchStrategy[Any]] = {
        "response_format": st.sampled_from(
            [
                {"type": "json_object"},
                *[{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS],
            ]
        ),
        "guided_regex": st.sampled_from(["[ab]{2,6}", "(a|bé)+!", "x"]),
        "guided_choice": st.sampled_from([["yes", "no"], ["a", "ab", "abé"]]),
        "guided_grammar": st.sampled_from(['start: "a" start "b" | "é"', "start: WORD+\nWORD: /[b!]{1,3}/"]),
    }
    if draw(rare):
        name = draw(st.sampled_from(sorted(structure)))
        fields[name] = draw(structure[name])
    if "echo" in fields:
        fields.pop("logprobs", None)
    return fields


systems = st.builds(
    System,
    perfect=st.sampled_from([True, True, False]),
    rubbish=st.booleans(),
    tree=st.sampled_from([(), (1,), (3,), (2, 1), (1, 1, 1, 1), (3, 2, 1), (5,)]).map(Expansion),
    max_batch=st.sampled_from([1, 2, 16]),
    step_rows=st.sampled_from([1, 16, 512]),
    loss_seed=st.none() | st.integers(0, 99),
)


async def ask(client: httpx.AsyncClient, body: Body, **extension: Any) -> Body:
    """One answer, without what may differ: its id, times and steps."""
    response = await client.post("/v1/completions", json={**body, "espalier": {"return_token_ids": True, **extension}})
    assert response.status_code == 200, (response.text, body)
    answer: Body = response.json()
    return answer


async def ask_streamed(client: httpx.AsyncClient, body: Body) -> list[str]:
    """The text of each choice, put together from a stream."""
    texts: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[idx] for idx in sorted(texts)]


def check_same(on: Body, off: Body) -> None:
    """Tokens, texts, ends and counts are equal; log-probs as far as fp32 goes in another batch shape."""
    assert on["espalier"]["token_ids"] == off["espalier"]["token_ids"]
    for body in (on, off):
        del body["usage"]["prompt_tokens_details"]  # what is cached depends on who came before
    assert on["usage"] == off["usage"]
    for ours, theirs in zip(on["choices"], off["choices"], strict=True):
        told, wanted = ours.pop("logprobs"), theirs.pop("logprobs")
        assert ours == theirs
        if wanted is not None:
            assert told["tokens"] == wanted["tokens"]
            assert told["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)


@settings(max_examples=300)
@given(
    system=systems,
    asked=st.lists(bodies(), min_size=1, max_size=4),
    more=st.integers(0, 9),
    rule=st.sampled_from(["coupled", "coupled", "naive"]),
)
def test_on_equals_off(models: Models, system: System, asked: list[Body], more: int, rule: str) -> None:
    """All at once with speculation, then without it, then streamed."""
    batch = asked * 4 if more == 0 else asked  # up to 16 at once, now and then

    async def scenario() -> None:
        async with served(models, system) as client:
            on = await asyncio.gather(*[ask(client, body, verification=rule) for body in batch])
            off = await asyncio.gather(*[ask(client, body, speculation=False) for body in asked])
            streamed = await asyncio.gather(*[ask_streamed(client, body) for body in asked])
        for idx, found in enumerate(on):
            check_same(found, json.loads(json.dumps(off[idx % len(asked)])))
        assert streamed == [[choice["text"] for choice in found["choices"]] for found in off]

    asyncio.run(scenario())
