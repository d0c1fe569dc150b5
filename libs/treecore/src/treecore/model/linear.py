"""Weight matrices packed for the machine at hand. Knows kernels and number formats; must not know what a matrix is for.

Which kernel is fastest, and why fp16 packing loses nothing, is measured in docs/decisions/0002-cpu-linears.md.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from treecore.model.invariant import InvariantLinear, Pack, Trial, padded_row_counts

DType = Literal["float32", "bfloat16", "float16"]

FP16_MAX = 65504.0
STORED_STEP_ROWS = 4096
ONEDNN_ROWS = 16  # the row count that oneDNN lays the weight out for: about one tree


class Linear(Protocol):
    """A weight matrix W [out_features, in_features], ready to multiply."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """A fresh x W^T, [M, out_features]. Takes x [M, in_features] in the activation dtype, and keeps it."""
        ...


@dataclass(frozen=True, slots=True)
class Precision:
    """`weight` is the precision that weights are rounded to, `activation` that of activations and the KV cache.

    batch_invariant: a row's bits must not depend on the other rows of a forward (see invariant.py).
    """

    weight: torch.dtype
    activation: torch.dtype
    device: torch.device
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Fp16Linear:
    """FBGEMM: the weight in fp16, times a power of two that `unscale` undoes, exactly; all arithmetic is in fp32."""

    packed: Any
    unscale: float

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T in fp32."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return y if self.unscale == 1.0 else y.mul_(self.unscale)


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """oneDNN with the weight in its own layout; fp32 or bf16 (AMX where the CPU has it)."""

    packed: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T in the weight's dtype."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """torch's own matmul, for devices without a packed form, and as the reference in tests."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T in the weight's dtype."""
        return F.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A weight in its stored dtype, converted a few rows at a time whenever it is used: small and slow."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """A fresh x W^T in the dtype of x."""
        steps = torch.split(self.weight, STORED_STEP_ROWS)
        return torch.cat([F.linear(x, rows.to(x.dtype)) for rows in steps], dim=-1)


def rounded(stored: Tensor, precision: Precision) -> Tensor:
    """A stored weight in the precision of weights; as it is where that loses nothing."""
    return stored if precision.weight is torch.float32 else stored.to(precision.weight)


def choose_precision(dtype: DType, device: torch.device, *, batch_invariant: bool = False) -> Precision:
    """A CPU multiplies fp32, and bf16 where it has kernels; else it computes in fp32 on weights rounded to `dtype`."""
    weight = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if device.type == "cpu" and not (weight is torch.bfloat16 and cpu_has_bf16_kernels()):
        return Precision(weight, torch.float32, device, batch_invariant)
    return Precision(weight, weight, device, batch_invariant)


def pack_linear(weight: Tensor, precision: Precision) -> Linear:
    """The fastest exact form of `weight` [out_features, in_features]. May alias `weight`; mutates nothing."""
    exact = rounded(weight, precision).to(precision.device, precision.activation)
    for pack in _packings(precision):
        linear = pack(exact)
        if linear is not None:
            return linear if not precision.batch_invariant else _invariant(linear, pack, exact, precision)
    raise AssertionError("the last form takes any matrix")


def linear_in_place(weight: Tensor, precision: Precision) -> Linear:
    """A linear over `weight` as it lies there, in the activation dtype: what is written to it later counts."""
    linear = PlainLinear(weight)
    return linear if not precision.batch_invariant else _invariant(linear, PlainLinear, weight, precision)


def linear_as_stored(weight: Tensor, precision: Precision) -> Linear:
    """A linear that takes no more memory than `weight` does in its stored dtype."""
    linear = StoredLinear(weight.to(precision.device))
    return linear if not precision.batch_invariant else _invariant(linear, StoredLinear, weight, precision)


def _packings(precision: Precision) -> tuple[Pack, ...]:
    if precision.device.type != "cpu":
        return (PlainLinear,)
    return (pack_onednn,) if precision.activation is torch.bfloat16 else (pack_fp16, pack_onednn)


def _invariant(linear: Linear, pack: Pack, weight: Tensor, precision: Precision) -> Linear:
    trial = Trial(pack, weight.shape, weight.dtype, precision.activation, precision.device)
    return InvariantLinear(linear, padded_row_counts(trial))


def pack_onednn(weight: Tensor) -> Linear:
    """The oneDNN layout of `weight`, in its dtype; the plain matrix where this build of torch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainLinear(weight.contiguous())
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONEDNN_ROWS)
    return OneDnnLinear(packed)


def pack_fp16(weight: Tensor) -> Fp16Linear | None:
    """`weight` (fp32) for FBGEMM, or None where fp16 cannot hold every entry exactly or FBGEMM is absent."""
    scale = exact_fp16_scale(weight)
    if scale is None or not cpu_has_fbgemm():
        return None
    packed = torch.ops.quantized.linear_prepack_fp16((weight * scale).contiguous(), None)
    return Fp16Linear(packed, 1.0 / scale)


def exact_fp16_scale(weight: Tensor) -> float | None:
    """A power of two s such that fp16 holds every entry of s * `weight` exactly, 1.0 if possible; else None.

    One exists for nearly every bf16 matrix: bf16 has 3 mantissa bits less than fp16, so entries may span 32 binades.
    """
    largest = float(weight.abs().max())
    if not math.isfinite(largest):
        return None
    for scale in (1.0, 2.0 ** (15 - math.frexp(largest or 1.0)[1] + 1)):
        scaled = weight * scale
        if largest * scale <= FP16_MAX and torch.equal(scaled.half().float(), scaled):
            return scale
    return None


@functools.cache
def cpu_has_bf16_kernels() -> bool:
    """Whether oneDNN multiplies bf16 natively on this CPU. It refuses to pack where it does not; so ask once."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=torch.bfloat16), ONEDNN_ROWS)
    except RuntimeError:
        return False
    return True


@functools.cache
def cpu_has_fbgemm() -> bool:
    """Whether this build of torch packs fp16 weights (x86 with AVX2)."""
    try:
        torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 8), None)
    except RuntimeError:
        return False
    return "fbgemm" in torch.backends.quantized.supported_engines
