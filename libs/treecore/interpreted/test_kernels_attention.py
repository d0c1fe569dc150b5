"""Both attention kernels against a float64 oracle, over caches whose free slots are NaN; planted mutants are caught."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treecore.model.kernels.work import Variant
from treecore.testing.kernel_cases import (
    FAST,
    INVARIANT,
    Case,
    largest_error,
    make_inputs,
    plan,
    random_tree,
    run_kernel,
    run_oracle,
    star,
    tolerance,
)

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        *[pytest.param("fast", case, id=f"fast: {name}") for name, case in FAST.items()],
        *[pytest.param("invariant", case, id=f"invariant: {name}") for name, case in INVARIANT.items()],
    ],
)
def test_kernels_equal_the_oracle(variant: Variant, case: Case, device: str) -> None:
    """Every row and head; a NaN from a free slot would show."""
    inputs = make_inputs(case, device)
    assert largest_error(run_kernel(case, inputs, variant), run_oracle(case, inputs)) <= tolerance(case.dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small ones of every shape."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    return Case(
        contexts=tuple(draw(st.integers(0, 150)) for _ in sizes),
        trees=tuple(random_tree(size, draw(st.integers(0, 99))) for size in sizes),
        block_len=draw(st.sampled_from([8, 16, 32])),
        group_size=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([64, 128])),
        dtype=draw(st.sampled_from([FP32, BF16])),
        window=draw(st.sampled_from([None, None, 1, 40])),
        soft_cap=draw(st.sampled_from([None, None, 20.0])),
    )


@settings(max_examples=20)
@given(cases())
def test_any_shape_equals_the_oracle(case: Case) -> None:
    """Both variants on the same inputs."""
    inputs = make_inputs(case, _device())
    wanted = run_oracle(case, inputs)
    for variant in ("fast", "invariant"):
        assert largest_error(run_kernel(case, inputs, variant), wanted) <= tolerance(case.dtype)


def test_the_oracle_sees_a_mask_that_is_off_by_one_bit(device: str) -> None:
    """Mutant: every node sees its left neighbour's bits."""
    case = Case((70,), (random_tree(12, 1),))
    inputs = make_inputs(case, device)
    work = plan(case, inputs, "fast")
    shifted = replace(work, words=work.words << 1)
    assert not largest_error(run_kernel(case, inputs, "fast", shifted), run_oracle(case, inputs)) <= 1e-2


@pytest.mark.parametrize("variant", ["fast", "invariant"])
def test_the_oracle_sees_a_prefix_that_is_off_by_one(variant: Variant, device: str) -> None:
    """Mutant: the columns end one too early or one too late."""
    case = Case((70,), (star(6),))
    inputs = make_inputs(case, device)
    work = plan(case, inputs, variant)
    for error in (-1, 1):
        items = work.items + np.array([0, 0, 0, error, 0], np.int32)
        moved = replace(work, items=items, tails=work.tails)
        assert not largest_error(run_kernel(case, inputs, variant, moved), run_oracle(case, inputs)) <= 1e-2


def _device() -> str:
    """For hypothesis, which takes no fixture of this scope."""
    import os  # noqa: PLC0415

    return os.environ["ESPALIER_KERNEL_DEVICE"]
