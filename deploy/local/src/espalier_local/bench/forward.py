"""`espalier bench forward`: the LLM's forward alone: a tree of nodes against one token, and against transformers.

Interleaved in one process and one run, so a slow moment of the machine hits all sides alike.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from espalier_local.bench.peer import TransformersPeer
from espalier_local.bench.prompts import OWN
from espalier_local.bench.table import table
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from treecore.messages import RequestId, VerifyItem
from treecore.noise import Seed
from treecore.params import SamplingParams

if TYPE_CHECKING:
    from treecore.model.held import HeldRequests

_NODES = (1, 2, 4, 8, 16, 32, 64)
_BLOCK_LEN = 16
_REQUEST = RequestId("bench")
_GREEDY = SamplingParams(0.0, 0, 1.0, Seed(0))
_NOTHING = np.empty(0, np.int32)


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("forward", help="tree nodes against one token and transformers", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--no-transformers", action="store_true")
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = system_config(args)
    import torch  # noqa: PLC0415 - seconds that no other command should pay

    from treecore.model.backend import Hardware  # noqa: PLC0415
    from treecore.model.held import HeldRequests  # noqa: PLC0415
    from treecore.model.load import load_decoder  # noqa: PLC0415

    torch.set_num_threads(config.threads)
    hardware = Hardware(batch_invariant=config.batch_invariant)
    decoder = load_decoder(config.model.directory, dtype=config.dtype, on=hardware)
    bench = ForwardBench(HeldRequests(decoder, 64, _BLOCK_LEN))
    peer = None if args.no_transformers else TransformersPeer(config.model.directory, config.dtype, config.threads)
    times: dict[str, list[float]] = {}
    for idx in tqdm(range(args.rounds), unit="round", leave=False, disable=None):
        for num_nodes in _NODES:
            times.setdefault(f"{num_nodes} nodes", []).append(bench.step_ms(num_nodes))
        if peer is not None:
            times.setdefault("transformers generate", []).append(peer.generate(OWN[idx % len(OWN)], 32).ms_per_token)
    base = median(times["1 nodes"])
    rows = [(name, f"{median(values):.1f}", f"{median(values) / base:.2f}") for name, values in times.items()]
    say(table((f"{config.dtype}, {config.threads} thread(s)", "ms (median)", "over 1 node"), rows))
    return 0


class ForwardBench:
    """One request of 100 committed tokens; each step verifies a star of random nodes behind them."""

    def __init__(self, held: "HeldRequests", committed_len: int = 100) -> None:
        self._held = held
        self._rng = np.random.default_rng(0)
        self._tokens = self._random(committed_len)
        self._take(0)
        self._held.compute([_REQUEST])

    def step_ms(self, num_nodes: int) -> float:
        """Time of one forward over the root and `num_nodes - 1` children."""
        self._take(len(self._tokens) - 1)
        self._held.extend(_REQUEST, self._random(num_nodes - 1).tolist(), [0] * (num_nodes - 1))
        return timed_ms(lambda: self._held.compute([_REQUEST]))

    def _take(self, start: int) -> None:
        self._held.begin_step("bench", ())
        refused = self._held.take(self._item(start))
        assert refused is None, refused

    def _item(self, start: int) -> VerifyItem:
        params = _GREEDY if start == 0 else None
        return VerifyItem(_REQUEST, 0, start, self._tokens[start:], params, _NOTHING, _NOTHING, True)

    def _random(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._rng.integers(100, 10_000, count, dtype=np.int32)


def timed_ms(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
