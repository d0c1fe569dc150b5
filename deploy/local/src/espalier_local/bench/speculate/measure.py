"""Asks a system the same prompts in every configuration, round by round. Knows the gateway's client and its metrics."""

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import httpx
import numpy as np

from espalier_local.bench.prompts import Case
from espalier_local.bench.speculate.configurations import Configuration
from espalier_local.bench.speculate.records import Decoded, Journal, Round, Run
from espalier_local.bench.speculate.totals import StepTotals, read_totals
from espalier_local.client import Answer, Ask, complete, served_model

Batch = tuple[Case, ...]


def batches(cases: Sequence[Case], num_batched: int, sizes: Sequence[int]) -> list[Batch]:
    """Every prompt alone; then the first `num_batched` again in batches of each size beyond 1, the last ones full."""
    alone = [(case,) for case in cases]
    several = [
        tuple(cases[start : start + size])
        for size in sizes
        for start in range(0, min(num_batched, len(cases)) - size + 1, size)
        if size > 1
    ]
    return [*alone, *several]


class Measurement:
    """A run over all batches and temperatures into a journal; what that has already is not asked again."""

    def __init__(
        self, client: httpx.AsyncClient, journal: Journal, on_answer: Callable[[int], object] = lambda _count: None
    ) -> None:
        self._client = client
        self._journal = journal
        self._on_answer = on_answer

    async def run(self, wanted: Sequence[Batch], temperatures: Sequence[float]) -> None:
        """Raises what the client raises; the rounds before are kept then."""
        model = await served_model(self._client)
        done = {each.key for each in self._journal.rounds}
        for temperature in temperatures:
            for batch in wanted:
                prompt_ids = tuple(case.id for case in batch)
                if (temperature, prompt_ids) in done:
                    self._on_answer(self.num_answers(len(batch)))
                    continue
                runs = await self._runs(model, batch, temperature)
                categories = tuple(case.category for case in batch)
                self._journal.add(Round(temperature, prompt_ids, categories, runs))

    def num_answers(self, batch: int) -> int:
        """How many a round of this size asks for."""
        return batch * len(self._contestants(batch))

    def _contestants(self, batch: int) -> list[Configuration]:
        return [each for each in self._journal.setup.configurations if batch == 1 or each.at_every_batch]

    async def _runs(self, model: str, batch: Batch, temperature: float) -> Mapping[str, Run]:
        """Each configuration's run. They begin with another one each round: none is always the first."""
        setup, contestants = self._journal.setup, self._contestants(len(batch))
        asks = [Ask(case.prompt, setup.max_tokens, temperature, setup.seed, chat=True) for case in batch]
        await asyncio.gather(
            *[complete(self._client, model, replace(ask, max_tokens=2)) for ask in asks]
        )  # fill caches
        first = len(self._journal.rounds) % len(contestants)
        runs: dict[str, Run] = {}
        for each in (*contestants[first:], *contestants[:first]):
            runs[each.name] = await self._decode(model, [each.ask(ask) for ask in asks])
            self._on_answer(len(asks))
        return {each.name: runs[each.name] for each in contestants}

    async def _decode(self, model: str, asks: Sequence[Ask]) -> Run:
        """All of them at the same time. The steps are counted from when each has its first token: reading is over."""
        begun = [asyncio.Event() for _ in asks]
        opening = asyncio.create_task(self._totals_behind(begun))
        try:
            answers = await asyncio.gather(*map(partial(self._answer, model), asks, begun))
            for event in begun:  # of an answer without text, too
                event.set()
            earlier = await opening
            return Run(tuple(map(_decoded, answers)), (await read_totals(self._client)).since(earlier))
        finally:
            opening.cancel()

    async def _answer(self, model: str, ask: Ask, begun: asyncio.Event) -> Answer:
        return await complete(self._client, model, ask, lambda _text: begun.set())

    async def _totals_behind(self, begun: Sequence[asyncio.Event]) -> StepTotals:
        for event in begun:
            await event.wait()
        return await read_totals(self._client)


def _decoded(answer: Answer) -> Decoded:
    checksum = zlib.crc32(np.array(answer.token_ids, np.int32).tobytes())
    return Decoded(answer.num_tokens, answer.steps, answer.ms_per_token, checksum)
