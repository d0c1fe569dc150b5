"""The endpoints in process: what good requests get, and what each kind of bad input is told."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, ModelCard
from request_manager.gateway.answer import Sources
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import END, tiny_codec, tiny_tokenizer
from request_manager.gateway.text import TextCodec
from request_manager.testing import Line, ScriptedManager, deltas
from treecore.noise import Seed, choice_seed

TOKENIZER = tiny_tokenizer()
CODEC = tiny_codec()
EOS = TOKENIZER.token_to_id(END)
CARD = ModelCard("tiny", TOKENIZER.get_vocab_size(), 64, (EOS,), 16)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SEED = 2**63 + 5

Json = dict[str, Any]


def ids(text: str) -> list[int]:
    """Tokens of a text."""
    return TOKENIZER.encode(text).ids


def hello(_: Generation) -> Iterable[Line]:
    """'hello é😀' in three steps, the second of which ends inside a character, then EOS."""
    return deltas([*ids("hello é😀"), EOS], [2, 2], "stop")


def client_of(script: Callable[[Generation], Iterable[Line]] = hello, **options: Any) -> httpx.AsyncClient:
    """A client of a gateway whose manager follows the script."""
    return client(ScriptedManager(CARD, script), **options)


def client(manager: ScriptedManager, text: TextCodec = CODEC, **options: Any) -> httpx.AsyncClient:
    """A client of a gateway over this manager, in process; its clock stands still."""
    sources = Sources(clock=lambda: 0.0, now=lambda: 1700000000.5, draw_seed=lambda: SEED)
    app = create_app(manager, text, GatewaySettings(**options), CollectorRegistry(), sources)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def completion(**fields: Any) -> Json:
    """A completion request."""
    return {"model": "tiny", "prompt": "ab", **fields}


def chat(**fields: Any) -> Json:
    """A chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], **fields}


async def post(path: str, body: Json, script: Callable[[Generation], Iterable[Line]] = hello) -> httpx.Response:
    """One request to a fresh gateway."""
    async with client_of(script) as gateway:
        return await gateway.post(path, json=body)


async def asked(path: str, body: Json) -> list[Generation]:
    """The generations that a good request asks the manager for, in choice order."""
    manager = ScriptedManager(CARD, hello)
    async with client(manager) as gateway:
        response = await gateway.post(path, json=body)
    assert response.status_code == 200, response.text
    return sorted(manager.asked, key=lambda generation: int(generation.request_id.rsplit("-", 1)[1]))


def events(response: httpx.Response) -> list[Json]:
    """The events of a stream that ended well."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_completion() -> None:
    """Every key of the OpenAI object, exact usage, and the seed that was drawn."""
    response = await post(COMPLETIONS, completion())
    body = response.json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body.pop("id"))
    num_tokens = len(ids("hello é😀")) + 1
    assert body == {
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello é😀", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": num_tokens,
            "total_tokens": num_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "espalier": {
            "seed": SEED,
            "steps": 3,
            "tokens_per_step": num_tokens / 3,
            "accepted_per_position": [3, 1],  # runs of 2, 2 and 3 tokens
        },
    }


async def test_chat() -> None:
    """The conversation goes through the model's template; the answer is a message."""
    response = await post(CHAT, chat(espalier={"return_token_ids": True}))
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert response.headers["x-request-id"] == body["id"]
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "hello é😀", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["espalier"]["token_ids"] == [[*ids("hello é😀"), EOS]]
    assert len(body["espalier"]["token_ids"][0]) == body["usage"]["completion_tokens"]


async def test_chat_prompt() -> None:
    """Text parts are lines; `developer` is the template's system."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "hi"}, {"role": "user", "content": parts, "tool_calls": None}]
    (generation,) = await asked(CHAT, chat(messages=messages))
    expected = "<|start|>system\nhi<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n"
    assert generation.prompt.tolist() == ids(expected)
    assert generation.prompt.dtype == np.int32
    assert generation.max_tokens == CARD.context_len - len(generation.prompt)


async def test_chat_stream() -> None:
    """Role first, then text, then the finish reason with the espalier object; no usage unless asked."""
    chunks = events(await post(CHAT, chat(stream=True)))
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    told = [chunk["choices"][0] for chunk in chunks]
    assert told[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in told) == "hello é😀"
    assert told[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert [chunk.get("espalier", {}).get("steps") for chunk in chunks] == [*[None] * (len(chunks) - 1), 3]


async def test_completion_stream_with_usage() -> None:
    """The usage chunk is the last, without choices; the others say that they have none."""
    chunks = events(await post(COMPLETIONS, completion(stream=True, stream_options={"include_usage": True})))
    *others, last = chunks
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert last["choices"] == []
    whole = (await post(COMPLETIONS, completion())).json()
    assert (last["usage"], last["espalier"]) == (whole["usage"], whole["espalier"])
    assert "".join(chunk["choices"][0]["text"] for chunk in others) == "hello é😀"
    assert others[-1]["espalier"] == last["espalier"]


@pytest.mark.parametrize("stop", ["lo", ["zz", "lo"], "\u00e9", ["hello \u00e9\U0001f600!"]])
@pytest.mark.parametrize("max_tokens", [1, 3, 16])
async def test_streams_say_what_whole_answers_say(stop: str | list[str], max_tokens: int) -> None:
    """Text, finish reason, usage and token ids are the same, with stop strings and limits."""

    def limited(generation: Generation) -> Iterable[Line]:
        return deltas(ids("hello é😀 hello")[: generation.max_tokens], [2, 1, 4], "length")

    body = completion(stop=stop, max_tokens=max_tokens, espalier={"return_token_ids": True})
    whole = (await post(COMPLETIONS, body, limited)).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await post(COMPLETIONS, streamed, limited))
    (choice,) = whole["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert (last["usage"], last["espalier"]) == (whole["usage"], whole["espalier"])
    assert whole["usage"]["completion_tokens"] == len(whole["espalier"]["token_ids"][0])


async def test_n_choices_of_several_prompts() -> None:
    """Choice prompt_idx * n + i; each with its own seed, derived from the request's; prompts counted once."""
    body = completion(prompt=["a", "bc"], n=2, seed=7)
    generations = await asked(COMPLETIONS, body)
    assert [generation.prompt.tolist() for generation in generations] == [ids("a")] * 2 + [ids("bc")] * 2
    assert [generation.params.seed for generation in generations] == [choice_seed(Seed(7), idx) for idx in range(4)]
    assert len({generation.request_id for generation in generations}) == 4
    whole = (await post(COMPLETIONS, body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["espalier"]["steps"] == 12
    assert whole["espalier"]["accepted_per_position"] == [12, 4]


async def test_n_choices_streamed() -> None:
    """Each choice has its own role, text and finish; only the very last chunk carries the espalier object."""
    chunks = events(await post(CHAT, chat(n=3, stream=True)))
    for idx in range(3):
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == idx]
        assert told[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in told) == "hello é😀"
        assert told[-1]["finish_reason"] == "stop"
    assert ["espalier" in chunk for chunk in chunks] == [*[False] * (len(chunks) - 1), True]


async def test_sampling_fields_reach_the_manager() -> None:
    """Given values, then the defaults of the OpenAI API."""
    given_fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 9, "max_tokens": 5}
    generations = await asked(COMPLETIONS, completion(**given_fields, espalier={"speculation": False, "tree": [2, 2]}))
    (generation,) = generations
    params = generation.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.25, 3, 9)
    assert (generation.max_tokens, generation.speculation, generation.tree) == (5, False, (2, 2))
    (generation,) = await asked(COMPLETIONS, completion(temperature=None, espalier=None, stop=None))
    params = generation.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 0, SEED)
    assert (generation.max_tokens, generation.speculation, generation.tree) == (16, True, None)


@pytest.mark.parametrize(
    ("espalier", "is_drafted", "ssms"),
    [
        ({}, True, None),
        ({"ssms": ["b", "a", "b"]}, True, {"a", "b"}),
        ({"ssms": []}, False, set()),
        ({"ssms": ["a"], "speculation": False}, False, {"a"}),
    ],
)
async def test_a_request_names_who_drafts(espalier: Json, is_drafted: bool, ssms: set[str] | None) -> None:
    """Nobody in particular is everybody; an empty list is nobody."""
    (generation,) = await asked(COMPLETIONS, completion(espalier=espalier))
    assert (generation.speculation, generation.ssms) == (is_drafted, ssms)
    assert generation.may_draft("a") == (ssms is None or "a" in ssms)


async def test_a_tree_may_be_dynamic_and_drafted_ahead() -> None:
    """What is not said is the deployment's choice."""
    (generation,) = await asked(COMPLETIONS, completion(espalier={"tree": "dynamic", "draft_ahead": False}))
    assert (generation.tree, generation.draft_ahead) == ("dynamic", False)
    (generation,) = await asked(COMPLETIONS, completion())
    assert (generation.tree, generation.draft_ahead) == (None, None)


@pytest.mark.parametrize(("seed", "used"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)])
async def test_seeds_are_64_bits(seed: int, used: int) -> None:
    """A negative seed stands for itself modulo 2^64; the response tells the one that was used."""
    (generation,) = await asked(COMPLETIONS, completion(seed=seed))
    assert generation.params.seed == used
    assert (await post(COMPLETIONS, completion(seed=seed))).json()["espalier"]["seed"] == used


async def test_unseeded_requests_differ() -> None:
    """Case 4: two requests without a seed get two seeds, from the real source."""
    app = create_app(ScriptedManager(CARD, hello), CODEC, GatewaySettings(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as gateway:
        told = [(await gateway.post(COMPLETIONS, json=completion())).json()["espalier"]["seed"] for _ in range(2)]
    assert told[0] != told[1]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4), ({"max_tokens": 3, "max_completion_tokens": 4}, 4)],
)
async def test_max_completion_tokens_wins(fields: Json, limit: int) -> None:
    """Of the two names the newer one counts."""
    (generation,) = await asked(CHAT, chat(**fields))
    assert generation.max_tokens == limit


async def test_a_prompt_may_fill_the_context_but_one() -> None:
    """The default limit is cut to the room that is left; max_tokens 1 fits."""
    prompt = [1] * (CARD.context_len - 1)
    (generation,) = await asked(COMPLETIONS, completion(prompt=prompt))
    assert generation.max_tokens == 1
    await asked(COMPLETIONS, completion(prompt=[prompt, prompt], max_tokens=1))


NEUTRAL = {
    "length_penalty": 1,
    "skip_special_tokens": True,
    "bad_words": [],
    "prompt_logprobs": None,
}


async def test_neutral_values_are_accepted() -> None:
    """A field that changes nothing is no reason to refuse, and is not unknown."""
    async with client_of() as gateway:
        for path, body in [
            (COMPLETIONS, completion(**NEUTRAL, best_of=1, suffix=None, user="u")),
            (CHAT, chat(**NEUTRAL, tools=[], tool_choice="auto")),
        ]:
            response = await gateway.post(path, json=body)
            assert response.status_code == 200, response.text
            assert "x-espalier-ignored-fields" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named(stream: bool) -> None:
    """They are ignored, and the header says so, whatever they are called."""
    response = await post(COMPLETIONS, completion(stream=stream, topk=3, **{"a\r\nb: é": 1}))
    assert response.headers["x-espalier-ignored-fields"] == "topk, a%0D%0Ab%3A%20%C3%A9"


async def test_health_and_readiness() -> None:
    """Health is the event loop; ready is a token now; without a verifier the models are unknown."""
    manager = ScriptedManager(CARD, hello)
    async with client(manager) as gateway:
        assert (await gateway.get("/ready")).status_code == 200
        manager.ready = False
        response = await gateway.get("/ready")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert (await gateway.get("/health")).status_code == 200
    async with client(ScriptedManager(None, hello)) as gateway:
        assert (await gateway.get("/health")).status_code == 200
        assert [(await gateway.get(path)).status_code for path in ("/ready", "/v1/models")] == [503, 503]
        assert (await gateway.post(CHAT, json=chat())).status_code == 503


async def test_the_loop_turns_while_a_prompt_is_encoded() -> None:
    """Encoding waits for the answer to another request: on the event loop that answer would never come."""
    encoding, answered = threading.Event(), threading.Event()

    class SlowCodec(TextCodec):
        def encode(self, text: str) -> list[int]:
            encoding.set()
            assert answered.wait(10.0)
            return super().encode(text)

    async with client(ScriptedManager(CARD, hello), SlowCodec(tiny_tokenizer())) as gateway:
        asking = asyncio.create_task(gateway.post(COMPLETIONS, json=completion()))
        assert await asyncio.to_thread(encoding.wait, 10.0)
        assert (await gateway.get("/health")).status_code == 200
        answered.set()
        assert (await asking).status_code == 200


async def test_models_and_aliases() -> None:
    """The model and its aliases are listed, shown and accepted; the answer carries the name that was asked for."""
    async with client_of(model_aliases=("gpt/x",)) as gateway:
        listed = (await gateway.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "gpt/x"]
        assert (await gateway.get("/v1/models/gpt/x")).json()["id"] == "gpt/x"
        assert (await gateway.get("/v1/models/other")).status_code == 404
        assert (await gateway.post(CHAT, json=chat(model="gpt/x"))).json()["model"] == "gpt/x"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("PUT", "/health", 405)]
)
async def test_unknown_routes(method: str, path: str, status: int) -> None:
    """Routing errors have OpenAI's shape too; a 405 says what is allowed."""
    async with client_of() as gateway:
        response = await gateway.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


async def test_a_retry_with_an_idempotency_key_says_the_same() -> None:
    """The key names the seed where the client names none, at any gateway; another key names another one."""

    async def seed(key: str | None, **fields: Any) -> int:
        async with client_of() as gateway:
            headers = {} if key is None else {"idempotency-key": key}
            found = await gateway.post(COMPLETIONS, json=completion(**fields), headers=headers)
        return int(found.json()["espalier"]["seed"])

    first = await seed("order 66")
    assert await seed("order 66") == first
    assert first < 2**53
    assert await seed("order 67") != first
    assert await seed(None) == SEED
    assert await seed("order 66", seed=5) == 5
