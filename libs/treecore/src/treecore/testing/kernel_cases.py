"""Inputs for tree-attention kernels, and a slow float64 oracle. Knows tensors; runs on a GPU as well as interpreted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treecore.model.kernels.attend import Scoring, attend, choose_tiling, to_device
from treecore.model.kernels.work import SegmentView, Tiling, Variant, Work, plan_work
from treecore.topology import ancestor_mask

_SPARE_BLOCKS = 7  # that no segment has


@dataclass(frozen=True, slots=True)
class Case:
    """Segments by their committed rows in front (contexts) and their trees' parents; the model's shape."""

    contexts: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    block_len: int = 16
    group_size: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    soft_cap: float | None = None
    window: int | None = None

    @property
    def scoring(self) -> Scoring:
        """As the Llama family has it."""
        return Scoring(self.head_dim**-0.5, self.soft_cap)


@dataclass(frozen=True, slots=True)
class Inputs:
    """q [R, num_heads, D]; kv [num_slots, 2, num_kv_heads, D], NaN wherever no segment has a row."""

    q: Tensor
    kv: Tensor
    segments: tuple[SegmentView, ...]


def chain(num_nodes: int) -> tuple[int, ...]:
    """One path."""
    return tuple(range(-1, num_nodes - 1))


def star(num_nodes: int) -> tuple[int, ...]:
    """A root and its children."""
    return (-1, *[0] * (num_nodes - 1))


def random_tree(num_nodes: int, seed: int) -> tuple[int, ...]:
    """Every node below any earlier one."""
    rng = np.random.default_rng(seed)
    return (-1, *[int(rng.integers(0, node)) for node in range(1, num_nodes)])


FAST: Mapping[str, Case] = {
    "one token, no context": Case((0,), (chain(1),), group_size=1),
    "one token, long context": Case((1500,), (chain(1),), group_size=4, head_dim=128),
    "130 nodes, several words": Case(
        (0, 64), (random_tree(130, 1), star(65)), block_len=8, group_size=2, dtype=torch.bfloat16
    ),
    "130 nodes in a chain": Case((250,), (chain(130),), block_len=32, group_size=3),
    "64 nodes, wide heads": Case((500,), (random_tree(64, 2),), group_size=8, head_dim=128, dtype=torch.bfloat16),
    "two KV heads": Case((257, 1), (random_tree(9, 3), star(3)), group_size=4, num_kv_heads=2, dtype=torch.bfloat16),
    "odd groups and heads": Case((70, 3), (star(5), random_tree(7, 4)), block_len=8, group_size=7, head_dim=80),
    "more heads than tile rows": Case((33,), (random_tree(4, 5),), group_size=32),
    "soft cap": Case((130,), (random_tree(20, 6),), soft_cap=3.0, dtype=torch.bfloat16),
    "window within the prefix": Case((700, 90), (random_tree(20, 7), chain(4)), window=100),
    "window within the tree": Case((20, 2), (chain(9), random_tree(12, 8)), window=4, group_size=3),
    "a chunk of prefill": Case((300,), (chain(200),), group_size=4, dtype=torch.bfloat16),
}
INVARIANT: Mapping[str, Case] = {
    "one token, no context": Case((0,), (chain(1),), group_size=1),
    "over a split's end": Case((250, 3), (chain(12), star(3)), group_size=4, dtype=torch.bfloat16),
    "random trees": Case((300, 40), (random_tree(16, 1), random_tree(5, 2)), block_len=8, head_dim=128),
    "window": Case((520, 6), (random_tree(6, 3), chain(7)), window=5, group_size=3, block_len=32),
    "soft cap": Case((100,), (random_tree(6, 4),), soft_cap=3.0, group_size=8, dtype=torch.bfloat16),
}


def make_inputs(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random rows in blocks that are scattered over the pool."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = [context + len(tree) for context, tree in zip(case.contexts, case.trees, strict=True)]
    num_blocks = sum(-(-length // case.block_len) for length in lengths) + _SPARE_BLOCKS
    free = rng.permutation(num_blocks)
    kv = torch.full((num_blocks * case.block_len, 2, case.num_kv_heads, case.head_dim), float("nan"))
    segments, first_row = [], 0
    for context, tree, length in zip(case.contexts, case.trees, lengths, strict=True):
        blocks, free = np.split(free, [-(-length // case.block_len)])
        slots = (blocks[:, None] * case.block_len + np.arange(case.block_len)).ravel()[:length]
        kv[slots] = torch.randn(length, *kv.shape[1:], generator=generator)
        visible = np.concatenate([np.ones((len(tree), context), np.bool_), _mask(tree)], axis=1)
        segments.append(SegmentView(first_row, len(tree), slots, visible))
        first_row += len(tree)
    q = torch.randn(first_row, case.num_kv_heads * case.group_size, case.head_dim, generator=generator)
    return Inputs(q.to(device, case.dtype), kv.to(device, case.dtype), tuple(segments))


def plan(case: Case, inputs: Inputs, variant: Variant) -> Work:
    """The work of all segments in one launch."""
    return plan_work(variant, inputs.segments, _tiling(case, inputs, variant), case.block_len, case.window)


def run_kernel(case: Case, inputs: Inputs, variant: Variant, work: Work | None = None) -> Tensor:
    """The kernels' output, [R, num_heads, D]."""
    on_device = to_device(
        work or plan(case, inputs, variant),
        variant,
        _tiling(case, inputs, variant),
        block_len=case.block_len,
        has_window=case.window is not None,
        device=inputs.q.device,
    )
    return attend(inputs.q, inputs.kv, on_device, case.scoring)


def run_alone(case: Case, inputs: Inputs, segment: SegmentView, idx: int, variant: Variant = "invariant") -> Tensor:
    """The output of one row by itself behind its own path, which is copied to a cache of its own: [num_heads, D]."""
    slots = torch.from_numpy(segment.slots[segment.seen[idx]]).to(inputs.kv.device)
    num_slots = -(-len(slots) // case.block_len) * case.block_len
    kv = inputs.kv.new_full((num_slots, *inputs.kv.shape[1:]), float("nan"))
    kv[: len(slots)] = inputs.kv[slots]
    view = SegmentView(0, 1, np.arange(len(slots)), None)
    return run_kernel(case, Inputs(inputs.q[segment.first_row + idx][None].contiguous(), kv, (view,)), variant)[0]


def run_oracle(case: Case, inputs: Inputs) -> Tensor:
    """The same by its definition, one row after another, float64 on the CPU."""
    kv = inputs.kv.cpu().double()
    rows = [
        _attend_row(case, inputs, kv, segment, idx) for segment in inputs.segments for idx in range(segment.num_rows)
    ]
    return torch.stack(rows)


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Of any entry; NaN if there is one."""
    return float((actual.cpu().double() - expected).abs().max())


def tolerance(dtype: torch.dtype) -> float:
    """What rounding explains, for standard normal inputs (kernels.md)."""
    return 5e-6 if dtype is torch.float32 else 1e-2


def _tiling(case: Case, inputs: Inputs, variant: Variant) -> Tiling:
    longest = max(segment.num_rows for segment in inputs.segments)
    return choose_tiling(variant, case.group_size, longest, case.dtype)


def _mask(tree: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    return ancestor_mask(np.array(tree, np.int32))


def _attend_row(case: Case, inputs: Inputs, kv: Tensor, segment: SegmentView, idx: int) -> Tensor:
    columns = np.flatnonzero(segment.seen[idx])
    columns = columns if case.window is None else columns[-case.window :]
    k, v = kv[segment.slots[columns]].repeat_interleave(case.group_size, dim=2).unbind(1)
    scores = torch.einsum("hd,chd->hc", inputs.q[segment.first_row + idx].cpu().double(), k) * case.scoring.scale
    if case.soft_cap is not None:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    return torch.einsum("hc,chd->hd", scores.softmax(-1), v)
