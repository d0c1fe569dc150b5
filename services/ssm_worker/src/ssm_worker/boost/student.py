"""The student: a few Llama layers with gradients, under the checkpoint's own names. Knows torch; nothing of files.

The project's decoder packs weights and has no gradients, hence this second, plain forward. Its embedding and head are
the teacher's, and frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treecore.model.rope import inverse_frequencies
from treecore.model.spec import ModelSpec


class _Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=False)
        self._head_dim = spec.head_dim
        self._group_size = spec.num_heads // spec.num_kv_heads

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of x [B, T, H] with cos and sin [T, D]."""
        q = _rotate(self._split(self.q_proj(x)), cos, sin)
        k = _rotate(self._split(self.k_proj(x)), cos, sin).repeat_interleave(self._group_size, dim=1)
        v = self._split(self.v_proj(x)).repeat_interleave(self._group_size, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] to [B, heads, T, D]."""
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)


class _Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of x [B, T, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm.eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm.eps)
        self.mlp = _Mlp(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of x [B, T, H]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Layers(nn.Module):
    """Exists so that parameters are called `model.layers.0...` and `model.norm.weight`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(spec) for _ in range(spec.num_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm.eps)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Both ends of a student, frozen: embedding [V, H] in any dtype, head fp32 [V_out, H].

    head_token_ids int64 [V_out], ascending: the token of each row of the head. is_borrowed: from the LLM.
    """

    embedding: Tensor
    head: Tensor
    head_token_ids: Tensor
    is_borrowed: bool = True


class Student(nn.Module):
    """Layers of a Llama-family model, in fp32, between an embedding and a head that stay as they are.

    state_dict() has the layers and the last norm by the names that they have in a checkpoint; `weights` is such a
    dict, in any dtype, of `spec.num_layers` layers. It is copied. config: of the checkpoint that it comes from.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], vocabulary: Vocabulary, config: Mapping[str, object]
    ) -> None:
        super().__init__()
        self.spec = spec
        self.vocabulary = vocabulary
        self.config = config
        with torch.device("meta"):  # no time or memory for initial weights that are thrown away
            self.model = _Layers(spec)
        self.load_state_dict(
            {name: tensor.to(torch.float32, copy=True) for name, tensor in weights.items()}, assign=True
        )
        rope = spec.layers[0].rope
        assert rope is not None, "a Llama rotates"
        self._frequencies = inverse_frequencies(rope, spec.head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """The normalised hidden states, fp32 [B, T, H], of tokens int64 [B, T] that start at position 0."""
        x = F.embedding(tokens, self.vocabulary.embedding).float()
        angles = torch.arange(tokens.shape[1])[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normalised: Tensor = self.model.norm(x)
        return normalised

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V_out] of hidden states [..., H]."""
        return F.linear(hidden, self.vocabulary.head)


def column_of_token(head_token_ids: Tensor, vocab_size: int) -> Tensor:
    """int64 [V]: the logits' column of each token, -1 where the trimmed head has none."""
    columns = torch.full((vocab_size,), -1)
    columns[head_token_ids] = torch.arange(len(head_token_ids))
    return columns


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + D/2]) of x [..., T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
