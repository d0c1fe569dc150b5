"""Launches the tree-attention kernels: checks every tensor first, takes scratch memory, picks no shape by measuring.

Knows tensors on one device; what the work is comes from treecore.model.kernels.work.
"""

from dataclasses import dataclass
from math import e, log2
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from treecore.model.kernels.check import check_tensor
from treecore.model.kernels.tree_attention import fast_partials, invariant_partials, merge_partials
from treecore.model.kernels.work import TILE_COLUMNS, Tiling, Variant, Work

MAX_HEAD_DIM = 256
SMALL_BLOCK_M, LARGE_BLOCK_M = 16, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARTIAL_KERNELS = {"fast": fast_partials, "invariant": invariant_partials}


@dataclass(frozen=True, slots=True)
class Scoring:
    """scale: of q k. soft_cap: scores become cap tanh(score / cap); None leaves them."""

    scale: float
    soft_cap: float | None = None

    @property
    def factors(self) -> tuple[float, float]:
        """`scale` and `cap` as the kernels want them: scores in units of log2."""
        if self.soft_cap is None:
            return self.scale * log2(e), 0.0
        return self.scale / self.soft_cap * -2 * log2(e), self.soft_cap * log2(e)


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A Work on the device. One serves all layers that share a window."""

    variant: Variant
    tiling: Tiling
    block_len: int
    has_window: bool
    items: Tensor
    rows: Tensor
    partials: Tensor
    tables: Tensor
    words: Tensor
    lows: Tensor
    tails: Tensor
    starts: Tensor
    num_partials: int


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """All that a kernel is specialised for. Nothing is tuned at run time: the same model has the same machine code."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tiling: Tiling
    block_len: int
    has_window: bool

    @classmethod
    def of(
        cls, work: DeviceWork, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "KernelShapes":
        """The shapes of `work` for this model."""
        return cls(num_heads, num_kv_heads, head_dim, dtype, work.tiling, work.block_len, work.has_window)

    def partials(self, *, soft_cap: bool) -> dict[str, Any]:
        """Of fast_partials and invariant_partials."""
        num_warps, num_stages = self._pace()
        return {
            "NUM_HEADS": self.num_heads,
            "GROUP": self.num_heads // self.num_kv_heads,
            "TILE_HEADS": self.tiling.tile_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_LEN": self.block_len,
            "BLOCK_M": self.tiling.block_m,
            "BLOCK_N": TILE_COLUMNS,
            "BLOCK_D": self._block_d(),
            "SOFT_CAP": soft_cap,
            "WINDOW": self.has_window,
            "num_warps": num_warps,
            "num_stages": num_stages,
        }

    def merge(self) -> dict[str, Any]:
        """Of merge_partials."""
        return {
            "NUM_HEADS": self.num_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_H": min(8, triton.next_power_of_2(self.num_heads)),
            "BLOCK_D": self._block_d(),
            "num_warps": 4,
        }

    def _pace(self) -> tuple[int, int]:
        """Warps and pipeline stages: those with which no register spills on sm_80, 86 and 90 (test_kernels_ahead)."""
        if self.dtype is torch.float32 and self._block_d() <= 64:
            return 8, 2
        return (8, 2) if self.tiling.block_m == LARGE_BLOCK_M else (4, 3)

    def _block_d(self) -> int:
        return max(16, int(triton.next_power_of_2(self.head_dim)))


def choose_tiling(variant: Variant, group_size: int, longest: int, dtype: torch.dtype) -> Tiling:
    """16 tile rows where the longest segment (in rows) needs no more, else 64.

    Always 16 in fp32, which has no registers for more, and in the invariant kernel, which knows one shape only.
    """
    is_small = variant == "invariant" or dtype is torch.float32 or longest * group_size <= SMALL_BLOCK_M
    return Tiling.of(group_size, SMALL_BLOCK_M if is_small else LARGE_BLOCK_M)


def to_device(
    work: Work, variant: Variant, tiling: Tiling, *, block_len: int, has_window: bool, device: torch.device
) -> DeviceWork:
    """Copies `work` to the device in one transfer."""
    int32s = (work.items, work.rows, work.partials, work.tables, work.lows, work.tails, work.starts)
    words, items, rows, partials, tables, lows, tails, starts = _upload([work.words, *int32s], device)
    return DeviceWork(
        variant,
        tiling,
        block_len,
        has_window,
        items=items,
        rows=rows,
        partials=partials,
        tables=tables,
        words=words,
        lows=lows,
        tails=tails,
        starts=starts,
        num_partials=work.num_partials,
    )


def attend(q: Tensor, kv: Tensor, work: DeviceWork, scoring: Scoring) -> Tensor:
    """Attention of all rows: [R, num_heads, D] in the dtype of q.

    q: [R, num_heads, D]. kv: one layer of the pool, [num_slots, 2, num_kv_heads, D]. Raises ValueError naming the
    tensor that does not fit.
    """
    _check(q, kv, work)
    num_rows, num_heads, head_dim = q.shape
    scale, cap = scoring.factors
    out = torch.empty_like(q)
    acc = torch.empty(work.num_partials, num_heads, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(work.num_partials, num_heads, 2, dtype=torch.float32, device=q.device)
    shapes = KernelShapes.of(work, num_heads, kv.shape[2], head_dim, q.dtype)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # triton launches on the current device
        _PARTIAL_KERNELS[work.variant][(len(work.items), num_heads // work.tiling.tile_heads)](
            q,
            kv,
            acc,
            stats,
            work.items,
            work.rows,
            work.partials,
            work.tables,
            work.words,
            work.lows,
            work.tails,
            work.tables.shape[1],
            work.words.shape[1],
            scale,
            cap,
            **shapes.partials(soft_cap=scoring.soft_cap is not None),
        )
        merge = shapes.merge()
        merge_partials[(num_rows, triton.cdiv(num_heads, merge["BLOCK_H"]))](acc, stats, work.starts, out, **merge)
    return out


def _check(q: Tensor, kv: Tensor, work: DeviceWork) -> None:
    check_tensor("q", q, ndim=3, dtypes=DTYPES)
    num_rows, num_heads, head_dim = q.shape
    check_tensor("kv", kv, shape=(-1, 2, -1, head_dim), dtypes=(q.dtype,), like=q)
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"q: a head dimension of {head_dim}; at most {MAX_HEAD_DIM}")
    if num_heads % kv.shape[2] or (num_heads // kv.shape[2]) % work.tiling.tile_heads:
        raise ValueError(f"kv: {kv.shape[2]} heads do not divide {num_heads} query heads as the work is cut")
    check_tensor("work.starts", work.starts, shape=(num_rows + 1,), dtypes=(torch.int32,), like=q)


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Views of one tensor on the device, each array at a multiple of 16 bytes; the int64 ones come out as int64."""
    padded = [np.frombuffer(array.tobytes().ljust(-(-array.nbytes // 16) * 16, b"\0"), np.uint8) for array in arrays]
    joined = torch.from_numpy(np.concatenate(padded))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    parts = torch.split(joined, [len(part) for part in padded])
    kinds = [torch.from_numpy(array).dtype for array in arrays]
    return [
        part[: array.nbytes].view(kind).view(array.shape)
        for part, kind, array in zip(parts, kinds, arrays, strict=True)
    ]
