"""OpenAI-shaped errors from the error tree. Knows HTTP status codes; must not know requests or models."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from treecore.errors import EspalierError, InvalidRequest, Overloaded, PayloadTooLarge, Unauthorized, Unavailable

UNAVAILABLE_RETRY_AFTER_S = 2

_MAX_NAME = 100  # characters of a field's name: a client may choose it

_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_body(error: Exception) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; an error that is not ours to explain leaks no detail."""
    match error:
        case InvalidRequest():
            return _body(str(error), "invalid_request_error", error.param, error.reason)
        case Unauthorized():
            return _body(str(error), "invalid_request_error", None, error.code)
        case Overloaded():
            return _body(str(error), "rate_limit_error", None, error.code)
        case Unavailable():
            return _body(str(error), "server_error", None, error.code)
        case HTTPException():
            code = _ROUTING_CODES.get(error.status_code, "http_error")
            return _body(error.detail, "invalid_request_error", None, code)
        case _:
            return _body("internal error", "server_error", None, EspalierError.code)


def error_code(error: Exception) -> str:
    """What clients and metrics call it."""
    code: str = error_body(error)["error"]["code"]
    return code


def error_response(error: Exception) -> JSONResponse:
    """The whole HTTP answer for an error, with Retry-After where coming back helps."""
    return JSONResponse(error_body(error), status_of(error), _headers(error))


def status_of(error: Exception) -> int:
    """The HTTP status that an error stands for."""
    match error:
        case PayloadTooLarge():
            return 413
        case InvalidRequest():
            return 400
        case Unauthorized():
            return 401
        case Overloaded():
            return 429
        case Unavailable():
            return 503
        case HTTPException():
            return error.status_code
        case _:
            return 500


def invalid_request(error: ValidationError, body: Mapping[str, object]) -> InvalidRequest:
    """Pydantic's verdict on `body` as one error that names the parameter as the client wrote it.

    Of a union's many complaints the one that got deepest into the body is the one that the client meant.
    """
    found = [(_param(item["loc"], body, is_missing=item["type"] == "missing"), item["msg"]) for item in error.errors()]
    param, message = max(found, key=lambda pair: len(pair[0]))
    name = ".".join(param)[:_MAX_NAME]
    return InvalidRequest(f"{name}: {message}", name)


def _param(loc: Iterable[int | str], body: Any, *, is_missing: bool) -> list[str]:
    """The part of pydantic's `loc` that leads through the body: names of union members are left out."""
    path, node = list(loc), body
    names: list[str] = []
    for depth, part in enumerate(path):
        is_there = _has(node, part)
        if is_there:
            node = node[part]
        if is_there or (is_missing and depth == len(path) - 1):
            names.append(str(part))
    return names


def _has(node: object, part: int | str) -> bool:
    if isinstance(node, list):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _headers(error: Exception) -> Mapping[str, str] | None:
    match error:
        case Overloaded():
            return {"retry-after": str(max(1, error.retry_after_s))}
        case Unauthorized():
            return {"www-authenticate": "Bearer"}
        case Unavailable():
            return {"retry-after": str(UNAVAILABLE_RETRY_AFTER_S)}
        case HTTPException():
            return error.headers
        case _:
            return None


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
