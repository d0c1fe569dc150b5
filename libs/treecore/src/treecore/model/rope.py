"""Rotary position embedding (RoFormer, section 3.4.2) as one complex product. Knows frequencies, nothing of layers.

Pairs (x[i], x[i + D/2]) of the checkpoint are laid side by side at load, in the q and k rows alike. Their dot product
does not change, and a rotation becomes one complex multiplication.
"""

import math

import torch
from torch import Tensor

from treecore.model.spec import LinearScaling, Llama3Scaling, RopeSpec


def rotation_table(rope: RopeSpec | None, head_dim: int, context_len: int, device: torch.device) -> Tensor:
    """complex64 [context_len, 1, head_dim / 2]: the turn of each pair at each position; no pairs without a rope.

    A table, so that a position's turn has the same bits in every batch.
    """
    inverse = torch.empty(0) if rope is None else inverse_frequencies(rope, head_dim)
    angles = torch.arange(context_len, dtype=torch.float32)[:, None] * inverse
    return torch.complex(angles.cos(), angles.sin())[:, None].to(device)


def rotate(x: Tensor, turns: Tensor) -> None:
    """Rotates x [R, heads, head_dim] (pairs side by side) in place by `turns` complex64 [R, 1, head_dim / 2]."""
    if x.dtype is torch.float32:
        _pairs(x).mul_(turns)
    else:
        x.copy_(torch.view_as_real(_pairs(x.float()) * turns).flatten(-2))


def interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a q or k projection, [heads * head_dim, ...], so that rotated pairs lie side by side."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """float32 [head_dim / 2] in radians a position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / rope.theta**exponent
    match rope.scaling:
        case None:
            return inverse
        case LinearScaling(factor):
            return inverse / factor
        case Llama3Scaling() as scaling:
            return _llama3(inverse, scaling)


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keeps wavelengths below original/high, divides those above original/low, and blends in between."""
    wavelength = 2 * math.pi / inverse
    ratio = scaling.original_context_len / wavelength
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))
