"""What ranks compute together: sums and gathers within a stage, hidden states from stage to stage (torch.distributed).

Knows ranks and tensors; must not know layers, or what becomes of a rank that fails. gloo on a CPU, NCCL on CUDA.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from llm_verifier.group.seat import Seat, is_loopback
from treecore.model.parallel import Alone, TensorLinks


class CollectiveFailed(Exception):
    """Another rank did not do its part. overdue: it may yet be alive; broken: its connection is not."""

    def __init__(self, reason: str, kind: Literal["overdue", "broken"]) -> None:
        super().__init__(reason)
        self.kind = kind


class Activity:
    """What this rank is at: nothing, computing, or waiting for others in a collective.

    That tells a late rank from those that wait for it. Written by the thread that computes, read by the watch's.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: the deadline of each collective."""
        self.is_computing = False
        self.timeout_s = timeout_s
        self.waited_s = 0.0  # for other ranks, in all

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a command."""
        self.is_computing = True
        try:
            yield
        finally:
            self.is_computing = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Around every wait for other ranks; raises CollectiveFailed."""
        started, was_computing = time.monotonic(), self.is_computing
        self.is_computing = False
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises nothing more exact
            is_overdue = time.monotonic() - started >= 0.95 * self.timeout_s
            raise CollectiveFailed(str(error).partition("\n")[0], "overdue" if is_overdue else "broken") from error
        finally:
            self.waited_s += time.monotonic() - started
            self.is_computing = was_computing


def open_store(seat: Seat, port: int, timeout_s: float) -> TCPStore:
    """Where ranks find each other's addresses; rank 0 (port 0: any free one) serves it."""
    return TCPStore(
        seat.rendezvous[0],
        port,
        is_master=seat.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def connect(seat: Seat, store: Store, device: torch.device, activity: Activity) -> "Collectives":
    """Connect all ranks. Raises CollectiveFailed where one does not come."""
    if is_loopback(seat.rendezvous[0]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    timeout = timedelta(seconds=activity.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with activity.joined():
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=timeout)
        stages = [
            dist.new_group(list(range(first, first + seat.tp_size)), timeout=timeout)  # it would not inherit ours
            for first in range(0, seat.size, seat.tp_size)
        ]
    return Collectives(seat, stages[seat.place.pp_rank], activity)


class Collectives:
    """A rank's ends. All waits have the deadline that `connect` was given."""

    def __init__(self, seat: Seat, stage: dist.ProcessGroup, activity: Activity) -> None:
        self._seat = seat
        self.activity = activity
        self.links: TensorLinks = Alone() if seat.tp_size == 1 else StageLinks(stage, seat.tp_size, activity)

    def close(self) -> None:
        """Leave torch's groups. Only in peace: after a failure it could wait for the lost rank."""
        dist.destroy_process_group()

    def send_next(self, x: Tensor) -> Callable[[], None]:
        """Send to the same tensor rank of the next stage. Call what is returned before `x` is changed."""
        return self._send(x, self._seat.rank + self._seat.tp_size)

    def receive_previous(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Expect a tensor of the stage before; call what is returned to have it."""
        return self._receive(torch.empty(shape, dtype=dtype, device=device), self._seat.rank - self._seat.tp_size)

    def send_back(self, logits: Tensor) -> None:
        """From the last stage's first rank to rank 0."""
        self._send(logits, 0)()

    def receive_back(self, shape: tuple[int, int], device: torch.device) -> Tensor:
        """At rank 0: fp32 of that shape from the last stage's first rank."""
        source = self._seat.size - self._seat.tp_size
        return self._receive(torch.empty(shape, dtype=torch.float32, device=device), source)()

    def _send(self, x: Tensor, rank: int) -> Callable[[], None]:
        with self.activity.joined():
            work = dist.isend(x, rank)
        assert work is not None, "this rank is in the group"

        def wait() -> None:
            with self.activity.joined():
                work.wait()

        return wait

    def _receive(self, x: Tensor, rank: int) -> Callable[[], Tensor]:
        with self.activity.joined():
            work = dist.irecv(x, rank)
        assert work is not None, "this rank is in the group"

        def wait() -> Tensor:
            with self.activity.joined():
                work.wait()
            return x

        return wait


class StageLinks:
    """TensorLinks over a process group."""

    def __init__(self, group: dist.ProcessGroup, size: int, activity: Activity) -> None:
        self._group = group
        self._size = size
        self._activity = activity

    def sum_(self, x: Tensor) -> None:
        """See TensorLinks."""
        with self._activity.joined():
            dist.all_reduce(x, group=self._group)

    def gather(self, x: Tensor) -> Tensor:
        """See TensorLinks."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        with self._activity.joined():
            dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim=-1)
