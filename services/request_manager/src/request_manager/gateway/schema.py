"""What clients may send, as strict pydantic models: the shape of each field, and of nothing that needs the model.

Lengths against the context, token ids against the vocabulary and the model's name are checked in admission. Validating
a body stops at the first bad item of a list: megabytes of bad ones would else be as many errors, and stall everybody.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from request_manager.gateway import unsupported
from request_manager.gateway.errors import invalid_request
from treecore.errors import InvalidRequest

Prompt = str | tuple[int, ...]

_MAX_TOKENS = 2**31 - 1
_MAX_TREE_DEPTH = 64
_MAX_STOP_CHARS = 1024  # each choice compiles its stop strings, in time and memory that grow with their length

R = TypeVar("R", bound="GenerationRequest")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """include_usage: one more chunk, without choices, carries the usage."""

    include_usage: bool | None = None


class Extension(_Strict):
    """Espalier's own fields; a name that is none of them is an error, not ignored."""

    speculation: bool | None = None
    tree: list[Annotated[int, Field(ge=1, le=_MAX_TOKENS)]] | None = Field(default=None, max_length=_MAX_TREE_DEPTH)
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_other_field(cls, value: object) -> object:
        other = (
            next((name for name in value if name not in cls.model_fields), None) if isinstance(value, dict) else None
        )
        if other is not None:
            raise InvalidRequest(f"espalier.{other}: there is no such field", f"espalier.{other}")
        return value


def _stop_strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


class GenerationRequest(_Strict):
    """The fields that both endpoints share. top_k 0 is off; a negative seed stands for itself modulo 2^64."""

    neutral_fields: ClassVar[unsupported.Neutral]
    default_tokens: ClassVar[int | None]

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=_MAX_TOKENS)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]], BeforeValidator(_stop_strings)
    ] = Field(default=[], max_length=4)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=16)
    user: str | None = None
    espalier: Extension = Extension()

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        return self

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        """The limit that the client gave and the name of its field."""
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    neutral_fields: ClassVar[unsupported.Neutral] = unsupported.COMPLETIONS
    default_tokens: ClassVar[int | None] = 16

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]


class TextPart(_Strict):
    """One part of a message's content; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One turn. Content in parts is its texts, each on a line of its own."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as the chat template sees it."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    neutral_fields: ClassVar[unsupported.Neutral] = unsupported.CHAT
    default_tokens: ClassVar[int | None] = None

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_TOKENS)

    @property
    def asked_tokens(self) -> tuple[str, int] | None:
        """max_completion_tokens wins over max_tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().asked_tokens


def parse(kind: type[R], body: Mapping[str, object]) -> R:
    """The body as a checked request; null is absent. Raises InvalidRequest naming the field."""
    unsupported.refuse_unsupported(body, kind.neutral_fields)
    _refuse_in_messages(body.get("messages"))
    try:
        return kind.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        raise invalid_request(error, body) from None


def ignored_fields(kind: type[GenerationRequest], body: Mapping[str, object]) -> list[str]:
    """Fields of the body that mean nothing here, in the client's order."""
    known = kind.model_fields.keys() | kind.neutral_fields.keys()
    return [name for name in body if name not in known]


def _refuse_in_messages(messages: object) -> None:
    for idx, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            unsupported.refuse_unsupported(message, unsupported.MESSAGE, f"messages.{idx}.")
