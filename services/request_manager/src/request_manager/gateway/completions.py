"""POST /v1/completions: prompts as they are, text as it comes. See dialect.py for the seam."""

from request_manager.gateway.choice import ChoiceDelta
from request_manager.gateway.dialect import Json
from request_manager.gateway.schema import CompletionRequest, Prompt
from request_manager.gateway.text import TextCodec
from request_manager.gateway.transcript import Transcript


class CompletionDialect:
    """Dialect[CompletionRequest]."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    request = CompletionRequest

    def num_prompts(self, fields: CompletionRequest) -> int:
        """As many as the client sent."""
        return len(fields.prompt)

    def encode(self, fields: CompletionRequest, text: TextCodec) -> list[list[int]]:
        """Strings through the tokenizer, token ids as they are."""
        return [_encode(prompt, text) for prompt in fields.prompt]

    def whole(self, idx: int, transcript: Transcript) -> Json:
        """{"index", "text", "logprobs", "finish_reason"}."""
        return _choice(idx, transcript.text, transcript.finish_reason)

    def chunks(self, idx: int, delta: ChoiceDelta, *, is_first: bool) -> list[Json]:  # noqa: ARG002 (the seam's)
        """The same entry for a piece of text."""
        if not delta.text and delta.finish_reason is None:
            return []
        return [_choice(idx, delta.text, delta.finish_reason)]


def _encode(prompt: Prompt, text: TextCodec) -> list[int]:
    """An empty string is an empty prompt, even if the tokenizer would put a BOS before it."""
    if isinstance(prompt, str):
        return text.encode(prompt) if prompt else []
    return list(prompt)


def _choice(idx: int, text: str, finish_reason: str | None) -> Json:
    return {"index": idx, "text": text, "logprobs": None, "finish_reason": finish_reason}
