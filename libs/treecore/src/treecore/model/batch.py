"""One forward's rows, made of segments. Knows rows, slots and masks; must not know requests or weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]

MAX_PADDED_ROWS = 32  # longer segments attend alone: padding others to them would cost more than a call


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's R new rows, and the C cached rows (new ones included) that they may attend to.

    tokens, positions, slots: int64 [R]; `slots` are where the rows' K and V go. column_slots, column_positions: int64
    [C]. visible: bool [R, C], or None where every row sees every column. logit_rows: int64, indices of the rows whose
    logits are wanted.
    """

    tokens: IntArray
    positions: IntArray
    slots: IntArray
    column_slots: IntArray
    column_positions: IntArray
    visible: NDArray[np.bool_] | None
    logit_rows: IntArray

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.tokens)

    def rows(self, first: int, last: int) -> "Segment":
        """Rows first..last-1 alone, the rows before them being written by then.

        The segment's own rows are its last R columns, in order, and none sees a later one.
        """
        num_columns = len(self.column_slots) - self.num_rows + last
        wanted = (self.logit_rows >= first) & (self.logit_rows < last)
        return Segment(
            tokens=self.tokens[first:last],
            positions=self.positions[first:last],
            slots=self.slots[first:last],
            column_slots=self.column_slots[:num_columns],
            column_positions=self.column_positions[:num_columns],
            visible=None if self.visible is None else self.visible[first:last, :num_columns],
            logit_rows=self.logit_rows[wanted] - first,
        )


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B segments that attend in one call, padded to R rows and C columns each; they are consecutive rows of the batch.

    segments: in the order of the rows. rows: the group's rows in the batch. columns: slots int64 [B * C], or a slice
    where B = 1 and they are contiguous. visible: bool [B, R, C] or None (all). padded_rows int64 [B * R] and real_rows
    int64 lead to the padded layout and back; None where nothing is padded.
    """

    segments: tuple[Segment, ...]
    rows: slice
    columns: Tensor | slice
    visible: Tensor | None
    padded_rows: Tensor | None
    real_rows: Tensor | None

    @property
    def num_segments(self) -> int:
        """B."""
        return len(self.segments)

    def near(self, window: int) -> Tensor:
        """Which columns are less than `window` positions before a row: bool [B, R, C]. Padding may be either."""
        rows = _pad([segment.positions for segment in self.segments])
        columns = _pad([segment.column_positions for segment in self.segments])
        return torch.from_numpy(rows[:, :, None] - columns[:, None] < window)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """All rows of a forward, grouped for attention.

    segments: what the batch was made of, in that order; the rows may be in another. tokens, positions, slots: int64
    [R]. logit_rows: int64 [num_logit_rows], in the order of the segments; `num_logits[i]` of them belong to segment i.
    """

    segments: tuple[Segment, ...]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    num_logits: tuple[int, ...]
    groups: tuple[AttentionGroup, ...]

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> "ForwardBatch":
        """Lays the segments out so that each attention group is a consecutive run of rows."""
        assert segments, "a forward needs a segment"
        grouped = list(_group(segments))
        order = [idx for group in grouped for idx in group]
        starts = _starts(segments, order)
        return cls(
            segments=tuple(segments),
            tokens=_concat([segments[idx].tokens for idx in order]),
            positions=_concat([segments[idx].positions for idx in order]),
            slots=_concat([segments[idx].slots for idx in order]),
            logit_rows=_concat([starts[idx] + segment.logit_rows for idx, segment in enumerate(segments)]),
            num_logits=tuple(len(segment.logit_rows) for segment in segments),
            groups=tuple(_attention_group([segments[idx] for idx in group], starts[group[0]]) for group in grouped),
        )

    def split_logits(self, logits: Tensor) -> list[Tensor]:
        """The rows of `logits` [num_logit_rows, V] that belong to each segment, as views."""
        return list(torch.split(logits, list(self.num_logits)))


def _group(segments: Sequence[Segment]) -> Iterator[list[int]]:
    """Indices of segments that attend together: short ones whose column counts are within a factor of two."""
    together: dict[int, list[int]] = {}
    for idx, segment in enumerate(segments):
        if segment.num_rows > MAX_PADDED_ROWS:
            yield [idx]
        else:
            together.setdefault(len(segment.column_slots).bit_length(), []).append(idx)
    yield from together.values()


def _starts(segments: Sequence[Segment], order: list[int]) -> dict[int, int]:
    """The first row of each segment in the batch."""
    lengths = [segments[idx].num_rows for idx in order]
    return dict(zip(order, accumulate(lengths, initial=0), strict=False))


def _attention_group(segments: list[Segment], start: int) -> AttentionGroup:
    lengths = np.array([segment.num_rows for segment in segments])
    num_rows = int(lengths.max())
    is_real = np.arange(num_rows) < lengths[:, None]
    padded = (
        None if is_real.all() else torch.from_numpy(np.where(is_real, np.cumsum(is_real).reshape(is_real.shape) - 1, 0))
    )
    return AttentionGroup(
        segments=tuple(segments),
        rows=slice(start, start + int(lengths.sum())),
        columns=_columns(segments),
        visible=_visible(segments, num_rows),
        padded_rows=None if padded is None else padded.ravel(),
        real_rows=None if padded is None else torch.from_numpy(np.flatnonzero(is_real)),
    )


def _columns(segments: list[Segment]) -> Tensor | slice:
    """Padding repeats a segment's first slot: masked, but finite, because a hidden NaN would still poison the sum."""
    first = segments[0].column_slots
    if len(segments) == 1 and np.all(np.diff(first) == 1):
        return slice(int(first[0]), int(first[-1]) + 1)
    return torch.from_numpy(_pad([segment.column_slots for segment in segments]).ravel())


def _visible(segments: list[Segment], num_rows: int) -> Tensor | None:
    width = max(len(segment.column_slots) for segment in segments)
    visible = np.zeros((len(segments), num_rows, width), dtype=np.bool_)
    for row, segment in zip(visible, segments, strict=True):
        shape = (segment.num_rows, len(segment.column_slots))
        row[: shape[0], : shape[1]] = True if segment.visible is None else segment.visible
    return None if visible.all() else torch.from_numpy(visible)


def _pad(arrays: Sequence[IntArray]) -> IntArray:
    """int64 [B, n]: each array, with its first entry repeated up to the length of the longest."""
    width = max(len(array) for array in arrays)
    return np.stack([np.pad(array, (0, width - len(array)), constant_values=array[0]) for array in arrays])


def _concat(arrays: list[IntArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
