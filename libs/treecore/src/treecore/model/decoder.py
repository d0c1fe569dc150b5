"""The Llama-family forward, one pass over a batch's rows. Knows layers; must not know requests, files or sampling."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treecore.model.attention import Attention, TorchAttention
from treecore.model.batch import ForwardBatch
from treecore.model.kv_pool import KvPool, KvShape
from treecore.model.linear import Linear, Precision
from treecore.model.norm import RmsNorm
from treecore.model.parallel import Place, TensorLinks
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
    """The weights that one rank has.

    embedding: [V, H] in its stored dtype, on the first stage. norm, head: on the last. output_token_ids: int32 [V_out],
    the head's rows as token ids, or None.
    """

    embedding: Tensor | None
    layers: tuple[Layer, ...]
    norm: RmsNorm | None
    head: Linear | None
    output_token_ids: NDArray[np.int32] | None


class Decoder:
    """One rank's part of a decoder, ready to run. Immutable; all state is in the KvPool that each call is given."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, precision: Precision, place: Place, links: TensorLinks
    ) -> None:
        self.spec = spec
        self.place = place
        self._links = links
        self.device = precision.device
        self.activation_dtype = precision.activation
        self._weights = weights
        self._turns = rotation_table(spec, self.device)
        self._attention: Attention = TorchAttention(spec.num_heads // spec.num_kv_heads, spec.head_dim**-0.5)

    @property
    def output_token_ids(self) -> NDArray[np.int32] | None:
        """The token id of each column of the logits; None where column v is token v."""
        return self._weights.output_token_ids

    @property
    def num_layers(self) -> int:
        """Layers of this rank's stage."""
        return len(self._weights.layers)

    def new_pool(self, num_slots: int) -> KvPool:
        """A KV cache of `num_slots` tokens that fits this rank's layers and heads."""
        shape = KvShape(len(self._weights.layers), self.spec.num_kv_heads, self.spec.head_dim)
        return KvPool(shape, num_slots, self.activation_dtype, self.device)

    def forward(self, batch: ForwardBatch, pool: KvPool) -> Tensor:
        """Writes K and V of every row to its slot in `pool`. Returns fp32 [num_logit_rows, V_out] for batch.logit_rows.

        Every row must lie within the context (position < spec.context_len). Only where one stage is all.
        """
        assert self.place.pp_size == 1, "a pipeline's stages run one by one"
        return self.run_stage(batch, pool, None)

    @torch.inference_mode()
    def run_stage(self, batch: ForwardBatch, pool: KvPool, x: Tensor | None) -> Tensor:
        """The part of a forward that is this stage's: writes K and V of every row to its slot in `pool`.

        x: the hidden states [R, H] that the stage before returned, which are overwritten; None for the first stage.
        Returns [R, H] in the activation dtype; the last stage fp32 [num_logit_rows, V_out], complete on each rank.
        """
        x = self._embed(batch) if x is None else x
        turns = self._turns[batch.positions.to(self.device)]
        slots = batch.slots.to(self.device)
        plan = self._attention.plan(batch, None, x)
        for layer_idx, layer in enumerate(self._weights.layers):
            x += self._attend(layer, x, turns, slots, pool.layer(layer_idx), plan)
            x += self._mlp(layer, x)
        return self._logits(batch, x) if self.place.is_last else x

    def _embed(self, batch: ForwardBatch) -> Tensor:
        assert self._weights.embedding is not None, "only the first stage starts from tokens"
        return F.embedding(batch.tokens.to(self.device), self._weights.embedding).to(self.activation_dtype)

    def _logits(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        norm, head = self._weights.norm, self._weights.head
        assert norm is not None and head is not None, "the last stage has norm and head"  # noqa: PT018
        return self._links.gather(head(norm(x.index_select(0, batch.logit_rows.to(self.device))))).float()

    def _attend(self, layer: Layer, x: Tensor, turns: Tensor, slots: Tensor, kv: Tensor, plan: Any) -> Tensor:
        num_heads, num_kv_heads, head_dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        qkv = layer.qkv(layer.input_norm(x)).view(len(x), -1, head_dim)
        rotate(qkv[:, : num_heads + num_kv_heads], turns)
        q, new_kv = torch.split(qkv, [num_heads, 2 * num_kv_heads], dim=1)
        kv.index_copy_(0, slots, new_kv.view(len(x), 2, num_kv_heads, head_dim))
        return layer.attention_out(self._attention(q, kv, plan))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=1)
        return layer.down(F.silu(gate).mul_(up))
