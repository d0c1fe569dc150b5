"""Waits that end at once when what they depend on is lost. Knows asyncio only.

A wait on a reply would otherwise last until its deadline; and a second task beside each wait, just to hear of a loss,
costs more than the whole codec.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from treecore.errors import Unavailable, Unreachable

_PAST = 0.0  # on the loop's clock


class Lifeline:
    """A link or a process that waits depend on; `loss` says what it means to lose it."""

    def __init__(self, loss: str) -> None:
        self.is_cut = False
        self._loss = loss
        self._waits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Run the body; raises Unavailable as soon as the lifeline is cut, and Unreachable if it was cut before."""
        if self.is_cut:
            raise Unreachable(self._loss)
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                yield
        except TimeoutError as error:
            if not wait.expired():  # the body's own
                raise
            raise Unavailable(self._loss) from error
        finally:
            self._waits.discard(wait)

    def cut(self) -> None:
        """End all waits."""
        self.is_cut = True
        waits, self._waits = self._waits, set()
        for wait in waits:
            wait.reschedule(_PAST)

    def mend(self) -> None:
        """It is back: new waits may begin."""
        self.is_cut = False
