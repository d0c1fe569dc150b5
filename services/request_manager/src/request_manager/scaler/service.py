"""The scaler's process: wired together here, and nowhere else."""

import asyncio
import secrets
import socket
import sys
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from request_manager.scaler.control import Controller, Mode, SourceWatch, Spans, Target
from request_manager.scaler.kubernetes import Apps, Workload, connect
from request_manager.scaler.lease import Candidacy, Lease, Terms
from request_manager.scaler.metrics import ScalerMetrics
from request_manager.scaler.policy import Reading
from request_manager.scaler.scrape import Scraper
from request_manager.scaler.settings import ScalerSettings, SsmTarget, VerifierTarget
from request_manager.scaler.signals import ssm_reading, verifier_reading
from treecore.service.lifecycle import run_service
from treecore.service.operations import open_operations
from treecore.service.tasks import first_of


def targets(settings: ScalerSettings, apps: Apps) -> Iterator[Target]:
    """What the settings name, verifiers first: SSMs without a verifier are of no use."""
    if settings.verifier is not None:
        yield _verifier(settings, settings.verifier, apps)
    for ssm in settings.ssms:
        yield _ssm(settings, ssm, apps)


def _verifier(settings: ScalerSettings, target: VerifierTarget, apps: Apps) -> Target:
    load = settings.load_endpoints

    def read(spans: Spans) -> Reading:
        return verifier_reading(settings.aims, spans[load])

    groups = Workload(apps, "statefulset", target.stateful_set, target.pods_per_group)
    return Target("verifier", settings.limits(target), groups, [load], read)


def _ssm(settings: ScalerSettings, target: SsmTarget, apps: Apps) -> Target:
    load, workers = settings.load_endpoints, (target.endpoint,)

    def read(spans: Spans) -> Reading:
        return ssm_reading(settings.aims, target.name, spans[load], spans[workers])

    return Target(
        f"ssm/{target.name}",
        settings.limits(target),
        Workload(apps, "deployment", target.deployment),
        [load, workers],
        read,
    )


async def serve(settings: ScalerSettings, stop: asyncio.Event) -> None:
    """Scale until `stop`. Raises ConfigError if there is no cluster."""
    clock, terms = asyncio.get_running_loop().time, Terms()
    async with (
        open_operations(settings) as operations,
        connect(settings.kubernetes_url) as client,
        Scraper(clock, settings.scrape_timeout_s) as scraper,
    ):
        identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        lease = Lease(client, Candidacy(settings.namespace, settings.lease, identity), clock, terms)
        apps = Apps(client, settings.namespace, lease.is_held, terms.timeout_s)
        controller = build_controller(settings, apps, scraper, clock, operations.registry)
        operations.vitals.start(lease.knows)
        try:
            await first_of(stop.wait(), lease.keep(), controller.run(settings.period_s))
        finally:
            await lease.release()


def build_controller(
    settings: ScalerSettings, apps: Apps, scraper: Scraper, clock: Callable[[], float], registry: CollectorRegistry
) -> Controller:
    """The controller of what the settings name. It leads while `apps` may write."""
    steered = list(targets(settings, apps))
    sources = list(dict.fromkeys(source for target in steered for source in target.sources))
    metrics = ScalerMetrics(registry)
    watch = SourceWatch(scraper, sources, settings.stale_after_s, metrics)
    return Controller(steered, watch, Mode(apps.may_write, clock, settings.dry_run), metrics)


def main() -> int:
    """Run the scaler; returns the exit status."""
    return run_service("scaler", ScalerSettings, serve, sys.argv[1:])
