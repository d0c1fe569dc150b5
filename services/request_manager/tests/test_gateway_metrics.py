"""What the gateway counts: exchanges by status, errors by code wherever they are told, and how long answers take."""

from collections.abc import Callable, Iterable

import httpx
import pytest
from prometheus_client import CollectorRegistry

from request_manager.contract import Generation, ModelCard
from request_manager.gateway.answer import Sources
from request_manager.gateway.app import create_app
from request_manager.gateway.metrics import GatewayMetrics
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import tiny_codec, tiny_tokenizer
from request_manager.gateway.transcript import Transcript
from request_manager.testing import Line, ScriptedManager, deltas
from treecore.errors import Overloaded, Unavailable
from treecore.service.labels import OTHER

CARD = ModelCard("tiny", tiny_tokenizer().get_vocab_size(), 64, (), 16)
COMPLETIONS = "/v1/completions"
HELLO = tiny_tokenizer().encode("hello world!").ids

Script = Callable[[Generation], Iterable[Line]]


class Gateway:
    """A gateway in process, its metrics, and a clock that ticks each time it is read."""

    def __init__(self, script: Script, card: ModelCard | None = CARD) -> None:
        self.registry = CollectorRegistry()
        ticks = iter(range(1000))
        sources = Sources(clock=lambda: float(next(ticks)))
        settings = GatewaySettings(model_aliases=("gpt",))
        app = create_app(ScriptedManager(card, script), tiny_codec(), settings, self.registry, sources)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    async def ask(self, **fields: object) -> httpx.Response:
        """One completion."""
        body = {"model": "tiny", "prompt": "ab", **fields}
        return await self.client.post(COMPLETIONS, json=body)

    def value(self, name: str, **labels: str) -> float | None:
        """Of a metric; None where nothing was counted."""
        return self.registry.get_sample_value(f"espalier_{name}", labels)

    def errors(self) -> dict[str, float]:
        """By code."""
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        return {sample.labels["code"]: sample.value for sample in samples if sample.name == "espalier_errors_total"}


def hello(_: Generation) -> Iterable[Line]:
    """A few tokens in three steps."""
    return deltas(HELLO, [2, 2], "stop")


async def test_what_answers_hold_is_what_is_counted() -> None:
    """TTFT, TPOT and tokens from exact counts: requests by route template, whatever is asked for."""
    gateway = Gateway(hello)
    usage = (await gateway.ask()).json()["usage"]
    for path in ("/nope", "/nope2", "/v1/models/a/b"):
        await gateway.client.get(path)
    num_tokens = usage["completion_tokens"]
    assert gateway.value("generated_tokens_total") == num_tokens
    # The clock is read on arrival (0), at each of three deltas (1, 2, 3) and at the end (4).
    assert gateway.value("ttft_seconds_sum", model="tiny") == 1.0
    assert gateway.value("tpot_seconds_sum", model="tiny") == 2.0 / (num_tokens - 1)
    assert gateway.value("e2e_seconds_sum", model="tiny") == 4.0
    assert gateway.value("http_requests_total", route="other", code="404") == 2
    assert gateway.value("http_requests_total", route="/v1/models/{model:path}", code="404") == 1
    assert gateway.value("http_requests_total", route=COMPLETIONS, code="200") == 1
    assert gateway.errors() == {"not_found": 3}


async def test_latencies_by_model_as_it_was_named() -> None:
    """An alias is a name of its own; a name that is no model's makes no series."""
    gateway = Gateway(hello)
    for model in ("tiny", "gpt", "gpt", "nobody's"):
        await gateway.ask(model=model)
    assert gateway.value("ttft_seconds_count", model="tiny") == 1
    assert gateway.value("ttft_seconds_count", model="gpt") == 2
    assert gateway.value("ttft_seconds_count", model="nobody's") is None


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (Overloaded("full", 1), "overloaded", 429),
        (Unavailable("gone"), "unavailable", 503),
        (RuntimeError("a bug"), "internal_error", 500),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_that_have_a_status_are_counted_by_code(
    error: Exception, code: str, status: int, stream: bool
) -> None:
    """Before the first token, streamed or not."""
    gateway = Gateway(lambda _: [error])
    assert (await gateway.ask(stream=stream)).status_code == status
    assert gateway.errors() == {code: 1}


async def test_an_error_within_a_stream_is_counted_once() -> None:
    """It is too late for a status, but not for the count."""
    gateway = Gateway(lambda _: [*deltas(HELLO, [2], "stop")[:1], Unavailable("gone")])
    response = await gateway.ask(stream=True)
    assert response.status_code == 200
    assert '"code":"unavailable"' in response.text.replace(" ", "")
    assert gateway.errors() == {"unavailable": 1}


async def test_bad_input_and_wrong_methods_are_errors_too() -> None:
    """By the code that the client was told."""
    gateway = Gateway(hello)
    codes = [(await gateway.ask(**fields)).json()["error"]["code"] for fields in ({"n": 0}, {"model": "x"})]
    codes.append((await gateway.client.put(COMPLETIONS)).json()["error"]["code"])
    found = gateway.errors()
    assert sum(found.values()) == len(codes)
    assert set(found) == set(codes)
    assert "method_not_allowed" in found


async def test_an_answer_is_no_error() -> None:
    """Nothing is counted that was not told."""
    gateway = Gateway(hello)
    await gateway.ask()
    await gateway.ask(stream=True)
    assert gateway.errors() == {}


def test_a_millisecond_between_tokens_is_resolved() -> None:
    """0.7 and 1.2 ms lie in buckets of their own."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for ms in (0.7, 1.2):
        metrics.observe_answer("tiny", [Transcript(tokens=[1, 2], first_s=0.0, last_s=ms / 1e3)], 0.0, 1.0)
    found = registry.get_sample_value("espalier_tpot_seconds_bucket", {"model": "tiny", "le": "0.001"})
    assert found == 1


def test_codes_and_models_stay_few() -> None:
    """Whatever they are called."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for number in range(1000):
        metrics.count_error(f"code {number}")
        metrics.observe_answer(f"model {number}", [], 0.0, 1.0)
    labels = {tuple(sample.labels.values()) for family in registry.collect() for sample in family.samples}
    assert len(labels) < 1000
    assert registry.get_sample_value("espalier_errors_total", {"code": OTHER}) is not None
    assert registry.get_sample_value("espalier_e2e_seconds_count", {"model": OTHER}) is not None
