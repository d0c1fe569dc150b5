"""The fields that ask for structured output, and the grammar that they mean. Must not know how grammars work."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import ConfigDict, Field

from request_manager.gateway.strict import Strict
from treecore.errors import InvalidRequest
from treecore.params import Grammar, GrammarKind

MAX_CHOICES = 1000
_MAX_CHARS = 16_384
_MAX_LARK_CHARS = 4096
_MAX_CHOICE_CHARS = 1024


class GrammarChecker(Protocol):
    """Who knows whether the workers can follow a grammar."""

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest, without a parameter, for one that they cannot follow. May take a while."""


@dataclass(frozen=True, slots=True)
class NamedGrammar:
    """A grammar and the field that asked for it."""

    param: str
    grammar: Grammar


class _Closed(Strict):
    """A member that is unknown here could be a constraint: it is refused, not ignored."""

    model_config = ConfigDict(extra="forbid")


class TextFormat(_Closed):
    """No structure."""

    type: Literal["text"]


class JsonObjectFormat(_Closed):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Closed):
    """OpenAI's wrapper around a JSON schema. The schema is always enforced, whatever `strict` says."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    source: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(_Closed):
    """A JSON value that matches the schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
Choice = Annotated[str, Field(min_length=1, max_length=_MAX_CHOICE_CHARS)]


class GrammarFields(Strict):
    """What the output must match; at most one of the fields may ask for something."""

    response_format: ResponseFormat = TextFormat(type="text")
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = Field(default=None, min_length=1, max_length=_MAX_CHARS)
    guided_choice: Annotated[list[Choice], Field(fail_fast=True)] | None = Field(
        default=None, min_length=1, max_length=MAX_CHOICES
    )
    guided_grammar: str | None = Field(
        default=None, min_length=1, max_length=_MAX_LARK_CHARS, description="a context-free grammar in Lark's notation"
    )

    @property
    def grammar(self) -> NamedGrammar | None:
        """The one grammar that was asked for. Raises InvalidRequest naming the second one, if there are two."""
        wanted = [named for named in self._wanted() if named is not None]
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            raise InvalidRequest(f"{second}: {first} asks for a structure already; at most one may", second)
        return wanted[0] if wanted else None

    def _wanted(self) -> list[NamedGrammar | None]:
        return [
            _of_format(self.response_format),
            None if self.guided_json is None else _named("guided_json", "json_schema", _json(self.guided_json)),
            None if self.guided_regex is None else _named("guided_regex", "regex", self.guided_regex),
            None if self.guided_choice is None else _named("guided_choice", "choice", _json(self.guided_choice)),
            None if self.guided_grammar is None else _named("guided_grammar", "lark", self.guided_grammar),
        ]


async def checked_grammar(fields: GrammarFields, checker: GrammarChecker | None) -> Grammar | None:
    """The grammar of a request, which the workers can follow. Raises InvalidRequest naming the field."""
    named = fields.grammar
    if named is None:
        return None
    if checker is None:
        raise InvalidRequest(f"{named.param} is not supported here", named.param, "unsupported_parameter")
    try:
        await asyncio.to_thread(checker.check, named.grammar)
    except InvalidRequest as error:
        raise InvalidRequest(f"{named.param}: {error}", named.param, error.reason) from error
    return named.grammar


def _of_format(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> NamedGrammar | None:
    match wanted:
        case TextFormat():
            return None
        case JsonObjectFormat():
            return _named("response_format", "json_object", "")
        case JsonSchemaFormat():
            return _named("response_format", "json_schema", _json(wanted.json_schema.source))


def _named(param: str, kind: GrammarKind, source: str) -> NamedGrammar:
    return NamedGrammar(param, Grammar(kind, source))


def _json(value: Mapping[str, object] | list[str]) -> str:
    """As the client wrote it, members in the client's order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
