"""The Llama-family forward, one pass over a batch's rows. Knows layers; must not know requests, files or sampling."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treecore.model.attention import AttentionPlan, attend, plan_attention
from treecore.model.batch import ForwardBatch
from treecore.model.kv_pool import KvPool
from treecore.model.linear import Linear, Precision
from treecore.model.norm import RmsNorm
from treecore.model.rope import rotate, rotation_table
from treecore.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; q, k, v are one matrix, and so are gate and up."""

    input_norm: RmsNorm
    qkv: Linear
    attention_out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder.

    embedding: [V, H] in its stored dtype. output_token_ids: int32 [V_out], the head's rows as token ids, or None.
    """

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear
    output_token_ids: NDArray[np.int32] | None


class Decoder:
    """A decoder ready to run. Immutable; all state is in the KvPool that each call is given."""

    def __init__(self, spec: ModelSpec, weights: Weights, precision: Precision) -> None:
        self.spec = spec
        self.device = precision.device
        self.activation_dtype = precision.activation
        self._weights = weights
        self._turns = rotation_table(spec, self.device)

    @property
    def output_token_ids(self) -> NDArray[np.int32] | None:
        """The token id of each column of the logits; None where column v is token v."""
        return self._weights.output_token_ids

    def new_pool(self, num_slots: int) -> KvPool:
        """A KV cache of `num_slots` tokens that fits this decoder."""
        return KvPool(self.spec, num_slots, self.activation_dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """Writes K and V of every row to its slot in `pool`. Returns fp32 [num_logit_rows, V_out] for batch.logit_rows.

        Every row must lie within the context (position < spec.context_len).
        """
        x = F.embedding(batch.tokens.to(self.device), self._weights.embedding).to(self.activation_dtype)
        turns = self._turns[batch.positions.to(self.device)]
        slots = batch.slots.to(self.device)
        plans = plan_attention(batch, self.spec.num_heads // self.spec.num_kv_heads, x)
        for layer_idx, layer in enumerate(self._weights.layers):
            x += self._attention(layer, x, turns, slots, pool.layer(layer_idx), plans)
            x += self._mlp(layer, x)
        wanted = x.index_select(0, batch.logit_rows.to(self.device))
        return self._weights.head(self._weights.norm(wanted)).float()

    def _attention(
        self, layer: Layer, x: Tensor, turns: Tensor, slots: Tensor, kv: Tensor, plans: list[AttentionPlan]
    ) -> Tensor:
        num_heads, num_kv_heads, head_dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        qkv = layer.qkv(layer.input_norm(x)).view(len(x), -1, head_dim)
        rotate(qkv[:, : num_heads + num_kv_heads], turns)
        q, new_kv = torch.split(qkv, [num_heads, 2 * num_kv_heads], dim=1)
        kv.index_copy_(0, slots, new_kv.view(len(x), 2, num_kv_heads, head_dim))
        return layer.attention_out(attend(q, kv, plans))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up))
