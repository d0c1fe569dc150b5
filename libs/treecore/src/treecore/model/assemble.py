"""From a checkpoint's tensors to one rank's parts: slices, fuses and packs. Knows parts' places; not the forward."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from treecore.errors import ConfigError
from treecore.model.checkpoint import Checkpoint
from treecore.model.decoder import Layer
from treecore.model.invariant import InvariantActivation, InvariantTurn
from treecore.model.linear import Linear, Precision, linear_as_stored, pack_linear, rounded
from treecore.model.norm import LayerNorm, Norm, RmsNorm
from treecore.model.parallel import HeadShare, Place, TensorLinks, share_heads, split_evenly
from treecore.model.parts import (
    ACTIVATIONS,
    Biased,
    Embedding,
    FetchedEmbedding,
    Gathered,
    NormThenRotate,
    Part,
    PositionEmbedding,
    ScaledEmbedding,
    SoftCap,
    SplitEmbedding,
    Summed,
    Then,
    TokenEmbedding,
    Turn,
    leave,
)
from treecore.model.pieces import Piece, Pieces, read_whole
from treecore.model.rope import interleave_pairs, rotate
from treecore.model.spec import ModelSpec

MakeLinear = Callable[[Pieces], Linear]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Where embedding and head are: the checkpoint itself, or an SSM's teacher.

    is_offloaded: memory is short; rows of the embedding stay on disk, and the head is kept as stored.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    is_offloaded: bool = False

    @property
    def head_name(self) -> str:
        """The tensor that is the head."""
        return self.spec.tensors.embedding if self.spec.tie_embeddings else self.spec.tensors.head


class Assembler:
    """Reads what rank `place` has of a checkpoint, and no other bytes of matrices, and makes parts of it."""

    def __init__(
        self, spec: ModelSpec, checkpoint: Checkpoint, precision: Precision, place: Place, links: TensorLinks
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._precision = precision
        self.place = place
        self._links = links
        self.heads: HeadShare = share_heads(spec.num_heads, spec.num_kv_heads, place)
        self._shapes = spec.part_shapes()
        for size, what in ((spec.vocab_size, "vocab_size"), (spec.intermediate_size, "intermediate_size")):
            if place.tp_size > size:
                raise ConfigError(f"{place.tp_size} tensor-parallel ranks for {what}={size}: each rank needs a share")

    def embedding(self, vocabulary: Vocabulary) -> Embedding:
        """Tokens to hidden states, with learned positions and scale where the model has them."""
        spec, positions = self._spec, self._spec.tensors.positions
        embedding = self._token_embedding(vocabulary)
        if spec.embedding_scale != 1.0:
            factor = float(torch.tensor(spec.embedding_scale).to(self._precision.weight))
            embedding = ScaledEmbedding(embedding, factor)
        if positions is not None:
            first = spec.tensors.num_unused_positions
            rows = range(first, first + spec.context_len)
            table = self._to_device(self._checkpoint.part(positions, rows)).to(self._precision.activation)
            embedding = PositionEmbedding(embedding, table)
        return embedding

    def head(self, vocabulary: Vocabulary, token_ids: NDArray[np.int32] | None) -> Part:
        """Hidden states to logits, of `token_ids` only where they are given."""
        linear = self._head_linear(vocabulary, token_ids)
        return linear if self._spec.logit_soft_cap is None else Then(linear, SoftCap(self._spec.logit_soft_cap))

    def last_norm(self) -> Norm:
        """The norm before the head."""
        return self._norm(self._spec.tensors.norm)

    def layer(self, layer_idx: int, kind: int, make: MakeLinear | None = None) -> Layer:
        """A layer of the `kind`-th way to know positions. `make` makes its linears, where they are not just packed."""
        make = make or self._make
        turn, activate = self._turn(layer_idx), ACTIVATIONS[self._spec.activation]
        gate_up = ("gate", "up") if "gate" in self._shapes else ("up",)
        return Layer(
            kind=kind,
            input_norm=self._part_norm(layer_idx, "input_norm"),
            qkv=self._column_split(layer_idx, ("q", "k", "v"), make),
            turn=InvariantTurn(turn) if self._precision.batch_invariant else turn,
            attention_out=self._row_split(layer_idx, "attention_out", "attention_norm", make),
            mlp_norm=self._part_norm(layer_idx, "mlp_norm"),
            up=self._column_split(layer_idx, gate_up, make),
            activate=InvariantActivation(activate) if self._precision.batch_invariant else activate,
            down=self._row_split(layer_idx, "down", "down_norm", make),
        )

    def _token_embedding(self, vocabulary: Vocabulary) -> Embedding:
        """In its stored dtype where that loses nothing: the file's own pages then serve every process that maps it."""
        rows = self._share(vocabulary.spec.vocab_size)
        if vocabulary.is_offloaded and self.place.tp_size == 1:
            read = functools.partial(vocabulary.checkpoint.part, vocabulary.spec.tensors.embedding)
            return FetchedEmbedding(read, self._precision)
        stored = vocabulary.checkpoint.part(vocabulary.spec.tensors.embedding, rows)
        weight, dtype = rounded(stored, self._precision).to(self._precision.device), self._precision.activation
        if self.place.tp_size == 1:
            return TokenEmbedding(weight, dtype)
        return SplitEmbedding(weight, rows.start, dtype, self._links)

    def _head_linear(self, vocabulary: Vocabulary, token_ids: NDArray[np.int32] | None) -> Part:
        """Each rank has an equal share of the rows, the last ones filled up with zeros."""
        num_rows = vocabulary.spec.vocab_size if token_ids is None else len(token_ids)
        share = -(-num_rows // self.place.tp_size)
        first = min(share * self.place.tp_rank, num_rows)
        rows = range(first, min(first + share, num_rows))
        if vocabulary.is_offloaded and self.place.tp_size == 1 and token_ids is None:
            stored = vocabulary.checkpoint.part(vocabulary.head_name, rows)
            return linear_as_stored(rounded(stored, self._precision), self._precision)
        if token_ids is None:
            weight = vocabulary.checkpoint.part(vocabulary.head_name, rows)
        else:
            picked = torch.from_numpy(token_ids[rows.start : rows.stop]).long()
            weight = vocabulary.checkpoint.tensor(vocabulary.head_name)[picked]
        if self.place.tp_size == 1:
            return self._pack(weight)
        linear = self._pack(F.pad(weight, (0, 0, 0, share - len(weight))))
        return Gathered(linear, self._links, num_rows)

    def _column_split(self, layer_idx: int, parts: Sequence[str], make: MakeLinear) -> Part:
        """The rank's output features of `parts`, as one linear."""
        linear = make([self._rank_rows(layer_idx, part) for part in parts])
        if parts[0] not in self._spec.tensors.biased:
            return linear
        return Biased(linear, self._bias(torch.cat([self._rank_biases(layer_idx, part) for part in parts])))

    def _row_split(self, layer_idx: int, part: str, norm: str, make: MakeLinear) -> Part:
        """The rank's input features of `part`; the ranks' sum, the bias once on top, and the norm behind it, if any."""
        tensors = self._spec.tensors
        rows, columns = self._shapes[part]
        share = self._rank_features("q") if part == "attention_out" else self._share(columns)
        linear = make([Piece(tensors.of_layer(layer_idx, part), range(rows), share)])
        whole: Part = linear if self.place.tp_size == 1 else Summed(linear, self._links)
        if part in tensors.biased:
            bias = self._checkpoint.part(tensors.of_layer(layer_idx, part, "bias"), range(rows))
            whole = Biased(whole, self._bias(bias))
        return Then(whole, self._part_norm(layer_idx, norm)) if norm in tensors.parts else whole

    def _rank_rows(self, layer_idx: int, part: str) -> Piece:
        """The rank's rows of a weight; rotated pairs side by side."""
        is_rotated = part in ("q", "k") and self._spec.layers[layer_idx].rope is not None
        name, columns = self._spec.tensors.of_layer(layer_idx, part), range(self._shapes[part][1])
        return Piece(name, self._rank_features(part), columns, self._spec.head_dim if is_rotated else None)

    def _rank_biases(self, layer_idx: int, part: str) -> Tensor:
        """What belongs to these rows."""
        name = self._spec.tensors.of_layer(layer_idx, part, "bias")
        stored = self._checkpoint.part(name, self._rank_features(part))
        return self._in_pairs(stored, layer_idx) if part in ("q", "k") else stored

    def _rank_features(self, part: str) -> range:
        """Which output features of a part are this rank's."""
        if part in ("q", "k", "v"):
            heads, size = self.heads.q if part == "q" else self.heads.kv, self._spec.head_dim
            return range(heads.start * size, heads.stop * size)
        return self._share(self._shapes[part][0])

    def _share(self, size: int) -> range:
        return split_evenly(size, self.place.tp_size, self.place.tp_rank)

    def _in_pairs(self, stored: Tensor, layer_idx: int) -> Tensor:
        return stored if self._spec.layers[layer_idx].rope is None else interleave_pairs(stored, self._spec.head_dim)

    def _turn(self, layer_idx: int) -> Turn:
        if "q_norm" in self._shapes:
            return NormThenRotate(self._head_norm(layer_idx))
        return leave if self._spec.layers[layer_idx].rope is None else rotate

    def _head_norm(self, layer_idx: int) -> Norm:
        """One norm for all heads of q and k: its gain is [heads, D]."""
        names = [self._spec.tensors.of_layer(layer_idx, part) for part in ("q_norm", "k_norm")]
        stored = [self._in_pairs(self._checkpoint.tensor(name), layer_idx) for name in names]
        copies = zip(stored, (len(self.heads.q), len(self.heads.kv)), strict=True)
        return self._rms(torch.cat([weight.expand(count, -1) for weight, count in copies]))

    def _part_norm(self, layer_idx: int, part: str) -> Norm:
        return self._norm(self._spec.tensors.of_layer(layer_idx, part))

    def _norm(self, name: str) -> Norm:
        weight = self._checkpoint.tensor(name)
        if self._spec.norm.kind == "rms":
            return self._rms(weight)
        bias = self._checkpoint.tensor(bias_name(name))
        return LayerNorm(self._to_device(weight).float(), self._to_device(bias).float(), self._spec.norm.eps)

    def _rms(self, weight: Tensor) -> RmsNorm:
        return RmsNorm.of(self._to_device(weight).float() + self._spec.norm.offset, self._spec.norm.eps)

    def _make(self, pieces: Pieces) -> Linear:
        return self._pack(read_whole(pieces, self._checkpoint))

    def _pack(self, weight: Tensor) -> Linear:
        return pack_linear(weight, self._precision)

    def _bias(self, bias: Tensor) -> Tensor:
        return self._to_device(bias).to(self._precision.activation)

    def _to_device(self, weight: Tensor) -> Tensor:
        """Rounded as all weights are."""
        return weight.to(self._precision.device, self._precision.weight)


def bias_name(weight_name: str) -> str:
    """The bias beside a weight."""
    return f"{weight_name.removesuffix('.weight')}.bias"
