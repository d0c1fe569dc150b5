"""The HTTP server of a gateway: where it listens, how it drains. Knows the app; must not know who its manager is."""

import asyncio
import os
import socket
from contextlib import nullcontext
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from request_manager.contract import Manager
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.text import TextCodec
from request_manager.grammars import ModelGrammars
from request_manager.settings import ManagerSettings
from treecore.errors import ConfigError

_KEEP_ALIVE_S = 75  # longer than load balancers and HTTP pools keep an idle connection, so that they close it, not we


class Gateway:
    """An app that listens already: whoever comes early waits instead of being refused."""

    def __init__(self, manager: Manager, settings: ManagerSettings, metrics: CollectorRegistry) -> None:
        """Raises ConfigError: no tokenizer, the port is in use, a bad variable."""
        model = settings.model or Path()  # the settings' own check: a gateway has one
        text = TextCodec.from_dir(model)
        self._listener = _listen(settings.host, settings.port)
        self._drain_timeout_s = settings.drain_timeout_s
        grammars = ModelGrammars(manager, model)
        self._app = create_app(manager, text, GatewaySettings.from_env(os.environ), metrics, grammars=grammars)

    async def serve(self, stop: asyncio.Event) -> None:
        """Until `stop`; then nobody new, and what runs has `drain_timeout_s` to finish."""
        server = uvicorn.Server(_config(self._app, self._drain_timeout_s))
        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # signals set `stop`, and that is ours
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving


def _config(app: FastAPI, drain_timeout_s: float) -> uvicorn.Config:
    drain = max(1, round(drain_timeout_s))  # uvicorn counts whole seconds
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=drain,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
