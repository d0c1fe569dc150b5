"""Sampling parameters: all that a request's tokens depend on beside the model and the prompt (architecture section 4).

Values only; they are validated at the gateway and travel once per request and worker.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from treecore.noise import Seed

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]
Rule = Literal["coupled", "naive", "multi_step", "multi_step_iid"]
"""How drafts are made and verified (architecture section 5); greedy requests always take the greedy walk.

multi_step draws siblings without replacement, multi_step_iid independently.
"""

MAX_LOGPROBS = 20
_MAX_FACTOR = 1e6  # of what is added to logits or multiplied with them: the result stays a number in fp32


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must match. source: a JSON schema, a regular expression, a JSON list of choices, or Lark."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen. Raises ValueError for values that no worker could compute with.

    temperature 0 means greedy. Off: top_k 0, top_p 1, min_p 0, repetition_penalty 1, the other penalties 0.
    seed: 64 bits, unsigned. prompt_len: the first so many committed tokens are the prompt; repetition_penalty counts
    them too, presence and frequency count the output alone. bias_ids, biases: added to logits, an entry a token.
    end_token_ids end the output; while it has fewer than min_tokens, they cannot be chosen. num_logprobs: None is none
    at all, 0 the chosen token's alone.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: Seed
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    prompt_len: int = 0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None
    rule: Rule = "coupled"

    def __post_init__(self) -> None:
        penalties = (self.presence_penalty, self.frequency_penalty, *self.biases)
        is_possible = (
            0.0 <= self.temperature < np.inf
            and 0 <= self.top_k < 2**63
            and 0.0 <= self.top_p <= 1.0
            and 0.0 <= self.min_p <= 1.0
            and 0 <= self.seed < 2**64
            and 1 / _MAX_FACTOR <= self.repetition_penalty <= _MAX_FACTOR
            and all(abs(penalty) <= _MAX_FACTOR for penalty in penalties)
            and len(self.bias_ids) == len(self.biases) == len(set(self.bias_ids))
            and all(token >= 0 for token in (*self.bias_ids, *self.end_token_ids))
            and self.prompt_len >= 0
            and self.min_tokens >= 0
            and 0 <= (self.num_logprobs or 0) <= MAX_LOGPROBS
        )
        if not is_possible:
            raise ValueError(f"impossible sampling parameters: {self}")

    @property
    def is_greedy(self) -> bool:
        """Whether no noise is involved."""
        return self.temperature == 0.0

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are random draws from a law that the acceptance has to know (the multi_step rules)."""
        return not self.is_greedy and self.rule in ("multi_step", "multi_step_iid")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were said already weigh differently."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_plain(self) -> bool:
        """Whether a token depends on the logits, temperature and seed alone, and nothing else is asked for."""
        truncates = self.top_k != 0 or self.top_p < 1.0 or self.min_p > 0.0
        shapes = self.has_penalties or self.bias_ids != () or self.min_tokens > 0 or self.grammar is not None
        return not truncates and not shapes and self.num_logprobs is None
