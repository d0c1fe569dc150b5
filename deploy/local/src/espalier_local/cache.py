"""The directory where fetched and converted models live, safe against two commands at once.

Knows files; must not know what a model is.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pin:
    """A file's name and the SHA-256 (hex) that it must have."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Paths under one root directory. A model is there if its directory is: it appears by rename, complete."""

    root: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ModelCache":
        """$ESPALIER_CACHE, else $XDG_CACHE_HOME/espalier, else ~/.cache/espalier."""
        if own := environment.get("ESPALIER_CACHE"):
            return cls(typed_path(own).absolute())
        base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(base).absolute() / "espalier")

    def model_dir(self, name: str) -> Path:
        """Where the model's checkpoint directory is, or will be."""
        return self.root / "models" / name

    def partial_dir(self, name: str) -> Path:
        """Where unfinished work on the model is kept, so that it can go on."""
        return self.root / "models" / f"{name}.partial"

    def has(self, name: str) -> bool:
        """Whether the model is there."""
        return self.model_dir(name).is_dir()

    @contextlib.contextmanager
    def locked(self, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Be the only process that works on this model; `on_wait` is called if another one does."""
        lock = self.root / "models" / f"{name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield


def typed_path(text: str) -> Path:
    """The path that somebody typed; `~` of a user who is not known here stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def matches(directory: Path, pin: Pin) -> bool:
    """Whether the pinned file is in `directory`, byte for byte."""
    path = directory / pin.name
    return path.is_file() and sha256_of(path) == pin.sha256
