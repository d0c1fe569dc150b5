"""A group for tests: rank 0 in this process, the others as they run in production (they need no broker)."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llm_verifier.group.fate import Ending
from llm_verifier.group.member import lead
from llm_verifier.group.ranks import GroupDecoder
from llm_verifier.group.seat import find_seat
from llm_verifier.settings import VerifierSettings
from treecore.service.settings import read_settings

EXIT_S = 30


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile: bound, not listening (see espalier_local.ports)."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start_rank(rank: int, port: int, model: Path, *flags: str) -> subprocess.Popen[str]:
    """A rank's process; what it says on stderr is kept."""
    argv = [*rank_flags(rank, port, model), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "llm_verifier", *argv], stderr=subprocess.PIPE, text=True, env=env)


def rank_flags(rank: int, port: int, model: Path) -> list[str]:
    """Who a rank is and where its group meets."""
    return ["--model", str(model), "--rank", str(rank), "--rendezvous", f"127.0.0.1:{port}"]


@dataclass(slots=True)
class RunningGroup:
    """decoder: what rank 0 computes with. others: the processes of ranks 1, 2, ... endings: why the group failed.

    exits: behind the body, exit status and lines of stderr of each of the others.
    """

    decoder: GroupDecoder
    others: list[subprocess.Popen[str]]
    endings: list[Ending]
    exits: list[tuple[int, list[str]]]


@contextmanager
def running_group(model: Path, tp_size: int, pp_size: int, *flags: str) -> Iterator[RunningGroup]:
    """A group that is ready. Behind the body its processes are gone, in peace if the body raised nothing."""
    sizes = ["--tensor-parallel-size", str(tp_size), "--pipeline-parallel-size", str(pp_size), *flags]
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        others = [start_rank(rank, port, model, *sizes) for rank in range(1, tp_size * pp_size)]
        exits: list[tuple[int, list[str]]] = []
        stack.callback(lambda: exits.extend([ended(process) for process in others]))
        settings = read_settings(VerifierSettings, [*rank_flags(0, port, model), *sizes])
        endings: list[Ending] = []
        stack.callback(_forget_torch_group)
        seat = find_seat(settings, {}, "host")
        decoder = stack.enter_context(lead(seat, settings, lambda: False, lambda: None, endings.append))
        yield RunningGroup(decoder, others, endings, exits)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit status and lines of stderr of a process that should be ending; one that is not is killed."""
    try:
        _, said = process.communicate(timeout=EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return process.returncode, said.splitlines()


def _forget_torch_group() -> None:
    """A group that failed leaves it behind, in a process that lives on, and torch has room for one."""
    if dist.is_initialized():
        dist.destroy_process_group()
