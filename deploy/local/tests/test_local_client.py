"""The HTTP client: what it sends, what it makes of a stream, and how it fails."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.client import Ask, complete, open_client, served_model
from treecore.errors import InvalidRequest, Unavailable

LAST = {"seed": 7, "steps": 2, "tokens_per_step": 1.5, "token_ids": [[5, 6, 7]]}


def sse(*events: Any) -> bytes:
    """A server-sent event stream of these objects."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def text(content: str, finish: str | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish}]}


def gateway(body: bytes, status: int = 200, sent: list[httpx.Request] | None = None) -> httpx.AsyncClient:
    """A client whose server answers anything with `body`."""

    def respond(request: httpx.Request) -> httpx.Response:
        (sent if sent is not None else []).append(request)
        return httpx.Response(status, content=body)

    return httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(respond))


async def test_a_stream_becomes_an_answer() -> None:
    """Text in order, and what the extension and the usage say."""
    usage = {"choices": [], "usage": {"completion_tokens": 3}, "espalier": LAST}
    heard: list[str] = []
    async with gateway(sse(text("Pa"), text("ris"), text("", "stop"), usage)) as client:
        answer = await complete(client, "llm", Ask("?"), heard.append)
    assert heard == ["Pa", "ris"]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Paris", (5, 6, 7), "stop")
    assert (answer.seed, answer.steps, answer.tokens_per_step, answer.num_tokens) == (7, 2, 1.5, 3)
    assert answer.ms_per_token > 0


async def test_the_request_carries_what_was_asked() -> None:
    """Chat is a message; a seed is sent only if there is one."""
    sent: list[httpx.Request] = []
    async with gateway(sse(text("", "stop")), sent=sent) as client:
        await complete(client, "llm", Ask("hi", chat=True, speculation=False, tree=(2, 1)))
        await complete(client, "llm", Ask("hi", seed=3, temperature=0.5, max_tokens=9))
        await complete(client, "llm", Ask("hi", tree="dynamic", draft_ahead=False, ssms=("a", "b")))
    chat, raw, dynamic = (json.loads(request.content) for request in sent)
    assert [request.url.path for request in sent] == ["/v1/chat/completions", "/v1/completions", "/v1/completions"]
    assert chat["messages"] == [{"role": "user", "content": "hi"}]
    assert chat["espalier"] == {"return_token_ids": True, "speculation": False, "tree": [2, 1]}
    wishes = {"tree": "dynamic", "draft_ahead": False, "ssms": ["a", "b"]}
    assert dynamic["espalier"] == {"return_token_ids": True, "speculation": True, **wishes}
    assert "seed" not in chat
    assert (raw["prompt"], raw["seed"], raw["temperature"], raw["max_tokens"]) == ("hi", 3, 0.5, 9)


async def test_chat_deltas_are_text_too() -> None:
    """The first chunk of a chat has a role and no content."""
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    content = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "length"}]}
    async with gateway(sse(role, content)) as client:
        assert (await complete(client, "llm", Ask("?", chat=True))).text == "hi"


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequest), (429, InvalidRequest), (503, Unavailable)])
async def test_an_error_answer_is_told_in_the_gateways_words(status, kind) -> None:
    """Whatever its status."""
    async with gateway(json.dumps({"error": {"message": "no such model"}}).encode(), status) as client:
        with pytest.raises(kind, match=r"^no such model$"):
            await complete(client, "llm", Ask("?"))


async def test_an_error_within_the_stream_is_one() -> None:
    """The text before it was shown, the answer is not whole."""
    async with gateway(sse(text("Pa"), {"error": {"message": "verifier lost"}})) as client:
        with pytest.raises(Unavailable, match="verifier lost"):
            await complete(client, "llm", Ask("?"))


@settings(deadline=None)
@given(st.integers(0, 400))
async def test_a_stream_that_breaks_off_is_never_an_answer(cut: int) -> None:
    """Cut anywhere before the finish reason."""
    whole = sse(text("Pa"), text("ris"), text("", "stop"))
    body = whole[: min(cut, whole.index(b'"stop"'))]
    async with gateway(body) as client:
        with pytest.raises(Unavailable):
            await complete(client, "llm", Ask("?"))


async def test_who_is_no_gateway_is_told_so() -> None:
    """HTML or other JSON with status 200, and nobody at all."""
    for body in (b"<html>", b"[]", b"{}", b'{"data": null}'):
        async with gateway(body) as client:
            with pytest.raises(Unavailable, match="is no Espalier"):
                await served_model(client)
    async with open_client("http://127.0.0.1:1/v1/") as client:
        assert str(client.base_url) == "http://127.0.0.1:1"
        with pytest.raises(Unavailable, match="is no Espalier"):
            await served_model(client)
