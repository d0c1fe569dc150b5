"""What the gateway answers, as JSON schemas: every member that is there, and no other."""

from typing import Any

Json = dict[str, Any]


def _record(**members: Json) -> Json:
    """An object with exactly these members; those that were marked by `_optional` may be absent."""
    required = [name for name, member in members.items() if "optional" not in member]
    shown = {name: member.get("optional", member) for name, member in members.items()}
    return {"type": "object", "properties": shown, "required": required, "additionalProperties": False}


def _optional(member: Json) -> Json:
    return {"optional": member}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, _NULL]}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_NULL: Json = {"type": "null"}
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_LOGPROB: Json = {"type": "number", "description": "-9999.0 for what is impossible."}
_BYTES: Json = _list({"type": "integer", "minimum": 0, "maximum": 255})
_FINISH: Json = {"enum": ["stop", "length"]}

ERROR = _record(
    error=_record(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_TEXT),
)

_CHAT_TOKEN = {"token": _TEXT, "logprob": _LOGPROB, "bytes": _BYTES}
_CHAT_LOGPROBS = _record(
    content=_list(_record(**_CHAT_TOKEN, top_logprobs=_list(_record(**_CHAT_TOKEN)))),
    refusal=_NULL,
)
_COMPLETION_LOGPROBS = _record(
    tokens=_list(_TEXT),
    token_logprobs=_list(_LOGPROB),
    top_logprobs=_list({"type": "object", "additionalProperties": _LOGPROB}),
    text_offset=_list(_COUNT),
)
_USAGE = _record(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_record(cached_tokens=_COUNT),
)
_EXTENSION = _record(
    seed={"type": "integer", "minimum": 0, "maximum": 2**64 - 1, "description": "Replays the answer."},
    steps=_COUNT,
    tokens_per_step={"type": "number", "minimum": 0},
    accepted_per_position={**_list(_COUNT), "description": "Steps that accepted a drafted token at depth 1, 2, ..."},
    token_ids=_optional(_list(_list(_COUNT))),
)


def _envelope(kind: str, **members: Json) -> Json:
    return _record(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, **members)


def _completion_choice(finish: Json) -> Json:
    return _record(index=_COUNT, text=_TEXT, logprobs=_or_null(_ref("CompletionLogprobs")), finish_reason=finish)


def _chat_choice(finish: Json, **message: Json) -> Json:
    return _record(index=_COUNT, **message, logprobs=_or_null(_ref("ChatLogprobs")), finish_reason=finish)


_MESSAGE = _record(role={"const": "assistant"}, content=_TEXT, refusal=_NULL)
_DELTA = _record(role=_optional({"const": "assistant"}), content=_optional(_TEXT))
_WHOLE = {"usage": _ref("Usage"), "espalier": _ref("Speculation")}
_PART = {"usage": _optional(_or_null(_ref("Usage"))), "espalier": _optional(_ref("Speculation"))}

_MODEL = _record(batch_invariant={"type": "boolean", "description": "The same bits with any tree and any batch."})

ANSWERS: Json = {
    "Error": ERROR,
    "Usage": _USAGE,
    "Speculation": _EXTENSION,
    "CompletionLogprobs": _COMPLETION_LOGPROBS,
    "ChatLogprobs": _CHAT_LOGPROBS,
    "Completion": _envelope("text_completion", choices=_list(_completion_choice(_FINISH)), **_WHOLE),
    "CompletionChunk": _envelope("text_completion", choices=_list(_completion_choice(_or_null(_FINISH))), **_PART),
    "ChatCompletion": _envelope("chat.completion", choices=_list(_chat_choice(_FINISH, message=_MESSAGE)), **_WHOLE),
    "ChatCompletionChunk": _envelope(
        "chat.completion.chunk", choices=_list(_chat_choice(_or_null(_FINISH), delta=_DELTA)), **_PART
    ),
    "Model": _record(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, espalier=_MODEL),
    "ModelList": _record(object={"const": "list"}, data=_list(_ref("Model"))),
    "Status": _record(status=_TEXT),
}
