"""Static expansions <k1..km>: how many children each level of a draft gets (SpecInfer, section 3)."""

from collections.abc import Sequence
from typing import NewType

from treecore.errors import InvalidRequest

Expansion = NewType("Expansion", tuple[int, ...])

NO_DRAFT = Expansion(())
MAX_WORKER_NODES = 4096
"""Of a tree that a worker takes on at all; managers ask for far less."""


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
