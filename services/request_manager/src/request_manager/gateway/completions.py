"""POST /v1/completions: prompts as they are, text as it comes. See dialect.py for the seam."""

from collections.abc import Sequence

from request_manager.gateway.admission import EncodedPrompt
from request_manager.gateway.choice import ChoiceDelta
from request_manager.gateway.dialect import Json
from request_manager.gateway.logprobs import TokenEntry, completion_logprobs
from request_manager.gateway.prompt_field import Prompt
from request_manager.gateway.schema import CompletionRequest
from request_manager.gateway.text import TextCodec
from request_manager.gateway.transcript import Transcript


class CompletionDialect:
    """Dialect[CompletionRequest]."""

    id_prefix = "cmpl-"
    operation = "text_completion"
    prompt_param = "prompt"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    request = CompletionRequest

    def num_prompts(self, fields: CompletionRequest) -> int:
        """As many as the client sent."""
        return len(fields.prompt)

    def encode(self, fields: CompletionRequest, text: TextCodec) -> list[EncodedPrompt]:
        """Strings through the tokenizer, token ids as they are."""
        return [
            EncodedPrompt(_encode(prompt, text), _text(prompt, text) if fields.echo else "") for prompt in fields.prompt
        ]

    def whole(self, idx: int, transcript: Transcript) -> Json:
        """{"index", "text", "logprobs", "finish_reason"}."""
        return _choice(idx, transcript.text, transcript.logprobs, transcript.finish_reason)

    def chunks(self, idx: int, delta: ChoiceDelta, *, is_first: bool) -> list[Json]:  # noqa: ARG002 (the seam's)
        """The same entry for a piece of text."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return []
        return [_choice(idx, delta.text, delta.logprobs, delta.finish_reason)]


def _encode(prompt: Prompt, text: TextCodec) -> list[int]:
    """An empty string is an empty prompt, even if the tokenizer would put a BOS before it."""
    if isinstance(prompt, str):
        return text.encode(prompt) if prompt else []
    return list(prompt)


def _text(prompt: Prompt, text: TextCodec) -> str:
    return prompt if isinstance(prompt, str) else text.decode(prompt)


def _choice(idx: int, text: str, entries: Sequence[TokenEntry], finish_reason: str | None) -> Json:
    logprobs = completion_logprobs(entries) if entries else None
    return {"index": idx, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
