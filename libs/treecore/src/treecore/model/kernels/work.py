"""Which program computes what: work items for the tree-attention kernels. Pure numpy; knows rows, columns and tiles.

A segment's columns are its request's cached rows in their order: the committed prefix, then tree nodes. The leading
columns that every row sees are its prefix. Two ways to cut (see docs/kernels.md):

fast       prefix in splits of a fixed length, whole tiles only, no masks; what is left of the prefix and the tree are
           the last split, with one mask word for each row and tile.
invariant  each row's own path is cut at fixed multiples of logical position; rows share an item where they see the
           same slots in a split. What a row computes is a function of its path alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Variant = Literal["fast", "invariant"]
Bools = NDArray[np.bool_]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

TILE_COLUMNS = 64  # a mask word's bits
SPLIT_LEN = 256
LONG_ROWS = 64  # a segment of more rows fills a GPU with its row tiles alone: its prefix stays in one split


@dataclass(frozen=True, slots=True)
class Tiling:
    """How rows are laid into tiles: block_m tile rows, tile_heads of a KV head's group in each node's share of them."""

    block_m: int
    tile_heads: int

    @property
    def nodes(self) -> int:
        """Nodes of a tile."""
        return self.block_m // self.tile_heads

    @classmethod
    def of(cls, group_size: int, block_m: int) -> "Tiling":
        """The whole group in one tile if it fits, else its largest divisor that does."""
        fitting = [size for size in range(1, min(group_size, block_m) + 1) if group_size % size == 0]
        return cls(block_m, fitting[-1])


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as kernels see it: rows first_row .. first_row + R - 1 of the batch, the last R of its C columns.

    slots: int64 [C], blocks of block_len in a row. visible: bool [R, C], or None where every row sees every column.
    """

    first_row: int
    num_rows: int
    slots: Int64s
    visible: Bools | None

    @property
    def seen(self) -> Bools:
        """`visible`, spelt out: bool [R, C]."""
        if self.visible is None:
            return np.ones((self.num_rows, len(self.slots)), np.bool_)
        return self.visible

    @property
    def prefix_len(self) -> int:
        """How many leading columns every row sees."""
        hidden = ~self.seen.all(axis=0)
        return int(hidden.argmax()) if hidden.any() else len(self.slots)


@dataclass(frozen=True, slots=True)
class Work:
    """What the kernels read beside q and the cache; their arguments say what each array is. P: parts of all rows."""

    items: Int32s
    rows: Int32s
    partials: Int32s
    tables: Int32s
    words: Int64s
    lows: Int32s
    tails: Int32s
    starts: Int32s
    num_partials: int


def plan_work(
    variant: Variant, segments: Sequence[SegmentView], tiling: Tiling, block_len: int, window: int | None = None
) -> Work:
    """The work of `segments`, which hold all rows of the batch in order. window: positions that a row sees, itself too.

    block_len divides the slots of a segment into blocks, the first of which starts at its first column.
    """
    planner = _Planner(tiling, sum(segment.num_rows for segment in segments))
    cut = _cut_fast if variant == "fast" else _cut_invariant
    for table, segment in enumerate(segments):
        lows = _lows(segment, window)
        planner.lows[segment.first_row : segment.first_row + segment.num_rows] = lows
        cut(planner, table, segment, lows)
    return planner.work(_tables(segments, block_len))


class _Planner:
    """Collects items, parts and masks of one batch."""

    def __init__(self, tiling: Tiling, num_rows: int) -> None:
        self.tiling = tiling
        self.lows = np.zeros(num_rows, np.int32)
        self.counts = np.zeros(num_rows, np.int64)
        self.num_partials = 0
        self._items: list[NDArray[np.integer]] = []
        self._rows: list[NDArray[np.integer]] = []
        self._partials: list[NDArray[np.integer]] = []
        self._words: list[tuple[int, Int64s]] = []
        self._tails: list[Int64s] = [np.zeros(1, np.int64)]
        self._num_tails = 1

    def add(self, fields: NDArray[np.integer], rows: NDArray[np.integer], partials: NDArray[np.integer]) -> None:
        """Items: int [I, 5], [I, nodes] and [I, nodes]."""
        self._items.append(fields)
        self._rows.append(rows)
        self._partials.append(partials)

    def add_words(self, first_row: int, words: Int64s) -> None:
        """Mask words of consecutive rows, [R, W]."""
        self._words.append((first_row, words))

    def add_tail(self, slots: Int64s) -> int:
        """Where the slots of an item's own columns begin."""
        self._tails.append(slots)
        self._num_tails += len(slots)
        return self._num_tails - len(slots)

    def work(self, tables: Int32s) -> Work:
        """All of it."""
        num_words = max([1, *(words.shape[1] for _, words in self._words)])
        all_words = np.zeros((len(self.lows), num_words), np.int64)
        for first_row, words in self._words:
            all_words[first_row : first_row + len(words), : words.shape[1]] = words
        return Work(
            items=np.concatenate(self._items).astype(np.int32),
            rows=np.concatenate(self._rows).astype(np.int32),
            partials=np.concatenate(self._partials).astype(np.int32),
            tables=tables,
            words=all_words,
            lows=self.lows,
            tails=np.concatenate(self._tails).astype(np.int32),
            starts=np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32),
            num_partials=int(self.counts.sum()),
        )


def _cut_fast(planner: _Planner, table: int, segment: SegmentView, lows: Int32s) -> None:
    """Every tile of rows meets every split. A row's parts stand together, in the order of the splits."""
    mask_begin = segment.prefix_len // TILE_COLUMNS * TILE_COLUMNS
    planner.add_words(segment.first_row, _mask_words(segment, mask_begin, lows))
    begins, ends = _splits(segment, mask_begin, int(lows.min()))
    num_splits, nodes = len(begins), planner.tiling.nodes
    rows = np.arange(-(-segment.num_rows // nodes) * nodes).reshape(-1, nodes)
    is_real = rows < segment.num_rows
    parts = planner.num_partials + rows[:, None] * num_splits + np.arange(num_splits)[:, None]  # [tiles, splits, nodes]
    fields = np.zeros((len(rows), num_splits, 5), np.int64)
    fields[..., 0], fields[..., 3] = table, mask_begin
    fields[..., 1], fields[..., 2] = begins, ends
    last_column = len(segment.slots) - segment.num_rows + np.minimum(rows[:, -1] + 1, segment.num_rows)
    fields[..., 2] = np.minimum(fields[..., 2], last_column[:, None])  # no row of a tile sees what comes later
    placed = np.broadcast_to(np.where(is_real, rows + segment.first_row, -1)[:, None], parts.shape)
    planner.add(fields.reshape(-1, 5), placed.reshape(-1, nodes), parts.reshape(-1, nodes))
    planner.counts[segment.first_row : segment.first_row + segment.num_rows] = num_splits
    planner.num_partials += segment.num_rows * num_splits


def _splits(segment: SegmentView, mask_begin: int, low: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Begin and end of each split; the last is what has masks. Nothing in front of `low` is seen by anyone."""
    first = min(low // TILE_COLUMNS * TILE_COLUMNS, mask_begin)
    length = SPLIT_LEN if segment.num_rows <= LONG_ROWS else max(mask_begin, 1)
    cuts = np.arange(first, mask_begin, length)
    begins = np.append(cuts, mask_begin)
    ends = np.append(np.minimum(cuts + length, mask_begin), len(segment.slots))
    has_columns = begins < ends
    return begins[has_columns], ends[has_columns]


def _mask_words(segment: SegmentView, mask_begin: int, lows: Int32s) -> Int64s:
    """int64 [R, W] over the columns from mask_begin on, what lies before a row's window left out."""
    seen = segment.seen
    position = np.cumsum(seen, axis=1) - 1  # a row sees its path and nothing else: the n-th it sees is at position n
    inside = (seen & (position >= lows[:, None]))[:, mask_begin:]
    padded = np.pad(inside, ((0, 0), (0, -inside.shape[1] % TILE_COLUMNS)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int64)


def _cut_invariant(planner: _Planner, table: int, segment: SegmentView, lows: Int32s) -> None:
    """Rows that see the same slots in a split share its items: a prefix, an ancestor chain, a chunk being prefilled."""
    prefix_len = segment.prefix_len
    shared: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    for row, (low, path) in enumerate(zip(lows.tolist(), _paths(segment), strict=True)):
        first_split = low // SPLIT_LEN
        for split in range(first_split, (len(path) - 1) // SPLIT_LEN + 1):
            own = path[max(split * SPLIT_LEN, prefix_len) : (split + 1) * SPLIT_LEN]
            shared.setdefault((split, own.tobytes()), []).append((row, planner.num_partials + split - first_split))
        count = (len(path) - 1) // SPLIT_LEN + 1 - first_split
        planner.counts[segment.first_row + row] = count
        planner.num_partials += count
    for (split, own_bytes), members in shared.items():
        own = np.frombuffer(own_bytes, np.int64)
        begin = split * SPLIT_LEN
        end = min(max(prefix_len, begin), begin + SPLIT_LEN) + len(own)
        tail = planner.add_tail(own) if len(own) else 0
        for rows, parts in _tiles(members, planner.tiling.nodes, segment.first_row):
            planner.add(np.array([[table, begin, end, prefix_len, tail]]), rows, parts)


def _paths(segment: SegmentView) -> Iterator[Int64s]:
    """The slots that each row sees, in logical order."""
    for seen in segment.seen:
        yield segment.slots[seen]


def _tiles(members: list[tuple[int, int]], nodes: int, first_row: int) -> Iterator[tuple[Int64s, Int64s]]:
    """Rows and parts, [1, nodes] each, -1 and 0 where a tile is not full."""
    for start in range(0, len(members), nodes):
        some = np.array(members[start : start + nodes])
        rows, parts = np.full((1, nodes), -1), np.zeros((1, nodes), np.int64)
        rows[0, : len(some)], parts[0, : len(some)] = some[:, 0] + first_row, some[:, 1]
        yield rows, parts


def _lows(segment: SegmentView, window: int | None) -> Int32s:
    """int32 [R]: the first position that each row sees."""
    if window is None:
        return np.zeros(segment.num_rows, np.int32)
    lows: Int32s = np.maximum(segment.seen.sum(axis=1) - window, 0).astype(np.int32)
    return lows


def _tables(segments: Sequence[SegmentView], block_len: int) -> Int32s:
    """int32 [S, longest]: the block of each run of block_len columns."""
    blocks = [segment.slots[::block_len] // block_len for segment in segments]
    tables = np.zeros((len(blocks), max(len(row) for row in blocks)), np.int32)
    for row, found in zip(tables, blocks, strict=True):
        row[: len(found)] = found
    return tables
