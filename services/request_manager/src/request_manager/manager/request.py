"""One request's committed tokens and where it stands. Written by the coordinator only."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from opentelemetry.trace import Span

from request_manager.contract import FinishReason, Generation, TokenDelta, TokenLogprob
from request_manager.manager.spans import end_request, request_span
from treecore.errors import EspalierError
from treecore.messages import RequestId, Tokens, WorkerId

Outcome = TokenDelta | EspalierError


class Outbox(Protocol):
    """Where a request's outcomes go; an asyncio.Queue is one."""

    def put_nowait(self, outcome: Outcome, /) -> None:
        """The next outcome; an error, or a delta with a finish reason, is the last."""


@dataclass(slots=True)
class Request:
    """A request from admission to its last token.

    output: what another manager had committed before. committed: prompt and output. step: the step in progress, counted
    per request, repeated when a step is retried. span: of this request, if it is traced.
    num_fruitless: steps whose answer for this request could not be used, since it last got further than before;
    farthest: how many committed tokens a verifier had computed then.
    verifier_id, verified_len, verified_rows: which verifier holds how many committed tokens, and has blocks for how
    many rows, as far as the manager knows. num_found: tokens of the prompt that the verifier had already. submitted_s:
    on perf_counter. was_admitted: whether it has taken part in a step.
    """

    generation: Generation
    outbox: Outbox
    output: InitVar[Sequence[int]] = ()
    committed: list[int] = field(default_factory=list)
    step: int = 0
    num_token_steps: int = 0
    num_fruitless: int = 0
    farthest: int = 0
    verifier_id: WorkerId | None = None
    verified_len: int = 0
    verified_rows: int = 0
    num_found: int = 0
    is_cancelled: bool = False
    submitted_s: float = field(default_factory=perf_counter)
    was_admitted: bool = False
    finish_reason: FinishReason | None = None
    span: Span = field(default_factory=request_span)

    def __post_init__(self, output: Sequence[int]) -> None:
        self.committed = [*self.generation.prompt.tolist(), *output]

    @property
    def request_id(self) -> RequestId:
        """The request's identity on the wire."""
        return self.generation.request_id

    @property
    def committed_len(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.committed)

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return len(self.generation.prompt) + self.generation.max_tokens - self.committed_len

    def held_len(self, verifier_id: WorkerId) -> int:
        """Committed tokens that this verifier holds: none of them if another one held them last."""
        return self.verified_len if self.verifier_id == verifier_id else 0

    def held_rows(self, verifier_id: WorkerId) -> int:
        """Committed tokens and nodes that this verifier has blocks for."""
        return self.verified_rows if self.verifier_id == verifier_id else 0

    def end(self, error: EspalierError | None = None) -> None:
        """It is over: its span ends."""
        num_output = self.committed_len - len(self.generation.prompt)
        end_request(self.span, num_output, self.num_token_steps, error)

    def holds(self, verifier_id: WorkerId | None, num_tokens: int, num_nodes: int = 0) -> None:
        """Note that this verifier holds the first `num_tokens` committed tokens, and so many nodes behind them."""
        self.verifier_id, self.verified_len = verifier_id, num_tokens
        self.verified_rows = num_tokens + num_nodes

    def tokens_between(self, start: int, end: int) -> Tokens:
        """Committed tokens [start, end), int32."""
        return np.array(self.committed[start:end], np.int32)

    def commit(self, tokens: tuple[int, ...], num_accepted: int, logprobs: Sequence[TokenLogprob] = ()) -> int:
        """Append what a step yields, cut behind an end and at max_tokens, and tell the outbox; returns how many stayed.

        num_accepted: the first so many tokens were drafted. An end token is looked for first: a run that ends the text
        on its last allowed token has finished by `stop`.
        """
        kept = tokens[: self.remaining]
        ends = self.generation.params.end_token_ids
        end = next((idx for idx, token in enumerate(kept) if token in ends), None)
        if end is not None:
            kept = kept[: end + 1]
        self.committed += kept
        self.num_token_steps += 1
        if end is not None:
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        num_kept = len(kept)
        told = min(num_accepted, num_kept), tuple(logprobs[:num_kept]), self.num_found
        self.outbox.put_nowait(TokenDelta(kept, self.finish_reason, self.num_token_steps, *told))
        return num_kept
