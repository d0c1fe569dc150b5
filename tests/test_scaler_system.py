"""The scaler at a real system: processes under load, what their operations ports tell, and a Kubernetes API."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig
from request_manager.scaler.control import Controller
from request_manager.scaler.kubernetes import Apps, connect
from request_manager.scaler.scrape import Scraper
from request_manager.scaler.service import build_controller
from request_manager.scaler.settings import ScalerSettings, SsmTarget, VerifierTarget
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, fake_kubernetes, role

NUM_CLIENTS = 6
PATIENCE_S = 60.0


def settings_for(system: LocalSystem) -> ScalerSettings:
    """Two requests fill a replica; what is idle goes at once."""

    def endpoint(child: str) -> str:
        return system.operations_url(child).removeprefix("http://")

    small = {"max_replicas": 2, "requests_per_replica": 2}
    return ScalerSettings(
        namespace=NAMESPACE,
        load_endpoints=(endpoint("gateway"), endpoint("request_manager")),
        verifier=VerifierTarget(stateful_set="verifier", pods_per_group=2, **small),
        ssms=(SsmTarget(name="itself", deployment="ssm", endpoint=endpoint("ssm_worker"), **small),),
        cooldown_down_s=0.0,
    )


@asynccontextmanager
async def steered(system: LocalSystem) -> AsyncIterator[tuple[FakeKubernetes, Controller]]:
    """A scaler of that system, to be turned by hand."""
    clock = asyncio.get_running_loop().time
    with fake_kubernetes(role(["ssm"], ["verifier"], "lease")) as kubernetes:
        kubernetes.add("deployments", "ssm", 1)
        kubernetes.add("statefulsets", "verifier", 2)
        async with connect(kubernetes.url) as client, Scraper(clock, PATIENCE_S) as scraper:
            apps = Apps(client, NAMESPACE, lambda: True, PATIENCE_S)
            yield kubernetes, build_controller(settings_for(system), apps, scraper, clock, CollectorRegistry())


async def ask_for_ever(client: httpx.AsyncClient) -> None:
    """One client: the next request as soon as there is an answer."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 64, "temperature": 1, "ignore_eos": True}
    while True:
        (await client.post("/v1/completions", json=body)).raise_for_status()


async def until(kubernetes: FakeKubernetes, controller: Controller, writes: set[tuple[str, int]]) -> None:
    """Turn until these have been the last writes."""
    async with asyncio.timeout(PATIENCE_S):
        while not writes <= set(kubernetes.writes[-2:]):
            await controller.turn()


async def test_replicas_follow_a_real_load(llm_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Up while six clients share what is good for two, down when they have gone; and nothing failed on the way."""
    llm = ServedModel("tiny", llm_dir)
    config = SystemConfig(llm, (replace(llm, name="itself"),), split=True, operations=True)
    async with (
        LocalSystem(config) as system,
        steered(system) as (kubernetes, controller),
        httpx.AsyncClient(base_url=system.base_url, timeout=PATIENCE_S, trust_env=False) as client,
    ):
        clients = [asyncio.create_task(ask_for_ever(client)) for _ in range(NUM_CLIENTS)]
        await until(kubernetes, controller, {("verifier", 4), ("ssm", 2)})
        for one in clients:
            one.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*clients, return_exceptions=True)
        )
        await until(kubernetes, controller, {("verifier", 2), ("ssm", 1)})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
