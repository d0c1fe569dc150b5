"""Which blocks of the KV cache are free. Knows numbers of blocks only: no torch, no requests, no tokens."""

from collections import deque
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """Blocks by state; free + used == total, always."""

    free: int
    used: int
    total: int


class BlockAllocator:
    """A free list over blocks 0..num_blocks-1. Owns no memory."""

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))
        self._used: set[int] = set()

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes `num_blocks` free blocks, or none at all (None) where there are too few."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._used.update(taken)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back. Each must have been allocated: a block freed twice would serve two requests."""
        assert self._used.issuperset(blocks), "freed a block that is not in use"
        self._used.difference_update(blocks)
        self._free.extendleft(reversed(blocks))  # the most recently touched memory is used first

    def usage(self) -> BlockCounts:
        """Counts of free and used blocks."""
        return BlockCounts(len(self._free), len(self._used), len(self._free) + len(self._used))
