"""Rows of trees and of their paths behind made-up contexts, for forwards that are measured. Knows segments only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treecore.model.batch import IntArray, Segment
from treecore.topology import ancestor_mask, depths

BLOCK_LEN = 16


def binary_tree(num_nodes: int) -> list[int]:
    """Parents of a tree whose nodes have two children each, filled level by level."""
    return [-1, *((node - 1) // 2 for node in range(1, num_nodes))]


def chain_parents(num_nodes: int) -> list[int]:
    """Parents of a tree without branches: a text."""
    return list(range(-1, num_nodes - 1))


def tree_segments(parents: Sequence[int], context_len: int, batch: int, vocab: int) -> list[Segment]:
    """`batch` requests of `context_len` cached tokens, each with the tree `parents` behind them."""
    tree = np.array(parents, np.int32)
    return [
        _segment(depths(tree), ancestor_mask(tree), _Home(context_len, idx, context_len), vocab) for idx in range(batch)
    ]


def path_segments(parents: Sequence[int], context_len: int, batch: int, vocab: int) -> list[Segment]:
    """The same trees by sequences: a chain for each leaf. They share their context in memory, which flatters them."""
    tree = np.array(parents, np.int32)
    lengths = [int(depths(tree)[leaf]) + 1 for leaf in sorted(set(range(len(tree))) - set(tree.tolist()))]
    own = context_len + np.cumsum([0, *(-(-length // BLOCK_LEN) * BLOCK_LEN for length in lengths)])
    return [
        _segment(np.arange(length), np.tri(length, dtype=np.bool_), _Home(context_len, idx, int(begin)), vocab)
        for idx in range(batch)
        for length, begin in zip(lengths, own[:-1], strict=True)
    ]


def region_len(context_len: int) -> int:
    """Slots of one request: its context, and a block for each of 64 leaves."""
    return context_len + 64 * BLOCK_LEN


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a segment lives: its request's region begins with the context; its own rows begin at `own` in it."""

    context_len: int
    request_idx: int
    own: int

    def column_slots(self, num_rows: int) -> IntArray:
        first = self.request_idx * region_len(self.context_len)
        slots: IntArray = np.concatenate([np.arange(self.context_len), self.own + np.arange(num_rows)])
        return first + slots


def _segment(depth: NDArray[np.integer], mask: NDArray[np.bool_], home: _Home, vocab: int) -> Segment:
    num_rows, context = len(depth), np.arange(home.context_len)
    column_slots = home.column_slots(num_rows)
    positions = (home.context_len + depth).astype(np.int64)
    return Segment(
        tokens=np.random.default_rng(home.request_idx).integers(0, vocab, num_rows),
        positions=positions,
        slots=column_slots[home.context_len :],
        column_slots=column_slots,
        column_positions=np.concatenate([context, positions]),
        visible=np.concatenate([np.ones((num_rows, home.context_len), np.bool_), mask], axis=1),
        logit_rows=np.arange(num_rows),
    )
