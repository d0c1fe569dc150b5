"""POST /v1/chat/completions: messages through the model's own template. See dialect.py for the seam."""

from collections.abc import Sequence

from request_manager.gateway.admission import EncodedPrompt
from request_manager.gateway.choice import ChoiceDelta
from request_manager.gateway.dialect import Json
from request_manager.gateway.logprobs import TokenEntry, chat_logprobs
from request_manager.gateway.schema import ChatRequest, Message
from request_manager.gateway.text import ChatTurn, TextCodec
from request_manager.gateway.transcript import Transcript


class ChatDialect:
    """Dialect[ChatRequest]."""

    id_prefix = "chatcmpl-"
    operation = "chat"
    prompt_param = "messages"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    request = ChatRequest

    def num_prompts(self, fields: ChatRequest) -> int:  # noqa: ARG002 (the seam's)
        """One conversation."""
        return 1

    def encode(self, fields: ChatRequest, text: TextCodec) -> list[EncodedPrompt]:
        """The conversation up to the opening of the answer."""
        return [EncodedPrompt(text.encode_chat([_turn(message) for message in fields.messages]))]

    def whole(self, idx: int, transcript: Transcript) -> Json:
        """{"index", "message", "logprobs", "finish_reason"}."""
        message = {"role": "assistant", "content": transcript.text, "refusal": None}
        return {
            "index": idx,
            "message": message,
            "logprobs": _logprobs(transcript.logprobs),
            "finish_reason": transcript.finish_reason,
        }

    def chunks(self, idx: int, delta: ChoiceDelta, *, is_first: bool) -> list[Json]:
        """The role first, then text with its log-probabilities, the finish reason in a chunk of its own."""
        entries = []
        if is_first:
            entries.append(_chunk(idx, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            entries.append({**_chunk(idx, {"content": delta.text}), "logprobs": _logprobs(delta.logprobs)})
        if delta.finish_reason is not None:
            entries.append(_chunk(idx, {}, delta.finish_reason))
        return entries


def _turn(message: Message) -> ChatTurn:
    """Templates know OpenAI's `developer` by its older name."""
    role = "system" if message.role == "developer" else message.role
    turn = ChatTurn(role=role, content=message.text)
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _logprobs(entries: Sequence[TokenEntry]) -> Json | None:
    return chat_logprobs(entries) if entries else None


def _chunk(idx: int, delta: Json, finish_reason: str | None = None) -> Json:
    return {"index": idx, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
