"""What one SSM is trained on: sequences, and how much each position counts. Knows arrays; must not know why."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ssm_worker.boost.corpus import TeacherSequence

Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Lessons:
    """Sequences of L tokens each; weights: for each of them fp32 [L - start + 1], one for each row of its log-probs."""

    sequences: Sequence[TeacherSequence]
    weights: Sequence[Weights]

    @property
    def num_positions(self) -> int:
        """Tokens that one pass feeds to the student: those that teach nothing included."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    def digest(self) -> str:
        """SHA-256 of all that training reads: equal lessons give equal students."""
        digest = hashlib.sha256()
        for sequence, weights in zip(self.sequences, self.weights, strict=True):
            digest.update(np.array([len(sequence.tokens), sequence.start]).tobytes())
            for array in (sequence.tokens, sequence.top_ids, sequence.top_logp, weights):
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def even_lessons(sequences: Sequence[TeacherSequence]) -> Lessons:
    """Every position counts the same."""
    return Lessons(sequences, [np.ones(len(sequence.top_ids), np.float32) for sequence in sequences])


def weighted_lessons(sequences: Sequence[TeacherSequence], weights: Sequence[Weights]) -> Lessons:
    """Without the sequences of which nothing counts."""
    kept = [pair for pair in zip(sequences, weights, strict=True) if pair[1].any()]
    return Lessons([sequence for sequence, _ in kept], [weight for _, weight in kept])
