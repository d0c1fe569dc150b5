"""Killed parts: the client sees the same text, later at worst."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig, rank_child

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {
    "model": "tiny",
    "prompt": "A long story",
    "max_tokens": 120,
    "temperature": 0.7,
    "seed": 21,
    "stream": True,
    "espalier": {"return_token_ids": True},
}


async def streamed(client: httpx.AsyncClient, on_first: Any = None) -> tuple[str, dict[str, Any]]:
    """The streamed text, and the extension object of the last event; `on_first` is called after the first text."""
    text, extension, called = "", {}, on_first is None
    async with client.stream("POST", "/v1/completions", json=ASK) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            extension |= event.get("espalier") or {}
            if text and not called:
                called = True
                on_first()
    return text, extension


@pytest.mark.parametrize("victim", ["ssm_worker", "llm_verifier"])
async def test_kill_in_mid_stream(system: LocalSystem, client: httpx.AsyncClient, victim: str) -> None:
    """Kill -9 of a worker while it works: the text is unchanged; the launcher restarts it; speculation resumes."""
    whole, calm = await streamed(client)
    before = system.pid(victim)
    text, _ = await streamed(client, lambda: os.kill(before, signal.SIGKILL))
    assert text == whole
    await (system.wait_for_ssm() if victim == "ssm_worker" else system.wait_for_verifier())
    assert system.pid(victim) != before
    async with asyncio.timeout(20):
        while True:
            text, after = await streamed(client)
            assert text == whole
            if after["tokens_per_step"] == calm["tokens_per_step"]:
                return


async def test_stopped_ssm_costs_speed_only(system: LocalSystem, client: httpx.AsyncClient) -> None:
    """An SSM that hangs (SIGSTOP) makes its drafts miss the deadline; the text is unchanged."""
    whole, _ = await streamed(client)
    os.kill(system.pid("ssm_worker"), signal.SIGSTOP)
    try:
        assert (await streamed(client))[0] == whole
    finally:
        os.kill(system.pid("ssm_worker"), signal.SIGCONT)
    assert (await streamed(client))[0] == whole


async def test_broker_restart_is_a_pause(system: LocalSystem, client: httpx.AsyncClient) -> None:
    """Kill -9 of nats-server in mid-stream: it is restarted, everyone reconnects, the stream goes on unchanged."""
    whole, _ = await streamed(client)
    text, _ = await streamed(client, lambda: os.kill(system.pid("nats"), signal.SIGKILL))
    assert text == whole


async def all_ended(pidfds: Sequence[int]) -> None:
    """Until these processes are gone."""
    loop = asyncio.get_running_loop()
    for pidfd in pidfds:
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def test_kill_of_any_rank_takes_its_group_down_and_costs_a_pause(llm_dir: Path) -> None:
    """A 2x2 group, each rank killed in turn in mid-stream: the interrupted text is unchanged.

    All ranks are gone within 5 s, each survivor with one line that names the dead one; the launcher starts them again.
    """
    said: list[tuple[str, str]] = []
    config = SystemConfig(ServedModel("tiny", llm_dir), tree=(2, 1), tensor_parallel_size=2, pipeline_parallel_size=2)
    ranks = [rank_child(rank) for rank in range(4)]
    async with (
        LocalSystem(config, lambda name, line: said.append((name, line))) as system,
        httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as client,
    ):
        whole, _ = await streamed(client)
        for victim, name in enumerate(ranks):
            said.clear()
            pids = [system.pid(each) for each in ranks]
            down: list[asyncio.Future[None]] = []

            def kill(pids: list[int] = pids, victim: int = victim, down: list[Any] = down) -> None:
                down.append(asyncio.ensure_future(within_5_s([os.pidfd_open(pid) for pid in pids])))
                os.kill(pids[victim], signal.SIGKILL)

            text, _ = await streamed(client, kill)
            await down[0]
            assert text == whole
            lines = [(each, line) for each, line in said if each in ranks and "verifier group failed" in line]
            assert sorted(each for each, _ in lines) == sorted({*ranks} - {name})
            assert all(f"rank={victim} reason=is gone" in line for _, line in lines)


async def within_5_s(pidfds: Sequence[int]) -> None:
    """`all_ended`, soon."""
    async with asyncio.timeout(5):
        await all_ended(pidfds)
