"""Tree attention by torch with a mask: the reference on any device. Knows q, k, v and masks, nothing of layers.

(SpecInfer, section 4.2: one pass over all nodes, each seeing the committed prefix and its ancestors.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from treecore.model.batch import AttentionGroup, ForwardBatch


class Attention(Protocol):
    """A backend, chosen once at load for this rank's heads. It makes a plan for a batch, which serves many layers."""

    def plan(self, batch: ForwardBatch, window: int | None, like: Tensor) -> Any:
        """The batch on the device and in the dtype of `like`; rows see what is less than `window` positions back."""

    def __call__(self, q: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Attention of all rows: [R, num_heads * D].

        q is [R, num_heads, D], kv one layer of the pool, [num_slots, 2, num_kv_heads, D], `plan` one of `self.plan`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A group on the device, with its mask as SDPA wants it: additive [B, 1, R * G, C]."""

    group: AttentionGroup
    columns: Tensor | slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """softmax(cap(q k^T scale) + mask) v for `group_size` (G) query heads a KV head.

    cap(s) is soft_cap tanh(s / soft_cap) (Gemma 2, section 2), and s itself where there is no cap.
    """

    group_size: int
    scale: float
    soft_cap: float | None = None

    def plan(self, batch: ForwardBatch, window: int | None, like: Tensor) -> list[AttentionPlan]:
        """The batch's groups, each with its mask."""
        return [self._plan_group(group, _visible(group, window), like) for group in batch.groups]

    def __call__(self, q: Tensor, kv: Tensor, plan: Sequence[AttentionPlan]) -> Tensor:
        """Attention of all rows: [R, num_heads * D]."""
        if len(plan) == 1:
            return self._attend_group(q, kv, plan[0])
        return torch.cat([self._attend_group(q[part.group.rows], kv, part) for part in plan])

    def _plan_group(self, group: AttentionGroup, visible: Tensor | None, like: Tensor) -> AttentionPlan:
        return AttentionPlan(
            group=group,
            columns=group.columns if isinstance(group.columns, slice) else group.columns.to(like.device),
            mask=None if visible is None else additive_mask(visible, self.group_size).to(like),
        )

    def _attend_group(self, q: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
        group = plan.group
        if group.padded_rows is not None:
            q = q.index_select(0, group.padded_rows.to(q.device))
        columns = kv[plan.columns] if isinstance(plan.columns, slice) else kv.index_select(0, plan.columns)
        k, v = columns.view(group.num_segments, -1, *kv.shape[1:]).unbind(2)
        out = self._tree_attention(q.view(group.num_segments, -1, *q.shape[1:]), k, v, plan.mask).flatten(0, 1)
        return out if group.real_rows is None else out.index_select(0, group.real_rows.to(q.device))

    def _tree_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Grouped heads are folded into rows, so that k and v are read once a group.

        q [B, R, num_heads, D], k and v [B, C, num_kv_heads, D], mask additive [B, 1, R * G, C] or None.
        Returns [B, R, num_heads * D].
        """
        num_segments, num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[2]
        unfolded = (num_segments, num_kv_heads, num_rows, self.group_size, head_dim)
        by_group = q.view(num_segments, num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
        folded = by_group.reshape(num_segments, num_kv_heads, -1, head_dim)
        out = self._weigh(folded, k.transpose(1, 2), v.transpose(1, 2), mask)
        return out.reshape(unfolded).transpose(1, 2).reshape(num_segments, num_rows, num_heads * head_dim)

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.soft_cap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scores = torch.tanh(q @ k.mT * (self.scale / self.soft_cap)) * self.soft_cap
        return (scores if mask is None else scores + mask).softmax(-1) @ v


def additive_mask(visible: Tensor, group_size: int) -> Tensor:
    """float32 [B, 1, R * G, C]: 0 where visible, bool [B, R, C], else -inf; each row once for each head of a group."""
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(group_size, dim=1)[:, None]


def _visible(group: AttentionGroup, window: int | None) -> Tensor | None:
    """What the rows see of what they may: bool [B, R, C], or None (all)."""
    if window is None or max(int(segment.column_positions.max()) for segment in group.segments) < window:
        return group.visible
    near = group.near(window)
    return near if group.visible is None else near & group.visible
