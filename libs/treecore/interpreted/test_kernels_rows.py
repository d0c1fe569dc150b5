"""KV compaction against torch's own indexing; what launchers refuse; the interpreter's repaired bf16."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treecore.model.kernels.attend import Scoring, attend, choose_tiling, to_device
from treecore.model.kernels.compaction import MAX_ROWS, move_rows
from treecore.testing.kernel_cases import Case, make_inputs, plan, star


@settings(max_examples=20)
@given(st.data())
def test_rows_move_as_if_all_were_read_first(data: st.DataObject) -> None:
    """Destinations that are sources of other rows, in any order, in all layers and nothing else."""
    slots = st.lists(st.integers(0, 39), unique=True, max_size=20)
    dst = np.array(data.draw(slots), np.int64)
    src = np.array(data.draw(st.lists(st.integers(0, 39), min_size=len(dst), max_size=len(dst))), np.int64)
    kv = torch.randn(2, 40, 2, 3, 5)
    wanted = kv.clone()
    wanted[:, dst] = kv[:, src]
    move_rows(kv, src, dst)
    assert torch.equal(kv, wanted)


@pytest.mark.parametrize(
    ("src", "dst", "name"),
    [([0], [40], "dst_slots"), ([-1], [0], "src_slots"), ([0, 1], [2, 2], "dst_slots"), ([0, 1], [2], "dst_slots")],
)
def test_moves_beyond_the_pool_are_refused(src: list[int], dst: list[int], name: str) -> None:
    """Before a pointer is made of them."""
    with pytest.raises(ValueError, match=name):
        move_rows(torch.zeros(1, 40, 2, 1, 4), np.array(src), np.array(dst))


def test_more_rows_than_a_program_holds_move_too() -> None:
    """By torch's own indexing."""
    kv = torch.randn(1, 1000, 2, 1, 4)
    src, dst = np.arange(MAX_ROWS + 1) + 7, np.arange(MAX_ROWS + 1)
    wanted = kv.clone()
    wanted[:, dst] = kv[:, src]
    move_rows(kv, src, dst)
    assert torch.equal(kv, wanted)


def misfits(q: Tensor, kv: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Per expected message a q and a kv that do not go together."""
    return {
        "q: 2 dimensions": (q[0], kv),
        "q: torch.float64": (q.double(), kv),
        "q: strides": (q.transpose(0, 1).contiguous().transpose(0, 1), kv),
        "kv: torch.bfloat16": (q, kv.bfloat16()),
        "kv: shape": (q, kv[:, :1]),
        "kv: strides": (q, kv.repeat_interleave(2, dim=0)[::2]),
        "kv: 3 heads": (q, kv.repeat(1, 1, 3, 1)),
        "work.starts": (q.repeat(2, 1, 1), kv),
    }


@pytest.mark.parametrize("message", misfits(torch.zeros(2, 2, 4), torch.zeros(16, 2, 1, 4)))
def test_attention_refuses_what_does_not_fit_by_name(message: str) -> None:
    """A wrong pointer would read anything."""
    case = Case((3,), (star(4),), group_size=2)
    inputs = make_inputs(case)
    tiling = choose_tiling("fast", 2, 4, torch.float32)
    work = to_device(plan(case, inputs, "fast"), "fast", tiling, block_len=16, has_window=False, device=inputs.q.device)
    q, kv = misfits(inputs.q, inputs.kv)[message]
    with pytest.raises(ValueError, match=message):
        attend(q, kv, work, Scoring(1.0))


def test_free_slots_are_never_read(device: str) -> None:
    """The same bits whatever the free slots hold."""
    case = Case((20, 5), (star(4), star(3)))
    inputs = make_inputs(case, device)
    tiling = choose_tiling("fast", 2, 4, torch.float32)
    work = to_device(plan(case, inputs, "fast"), "fast", tiling, block_len=16, has_window=False, device=inputs.q.device)
    clean = replace(inputs, kv=inputs.kv.nan_to_num(1e30))
    assert torch.equal(attend(inputs.q, inputs.kv, work, Scoring(1.0)), attend(clean.q, clean.kv, work, Scoring(1.0)))


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    out = tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place))
    tl.store(out_ptr + place, out.to(tl.bfloat16))


@triton.jit
def _sum(a_ptr, out_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out_ptr + place, tl.load(a_ptr + place) + tl.load(a_ptr + place))


def test_bf16_products_and_rounding_are_those_of_torch(device: str) -> None:
    """The shim that all bf16 tests stand on."""
    a, b = torch.randn(2, 16, 16, device=device).bfloat16()
    out = torch.empty_like(a)
    _product[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, (a.float() @ b.float()).bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.skipif(os.environ["ESPALIER_KERNEL_DEVICE"] == "cuda", reason="only the interpreter refuses")
def test_elementwise_bf16_raises() -> None:
    """Where the interpreter would give garbage."""
    with pytest.raises(Exception, match="cast to fp32 first"):
        _sum[(1,)](torch.ones(16).bfloat16(), torch.ones(16).bfloat16(), 16)
