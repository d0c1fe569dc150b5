"""Reads a request's JSON object within a size and a time. Knows bytes and JSON, nothing of their meaning."""

import asyncio

from pydantic_core import from_json
from starlette.requests import Request

from treecore.errors import InvalidRequest, PayloadTooLarge

_DRAIN_FACTOR = 8  # a body up to this many times the limit is read to its end, so that its sender sees the 413


async def read_object(request: Request, max_bytes: int, timeout_s: float) -> dict[str, object]:
    """The body as a JSON object. Raises PayloadTooLarge, or InvalidRequest if it is none or arrives too slowly."""
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {timeout_s:g} s", None, "request_timeout") from None
    return _object(raw)


async def _read(request: Request, max_bytes: int) -> bytes:
    """At most `max_bytes` are ever held, with or without a Content-Length."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        elif size > max_bytes * _DRAIN_FACTOR:
            break
        else:
            chunks.clear()
    if size > max_bytes:
        raise PayloadTooLarge(f"the body exceeds {max_bytes} bytes")
    return b"".join(chunks)


def _object(raw: bytes) -> dict[str, object]:
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object", None, "invalid_json")
    return body
