"""Normalisations of rows. Knows weights; must not know what is normalised.

RMS takes four kernels instead of torch's thirteen: at one row, launching them is what a norm costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x * weight / sqrt(mean(x^2) + eps), rewritten as x * (weight sqrt(H)) / hypot(|x|, sqrt(H eps)), in fp32."""

    gain: Tensor  # weight sqrt(H), [H], or [heads, H] where each head has its own
    floor: Tensor  # sqrt(H eps), a scalar

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "RmsNorm":
        """The norm of `weight` [..., H], on its device."""
        size = weight.shape[-1]
        floor = torch.tensor((size * eps) ** 0.5, device=weight.device)
        return cls(weight.float() * size**0.5, floor)

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh tensor like x [M, ..., H]; each row's bits are independent of the other rows and of M."""
        x32 = x.float()
        length = torch.hypot(torch.linalg.vector_norm(x32, dim=-1, keepdim=True), self.floor)
        return (x32 * self.gain).div_(length).to(x.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) * weight / sqrt(var(x) + eps) + bias, in fp32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh tensor like x [M, H]."""
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
