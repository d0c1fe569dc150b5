"""`espalier bench overhead`: what a step costs beside the models: bus, codec, merge, accept, scheduling.

Read from the manager's own histograms over the run, at batch 1; medians are interpolated within a bucket.
"""

import argparse
import re

import httpx

from espalier_local.bench.prompts import OWN
from espalier_local.bench.table import table
from espalier_local.client import DYNAMIC, Ask, complete, served_model
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, positive, system_config
from espalier_local.output import say
from espalier_local.system import SystemConfig
from treecore.errors import Unavailable

_OVERHEAD = "overhead"
_PARTS = ("draft_forward", "draft_sample", "verify_forward", "verify_sample", _OVERHEAD)
_BUCKET = re.compile(r'espalier_step_(?:part|overhead)_seconds_bucket\{le="([^"]+)"(?:,part="(\w+)")?\} (\S+)')

Histogram = list[tuple[float, float]]


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("overhead", help="time of a step outside the models", description=__doc__)
    parser.add_argument("--max-tokens", type=positive, default=64)
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = system_config(args)
    return run_until_signal(lambda: _run(config, args.max_tokens))


async def _run(config: SystemConfig, max_tokens: int) -> int:
    tree = config.tree or DYNAMIC
    runs = {"incremental": False, f"tree {tree}": True}
    rows = []
    async with gateway(None, config) as client:
        model = await served_model(client)
        for temperature in (0.0, 0.8):
            for name, speculation in runs.items():
                before = await _histograms(client)
                for prompt in OWN:
                    ask = Ask(prompt, max_tokens, temperature, 1, speculation=speculation, tree=tree, chat=True)
                    await complete(client, model, ask)
                after = await _histograms(client)
                medians = [median(difference(after[part], before[part])) * 1e3 for part in _PARTS]
                rows.append((f"{name}, temperature {temperature}", *(f"{value:.2f}" for value in medians)))
    names = "draft forward", "draft sampling", "verify forward", "verify sampling", "everything else"
    say(table(("median ms of a step", *names), rows))
    return 0


async def _histograms(client: httpx.AsyncClient) -> dict[str, Histogram]:
    """Cumulative counts by upper bound in seconds, per part."""
    try:
        text = (await client.get("/metrics")).text
    except httpx.HTTPError as error:
        raise Unavailable(f"no metrics: {error}") from error
    found: dict[str, Histogram] = {part: [] for part in _PARTS}
    for bound, part, count in _BUCKET.findall(text):
        if (part or _OVERHEAD) in found:
            found[part or _OVERHEAD].append((float(bound), float(count)))
    return found


def difference(after: Histogram, before: Histogram) -> Histogram:
    """What was counted in between; `before` may be empty."""
    earlier = dict(before)
    return [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]


def median(histogram: Histogram) -> float:
    """The median by linear interpolation within its bucket; 0 for an empty histogram."""
    half = histogram[-1][1] / 2 if histogram else 0.0
    low, counted = 0.0, 0.0
    for bound, count in histogram:
        if count >= half and count > counted:
            return low + (bound - low) * (half - counted) / (count - counted)
        low, counted = bound, count
    return 0.0
