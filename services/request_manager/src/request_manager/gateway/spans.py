"""The span of an answer, with OpenTelemetry's gen_ai attributes. Knows fields and counts; never text or tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, use_span
from opentelemetry.util.types import AttributeValue
from starlette.requests import Request

from request_manager.gateway.errors import error_code
from request_manager.gateway.schema import GenerationRequest
from request_manager.gateway.transcript import Transcript
from treecore.service.tracing import parent, tracer

_MAX_NAME = 100  # characters of a model's name: a client may write anything


@contextmanager
def answering(operation: str, fields: GenerationRequest, request: Request) -> Iterator[Span]:
    """A span, below the client's own if it sent a traceparent. The body's error ends it; else `end_answer` does."""
    name = f"{operation} {fields.model[:_MAX_NAME]}"
    context = parent(request.headers.get("traceparent", ""))
    span = tracer().start_span(name, context, SpanKind.SERVER, _asked(operation, fields, request))
    with use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            fail_answer(span, error)
            raise


def fail_answer(span: Span, error: BaseException) -> None:
    """The answer ends with an error, or with its client."""
    if span.is_recording():
        span.set_attribute("error.type", _kind(error))
        span.set_status(Status(StatusCode.ERROR))
        span.end()


def _kind(error: BaseException) -> str:
    """As metrics have it, but that who left is no error."""
    is_left = isinstance(error, GeneratorExit | asyncio.CancelledError)
    return "cancelled" if is_left or not isinstance(error, Exception) else error_code(error)


def end_answer(span: Span, transcripts: Sequence[Transcript], prompt_len: int, arrived_s: float) -> None:
    """The answer is complete."""
    if not span.is_recording():
        return
    first_s = [transcript.first_s for transcript in transcripts if transcript.first_s is not None]
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": [transcript.finish_reason or "" for transcript in transcripts],
            "gen_ai.usage.input_tokens": prompt_len,
            "gen_ai.usage.output_tokens": sum(len(transcript.tokens) for transcript in transcripts),
            "gen_ai.latency.time_to_first_token": min(first_s, default=arrived_s) - arrived_s,
        }
    )
    span.end()


def _asked(operation: str, fields: GenerationRequest, request: Request) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "espalier",
        "gen_ai.request.model": fields.model[:_MAX_NAME],
        "gen_ai.request.temperature": fields.temperature,
        "gen_ai.request.top_p": fields.top_p,
        "gen_ai.request.top_k": fields.top_k or None,
        "gen_ai.request.seed": fields.seed if fields.seed is None or fields.seed < 2**63 else str(fields.seed),
        "gen_ai.request.choice.count": fields.n,
        "gen_ai.request.max_tokens": fields.asked_tokens[1] if fields.asked_tokens else None,
        "gen_ai.request.frequency_penalty": fields.frequency_penalty,
        "gen_ai.request.presence_penalty": fields.presence_penalty,
        "gen_ai.response.id": request.state.request_id,
    }
    return {key: value for key, value in found.items() if value is not None}
