"""Language models without weights: logits from a hash of the last few tokens. Deterministic, and cheap enough for CI.

Knows tokens and numbers; must not know messages or requests.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from treecore.law import Paths, adjusted
from treecore.params import SamplingParams
from treecore.sampling import best_tokens


class LanguageModel(Protocol):
    """Next-token logits of a context."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """fp32 [V] behind `context` (at least one token)."""


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """Logits, uniform in [-spread, spread], that depend on the last `memory` tokens. Another seed is another model."""

    vocab_size: int
    seed: int = 0
    memory: int = 3
    spread: float = 4.0

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """See LanguageModel."""
        bits = np.frombuffer(_digest(self.seed, context[-self.memory :], 2 * self.vocab_size), np.dtype("<u2"))
        return ((bits / 32767.5 - 1.0) * self.spread).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AgreeingModel:
    """An SSM: what `llm` says behind a share `agreement` of all contexts, what `own` says behind the others."""

    llm: ScriptedModel
    own: ScriptedModel
    agreement: float

    @property
    def vocab_size(self) -> int:
        """As the LLM's."""
        return self.llm.vocab_size

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        """See LanguageModel."""
        coin = int.from_bytes(_digest(self.own.seed ^ 0xC0, context[-self.llm.memory :], 4), "little") / 2.0**32
        return (self.llm if coin < self.agreement else self.own).logits(context)


def decode_alone(
    model: LanguageModel, prompt: Sequence[int], params: SamplingParams, max_tokens: int
) -> tuple[tuple[int, ...], Literal["stop", "length"]]:
    """Plain incremental decoding: what any request must yield, however it was served. its end token included."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(model, params, context))
        if context[-1] in params.end_token_ids:
            return tuple(context[len(prompt) :]), "stop"
    return tuple(context[len(prompt) :]), "length"


def next_token(model: LanguageModel, params: SamplingParams, context: Sequence[int]) -> int:
    """x_t behind `context`, the prompt included."""
    return int(next_tokens(model, params, context, 1)[0])


def next_tokens(model: LanguageModel, params: SamplingParams, context: Sequence[int], count: int) -> list[int]:
    """The `count` best tokens behind `context`: what an SSM drafts there."""
    row = adjusted(model.logits(context)[None], None, params, Paths(context, ((),)))[0]
    tokens: list[int] = best_tokens(row, None, params, len(context), count).tolist()
    return tokens


def _digest(seed: int, tokens: Sequence[int], num_bytes: int) -> bytes:
    return hashlib.shake_128(np.array([seed, *tokens], "<i8").tobytes()).digest(num_bytes)
