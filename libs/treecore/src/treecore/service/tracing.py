"""OpenTelemetry spans, off unless an endpoint is set: a request at the gateway and at its manager, steps, worker steps.

A step serves many requests: its span stands alone and links to theirs. Contexts travel as W3C traceparents. No span has
text, prompts or tokens. Knows OpenTelemetry; must not know what is traced.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from treecore.errors import ConfigError

_KEY = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()

NOT_TRACED = ""

_TIMEOUTS = {"OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"}
_PATIENCE_S = 2.0  # with a collector; a process that stops waits so long for one that hangs


def start_tracing(endpoint: str | None, service: str) -> None:
    """Send this process's spans to the OTLP/HTTP collector at `endpoint`; without one they cost next to nothing.

    The SDK's own variables (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) hold. Raises ConfigError without it.
    """
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint: tracing is not installed ({error}); pip install treecore[tracing]"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": f"espalier-{service}"}))
    patience_s = None if _TIMEOUTS & os.environ.keys() else _PATIENCE_S
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=patience_s)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def tracer() -> Tracer:
    """Where spans are made; they record nothing unless tracing was started."""
    return trace.get_tracer("espalier")


def current_trace() -> str:
    """The current span's traceparent, or NOT_TRACED."""
    return trace_of(trace.get_current_span())


def trace_of(span: Span) -> str:
    """A span's traceparent, or NOT_TRACED."""
    if not span.get_span_context().is_valid:
        return NOT_TRACED
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier[_KEY]


def parent(traceparent: str) -> Context:
    """The context of a traceparent that came from elsewhere; an empty one of anything that is none."""
    return _PROPAGATOR.extract({_KEY: traceparent}, Context()) if traceparent else Context()


def links(traces: Sequence[str]) -> list[Link]:
    """Links to the spans of these traceparents."""
    contexts = [trace.get_current_span(parent(each)).get_span_context() for each in traces if each]
    return [Link(each) for each in contexts if each.is_valid]


@contextmanager
def below(traceparent: str) -> Iterator[None]:
    """Spans that the body makes stand below this one, which is elsewhere."""
    token = context.attach(parent(traceparent))
    try:
        yield
    finally:
        context.detach(token)
