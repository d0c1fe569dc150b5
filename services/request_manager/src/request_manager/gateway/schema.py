"""What clients may send, as strict pydantic models: the shape of each field, and of nothing that needs the model.

Lengths against the context, token ids against the vocabulary and the model's name are checked in admission.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from request_manager.gateway import unsupported
from request_manager.gateway.errors import invalid_request
from request_manager.gateway.grammar_fields import GrammarFields
from request_manager.gateway.prompt_field import Prompts
from request_manager.gateway.sampling_fields import SamplingFields
from request_manager.gateway.strict import MAX_INT, Strict
from treecore.errors import InvalidRequest
from treecore.params import MAX_LOGPROBS, Rule

_MAX_TREE_DEPTH = 64
_MAX_SSMS = 64
_MAX_ECHO = 100  # characters of a wrong name that an error repeats

R = TypeVar("R", bound="GenerationRequest")
Widths = Annotated[list[Annotated[int, Field(ge=1, le=MAX_INT)]], Field(max_length=_MAX_TREE_DEPTH)]
SsmName = Annotated[str, Field(min_length=1, max_length=_MAX_ECHO)]


class StreamOptions(Strict):
    """include_usage: one more chunk, without choices, carries the usage."""

    include_usage: bool | None = None


class Extension(Strict):
    """Espalier's own fields; a name that is none of them is an error, not ignored.

    ssms: those that may draft, by name. One that is not here is no error, because SSMs come and go.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})

    speculation: bool | None = None
    verification: Rule | None = None
    tree: Widths | Literal["dynamic"] | None = None
    draft_ahead: bool | None = None
    ssms: list[SsmName] | None = Field(default=None, max_length=_MAX_SSMS)
    return_token_ids: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_other_field(cls, value: object) -> object:
        other = (
            next((name for name in value if name not in cls.model_fields), None) if isinstance(value, dict) else None
        )
        if other is not None:
            name = f"espalier.{other[:_MAX_ECHO]}"
            raise InvalidRequest(f"{name}: there is no such field", name)
        return value


class GenerationRequest(SamplingFields, GrammarFields):
    """The fields that both endpoints share. max_completion_tokens wins over max_tokens."""

    neutral_fields: ClassVar[unsupported.Neutral]
    default_tokens: ClassVar[int | None]

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_INT)
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
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return None if self.max_tokens is None else ("max_tokens", self.max_tokens)

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many alternatives a token are asked for; None: no log-probabilities at all."""

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    neutral_fields: ClassVar[unsupported.Neutral] = unsupported.COMPLETIONS
    default_tokens: ClassVar[int | None] = 16

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _echo_has_no_logprobs(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not supported yet", "logprobs", "unsupported_parameter")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The field says it."""
        return self.logprobs


class TextPart(Strict):
    """One part of a message's content; other kinds than text are refused."""

    type: Literal["text"]
    text: str


class Message(Strict):
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
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """One field says whether, the other how many."""
        return self.top_logprobs if self.logprobs else None


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
