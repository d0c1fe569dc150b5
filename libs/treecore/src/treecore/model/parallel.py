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
