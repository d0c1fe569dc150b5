"""Tokens to text, one token at a time, exactly as the tokenizer decodes all of them at once.

Knows tokenizers' decoders; must not know stop strings, EOS or requests.
"""

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokeniser(Protocol):
    """One sequence's tokens on their way to text."""

    def push(self, token: int) -> str:
        """The text that this token made certain; special tokens and ids without a token are no text."""

    def finish(self) -> str:
        """The rest: what was held back for a token that never came."""


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """Each text token of a byte-level tokenizer as its bytes; special ones apart."""

    pieces: Mapping[int, bytes]
    special: Mapping[int, bytes]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ByteVocabulary":
        """Built once at start (about 0.1 s for 50,000 tokens)."""
        special = _special_ids(tokenizer)
        byte_of = _byte_of_char()
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        pieces = {id_: _piece(token, byte_of) for token, id_ in vocab.items() if id_ not in special}
        return cls(pieces, {id_: token.encode() for token, id_ in vocab.items() if id_ in special})

    def detokeniser(self) -> Detokeniser:
        """A fresh one for one sequence."""
        return _ByteDetokeniser(self.pieces)

    def spell(self, token: int) -> bytes:
        """A token's bytes; a special one by its name, an id without a token as none."""
        return self.pieces.get(token, self.special.get(token, b""))


class _ByteDetokeniser:
    """A byte-level decoder is: the bytes of all tokens, read as UTF-8 with U+FFFD for what is none."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._pieces.get(token, b""))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


@dataclass(frozen=True, slots=True)
class WindowVocabulary:
    """Any other tokenizer, with or without byte fallback: text is what a window of tokens adds to the one before it."""

    tokenizer: Tokenizer
    spoken: frozenset[int]
    byte_ids: frozenset[int]
    neighbour: int  # any whole token, to spell others behind it

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "WindowVocabulary":
        """Built once at start."""
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        bytes_ = frozenset(id_ for token, id_ in vocab.items() if _BYTE_TOKEN.fullmatch(token))
        spoken = frozenset(vocab.values()) - _special_ids(tokenizer)
        return cls(tokenizer, spoken, bytes_, min(spoken - bytes_, default=0))

    def detokeniser(self) -> Detokeniser:
        """A fresh one for one sequence."""
        return _WindowDetokeniser(self)

    def spell(self, token: int) -> bytes:
        """As ByteVocabulary's; a text token as it reads behind another one."""
        name = self.tokenizer.id_to_token(token)
        if name is None or token not in self.spoken:
            return (name or "").encode()
        if token in self.byte_ids:
            return bytes([int(name[3:5], 16)])
        known = self.tokenizer.decode([self.neighbour])
        return self.tokenizer.decode([self.neighbour, token])[len(known) :].encode()


class _WindowDetokeniser:
    """Holds a run of byte tokens until it ends, because its last byte decides how its first one reads.

    The window starts at one whole token (the anchor), which keeps the decoder's rules for a text's start out of it.
    """

    def __init__(self, vocabulary: WindowVocabulary) -> None:
        self._vocabulary = vocabulary
        self._anchor: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if token not in self._vocabulary.spoken:
            return ""
        self._held.append(token)
        return "" if token in self._vocabulary.byte_ids else self.finish()

    def finish(self) -> str:
        known = self._decode(self._anchor)
        text = self._decode(self._anchor + self._held)[len(known) :]
        self._anchor = self._held[-1:] or self._anchor
        self._held = []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self._vocabulary.tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""


def vocabulary_of(tokenizer: Tokenizer) -> ByteVocabulary | WindowVocabulary:
    """The vocabulary that suits the tokenizer's decoder."""
    kind = ByteVocabulary if isinstance(tokenizer.decoder, ByteLevel) else WindowVocabulary
    return kind.of(tokenizer)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def _piece(token: str, byte_of: Mapping[str, int]) -> bytes:
    """A token as bytes. An added token with a character outside the alphabet stands for itself, as in tokenizers."""
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}
