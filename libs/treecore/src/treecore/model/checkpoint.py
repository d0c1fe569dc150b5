"""Named tensors on disk, read one at a time, never unpickled. Knows safetensors; must not know what a tensor is for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treecore.errors import ConfigError
from treecore.model.config import read_json

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)  # not quantised


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names. Asking for an absent one is a bug; an unreadable one raises ConfigError."""

    def names(self) -> set[str]:
        """All tensors that it has."""

    def shape(self, name: str) -> Sequence[int]:
        """The shape of a tensor, without reading it."""

    def tensor(self, name: str) -> Tensor:
        """A tensor in its stored dtype, on the CPU."""

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """Those rows, and of them those columns (None: all), without reading the others where the format allows it."""


class SafetensorsCheckpoint:
    """A directory's model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, directory: Path) -> None:
        self._file_of: dict[str, tuple[Any, Path]] = {}
        for path in shards(directory):
            file = _open(path)
            self._file_of |= dict.fromkeys(file.keys(), (file, path))

    def names(self) -> set[str]:
        """All tensors in all shards."""
        return set(self._file_of)

    def shape(self, name: str) -> Sequence[int]:
        """The shape as the header states it."""
        shape: list[int] = self._file_of[name][0].get_slice(name).get_shape()
        return shape

    def tensor(self, name: str) -> Tensor:
        """The tensor. Raises ConfigError naming the file and the tensor."""
        return self._read(name, lambda file: file.get_tensor(name))

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """A copy of rows and columns. Raises ConfigError naming the file and the tensor."""
        cut = (slice(rows.start, rows.stop), *([] if columns is None else [slice(columns.start, columns.stop)]))
        return self._read(name, lambda file: file.get_slice(name)[cut])

    def _read(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        file, path = self._file_of[name]
        try:
            tensor = read(file)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: tensor {name} cannot be read ({error})") from error
        if tensor.dtype not in READABLE:
            raise ConfigError(
                f"{path}: tensor {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, not supported"
            )
        return tensor


class MeteredCheckpoint:
    """A checkpoint that counts what is read of it: `read_bytes`, as stored."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.read_bytes = 0

    def names(self) -> set[str]:
        """See Checkpoint."""
        return self._checkpoint.names()

    def shape(self, name: str) -> Sequence[int]:
        """See Checkpoint."""
        return self._checkpoint.shape(name)

    def tensor(self, name: str) -> Tensor:
        """See Checkpoint."""
        return self._counted(self._checkpoint.tensor(name))

    def part(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        """See Checkpoint."""
        return self._counted(self._checkpoint.part(name, rows, columns))

    def _counted(self, tensor: Tensor) -> Tensor:
        self.read_bytes += tensor.nbytes
        return tensor


def shards(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory. Raises ConfigError where there are none."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists() or not index.exists():
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map is missing")
    names = {str(name) for name in weight_map.values()}
    if outside := sorted(name for name in names if Path(name).name != name):
        raise ConfigError(f"{index}: {outside[0]!r} is outside of the checkpoint directory")
    return [directory / name for name in sorted(names)]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file (only safetensors checkpoints are loaded)") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
