"""A generation request from its arrival to its last byte: read, admit, generate, tell. The same for both endpoints."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from opentelemetry.trace import Span
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from request_manager.contract import Generation, Manager
from request_manager.gateway.admission import Arrival, Job, admit, check_model, check_num_choices
from request_manager.gateway.body import read_object
from request_manager.gateway.choice import ChoiceDelta, ChoiceText, Indexed, choice_deltas, side_by_side
from request_manager.gateway.dialect import Dialect, Json
from request_manager.gateway.disconnect import while_connected
from request_manager.gateway.envelope import log_unexpected
from request_manager.gateway.errors import error_body, error_code
from request_manager.gateway.grammar_fields import GrammarChecker, checked_grammar
from request_manager.gateway.metrics import GatewayMetrics
from request_manager.gateway.schema import R, ignored_fields, parse
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.spans import answering, end_answer, fail_answer
from request_manager.gateway.sse import DONE, Event, EventStream
from request_manager.gateway.text import TextCodec
from request_manager.gateway.transcript import Transcript, extension, usage

IGNORED_HEADER = "x-espalier-ignored-fields"
IDEMPOTENCY_HEADER = "idempotency-key"
_MAX_NAMED_FIELDS = 20
_MAX_FIELD_NAME = 64
_SEED_BITS = 53  # what every JSON reader keeps: the seed that is told must replay


def _random_seed() -> int:
    return secrets.randbits(_SEED_BITS)


def _seed_of(key: str) -> int:
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8]) >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the gateway gets what is not a function of the request. clock: seconds, monotonic; now: Unix seconds."""

    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    draw_seed: Callable[[], int] = _random_seed


@dataclass(frozen=True, slots=True)
class Answerer:
    """Answers generation requests. Holds no state of its own. grammars None: structured output is refused."""

    manager: Manager
    text: TextCodec
    settings: GatewaySettings
    metrics: GatewayMetrics
    sources: Sources
    grammars: GrammarChecker | None

    async def answer(self, request: Request, dialect: Dialect[R]) -> Response:
        """The response to one request. Raises the error tree's errors and ClientDisconnect, with nothing generated."""
        arrived_s = self.sources.clock()
        body = await read_object(request, self.settings.max_body_bytes, self.settings.body_timeout_s)
        fields = parse(dialect.request, body)
        headers = _ignored_header(ignored_fields(dialect.request, body))
        with answering(dialect.operation, fields, request) as span:
            job = await self._admitted(fields, dialect, request.state.request_id, self._draw_seed(request))
            telling = _Telling(self, job, dialect, arrived_s, span)
            if fields.stream:
                return EventStream(await while_connected(request.receive, telling.opened()), headers)
            return JSONResponse(await while_connected(request.receive, telling.whole()), headers=headers)

    def _draw_seed(self, request: Request) -> Callable[[], int]:
        """The seed of a request that names none. With an Idempotency-Key a retry, at any gateway, says the same."""
        key = request.headers.get(IDEMPOTENCY_HEADER)
        return self.sources.draw_seed if key is None else lambda: _seed_of(key)

    async def _admitted(self, fields: R, dialect: Dialect[R], request_id: str, draw_seed: Callable[[], int]) -> Job:
        card = self.manager.card()
        check_model(fields.model, card, self.settings.model_aliases)
        check_num_choices(fields, dialect.num_prompts(fields), self.settings.max_choices)
        grammar = await checked_grammar(fields, self.grammars)
        prompts = await asyncio.to_thread(dialect.encode, fields, self.text)
        arrival = Arrival(request_id, int(self.sources.now()), draw_seed, self.settings.verification, grammar)
        return admit(fields, prompts, dialect.prompt_param, card, arrival)


class _Telling:
    """One job being generated and told. Owns its transcripts."""

    def __init__(self, answerer: Answerer, job: Job, dialect: Dialect[Any], arrived_s: float, span: Span) -> None:
        self._answerer = answerer
        self._job = job
        self._dialect = dialect
        self._arrived_s = arrived_s
        self._span = span
        self._transcripts = [Transcript() for _ in job.generations]

    async def whole(self) -> Json:
        """The complete response, once everything is generated."""
        async with aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        choices = [self._dialect.whole(idx, transcript) for idx, transcript in enumerate(self._transcripts)]
        return {
            **self._head(self._dialect.whole_object, choices),
            "usage": self._usage(),
            "espalier": self._extension(),
        }

    async def opened(self) -> AsyncGenerator[Event]:
        """The event stream, once the first token is there: until then an error still has a status code."""
        events = self._events()
        await anext(events)
        return events

    async def _events(self) -> AsyncGenerator[Event]:
        """First an empty event, to be taken before the stream is sent: from then on closing this ends the generations.

        Errors before it raise; after it they are told as an event and end the stream.
        """
        async with aclosing(self._deltas()) as deltas:
            first = await anext(deltas)
            yield {}
            try:
                for chunk in self._chunks(*first):
                    yield chunk
                async for indexed in deltas:
                    for chunk in self._chunks(*indexed):
                        yield chunk
            except Exception as error:  # the edge of the stream: too late for a status code
                log_unexpected(error, self._job.request_id)
                self._answerer.metrics.count_error(error_code(error))
                yield error_body(error)
                return
        if self._job.shows_usage_chunk:
            yield self._usage_chunk()
        yield DONE

    async def _deltas(self) -> AsyncGenerator[Indexed]:
        """What all choices say, written down."""
        answerer = self._answerer
        choices = list(map(self._choice, self._job.generations, self._job.echoes))
        try:
            async with aclosing(side_by_side(choices)) as deltas:
                async for idx, delta in deltas:
                    self._transcripts[idx].add(delta, answerer.sources.clock())
                    answerer.metrics.count_tokens(len(delta.tokens))
                    yield idx, delta
        except BaseException as error:
            fail_answer(self._span, error)
            raise
        end_answer(self._span, self._transcripts, self._job.prompt_len, self._arrived_s)
        now_s = answerer.sources.clock()
        answerer.metrics.observe_answer(self._job.model, self._transcripts, self._arrived_s, now_s)

    def _choice(self, generation: Generation, echo: str) -> AsyncGenerator[ChoiceDelta]:
        text = ChoiceText(self._answerer.text, self._job.stops, generation.params.min_tokens, echo)
        return choice_deltas(self._answerer.manager, generation, text)

    def _chunks(self, idx: int, delta: ChoiceDelta) -> list[Json]:
        """A delta as chunks; the very last one carries the `espalier` object."""
        is_first = len(self._transcripts[idx].parts) == 1
        entries = self._dialect.chunks(idx, delta, is_first=is_first)
        chunks = [self._chunk([entry]) for entry in entries]
        if all(transcript.finish_reason for transcript in self._transcripts):
            chunks[-1]["espalier"] = self._extension()
        return chunks

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head(self._dialect.chunk_object, choices)
        return {**chunk, "usage": None} if self._job.shows_usage_chunk else chunk

    def _usage_chunk(self) -> Json:
        return {**self._chunk([]), "usage": self._usage(), "espalier": self._extension()}

    def _head(self, kind: str, choices: list[Json]) -> Json:
        job = self._job
        return {"id": job.request_id, "object": kind, "created": job.created, "model": job.model, "choices": choices}

    def _usage(self) -> Json:
        return usage(self._job, self._transcripts)

    def _extension(self) -> Json:
        return extension(self._job, self._transcripts)


def _ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names fields without a meaning, percent-encoded, the first few of them."""
    if not names:
        return {}
    return {IGNORED_HEADER: ", ".join(quote(name[:_MAX_FIELD_NAME]) for name in names[:_MAX_NAMED_FIELDS])}
