"""What the command writes: results to stdout, everything else to stderr."""

import sys
from types import TracebackType
from typing import TextIO

from tqdm import tqdm


def say(text: str, end: str = "\n") -> None:
    """Write a result to stdout at once."""
    print(text, end=end, flush=True)


def tell(text: str) -> None:
    """Write a line for the person who watches, to stderr."""
    print(f"espalier: {text}", file=sys.stderr, flush=True)


class ChildLog:
    """A sink that writes each child's lines to a stream behind the child's name.

    A stream that breaks (`espalier up 2>&1 | head`) is given up: the children must not stall on a full pipe.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr

    def __call__(self, name: str, line: str) -> None:
        """Write one line."""
        if self._stream is None:
            return
        try:
            print(f"{name:15} | {line}", file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None


class StageBars:
    """One progress bar after another on stderr; only the first and last line where that is no terminal."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> "StageBars":
        """Start without a bar."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last bar as it stands."""
        self._close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage`."""
        if stage != self._stage or self._bar is None:
            self._open(stage, total)
        assert self._bar is not None
        self._bar.update(done - self._bar.n)

    def _open(self, stage: str, total: int) -> None:
        self._close()
        quiet_s = 0.1 if sys.stderr.isatty() else 3600.0
        is_bytes = total > 1_000_000
        self._stage = stage
        self._bar = tqdm(
            total=total, desc=f"{stage:9}", unit="B" if is_bytes else "", unit_scale=is_bytes, mininterval=quiet_s
        )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
