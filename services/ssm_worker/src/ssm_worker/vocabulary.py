"""Whether an SSM speaks of the LLM's tokens, and if not, which of its own mean the same text.

Knows tokenizer.json files and numbers of tokens; must not know decoders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from treecore.errors import ConfigError
from treecore.model.spec import ModelSpec

Piece = tuple[bool, bytes]
"""Whether a token is special, and its text, or its name if it is."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint's directory (or .gguf file) and what it is."""

    path: Path
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class TokenMap:
    """How an SSM of K twins reads and writes for an LLM of V tokens.

    reads: int32 [V], the SSM's token for each of the LLM's: its twin; without one, the longest token that ends as it
    does; for a special one without a twin, an end. llm_twins, ssm_twins: int32 [K], pairs of tokens of equal text,
    ascending by the LLM's; no others are proposed.
    """

    reads: NDArray[np.int32]
    llm_twins: NDArray[np.int32]
    ssm_twins: NDArray[np.int32]


def token_map(ssm: Model, llm: Model, min_shared: float) -> TokenMap | None:
    """How the SSM's tokens map to the LLM's; None where they are the same.

    Raises ConfigError, naming both, where less than `min_shared` of the LLM's texts have a token at the SSM, and where
    sizes differ and there is no tokenizer to tell why.
    """
    same_size = ssm.spec.vocab_size == llm.spec.vocab_size
    files = [model.path / "tokenizer.json" for model in (ssm, llm)]
    has_own_tokens = ssm.spec.draft is None or not ssm.spec.draft.teacher_embedding
    if not has_own_tokens or not all(file.is_file() for file in files):
        if not same_size:
            raise ConfigError(
                f"{ssm.path}: vocab_size={ssm.spec.vocab_size}, but {llm.path} has {llm.spec.vocab_size}; "
                "it cannot draft for it"
            )
        return None
    if same_size and files[0].read_bytes() == files[1].read_bytes():
        return None
    ssm_pieces, llm_pieces = (
        _pieces(file, model.spec.vocab_size) for file, model in zip(files, (ssm, llm), strict=True)
    )
    if same_size and ssm_pieces == llm_pieces:
        return None
    found = map_pieces(ssm_pieces, llm_pieces, llm.spec.vocab_size, next(iter(ssm.spec.eos_token_ids), 0))
    _check_shared(ssm, llm, len(found.llm_twins), len(_texts(llm_pieces)), min_shared)
    return found


def map_pieces(ssm: Sequence[Piece], llm: Sequence[Piece], vocab_size: int, end: int) -> TokenMap:
    """The map between two vocabularies by id. vocab_size: the LLM's, with padding. end: what stands for the unknown."""
    ssm_ids = {piece: token for token, piece in enumerate(ssm)}  # of two of one text the last: words follow bytes
    texts = _texts(llm)
    twins = sorted((texts[piece], token) for piece, token in ssm_ids.items() if piece in texts)
    reads = np.full(vocab_size, end, np.int32)
    reads[: len(llm)] = [_read(piece, ssm_ids, end) for piece in llm]
    llm_twins, ssm_twins = np.array(twins, np.int32).reshape(-1, 2).T
    return TokenMap(reads, llm_twins, ssm_twins)


def _read(piece: Piece, ssm_ids: Mapping[Piece, int], end: int) -> int:
    is_special, text = piece
    starts = range(1 if is_special else len(text))
    return next((ssm_ids[is_special, text[start:]] for start in starts if (is_special, text[start:]) in ssm_ids), end)


def _texts(pieces: Sequence[Piece]) -> dict[Piece, int]:
    """The tokens that are text, by their text."""
    return {(special, text): token for token, (special, text) in enumerate(pieces) if text and not special}


def _pieces(path: Path, vocab_size: int) -> list[Piece]:
    """The pieces of a tokenizer's tokens, as far as the model has them."""
    try:
        tokenizer = LLTokenizer(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a tokenizer ({error})") from error
    tokens = range(min(tokenizer.vocab_size, vocab_size))
    return [(tokenizer.is_special_token(token), tokenizer.decode_bytes([token])) for token in tokens]


def _check_shared(ssm: Model, llm: Model, num_shared: int, num_texts: int, min_shared: float) -> None:
    if num_shared == 0 or num_shared < min_shared * num_texts:
        raise ConfigError(
            f"{ssm.path} has another vocabulary than {llm.path} and shares {num_shared} of its {num_texts} tokens "
            f"({num_shared / max(1, num_texts):.0%}); to draft for it, it would have to share {min_shared:.0%} "
            "(--min-shared-vocab)"
        )
