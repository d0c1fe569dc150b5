"""Small tokenizers with every trap that a big one has, as tokenizer.json files. Knows the format only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class SmallTokenizer:
    """What a test needs to know. pieces: the bytes of each token, by id; None for one that is no text."""

    pieces: tuple[bytes | None, ...]
    ends: tuple[int, ...]

    def spell(self, tokens: Sequence[int]) -> bytes | None:
        """The bytes of a path; None if a token of it is no text."""
        pieces = [self.pieces[token] if 0 <= token < len(self.pieces) else None for token in tokens]
        return None if None in pieces else b"".join(piece for piece in pieces if piece)

    def encode(self, text: str) -> list[int]:
        """Tokens of one byte each."""
        ids = {piece: token for token, piece in reversed(list(enumerate(self.pieces))) if piece is not None}
        return [ids[bytes([byte])] for byte in text.encode()]


def save_byte_level(directory: Path, words: Sequence[bytes]) -> SmallTokenizer:
    """Special tokens (0-3, of which 2 and 3 are ends), all bytes, then `words`; GPT-2's byte alphabet."""
    letters = _letters()
    pieces = [*(bytes([byte]) for byte in range(256)), *words]
    vocab = [*_SPECIAL, *("".join(letters[byte] for byte in piece) for piece in pieces)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    _save(directory, vocab, {"pre_tokenizer": byte_level, "decoder": byte_level, "normalizer": None})
    return SmallTokenizer((None,) * len(_SPECIAL) + tuple(pieces), (2, 3))


def save_byte_fallback(directory: Path, words: Sequence[str]) -> SmallTokenizer:
    """As `save_byte_level`, but SentencePiece's way: <0x41> for bytes and ▁ for spaces, so bytes have two tokens."""
    vocab = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(word.replace(" ", "▁") for word in words)]
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoder = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    _save(directory, vocab, {"pre_tokenizer": None, "decoder": decoder, "normalizer": None})
    pieces = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]
    return SmallTokenizer((None,) * len(_SPECIAL) + tuple(pieces), (2, 3))


def _save(directory: Path, vocab: Sequence[str], parts: dict[str, object]) -> None:
    assert len(set(vocab)) == len(vocab), "tokens must differ"
    added = [{"id": idx, "content": token, "special": True, **_FLAGS} for idx, token in enumerate(_SPECIAL)]
    ids = {token: idx for idx, token in enumerate(vocab)}
    model = {"type": "BPE", "vocab": ids, "merges": [], "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps({**whole, **parts, "model": model}), encoding="utf-8")


def _letters() -> list[str]:
    """The printable letter of each byte in GPT-2's byte-level alphabet, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
