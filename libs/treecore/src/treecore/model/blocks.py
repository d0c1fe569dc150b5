"""Which blocks of the KV cache are free, in use, or kept for whoever comes with the same text.

Knows numbers of blocks and, through the index, their tokens: no torch, no requests.
"""

from collections import deque
from typing import NamedTuple

from treecore.model.prefix import PrefixIndex, Tokens


class BlockCounts(NamedTuple):
    """Blocks by state; free + used + cached == total, always. Cached: nobody uses it, but its text can be found."""

    free: int
    used: int
    cached: int
    total: int


class BlockAllocator:
    """Users of blocks 0..num_blocks-1. Owns no memory.

    A block has one user or, once its text is known, several. When the last one leaves, a known block stays cached until
    its place is needed; the least recently used goes first. Whoever uses a block uses its predecessors too, and leaves
    them last, so no predecessor is older than its successors.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = deque(range(num_blocks))
        self._num_users: dict[int, int] = {}
        self._cached: dict[int, None] = {}  # the least recently used first
        self._index = PrefixIndex()

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Takes blocks that nobody uses, or none at all (None) where there are too few; evicts cached ones last."""
        if num_blocks > len(self._free) + len(self._cached):
            return None
        while len(self._free) < num_blocks:
            self._evict()
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._num_users.update(dict.fromkeys(taken, 1))
        return taken

    def find(self, previous: int | None, tokens: Tokens) -> int | None:
        """The block that holds `tokens` behind block `previous`; it may be evicted until it is shared."""
        return self._index.find(previous, tokens)

    def share(self, block: int) -> None:
        """One more user of a block that was found."""
        assert block in self._index, "only blocks of a known text are shared"
        self._cached.pop(block, None)
        self._num_users[block] = self._num_users.get(block, 0) + 1

    def keep(self, previous: int | None, tokens: Tokens, block: int) -> int:
        """The user of `block` has filled it with `tokens` and will not write it again: others may find it.

        Returns the block to use from now on: another one, if that holds the same text already.
        """
        known = self._index.find(previous, tokens)
        if known is None:
            self._index.add(previous, tokens, block)
            return block
        self.share(known)
        self.free([block])
        return known

    def free(self, blocks: list[int]) -> None:
        """One user fewer of each of `blocks`, which follow each other in a text."""
        for block in reversed(blocks):
            self._num_users[block] -= 1  # KeyError: freed by one who does not use it
            if not self._num_users[block]:
                del self._num_users[block]
                self._retire(block)

    def usage(self) -> BlockCounts:
        """Counts of free, used and cached blocks."""
        free, used, cached = len(self._free), len(self._num_users), len(self._cached)
        return BlockCounts(free, used, cached, free + used + cached)

    def _retire(self, block: int) -> None:
        if block in self._index:
            self._cached[block] = None
        else:
            self._free.appendleft(block)  # the most recently touched memory is used first

    def _evict(self) -> None:
        oldest = next(iter(self._cached))
        del self._cached[oldest]
        self._index.forget(oldest)
        self._free.append(oldest)
