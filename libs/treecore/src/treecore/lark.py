"""A request's grammar as the Lark text that the matcher compiles; refuses what it would misread or quietly ignore.

Knows the notations of `params.Grammar` and what the library leaves out of each. Must not know tokens or matchers.
Needs llguidance (`treecore[grammar]`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NoReturn, assert_never

from llguidance import regex_to_lark

from treecore.errors import InvalidRequest
from treecore.params import Grammar

MAX_SOURCE_BYTES = 64 * 1024
MAX_LARK_BYTES = 4 * 1024
"""A rule takes six bytes or more: a chain of them stays far from the end of the library's stack (2,000 or so)."""

MAX_CHOICES = 1000
JSON_WHITESPACE = r"( |\n[ \t]{0,20})"
"""What may stand, once, where JSON allows whitespace: a space, or a line's end with indentation. No endless runs."""

# Masks are complete: without this, where the text is determined, the library allows its own tokenisation alone,
# which may contain special tokens ("<s>" as one token).
_DIRECTIVES = '%llguidance {"no_forcing": true}\n'

_SUBSCHEMA = {"items", "additionalItems", "additionalProperties"}
_SUBSCHEMA_LISTS = {"items", "prefixItems", "anyOf", "oneOf", "allOf"}
_SUBSCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_CONSTRAINTS = {
    *("type", "const", "enum", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_NAMES = {"$ref", "$schema", "$id", "id", "$anchor"}
_NOTES = {
    *("title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "discriminator"),
}
_KEYWORDS = _SUBSCHEMA | _SUBSCHEMA_LISTS | _SUBSCHEMA_MAPS | _CONSTRAINTS | _NAMES | _NOTES
_MAX_MULTIPLES = 20_000  # the automaton of multipleOf m has m states: 4 us and 20 bytes each
_MAX_COMMON_MULTIPLE = 100_000

_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/')
_LARK_REFUSED = re.compile(
    r"<|@|%(?!ignore\b|import\b)\w*|[\[,]\s*(?:\w*capture|lazy|max_tokens|stop|suffix|temperature)\b"
)


def to_lark(grammar: Grammar) -> str:
    """The same language in Lark. Raises InvalidRequest for what is too large, malformed or unsupported.

    Bounded in time by the size of the source. What it returns may still be no grammar: the matcher tells.
    """
    _check_size(grammar.source, MAX_LARK_BYTES if grammar.kind == "lark" else MAX_SOURCE_BYTES)
    return _DIRECTIVES + _body(grammar)


def _body(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return _json({"type": "object"})
        case "json_schema":
            return _json(_checked_schema(grammar.source))
        case "regex":
            return _regex(grammar.source)
        case "choice":
            return _regex("|".join(_spelled(choice) for choice in _choices(grammar.source)))
        case "lark":
            return _checked_lark(grammar.source)
        case _:
            assert_never(grammar.kind)


def _check_size(source: str, limit: int) -> None:
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("the grammar is no valid Unicode text") from error
    if size > limit:
        raise InvalidRequest(f"the grammar has {size} bytes; at most {limit} are allowed")


def _json(schema: Mapping[str, Any]) -> str:
    options = {"whitespace_pattern": JSON_WHITESPACE}
    return "start: %json " + json.dumps({**schema, "x-guidance": options})


def _regex(pattern: str) -> str:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidRequest("the regular expression ends within an escape")
    return f"start: /{regex_to_lark(pattern)}/"


def _spelled(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def _choices(source: str) -> list[str]:
    choices = _parsed(source, "the choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequest("the choices must be a list of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{len(choices)} choices; at most {MAX_CHOICES} are allowed")
    for choice in choices:
        _check_size(choice, MAX_SOURCE_BYTES)
    return choices


def _checked_schema(source: str) -> dict[str, Any]:
    schema = _parsed(source, "the JSON schema")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("the JSON schema must be an object")
    parts = list(_parts(schema))
    for part in parts:
        _refuse_unknown(part)
    _bound_multiples(parts)
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it; not what only looks like one (in `const`, `enum`, `default`)."""
    stack: list[object] = [schema]
    while stack:
        part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword, value in part.items():
            if keyword in _SUBSCHEMA_LISTS and isinstance(value, list):
                stack += value
            elif keyword in _SUBSCHEMA_MAPS and isinstance(value, dict):
                stack += value.values()
            elif keyword in _SUBSCHEMA:
                stack.append(value)


def _refuse_unknown(part: Mapping[str, Any]) -> None:
    for keyword in part:
        is_extension = keyword.startswith("x-") and keyword != "x-guidance"
        if keyword not in _KEYWORDS and not is_extension:
            raise InvalidRequest(f"the JSON schema keyword {keyword[:40]!r} is not supported")


def _bound_multiples(parts: list[dict[str, Any]]) -> None:
    found = [part["multipleOf"] for part in parts if "multipleOf" in part]
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in found):
        raise InvalidRequest("the JSON schema's multipleOf must be a number")
    multiples = [_digits(number) for number in found]
    if sum(multiples) > _MAX_MULTIPLES or math.lcm(*multiples) > _MAX_COMMON_MULTIPLE:
        raise InvalidRequest("the JSON schema's multipleOf is too large")


def _digits(number: float) -> int:
    """A number's digits as an integer, without its point: 0.25 has 25. At least 1 (0 is the matcher's to refuse)."""
    return int("".join(map(str, Decimal(str(number)).as_tuple().digits))) or 1


def _parsed(source: str, what: str) -> object:
    try:
        parsed: object = json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} cannot be read as JSON: {error}") from error
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _checked_lark(source: str) -> str:
    """Refuses special tokens, nested grammars and attributes that the sampler would have to obey."""
    refused = _LARK_REFUSED.search(_LARK_LITERAL.sub(" ", source))
    if refused:
        raise InvalidRequest(f"{refused[0]!r} is not supported in a grammar")
    return source
