"""Server-sent events as a response that ends its source when the client leaves. Knows ASGI, not what is sent."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from request_manager.gateway.disconnect import while_connected

Event = dict[str, Any] | str

DONE = "[DONE]"


class EventStream(Response):
    """Sends each item as one `data:` event. `events` is closed whatever happens, at once if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event], headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 (ASGI)
        """Raises ClientDisconnect if the client left before the end."""
        async with aclosing(self._events):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": _encoded(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encoded(event: Event) -> bytes:
    data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {data}\n\n".encode()
