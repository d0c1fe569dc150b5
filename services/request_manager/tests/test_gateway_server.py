"""The gateway behind a real server: the official SDK, clients that leave, large bodies."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, ModelCard, TokenDelta
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import END, tiny_codec, tiny_tokenizer
from request_manager.testing import HANG, Line, ScriptedManager, deltas
from treecore.errors import Overloaded, Unavailable

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.token_to_id(END)
CARD = ModelCard("tiny", TOKENIZER.get_vocab_size(), 64, (EOS,), 16)
HELLO = [*TOKENIZER.encode("hello é😀").ids, EOS]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
DEADLINE_S = 10.0


def hello(_: Generation) -> Iterable[Line]:
    """A few steps, then EOS."""
    return deltas(HELLO, [2, 2], "stop")


@asynccontextmanager
async def served(
    script: Callable[[Generation], Iterable[Line]], registry: CollectorRegistry | None = None
) -> AsyncIterator[tuple[str, ScriptedManager]]:
    """A real server on a free port: its URL and its manager."""
    manager = ScriptedManager(CARD, script)
    app = create_app(manager, tiny_codec(), GatewaySettings(), registry or CollectorRegistry())
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", manager
        server.should_exit = True
        await asyncio.wait_for(serving, DEADLINE_S)


@asynccontextmanager
async def sdk(script: Callable[[Generation], Iterable[Line]]) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official SDK, which does not retry here."""
    async with (
        served(script) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_sdk() -> None:
    """All that an SDK's user does first: list models, chat, complete, stream both, read usage."""
    async with sdk(hello) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "espalier"
        told = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, seed=-3)
        assert [choice.message.content for choice in told.choices] == ["hello é😀"] * 2
        assert told.usage is not None
        assert told.usage.completion_tokens == 2 * len(HELLO)
        assert told.model_extra is not None
        assert told.model_extra["espalier"]["seed"] == 2**64 - 3
        completed = await client.completions.create(model="tiny", prompt="ab", stop=["lo"])
        assert completed.choices[0].text == "hel"
        assert completed.choices[0].finish_reason == "stop"


async def test_sdk_streams() -> None:
    """Both endpoints, with a usage chunk and through the SDK's own accumulating helper."""
    async with sdk(hello) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello é😀"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(HELLO)
        completion = await client.completions.create(model="tiny", prompt="ab", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in completion]) == "hello é😀"
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == "hello é😀"


async def test_sdk_logprobs() -> None:
    """The SDK's types hold what was asked for, streamed or not, at both endpoints."""

    def spoken(generation: Generation) -> Iterable[Line]:
        return deltas(HELLO, [2, 2], "stop", generation.params.num_logprobs)

    async with sdk(spoken) as client:
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
        content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
        assert content is not None
        assert [len(entry.top_logprobs) for entry in content] == [2] * len(HELLO)
        async with client.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].logprobs is not None
        streamed = final.choices[0].logprobs.content or []
        assert [entry.logprob for entry in streamed] == [entry.logprob for entry in content]
        completion = await client.completions.create(model="tiny", prompt="ab", logprobs=1, logit_bias={"5": 1})
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.token_logprobs == [entry.logprob for entry in content]


async def test_sdk_errors() -> None:
    """The SDK's exception types, with our message and parameter."""
    async with sdk(lambda _: [Overloaded("full", 1)]) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="ab", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert full.value.response.headers["retry-after"] == "1"
    async with sdk(lambda _: [TokenDelta((1,), None, 1), Unavailable("the verifier left")]) as client:
        stream = await client.completions.create(model="tiny", prompt="ab", stream=True)
        with pytest.raises(openai.APIError, match="the verifier left"):
            _ = [chunk async for chunk in stream]


async def test_a_client_that_leaves_a_stream() -> None:
    """The generations are cancelled while they wait for their next token."""
    registry = CollectorRegistry()
    body = {"model": "tiny", "prompt": "ab", "n": 2, "stream": True}
    async with served(lambda _: [TokenDelta((1,), None, 1), HANG], registry) as (url, manager):
        async with httpx.AsyncClient() as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            await anext(response.aiter_lines())
        await asyncio.wait_for(manager.until(lambda: len(manager.ended) == 2), DEADLINE_S)
        assert all(was_cancelled for _, was_cancelled in manager.ended)
    labels = {"route": "/v1/completions", "code": "499"}
    assert registry.get_sample_value("espalier_http_requests_total", labels) == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token(stream: bool) -> None:
    """Nothing was sent yet: the generation is cancelled all the same, and the server goes on."""
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
    async with served(lambda _: [HANG]) as (url, manager), httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body))
        await asyncio.wait_for(manager.until(lambda: manager.num_open == 1), DEADLINE_S)
        asking.cancel()
        await asyncio.wait_for(manager.until(lambda: manager.num_open == 0), DEADLINE_S)
        assert (await client.get(f"{url}/health")).status_code == 200


async def test_a_body_of_10_mb_gets_its_413() -> None:
    """The client sees the answer although it is still sending, and the server goes on."""
    body = json.dumps({"model": "tiny", "prompt": "a" * 10_000_000}).encode()
    async with served(hello) as (url, manager), httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/completions", content=body)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"
        assert (await client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})).status_code == 200
        assert len(manager.asked) == 1


async def test_16_streams_at_once() -> None:
    """Each of many concurrent streams says what it says alone."""

    def own(generation: Generation) -> Iterable[Line]:
        return deltas([*generation.prompt.tolist() * 3, *HELLO], [3, 1, 2], "stop")

    prompts = [f"é{idx}😀" for idx in range(16)]
    async with sdk(own) as client:

        async def ask(prompt: str) -> str:
            stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, max_tokens=40)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, prompts)) == [prompt * 3 + "hello é😀" for prompt in prompts]
