"""The invariant kernel: a node's bits are those of its path alone, whatever tree, batch or chunk it is computed in."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from treecore.model.kernels.work import SegmentView
from treecore.testing.kernel_cases import Case, Inputs, chain, make_inputs, random_tree, run_alone, run_kernel, star

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fixed_order(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The interpreter's dot is BLAS, which minds where in a tile a row stands; matrix units do not."""
    if device == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder  # noqa: PLC0415

        from treecore.testing.bf16_interpreter import dot_in_fixed_order  # noqa: PLC0415

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_fixed_order)


def pick(inputs: Inputs, num_rows: int) -> list[tuple[SegmentView, int]]:
    """Some rows: the first, the last and random ones of each segment."""
    rng = np.random.default_rng(0)
    return [
        (segment, int(idx))
        for segment in inputs.segments
        for idx in {0, segment.num_rows - 1, *rng.integers(0, segment.num_rows, num_rows)}
    ]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((300,), (random_tree(20, 1),), group_size=3), id="in a tree"),
        pytest.param(Case((250,), (chain(20),), block_len=8), id="over a split's end"),
        pytest.param(Case((505,), (star(12),), head_dim=128, window=40), id="in a window"),
        pytest.param(Case((40, 300), (chain(30), random_tree(4, 2)), group_size=4), id="beside a chunk of prefill"),
        pytest.param(Case((90,) * 16, (star(2),) * 16), id="in a batch of 16"),
    ],
)
def test_a_row_has_the_bits_it_has_alone(case: Case, dtype: torch.dtype, device: str) -> None:
    """Same q, same K and V of the path, other slots, other company."""
    case = replace(case, dtype=dtype)
    inputs = make_inputs(case, device)
    together = run_kernel(case, inputs, "invariant")
    for segment, idx in pick(inputs, 2 if len(inputs.segments) < 3 else 0):
        assert torch.equal(together[segment.first_row + idx], run_alone(case, inputs, segment, idx))


def test_the_fast_kernel_would_fail_this_test(device: str) -> None:
    """Ancestors in other columns change the order of sums: the property is not free, and the test can bite."""
    case = Case((300,), (random_tree(20, 1),), group_size=3)
    inputs = make_inputs(case, device)
    together = run_kernel(case, inputs, "fast")
    rows = [(segment, idx) for segment, idx in pick(inputs, 6)]
    assert not all(
        torch.equal(together[segment.first_row + idx], run_alone(case, inputs, segment, idx)) for segment, idx in rows
    )
