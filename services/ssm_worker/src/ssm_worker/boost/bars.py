"""Progress on stderr, with the time left. Knows tqdm; nothing of what is done."""

import sys
from types import TracebackType
from typing import Self

from tqdm import tqdm

from ssm_worker.boost.checkpoint import Mark

_SMOOTHING = 0.05  # the time left follows the last minutes: other work on the machine comes and goes


class TokenBar:
    """One bar that never exceeds its total: the last shard and the last batch are whole, and beyond it is no ETA."""

    def __init__(self, name: str, total: int, done: int, unit: str = "tok") -> None:
        self._bar = tqdm(total=total, initial=min(done, total), unit=unit, desc=name, smoothing=_SMOOTHING)

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._bar.update(min(count, max(0, self._bar.total - self._bar.n)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()


class StageBars:
    """A Progress (see boosting.py) of one bar after another. To be closed."""

    def __init__(self) -> None:
        self._bar: TokenBar | None = None

    def stage(self, name: str, total: int, done: int) -> None:
        """The bar before it is over."""
        self.close()
        self._bar = TokenBar(name, total, done)

    def advance(self, num_tokens: int) -> None:
        """Of the stage that began last."""
        assert self._bar is not None, "a stage has begun"
        self._bar.advance(num_tokens)

    def mark(self, mark: Mark) -> None:
        """A line above the bar."""
        shown = "/".join(f"{100 * share:.1f}" for share in mark.agreement) or "no held-out set"
        tqdm.write(f"step {mark.num_steps}: loss {mark.loss:.3f}, held-out top-1..5 {shown} %", file=sys.stderr)

    def close(self) -> None:
        """No stage is running any more."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
