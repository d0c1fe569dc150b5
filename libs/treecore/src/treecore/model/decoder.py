"""The forward, one pass over a batch's rows, of any family. Knows layers; must not know requests, files or sampling."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treecore.model.attention import Attention
from treecore.model.batch import ForwardBatch
from treecore.model.kv_pool import KvPool, KvShape, MoveRows, move_by_index
from treecore.model.linear import Precision
from treecore.model.norm import Norm
from treecore.model.parallel import HeadShare, Place
from treecore.model.parts import Embedding, Part, Turn
from treecore.model.rope import rotation_table
from treecore.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parts. `kind` is how it knows positions; q, k, v are one linear, and so are gate and up."""

    kind: int
    input_norm: Norm
    qkv: Part
    turn: Turn
    attention_out: Part
    mlp_norm: Norm
    up: Part
    activate: Part
    down: Part


class Layers(Protocol):
    """Layers in their order. One that is iterated over is valid until the next is asked for."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Layer]: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank has of a decoder.

    kinds: the distinct ways in which its layers know positions. embedding: on the first stage. norm, head: on the last.
    output_token_ids: int32 [V_out], the head's rows as token ids, or None. weight_bytes: bytes read of the checkpoint
    for it; a tied head counts twice, as it is kept twice.
    """

    place: Place
    heads: HeadShare
    kinds: tuple[LayerSpec, ...]
    embedding: Embedding | None
    layers: Layers
    norm: Norm | None
    head: Part | None
    output_token_ids: NDArray[np.int32] | None
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch on the device. plans: how each kind of layer attends. The rest as in ForwardBatch."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    plans: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """What the layers of one kind need to know of the rows: their turns (see rope.py), and what they see."""

    turns: Tensor
    plan: Any


class Decoder:
    """One rank's part of a decoder, ready to run. Immutable; all state is in the KvPool that each call is given."""

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        precision: Precision,
        attention: Attention,
        move_rows: MoveRows = move_by_index,
    ) -> None:
        self.spec = spec
        self.place = stage.place
        self.device = precision.device
        self.activation_dtype = precision.activation
        self._stage = stage
        self._num_heads, self._num_kv_heads = len(stage.heads.q), len(stage.heads.kv)
        self.attention = attention
        self._move_rows = move_rows
        self._tables = [
            rotation_table(kind.rope, spec.head_dim, spec.context_len, precision.device) for kind in stage.kinds
        ]

    @property
    def output_token_ids(self) -> NDArray[np.int32] | None:
        """The token id of each column of the logits; None where column v is token v."""
        return self._stage.output_token_ids

    @property
    def num_layers(self) -> int:
        """Layers of this rank's stage."""
        return len(self._stage.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights, in the precision in which the checkpoint stores them."""
        return self._stage.weight_bytes

    def new_pool(self, num_slots: int, *, num_spare: int = 0) -> KvPool:
        """A KV cache of `num_slots` tokens that fits this rank's layers and heads; num_spare: see KvPool."""
        shape = KvShape(len(self._stage.layers), self._num_kv_heads, self.spec.head_dim)
        return KvPool(shape, num_slots, self.activation_dtype, self.device, self._move_rows, num_spare=num_spare)

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
        return self.run_prepared(self.prepare(batch), pool, x)

    def prepare(self, batch: ForwardBatch) -> Prepared:
        """`batch` on the device: all that a stage reads from the host."""
        like = torch.empty(0, dtype=self.activation_dtype, device=self.device)
        return Prepared(
            tokens=batch.tokens.to(self.device),
            positions=batch.positions.to(self.device),
            slots=batch.slots.to(self.device),
            logit_rows=batch.logit_rows.to(self.device),
            plans=tuple(self.attention.plan(batch, kind.window, like) for kind in self._stage.kinds),
        )

    @torch.inference_mode()
    def run_prepared(self, rows: Prepared, pool: KvPool, x: Tensor | None) -> Tensor:
        """As run_stage; it neither waits for the device nor reads the host's memory, so a CUDA graph can hold it."""
        x = self._embed(rows) if x is None else x
        views = [_View(table[rows.positions], plan) for table, plan in zip(self._tables, rows.plans, strict=True)]
        for layer_idx, layer in enumerate(self._stage.layers):
            x += self._attend(layer, x, rows.slots, pool.layer(layer_idx), views[layer.kind])
            x += layer.down(layer.activate(layer.up(layer.mlp_norm(x))))
        return self._logits(rows, x) if self.place.is_last else x

    def _embed(self, rows: Prepared) -> Tensor:
        assert self._stage.embedding is not None, "only the first stage starts from tokens"
        return self._stage.embedding(rows.tokens, rows.positions)

    def _attend(self, layer: Layer, x: Tensor, slots: Tensor, kv: Tensor, view: _View) -> Tensor:
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        qkv = layer.qkv(layer.input_norm(x)).view(len(x), -1, self.spec.head_dim)
        layer.turn(qkv[:, : num_heads + num_kv_heads], view.turns)
        q, new_kv = torch.split(qkv, [num_heads, 2 * num_kv_heads], dim=1)
        kv.index_copy_(0, slots, new_kv.view(len(x), 2, num_kv_heads, self.spec.head_dim))
        return layer.attention_out(self.attention(q, kv, view.plan))

    def _logits(self, rows: Prepared, x: Tensor) -> Tensor:
        norm, head = self._stage.norm, self._stage.head
        assert norm is not None, "the last stage has a norm"
        assert head is not None, "the last stage has a head"
        return head(norm(x.index_select(0, rows.logit_rows))).float()
