"""`espalier bench offload`: a model whose layers stream from disk: trees against incremental decoding, in one run.

A step reads the weights once however many nodes it verifies, so the speed-up is near the tokens per step (SpecInfer,
Figure 8). The same answers are asked of a system that keeps its weights in memory: they must be equal.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from espalier_local.bench.contest import INCREMENTAL, Contest, Way, ways
from espalier_local.bench.latency import measure, show
from espalier_local.bench.prompts import read_prompts
from espalier_local.client import Ask
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, positive, system_config, widths
from espalier_local.output import say
from espalier_local.system import SystemConfig

_TREES = ((1, 1, 1), (2, 2, 1))


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("offload", help="trees against incremental, weights on disk", description=__doc__)
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", help="files of JSON lines with a `prompt` each (default: six of our own)")
    add("--num-prompts", type=positive, default=4, help="how many of them (default 4)")
    add("--max-tokens", type=positive, default=48)
    add("--compare-tree", type=widths, nargs="+", default=_TREES, metavar="K1,K2,..", help="trees to compare")
    add_system_options(parser)
    parser.set_defaults(run=run, offload="disk")


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit status 1 if a single token differs."""
    config = system_config(args)
    prompts = read_prompts(args.prompts or (), args.num_prompts)
    asks = [Ask(prompt, max_tokens=args.max_tokens, chat=True) for prompt in prompts]
    return run_until_signal(lambda: _run(config, asks, ways(args.compare_tree)))


async def _run(config: SystemConfig, asks: list[Ask], contestants: tuple[Way, ...]) -> int:
    async with gateway(None, replace(config, offload="none")) as client:
        resident = await measure(client, asks, (INCREMENTAL,))
    async with gateway(None, config) as client:
        offloaded = await measure(client, asks, contestants)
    say(f"offload {config.offload}, {config.offload_resident_layers} layers resident:")
    status = show(offloaded)
    say(f"\nnot offloaded:\n{resident.report()}")
    is_same = _tokens(resident) == _tokens(offloaded)
    say(f"identical to not offloaded: {'yes' if is_same else 'NO'}")
    return status if is_same else 1


def _tokens(contest: Contest) -> list[tuple[int, ...]]:
    """Of the first way, prompt by prompt."""
    return [answer.token_ids for answer in contest.answers[0]]
