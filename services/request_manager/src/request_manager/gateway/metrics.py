"""The gateway's metrics, on a registry that it is given. Knows numbers only. docs/metrics.md has all of them."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from request_manager.gateway.transcript import Transcript
from treecore.service.buckets import ANSWER_S, LATENCY_S
from treecore.service.labels import FewLabels

_MAX_CODES, _MAX_MODELS = 32, 16


class GatewayMetrics:
    """Requests by status, errors by code, and how long answers take. model: a name that the operator gave it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._model, self._code = FewLabels(_MAX_MODELS), FewLabels(_MAX_CODES)
        self._requests = Counter(
            "espalier_http_requests", "HTTP requests by route and status code", ["route", "code"], registry=registry
        )
        self._errors = Counter("espalier_errors", "Errors told to clients", ["code"], registry=registry)
        self._tokens = Counter(
            "espalier_generated_tokens", "Tokens in answers, of cancelled ones too", registry=registry
        )

        def latency(name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"espalier_{name}_seconds", meaning, ["model"], buckets=buckets, registry=registry)

        self._ttft = latency("ttft", "Arrival to a choice's first token", LATENCY_S)
        self._tpot = latency("tpot", "Time per output token of a choice after its first", LATENCY_S)
        self._e2e = latency("e2e", "Arrival to a request's last token", ANSWER_S)

    def count_request(self, route: str, code: int) -> None:
        """One HTTP exchange is over. code 499: the client left first."""
        self._requests.labels(route, str(code)).inc()

    def count_error(self, code: str) -> None:
        """A client was told of an error, as an answer or within a stream."""
        self._errors.labels(self._code(code)).inc()

    def count_tokens(self, num_tokens: int) -> None:
        """Tokens that became part of an answer."""
        self._tokens.inc(num_tokens)

    def observe_answer(self, model: str, transcripts: Sequence[Transcript], arrived_s: float, now_s: float) -> None:
        """A complete answer. TPOT from each choice's exact token count, not from its chunks."""
        model = self._model(model)
        self._e2e.labels(model).observe(now_s - arrived_s)
        for transcript in transcripts:
            if transcript.first_s is None or transcript.last_s is None:
                continue
            self._ttft.labels(model).observe(transcript.first_s - arrived_s)
            if len(transcript.tokens) > 1:
                tpot_s = (transcript.last_s - transcript.first_s) / (len(transcript.tokens) - 1)
                self._tpot.labels(model).observe(tpot_s)
