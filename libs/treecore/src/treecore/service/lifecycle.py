"""How a service process lives: one event loop, one stop signal, one clear line when it cannot start."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import uvloop

from treecore.errors import ConfigError, GroupFailed, Unavailable
from treecore.service.settings import ServiceSettings, read_settings
from treecore.service.telemetry import log_event, start_logging
from treecore.service.tracing import start_tracing

S = TypeVar("S", bound=ServiceSettings)

_EXIT_CONFIG = 1
_EXIT_CRASH = 70


def run_service(
    name: str, kind: type[S], serve: Callable[[S, asyncio.Event], Awaitable[None]], argv: Sequence[str]
) -> int:
    """Run `serve(settings, stop)` until it returns or SIGTERM/SIGINT sets `stop`; returns the exit status.

    A ConfigError is one line on stderr and exit 1: a supervisor must not try again.
    """
    try:
        settings = read_settings(kind, argv)
        start_logging(name, settings.log_level)
        start_tracing(settings.otlp_endpoint, name)
        uvloop.run(_until_stopped(settings, serve))
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the line that start-up owes the user
        return _EXIT_CONFIG
    except GroupFailed as error:
        log_event(logging.getLogger(name), logging.ERROR, "verifier group failed", reason=error)
        return _EXIT_CRASH
    except Exception:
        logging.getLogger(name).exception("service crashed")
        return _EXIT_CRASH
    return 0


async def _until_stopped(settings: S, serve: Callable[[S, asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await serve(settings, stop)
    except Unavailable:
        if not stop.is_set():  # stopped while it waited for the broker: that is a clean end
            raise
