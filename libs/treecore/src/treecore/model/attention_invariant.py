"""Tree attention whose bits depend on a row's own path only. Knows q, k, v and paths, nothing of layers.

However a row is computed (alone, in a tree, in a batch, in any chunk of a prefill), the same operations run over the
same numbers: K and V stand in the order of the path, cut into tiles at fixed multiples of position; every product has
the same shape; partial results are added in the order of position. Rows whose paths agree in a tile share it: what
lies behind a row in its last tile has weight zero, and adding zeros changes no bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treecore.model.batch import ForwardBatch, IntArray, Segment

TILE_LEN = 64  # positions
BLOCK_ROWS = 8  # rows that one product takes; unused ones are computed and forgotten
MAX_PART_ROWS = 64  # rows that are planned together: bounds the memory that gathered tiles take
LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Tile:
    """What one product takes: the slots of TILE_LEN positions from `first` on, and at most BLOCK_ROWS rows."""

    slots: IntArray
    first: int
    rows: IntArray


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch on the device: P tiles, and where each row's partial results are.

    columns: int64 [2 * P * num_kv_heads * TILE_LEN], indices of heads of K, then of V. block_rows: int64
    [P * BLOCK_ROWS]. mask: additive fp32 [P, 1, BLOCK_ROWS, 1, TILE_LEN]. sources: int64 [num_tiles * R], an entry of
    block_rows for each tile along a row's path; absent: fp32 [num_tiles, R, 1], -inf where the row has no such tile.
    """

    rows: slice
    columns: Tensor
    block_rows: Tensor
    mask: Tensor
    sources: Tensor
    absent: Tensor


@dataclass(frozen=True, slots=True)
class InvariantAttention:
    """softmax(cap(q k^T scale)) v in fp32, see TorchAttention; on the CPU, where one shape of product has one order."""

    num_kv_heads: int
    scale: float
    soft_cap: float | None = None

    def plan(self, batch: ForwardBatch, window: int | None, like: Tensor) -> list[Part]:
        """The batch's rows in parts of at most MAX_PART_ROWS."""
        return [self._plan_part(start, segments, window, like.device) for start, segments in _parts(batch)]

    def __call__(self, q: Tensor, kv: Tensor, plan: Sequence[Part]) -> Tensor:
        """Attention of all rows: [R, num_heads * D], in the dtype of q."""
        done = [self._attend_part(q[part.rows], kv, part) for part in plan]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _plan_part(self, start: int, segments: list[Segment], window: int | None, device: torch.device) -> Part:
        positions = np.concatenate([segment.positions for segment in segments])
        oldest = np.maximum(0, positions - window + 1) if window is not None else np.zeros_like(positions)
        tiles = list(_tiles(segments, positions, oldest))
        sources, absent = _sources(tiles, len(positions))
        return Part(
            rows=slice(start, start + len(positions)),
            columns=self._columns(tiles).to(device),
            block_rows=torch.from_numpy(_block_rows(tiles)).to(device),
            mask=_mask(tiles, positions, oldest).to(device),
            sources=sources.to(device),
            absent=absent.to(device),
        )

    def _columns(self, tiles: Sequence[Tile]) -> Tensor:
        """Of a pool's layer as [num_slots * 2 * num_kv_heads, D]."""
        slots = torch.from_numpy(np.stack([tile.slots for tile in tiles]))
        heads = torch.arange(2 * self.num_kv_heads).view(2, 1, -1, 1)
        return (slots[None, :, None] * (2 * self.num_kv_heads) + heads).flatten()

    def _attend_part(self, q: Tensor, kv: Tensor, part: Part) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        num_tiles, group_size = len(part.mask), num_heads // self.num_kv_heads
        k, v = kv.view(-1, head_dim).index_select(0, part.columns).float().view(2, -1, TILE_LEN, head_dim)
        blocks = q.float().index_select(0, part.block_rows).view(num_tiles, BLOCK_ROWS, self.num_kv_heads, -1)
        by_head = blocks.transpose(1, 2).reshape(len(k), -1, head_dim)
        scores = self._scores(by_head, k).view(num_tiles, self.num_kv_heads, BLOCK_ROWS, group_size, -1)
        scores += part.mask
        top = scores.amax(-1).clamp_min_(LEAST)  # an unused row may see nothing
        scores.sub_(top[..., None]).exp_()
        out = torch.bmm(scores.view(len(k), -1, TILE_LEN), v).view(*top.shape, head_dim)
        tops, totals, outs = (
            x.transpose(1, 2).reshape(-1, num_heads, *x.shape[4:]) for x in (top, scores.sum(-1), out)
        )
        return _merge(tops, totals, outs, part).view(num_rows, -1).to(q.dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.soft_cap is None:
            return torch.bmm(q, k.mT).mul_(self.scale)
        return torch.bmm(q, k.mT).mul_(self.scale / self.soft_cap).tanh_().mul_(self.soft_cap)


def _merge(top: Tensor, total: Tensor, out: Tensor, part: Part) -> Tensor:
    """Each row's tiles added in the order of position: [R, num_heads, D]. A tile that a row has not adds zero.

    top, total: fp32 [P * BLOCK_ROWS, num_heads], the largest score and the sum of weights; out: [..., D].
    """
    num_tiles, num_rows, _ = part.absent.shape
    tops = top.index_select(0, part.sources).view(num_tiles, num_rows, -1) + part.absent
    weights = (tops - tops.amax(0)).exp_()
    sums = torch.zeros_like(tops[0])
    outs = torch.zeros(*sums.shape, out.shape[-1], device=out.device)
    for weight, rows in zip(weights, part.sources.view(num_tiles, -1), strict=True):
        sums += total.index_select(0, rows).mul_(weight)
        outs += out.index_select(0, rows).mul_(weight[..., None])
    return outs.div_(sums[..., None])


def _parts(batch: ForwardBatch) -> Iterator[tuple[int, list[Segment]]]:
    """Consecutive rows of the batch: the first one's index, and the segments, or pieces of segments, that they are."""
    pieces = [piece for group in batch.groups for segment in group.segments for piece in _pieces(segment)]
    start, taken = 0, list[Segment]()
    for piece in pieces:
        if taken and sum(other.num_rows for other in [*taken, piece]) > MAX_PART_ROWS:
            yield start, taken
            start, taken = start + sum(other.num_rows for other in taken), []
        taken.append(piece)
    yield start, taken


def _pieces(segment: Segment) -> Iterator[Segment]:
    for first in range(0, segment.num_rows, MAX_PART_ROWS):
        yield segment.rows(first, min(first + MAX_PART_ROWS, segment.num_rows))


def _tiles(segments: Sequence[Segment], positions: IntArray, oldest: IntArray) -> Iterator[Tile]:
    """The products of a part: its rows are those of `segments`, in their order, and see positions from `oldest` on."""
    start = 0
    for segment in segments:
        rows = np.arange(start, start + segment.num_rows)
        start += segment.num_rows
        paths, path_of = _paths(segment)
        slots = [_cut(segment.column_slots[path]) for path in paths]
        num_shared = _common_prefix_len(paths) // TILE_LEN
        for tile_idx in range(max(map(len, slots))):
            first = tile_idx * TILE_LEN
            sees = (positions[rows] >= first) & (oldest[rows] < first + TILE_LEN)
            together = [sees] if tile_idx < num_shared else [sees & (path_of == idx) for idx in range(len(paths))]
            for idx, chosen in enumerate(together):
                for block in _blocks(rows[chosen]):
                    yield Tile(slots[idx][tile_idx], first, block)


def _paths(segment: Segment) -> tuple[list[IntArray], IntArray]:
    """Paths that cover all rows, each as columns in the order of position, and the path that each row is on."""
    first_own = len(segment.column_slots) - segment.num_rows
    paths: list[IntArray] = []
    path_of = np.full(segment.num_rows, -1)
    for row in reversed(range(segment.num_rows)):
        if path_of[row] < 0:
            columns = (
                np.arange(len(segment.column_slots)) if segment.visible is None else segment.visible[row].nonzero()[0]
            )
            own = columns[columns >= first_own] - first_own
            path_of[own[path_of[own] < 0]] = len(paths)
            paths.append(columns)
    return paths, path_of


def _common_prefix_len(paths: Sequence[IntArray]) -> int:
    common = paths[0]
    for path in paths[1:]:
        length = min(len(common), len(path))
        differs = common[:length] != path[:length]
        common = common[: int(differs.argmax()) if differs.any() else length]
    return len(common)


def _cut(slots: IntArray) -> IntArray:
    """[n, TILE_LEN]; padding repeats the first slot: its weight is zero, but a hidden NaN would poison the sum."""
    return np.pad(slots, (0, -len(slots) % TILE_LEN), constant_values=slots[0]).reshape(-1, TILE_LEN)


def _blocks(rows: IntArray) -> Iterator[IntArray]:
    for first in range(0, len(rows), BLOCK_ROWS):
        yield rows[first : first + BLOCK_ROWS]


def _block_rows(tiles: Sequence[Tile]) -> IntArray:
    """Padded with the tile's first row."""
    return np.concatenate([np.pad(t.rows, (0, BLOCK_ROWS - len(t.rows)), constant_values=t.rows[0]) for t in tiles])


def _mask(tiles: Sequence[Tile], positions: IntArray, oldest: IntArray) -> Tensor:
    rows = _block_rows(tiles).reshape(-1, BLOCK_ROWS, 1)
    columns = np.array([tile.first for tile in tiles])[:, None, None] + np.arange(TILE_LEN)
    visible: NDArray[np.bool_] = (columns <= positions[rows]) & (columns >= oldest[rows])
    return torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None, :, None]


def _sources(tiles: Sequence[Tile], num_rows: int) -> tuple[Tensor, Tensor]:
    """Part's `sources` and `absent`. A tile that is absent is read from anywhere."""
    num_tiles = max(tile.first for tile in tiles) // TILE_LEN + 1
    sources = np.zeros((num_tiles, num_rows), dtype=np.int64)
    absent = np.full((num_tiles, num_rows, 1), -np.inf, dtype=np.float32)
    for idx, tile in enumerate(tiles):
        sources[tile.first // TILE_LEN, tile.rows] = idx * BLOCK_ROWS + np.arange(len(tile.rows))
        absent[tile.first // TILE_LEN, tile.rows] = 0.0
    return torch.from_numpy(sources.ravel()), torch.from_numpy(absent)
