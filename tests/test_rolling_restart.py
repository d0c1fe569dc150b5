"""Every part is stopped and started again under load, one after another: no request fails, no text changes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from espalier_local.child import ChildSpec
from espalier_local.models import ServedModel
from espalier_local.ports import ReservedPort
from espalier_local.system import Addresses, LocalSystem, SystemConfig, services

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 8
PATIENCE_S = 60.0


def ask(idx: int) -> dict[str, Any]:
    """One of eight requests, sampled, with a text of its own."""
    return {
        "model": "tiny",
        "prompt": f"Story number {idx}",
        "max_tokens": 60 + 8 * idx,
        "temperature": 0.7,
        "seed": 100 + idx,
        "stream": True,
    }


async def text_of(client: httpx.AsyncClient, base_url: str, idx: int) -> str:
    """The whole streamed text; fails if anything but text comes."""
    text, finish_reason = "", None
    async with client.stream("POST", f"{base_url}/v1/completions", json=ask(idx)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
    assert finish_reason is not None
    return text


@dataclass(slots=True)
class Entrance:
    """What a Service does: new requests go to the gateways that are in rotation, in turn."""

    base_urls: dict[str, str]
    out: set[str] = field(default_factory=set)
    turn: "count[int]" = field(default_factory=count)

    def next_url(self) -> str:
        """Where the next request goes."""
        inside = [url for name, url in self.base_urls.items() if name not in self.out]
        return inside[next(self.turn) % len(inside)]


@dataclass(slots=True)
class Load:
    """Eight clients that ask again as soon as they have an answer. solo: what each hears alone."""

    client: httpx.AsyncClient
    entrance: Entrance
    solo: list[str]
    num_answers: int = 0
    answered: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, idx: int) -> None:
        """One client, for ever."""
        while True:
            text = await text_of(self.client, self.entrance.next_url(), idx)
            assert text == self.solo[idx]
            async with self.answered:
                self.num_answers += 1
                self.answered.notify_all()

    async def more(self, num_answers: int) -> None:
        """Until so many further answers were whole."""
        wanted = self.num_answers + num_answers
        async with self.answered:
            await self.answered.wait_for(lambda: self.num_answers >= wanted)


def two_of_each(config: SystemConfig, at: Addresses, ports: dict[str, int]) -> tuple[ChildSpec, ...]:
    """A split system with a second manager, which waits for the verifier, and a second gateway."""
    specs = {spec.name: spec for spec in services(config, at)}
    manager, gateway = specs["request_manager"], specs["gateway"]
    argv = [str(ports["gateway-2"]) if part == str(at.port) else part for part in gateway.argv]
    return (
        *specs.values(),
        replace(manager, name="request_manager-2"),
        replace(gateway, name="gateway-2", argv=tuple(argv)),
    )


@asynccontextmanager
async def loaded_system(llm_dir: Path) -> AsyncIterator[tuple[LocalSystem, Load]]:
    """A split system under load, whose clients must not have failed in the end."""
    llm = ServedModel("tiny", llm_dir)
    second = ReservedPort("127.0.0.1", 0)
    ports = {"gateway-2": second.number}
    config = SystemConfig(llm, (replace(llm, name="itself"),), split=True)
    system = LocalSystem(config, services_of=lambda config, at: two_of_each(config, at, ports))
    async with system, httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        entrance = Entrance({"gateway": system.base_url, "gateway-2": f"http://127.0.0.1:{second.number}"})
        await ready(client, entrance.base_urls["gateway-2"])
        load = Load(client, entrance, [await text_of(client, system.base_url, idx) for idx in range(NUM_STREAMS)])
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(load.run(idx)) for idx in range(NUM_STREAMS)]
            yield system, load
            for one in clients:
                one.cancel()
    second.close()


async def ready(client: httpx.AsyncClient, base_url: str) -> None:
    """Until a gateway says so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_ready(client, base_url):  # noqa: ASYNC110 - another process: there is no event
            await asyncio.sleep(0.05)


async def is_ready(client: httpx.AsyncClient, base_url: str) -> bool:
    """Whether it does now."""
    try:
        return (await client.get(f"{base_url}/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def restarted(system: LocalSystem, name: str) -> None:
    """Tell a part to stop; until its next life has begun."""
    before = system.pid(name)
    os.kill(before, signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        while system.pid(name) == before:  # noqa: ASYNC110 - the supervisor's matter: there is no event
            await asyncio.sleep(0.05)


async def test_rolling_restart_of_every_part_under_load(llm_dir: Path) -> None:
    """Managers, gateways, SSM, verifier and broker, each once: all of eight clients' answers are whole and the same."""
    async with asyncio.timeout(300), loaded_system(llm_dir) as (system, load):
        for name in ("request_manager", "request_manager-2", "ssm_worker", "llm_verifier", "nats"):
            await load.more(NUM_STREAMS)
            await restarted(system, name)
        for name, url in load.entrance.base_urls.items():
            await load.more(NUM_STREAMS)
            load.entrance.out.add(name)
            await restarted(system, name)
            await ready(load.client, url)
            load.entrance.out.remove(name)
        await load.more(2 * NUM_STREAMS)
