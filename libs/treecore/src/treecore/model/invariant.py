"""Parts whose bits for a row do not depend on how many other rows there are. Knows rows; not what parts compute.

Which kernels need this, and what it costs: docs/decisions/0008-batch-invariance.md.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from treecore.errors import ConfigError

Part = Callable[[Tensor], Tensor]
Turn = Callable[[Tensor, Tensor], None]
Pack = Callable[[Tensor], Part | None]

MAX_ROWS = 32  # rows that one call of a linear takes
USUAL_ROWS = 16  # the number of rows whose bits the other numbers are held to
UNDIVIDED = 32768  # elements that torch leaves to one thread; where it divides rows, bits differ at the cuts


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """A linear that is called with such numbers of rows only as round alike.

    padded: for n = 0, 1, ... rows the next number that does; the last entry is the most that one call takes.
    """

    linear: Part
    padded: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T."""
        done = [self._multiply(rows) for rows in torch.split(x, self.padded[-1])]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _multiply(self, x: Tensor) -> Tensor:
        padding = self.padded[len(x)] - len(x)
        return self.linear(F.pad(x, (0, 0, 0, padding)))[: len(x)] if padding else self.linear(x)


@dataclass(frozen=True, slots=True)
class InvariantActivation:
    """An activation of rows, in calls that torch does not divide among threads."""

    activate: Part

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh activate(x)."""
        done = [self.activate(rows) for rows in torch.split(x, _undivided_rows(x))]
        return done[0] if len(done) == 1 else torch.cat(done)


@dataclass(frozen=True, slots=True)
class InvariantTurn:
    """A turn of q and k, in calls that torch does not divide among threads."""

    turn: Turn

    def __call__(self, qk: Tensor, turns: Tensor) -> None:
        """In place."""
        num_rows = _undivided_rows(qk)
        for rows, row_turns in zip(torch.split(qk, num_rows), torch.split(turns, num_rows), strict=True):
            self.turn(rows, row_turns)


def _undivided_rows(x: Tensor) -> int:
    return max(1, (UNDIVIDED - 1) * len(x) // max(1, x.numel()))


@dataclass(frozen=True, slots=True)
class Trial:
    """How matrices of `shape` are multiplied: packed by `pack` from `weight` numbers, with rows of `activation`."""

    pack: Pack
    shape: torch.Size
    weight: torch.dtype
    activation: torch.dtype
    device: torch.device


@functools.cache
def padded_row_counts(trial: Trial) -> tuple[int, ...]:
    """InvariantLinear's `padded`, found by trying each number of rows.

    Which numbers round alike depends on the library, on the CPU and on the shape, and rows never on each other's
    content: so equal rows tell all. Raises ConfigError where even the rows of one call round differently.
    """
    generator = torch.Generator().manual_seed(0)
    linear = trial.pack(torch.randn(trial.shape, generator=generator).bfloat16().to(trial.device, trial.weight))
    assert linear is not None, "bf16 numbers of like size can be packed"
    row = torch.randn(1, trial.shape[1], generator=generator).to(trial.device, trial.activation)
    usual = linear(row.repeat(USUAL_ROWS, 1))[:1]
    agreeing = [n for n in range(1, MAX_ROWS + 1) if _all_equal(linear(row.repeat(n, 1)), usual)]
    if USUAL_ROWS not in agreeing:
        shape = tuple(trial.shape)
        raise ConfigError(f"batch-invariant mode: this machine multiplies equal rows unequally by a {shape} matrix")
    return (0, *(next(more for more in agreeing if more >= n) for n in range(1, agreeing[-1] + 1)))


def _all_equal(rows: Tensor, expected: Tensor) -> bool:
    return torch.equal(rows, expected.expand_as(rows))
