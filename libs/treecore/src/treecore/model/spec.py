"""What a decoder is made of, whatever its family. Knows sizes and kinds of parts; must not know files or torch.

families.py makes it from a config.json, assemble.py makes a decoder from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; `scaling` is None where frequencies are taken as they are."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """How a layer knows positions: `rope` (None: it does not rotate); it sees `window` positions (None: all)."""

    rope: RopeSpec | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS or layer normalisation; `offset` is added to the stored weight."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Tensors:
    """Where a checkpoint keeps what.

    parts: for each part of a layer its name below `layers`.<index>. The parts of a layer: input_norm, q, k, v, q_norm,
    k_norm, attention_out, attention_norm, mlp_norm, gate, up, down, down_norm; those that are not named do not exist.
    biased: parts that have a bias. positions: the learned positions' name, whose first `num_unused_positions` rows are
    no position's; None where there are none.
    """

    layers: str
    parts: Mapping[str, str]
    embedding: str
    norm: str
    head: str = "lm_head.weight"
    positions: str | None = None
    num_unused_positions: int = 0
    biased: frozenset[str] = frozenset()

    def of_layer(self, layer_idx: int, part: str, kind: str = "weight") -> str:
        """The full name of a part's weight or bias."""
        return f"{self.layers}.{layer_idx}.{self.parts[part]}.{kind}"


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What an SSM artefact leaves out of its checkpoint: the teacher's embedding; head rows that it never proposes."""

    teacher_embedding: bool
    trimmed_head: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of any family.

    attention_scale: what q k^T is multiplied by; then attention_soft_cap (s: s tanh(x / s)), as logit_soft_cap for the
    logits. `eos_token_ids` may be empty; `draft` is None for a plain checkpoint.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    activation: Activation
    attention_scale: float
    tensors: Tensors
    tie_embeddings: bool
    context_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    draft: DraftSpec | None = None

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    def part_shapes(self) -> dict[str, Shape]:
        """The shape of the weight of each part of a layer that this decoder has."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices: dict[str, Shape] = {
            "q": (q_size, hidden),
            "k": (kv_size, hidden),
            "v": (kv_size, hidden),
            "attention_out": (hidden, q_size),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
            "q_norm": (self.head_dim,),
            "k_norm": (self.head_dim,),
        }
        return {part: matrices.get(part, (hidden,)) for part in self.tensors.parts}

    def layer_size(self) -> int:
        """Weights in a layer's parts."""
        return sum(math.prod(shape) for shape in self.part_shapes().values())
