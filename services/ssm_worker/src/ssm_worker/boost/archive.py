"""Named arrays in one .npz file, written whole or not at all. Knows files; must not know what the arrays mean."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treecore.errors import ConfigError

Arrays = dict[str, NDArray[Any]]


def write_archive(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write `arrays` to `path`, replacing what was there. A process that dies on the way leaves the old file."""
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **dict(arrays))
    partial.replace(path)


def read_archive(path: Path) -> Arrays:
    """All arrays of `path`, never unpickled. Every byte is checked against its CRC; a bad one raises ConfigError."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except Exception as error:  # a broken zip raises whatever its reader trips over first
        raise ConfigError(f"{path}: corrupt ({error}); delete it and run the command that wrote it again") from error
