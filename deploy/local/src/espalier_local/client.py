"""Talks to a gateway: one streamed completion, and what it took.

Knows the HTTP API; must not know who started the gateway, nor what becomes of the text.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx

from treecore.errors import ConfigError, InvalidRequest, Unavailable

_CONNECT_S = 10.0
_SILENCE_S = 600.0

DYNAMIC: Final = "dynamic"
Tree = tuple[int, ...] | Literal["dynamic"]
"""Widths <k1..km>, or a shape that is chosen step by step."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of the model. chat: the prompt is a user's message. max_tokens in tokens.

    tree, draft_ahead, ssms (names): as the gateway's `espalier` object has them; None: the deployment's choice.
    """

    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    speculation: bool = True
    tree: Tree | None = None
    draft_ahead: bool | None = None
    ssms: tuple[str, ...] | None = None
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ms_per_token: between the first and the last token as seen here; with one token, its latency.

    steps: LLM steps that produced tokens. num_tokens: as the gateway counts, the end-of-text token included.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    steps: int
    tokens_per_step: float
    num_tokens: int
    ms_per_token: float


@dataclass(slots=True)
class _Gathered:
    """The answer while it streams. Written by `_take` only."""

    started_s: float
    text: list[str] = field(default_factory=list)
    finish_reason: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    extension: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


async def complete(
    client: httpx.AsyncClient, model: str, ask: Ask, on_text: Callable[[str], None] = lambda _text: None
) -> Answer:
    """Stream one completion; `on_text` gets the text as it comes.

    client: its base_url is the gateway. Raises InvalidRequest with the gateway's own words (HTTP 4xx), Unavailable for
    all else that keeps the answer from being whole.
    """
    gathered = _Gathered(time.perf_counter())
    path = "/v1/chat/completions" if ask.chat else "/v1/completions"
    try:
        async with client.stream("POST", path, json=_body(model, ask), timeout=_timeout()) as response:
            await _check(response)
            async for event in _events(response):
                _take(gathered, event, on_text)
    except httpx.HTTPError as error:
        raise Unavailable(f"{client.base_url}: {error or type(error).__name__}") from error
    except ValueError as error:
        raise Unavailable(f"{client.base_url} sent an event that is no JSON: {error}") from error
    if not gathered.finish_reason:
        raise Unavailable("the answer broke off")
    return _answer(gathered)


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the model that the gateway serves; raises Unavailable."""
    try:
        response = await client.get("/v1/models", timeout=_timeout())
        await _check(response)
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{client.base_url} is no Espalier that answers: {error or type(error).__name__}") from error


def open_client(url: str) -> httpx.AsyncClient:
    """A client for the gateway at `url`; the /v1 of an OpenAI base URL may be there or not. Raises ConfigError."""
    base_url = url.rstrip("/").removesuffix("/v1")
    if not _is_http(base_url):
        raise ConfigError(f"{url!r} is no URL of a gateway, like http://127.0.0.1:8000")
    return httpx.AsyncClient(base_url=base_url, trust_env=False)


def _is_http(url: str) -> bool:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parts.scheme in {"http", "https"} and bool(parts.host) and 0 < (parts.port or 80) < 2**16


def _timeout() -> httpx.Timeout:
    return httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)


def _body(model: str, ask: Ask) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if ask.chat else {"prompt": ask.prompt}
    seed = {} if ask.seed is None else {"seed": ask.seed}
    return {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "espalier": _extension(ask),
        **prompt,
        **seed,
    }


def _extension(ask: Ask) -> dict[str, Any]:
    wishes = {"tree": ask.tree, "draft_ahead": ask.draft_ahead, "ssms": ask.ssms}
    given = {name: value for name, value in wishes.items() if value is not None}
    return {"return_token_ids": True, "speculation": ask.speculation, **given}


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    message = _error_message(await response.aread(), response.status_code)
    raise InvalidRequest(message) if response.is_client_error else Unavailable(message)


def _error_message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {status}"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise Unavailable(f"the gateway sent an event that is no JSON object: {data[:80]}")
        yield event


def _take(gathered: _Gathered, event: dict[str, Any], on_text: Callable[[str], None]) -> None:
    if error := event.get("error"):
        raise Unavailable(str(error.get("message", error)))
    gathered.extension |= event.get("espalier") or {}
    gathered.usage |= event.get("usage") or {}
    for choice in event.get("choices", ()):
        _take_choice(gathered, choice, on_text)


def _take_choice(gathered: _Gathered, choice: dict[str, Any], on_text: Callable[[str], None]) -> None:
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    if text or choice.get("finish_reason"):
        gathered.last_s = time.perf_counter()
        gathered.first_s = gathered.first_s or gathered.last_s
    if text:
        gathered.text.append(text)
        on_text(text)
    gathered.finish_reason = choice.get("finish_reason") or gathered.finish_reason


def _answer(gathered: _Gathered) -> Answer:
    extension = gathered.extension
    num_tokens = int(gathered.usage.get("completion_tokens", 0))
    return Answer(
        text="".join(gathered.text),
        token_ids=tuple((extension.get("token_ids") or [[]])[0]),
        finish_reason=gathered.finish_reason,
        seed=int(extension.get("seed", 0)),
        steps=int(extension.get("steps", 0)),
        tokens_per_step=float(extension.get("tokens_per_step") or 0.0),
        num_tokens=num_tokens,
        ms_per_token=_ms_per_token(gathered, num_tokens),
    )


def _ms_per_token(gathered: _Gathered, num_tokens: int) -> float:
    first_s = gathered.first_s or gathered.last_s
    if num_tokens > 1 and gathered.last_s > first_s:
        return round(1000 * (gathered.last_s - first_s) / (num_tokens - 1), 3)
    return round(1000 * (gathered.last_s - gathered.started_s) / max(num_tokens, 1), 3)
