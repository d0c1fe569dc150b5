"""The gateway's metrics, on a registry that it is given. Knows numbers only."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from request_manager.gateway.transcript import Transcript

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """espalier_http_requests_total{route,code}, espalier_{ttft,tpot,e2e}_seconds, espalier_generated_tokens_total."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "espalier_http_requests", "HTTP requests by route and status code", ["route", "code"], registry=registry
        )
        self._ttft = Histogram(
            "espalier_ttft_seconds", "Arrival to a choice's first token", buckets=_TTFT_BUCKETS_S, registry=registry
        )
        self._tpot = Histogram(
            "espalier_tpot_seconds",
            "Time per output token of a choice after its first",
            buckets=_TPOT_BUCKETS_S,
            registry=registry,
        )
        self._e2e = Histogram(
            "espalier_e2e_seconds", "Arrival to a request's last token", buckets=_E2E_BUCKETS_S, registry=registry
        )
        self._tokens = Counter(
            "espalier_generated_tokens", "Tokens in answers, of cancelled ones too", registry=registry
        )

    def count_request(self, route: str, code: int) -> None:
        """One HTTP exchange is over. code 499: the client left first."""
        self._requests.labels(route, str(code)).inc()

    def count_tokens(self, num_tokens: int) -> None:
        """Tokens that became part of an answer."""
        self._tokens.inc(num_tokens)

    def observe_answer(self, transcripts: Sequence[Transcript], arrived_s: float, now_s: float) -> None:
        """A complete answer. TPOT from each choice's exact token count, not from its chunks."""
        self._e2e.observe(now_s - arrived_s)
        for transcript in transcripts:
            if transcript.first_s is None or transcript.last_s is None:
                continue
            self._ttft.observe(transcript.first_s - arrived_s)
            if len(transcript.tokens) > 1:
                self._tpot.observe((transcript.last_s - transcript.first_s) / (len(transcript.tokens) - 1))
