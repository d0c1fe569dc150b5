"""The four ways to write the prompts of a completion, read as one. Knows JSON values only."""

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from request_manager.gateway.strict import MAX_INT
from treecore.errors import InvalidRequest

Prompt = str | tuple[int, ...]

_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT}}
_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _IDS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _IDS]}}],
}


def _prompts(value: object) -> tuple[Prompt, ...]:
    """All four ways to write prompts as one: a str, strs, token ids, lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be a string, strings, token ids or lists of token ids", "prompt")
    if _are_ids(value):
        return (tuple(value),)
    return tuple(_prompt(item) for item in value)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _are_ids(value):
        return tuple(value)
    raise InvalidRequest("each prompt must be a string or a list of token ids", "prompt")


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts), WithJsonSchema(_SCHEMA)]
