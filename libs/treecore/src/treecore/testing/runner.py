"""Requests whose rows are computed one call at a time, over a cache that is NaN where nothing was written."""

from collections.abc import Callable

import torch
from torch import Tensor

from treecore.model.batch import ForwardBatch, Segment
from treecore.model.kv_pool import Slots
from treecore.model.sequence import SequenceCache


class Runner:
    """compute: the logits of a batch, over `pool`. Whoever makes it fills the pool with NaN: unwritten slots show."""

    def __init__(self, compute: Callable[[ForwardBatch], Tensor], pool: Slots) -> None:
        self._compute = compute
        self.cache = SequenceCache(pool, block_len=4)

    def forward(self, *segments: Segment) -> list[Tensor]:
        """The logits of each segment."""
        batch = ForwardBatch.from_segments(segments)
        return batch.split_logits(self._compute(batch))

    def pending(self, request_id: str, max_rows: int | None = None) -> Tensor:
        """Computes all pending rows; the logits of the root and of all nodes."""
        logits = []
        while self.cache.num_pending(request_id):
            segment = self.cache.next_segment(request_id, max_rows)
            logits += self.forward(segment)
            self.cache.mark_written(request_id, segment.num_rows)
        return torch.cat(logits)
