"""How often a student's first guesses hold the teacher's token, on text it was not trained on. Knows no files."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssm_worker.boost.batches import collate
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.student import Student

NUM_GUESSES = 5
BATCH_LEN = 8


@dataclass(frozen=True, slots=True)
class Agreement:
    """top[k - 1]: share of `num_positions` at which the teacher's best token is among the student's best k.

    It is the chance that a node with k children continues greedy text; a token outside of the trimmed head never does.
    """

    top: tuple[float, ...]
    num_positions: int

    def __str__(self) -> str:
        """Per cent, top-1 first."""
        return "/".join(f"{100 * share:.1f}" for share in self.top)


@torch.no_grad()
def measure_agreement(student: Student, held_out: Sequence[TeacherSequence]) -> Agreement:
    """Over all positions of the held-out answers, the first token included."""
    hits = torch.zeros(NUM_GUESSES, dtype=torch.int64)
    num_positions = 0
    answers = [sequence.without_last() for sequence in held_out]
    for first in range(0, len(answers), BATCH_LEN):
        batch = collate(answers[first : first + BATCH_LEN])
        logits = student.logits(student(batch.tokens)[batch.is_target])
        guesses = logits.topk(min(NUM_GUESSES, logits.shape[1])).indices
        is_hit = student.vocabulary.head_token_ids[guesses] == batch.top_ids[:, :1]
        found = torch.zeros(len(is_hit), NUM_GUESSES, dtype=torch.int64)
        found[:, : is_hit.shape[1]] = is_hit
        hits += found.cumsum(1).sum(0)
        num_positions += len(is_hit)
    return Agreement(tuple((hits / max(num_positions, 1)).tolist()), num_positions)
