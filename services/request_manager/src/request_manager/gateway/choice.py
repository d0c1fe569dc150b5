"""One choice's token stream becomes a text stream, and several run side by side.

The only owner of text offsets and of the stop strings' held-back tail. Must not know HTTP or response shapes.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from request_manager.contract import FinishReason, Generation, Manager, TokenDelta
from request_manager.gateway.detokenise import Detokeniser
from request_manager.gateway.stop import StopScanner
from treecore.errors import EspalierError


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Text that became certain and the tokens that were taken, EOS included; `text` may lag behind `tokens`.

    steps: LLM steps of this choice so far. The last delta has a finish reason.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    steps: int


class ChoiceText:
    """Cuts one choice's tokens at EOS and at stop strings, token by token, however the deltas are cut."""

    def __init__(self, detokeniser: Detokeniser, stops: Sequence[str], eos_token_ids: Sequence[int]) -> None:
        self._detokeniser = detokeniser
        self._scanner = StopScanner(stops)
        self._eos = frozenset(eos_token_ids)

    def advance(self, delta: TokenDelta) -> ChoiceDelta:
        """What this delta adds. Tokens behind an EOS or a completed stop string are neither text nor counted.

        Not to be called again after a finish reason.
        """
        text: list[str] = []
        for count, token in enumerate(delta.tokens, 1):
            if token in self._eos:
                return ChoiceDelta("".join(text) + self._end(), delta.tokens[:count], "stop", delta.steps)
            text.append(self._scanner.feed(self._detokeniser.push(token)))
            if self._scanner.hit:
                return ChoiceDelta("".join(text), delta.tokens[:count], "stop", delta.steps)
        return self._whole(delta, "".join(text))

    def _whole(self, delta: TokenDelta, text: str) -> ChoiceDelta:
        if delta.finish_reason is None:
            return ChoiceDelta(text, delta.tokens, None, delta.steps)
        text += self._end()
        reason = "stop" if self._scanner.hit else delta.finish_reason
        return ChoiceDelta(text, delta.tokens, reason, delta.steps)

    def _end(self) -> str:
        """The held-back rest; it may still complete a stop string (one that contains U+FFFD)."""
        rest = self._scanner.feed(self._detokeniser.finish())
        return rest + self._scanner.flush()


async def choice_deltas(manager: Manager, generation: Generation, text: ChoiceText) -> AsyncGenerator[ChoiceDelta]:
    """Generate one choice up to its end. The generation is closed (cancelled) as soon as its text is complete.

    Raises what the manager raises, and EspalierError if the manager stops without a finish reason.
    """
    deltas = manager.generate(generation)
    assert isinstance(deltas, AsyncGenerator), "closing it is how a request is cancelled"
    async with aclosing(deltas):
        async for delta in deltas:
            told = text.advance(delta)
            yield told
            if told.finish_reason is not None:
                return
    raise EspalierError(f"{generation.request_id} ended without a finish reason")


Indexed = tuple[int, ChoiceDelta]


async def side_by_side(choices: Sequence[AsyncGenerator[ChoiceDelta]]) -> AsyncGenerator[Indexed]:
    """(choice_idx, delta) of all choices as they come. One that fails cancels the others and raises here.

    Closing it cancels them all, and waits until they are closed.
    """
    queue: asyncio.Queue[Indexed | None] = asyncio.Queue()
    pump = asyncio.create_task(_pump(choices, queue))
    try:
        while (item := await queue.get()) is not None:
            yield item
        await pump
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


async def _pump(choices: Sequence[AsyncGenerator[ChoiceDelta]], queue: "asyncio.Queue[Indexed | None]") -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for idx, choice in enumerate(choices):
                group.create_task(_drain(idx, choice, queue))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        queue.put_nowait(None)


async def _drain(idx: int, choice: AsyncGenerator[ChoiceDelta], queue: "asyncio.Queue[Indexed | None]") -> None:
    async with aclosing(choice):
        async for delta in choice:
            queue.put_nowait((idx, delta))
