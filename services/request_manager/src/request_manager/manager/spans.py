"""The spans of a manager: one a request, from its admission to its end, and one a step, linked to its requests'.

Knows requests and records of steps; must not know who shows spans.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span, use_span

from request_manager.manager.step_record import StepRecord
from treecore.errors import EspalierError, code_of
from treecore.service.tracing import links, trace_of, tracer


def request_span() -> Span:
    """A span below the current one: the gateway's, here or elsewhere."""
    return tracer().start_span("generate")


def end_request(span: Span, num_tokens: int, num_steps: int, error: EspalierError | None = None) -> None:
    """The request is over, whatever the reason."""
    if not span.is_recording():
        return
    span.set_attributes({"espalier.output_tokens": num_tokens, "espalier.steps": num_steps})
    if error is not None:
        span.set_attribute("error.type", code_of(error))
        span.set_status(Status(StatusCode.ERROR))
    span.end()


@contextmanager
def step_span(requests: Sequence[Span]) -> Iterator[None]:
    """The body is a step of these requests; it has a span if one of them has."""
    if not any(span.is_recording() for span in requests):
        yield
        return
    linked = links([trace_of(span) for span in requests])
    span = tracer().start_span("step", Context(), SpanKind.INTERNAL, links=linked)
    with use_span(span, end_on_exit=True):
        yield


def describe_step(record: StepRecord) -> None:
    """Tell the step's span what the step did."""
    span = get_current_span()
    if span.is_recording():
        span.set_attributes(
            {
                "espalier.step.requests": record.num_requests,
                "espalier.step.draft_tokens": record.num_drafted,
                "espalier.step.accepted_tokens": record.num_accepted,
                "espalier.step.committed_tokens": record.num_committed,
            }
        )
