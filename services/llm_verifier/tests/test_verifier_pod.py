"""Ranks that share a pod: begun together, ended together. Small programs stand in for ranks, then real ones."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llm_verifier.group.pod import environment, run_ranks
from llm_verifier.group.testing import EXIT_S, reserved_port
from treecore.errors import GroupFailed
from treecore.testing.tiny import save_random_llama

RANK = """
import os, pathlib, signal, sys
rank, directory = os.environ["ESPALIER_LOCAL_RANK"], pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(directory / f"pid-{rank}.new").write_text(str(os.getpid()))
(directory / f"pid-{rank}.new").rename(directory / f"pid-{rank}")
while True:
    signal.pause()
"""


async def pids(directory: Path, num_ranks: int) -> list[int]:
    """Of the ranks, once all can be told to leave."""
    files = [directory / f"pid-{rank}" for rank in range(num_ranks)]
    async with asyncio.timeout(EXIT_S):
        while not all(file.exists() for file in files):  # noqa: ASYNC110 - other processes: there is no event
            await asyncio.sleep(0.01)
    return [int(file.read_text()) for file in files]


def start(directory: Path, stop: asyncio.Event, leave_s: float = EXIT_S) -> "asyncio.Task[None]":
    """Three of them."""
    return asyncio.create_task(run_ranks(3, (sys.executable, "-c", RANK, str(directory)), os.environ, stop, leave_s))


async def test_all_are_told_to_leave(tmp_path: Path) -> None:
    """And then all is well."""
    stop = asyncio.Event()
    running = start(tmp_path, stop)
    await pids(tmp_path, 3)
    stop.set()
    await running


async def test_the_first_end_is_the_end_of_all(tmp_path: Path) -> None:
    """The others do not notice by themselves here, so they are killed."""
    running = start(tmp_path, asyncio.Event(), leave_s=0.1)
    ranks = await pids(tmp_path, 3)
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(GroupFailed, match="local rank 1 ended with status -9"):
        await running
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_one_that_leaves_by_itself_takes_the_others_along(tmp_path: Path) -> None:
    """A part of a group is of no use, however well it ended."""
    running = start(tmp_path, asyncio.Event(), leave_s=0.1)
    os.kill((await pids(tmp_path, 3))[2], signal.SIGTERM)
    with pytest.raises(GroupFailed, match="local rank 0 ended with status -9"):
        await running


def test_ranks_share_the_threads() -> None:
    """Eight threads for three ranks are two each."""
    pod = {"OMP_NUM_THREADS": "8", "ESPALIER_NAME": "llm"}
    assert environment(pod, 2, 3) == {"OMP_NUM_THREADS": "2", "ESPALIER_NAME": "llm", "ESPALIER_LOCAL_RANK": "2"}
    assert environment({}, 1, 3) == {"ESPALIER_LOCAL_RANK": "1"}
    assert environment({"OMP_NUM_THREADS": "2"}, 1, 3)["OMP_NUM_THREADS"] == "1"


async def test_a_pod_is_a_group(tmp_path: Path) -> None:
    """Real ranks find each other, share an operations port, and leave in peace together."""
    model = save_random_llama(tmp_path / "tiny", num_layers=2, seed=0)
    sizes = ("--tensor-parallel-size", "2", "--ranks-per-pod", "2")
    with reserved_port() as port, reserved_port() as operations_port:
        ports = ("--group-port", str(port), "--operations-port", str(operations_port))
        command = (sys.executable, "-m", "llm_verifier", "--model", str(model), *sizes, *ports)
        pod = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=asyncio.subprocess.PIPE
        )
        assert pod.stderr is not None
        async with asyncio.timeout(60):
            said = await pod.stderr.readuntil(b"verifier group ready")
            pod.terminate()
            said += await pod.stderr.read()
            assert await pod.wait() == 0, said.decode()
