"""What surrounds every HTTP exchange: its id, its count, and the answer to an error that nobody else answered.

Knows ASGI and errors; must not know what routes do. Plain ASGI, so that streams and disconnects pass untouched.
"""

import logging
import uuid
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from request_manager.gateway.errors import error_code, error_response, status_of
from request_manager.gateway.metrics import GatewayMetrics

CLIENT_LEFT = 499

_log = logging.getLogger(__name__)


class Envelope:
    """ASGI middleware. scope["state"]["request_id"] is the exchange's id, and its x-request-id header.

    id_prefixes: by path; other paths get "req-".
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, id_prefixes: Mapping[str, str]) -> None:
        self._app = app
        self._metrics = metrics
        self._id_prefixes = id_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the exchange on and see it to its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._id_prefixes.get(scope["path"], "req-") + uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        outgoing = _Outgoing(send, request_id)
        try:
            await self._app(scope, receive, outgoing)
        except ClientDisconnect:
            outgoing.status = CLIENT_LEFT
        except Exception as error:  # the edge of the exchange's task
            log_unexpected(error, request_id)
            self._metrics.count_error(error_code(error))
            if outgoing.status is not None:
                raise
            await error_response(error)(scope, receive, outgoing)
        finally:
            self._metrics.count_request(_route(scope), outgoing.status or CLIENT_LEFT)


def log_unexpected(error: Exception, request_id: str) -> None:
    """Log an error that is nobody's answer but ours to mend, with the request id and a traceback."""
    if not isinstance(error, HTTPException) and status_of(error) == 500:
        _log.error("request not answered", exc_info=error, extra={"fields": {"request_id": request_id}})


class _Outgoing:
    """The send channel, which adds the request id and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        await self._send(message)


def _route(scope: Scope) -> str:
    """The route's template, so that the label has few values whatever clients ask for."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"
