"""One choice's token stream becomes a text stream, and several run side by side.

The only owner of text offsets and of the stop strings' held-back tail. Must not know HTTP or response shapes.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from request_manager.contract import FinishReason, Generation, Manager, TokenDelta
from request_manager.gateway.logprobs import TokenEntry, token_entry
from request_manager.gateway.stop import StopScanner
from request_manager.gateway.text import TextCodec
from treecore.errors import EspalierError


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """Text that became certain and the tokens that were taken, EOS included; `text` may lag behind `tokens`.

    steps: LLM steps of this choice so far. num_accepted: how many of the tokens were drafted. logprobs: an entry a
    token, or none at all. num_found: as in TokenDelta. The last delta has a finish reason.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    steps: int
    num_accepted: int = 0
    logprobs: tuple[TokenEntry, ...] = ()
    num_found: int = 0


class ChoiceText:
    """Turns one choice's tokens into text and cuts it at stop strings, token by token, however the deltas are cut.

    echo: text that goes in front, in which no stop string is looked for. A stop string that completes while there are
    fewer than `min_tokens` tokens is text.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str] = (), min_tokens: int = 0, echo: str = "") -> None:
        self._codec = codec
        self._detokeniser = codec.detokeniser()
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self._unsaid = echo
        self._num_tokens = 0
        self._num_chars = 0

    def advance(self, delta: TokenDelta) -> ChoiceDelta:
        """What this delta adds. A token that ended the output is counted and is no text.

        Tokens behind a completed stop string are neither. Not to be called again after a finish reason.
        """
        text, self._unsaid = self._unsaid, ""
        offsets: list[int] = []
        num_spoken = len(delta.tokens) - (delta.finish_reason == "stop")
        for token in delta.tokens[:num_spoken]:
            offsets.append(self._num_chars)
            text += self._say(token)
            if self._scanner.hit:
                return self._taken(delta, offsets, text, "stop")
        offsets += [self._num_chars] * (len(delta.tokens) - num_spoken)
        if delta.finish_reason is None:
            return self._taken(delta, offsets, text, None)
        text += self._end()
        return self._taken(delta, offsets, text, "stop" if self._scanner.hit else delta.finish_reason)

    def _say(self, token: int) -> str:
        piece = self._detokeniser.push(token)
        self._num_tokens += 1
        self._num_chars += len(piece)
        return self._scan(piece)

    def _end(self) -> str:
        """The held-back rest; it may still complete a stop string (one that contains U+FFFD)."""
        rest = self._scan(self._detokeniser.finish())
        return rest + self._scanner.flush()

    def _scan(self, piece: str) -> str:
        return self._scanner.feed(piece, may_stop=self._num_tokens >= self._min_tokens)

    def _taken(
        self, delta: TokenDelta, offsets: Sequence[int], text: str, finish_reason: FinishReason | None
    ) -> ChoiceDelta:
        """The delta's first tokens, one for each offset, with all that belongs to them."""
        count = len(offsets)
        known = zip(delta.tokens, delta.logprobs, offsets, strict=False)
        return ChoiceDelta(
            text=text,
            tokens=delta.tokens[:count],
            finish_reason=finish_reason,
            steps=delta.steps,
            num_accepted=min(delta.num_accepted, count),
            logprobs=tuple(token_entry(token, logprob, offset, self._codec.spell) for token, logprob, offset in known),
            num_found=delta.num_found,
        )


async def choice_deltas(manager: Manager, generation: Generation, text: ChoiceText) -> AsyncGenerator[ChoiceDelta]:
    """Generate one choice up to its end. The generation is closed (cancelled) as soon as its text is complete.

    Raises what the manager raises, and EspalierError if the manager stops without a finish reason or forgets
    log-probabilities.
    """
    deltas = manager.generate(generation)
    assert isinstance(deltas, AsyncGenerator), "closing it is how a request is cancelled"
    async with aclosing(deltas):
        async for delta in deltas:
            _check_logprobs(generation, delta)
            told = text.advance(delta)
            yield told
            if told.finish_reason is not None:
                return
    raise EspalierError(f"{generation.request_id} ended without a finish reason")


def _check_logprobs(generation: Generation, delta: TokenDelta) -> None:
    expected = 0 if generation.params.num_logprobs is None else len(delta.tokens)
    if len(delta.logprobs) != expected:
        raise EspalierError(f"{generation.request_id}: {len(delta.logprobs)} log-probabilities, not {expected}")


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
