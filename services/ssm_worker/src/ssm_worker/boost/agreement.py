"""How often SSMs' first guesses hold the LLM's token, alone and together, on text they were not trained on. No files.

Greedy: guesses are the most likely tokens, the LLM's token its most likely one. At a temperature both sides add the
same noise (coupled drafting, architecture section 4), and the best tokens with noise count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssm_worker.boost.batches import TrainingBatch, collate
from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.student import Student, column_of_token

NUM_GUESSES = 5
_BATCH_LEN = 8
_NOISE_ROWS = 64  # times a vocabulary of floats: 12 MB

Ranks = NDArray[np.int64]
"""int64 [positions]: how many guesses come before the LLM's token; the vocabulary's size if it is none of them."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """top[k - 1]: share of `num_positions` at which the LLM's token is among the best k guesses.

    It is the chance that a node with k children continues; a token outside of the trimmed head never does.
    """

    top: tuple[float, ...]
    num_positions: int


def agreement(ranks: Ranks, guesses_each: int = 1) -> Agreement:
    """Of top-k for k up to NUM_GUESSES; `guesses_each` > 1: of top-(k * guesses_each)."""
    shares = [float((ranks < k * guesses_each).mean()) if len(ranks) else 0.0 for k in range(1, NUM_GUESSES + 1)]
    return Agreement(tuple(shares), len(ranks))


def merged(ranks: Sequence[Ranks]) -> Ranks:
    """Of SSMs whose drafts are merged: the best rank that any of them gives."""
    return reduce(np.minimum, ranks)


def measure_agreement(student: Student, held_out: Sequence[TeacherSequence]) -> Agreement:
    """Greedy, over all positions of the held-out answers, the first token included."""
    return agreement(greedy_ranks(student, held_out))


@torch.no_grad()
def greedy_ranks(student: Student, held_out: Sequence[TeacherSequence]) -> Ranks:
    """Of the LLM's most likely token at every position."""
    found = [ranks_in_batch(_logits(student, batch), batch.top_ids[:, 0], student) for batch in _answers(held_out)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found]).numpy()


@torch.no_grad()
def sampled_ranks(student: Student, held_out: Sequence[TeacherSequence], temperature: float, seed: int) -> Ranks:
    """Of one token at every position, drawn from the LLM's law at `temperature` with noise that the student shares.

    The law is that of its top 20 tokens, renormalised. Equal seeds give all students the same noise.
    """
    noise = torch.Generator().manual_seed(seed)
    found = [torch.empty(0, dtype=torch.int64)]
    for batch in _answers(held_out):
        logits = _logits(student, batch)
        for rows in torch.split(torch.arange(len(logits)), _NOISE_ROWS):
            gumbel = -torch.empty(len(rows), student.spec.vocab_size).exponential_(generator=noise).log()
            ids = batch.top_ids[rows]
            drawn = (batch.top_logp[rows] / temperature + gumbel.gather(1, ids)).argmax(1, keepdim=True)
            scores = logits[rows] / temperature + gumbel[:, student.vocabulary.head_token_ids]
            found.append(ranks_in_batch(scores, ids.gather(1, drawn)[:, 0], student))
    return torch.cat(found).numpy()


def ranks_in_batch(scores: Tensor, tokens: Tensor, student: Student) -> Tensor:
    """int64 [M]: how many of the student's scores [M, V_out] are above that of the token, tokens int64 [M]."""
    columns = column_of_token(student.vocabulary.head_token_ids, student.spec.vocab_size)[tokens]
    own = scores.gather(1, columns.clamp_min(0)[:, None])
    return torch.where(columns >= 0, (scores > own).sum(1), student.spec.vocab_size)


def _answers(held_out: Sequence[TeacherSequence]) -> Iterator[TrainingBatch]:
    answers = [sequence.without_last() for sequence in held_out]
    for first in range(0, len(answers), _BATCH_LEN):
        yield collate(answers[first : first + _BATCH_LEN])


def _logits(student: Student, batch: TrainingBatch) -> Tensor:
    return student.logits(student(batch.tokens)[batch.is_target])
