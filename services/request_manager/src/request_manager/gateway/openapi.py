"""The gateway's OpenAPI 3.1 document: true for this deployment, limits of its model included.

Requests come from the models that check them (schema.py). What JSON Schema cannot say is in descriptions: that prompt
and answer share the context, that a tree fits its node budget, that an integer is not written as 1.0.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from request_manager.contract import ModelCard
from request_manager.gateway import unsupported
from request_manager.gateway.openapi_answers import ANSWERS, ERROR
from request_manager.gateway.schema import ChatRequest, CompletionRequest
from request_manager.gateway.strict import MAX_INT

Json = dict[str, Any]

_NULL: Json = {"type": "null"}
_REFS = "#/components/schemas/{model}"

_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "There is no such thing.",
    405: "The path knows other methods.",
    413: "The body is too large.",
    429: "Too many requests are waiting. Nothing was admitted; come back after Retry-After seconds.",
    503: "No token can be produced now; come back after Retry-After seconds.",
}


def document(card: ModelCard | None, aliases: Sequence[str]) -> Json:
    """The document. card None: no model is known yet, so its limits are not stated."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Espalier", "version": "1", "description": "OpenAI's API; speculation is invisible."},
        "paths": _paths(),
        "components": {
            "schemas": {**_request_schemas(card, aliases), **ANSWERS},
            "responses": {f"Error{status}": _error(status) for status in _ERRORS},
        },
    }


def _paths() -> Json:
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/completions": _generation("complete", "CompletionRequest", "Completion"),
        "/v1/chat/completions": _generation("converse", "ChatRequest", "ChatCompletion"),
        "/v1/models": _get("list_models", _json("ModelList"), (503,)),
        "/v1/models/{model}": {**_get("show_model", _json("Model"), (404, 503)), "parameters": [model]},
        "/health": _get("health", _json("Status"), ()),
        "/ready": _get("ready", _json("Status"), (503,)),
        "/metrics": _get("metrics", {"text/plain": {"schema": {"type": "string"}}}, ()),
        "/openapi.json": _get("openapi", {"application/json": {"schema": {"type": "object"}}}, ()),
    }


def _generation(operation: str, request: str, answer: str) -> Json:
    stream = {"text/event-stream": {"schema": _event(f"{answer}Chunk")}}
    responses = _responses({**_json(answer), **stream}, (400, 405, 413, 429, 503))
    responses["200"]["headers"] = {
        "x-espalier-ignored-fields": {"schema": {"type": "string"}, "description": "Fields without a meaning here."}
    }
    return {
        "post": {
            "operationId": operation,
            "requestBody": {"required": True, "content": _json(request)},
            "responses": responses,
        }
    }


def _event(chunk: str) -> Json:
    """One server-sent event: a chunk, an error that ends the stream, or the mark of its end."""
    said = {"anyOf": [{"$ref": _REFS.format(model=name)} for name in (chunk, "Error")]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}


def _get(operation: str, content: Json, errors: Iterable[int]) -> Json:
    return {"get": {"operationId": operation, "responses": _responses(content, (405, *errors))}}


def _responses(content: Json, errors: Iterable[int]) -> Json:
    refs = {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in errors}
    return {"200": {"description": "Well done.", "content": content}, **refs}


def _error(status: int) -> Json:
    response: Json = {"description": _ERRORS[status], "content": {"application/json": {"schema": ERROR}}}
    if status in {429, 503}:
        response["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
    return response


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": _REFS.format(model=schema)}}}


def _request_schemas(card: ModelCard | None, aliases: Sequence[str]) -> Json:
    kinds = (CompletionRequest, ChatRequest)
    _, defined = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REFS)
    schemas: Json = defined["$defs"]
    for kind in kinds:
        schema = schemas[kind.__name__]
        schema["properties"] |= {name: _neutral(values) for name, values in kind.neutral_fields.items()}
        _allow_null(schema)
        _state_limits(schema["properties"], card, aliases)
        schema["allOf"] = [_STREAM_OPTIONS_NEED_A_STREAM]
    schemas["CompletionRequest"]["allOf"].append(_ECHO_HAS_NO_LOGPROBS)
    schemas["ChatRequest"]["allOf"].append(_ALTERNATIVES_NEED_LOGPROBS)
    schemas["Message"]["properties"] |= {name: _neutral(values) for name, values in unsupported.MESSAGE.items()}
    return schemas


def _neutral(values: Iterable[object]) -> Json:
    return {"enum": [None, *values], "description": "Not honoured yet: only what changes nothing is accepted."}


def _allow_null(schema: Json) -> None:
    """Null is absent, for each field that may be absent."""
    for name, field in schema["properties"].items():
        if name not in schema["required"] and "enum" not in field:
            schema["properties"][name] = _nullable(field)


def _nullable(field: Json) -> Json:
    """One of what it is and null."""
    default = field.pop("default", None)
    if _NULL in field.get("anyOf", []):
        return field
    return {"anyOf": [field, _NULL], **({} if default is None else {"default": default})}


def _state_limits(fields: Json, card: ModelCard | None, aliases: Sequence[str]) -> None:
    if card is None:
        return
    fields["model"] = {"enum": [card.name, *aliases]}
    ids = {"type": "integer", "minimum": 0, "maximum": min(card.vocab_size - 1, MAX_INT)}
    if "prompt" in fields:
        _, tokens, several = fields["prompt"]["anyOf"]
        tokens |= {"items": ids, "maxItems": card.context_len - 1}
        several["items"]["anyOf"][1] = tokens
    fields["stop_token_ids"]["anyOf"][0]["items"] = ids
    for name in ("max_tokens", "max_completion_tokens"):
        fields[name]["anyOf"][0]["maximum"] = min(card.context_len - 1, MAX_INT)


def _needs(condition: Json, consequence: Json) -> Json:
    """If the fields of `condition` are there and like that, the consequence's must be, too."""
    return {
        "if": {"properties": condition, "required": list(condition)},
        "then": {"properties": consequence, "required": list(consequence)},
    }


_STREAM_OPTIONS_NEED_A_STREAM = _needs({"stream_options": {"type": "object"}}, {"stream": {"const": True}})
_ALTERNATIVES_NEED_LOGPROBS = _needs({"top_logprobs": {"type": "integer", "minimum": 1}}, {"logprobs": {"const": True}})
_ECHO_HAS_NO_LOGPROBS = {
    "if": {"properties": {"echo": {"const": True}}, "required": ["echo"]},
    "then": {"properties": {"logprobs": {"type": "null"}}},
}
