"""Several ranks in one pod: a process for each, begun together and ended together.

Knows processes; must not know models, or how ranks find each other. In a pod of their own, ranks would not reach their
neighbours' GPUs by the fast links.
"""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

from treecore.errors import GroupFailed

LEAVE_S = 15.0
"""When one rank has ended, the group's other ranks end by themselves within this time."""


async def run_ranks(
    num_ranks: int, command: Sequence[str], environ: Mapping[str, str], stop: asyncio.Event, leave_s: float = LEAVE_S
) -> None:
    """Run `command` for each local rank until all have ended, in peace after `stop`.

    Raises GroupFailed if one failed; then none is left.
    """
    ranks = [
        await asyncio.create_subprocess_exec(*command, env=environment(environ, idx, num_ranks))
        for idx in range(num_ranks)
    ]
    telling = asyncio.create_task(_tell(stop, ranks))
    try:
        statuses = await _ended_together(ranks, leave_s)
    finally:
        telling.cancel()
    for idx, status in statuses:
        if status != 0:
            raise GroupFailed(f"local rank {idx} ended with status {status}")


def environment(environ: Mapping[str, str], local_rank: int, num_ranks: int) -> dict[str, str]:
    """A rank's variables. Ranks share the pod's threads."""
    own = {**environ, "ESPALIER_LOCAL_RANK": str(local_rank)}
    if (threads := environ.get("OMP_NUM_THREADS", "")).isdecimal():
        own["OMP_NUM_THREADS"] = str(max(1, int(threads) // num_ranks))
    return own


async def _tell(stop: asyncio.Event, ranks: Sequence[Process]) -> None:
    await stop.wait()
    for rank in ranks:
        if rank.returncode is None:
            rank.terminate()


async def _ended_together(ranks: Sequence[Process], leave_s: float) -> list[tuple[int, int]]:
    """Local ranks and their exit statuses, the first that ended first. Who is late after that is killed."""
    waits = [asyncio.create_task(rank.wait()) for rank in ranks]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    order = sorted(range(len(ranks)), key=lambda idx: not waits[idx].done())
    await asyncio.wait(waits, timeout=leave_s)
    for rank in ranks:
        if rank.returncode is None:
            rank.kill()
    return [(idx, await waits[idx]) for idx in order]
