"""Tree attention by torch's SDPA with a mask: the reference on any device. Knows q, k, v and masks, nothing of layers.

(SpecInfer, section 4.2: one pass over all nodes, each seeing the committed prefix and its ancestors.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from treecore.model.batch import AttentionGroup, ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A group on the device, with its mask as SDPA wants it: additive [B, 1, R * G, C]. One serves all layers."""

    group: AttentionGroup
    columns: Tensor | slice
    mask: Tensor | None


def plan_attention(batch: ForwardBatch, group_size: int, like: Tensor) -> list[AttentionPlan]:
    """The batch's groups for `group_size` (G) query heads a KV head, on the device and in the dtype of `like`."""
    return [
        AttentionPlan(
            group=group,
            columns=group.columns if isinstance(group.columns, slice) else group.columns.to(like.device),
            mask=None if group.visible is None else additive_mask(group.visible, group_size).to(like),
        )
        for group in batch.groups
    ]


def additive_mask(visible: Tensor, group_size: int) -> Tensor:
    """float32 [B, 1, R * G, C]: 0 where visible, bool [B, R, C], else -inf; each row once for each head of a group."""
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(group_size, dim=1)[:, None]


def attend(q: Tensor, kv: Tensor, plans: Sequence[AttentionPlan]) -> Tensor:
    """Attention of all rows: [R, num_heads * D].

    q is [R, num_heads, D], kv one layer of the pool, [num_slots, 2, num_kv_heads, D].
    """
    if len(plans) == 1:
        return _attend_group(q, kv, plans[0])
    return torch.cat([_attend_group(q[plan.group.rows], kv, plan) for plan in plans])


def _attend_group(q: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    group = plan.group
    if group.padded_rows is not None:
        q = q.index_select(0, group.padded_rows.to(q.device))
    columns = kv[plan.columns] if isinstance(plan.columns, slice) else kv.index_select(0, plan.columns)
    k, v = columns.view(group.num_segments, -1, *kv.shape[1:]).unbind(2)
    out = tree_attention(q.view(group.num_segments, -1, *q.shape[1:]), k, v, plan.mask).flatten(0, 1)
    return out if group.real_rows is None else out.index_select(0, group.real_rows.to(q.device))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v with grouped heads folded into rows, so that k and v are read once a group.

    q [B, R, num_heads, D], k and v [B, C, num_kv_heads, D], mask additive [B, 1, R * G, C] or None.
    Returns [B, R, num_heads * D].
    """
    num_segments, num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    unfolded = (num_segments, num_kv_heads, num_rows, num_heads // num_kv_heads, head_dim)
    by_group = q.view(num_segments, num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
    folded = by_group.reshape(num_segments, num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.reshape(unfolded).transpose(1, 2).reshape(num_segments, num_rows, num_heads * head_dim)
