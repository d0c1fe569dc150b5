"""The token tree: flat arrays, parents before children, node 0 is the root.

Knows the shape and who proposed what; must not know how trees are drafted, verified or sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treecore import topology
from treecore.child_laws import ChildLaw, child_laws
from treecore.errors import WireError
from treecore.sparse import DraftLaws


class Try(NamedTuple):
    """One proposal of a child: by which SSM, and where it stood among that SSM's children of the same parent."""

    ssm_idx: int
    order: int


@dataclass(frozen=True)
class TokenTree:
    """A token tree. Values only: nothing here is mutated after construction.

    tokens:  int32 [N]; node 0 is the root, the last committed token.
    parents: int32 [N]; -1 for the root, else an index smaller than the node's own.
    tries:   per node all tries that proposed it (architecture section 3); empty for the root.
    laws:    by (node, ssm_idx), what that SSM drew the node's children from; empty where drafts are no draws.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    tries: tuple[tuple[Try, ...], ...]
    laws: Mapping[tuple[int, int], ChildLaw] = field(default_factory=dict)

    @classmethod
    def of_root(cls, token: int) -> "TokenTree":
        """The tree of plain incremental decoding: the root alone."""
        return cls(np.array([token], np.int32), np.array([-1], np.int32), ((),))

    @classmethod
    def checked(
        cls, tokens: NDArray[np.int32], parents: NDArray[np.int32], ssm_idx: int, laws: DraftLaws | None = None
    ) -> "TokenTree":
        """A tree as it came over the wire from one SSM; raises WireError if it is no tree, or not one of its laws.

        Siblings stand in the order in which they were drawn. With `laws`, every child is one that its law has.
        """
        _check(tokens, parents)
        orders = _orders(parents.tolist())
        by_order = [(Try(ssm_idx, order),) for order in range(max(orders) + 1)]
        tries = ((), *[by_order[order] for order in orders[1:]])
        found = child_laws(laws, tokens, parents) if laws is not None else {}
        return cls(tokens, parents, tries, {(node, ssm_idx): law for node, law in found.items()})

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> NDArray[np.int32]:
        """int32 [N], root 0."""
        return topology.depths(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node indices of each node's children, in order."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                found[parent].append(node)
        return tuple(tuple(nodes) for nodes in found)

    def child_with(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, or None."""
        return next((child for child in self.children[node] if self.tokens[child] == token), None)

    def tries_at(self, node: int) -> list[tuple[Try, int]]:
        """The (try, child) pairs behind `node` in the order in which they are tried: SSM by SSM, each as it drew."""
        return sorted((proposal, child) for child in self.children[node] for proposal in self.tries[child])

    def paths(self) -> Iterator[tuple[int, ...]]:
        """The token sequence from below the root to each node, root first (the root's own is empty)."""
        known: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            known.append((*known[parent], token) if parent >= 0 else ())
            yield known[-1]


def _orders(parents: Sequence[int]) -> list[int]:
    """How many earlier siblings each node has."""
    counts = [0] * (len(parents) + 1)  # the last is the parent of the root
    orders = []
    for parent in parents:
        orders.append(counts[parent])
        counts[parent] += 1
    return orders


def _check(tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
    if len(tokens) == 0 or len(tokens) != len(parents):
        raise WireError(f"a tree of {len(tokens)} tokens and {len(parents)} parents")
    if parents[0] != -1:
        raise WireError("node 0 is not a root")
    below = parents[1:]
    if np.any(below < 0) or np.any(below >= np.arange(1, len(parents))):
        raise WireError("a parent does not stand before its child")
    if np.any(tokens < 0):
        raise WireError("a negative token id")


def chain(tokens: Sequence[int], ssm_idx: int = 0) -> TokenTree:
    """A tree without branches; `tokens[0]` is the root."""
    return TokenTree.checked(np.array(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32), ssm_idx)
