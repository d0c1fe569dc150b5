"""What rank 0 has the others do, as bytes. Knows arrays; must not know who computes.

One command is a kilobyte or so: runs of consecutive slots are stored as runs, and of a mask only what is not all true.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treecore.errors import WireError
from treecore.model.batch import IntArray, Segment


@dataclass(frozen=True, slots=True)
class NewPool:
    """Make the KV cache."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run these segments."""

    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Move rows of the KV cache."""

    src_slots: IntArray
    dst_slots: IntArray


Command = NewPool | Forward | Move


def pack(command: Command) -> list[Any]:
    """A command as what msgpack can write."""
    if isinstance(command, NewPool):
        return ["pool", command.num_slots]
    if isinstance(command, Move):
        return ["move", _pack_ints(command.src_slots), _pack_ints(command.dst_slots)]
    return ["forward", [_pack_segment(segment) for segment in command.segments]]


def unpack(packed: Sequence[Any]) -> Command:
    """The command; raises WireError."""
    kind, *parts = packed
    if kind == "pool":
        return NewPool(int(parts[0]))
    if kind == "move":
        return Move(_unpack_ints(parts[0]), _unpack_ints(parts[1]))
    if kind == "forward":
        return Forward(tuple(_unpack_segment(part) for part in parts[0]))
    raise WireError(f"no command: {kind!r}")


def _pack_segment(segment: Segment) -> list[Any]:
    return [_pack_field(getattr(segment, field.name)) for field in fields(Segment)]


def _unpack_segment(packed: Sequence[Any]) -> Segment:
    return Segment(*[_unpack_field(part) for part in packed])


def _pack_field(value: NDArray[Any] | None) -> Any:
    """All that a segment is made of: int64 vectors, a bool mask or None."""
    if value is None:
        return None
    return _pack_mask(value) if value.dtype == np.bool_ else _pack_ints(value)


def _unpack_field(packed: Any) -> Any:
    if packed is None:
        return None
    return _unpack_mask(packed) if packed[0] == "mask" else _unpack_ints(packed)


def _pack_ints(values: IntArray) -> list[Any]:
    """The values, or where that is shorter the runs of consecutive numbers among them: (first, length) each."""
    borders = np.flatnonzero(np.diff(values) != 1) + 1
    if 2 * (len(borders) + 1) >= len(values):
        return ["ints", values.astype("<i8").tobytes()]
    firsts = np.concatenate([[0], borders])
    runs = np.stack([values[firsts], np.diff(firsts, append=len(values))])
    return ["runs", runs.astype("<i8").tobytes()]


def _unpack_ints(packed: Sequence[Any]) -> IntArray:
    values: IntArray = np.frombuffer(packed[1], "<i8").astype(np.int64)
    if packed[0] == "ints":
        return values
    runs = values.reshape(2, -1)
    ends: IntArray = np.cumsum(runs[1])
    offsets: IntArray = np.repeat(runs[0] - (ends - runs[1]), runs[1])
    return np.arange(len(offsets)) + offsets


def _pack_mask(mask: NDArray[np.bool_]) -> list[Any]:
    """Shape, how many leading columns are all true (the prefix, mostly), and the bits of the others."""
    is_full = np.logical_and.reduce(mask, axis=0)
    num_full = mask.shape[1] if is_full.all() else int(is_full.argmin())
    return ["mask", *mask.shape, num_full, np.packbits(mask[:, num_full:]).tobytes()]


def _unpack_mask(packed: Sequence[Any]) -> NDArray[np.bool_]:
    num_rows, num_columns, num_full = packed[1:4]
    mask = np.ones((num_rows, num_columns), np.bool_)
    rest = num_rows * (num_columns - num_full)
    bits = np.unpackbits(np.frombuffer(packed[4], np.uint8), count=rest)
    mask[:, num_full:] = bits.reshape(num_rows, num_columns - num_full)
    return mask
