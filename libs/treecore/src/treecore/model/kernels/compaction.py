"""KV compaction in Triton: rows of accepted and kept nodes move behind the prefix, in all layers, in one launch.

Knows slots; must not know trees. A destination may be the source of another row, so each program first loads all rows
of its own few columns, waits for the whole block, and only then stores: programs never touch each other's columns.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from treecore.model.kernels.check import check_tensor

MAX_ROWS = 256  # that one program holds; a path and the tree kept below it are shorter, and more rows are torch's
_TILE = 4096  # elements that a program holds in registers at once


@triton.jit
def move_rows_kernel(
    kv_ptr,  # [num_layers, num_slots, width]
    moves_ptr,  # int64 [2, num_rows]: sources, destinations
    num_rows,
    layer_stride,
    width,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """All rows of one layer and BLOCK_WIDTH columns."""
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_inside = (row < num_rows)[:, None] & (column < width)[None, :]
    src = tl.load(moves_ptr + row, mask=row < num_rows, other=0)
    dst = tl.load(moves_ptr + num_rows + row, mask=row < num_rows, other=0)
    layer = kv_ptr + tl.program_id(0).to(tl.int64) * layer_stride
    held = tl.load(layer + src[:, None] * width + column[None, :], mask=is_inside, other=0.0)
    tl.debug_barrier()  # other warps' loads: a store before them would be read as a source
    tl.store(layer + dst[:, None] * width + column[None, :], held, mask=is_inside)


def move_rows(kv: Tensor, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
    """Copies row src_slots[i] to dst_slots[i] in every layer of `kv`, as if all were read before any is written.

    kv: contiguous, [num_layers, num_slots, ...]. Destinations are distinct. Raises ValueError naming what does not fit.
    """
    check_tensor("kv", kv, dtypes=(torch.float32, torch.bfloat16, torch.float16))
    num_layers, num_slots = kv.shape[:2]
    num_rows = len(src_slots)
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if slots.shape != (num_rows,) or np.any((slots < 0) | (slots >= num_slots)):
            raise ValueError(f"{name}: expected {num_rows} slots below {num_slots}")
    if len(np.unique(dst_slots)) != num_rows:
        raise ValueError("dst_slots: two rows would go to one slot")
    if num_rows == 0:
        return
    moves = torch.from_numpy(np.stack([src_slots, dst_slots])).to(kv.device)
    if num_rows > MAX_ROWS:
        kv[:, moves[1]] = kv[:, moves[0]]
        return
    width = kv[0, 0].numel()
    block_rows = triton.next_power_of_2(num_rows)
    block_width = max(16, min(_TILE // block_rows, triton.next_power_of_2(width)))
    with torch.cuda.device_of(kv):
        move_rows_kernel[(num_layers, triton.cdiv(width, block_width))](
            kv, moves, num_rows, num_slots * width, width, BLOCK_ROWS=block_rows, BLOCK_WIDTH=block_width, num_warps=4
        )
