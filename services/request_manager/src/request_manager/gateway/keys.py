"""Who may use the gateway: API keys from a file, which may change while it runs. Knows HTTP headers, no routes."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from treecore.errors import ConfigError, Unauthorized
from treecore.service.telemetry import log_event

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What a load balancer asks; everything else needs a key, where there are any."""

_SCHEME = "bearer "

Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys in a file, one a line; read again when the file changes, so that keys rotate without a restart.

    Lines that begin with # are comments. Raises ConfigError for a file that cannot be read, without a key, or with one
    that no header can carry.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stamp, self._digests = _stamp_or_none(path), _digests(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ESPALIER_GATEWAY_API_KEYS_FILE: {path}: {_reason(error)}") from error

    def allow(self, key: str) -> bool:
        """Whether `key` is one of them."""
        self._refresh()
        return _digest(key) in self._digests  # of digests nobody learns anything by how long a comparison takes

    def _refresh(self) -> None:
        """What cannot be read changes nothing: the keys that were there stay good. It is said once."""
        stamp = _stamp_or_none(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _digests(self._path)
            log_event(logger, logging.INFO, "api keys read", num_keys=len(self._digests))
        except (OSError, ValueError) as error:
            log_event(logger, logging.WARNING, "api keys not read", error=_reason(error))


class KeyGuard:
    """ASGI middleware: lets through who shows a key. Raises Unauthorized."""

    def __init__(self, app: ASGIApp, allow: Callable[[str], bool]) -> None:
        self._app = app
        self._allow = allow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the exchange on, or not."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allow(_key(Headers(scope=scope))):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")
        await self._app(scope, receive, send)


def _key(headers: Headers) -> str:
    value = headers.get("authorization", "")
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""


def _digests(path: Path) -> frozenset[bytes]:
    lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ValueError("no key in it")
    for number, key in keys.items():
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"line {number}: a key is printable ASCII")
    return frozenset(map(_digest, keys.values()))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _stamp_or_none(path: Path) -> Stamp | None:
    """What changes with the file's content; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
