"""Exact enumeration for tests: a function with random choices is run once for each way in which they can fall.

Knows chances only; must not know trees, laws of tokens or rules.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Law = NDArray[np.float64]


@dataclass
class Fate:
    """Choices that follow a script and then take the first way; `others` are the scripts of the ways not taken."""

    script: Sequence[int] = ()
    chance: float = 1.0
    taken: list[int] = field(default_factory=list)
    others: list[tuple[int, ...]] = field(default_factory=list)

    def choose(self, masses: Sequence[float] | Law) -> int:
        """One of the columns of positive mass."""
        possible = [column for column, mass in enumerate(masses) if mass > 0.0]
        place = len(self.taken)
        if place < len(self.script):
            column = self.script[place]
        else:
            column = possible[0]
            self.others += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(column)
        self.chance *= float(masses[column]) / float(sum(masses))
        return column

    def accepts(self, depth: int, try_idx: int, chance: float) -> bool:  # noqa: ARG002  (fate has no key)
        """Coins.accepts."""
        chance = min(1.0, chance)
        return self.choose([chance, 1.0 - chance]) == 0

    def pick(self, place: int, masses: Law) -> int:  # noqa: ARG002
        """Coins.pick, and drafts.Pick."""
        return self.choose(masses)


def outcomes(run: Callable[[Fate], T]) -> Iterator[tuple[float, T]]:
    """Each way in which `run` can go, with its chance."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        fate = Fate(scripts.pop())
        result = run(fate)
        scripts += fate.others
        yield fate.chance, result


def random_law(rng: np.random.Generator, V: int) -> Law:
    """Dense, sparse, one-hot and tied laws; some tokens very unlikely."""
    kind = int(rng.integers(5))
    masses = [
        rng.dirichlet(np.ones(V)),
        rng.dirichlet(np.ones(V)) * (rng.random(V) < 0.5),
        np.eye(V)[rng.integers(V)],
        rng.integers(0, 3, V).astype(np.float64),
        rng.dirichlet(np.full(V, 0.2)),
    ][kind]
    return masses / masses.sum() if masses.sum() > 0.0 else np.full(V, 1.0 / V)
