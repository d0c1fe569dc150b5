"""Which tokens of each request have K and V in the cache, and where. Knows blocks, slots and trees, nothing of weights.

A step of a worker is: advance (what was committed), extend (a tree behind it), then adopt -> next_segment -> forward
-> mark_written until no row is pending. Rows of a request are numbered: row p < held_len is committed token p, and row
held_len - 1 + i is tree node i. Node 0 is the root: the last committed token.

Full blocks of committed tokens before the root are sealed as soon as they are computed: never written again, and found
by any request with the same text up to their end. The root's block is never sealed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treecore.errors import OutOfBlocks, StateMissing
from treecore.model.batch import IntArray, Segment
from treecore.model.blocks import BlockAllocator, BlockCounts
from treecore.model.kv_pool import Slots

TokenArray = NDArray[np.int32]


@dataclass(slots=True)
class _Tree:
    """The nodes behind the root. Node i has token tokens[i - 1] and path ancestors[i - 1], which ends with itself."""

    tokens: list[int] = field(default_factory=list)
    ancestors: list[list[int]] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node

    def add(self, token: int, parent: int) -> None:
        assert 0 <= parent <= len(self.tokens), "a parent comes before its child"
        self.tokens.append(token)
        node = len(self.tokens)
        self.ancestors.append([*(self.ancestors[parent - 1] if parent else []), node])
        self.children.setdefault((parent, token), node)

    def walk(self, tokens: Sequence[int], num_nodes: int) -> list[int]:
        """The longest path from the root, among nodes 1..num_nodes, that spells a prefix of `tokens`."""
        path: list[int] = []
        node = 0
        for token in tokens:
            node = self.children.get((node, token), num_nodes + 1)
            if node > num_nodes:
                break
            path.append(node)
        return path

    def below(self, root: int, num_nodes: int) -> list[int]:
        """`root` and those of nodes 1..num_nodes that are below it, ascending."""
        return [root, *(node for node, path in enumerate(self.ancestors[:num_nodes], 1) if root in [0, *path[:-1]])]

    def subtree(self, nodes: Sequence[int]) -> "_Tree":
        """The tree of `nodes`, as `below` names them; empty for no nodes."""
        places = {node: place for place, node in enumerate(nodes)}
        kept = _Tree()
        for node in nodes[1:]:
            parent = [0, *self.ancestors[node - 1]][-2]
            kept.add(self.tokens[node - 1], places[parent])
        return kept


@dataclass(slots=True)
class _Held:
    """One request. The first `num_written` rows have their K and V in the cache, the others are pending.

    The first `num_sealed` blocks may have other users. num_found: tokens that were taken from others since the advance.
    kept_nodes: see SequenceCache.kept_nodes.
    """

    tokens: list[int] = field(default_factory=list)
    tree: _Tree = field(default_factory=_Tree)
    num_written: int = 0
    num_sealed: int = 0
    num_found: int = 0
    kept_nodes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of each row that the blocks can hold

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + len(self.tree.tokens)

    def segment(self, first: int, last: int) -> Segment:
        """Rows first..last-1 as a segment."""
        num_tokens = len(self.tokens)
        nodes = range(max(first, num_tokens), last)
        ancestors = [self.tree.ancestors[row - num_tokens] for row in nodes]
        positions = np.arange(last)
        positions[num_tokens:] = [
            num_tokens - 1 + len(path) for path in self.tree.ancestors[: max(0, last - num_tokens)]
        ]
        return Segment(
            tokens=np.array(
                self.tokens[first:last] + [self.tree.tokens[row - num_tokens] for row in nodes], dtype=np.int64
            ),
            positions=positions[first:],
            slots=self.slots[first:last],
            column_slots=self.slots[:last],
            column_positions=positions,
            visible=_visible(first, last, num_tokens, ancestors),
            logit_rows=np.arange(max(first, num_tokens - 1), last) - first,
        )


class SequenceCache:
    """Every request's cached tokens. Owns the block tables, and the rows of `pool` through them; not thread-safe.

    Invariant: usage().free + usage().used + usage().cached == usage().total; only sealed blocks have several users.
    """

    def __init__(self, pool: Slots, block_len: int = 16, *, reuses_prefixes: bool = True) -> None:
        self._pool = pool
        self._block_len = block_len
        self._reuses_prefixes = reuses_prefixes
        self._allocator = BlockAllocator(pool.num_slots // block_len)
        self._held: dict[str, _Held] = {}

    def advance(
        self, request_id: str, start: int, tokens: Sequence[int] | TokenArray, *, keeps_tree: bool = False
    ) -> int:
        """Learns that committed tokens [start : start + n] are `tokens`. Returns how many committed tokens are cached.

        Keeps the K and V of the longest common prefix with the held tokens, and behind it of the path down the held
        tree that spells the new tokens; that path's rows are moved to follow the prefix. All other tree rows are
        dropped. Behind that, sealed blocks of the same text are adopted. The last token, the root of the next tree,
        does not count as cached: its logits are wanted; where it lies in a sealed block, that block is computed again.
        With `keeps_tree`, a root that is reached down the held tree stays cached, and so do the nodes below it: they
        are the new tree, in their order. Idempotent. Raises StateMissing where tokens before `start` are not held (a
        start of 0 never does); OutOfBlocks, with the request forgotten.
        """
        held = self._held.get(request_id) or _Held()
        if start > len(held.tokens):
            raise StateMissing(len(held.tokens))
        target = held.tokens[:start] + [int(token) for token in tokens]
        assert target, "a request has at least one committed token"
        self._held[request_id] = held
        kept, nodes = self._keep(held, target, keeps_tree=keeps_tree)
        held.tokens, held.tree, held.kept_nodes = target, held.tree.subtree(nodes), nodes
        held.num_written, held.num_found = min(kept, len(target) - 1) + len(nodes), 0
        self._cut(held)
        self._seal(held)
        self.adopt(request_id)
        try:
            self._reserve(held, len(target))
        except OutOfBlocks:
            self.release(request_id)
            raise
        return min(held.num_written, len(target))

    def extend(self, request_id: str, tokens: Sequence[int] | TokenArray, parents: Sequence[int] | TokenArray) -> None:
        """Appends nodes to the request's tree, parents first. A parent is 0 for the root, else its number in order.

        Raises OutOfBlocks with nothing changed.
        """
        held = self._held[request_id]
        self._reserve(held, held.num_rows + len(tokens))
        for token, parent in zip(tokens, parents, strict=True):
            held.tree.add(int(token), int(parent))

    def num_pending(self, request_id: str) -> int:
        """How many rows still have to be computed: uncached committed tokens, then nodes."""
        held = self._held[request_id]
        return held.num_rows - held.num_written

    def adopt(self, request_id: str) -> None:
        """Takes over sealed blocks that hold the request's next pending tokens by now."""
        held = self._held[request_id]
        found = self._find(held)
        if not found:
            return
        for block in found:
            self._allocator.share(block)
        first, last = held.num_sealed, held.num_sealed + len(found)
        self._allocator.free(held.blocks[first:last])
        self._set_blocks(held, held.blocks[:first] + found + held.blocks[last:])
        held.num_sealed = last
        held.num_found += last * self._block_len - held.num_written
        held.num_written = last * self._block_len

    def num_found(self, request_id: str) -> int:
        """How many committed tokens were adopted since the last advance began."""
        return self._held[request_id].num_found

    def kept_nodes(self, request_id: str) -> list[int]:
        """What the advance kept of the tree: the old numbers of the new tree's nodes, its root's first, or none."""
        return self._held[request_id].kept_nodes

    def num_twin_rows(self, request_id: str, other_id: str) -> int:
        """How many of both requests' next pending rows fill the same blocks: once computed, they serve both."""
        one, other = self._held[request_id], self._held[other_id]
        first = one.num_sealed * self._block_len
        if not (self._reuses_prefixes and one.num_written == other.num_written == first):
            return 0
        if one.blocks[: one.num_sealed] != other.blocks[: other.num_sealed]:
            return 0
        return _common_prefix_len(one.tokens[first:-1], other.tokens[first:-1]) // self._block_len * self._block_len

    def next_segment(self, request_id: str, max_rows: int | None = None) -> Segment:
        """The next pending rows, at most `max_rows`. The root and all nodes ask for logits.

        Changes nothing: mark_written does, once the forward is done.
        """
        held = self._held[request_id]
        first = held.num_written
        last = held.num_rows if max_rows is None else min(held.num_rows, first + max_rows)
        assert first < last, "no row is pending"
        return held.segment(first, last)

    def mark_written(self, request_id: str, num_rows: int) -> None:
        """The forward wrote K and V of the first `num_rows` pending rows."""
        held = self._held[request_id]
        assert num_rows <= held.num_rows - held.num_written, "more rows written than were pending"
        held.num_written += num_rows
        self._seal(held)

    def release(self, request_id: str) -> None:
        """Forgets the request and frees its blocks. Unknown requests are fine: a cancel may come twice."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._allocator.free(held.blocks)

    def tokens(self, request_id: str) -> list[int]:
        """The committed tokens of a request that is held; not to be changed."""
        return self._held[request_id].tokens

    def held_len(self, request_id: str) -> int:
        """How many committed tokens are known here; 0 for an unknown request."""
        held = self._held.get(request_id)
        return len(held.tokens) if held else 0

    def request_ids(self) -> list[str]:
        """The requests held, the longest known first."""
        return list(self._held)

    def usage(self) -> BlockCounts:
        """Blocks free, used, cached and in total."""
        return self._allocator.usage()

    def _keep(self, held: _Held, target: list[int], *, keeps_tree: bool) -> tuple[int, list[int]]:
        """How many leading tokens of `target` keep their rows, and the nodes that do if it ends in the tree.

        Moves the rows of accepted nodes behind the prefix, and those of kept nodes behind them.
        """
        common = _common_prefix_len(held.tokens, target)
        num_nodes = held.num_written - len(held.tokens)
        if common < len(held.tokens) or num_nodes < 0:
            return min(common, held.num_written), []
        path = held.tree.walk(target[common:], num_nodes)
        is_inside = keeps_tree and common + len(path) == len(target)
        nodes = held.tree.below(path[-1] if path else 0, num_nodes) if is_inside else []
        self._compact(held, np.array([*path, *nodes[1:]], dtype=np.int64) + (common - 1), common)
        return common + len(path), nodes

    def _compact(self, held: _Held, rows: IntArray, first: int) -> None:
        """Moves `rows` to rows first, first + 1, ... A first child that is accepted is in place already."""
        moved = rows != np.arange(first, first + len(rows))
        if moved.any():
            self._pool.move(held.slots[rows[moved]], held.slots[first : first + len(rows)][moved])

    def _cut(self, held: _Held) -> None:
        """Gives up the blocks that no row needs, and sealed ones in which rows are to be written."""
        num_full = held.num_written // self._block_len
        num_blocks = -(-held.num_rows // self._block_len)
        if num_full < held.num_sealed:
            held.num_sealed = num_blocks = num_full
            held.num_written = num_full * self._block_len
        if num_blocks < len(held.blocks):
            self._allocator.free(held.blocks[num_blocks:])
            self._set_blocks(held, held.blocks[:num_blocks])

    def _seal(self, held: _Held) -> None:
        """Lets others find the blocks that are full of computed tokens by now."""
        num_full = min(held.num_written, len(held.tokens) - 1) // self._block_len
        if not self._reuses_prefixes or num_full <= held.num_sealed:
            return
        blocks = list(held.blocks)
        for idx in range(held.num_sealed, num_full):
            blocks[idx] = self._allocator.keep(blocks[idx - 1] if idx else None, self._text(held, idx), blocks[idx])
        held.num_sealed = num_full
        if blocks != held.blocks:
            self._set_blocks(held, blocks)

    def _find(self, held: _Held) -> list[int]:
        """The sealed blocks, of whomever, that continue this request's own."""
        found: list[int] = []
        previous = held.blocks[held.num_sealed - 1] if held.num_sealed else None
        for idx in range(held.num_sealed, (len(held.tokens) - 1) // self._block_len):
            previous = self._allocator.find(previous, self._text(held, idx))
            if previous is None:
                break
            found.append(previous)
        return found

    def _text(self, held: _Held, block_idx: int) -> tuple[int, ...]:
        first = block_idx * self._block_len
        return tuple(held.tokens[first : first + self._block_len])

    def _reserve(self, held: _Held, num_rows: int) -> None:
        missing = -(-num_rows // self._block_len) - len(held.blocks)
        if missing <= 0:
            return
        blocks = self._allocator.allocate(missing)
        if blocks is None:
            raise OutOfBlocks(f"needs {missing} more blocks of {self._block_len} tokens: {self.usage()}")
        self._set_blocks(held, held.blocks + blocks)

    def _set_blocks(self, held: _Held, blocks: list[int]) -> None:
        held.blocks = blocks
        first_slots = np.array(blocks, dtype=np.int64) * self._block_len
        held.slots = (first_slots[:, None] + np.arange(self._block_len)).ravel()


def _common_prefix_len(held: list[int], target: list[int]) -> int:
    length = min(len(held), len(target))
    if held[:length] == target[:length]:
        return length
    return next(idx for idx in range(length) if held[idx] != target[idx])


def _visible(first: int, last: int, num_tokens: int, ancestors: Sequence[Sequence[int]]) -> NDArray[np.bool_] | None:
    """A token sees those up to itself; a node sees all tokens and its ancestors-or-self. [last - first, last]."""
    visible = np.arange(last) <= np.minimum(np.arange(first, last), num_tokens - 1)[:, None]
    for row, path in zip(visible[last - first - len(ancestors) :], ancestors, strict=True):
        row[np.array(path) + (num_tokens - 1)] = True
    return None if visible.all() else visible
