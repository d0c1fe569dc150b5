"""Ranks of a group as threads of one process: what tests of tensor and pipeline parallel run on. Knows no transport."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.kv_pool import KvPool
from treecore.model.load import load_decoder
from treecore.model.parallel import Place

WAIT_S = 60.0


class ThreadLinks:
    """One rank's links to the others of its stage, through tensors that all of them see."""

    def __init__(self, rank: int, barrier: threading.Barrier, seen: list[Tensor]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._seen = seen

    def sum_(self, x: Tensor) -> None:
        """Adds in rank order, so that all ranks get the same bits."""
        parts = self._exchange(x)
        x.copy_(torch.stack(parts).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        """Side by side, in rank order."""
        parts = self._exchange(x)
        assert len({part.shape for part in parts}) == 1, "all ranks gather one shape"
        return torch.cat(parts, dim=-1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._seen[self._rank] = x.clone()
        self._barrier.wait(WAIT_S)
        parts = list(self._seen)
        self._barrier.wait(WAIT_S)  # nobody writes the next one before all have read this one
        return parts


@dataclass(frozen=True, slots=True)
class ThreadPools:
    """The pools of all ranks, stage by stage; all have the same slots."""

    stages: tuple[tuple[KvPool, ...], ...]

    @property
    def num_slots(self) -> int:
        """How many tokens each of them holds."""
        return self.stages[0][0].num_slots

    def move(self, src_slots: Any, dst_slots: Any) -> None:
        """At every rank."""
        for stage in self.stages:
            for pool in stage:
                pool.move(src_slots, dst_slots)


class ThreadGroup:
    """A decoder cut over tp_size x pp_size ranks, each a thread; to be used like a Decoder. Close it after use."""

    def __init__(self, path: Path, tp_size: int, pp_size: int, **options: Any) -> None:
        self._threads = ThreadPoolExecutor(tp_size)
        self.stages = [self._load_stage(path, tp_size, pp_rank, pp_size, options) for pp_rank in range(pp_size)]
        self.spec = self.stages[0][0].spec

    def _load_stage(self, path: Path, tp_size: int, pp_rank: int, pp_size: int, options: Any) -> list[Decoder]:
        barrier, seen = threading.Barrier(tp_size), [torch.empty(0)] * tp_size
        return [
            load_decoder(
                path,
                place=Place(rank, tp_size, pp_rank, pp_size),
                links=ThreadLinks(rank, barrier, seen),
                **options,
            )
            for rank in range(tp_size)
        ]

    def new_pool(self, num_slots: int) -> ThreadPools:
        """A pool for each rank."""
        return ThreadPools(tuple(tuple(rank.new_pool(num_slots) for rank in stage) for stage in self.stages))

    def forward(self, batch: ForwardBatch, pools: ThreadPools) -> Tensor:
        """Stage by stage, the ranks of each at once; what they return must be equal, bit by bit."""
        x: Tensor | None = None
        for stage, own in zip(self.stages, pools.stages, strict=True):
            x = self._run_stage(stage, own, batch, x)
        assert x is not None
        return x

    def _run_stage(
        self, ranks: Sequence[Decoder], pools: Sequence[KvPool], batch: ForwardBatch, x: Tensor | None
    ) -> Tensor:
        def run(rank: Decoder, pool: KvPool) -> Tensor:
            return rank.run_stage(batch, pool, None if x is None else x.clone())  # a stage overwrites what it is given

        outputs = list(self._threads.map(run, ranks, pools))
        assert all(torch.equal(outputs[0], other) for other in outputs), "all ranks of a stage agree"
        return outputs[0]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
