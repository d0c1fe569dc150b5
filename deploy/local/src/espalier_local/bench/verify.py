"""`espalier bench verify`: a verification step against nodes, batch and context, by trees and by sequences.

As SpecInfer's Figure 11. "sequences" verifies the same trees with a row for each token of each path, all in one
forward that shares the context's memory. Trees are binary, filled level by level. The shares are of the tree's step, by
torch's profiler; it slows small operations down, so they are estimates. Sampling is at temperature 0.8.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from espalier_local.bench.table import table
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from espalier_local.system import SystemConfig
from treecore.errors import ConfigError
from treecore.law import Paths
from treecore.noise import Seed
from treecore.params import SamplingParams
from treecore.verify import answer_nodes

if TYPE_CHECKING:
    from torch import Tensor

    from treecore.model.batch import ForwardBatch
    from treecore.model.spec import ModelSpec

_SAMPLED = SamplingParams(0.8, 0, 1.0, Seed(1))
_KINDS = {
    "collectives": ("c10d::", "gloo:", "nccl"),
    "attention": ("scaled_dot_product", "attend", "tree_attention", "combine"),
    "linears": ("linear", "addmm", "aten::mm", "gemm", "mkldnn", "onednn"),
}
_HEAD = (
    "nodes",
    "batch",
    "context",
    "tree ms",
    "sequences ms",
    "ratio",
    "attention",
    "linears",
    "other ops",
    "sampling",
)
_HEAD_ENDS = ("collectives", "host")

Row = tuple[str, ...]
Shape = tuple[int, int, int]
"""Nodes, batch, context."""


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("verify", help="a verification step by nodes, batch and context", description=__doc__)
    parser.add_argument("--nodes", type=positive, nargs="+", default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 4, 16], metavar="N")
    parser.add_argument("--context", type=positive, nargs="+", default=[128, 1024], metavar="TOKENS")
    parser.add_argument("--rounds", type=positive, default=5)
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = system_config(args)
    shapes = [(nodes, batch, context) for context in args.context for batch in args.batch for nodes in args.nodes]
    with _verifier(config, shapes) as bench:
        rows = [bench.row(shape, args.rounds) for shape in tqdm(shapes, unit="shape", leave=False, disable=None)]
        say(bench.title)
    say(table((*_HEAD, *_HEAD_ENDS), rows))
    return 0


class VerifyBench:
    """Forwards of made-up rows; what stands in the cache is random."""

    def __init__(self, decoder: Any, shapes: list[Shape], title: str) -> None:
        from treecore.testing.segments import region_len  # noqa: PLC0415 - imports torch

        spec: ModelSpec = decoder.spec
        for nodes, _, context in shapes:
            if context + nodes > spec.context_len:
                raise ConfigError(f"--context {context} with {nodes} nodes: the model's context is {spec.context_len}")
        self.title = title
        self._decoder = decoder
        num_slots = max(batch * region_len(context) for _, batch, context in shapes)
        self._pool = decoder.new_pool(num_slots)
        self._fill(num_slots, min(num_slots, 1024, spec.context_len))

    def _fill(self, num_slots: int, text_len: int) -> None:
        """Every slot holds a token of some text, at every rank: memory that nobody wrote may hold NaN."""
        from treecore.model.batch import ForwardBatch  # noqa: PLC0415 - imports torch
        from treecore.testing.segments import chain_parents, tree_segments  # noqa: PLC0415

        text = tree_segments(chain_parents(text_len), 0, 1, self._decoder.spec.vocab_size)
        self._forward(ForwardBatch.from_segments(text))
        slots = np.arange(text_len, num_slots)
        self._pool.move(slots % text_len, slots)

    def row(self, shape: Shape, rounds: int) -> Row:
        """One line of the table: medians of interleaved rounds."""
        tree, sequences = self._batches(shape)
        times: dict[str, list[float]] = {"tree": [], "sequences": [], "sampling": [], "waits": []}
        logits = self._forward(tree)
        for _ in range(rounds):
            waited = self._waited_ms()
            times["tree"].append(_timed_ms(lambda: self._forward(tree)))
            times["waits"].append(self._waited_ms() - waited)
            times["sequences"].append(_timed_ms(lambda: self._forward(sequences)))
            times["sampling"].append(_timed_ms(lambda: _sample(logits, shape)))
        ms = {name: median(values) for name, values in times.items()}
        profiled = profiled_ms(lambda: self._forward(tree))
        ops = [profiled[kind] for kind in ("attention", "linears", "other ops")]
        host_ms = max(0.0, ms["tree"] - ms["waits"] - sum(ops))
        parts = [*ops, ms["sampling"], ms["waits"], host_ms]
        step_ms = sum(parts)
        nodes, batch, context = shape
        figures = (f"{ms['tree']:.1f}", f"{ms['sequences']:.1f}", f"{ms['sequences'] / ms['tree']:.2f}")
        return (str(nodes), str(batch), str(context), *figures, *(f"{part / step_ms:.0%}" for part in parts))

    def _batches(self, shape: Shape) -> "tuple[ForwardBatch, ForwardBatch]":
        from treecore.model.batch import ForwardBatch  # noqa: PLC0415 - imports torch
        from treecore.testing.segments import binary_tree, path_segments, tree_segments  # noqa: PLC0415

        nodes, batch, context = shape
        made = (binary_tree(nodes), context, batch, self._decoder.spec.vocab_size)
        return ForwardBatch.from_segments(tree_segments(*made)), ForwardBatch.from_segments(path_segments(*made))

    def _forward(self, batch: "ForwardBatch") -> NDArray[np.float32]:
        logits: Tensor = self._decoder.forward(batch, self._pool)
        return logits.cpu().numpy()

    def _waited_ms(self) -> float:
        """Rank 0's time in collectives; a decoder that is alone has none."""
        return float(getattr(self._decoder, "waited_s", 0.0)) * 1e3


def profiled_ms(work: Callable[[], object]) -> dict[str, float]:
    """How long `work` is in operations of each kind."""
    import torch  # noqa: PLC0415 - seconds that no other command should pay

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    found = dict.fromkeys((*_KINDS, "other ops"), 0.0)
    for event in profile.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e3
    return found


def kind_of(operation: str) -> str:
    """What an operation of torch is for."""
    return next((kind for kind, marks in _KINDS.items() if any(mark in operation for mark in marks)), "other ops")


@contextmanager
def _verifier(config: SystemConfig, shapes: list[Shape]) -> Iterator[VerifyBench]:
    """The model, alone in this process or cut over ranks of which this process is the first."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells when it starts and stops
    import torch  # noqa: PLC0415 - seconds that no other command should pay

    torch.set_num_threads(config.threads)
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    title = f"{config.model.name}, {config.dtype}, {config.threads} thread(s) a rank, TP {tp_size} x PP {pp_size}"
    if tp_size * pp_size == 1:
        from treecore.model.load import load_decoder  # noqa: PLC0415

        yield VerifyBench(load_decoder(config.model.directory, dtype=config.dtype), shapes, title)
        return
    from llm_verifier.group.testing import running_group  # noqa: PLC0415

    with running_group(config.model.directory, tp_size, pp_size, "--dtype", config.dtype) as group:
        yield VerifyBench(group.decoder, shapes, title)


def _sample(logits: NDArray[np.float32], shape: Shape) -> None:
    """Choose the token behind every node, request by request, as the engine does."""
    from treecore.testing.segments import binary_tree  # noqa: PLC0415 - imports torch

    nodes, batch, context = shape
    below: list[tuple[int, ...]] = []
    for parent in binary_tree(nodes):
        below.append((*below[parent], 1) if parent >= 0 else ())
    for idx in range(batch):
        answer_nodes(logits[idx * nodes : (idx + 1) * nodes], _SAMPLED, Paths([1] * context, tuple(below)))


def _timed_ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
