"""A manager that says what it is told to: the gateway's counterpart in tests. Ships with the library.

Knows the contract only. No model, no broker, no clock.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Final

from request_manager.contract import FinishReason, Generation, ModelCard, TokenDelta, TokenLogprob
from treecore.errors import Unavailable


class _Hang:
    """Waits until it is cancelled."""


HANG: Final = _Hang()

Line = TokenDelta | Exception | _Hang
Script = Callable[[Generation], Iterable[Line]]


class ScriptedManager:
    """Manager whose generations follow a script: a delta is yielded, an exception raised, HANG waits for ever.

    asked: every generation that was begun. num_open: those not closed yet. ended: as (request_id, was cancelled).
    `changed` is notified whenever one begins or ends. A card of None means that no verifier has announced itself.
    """

    def __init__(self, card: ModelCard | None, script: Script) -> None:
        self._card = card
        self._script = script
        self.ready = True
        self.asked: list[Generation] = []
        self.num_open = 0
        self.ended: list[tuple[str, bool]] = []
        self.changed = asyncio.Condition()

    def card(self) -> ModelCard:
        """As constructed; raises Unavailable if that was None."""
        if self._card is None:
            raise Unavailable("no verifier has announced itself")
        return self._card

    def is_ready(self) -> bool:
        """The attribute `ready`, with a card."""
        return self.ready and self._card is not None

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta]:
        """Follow the script."""
        was_cancelled = True
        await self._begin(generation)
        try:
            for line in self._script(generation):
                match line:
                    case TokenDelta():
                        yield line
                    case _Hang():
                        await asyncio.Event().wait()
                    case _:
                        was_cancelled = False
                        raise line
            was_cancelled = False
        finally:
            await self._end(generation, was_cancelled=was_cancelled)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Return as soon as `reached` holds; it is asked again whenever a generation begins or ends."""
        async with self.changed:
            await self.changed.wait_for(reached)

    async def _begin(self, generation: Generation) -> None:
        async with self.changed:
            self.asked.append(generation)
            self.num_open += 1
            self.changed.notify_all()

    async def _end(self, generation: Generation, *, was_cancelled: bool) -> None:
        async with self.changed:
            self.num_open -= 1
            self.ended.append((generation.request_id, was_cancelled))
            self.changed.notify_all()


def deltas(
    tokens: Sequence[int], run_lens: Iterable[int], finish_reason: FinishReason, num_logprobs: int | None = None
) -> list[TokenDelta]:
    """`tokens` cut into runs of the given lengths, a step each (the rest is one more run); the last one finishes.

    All but the last token of a run were drafted. num_logprobs: as in SamplingParams.
    """
    runs, start = [], 0
    for length in run_lens:
        runs.append(tuple(tokens[start : start + length]))
        start += length
    runs = [run for run in (*runs, tuple(tokens[start:])) if run]
    last = len(runs)
    return [
        TokenDelta(
            tokens=run,
            finish_reason=finish_reason if step == last else None,
            steps=step,
            num_accepted=len(run) - 1,
            logprobs=() if num_logprobs is None else tuple(made_up_logprob(token, num_logprobs) for token in run),
        )
        for step, run in enumerate(runs, 1)
    ]


def made_up_logprob(token: int, num_logprobs: int) -> TokenLogprob:
    """A log-probability that tells tokens apart. The token is the best one, the ids behind it are the alternatives."""
    best = -1.0 - token / 64
    return TokenLogprob(best, tuple((token + rank, best - rank / 32) for rank in range(num_logprobs)))
