"""The contract's types as they travel, and back. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from request_manager.contract import Generation, TokenDelta, TokenLogprob
from treecore.errors import EspalierError, InvalidRequest, Overloaded, Unavailable
from treecore.messages import Logprobs, RequestId
from treecore.service.tracing import current_trace
from treecore.streams import Admission, Delta, GatewayId, Verdict


@dataclass(frozen=True, slots=True)
class DeltaPlace:
    """Where in a request's output a delta belongs: which admission of which request, behind how many tokens."""

    request_id: RequestId
    number: int
    start: int


def admission_of(generation: Generation, gateway_id: GatewayId, number: int, output: Sequence[int]) -> Admission:
    """`generation`, to be gone on with behind `output`."""
    tree, ssms = generation.tree, generation.ssms
    return Admission(
        gateway_id,
        generation.request_id,
        number,
        generation.prompt,
        np.array(output, np.int32),
        generation.params,
        generation.max_tokens,
        generation.speculation,
        tree if isinstance(tree, tuple) else None,
        tree == "dynamic",
        generation.draft_ahead,
        None if ssms is None else tuple(sorted(ssms)),
        current_trace(),
    )


def generation_of(admission: Admission) -> Generation:
    """The inverse. Its id is the admission's: an earlier one of the request is another request to the workers."""
    return Generation(
        RequestId(f"{admission.request_id}#{admission.number}"),
        admission.prompt,
        admission.params,
        admission.max_tokens,
        admission.speculation,
        "dynamic" if admission.is_dynamic else admission.expansion,
        admission.draft_ahead,
        None if admission.ssms is None else frozenset(admission.ssms),
    )


def to_wire(place: DeltaPlace, delta: TokenDelta) -> Delta:
    """The delta as it travels."""
    return Delta(
        place.request_id,
        place.number,
        place.start,
        delta.tokens,
        delta.finish_reason,
        delta.steps,
        delta.num_accepted,
        delta.num_found,
        _packed(delta.logprobs) if delta.logprobs else None,
    )


def failure(place: DeltaPlace, error: EspalierError) -> Delta:
    """The request has ended with `error`."""
    return Delta(place.request_id, place.number, place.start, (), None, 0, 0, 0, None, verdict_of(error))


def from_wire(delta: Delta, num_steps_before: int) -> TokenDelta:
    """The inverse of `to_wire`; num_steps_before: of the managers that the request had before."""
    logprobs = () if delta.logprobs is None else _unpacked(delta.logprobs)
    steps = num_steps_before + delta.steps
    return TokenDelta(delta.tokens, delta.finish_reason, steps, delta.num_accepted, logprobs, delta.num_found)


def verdict_of(error: EspalierError) -> Verdict:
    """An error as it travels."""
    match error:
        case InvalidRequest():
            return Verdict(InvalidRequest.code, str(error), error.param, error.reason)
        case Overloaded():
            return Verdict(error.code, str(error), retry_after_s=error.retry_after_s)
        case _:
            return Verdict(error.code, str(error))


def error_of(verdict: Verdict) -> EspalierError:
    """The inverse, as far as it makes a difference to a client."""
    match verdict.code:
        case InvalidRequest.code:
            return InvalidRequest(verdict.message, verdict.param, verdict.reason)
        case Overloaded.code:
            return Overloaded(verdict.message, verdict.retry_after_s)
        case Unavailable.code:
            return Unavailable(verdict.message)
        case _:
            return EspalierError(verdict.message)


def _packed(logprobs: Sequence[TokenLogprob]) -> Logprobs:
    top = [entry for logprob in logprobs for entry in logprob.top]
    return Logprobs(
        np.array([logprob.logprob for logprob in logprobs], np.float32),
        np.array([token for token, _ in top], np.int32),
        np.array([value for _, value in top], np.float32),
    )


def _unpacked(logprobs: Logprobs) -> tuple[TokenLogprob, ...]:
    count = len(logprobs.top_ids) // max(1, len(logprobs.chosen))
    top = list(zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True))
    return tuple(
        TokenLogprob(chosen, tuple(top[idx * count : (idx + 1) * count]))
        for idx, chosen in enumerate(logprobs.chosen.tolist())
    )
