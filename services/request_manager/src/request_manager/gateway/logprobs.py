"""Log-probabilities as the two endpoints show them. Knows bytes and numbers; must not know tokenizers or managers.

Every token that counts has one entry, those of a stop string and the one that ended the output included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from request_manager.contract import TokenLogprob

Spell = Callable[[int], bytes]

_LEAST = -9999.0  # JSON has no -inf; OpenAI's number for it


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token by its bytes, and its log-probability (-9999.0 for one that is impossible)."""

    raw: bytes
    logprob: float

    @property
    def text(self) -> str:
        r"""As text; part of a character as OpenAI writes it, `bytes:\xf0\x9f`, so that two parts stay different."""
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """The token that was chosen and the best alternatives. offset: characters of output before it, stop string or not.

    Inside a character the offset is the character's.
    """

    said: Spelled
    top: tuple[Spelled, ...]
    offset: int


def token_entry(token: int, logprob: TokenLogprob, offset: int, spell: Spell) -> TokenEntry:
    """The entry of one token."""
    top = tuple(_spelled(other, value, spell) for other, value in logprob.top)
    return TokenEntry(_spelled(token, logprob.logprob, spell), top, offset)


def chat_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """OpenAI's object of a chat choice."""
    content = [
        {**_chat_token(entry.said), "top_logprobs": [_chat_token(other) for other in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    """OpenAI's older object of a completion choice; the alternatives include the chosen token."""
    return {
        "tokens": [entry.said.text for entry in entries],
        "token_logprobs": [entry.said.logprob for entry in entries],
        "top_logprobs": [_by_text(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _spelled(token: int, logprob: float, spell: Spell) -> Spelled:
    return Spelled(spell(token), max(_LEAST, logprob))


def _chat_token(token: Spelled) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def _by_text(entry: TokenEntry) -> dict[str, float]:
    """Of two tokens with one text the chosen one counts, then the likelier one."""
    worst_first = [*reversed(entry.top), entry.said]
    by_text = {token.text: token.logprob for token in worst_first}
    return dict(sorted(by_text.items(), key=lambda item: -item[1]))
