"""A safetensors checkpoint that is read again and again without filling memory. Knows the file format; not layers.

Reads go past the mapping that safetensors makes, and what was read is dropped from the page cache at once: else a model
larger than memory would push out everything else, or count against the limit of its container.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from treecore.errors import ConfigError
from treecore.model.checkpoint import shards

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32}


@dataclass(frozen=True, slots=True)
class _Stored:
    file: "_File"
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class UncachedCheckpoint:
    """A directory of safetensors files; see Checkpoint. Tensors that it returns are fresh memory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._stored = {name: stored for path in shards(directory) for name, stored in _open(path).items()}

    def names(self) -> set[str]:
        """All tensors in all shards."""
        return set(self._stored)

    def shape(self, name: str) -> Sequence[int]:
        """The shape as the header states it."""
        return self._stored[name].shape

    def tensor(self, name: str) -> Tensor:
        """The tensor. Raises ConfigError naming the file."""
        stored = self._stored[name]
        return stored.file.read(stored.offset, stored.shape, stored.dtype)

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Rows, and columns of them. Raises ConfigError naming the file."""
        stored = self._stored[name]
        width = prod(stored.shape[1:]) * stored.dtype.itemsize
        shape = (len(rows), *stored.shape[1:])
        read = stored.file.read(stored.offset + rows.start * width, shape, stored.dtype)
        return read if columns is None else read[:, columns.start : columns.stop]


class _File:
    """An open file, closed with its last user."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What is stored from `offset` on, which leaves the page cache again."""
        raw = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
        self._fill(raw.numpy().data, offset)
        os.posix_fadvise(self._fd, offset, len(raw), os.POSIX_FADV_DONTNEED)
        return raw.view(dtype).view(*shape)

    def _fill(self, memory: memoryview, offset: int) -> None:
        while len(memory):
            num_bytes = os.preadv(self._fd, [memory], offset)
            if num_bytes == 0:
                raise ConfigError(f"{self._path}: ends before its tensors do")
            memory, offset = memory[num_bytes:], offset + num_bytes


def _open(path: Path) -> dict[str, _Stored]:
    """The tensors of a file: a header of JSON, its length before it (8 bytes), and their bytes behind it."""
    try:
        file = _File(path, os.open(path, os.O_RDONLY))
        header_len = int(file.read(0, (1,), torch.int64))
        header = json.loads(file.read(8, (header_len,), torch.uint8).numpy().tobytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    header.pop("__metadata__", None)
    return {
        name: _Stored(file, 8 + header_len + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
        if entry["dtype"] in _DTYPES
    }
