"""Static expansions <k1..km>: how many children each level of a draft gets (SpecInfer, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from treecore.errors import InvalidRequest

Expansion = NewType("Expansion", tuple[int, ...])

NO_DRAFT = Expansion(())
MAX_WORKER_NODES = 4096
"""Of a tree that a worker takes on at all; managers ask for far less."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How a tree grows best first: on from what the SSM still holds of it, else from the root.

    Each of up to `num_forwards` forwards gives the `width` most likely nodes that were not expanded yet (the root is
    the first) up to `num_children` children each. Of all nodes below the root the `max_nodes` most likely are told.
    Likely: by the product of the scores on a node's path. Raises ValueError for what is no growth.
    """

    num_forwards: int
    width: int
    num_children: int
    max_nodes: int

    def __post_init__(self) -> None:
        if self.num_forwards < 0 or min(self.width, self.num_children, self.max_nodes) < 1:
            raise ValueError(f"impossible growth: {self}")


def expansion(widths: Sequence[int], max_nodes: int) -> Expansion:
    """<k1..km> as a checked value; every width >= 1 and the tree with its root within `max_nodes`.

    Raises InvalidRequest naming the tree.
    """
    if any(width < 1 for width in widths):
        raise InvalidRequest("each width of a tree must be at least 1", "espalier.tree")
    if num_nodes(widths) > max_nodes:
        raise InvalidRequest(f"a tree of {num_nodes(widths)} nodes; at most {max_nodes} are allowed", "espalier.tree")
    return Expansion(tuple(widths))


def num_nodes(widths: Sequence[int]) -> int:
    """Nodes of the full tree <k1..km>, the root included: <2,2> has 1 + 2 + 4."""
    total, level = 1, 1
    for width in widths:
        level *= width
        total += level
    return total
