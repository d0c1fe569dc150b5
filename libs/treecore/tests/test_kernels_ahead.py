"""Every kernel that ships, compiled for sm_80, 86 and 90 without a GPU: no spills, no stack, memory that fits."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="an extra, for Linux x86-64")
if triton.__version__ != "3.6.0":
    pytest.skip("registers and shared memory are asserted for the pinned triton 3.6.0 alone", allow_module_level=True)

from treecore.model.kernels.attend import KernelShapes, choose_tiling
from treecore.model.kernels.choose import choose_kernel
from treecore.model.kernels.compaction import move_rows_kernel
from treecore.model.kernels.tree_attention import fast_partials, invariant_partials, merge_partials
from treecore.testing.ahead import SHARED_BYTES, Resources, Specialisation, compile_for

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bf16", FP32: "fp32"}
FLOATS = {"acc_ptr", "stats_ptr", "logits_ptr", "tops_ptr", "temperatures_ptr", "scores_ptr"}
INT64S = {"words_ptr", "moves_ptr"}
NUMBERS = {"scale": "fp32", "cap": "fp32", "layer_stride": "i64"}


def variant(kernel: Any, dtype: torch.dtype, meta: Mapping[str, Any]) -> Specialisation:
    """`kernel` as its launcher starts it."""
    constants = {name: value for name, value in meta.items() if not name.startswith("num_")}
    signature = {name: "constexpr" if name in constants else kind(name, dtype) for name in kernel.arg_names}
    return Specialisation(kernel.__name__, kernel, signature, constants, meta["num_warps"], meta.get("num_stages", 3))


def kind(name: str, dtype: torch.dtype) -> str:
    """Triton's type of an argument."""
    if not name.endswith("_ptr"):
        return NUMBERS.get(name, "i32")
    if name in FLOATS:
        return "*fp32"
    if name in INT64S:
        return "*i64"
    return f"*{NAMES[dtype]}" if name in {"q_ptr", "kv_ptr", "out_ptr"} else "*i32"


def shapes(name: str, dtype: torch.dtype, head_dim: int, longest: int, *, window: bool = False) -> KernelShapes:
    """32 heads, 8 of them KV heads, as in Llama 3 8B and Mistral 7B."""
    tiling = choose_tiling("invariant" if name == "invariant" else "fast", 4, longest, dtype)
    return KernelShapes(32, 8, head_dim, dtype, tiling, 16, window)


def attention(
    name: str, dtype: torch.dtype, head_dim: int, longest: int = 1, *, extras: bool = False
) -> Specialisation:
    """extras: with soft cap and window."""
    kernel = invariant_partials if name == "invariant" else fast_partials
    wanted = shapes(name, dtype, head_dim, longest, window=extras)
    return variant(kernel, dtype, wanted.partials(soft_cap=extras))


VARIANTS = {
    **{
        f"fast bf16 D{dim}, {nodes} nodes": attention("fast", BF16, dim, nodes)
        for dim in (64, 128)
        for nodes in (1, 64)
    },
    **{f"invariant bf16 D{dim}": attention("invariant", BF16, dim) for dim in (64, 128)},
    **{f"fast fp32 D{dim}": attention("fast", FP32, dim, 64) for dim in (64, 128)},
    **{f"invariant fp32 D{dim}": attention("invariant", FP32, dim) for dim in (64, 128)},
    "fast bf16 D128, soft cap, window": attention("fast", BF16, 128, 64, extras=True),
    "merge bf16 D128": variant(merge_partials, BF16, shapes("fast", BF16, 128, 1).merge()),
    "move 16 rows": variant(move_rows_kernel, BF16, {"BLOCK_ROWS": 16, "BLOCK_WIDTH": 256, "num_warps": 4}),
    "choose": variant(choose_kernel, FP32, {"BLOCK": 1024, "num_warps": 4}),
}
BARRIERS = {"move 16 rows": 1}
"""At least so many: what the interpreter cannot test."""


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_fits_the_machine(name: str, capability: int) -> None:
    """Registers, stack, shared memory; wgmma exactly where a tile has 64 rows of bf16 and the machine has it."""
    needed = compile_for(VARIANTS[name], capability)
    assert (needed.stack_bytes, needed.spilled_bytes) == (0, 0), needed
    assert needed.shared_bytes <= SHARED_BYTES[capability], needed
    assert needed.barriers >= BARRIERS.get(name, 0), needed
    assert needed.has_wgmma == (capability == 90 and has_wide_tiles(VARIANTS[name])), needed


def has_wide_tiles(compiled: Specialisation) -> bool:
    """Whether its products have 64 rows of 16-bit numbers."""
    return int(compiled.constants.get("BLOCK_M", 0)) >= 64 and compiled.signature["q_ptr"] == "*bf16"


def test_the_check_sees_a_spill() -> None:
    """fp32 tiles of 64 rows need more registers than there are: that is why none ship."""
    needed: Resources = compile_for(
        Specialisation(
            "too wide",
            fast_partials,
            attention("fast", FP32, 64).signature,
            {**attention("fast", FP32, 64).constants, "BLOCK_M": 64},
            4,
        ),
        86,
    )
    assert needed.spilled_bytes > 0
