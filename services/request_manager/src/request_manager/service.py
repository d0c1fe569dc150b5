"""The process: a gateway, a manager, or both in one event loop. The only place that knows all the parts."""

import asyncio
import secrets
import sys

from request_manager.gateway_role import Gateway
from request_manager.manager_role import manager_parts
from request_manager.relay.desk import Desk
from request_manager.relay.metrics import RelayMetrics
from request_manager.relay.remote import Patience, RemoteManager
from request_manager.roster import Roster, Watch, watch
from request_manager.roster_metrics import RosterMetrics
from request_manager.settings import ManagerSettings
from treecore.service.bus import NatsBus
from treecore.service.lifecycle import run_service
from treecore.service.operations import Operations, open_operations
from treecore.service.presence import Announcer
from treecore.service.tasks import first_of
from treecore.streams import ANNOUNCE_MANAGER, GatewayId, ManagerAnnouncement


async def serve(settings: ManagerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`, or until a part fails. Raises ConfigError for what start-up refuses."""
    async with open_operations(settings) as operations:
        match settings.role:
            case "combined":
                await _serve_both(settings, stop, operations)
            case "gateway":
                await _serve_gateway(settings, stop, operations)
            case "manager":
                await _serve_manager(settings, stop, operations)


async def _serve_both(settings: ManagerSettings, stop: asyncio.Event, operations: Operations) -> None:
    bus = NatsBus(settings.broker, operations.registry)
    parts = manager_parts(bus, settings, operations.registry)
    gateway = Gateway(parts.local, settings, operations.registry)
    operations.vitals.start(lambda: bus.is_connected and parts.local.is_ready() and not stop.is_set())

    async def manage() -> None:
        await bus.open(parts.manager_id, stop)
        await first_of(*parts.running(bus))

    try:
        # /health answers before the broker is there
        await first_of(gateway.serve(stop), manage())
        await parts.verifier.leave()
    finally:
        await bus.close()


async def _serve_gateway(settings: ManagerSettings, stop: asyncio.Event, operations: Operations) -> None:
    bus = NatsBus(settings.broker, operations.registry)
    gateway_id = GatewayId(f"gateway-{secrets.token_hex(4)}")
    managers = Roster[ManagerAnnouncement](asyncio.get_running_loop().time)
    operations.registry.register(RosterMetrics(managers, ("manager",)))
    patience = Patience(settings.max_pause_s, settings.max_waiting)
    remote = RemoteManager(bus, managers, gateway_id, patience, RelayMetrics(operations.registry))
    gateway = Gateway(remote, settings, operations.registry)
    operations.vitals.start(lambda: bus.is_connected and remote.is_ready() and not stop.is_set())

    async def relay() -> None:
        await bus.open(gateway_id, stop)
        await first_of(remote.run(), watch(managers, bus, Watch(ANNOUNCE_MANAGER, ManagerAnnouncement, gateway_id)))

    try:
        await first_of(gateway.serve(stop), relay())
    finally:
        await bus.close()


async def _serve_manager(settings: ManagerSettings, stop: asyncio.Event, operations: Operations) -> None:
    """Until `stop`; then gateways take their requests elsewhere, and another manager may have the verifier."""
    bus = NatsBus(settings.broker, operations.registry)
    parts = manager_parts(bus, settings, operations.registry)
    desk = Desk(bus, parts.coordinator, parts.manager_id, asyncio.get_running_loop().time)
    announcer = Announcer(bus, parts.describe, ANNOUNCE_MANAGER)
    await bus.open(parts.manager_id, stop)
    # one that waits for another manager to leave the verifier is ready: a rolling update waits for it
    operations.vitals.start(lambda: bus.is_connected and bool(parts.registry.live("verifier")) and not stop.is_set())
    try:
        await first_of(stop.wait(), *parts.running(bus), desk.run(), announcer.run())
        await parts.verifier.leave()
    finally:
        await bus.close()


def main() -> int:
    """Run the role that the settings name; returns the exit status."""
    return run_service("request_manager", ManagerSettings, serve, sys.argv[1:])
