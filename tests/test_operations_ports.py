"""A real system of processes, asked at their operations ports: probes, and pages that agree with each other."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENTED = re.compile(r"^\| `([a-z_:0-9]+)` \| (?:counter|gauge|histogram) \|", re.MULTILINE)
PATIENCE_S = 60.0
PROBES = ("/startupz", "/readyz", "/livez")

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(llm_dir: Path) -> AsyncIterator[LocalSystem]:
    """All roles as processes of their own, one SSM without weights."""
    config = SystemConfig(
        model=ServedModel("tiny", llm_dir),
        ssms=(ServedModel("repeats", llm_dir, "suffix"),),
        tree="dynamic",
        split=True,
        operations=True,
    )
    async with LocalSystem(config) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Of any port."""
    async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as connection:
        yield connection


def services_of(system: LocalSystem) -> list[str]:
    """Those with an operations port."""
    return [name for name in system.child_names if name != "nats"]


async def page_of(client: httpx.AsyncClient, system: LocalSystem, name: str) -> Page:
    """A process's metrics; each is documented."""
    text = (await client.get(f"{system.operations_url(name)}/metrics")).text
    families = list(text_string_to_metric_families(text))
    known = set(DOCUMENTED.findall((Path(__file__).parents[1] / "docs" / "metrics.md").read_text()))
    assert {f"{one.name}_total" if one.type == "counter" else one.name for one in families} <= known
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


async def status(client: httpx.AsyncClient, system: LocalSystem, name: str, path: str) -> int:
    """Of a probe; 0 where nobody listens."""
    try:
        return (await client.get(f"{system.operations_url(name)}{path}")).status_code
    except httpx.TransportError:
        return 0


async def until(client: httpx.AsyncClient, system: LocalSystem, name: str, path: str, wanted: int) -> None:
    """Return once the probe says so."""
    async with asyncio.timeout(PATIENCE_S):
        while await status(client, system, name, path) != wanted:
            pass


async def complete(client: httpx.AsyncClient, system: LocalSystem, max_tokens: int) -> int:
    """One answer that repeats itself; returns its tokens."""
    body = {"model": "tiny", "prompt": "ab ab ab ab", "max_tokens": max_tokens, "logit_bias": {"98": 100}}
    answer = await client.post(f"{system.base_url}/v1/completions", json=body)
    tokens: int = answer.json()["usage"]["completion_tokens"]
    return tokens


async def test_all_of_a_running_system_is_started_ready_and_alive(
    system: LocalSystem, client: httpx.AsyncClient
) -> None:
    """Gateway, manager, verifier and SSM worker."""
    for name in services_of(system):
        await until(client, system, name, "/readyz", 200)
        assert [await status(client, system, name, path) for path in PROBES] == [200, 200, 200]


async def test_the_pages_tell_one_story(system: LocalSystem, client: httpx.AsyncClient) -> None:
    """What the client got is what gateway, manager and workers counted; the parts of the steps are the steps."""
    before = {name: await page_of(client, system, name) for name in services_of(system)}
    num_tokens = sum([await complete(client, system, 60) for _ in range(3)])
    after = {name: await page_of(client, system, name) for name in services_of(system)}

    def grew(process: str, metric: str, **labels: str) -> float:
        """By how much, over all series with these labels."""
        series = [key for key in after[process] if key[0] == metric and labels.items() <= dict(key[1]).items()]
        assert series, metric
        return sum(after[process][key] - before[process].get(key, 0.0) for key in series)

    assert grew("gateway", "espalier_generated_tokens_total") == num_tokens
    assert grew("gateway", "espalier_ttft_seconds_count", model="tiny") == 3
    assert grew("request_manager", "espalier_tokens_committed_total") == num_tokens
    assert grew("request_manager", "espalier_queue_seconds_count") == 3
    assert grew("request_manager", "espalier_accepted_tokens_total") > 0
    steps = grew("request_manager", "espalier_steps_total")
    assert 3 <= steps < num_tokens
    assert grew("llm_verifier", "espalier_worker_items_total") == grew("request_manager", "espalier_step_requests_sum")
    assert grew("llm_verifier", "espalier_worker_nodes_total") == grew("request_manager", "espalier_step_nodes_sum")
    assert grew("ssm_worker", "espalier_worker_steps_total", kind="ssm", name="repeats") > 0
    assert grew("llm_verifier", "espalier_worker_busy_seconds_total") > 0
    parts = grew("request_manager", "espalier_step_part_seconds_sum")
    assert parts == pytest.approx(grew("request_manager", "espalier_step_seconds_sum"))
    drafts = grew("request_manager", "vllm:spec_decode_num_drafts_total", model_name="tiny")
    assert 0 < drafts <= steps


async def test_a_lost_verifier_makes_gateway_and_manager_unready_but_not_dead(
    system: LocalSystem, client: httpx.AsyncClient
) -> None:
    """Until it is back: restarting them would bring nobody anything. The new one is alive before it has started."""
    os.kill(system.pid("llm_verifier"), signal.SIGKILL)
    for name in ("gateway", "request_manager"):
        await until(client, system, name, "/readyz", 503)
        assert [await status(client, system, name, path) for path in ("/startupz", "/livez")] == [200, 200]
    seen: list[tuple[int, ...]] = []
    async with asyncio.timeout(PATIENCE_S):
        while not seen or seen[-1] != (200, 200, 200):
            seen.append(tuple([await status(client, system, "llm_verifier", path) for path in PROBES]))
    assert (503, 503, 200) in seen
    for name in services_of(system):
        await until(client, system, name, "/readyz", 200)
    assert await complete(client, system, 8) == 8
    losses = await page_of(client, system, "request_manager")
    assert losses["espalier_worker_losses_total", frozenset({("kind", "verifier"), ("reason", "unanswered")})] >= 1
