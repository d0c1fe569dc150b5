"""Which part of a model one rank has, and how ranks of a stage add up. Knows ranks; nothing of transports or weights.

Pipeline parallel: each stage has a contiguous range of layers. Tensor parallel: the ranks of a stage split its matrices
(Megatron-LM, section 3): columns of the first, rows of the second, so that each half layer needs one sum.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treecore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its group: which of the tensor-parallel ranks of which pipeline stage it is."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp_size, "a tensor-parallel rank is below their number"
        assert 0 <= self.pp_rank < self.pp_size, "a stage is below their number"

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last norm and the head."""
        return self.pp_rank == self.pp_size - 1


class TensorLinks(Protocol):
    """Collectives among the tensor-parallel ranks of one stage. All of them call the same ones in the same order."""

    def sum_(self, x: Tensor) -> None:
        """Replaces x by the sum of all ranks' x; the same bits on every rank."""

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x side by side along the last dimension, in rank order, on every rank. All have one shape."""


class Alone:
    """The links of a rank that has no others."""

    def sum_(self, x: Tensor) -> None:
        """One rank's sum is its own."""

    def gather(self, x: Tensor) -> Tensor:
        """One rank's part is the whole."""
        return x


def stage_layers(num_layers: int, head_cost: float, place: Place) -> range:
    """The layers of the stage `place`, such that the slowest stage is as fast as can be.

    `head_cost` is what the head costs, in layers: the last stage has that to do as well. Raises ConfigError where
    there are fewer layers than stages.
    """
    num_stages = place.pp_size
    if num_stages > num_layers:
        raise ConfigError(f"{num_stages} pipeline stages for {num_layers} layers: each stage needs a layer")
    if num_stages == 1:
        return range(num_layers)

    def slowest(num_last: int) -> float:
        return max(num_last + head_cost, -(-(num_layers - num_last) // (num_stages - 1)))

    num_last = min(range(1, num_layers - num_stages + 2), key=slowest)
    if place.is_last:
        return range(num_layers - num_last, num_layers)
    return split_evenly(num_layers - num_last, num_stages - 1, place.pp_rank)


def split_evenly(size: int, num_parts: int, part: int) -> range:
    """The part-th of `num_parts` consecutive ranges of 0..size-1 whose lengths differ by at most one."""
    return range(size * part // num_parts, size * (part + 1) // num_parts)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads that a rank has, and the KV heads that they share: len(q) is a multiple of len(kv)."""

    q: range
    kv: range

    @property
    def group_size(self) -> int:
        """Query heads a KV head."""
        return len(self.q) // len(self.kv)


def share_heads(num_heads: int, num_kv_heads: int, place: Place) -> HeadShare:
    """The heads of rank `place.tp_rank`.

    As many KV heads as ranks, or more: whole KV heads with all of their query heads, one more on some ranks where they
    do not divide. Fewer: ranks share a KV head, which each of them keeps, and split its query heads. Raises ConfigError
    where a rank would have none.
    """
    num_ranks, rank, group_size = place.tp_size, place.tp_rank, num_heads // num_kv_heads
    if num_ranks > num_heads:
        raise ConfigError(f"{num_ranks} tensor-parallel ranks for {num_heads} heads: each rank needs a head")
    if num_ranks <= num_kv_heads:
        kv = split_evenly(num_kv_heads, num_ranks, rank)
        return HeadShare(range(kv.start * group_size, kv.stop * group_size), kv)
    head = rank * num_kv_heads // num_ranks
    sharers = [other for other in range(num_ranks) if other * num_kv_heads // num_ranks == head]
    own = split_evenly(group_size, len(sharers), sharers.index(rank))
    first = head * group_size
    return HeadShare(range(first + own.start, first + own.stop), range(head, head + 1))
