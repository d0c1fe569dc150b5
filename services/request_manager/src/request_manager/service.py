"""The process: gateway and manager in one event loop, wired together. The only place that knows all the parts."""

import asyncio
import os
import secrets
import socket
import sys
from contextlib import nullcontext

import uvicorn
from fastapi import FastAPI

from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.text import TextCodec
from request_manager.grammars import ModelGrammars
from request_manager.manager.coordinator import Coordinator, Policy
from request_manager.manager.local import LocalManager
from request_manager.manager.metrics import ManagerMetrics
from request_manager.manager.registry import Registry, watch
from request_manager.manager.ssm_pool import SsmPool
from request_manager.manager.step_record import Observer
from request_manager.manager.verifying import VerifierLink
from request_manager.settings import ManagerSettings
from treecore.errors import ConfigError, InvalidRequest
from treecore.expand import expansion
from treecore.service.bus import Bus, NatsBus
from treecore.service.lifecycle import run_service
from treecore.service.operations import Operations, open_operations
from treecore.service.tasks import first_of


def policy_of(settings: ManagerSettings) -> Policy:
    """The coordinator's policy; raises ConfigError if the default tree exceeds its node budget."""
    try:
        widths = expansion(settings.widths(), settings.max_tree_nodes)
    except InvalidRequest as error:
        raise ConfigError(f"--tree: {error}") from error
    return Policy(
        max_batch=settings.max_batch,
        max_waiting=settings.max_waiting,
        step_rows=settings.step_rows,
        max_tree_nodes=settings.max_tree_nodes,
        expansion=widths,
        draft_deadline_s=settings.draft_deadline_s,
        dynamic=settings.is_dynamic,
        draft_ahead=settings.draft_ahead,
    )


def build_coordinator(bus: Bus, registry: Registry, policy: Policy, observer: Observer, owner: str) -> Coordinator:
    """A coordinator with its links to the workers."""
    verifier, ssms = VerifierLink(bus, registry, owner), SsmPool(bus, registry, owner, observer)
    return Coordinator(registry, verifier, ssms, policy, observer)


async def serve(settings: ManagerSettings, stop: asyncio.Event) -> None:
    """Serve HTTP until `stop`, or until a part fails. Raises ConfigError for what start-up refuses."""
    async with open_operations(settings) as operations:
        await _serve(settings, stop, operations)


async def _serve(settings: ManagerSettings, stop: asyncio.Event, operations: Operations) -> None:
    policy = policy_of(settings)
    text = TextCodec.from_dir(settings.model)
    listener = _listen(settings.host, settings.port)
    owner = f"manager-{secrets.token_hex(4)}"
    bus = NatsBus(settings.subject_prefix, operations.registry)
    registry = Registry(asyncio.get_running_loop().time)
    observer = ManagerMetrics(operations.registry)
    coordinator = build_coordinator(bus, registry, policy, observer, owner)
    manager = LocalManager(coordinator, registry, policy.max_tree_nodes, settings.max_pause_s)
    grammars = ModelGrammars(manager, settings.model)
    app = create_app(manager, text, GatewaySettings.from_env(os.environ), operations.registry, grammars=grammars)
    operations.vitals.start(lambda: bus.is_connected and manager.is_ready() and not stop.is_set())

    async def manage() -> None:
        await bus.open(settings.nats_url, owner, stop)
        await first_of(coordinator.run(), watch(registry, bus, owner, observer))

    try:
        await first_of(_http(app, listener, stop), manage())  # /health answers before the broker is there
    finally:
        await bus.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error


async def _http(app: FastAPI, listener: socket.socket, stop: asyncio.Event) -> None:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # signals set `stop`, and that is ours
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    server.should_exit = True
    await serving


def main() -> int:
    """Run the gateway and the manager; returns the exit status."""
    return run_service("request_manager", ManagerSettings, serve, sys.argv[1:])
