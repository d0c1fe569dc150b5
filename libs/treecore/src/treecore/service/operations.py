"""The operations port: what a cluster asks of a process, answered by a thread that no step holds up.

    /startupz  200 once start-up is over                 /readyz   200 while it can do its work
    /livez     200 while its event loop turns            /metrics  Prometheus' text

Knows HTTP and Prometheus; must not know what the process does. Plain HTTP for whoever may reach the port: it tells
numbers and takes nothing.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from treecore.errors import ConfigError
from treecore.service.settings import ServiceSettings
from treecore.service.telemetry import log_event
from treecore.service.vitals import Vitals

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # with a client that says nothing, or takes nothing
_STOP_POLL_S = 0.05
_MAX_EXCHANGES = 32

_OK, _NOT_FOUND, _UNAVAILABLE = 200, 404, 503


class Operations:
    """A process's metrics and vitals, and where they are told. port: None if that is off."""

    def __init__(self, live_timeout_s: float) -> None:
        self.registry = CollectorRegistry()
        self.vitals = Vitals(live_timeout_s)
        self.port: int | None = None
        ProcessCollector(namespace="espalier", registry=self.registry)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body."""
        vitals = self.vitals
        match path:
            case "/metrics":
                return _OK, CONTENT_TYPE_LATEST, metrics_page(self.registry)
            case "/startupz":
                return _verdict(vitals.has_started, "started", "starting")
            case "/readyz":
                return _verdict(vitals.is_ready, "ready", "not ready")
            case "/livez":
                return _verdict(vitals.is_alive, "alive", "stuck")
            case _:
                return _NOT_FOUND, "text/plain", b"not found\n"


def _verdict(holds: bool, yes: str, no: str) -> tuple[int, str, bytes]:
    return _OK if holds else _UNAVAILABLE, "text/plain", f"{yes if holds else no}\n".encode()


@asynccontextmanager
async def open_operations(settings: ServiceSettings) -> AsyncIterator[Operations]:
    """Operations, told for as long as the body runs. Raises ConfigError for a port that is not free."""
    operations = Operations(settings.live_timeout_s)
    if settings.operations_port is None:
        yield operations
        return
    with _listening(settings.operations_host, settings.operations_port, operations) as operations.port:
        log_event(logger, logging.INFO, "operations port open", host=settings.operations_host, port=operations.port)
        async with _beating(operations.vitals):
            yield operations


@asynccontextmanager
async def _beating(vitals: Vitals) -> AsyncIterator[None]:
    """The body runs for as long as its event loop is watched; raises what the readiness check raised."""
    beating, body = asyncio.create_task(vitals.beat_on()), asyncio.current_task()
    assert body is not None
    beating.add_done_callback(lambda task: None if task.cancelled() else body.cancel())
    try:
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})
    except asyncio.CancelledError:
        if not beating.cancelled():
            beating.result()
        raise


@contextmanager
def _listening(host: str, port: int, operations: Operations) -> Iterator[int]:
    try:
        server = _Server(host, port, operations)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--operations-port: cannot listen on {host}:{port}: {reason}") from error
    thread = Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="operations", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    """A thread for each exchange, so that a slow client holds up nobody; none of them outlives the process.

    An exchange takes milliseconds: where there are too many the oldest is cut off, so a probe is always heard.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, operations: Operations) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.operations = operations
        self._lock = Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        super().__init__((host, port), _Exchange)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Begin an exchange."""
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open))
            if len(self._open) > _MAX_EXCHANGES:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread finds that its client is gone
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """End an exchange."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - socketserver's
        """A client that went away is nobody's concern; anything else is a bug of ours."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        logger.log(level, "operations exchange failed", exc_info=True)


class _Exchange(BaseHTTPRequestHandler):
    """One request, one answer."""

    server: _Server
    timeout = _PATIENCE_S
    server_version = "espalier"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        status, content_type, body = self.server.operations.answer(urlsplit(self.path).path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Probes come every few seconds: nothing to log."""


def metrics_page(registry: Collector) -> bytes:
    """All metrics of `registry` in Prometheus' text format, without the `_created` times that nothing reads."""
    return generate_latest(_WithoutCreated(registry))


class _WithoutCreated(Collector):
    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
