"""Milliseconds of a step of a Llama-7B-shaped model, as in SpecInfer's Figure 11, and where they go."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from gpu_check.model import LLAMA_7B, TINY, Size, make_decoder
from treecore.model.batch import ForwardBatch
from treecore.model.decoder import Decoder
from treecore.model.graphs import GraphedDecoder
from treecore.model.kernels.choose import Keys, choose_tokens
from treecore.model.kv_pool import KvPool
from treecore.testing.kernel_cases import random_tree
from treecore.testing.segments import path_segments, region_len, tree_segments

NODES, BATCHES, CONTEXTS = (1, 4, 16, 64), (1, 4, 16), (128, 1024)
_COPIED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class _Plan:
    size: Size
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int


_FULL = _Plan(LLAMA_7B, NODES, BATCHES, CONTEXTS, 7)
_REHEARSAL = _Plan(TINY, (3,), (2,), (8,), 1)


def print_tables(device: str) -> None:
    """Both tables; bf16, random weights."""
    plan = _REHEARSAL if device == "cpu" else _FULL
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    decoder = make_decoder(plan.size, device, dtype, "triton")
    plan = _fitting(plan, dtype) if device == "cuda" else plan
    pool = _filled_pool(decoder, plan)
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; weights {_weight_bytes(plan.size, dtype) / 1e9:.1f} GB")
    print("nodes  batch  context  tree ms  paths ms  graph ms  host ms  attention  tokens  rest  of copy bandwidth")
    for context in plan.contexts:
        for batch in plan.batches:
            for nodes in plan.nodes:
                print(_line(decoder, pool, plan, (nodes, batch, context), bandwidth))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(_COPIED_BYTES if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / (timed_ms(lambda: target.copy_(source), device, 5) / 1e3)


def timed_ms(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median wall time, the device's work included; two rounds first to compile and warm up."""

    def once() -> float:
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    times = [once() for _ in range(repeats + 2)]
    return median(times[2:])


def _line(decoder: Decoder, pool: KvPool, plan: _Plan, shape: tuple[int, int, int], bandwidth: float) -> str:
    nodes, batch, context = shape
    device, vocab = decoder.device.type, plan.size.vocab
    parents = random_tree(nodes, 1)
    tree = ForwardBatch.from_segments(tree_segments(parents, context, batch, vocab))
    paths = ForwardBatch.from_segments(path_segments(parents, context, batch, vocab))

    def measured(work: Callable[[], object]) -> float:
        return timed_ms(work, device, plan.repeats)

    tree_ms = measured(lambda: decoder.forward(tree, pool))
    paths_ms = measured(lambda: decoder.forward(paths, pool))
    graph_ms = measured(_graphed(decoder, pool, tree)) if device == "cuda" else float("nan")
    host_ms = measured(lambda: decoder.prepare(tree))
    attention_ms = measured(_attention(decoder, pool, tree)) * plan.size.layers
    token_ms = measured(_tokens(tree, vocab, device))
    rest = tree_ms - host_ms - attention_ms
    kv_bytes = batch * context * pool.kv[:, 0].numel() * pool.kv.element_size()
    share = (_weight_bytes(plan.size, pool.kv.dtype) + kv_bytes) / (tree_ms / 1e3) / bandwidth
    figures = f"{tree_ms:7.2f}  {paths_ms:8.2f}  {graph_ms:8.2f}  {host_ms:7.2f}  {attention_ms:9.2f}  {token_ms:6.2f}"
    return f"{nodes:5}  {batch:5}  {context:7}  {figures}  {rest:4.1f}  {share:6.0%}"


def _filled_pool(decoder: Decoder, plan: _Plan) -> KvPool:
    pool = decoder.new_pool(max(plan.batches) * region_len(max(plan.contexts)), num_spare=1)
    pool.kv.normal_()
    return pool


def _fitting(plan: _Plan, dtype: torch.dtype) -> _Plan:
    """Without the batches whose cache this card has no memory for."""
    size, (free, _) = plan.size, torch.cuda.mem_get_info()
    slot_bytes = 2 * size.layers * size.hidden // size.heads * size.kv_heads * dtype.itemsize
    most = int(0.8 * free) // (slot_bytes * region_len(max(plan.contexts)))
    return replace(plan, batches=tuple(batch for batch in plan.batches if batch <= max(most, 1)))


def _graphed(decoder: Decoder, pool: KvPool, batch: ForwardBatch) -> Callable[[], object]:
    graphed = GraphedDecoder(decoder)
    graphed.adopt(pool)
    return lambda: graphed.forward(batch, pool)


def _attention(decoder: Decoder, pool: KvPool, batch: ForwardBatch) -> Callable[[], object]:
    """One layer's, on random q."""
    prepared = decoder.prepare(batch)
    spec = decoder.spec
    q = torch.randn(len(batch.tokens), spec.num_heads, spec.head_dim, device=pool.kv.device).to(pool.kv.dtype)
    return lambda: decoder.attention(q, pool.layer(0), prepared.plans[0])


def _tokens(batch: ForwardBatch, vocab: int, device: str) -> Callable[[], object]:
    num_rows = len(batch.tokens)
    logits = torch.randn(num_rows, vocab, device=device)
    seeds = torch.ones(num_rows, dtype=torch.int64, device=device)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    keys = Keys(seeds, positions, torch.full((num_rows,), 0.8, device=device))
    return lambda: choose_tokens(logits, keys)


def _weight_bytes(size: Size, dtype: torch.dtype) -> int:
    kv = size.hidden // size.heads * size.kv_heads
    layer = size.hidden * (2 * size.hidden + 2 * kv + 3 * size.inner)
    return (size.layers * layer + size.vocab * size.hidden) * dtype.itemsize
