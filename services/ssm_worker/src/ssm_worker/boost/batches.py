"""Which sequences each training step sees, and as which tensors. Knows the step counter; must not know the model.

The order is a function of (seed, epoch) alone: a resumed run continues it without any saved random state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssm_worker.boost.corpus import TeacherSequence
from ssm_worker.boost.lessons import Weights


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences padded to T tokens. tokens int64 [B, T]; is_target bool [B, T] marks M positions, in row order.

    top_ids int64 and top_logp fp32, [M, K]: what the teacher expects behind each of them; weights fp32 [M]: how much
    they count. num_tokens: without padding.
    """

    tokens: Tensor
    is_target: Tensor
    top_ids: Tensor
    top_logp: Tensor
    weights: Tensor
    num_tokens: int


def collate(sequences: Sequence[TeacherSequence], weights: Sequence[Weights] | None = None) -> TrainingBatch:
    """The sequences as one batch; positions before the last token of a template's opening are no targets.

    weights: of each sequence's other positions, of which those that weigh nothing are no targets either (the head is a
    third of the work); None: all count the same.
    """
    rows = [np.ones(len(sequence.top_ids), np.float32) for sequence in sequences] if weights is None else weights
    lengths = [len(sequence.tokens) for sequence in sequences]
    tokens = np.zeros((len(sequences), max(lengths)), np.int64)
    is_target = np.zeros(tokens.shape, np.bool_)
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        tokens[row, :length] = sequence.tokens
        is_target[row, sequence.start - 1 : length] = rows[row] > 0
    weight = np.concatenate(rows)
    return TrainingBatch(
        tokens=torch.from_numpy(tokens),
        is_target=torch.from_numpy(is_target),
        top_ids=torch.from_numpy(np.concatenate([sequence.top_ids for sequence in sequences])[weight > 0]).long(),
        top_logp=torch.from_numpy(np.concatenate([sequence.top_logp for sequence in sequences])[weight > 0]).float(),
        weights=torch.from_numpy(weight[weight > 0]),
        num_tokens=sum(lengths),
    )


class BatchOrder:
    """An endless series of batches, as indices of sequences: `order[step]`.

    Each epoch visits every sequence once. Batches are cut from pools that are sorted by length, so that little is
    padding, and then shuffled.
    """

    def __init__(self, lengths: Sequence[int], seed: int, batch_len: int, pool_len: int) -> None:
        self._lengths = np.array(lengths)
        self._seed = seed
        self._batch_len = batch_len
        self._pool_len = pool_len
        self._epoch_idx = 0
        self._epoch = self._shuffled(0)

    def __getitem__(self, step: int) -> NDArray[np.intp]:
        """The batch of a step."""
        epoch_idx, batch_idx = divmod(step, len(self._epoch))  # every epoch has as many batches
        if epoch_idx != self._epoch_idx:
            self._epoch_idx, self._epoch = epoch_idx, self._shuffled(epoch_idx)
        return self._epoch[batch_idx]

    def _shuffled(self, epoch_idx: int) -> list[NDArray[np.intp]]:
        rng = np.random.default_rng([self._seed, epoch_idx])
        order = rng.permutation(len(self._lengths))
        pools = [order[first : first + self._pool_len] for first in range(0, len(order), self._pool_len)]
        by_length = [pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools]
        batches = [
            pool[first : first + self._batch_len]
            for pool in by_length
            for first in range(0, len(pool), self._batch_len)
        ]
        return [batches[idx] for idx in rng.permutation(len(batches))]
