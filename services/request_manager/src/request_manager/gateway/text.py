"""Text to tokens and back for one model: tokenizer, chat template, detokenisers. The only owner of a tokenizer.

Must not know requests, sampling or managers.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from request_manager.gateway.detokenise import Detokeniser, vocabulary_of
from treecore.errors import ConfigError, InvalidRequest


class ChatTurn(TypedDict, total=False):
    """One message as chat templates read it."""

    role: str
    content: str
    name: str


class TextCodec:
    """The text side of one model. Reads only what construction made, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, template: jinja2.Template | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._vocabulary = vocabulary_of(tokenizer)

    @classmethod
    def from_dir(cls, model_dir: Path) -> "TextCodec":
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja of a Hugging Face directory.

        The last two may be absent. Raises ConfigError naming the file that is missing or broken.
        """
        config = _config(model_dir / "tokenizer_config.json")
        source = _template_source(model_dir / "chat_template.jinja", config)
        template = None if source is None else compile_template(source, _special_tokens(config))
        return cls(_tokenizer(model_dir / "tokenizer.json"), template)

    def encode(self, text: str) -> list[int]:
        """A prompt's token ids, with the special tokens that the tokenizer itself adds. Lets other threads run."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, turns: Sequence[ChatTurn]) -> list[int]:
        """The ids of a conversation up to the opening of the answer; the template writes all special tokens.

        Raises InvalidRequest if the model has no template or its template refuses the conversation.
        """
        return self._encode(self.render_chat(turns), add_special_tokens=False)

    def render_chat(self, turns: Sequence[ChatTurn]) -> str:
        """The conversation as the model's chat template writes it. Raises as `encode_chat`."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        try:
            return self._template.render(messages=list(turns), add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's: it may fail in any way
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error

    def detokeniser(self) -> Detokeniser:
        """A fresh detokeniser for one sequence."""
        return self._vocabulary.detokeniser()

    def spell(self, token: int) -> bytes:
        """A token's bytes; a special one by its name, an id without a token as none."""
        return self._vocabulary.spell(token)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens without special ones, as a detokeniser tells it."""
        detokeniser = self.detokeniser()
        return "".join([*map(detokeniser.push, tokens), detokeniser.finish()])

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # encode_batch releases the GIL, encode does not: a long prompt would stop the event loop for seconds.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def compile_template(source: str, special_tokens: dict[str, str]) -> jinja2.Template:
    """A chat template in a sandbox, with what Hugging Face templates expect. Raises ConfigError on bad syntax."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, **special_tokens)
    try:
        return env.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the model's chat template is broken: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now(UTC).strftime(pattern)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _template_source(path: Path, config: dict[str, Any]) -> str | None:
    """The template's own file wins; a list of named templates gives its `default`."""
    if path.is_file():
        return _read(path)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [item for item in source if isinstance(item, dict)]
        source = next((item.get("template") for item in named if item.get("name") == "default"), None)
    return source if isinstance(source, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on; each is a string or an object with `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
