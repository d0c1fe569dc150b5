"""What the SSMs so far can already do, and what is left for the next one (SpecInfer, section 3). Knows no files.

The paper removes prompts whose whole completion an SSM reproduces. Ours beside it: positions that an SSM predicts
count less, because a small SSM reproduces whole completions hardly ever.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ssm_worker.boost.agreement import ranks_in_batch
from ssm_worker.boost.batches import collate
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.lessons import Lessons, even_lessons, weighted_lessons
from ssm_worker.boost.student import Student

Unit = Literal["prompt", "token"]
Hits = NDArray[np.bool_]
"""bool [rows of all sequences' log-probs, in their order]: whether an SSM holds the LLM's best token there."""

_BATCH_LEN = 8


@dataclass(frozen=True, slots=True)
class CoverRule:
    """What counts as covered. rank: the LLM's token is among the SSM's best `rank` guesses (the paper: 1).

    first_tokens: of a completion that many tokens have to be held, or (None, the paper) all. covered_weight: how much a
    covered position still counts, in [0, 1]; only for unit `token`.
    """

    unit: Unit = "prompt"
    rank: int = 1
    first_tokens: int | None = None
    covered_weight: float = 0.0


@torch.no_grad()
def find_hits(student: Student, sequences: Sequence[TeacherSequence], rank: int, report: Callable[[int], None]) -> Hits:
    """Where the student's best `rank` guesses hold the LLM's best token. Reports the tokens read."""
    found = []
    for first in range(0, len(sequences), _BATCH_LEN):
        batch = collate(sequences[first : first + _BATCH_LEN])
        logits = student.logits(student(batch.tokens)[batch.is_target])
        found.append((ranks_in_batch(logits, batch.top_ids[:, 0], student) < rank).numpy())
        report(batch.num_tokens)
    return np.concatenate(found) if found else np.zeros(0, np.bool_)


def lessons_after(sequences: Sequence[TeacherSequence], hits: Sequence[Hits], rule: CoverRule) -> Lessons:
    """What the next SSM is trained on; hits: those of each SSM before it."""
    if not hits:
        return even_lessons(sequences)
    if rule.unit == "token":
        covered = split_rows(np.any(hits, axis=0), sequences)
        rest = rule.covered_weight
    else:
        done = np.any([covered_prompts(sequences, each, rule) for each in hits], axis=0)
        covered = [np.full(len(sequence.top_ids), value) for sequence, value in zip(sequences, done, strict=True)]
        rest = 0.0
    return weighted_lessons(sequences, [np.where(mask, rest, 1).astype(np.float32) for mask in covered])


def covered_prompts(sequences: Sequence[TeacherSequence], hits: Hits, rule: CoverRule) -> Hits:
    """Whether the SSM reproduces each sequence: bool [sequences]; one that was not greedy it cannot."""
    parts = zip(sequences, split_rows(hits, sequences), strict=True)
    return np.array([_is_reproduced(sequence, part, rule.first_tokens) for sequence, part in parts], np.bool_)


def split_rows(rows: Hits, sequences: Sequence[TeacherSequence]) -> list[Hits]:
    """The rows of each sequence."""
    return np.split(rows, np.cumsum([len(sequence.top_ids) for sequence in sequences])[:-1])


def _is_reproduced(sequence: TeacherSequence, hits: Hits, first_tokens: int | None) -> bool:
    """Following the LLM's tokens is no help: up to the first miss the SSM alone would have written the same.

    All was greedy: a prompt that the LLM wrote itself was not. The last token may be one end written for another.
    """
    num_tokens = min(first_tokens or sequence.num_tokens, sequence.num_tokens)
    num_compared = min(num_tokens, sequence.num_tokens - 1)
    written = sequence.tokens[sequence.start : sequence.start + num_compared]
    is_greedy = sequence.temperature == 0 and np.array_equal(written, sequence.top_ids[:num_compared, 0])
    return bool(is_greedy and hits[:num_tokens].all())
