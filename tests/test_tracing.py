"""Traces of a real system, as a collector gets them: who called whom, with what attributes, and never any text."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from espalier_local.models import ServedModel
from espalier_local.system import LocalSystem, SystemConfig

PATIENCE_S = 30.0
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP. bodies: all that came, as bytes."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.came = threading.Condition()
        collector = self

        class Exchange(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with collector.came:
                    collector.bodies.append(body)
                    collector.came.notify_all()
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Any]:
        """All spans so far."""
        found = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [scope for each in found for resource in each.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def wait_for(self, *names: str) -> list[Any]:
        """The spans, once there is one of each of these names."""
        with self.came:
            assert self.came.wait_for(lambda: {*names} <= {span.name for span in self.spans}, PATIENCE_S), [
                span.name for span in self.spans
            ]
            return self.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that runs."""
    running = Collector()
    thread = threading.Thread(target=running.server.serve_forever, daemon=True)
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as Python values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_request_is_traced_from_gateway_to_workers(
    llm_dir: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateway's span below the client's, the manager's below the gateway's; steps link to it; workers below steps."""
    monkeypatch.setenv("ESPALIER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    llm = ServedModel("tiny", llm_dir)
    ask = {"model": "tiny", "prompt": "a secret", "max_tokens": 12, "temperature": 0.5, "seed": 3, "n": 2}
    async with (
        LocalSystem(SystemConfig(llm, (ServedModel("itself", llm_dir),), tree=(2, 1), split=True)) as system,
        httpx.AsyncClient(base_url=system.base_url, timeout=60, trust_env=False) as client,
    ):
        headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
        answer = (await client.post("/v1/completions", json=ask, headers=headers)).json()
        refused = await client.post("/v1/completions", json={**ask, "prompt": [10**6]})
        assert refused.status_code == 400
        spans = collector.wait_for("text_completion tiny", "generate", "step", "verify", "draft")
    spans = collector.spans
    (served,) = [span for span in spans if span.trace_id.hex() == CLIENT_TRACE and span.name == "text_completion tiny"]
    assert served.parent_span_id.hex() == CLIENT_SPAN
    told = attributes(served)
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    generated = [span for span in spans if span.name == "generate"]
    assert [span.parent_span_id for span in generated] == [served.span_id] * 2
    num_tokens = sum(attributes(span)["espalier.output_tokens"] for span in generated)
    assert num_tokens == answer["usage"]["completion_tokens"]
    steps = {span.span_id: span for span in spans if span.name == "step"}
    linked = {link.span_id for span in steps.values() for link in span.links}
    assert linked == {span.span_id for span in generated}
    workers = [span for span in spans if span.name in ("verify", "draft")]
    assert {span.parent_span_id for span in workers} <= steps.keys()
    failed = [span for span in spans if span.name == "text_completion tiny" and span is not served]
    assert [attributes(span)["error.type"] for span in failed] == ["invalid_value"]
    assert not any(b"secret" in body for body in collector.bodies)
