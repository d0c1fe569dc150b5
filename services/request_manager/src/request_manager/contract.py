"""The seam between the gateway and the manager: what is asked for, and what comes back.

Token ids only. In one process the manager is called directly; as two deployments the same calls travel over NATS.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from treecore import streams
from treecore.expand import Expansion
from treecore.messages import RequestId, Tokens
from treecore.params import SamplingParams

FinishReason = streams.FinishReason
ModelCard = streams.ModelCard


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to be generated: a valid prompt, and all that its tokens depend on.

    prompt: int32 [>= 1], as long as params.prompt_len says. prompt_len + max_tokens <= the model's context. What ends
    the output is in params.end_token_ids. tree: an expansion, "dynamic" (shaped by what it costs and brings), or None,
    the deployment's. draft_ahead: whether SSMs draft while the LLM verifies; None: the deployment's choice. ssms: names
    of those that may draft, None for all.
    """

    request_id: RequestId
    prompt: Tokens
    params: SamplingParams
    max_tokens: int
    speculation: bool = True
    tree: Expansion | Literal["dynamic"] | None = None
    draft_ahead: bool | None = None
    ssms: frozenset[str] | None = None

    def may_draft(self, ssm_name: str) -> bool:
        """Whether the SSM of this name may draft for it."""
        return self.ssms is None or ssm_name in self.ssms


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of a token, before temperature, and the best alternatives as (token, log p), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens that one step committed. The last delta has a finish reason; with `stop`, the last token ended the output.

    steps: LLM steps so far that produced tokens for this request. num_accepted: how many of the tokens were drafted.
    logprobs: an entry a token if the request asked for them, else empty. num_found: tokens of the prompt that were not
    computed for this request, because they were cached.
    """

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    steps: int
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    num_found: int = 0


class Manager(Protocol):
    """What the gateway needs of the request manager."""

    def card(self) -> ModelCard:
        """The LLM's card; raises Unavailable until a verifier has announced itself."""

    def is_ready(self) -> bool:
        """Whether a token can be produced now."""

    def generate(self, generation: Generation) -> AsyncGenerator[TokenDelta]:
        """Admit the request and yield its tokens as they are committed.

        Raises Overloaded (nothing admitted) at the first `anext`. Closing the generator cancels the request.
        """
