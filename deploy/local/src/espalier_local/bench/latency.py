"""`espalier bench latency`: incremental, sequence and tree decoding of the same prompts, interleaved in one run."""

import argparse
from pathlib import Path

import httpx
from tqdm import tqdm

from espalier_local.bench.contest import Contest, Way, run_contest, ways
from espalier_local.bench.prompts import read_prompts
from espalier_local.client import Ask, served_model
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, positive, system_config, widths
from espalier_local.output import say
from espalier_local.system import SystemConfig

DEFAULT_TREE = (2,)


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("latency", help="ms per token with and without speculation", description=__doc__)
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", help="files of JSON lines with a `prompt` each (default: six of our own)")
    add("--num-prompts", type=positive, default=20, help="how many of them (default 20)")
    add("--max-tokens", type=positive, default=64)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=1)
    add("--compare-tree", type=widths, nargs="+", default=[DEFAULT_TREE], metavar="K1,K2,..", help="trees to compare")
    add("--url", help="a running gateway (default: start a system for this run)")
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; exit status 1 if the ways disagree on a single token."""
    config = system_config(args) if args.url is None else None
    prompts = read_prompts(args.prompts or (), args.num_prompts)
    asks = [
        Ask(prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, chat=True)
        for prompt in prompts
    ]
    return run_until_signal(lambda: _run(args.url, config, asks, ways(args.compare_tree)))


async def _run(url: str | None, config: SystemConfig | None, asks: list[Ask], contestants: tuple[Way, ...]) -> int:
    async with gateway(url, config) as client:
        return show(await measure(client, asks, contestants))


async def measure(client: httpx.AsyncClient, asks: list[Ask], contestants: tuple[Way, ...]) -> Contest:
    """The contest; the first prompt is asked once more before, unmeasured."""
    model = await served_model(client)
    await run_contest(client, model, contestants, asks[:1])
    with tqdm(total=len(asks) * len(contestants), unit="answer", leave=False, disable=None) as bar:
        return await run_contest(client, model, contestants, asks, bar.update)


def show(contest: Contest) -> int:
    """Print the table and whether all ways agree; returns the exit status."""
    say(contest.report())
    say(f"identical output: {'yes' if contest.is_identical else 'NO'}")
    return 0 if contest.is_identical else 1
