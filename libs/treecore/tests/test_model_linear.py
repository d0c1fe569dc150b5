"""Packed linears: exact weights, a right choice of packing, and rows that do not depend on the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.model.linear import (
    Fp16Linear,
    OneDnnLinear,
    PlainLinear,
    Precision,
    choose_precision,
    cpu_has_bf16_kernels,
    cpu_has_fbgemm,
    exact_fp16_scale,
    pack_fp16,
    pack_linear,
    pack_onednn,
)

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32, CPU)
needs_fbgemm = pytest.mark.skipif(not cpu_has_fbgemm(), reason="this build of torch has no FBGEMM")


def random_weight(seed: int, shape: tuple[int, int] = (96, 64)) -> torch.Tensor:
    """Standard normal fp32 entries."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unpack(linear: Fp16Linear, in_features: int) -> torch.Tensor:
    """The weight that the linear multiplies with, bit for bit: its product with the unit matrix."""
    return linear(torch.eye(in_features)).T


@needs_fbgemm
@pytest.mark.parametrize("exponent", [0, -40, 30])
def test_packing_keeps_every_bit_of_a_bf16_matrix(exponent: int) -> None:
    """Whatever its magnitude: a power of two brings it into fp16's range and back."""
    weight = (random_weight(0) * 2.0**exponent).bfloat16().float()
    linear = pack_fp16(weight)
    assert linear is not None
    assert torch.equal(unpack(linear, 64), weight)


@needs_fbgemm
def test_packing_keeps_every_bit_of_an_fp16_matrix_subnormals_included() -> None:
    """From fp16's smallest number to its largest."""
    weight = random_weight(1).half().float()
    weight[0, :4] = torch.tensor([65504.0, 2.0**-24, -(2.0**-24) * 3, -0.0])
    linear = pack_fp16(weight)
    assert linear is not None
    assert linear.unscale == 1.0
    assert torch.equal(unpack(linear, 64), weight)


@settings(max_examples=50)
@given(
    values=st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    exponent=st.integers(-60, 60),
)
def test_a_scale_is_a_power_of_two_that_loses_nothing(values: list[float], exponent: int) -> None:
    """If one is found, scaling, rounding to fp16 and unscaling gives the matrix back."""
    weight = torch.tensor([values]) * 2.0**exponent
    scale = exact_fp16_scale(weight)
    if scale is not None:
        assert torch.equal((weight * scale).half().float() / scale, weight)


def test_matrices_that_fp16_cannot_hold_have_no_scale() -> None:
    """Full fp32 mantissas, a range beyond 40 binades, and what is no number."""
    assert exact_fp16_scale(random_weight(2)) is None
    assert exact_fp16_scale(torch.tensor([[1.0, 2.0**-60]])) is None
    assert exact_fp16_scale(torch.tensor([[1.0, float("inf")]])) is None
    assert exact_fp16_scale(torch.tensor([[1.0, float("nan")]])) is None
    assert exact_fp16_scale(torch.zeros(2, 2)) == 1.0


def test_the_choice_of_packing() -> None:
    """Exact in fp16: FBGEMM if there is one. Else oneDNN. On another device: torch's own."""
    half = random_weight(3).half()
    assert isinstance(pack_linear(half, FP32), Fp16Linear if cpu_has_fbgemm() else OneDnnLinear)
    assert isinstance(pack_linear(random_weight(3), FP32), OneDnnLinear)
    assert isinstance(pack_linear(half, Precision(torch.float32, torch.float32, torch.device("meta"))), PlainLinear)


def test_bf16_activations_only_where_the_cpu_multiplies_bf16() -> None:
    """The weights are rounded to bf16 in any case."""
    precision = choose_precision("bfloat16", CPU)
    assert precision.weight is torch.bfloat16
    assert precision.activation is (torch.bfloat16 if cpu_has_bf16_kernels() else torch.float32)
    assert choose_precision("float32", CPU) == FP32
    assert choose_precision("bfloat16", torch.device("meta")).activation is torch.bfloat16


@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 33])
@pytest.mark.parametrize("pack", [pack_onednn, pack_fp16])
def test_products_are_those_of_torch(pack: object, num_rows: int) -> None:
    """Within fp32 rounding; no rows give no rows."""
    weight = random_weight(4).half().float()
    linear = pack(weight)  # type: ignore[operator]
    if linear is None:
        pytest.skip("this build of torch has no FBGEMM")
    x = random_weight(5, (num_rows, 64))
    torch.testing.assert_close(linear(x), PlainLinear(weight)(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pack", [pack_onednn, pack_fp16])
@pytest.mark.parametrize("num_rows", range(2, 34, 3))
def test_a_row_does_not_depend_on_the_other_rows(pack: object, num_rows: int) -> None:
    """Bit-equal while the number of rows is the same (the number itself picks FBGEMM's kernel, and may change bits)."""
    weight = random_weight(6, (200, 576)).half().float()
    linear = pack(weight)  # type: ignore[operator]
    if linear is None:
        pytest.skip("this build of torch has no FBGEMM")
    x, others = random_weight(7, (num_rows, 576)), random_weight(8, (num_rows, 576))
    row = num_rows // 2
    others[row] = x[row]
    assert torch.equal(linear(x)[row], linear(others)[row])
