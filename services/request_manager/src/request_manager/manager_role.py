"""What a manager is made of, and how it shows itself to gateways. Knows the manager's parts; must not know HTTP."""

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from request_manager.manager.coordinator import Coordinator, Policy
from request_manager.manager.local import LocalManager
from request_manager.manager.metrics import ManagerMetrics
from request_manager.manager.registry import Registry
from request_manager.manager.ssm_pool import SsmPool
from request_manager.manager.step_record import Observer
from request_manager.manager.verifying import VerifierLink
from request_manager.roster import Watch, watch
from request_manager.roster_metrics import RosterMetrics
from request_manager.settings import ManagerSettings
from treecore.errors import ConfigError, InvalidRequest, Unavailable
from treecore.expand import expansion
from treecore.messages import ANNOUNCE, Announcement, WorkerId
from treecore.service.bus import Bus
from treecore.streams import ManagerAnnouncement


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


@dataclass(frozen=True, slots=True)
class ManagerParts:
    """A manager, wired. Nothing of it runs yet."""

    manager_id: WorkerId
    registry: Registry
    verifier: VerifierLink
    coordinator: Coordinator
    observer: Observer
    local: LocalManager

    def running(self, bus: Bus) -> tuple[Awaitable[None], ...]:
        """What has to run side by side, on an open bus."""
        who = Watch(ANNOUNCE, Announcement, self.manager_id, self.observer.on_dropped)
        return self.coordinator.run(), watch(self.registry, bus, who)

    def describe(self, leaving: bool) -> ManagerAnnouncement | None:
        """What gateways are told; None until a verifier has told what it serves."""
        try:
            card = self.local.card()
        except Unavailable:
            return None
        num_running, num_waiting = self.coordinator.load
        return ManagerAnnouncement(
            self.manager_id,
            leaving,
            self.local.is_ready(),
            num_running,
            num_waiting,
            card,
        )


def manager_parts(bus: Bus, settings: ManagerSettings, metrics: CollectorRegistry) -> ManagerParts:
    """A manager of the given settings, which counts into `metrics`. Raises ConfigError."""
    policy = policy_of(settings)
    manager_id = WorkerId(f"manager-{secrets.token_hex(4)}")
    registry = Registry(asyncio.get_running_loop().time, manager_id)
    metrics.register(RosterMetrics(registry, ("verifier", "ssm")))
    observer = ManagerMetrics(metrics)
    verifier = VerifierLink(bus, registry)
    coordinator = Coordinator(registry, verifier, SsmPool(bus, registry, observer), policy, observer)
    local = LocalManager(coordinator, registry, policy.max_tree_nodes, settings.max_pause_s)
    return ManagerParts(manager_id, registry, verifier, coordinator, observer, local)
