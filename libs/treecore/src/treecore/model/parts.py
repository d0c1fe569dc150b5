"""The small parts that a forward is composed of, chosen at load. Knows tensors; must not know files or families.

A part that is not needed is not there: nothing asks in the forward whether there is a bias, a cap or another rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from treecore.model.linear import Linear, Precision, rounded
from treecore.model.norm import Norm
from treecore.model.parallel import TensorLinks
from treecore.model.rope import rotate
from treecore.model.spec import Activation

Part = Callable[[Tensor], Tensor]

# Hidden states [R, H] of tokens and positions, int64 [R], fresh and in the activation dtype.
Embedding = Callable[[Tensor, Tensor], Tensor]

# Tells q and k, [R, heads, D], where they stand, in place; takes the turns of rope.py as well.
Turn = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Then:
    """One part behind another."""

    first: Part
    second: Part

    def __call__(self, x: Tensor) -> Tensor:
        """second(first(x))."""
        return self.second(self.first(x))


@dataclass(frozen=True, slots=True)
class Biased:
    """A linear with a bias [out_features] in the activation dtype."""

    linear: Part
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T + b."""
        return self.linear(x).add_(self.bias)


@dataclass(frozen=True, slots=True)
class Summed:
    """A linear whose input features are split over ranks."""

    linear: Linear
    links: TensorLinks

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh sum of all ranks' products."""
        y = self.linear(x)
        self.links.sum_(y)
        return y


@dataclass(frozen=True, slots=True)
class Gathered:
    """A linear whose output features are split over ranks, padded to equal shares."""

    linear: Linear
    links: TensorLinks
    num_columns: int

    def __call__(self, x: Tensor) -> Tensor:
        """All columns, without the padding."""
        return self.links.gather(self.linear(x))[:, : self.num_columns]


@dataclass(frozen=True, slots=True)
class SoftCap:
    """cap tanh(x / cap), in fp32 (Gemma 2, section 2)."""

    cap: float

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh fp32 tensor of the same shape."""
        return torch.tanh(x.float() / self.cap).mul_(self.cap)


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """weight: [V, H] in its stored dtype."""

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 - one interface
        """The tokens' rows."""
        return F.embedding(tokens, self.weight).to(self.dtype)


@dataclass(frozen=True, slots=True)
class FetchedEmbedding:
    """An embedding whose rows are read where they lie, by `read`, each time they are needed."""

    read: Callable[[range], Tensor]
    precision: Precision

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 - one interface
        """The tokens' rows."""
        rows = torch.cat([self.read(range(token, token + 1)) for token in tokens.tolist()])
        return rounded(rows, self.precision).to(self.precision.device, self.precision.activation)


@dataclass(frozen=True, slots=True)
class SplitEmbedding:
    """weight: the rows of tokens first_token, first_token + 1, ...; other ranks have the others."""

    weight: Tensor
    first_token: int
    dtype: torch.dtype
    links: TensorLinks

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 - one interface
        """The tokens' rows, each of which exactly one rank adds."""
        rows = tokens - self.first_token
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(elsewhere, 0), self.weight).to(self.dtype)
        x.masked_fill_(elsewhere[:, None], 0.0)
        self.links.sum_(x)
        return x


@dataclass(frozen=True, slots=True)
class ScaledEmbedding:
    """An embedding times a factor."""

    embedding: Embedding
    factor: float

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Scaled rows."""
        return self.embedding(tokens, positions).mul_(self.factor)


@dataclass(frozen=True, slots=True)
class PositionEmbedding:
    """Learned positions on top of tokens. table: [context_len, H]."""

    tokens: Embedding
    table: Tensor

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Rows of both, added."""
        return self.tokens(tokens, positions).add_(F.embedding(positions, self.table))


@dataclass(frozen=True, slots=True)
class NormThenRotate:
    """Every head of q and k is normalised before it is rotated (Qwen 3, Gemma 3)."""

    norm: Norm

    def __call__(self, qk: Tensor, turns: Tensor) -> None:
        """In place."""
        rotate(qk.copy_(self.norm(qk)), turns)


def leave(qk: Tensor, turns: Tensor) -> None:
    """For models whose positions are in the embedding."""


def silu_gated(x: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side (SwiGLU)."""
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def gelu_gated(x: Tensor) -> Tensor:
    """gelu(gate) * up, by the tanh formula (GeGLU)."""
    gate, up = x.chunk(2, dim=1)
    return F.gelu(gate, approximate="tanh").mul_(up)


ACTIVATIONS: Mapping[Activation, Part] = {"silu": silu_gated, "gelu_tanh": gelu_gated, "relu": F.relu_}
