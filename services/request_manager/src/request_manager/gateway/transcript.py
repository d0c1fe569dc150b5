"""What an answer has said so far, and the numbers that follow from it: usage and the `espalier` object.

Knows token counts and steps; must not know HTTP or the manager.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Any

from request_manager.contract import FinishReason
from request_manager.gateway.admission import Job
from request_manager.gateway.choice import ChoiceDelta
from request_manager.gateway.logprobs import TokenEntry


@dataclass(slots=True)
class Transcript:
    """One choice so far. Written by the answer that owns it, by `add` only.

    accepted: how many steps accepted a drafted token at depth 1, 2, ... num_found: tokens of the prompt that were
    cached. first_s, last_s: clock readings of its first and latest token.
    """

    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenEntry] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: int = 0
    num_found: int = 0
    finish_reason: FinishReason | None = None
    first_s: float | None = None
    last_s: float | None = None

    def add(self, delta: ChoiceDelta, now_s: float) -> None:
        """Append what a delta brought at `now_s`."""
        self.parts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.accepted = _added(self.accepted, [1] * delta.num_accepted)
        self.steps, self.num_found, self.finish_reason = delta.steps, delta.num_found, delta.finish_reason
        if delta.tokens:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)


def usage(job: Job, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """OpenAI's usage object; exact. cached_tokens: those that no choice of their prompt had to compute."""
    completion = sum(len(transcript.tokens) for transcript in transcripts)
    return {
        "prompt_tokens": job.prompt_len,
        "completion_tokens": completion,
        "total_tokens": job.prompt_len + completion,
        "prompt_tokens_details": {"cached_tokens": _num_cached(job, transcripts)},
    }


def _num_cached(job: Job, transcripts: Sequence[Transcript]) -> int:
    choices = len(transcripts) // job.num_prompts
    by_prompt = (transcripts[first : first + choices] for first in range(0, len(transcripts), choices))
    return sum(min(transcript.num_found for transcript in group) for group in by_prompt)


def extension(job: Job, transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """The `espalier` object: the seed that replays the answer, and what speculation bought over all choices.

    accepted_per_position: how many steps accepted a drafted token at depth 1, 2, ...
    """
    steps = sum(transcript.steps for transcript in transcripts)
    tokens = sum(len(transcript.tokens) for transcript in transcripts)
    shown: dict[str, Any] = {
        "seed": job.seed,
        "steps": steps,
        "tokens_per_step": tokens / steps if steps else 0.0,
        "accepted_per_position": reduce(_added, (transcript.accepted for transcript in transcripts)),
    }
    if job.shows_token_ids:
        shown["token_ids"] = [transcript.tokens for transcript in transcripts]
    return shown


def _added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Element by element; the shorter one goes on with zeros."""
    return [sum(pair) for pair in zip_longest(left, right, fillvalue=0)]
