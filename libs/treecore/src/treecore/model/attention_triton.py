"""Tree attention by our Triton kernels: the backend for GPUs. Knows batches and kernels, nothing of layers.

The module imports triton: nothing but the choice of this backend may import it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treecore.model.batch import ForwardBatch
from treecore.model.kernels.attend import DeviceWork, Scoring, attend, choose_tiling, to_device
from treecore.model.kernels.work import SegmentView, Variant, plan_work


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """`Attention` for `group_size` query heads a KV head. block_len: of the cache's blocks. See docs/kernels.md."""

    group_size: int
    scoring: Scoring
    dtype: torch.dtype
    block_len: int
    variant: Variant = "fast"

    def plan(self, batch: ForwardBatch, window: int | None, like: Tensor) -> DeviceWork:
        """The work of all segments, on the device of `like`."""
        if window is not None and int(batch.positions.max()) < window:
            window = None
        segments = segment_views(batch)
        longest = max(segment.num_rows for segment in segments)
        tiling = choose_tiling(self.variant, self.group_size, longest, self.dtype)
        work = plan_work(self.variant, segments, tiling, self.block_len, window)
        return to_device(
            work,
            self.variant,
            tiling,
            block_len=self.block_len,
            has_window=window is not None,
            device=like.device,
        )

    def __call__(self, q: Tensor, kv: Tensor, plan: DeviceWork) -> Tensor:
        """Attention of all rows: [R, num_heads * D]."""
        return attend(q.contiguous(), kv, plan, self.scoring).flatten(1)


def segment_views(batch: ForwardBatch) -> list[SegmentView]:
    """The batch's segments in the order of its rows."""
    views, first_row = [], 0
    for segment in (segment for group in batch.groups for segment in group.segments):
        views.append(SegmentView(first_row, segment.num_rows, segment.column_slots, segment.visible))
        first_row += segment.num_rows
    return views
