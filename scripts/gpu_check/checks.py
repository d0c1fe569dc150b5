"""What must hold on hardware. Each check returns None, or in one line what is wrong."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from gpu_check.model import TINY, make_decoder
from treecore.model.batch import ForwardBatch
from treecore.model.graphs import GraphedDecoder, capture_cuda
from treecore.model.kernels.choose import Keys, choose_tokens
from treecore.model.kernels.compaction import move_rows
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.sampling import best_tokens_of_nodes
from treecore.testing.kernel_cases import (
    FAST,
    INVARIANT,
    Case,
    chain,
    largest_error,
    make_inputs,
    random_tree,
    run_alone,
    run_kernel,
    run_oracle,
    star,
    tolerance,
)
from treecore.testing.segments import tree_segments

BF16, FP32 = torch.bfloat16, torch.float32
_REHEARSED = ("one token, no context", "soft cap")


def check_attention(device: str) -> str | None:
    """Every case of the tests, in both precisions, against float64."""
    for variant, cases in (("fast", FAST), ("invariant", INVARIANT)):
        for name, case in _some(cases, device).items():
            for dtype in (FP32, BF16):
                case = replace(case, dtype=dtype)  # noqa: PLW2901
                inputs = make_inputs(case, device)
                error = largest_error(run_kernel(case, inputs, variant), run_oracle(case, inputs))
                if not error <= tolerance(dtype):
                    return f"{variant}, {name}, {dtype}: off by {error}"
    return None


def check_repeats(device: str) -> str | None:
    """A race gives other bits now and then: the same launch 50 times, and compaction against torch's indexing."""
    for name, case in _some(FAST, device).items():
        inputs = make_inputs(case, device)
        first = run_kernel(case, inputs, "fast")
        if not all(torch.equal(first, run_kernel(case, inputs, "fast")) for _ in range(_times(50, device))):
            return f"{name}: other bits when it ran again"
    rng = np.random.default_rng(0)
    for _ in range(_times(200, device)):
        kv = torch.randn(4, 512, 2, 8, 128, device=device).to(BF16)
        path = np.sort(rng.choice(200, int(rng.integers(1, 60)), replace=False)) + 100
        dst = np.arange(100, 100 + len(path))
        wanted = kv.clone()
        wanted[:, torch.from_numpy(dst).to(device)] = kv[:, torch.from_numpy(path).to(device)]
        move_rows(kv, path, dst)
        if not torch.equal(kv, wanted):
            return "compaction: a row was overwritten before it was read"
    return None


def check_invariance(device: str) -> str | None:
    """Bits of a row alone, in a tree, beside a chunk of prefill and in a batch of 16."""
    cases = {
        "a tree": Case((1000,), (random_tree(64, 1),), group_size=4, num_kv_heads=8, head_dim=128),
        "a chunk of prefill": Case((250, 40), (chain(200), star(5)), group_size=4, head_dim=128),
        "a batch of 16": Case(tuple(range(90, 1050, 60)), (random_tree(9, 2),) * 16, group_size=8, head_dim=64),
    }
    if device == "cpu":
        cases = {"a tree": Case((10,), (star(2),))}
    for name, case in cases.items():
        for dtype in (FP32, BF16):
            case = replace(case, dtype=dtype)  # noqa: PLW2901
            inputs = make_inputs(case, device)
            together = run_kernel(case, inputs, "invariant")
            for segment in inputs.segments:
                for idx in {0, segment.num_rows // 2, segment.num_rows - 1}:
                    if not torch.equal(together[segment.first_row + idx], run_alone(case, inputs, segment, idx)):
                        return f"{name}, {dtype}: row {idx} has other bits alone"
    return None


def check_tokens(device: str) -> str | None:
    """The fused choice against numpy's sampler."""
    for vocab, temperature in ((32000, 0.0), (128256, 0.7), (151936, 1.3)) if device != "cpu" else ((5000, 0.7),):
        num_rows = _times(64, device)
        rows = (np.random.default_rng(vocab).standard_normal((num_rows, vocab)) * 4).astype(np.float32)
        positions, seed = list(range(num_rows)), 2**63 + vocab
        wanted = best_tokens_of_nodes(rows, None, SamplingParams(temperature, 0, 1.0, Seed(seed)), positions)
        keys = Keys(
            torch.from_numpy(np.full(num_rows, seed, np.uint64).view(np.int64)).to(device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.full((num_rows,), temperature, device=device),
        )
        found = choose_tokens(torch.from_numpy(rows).to(device), keys)[1].tolist()
        if found != np.concatenate(wanted).tolist():
            return f"vocabulary {vocab}, temperature {temperature}: other tokens than numpy's"
    return None


def check_decoder(device: str) -> str | None:
    """A small decoder on both backends, fp32, and its graphs' replays against plain steps, up to rounding."""
    decoders = [make_decoder(TINY, device, FP32, name) for name in ("torch", "triton")]
    graphed = GraphedDecoder(decoders[1], _call_again if device == "cpu" else capture_cuda)
    pools = [decoder.new_pool(4096) for decoder in (*decoders, graphed)]
    filling = torch.randn(pools[0].kv.shape, device=device)
    for num_nodes in (1, 5, 6, 8, 7, 30) if device != "cpu" else (5, 6):
        batch = ForwardBatch.from_segments(tree_segments(random_tree(num_nodes, num_nodes), 32, 2, TINY.vocab))
        for pool in pools:
            pool.kv[:, :4096] = filling
        reference, plain, replayed = (
            decoder.forward(batch, pool).clone() for decoder, pool in zip((*decoders, graphed), pools, strict=True)
        )
        if not float((plain - reference).abs().max()) <= 1e-3:
            return f"{num_nodes} nodes: triton and torch differ by {(plain - reference).abs().max()}"
        if not float((replayed - plain).abs().max()) <= 1e-4:
            return f"{num_nodes} nodes: a replayed step differs by {(replayed - plain).abs().max()}"
    return None


CHECKS: dict[str, Callable[[str], str | None]] = {
    "attention against float64": check_attention,
    "the same bits again (races)": check_repeats,
    "bit-invariance": check_invariance,
    "tokens as numpy's": check_tokens,
    "backends and graphs": check_decoder,
}


def _some(cases: dict[str, Case], device: str) -> dict[str, Case]:
    return cases if device != "cpu" else {name: cases[name] for name in _REHEARSED if name in cases}


def _times(count: int, device: str) -> int:
    return count if device != "cpu" else 2


def _call_again(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    logits = compute()
    return lambda: logits.copy_(compute()), logits
