"""What each kind of bad input is told, in process; errors before and behind the first token; bad settings."""

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, ModelCard, TokenDelta
from request_manager.gateway.admission import check_model
from request_manager.gateway.app import create_app
from request_manager.gateway.schema import ChatRequest, parse
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import tiny_codec, tiny_tokenizer
from request_manager.testing import HANG, Line, ScriptedManager
from treecore.errors import ConfigError, InvalidRequest, Overloaded, Unavailable

CODEC = tiny_codec()
(A,) = tiny_tokenizer().encode("a").ids
CARD = ModelCard("tiny", tiny_tokenizer().get_vocab_size(), 64, (), 16)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

Json = dict[str, Any]


def one_token(_: Generation) -> Iterable[Line]:
    """The shortest answer."""
    return [TokenDelta((1,), "length", 1)]


def client(manager: ScriptedManager, **options: Any) -> httpx.AsyncClient:
    """A client of a gateway over this manager, in process."""
    app = create_app(manager, CODEC, GatewaySettings(**options), CollectorRegistry())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def completion(**fields: Any) -> Json:
    """A completion request."""
    return {"model": "tiny", "prompt": "ab", **fields}


def chat(**fields: Any) -> Json:
    """A chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "ab"}], **fields}


async def post(path: str, body: Json, script: Callable[[Generation], Iterable[Line]] = one_token) -> httpx.Response:
    """One request to a fresh gateway."""
    async with client(ScriptedManager(CARD, script)) as gateway:
        return await gateway.post(path, json=body)


LONG = [1] * CARD.context_len

BAD_BOTH: list[tuple[Json, str]] = [
    ({"model": None}, "model"),
    ({"model": "other"}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 64}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["a", 1]}, "stop.1"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": ["a", "b" * 1025]}, "stop.1"),
    ({"espalier": {"tree": None, "": 1}}, "espalier."),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 1}, "user"),
    ({"espalier": {"speculation": "no"}}, "espalier.speculation"),
    ({"espalier": {"sepculation": False}}, "espalier.sepculation"),
    ({"espalier": {"tree": [0]}}, "espalier.tree.0"),
    ({"espalier": {"tree": [1] * 65}}, "espalier.tree"),
    ({"espalier": {"tree": [16]}}, "espalier.tree"),
    ({"espalier": {"tree": "wide"}}, "espalier.tree"),
    ({"espalier": {"tree": ["dynamic"]}}, "espalier.tree.0"),
    ({"espalier": {"draft_ahead": 1}}, "espalier.draft_ahead"),
    ({"espalier": {"ssms": "draft"}}, "espalier.ssms"),
    ({"espalier": {"ssms": [""]}}, "espalier.ssms.0"),
    ({"espalier": {"ssms": ["draft", 1]}}, "espalier.ssms.1"),
    ({"espalier": {"ssms": ["draft"] * 65}}, "espalier.ssms"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"presence_penalty": "1"}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": False}, "min_p"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05"),
    ({"logit_bias": {str(CARD.vocab_size): 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"min_tokens": 64}, "min_tokens"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids.0"),
    ({"stop_token_ids": [CARD.vocab_size]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"espalier": {"verification": "greedy"}}, "espalier.verification"),
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"guided_json": "{}"}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice.1"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "a" * 4097}, "guided_grammar"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a"}, "guided_regex"),
]
BAD_COMPLETIONS: list[tuple[Json, str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1, 2.0]]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [CARD.vocab_size]}, "prompt"),
    ({"prompt": LONG}, "prompt"),
    ({"prompt": "ab" * 64}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 0, "echo": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"echo": "a"}, "echo"),
    ({"suffix": "x"}, "suffix"),
]
BAD_CHAT: list[tuple[Json, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "ab" * 64}]}, "messages"),
    ({"max_completion_tokens": 64}, "max_completion_tokens"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
]
BAD = [
    *((COMPLETIONS, completion(**fields), param) for fields, param in BAD_BOTH + BAD_COMPLETIONS),
    *((CHAT, chat(**fields), param) for fields, param in BAD_BOTH + BAD_CHAT),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), BAD, ids=[f"{param}-{idx}" for idx, (_, _, param) in enumerate(BAD)]
)
async def test_bad_fields_are_named(path: str, body: Json, param: str) -> None:
    """400 with the parameter as the client wrote it; nothing is generated."""
    manager = ScriptedManager(CARD, one_token)
    async with client(manager) as gateway:
        response = await gateway.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]
    assert manager.asked == []


MANY = 10_000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * MANY},
        {"messages": [{"role": "user", "content": [{}] * MANY}]},
        {"espalier": {str(idx): 0 for idx in range(MANY)}},
        {"model": "x" * MANY},
        {"logit_bias": {str(idx): "x" for idx in range(MANY)}},
        {"logit_bias": {"x" * MANY: 0}},
        {"espalier": {"x" * MANY: 0}},
        {"stop_token_ids": ["x"] * MANY},
        {"guided_choice": [0] * MANY},
        {"stop": [0] * MANY},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_ten_thousand_faults_are_one_error(fields: Json) -> None:
    """A body of faults stalls nobody: each fault that is collected costs about a kilobyte and 20 microseconds."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            check_model(parse(ChatRequest, chat(**fields)).model, CARD, ())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 30 * MANY
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (completion(model="other"), "model_not_found"),
        (completion(prompt=LONG), "context_length_exceeded"),
        (completion(echo=True, logprobs=0), "unsupported_parameter"),
        (completion(guided_regex="a"), "unsupported_parameter"),
        (completion(n=0), "invalid_value"),
    ],
)
async def test_error_codes(body: Json, code: str) -> None:
    """Codes that clients switch on."""
    assert (await post(COMPLETIONS, body)).json()["error"]["code"] == code


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "ab", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "ab", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "ab", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "ab", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 5000,
    ],
)
async def test_malformed_json(content: bytes) -> None:
    """What is no JSON object, or holds what JSON does not have, is the client's error."""
    async with client(ScriptedManager(CARD, one_token)) as gateway:
        response = await gateway.post(COMPLETIONS, content=content)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await gateway.post(COMPLETIONS, json=completion())).status_code == 200


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["model", "prompt", "messages", "n", "stop", "seed", "stream", "stream_options", "espalier", "top_p", "tools"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([COMPLETIONS, CHAT]), st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3))
def test_no_json_is_a_server_error(path: str, fields: Json) -> None:
    """Whatever JSON a client sends: an answer or a 400."""
    body = {**completion(), **chat(), **fields}
    response = asyncio.run(post(path, body))
    assert response.status_code in {200, 400}, response.text


class Chunked:
    """A body without a Content-Length, in chunks of 100 bytes; `left` of them were not asked for."""

    def __init__(self, num_chunks: int) -> None:
        self.left = num_chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.left:
            self.left -= 1
            yield b" " * 100


async def test_bodies_are_bounded() -> None:
    """413 with and without a Content-Length, at the limit's next byte; the limit itself is fine."""
    async with client(ScriptedManager(CARD, one_token), max_body_bytes=1000) as gateway:
        fitting = json.dumps(completion()).encode().ljust(1000)
        assert (await gateway.post(COMPLETIONS, content=fitting)).status_code == 200
        long, endless = Chunked(20), Chunked(1000)
        for content in (fitting + b" ", long, endless):
            response = await gateway.post(COMPLETIONS, content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "payload_too_large"
    assert long.left == 0, "a sender that is nearly done should be able to read the answer"
    assert endless.left > 0


async def test_a_body_has_a_deadline() -> None:
    """A body that never arrives does not hold a connection for ever."""

    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with client(ScriptedManager(CARD, one_token), body_timeout_s=0.01) as gateway:
        response = await gateway.post(COMPLETIONS, content=stalled())
    assert (response.status_code, response.json()["error"]["code"]) == (400, "request_timeout")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after", "code"),
    [
        (Overloaded("full", 7), 429, "7", "overloaded"),
        (Unavailable("gone"), 503, "2", "unavailable"),
        (ValueError("secret detail"), 500, None, "internal_error"),
        (ConfigError("secret detail"), 500, None, "internal_error"),
    ],
)
async def test_errors_before_the_first_token(
    error: Exception, status: int, retry_after: str | None, code: str, stream: bool
) -> None:
    """They have a status code, streamed or not; what is not ours to explain leaks nothing."""
    response = await post(CHAT, chat(stream=stream, n=2), lambda _: [error])
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text


async def test_internal_errors_are_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    """A constant event, the id that the client was told, the traceback."""
    response = await post(COMPLETIONS, completion(), lambda _: [ValueError("detail")])
    (record,) = [record for record in caplog.records if record.name.startswith("request_manager")]
    assert record.getMessage() == "request not answered"
    assert record.__dict__["fields"]["request_id"] == response.headers["x-request-id"]
    assert record.exc_info is not None


@pytest.mark.parametrize(("error", "code"), [(Unavailable("gone"), "unavailable"), (ValueError("x"), "internal_error")])
async def test_errors_in_mid_stream(error: Exception, code: str) -> None:
    """An error event ends the stream, without [DONE]."""
    response = await post(COMPLETIONS, completion(stream=True), lambda _: [TokenDelta((A,), None, 1), error])
    assert response.status_code == 200
    first, last, rest = response.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert rest == ""


async def test_overload_of_one_choice_cancels_the_others() -> None:
    """Nothing of a request that gets 429 goes on."""
    manager = ScriptedManager(CARD, lambda asked: [Overloaded("full", 1)] if asked.request_id[-1] == "2" else [HANG])
    async with client(manager) as gateway:
        response = await gateway.post(COMPLETIONS, json=completion(n=3, stream=True))
    assert response.status_code == 429
    assert manager.num_open == 0


def test_settings_from_the_environment() -> None:
    """Good values are read, other programs' variables are not ours."""
    environ = {"ESPALIER_GATEWAY_MODEL_ALIASES": "a, b", "ESPALIER_GATEWAY_BODY_TIMEOUT_S": "2.5", "HOME": "/"}
    read = GatewaySettings.from_env(environ)
    assert (read.model_aliases, read.body_timeout_s) == (("a", "b"), 2.5)
    assert GatewaySettings.from_env({}) == GatewaySettings()


@pytest.mark.parametrize(("name", "value"), [("MAX_BODY_BYTES", "0"), ("MAX_BODY_BITES", "1"), ("MODEL_ALIASES", "a,")])
def test_bad_settings_are_named(name: str, value: str) -> None:
    """A typo or a bad value is an error that names the variable."""
    with pytest.raises(ConfigError, match=f"ESPALIER_GATEWAY_{name}: "):
        GatewaySettings.from_env({f"ESPALIER_GATEWAY_{name}": value})
