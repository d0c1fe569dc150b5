"""/openapi.json is true: schemathesis sends what it allows and what it forbids, and compares the answers with it.

What JSON Schema cannot say is arranged by a model without limits (context, vocabulary, tree) and a template and a
grammar checker that take everything. The rules that are left are met by every body, so that what must be refused is
refused for what the document says.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import settings
from prometheus_client import CollectorRegistry
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from request_manager.contract import Generation, ModelCard
from request_manager.gateway.app import create_app
from request_manager.gateway.settings import GatewaySettings
from request_manager.gateway.testing import END, tiny_codec, tiny_tokenizer
from request_manager.gateway.text import TextCodec, compile_template
from request_manager.testing import Line, ScriptedManager, deltas
from treecore.errors import Overloaded, Unavailable
from treecore.params import Grammar

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.token_to_id(END)
LIMITLESS = ModelCard("tiny", 2**31, 2**62, (EOS,), 2**4096)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")

Json = dict[str, Any]


class AnyGrammar:
    """Takes every grammar."""

    def check(self, grammar: Grammar) -> None:
        """Nothing is wrong."""


def hello(generation: Generation) -> Iterable[Line]:
    """'hello é😀' in three steps, then EOS; log-probabilities if they were asked for."""
    return deltas([*TOKENIZER.encode("hello é😀").ids, EOS], [2, 2], "stop", generation.params.num_logprobs)


APP = create_app(
    ScriptedManager(LIMITLESS, hello),
    TextCodec(TOKENIZER, compile_template(TEMPLATE, {})),
    GatewaySettings(max_choices=2**31, model_aliases=("an/alias",)),
    CollectorRegistry(),
    grammars=AnyGrammar(),
)

SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


KINDS = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest"}
VALIDATORS = {
    path: jsonschema_rs.validator_for({**SCHEMA.raw_schema, "$ref": f"#/components/schemas/{kind}"})
    for path, kind in KINDS.items()
}


def meeting_the_rules(body: Json, grammar: str | None) -> Json:
    """The body without what makes it wrong whatever else it holds; of its grammars only this one is kept.

    What only words forbid: 1.0 for 1, two grammars, more min_tokens than max_tokens. And what a body that is wrong in
    one field may break besides: stream_options without stream, echo with logprobs, top_logprobs without logprobs.
    """
    kept: Json = {name: as_usual(value) for name, value in body.items() if name not in GRAMMARS or name == grammar}
    limits = [kept[name] for name in ("max_completion_tokens", "max_tokens") if type(kept.get(name)) is int]
    if type(kept.get("min_tokens")) is int:
        kept["min_tokens"] = min(kept["min_tokens"], *limits, 16)
    if isinstance(kept.get("stream_options"), dict) and isinstance(kept.get("stream"), bool | None):
        kept["stream"] = True
    if kept.get("top_logprobs") and isinstance(kept.get("logprobs"), bool | None):
        kept["logprobs"] = True
    if kept.get("echo") is True:
        kept.pop("logprobs", None)
    return kept


def as_usual(value: Any) -> Any:
    """Whole numbers as integers: to JSON Schema 1.0 is one, to strict types it is not."""
    match value:
        case float():
            return int(value) if value.is_integer() else value
        case list():
            return [as_usual(item) for item in value]
        case dict():
            return {name: as_usual(item) for name, item in value.items()}
        case _:
            return value


def fair(body: Json, path: str, *, is_valid: bool) -> Json:
    """The body with no fault but those that the schema knows of, if there is such a body that is still (in)valid."""
    asked = [name for name in GRAMMARS if body.get(name) is not None] or [None]
    candidates = [meeting_the_rules(body, grammar) for grammar in asked]
    return next((other for other in candidates if VALIDATORS[path].is_valid(other) == is_valid), body)


def plain() -> Any:
    """The document without rules between fields and without defaults: then every field's bounds are tried."""
    told = copy.deepcopy(SCHEMA.raw_schema)
    for kind in KINDS.values():
        request = told["components"]["schemas"][kind]
        del request["allOf"]
        for field in request["properties"].values():
            field.pop("default", None)
    options = {"generation": {"mode": "positive"}, "phases": {"fuzzing": {"enabled": False}}}
    schema = schemathesis.openapi.from_dict(told, config=SchemathesisConfig.from_dict(options))
    schema.app = APP
    return schema


PLAIN = plain()


@PLAIN.include(method="POST").parametrize()
@settings(deadline=None)
def test_bounds(case: schemathesis.Case) -> None:
    """Each field's smallest and largest values, each of its kinds and null are answered."""
    case.body = fair(case.body, case.path, is_valid=True)
    response = case.call_and_validate()
    assert response.status_code == 200, response.text


@SCHEMA.parametrize()
@settings(max_examples=40, deadline=None)
def test_schemathesis(case: schemathesis.Case) -> None:
    """What the document allows is answered, what it forbids is refused, and every answer is as it says."""
    is_positive = case.meta.generation.mode is GenerationMode.POSITIVE
    if isinstance(case.body, dict):
        case.body = fair(case.body, case.path, is_valid=is_positive)
    response = case.call_and_validate()
    if case.method == "POST" and is_positive:
        assert response.status_code == 200, response.text


def one_token(_: Generation) -> Iterable[Line]:
    """The shortest answer."""
    return deltas([1], [], "length")


async def get(card: ModelCard | None, method: str, path: str, body: Json | None = None, script: Any = one_token) -> Any:
    """A response of a gateway with this card."""
    options = GatewaySettings(max_body_bytes=1000, model_aliases=("an/alias",))
    app = create_app(ScriptedManager(card, script), tiny_codec(), options, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as gateway:
        return await gateway.request(method, path, json=body)


CARD = ModelCard("tiny", 300, 64, (EOS,), 16)


@pytest.mark.parametrize("card", [CARD, None])
async def test_the_document_is_openapi(card: ModelCard | None) -> None:
    """OpenAPI 3.1, and each schema in it is one; it is there before the model is known."""
    told = (await get(card, "GET", "/openapi.json")).json()
    schemathesis.openapi.from_dict(told).validate()
    for schema in told["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


async def test_the_limits_are_the_models() -> None:
    """Names, context and vocabulary of what is served."""
    schemas = (await get(CARD, "GET", "/openapi.json")).json()["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["model"] == {"enum": ["tiny", "an/alias"]}
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 63
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 299
    _, tokens, _ = fields["prompt"]["anyOf"]
    assert (tokens["maxItems"], tokens["items"]["maximum"]) == (63, 299)


REFUSED: list[tuple[int, str, str, Json | None, Callable[[Generation], Iterable[Line]]]] = [
    (400, "POST", "/v1/completions", {"model": "tiny"}, one_token),
    (404, "GET", "/v1/models/{model}", None, one_token),
    (405, "PUT", "/v1/models", None, one_token),
    (413, "POST", "/v1/completions", {"model": "x" * 1000}, one_token),
    (429, "POST", "/v1/completions", {"model": "tiny", "prompt": "a"}, lambda _: [Overloaded("full", 3)]),
    (503, "POST", "/v1/completions", {"model": "tiny", "prompt": "a"}, lambda _: [Unavailable("gone")]),
]


@pytest.mark.parametrize(("status", "method", "path", "body", "script"), REFUSED, ids=lambda value: str(value)[:20])
async def test_errors_are_as_documented(status: int, method: str, path: str, body: Json | None, script: Any) -> None:
    """Each status that the document names, in its shape, with its headers."""
    response = await get(CARD, method, path, body, script)
    assert response.status_code == status
    told = (await get(CARD, "GET", "/openapi.json")).json()
    known = [operation["responses"] for operation in told["paths"][path].values() if "responses" in operation]
    assert all(str(status) in responses for responses in known)
    documented = told["components"]["responses"][f"Error{status}"]
    jsonschema_rs.validate(documented["content"]["application/json"]["schema"], response.json())
    for name, header in documented.get("headers", {}).items():
        jsonschema_rs.validate(header["schema"], int(response.headers[name]))
