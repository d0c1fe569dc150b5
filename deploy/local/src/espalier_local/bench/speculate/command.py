"""`espalier bench speculate`: what each way of speculating brings: the same prompts, interleaved, in one run.

Sequences, static trees by width, merged SSMs, dynamic trees and drafting ahead, against incremental decoding; alone and
in batches. With --json a run that was killed goes on where it was.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from espalier_local.bench.prompts import read_cases
from espalier_local.bench.speculate.configurations import Cast, Shapes, configurations, possible
from espalier_local.bench.speculate.measure import Batch, Measurement, batches
from espalier_local.bench.speculate.records import Journal, Setup
from espalier_local.bench.speculate.report import as_text
from espalier_local.bench.speculate.results import Results
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, num_cores, positive, system_config, widths
from espalier_local.output import say, tell
from espalier_local.system import SystemConfig
from treecore.errors import ConfigError

_SUFFIX = "suffix"


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the benchmark."""
    parser = benches.add_parser("speculate", help="what each way of speculating brings", description=__doc__)
    _add_prompt_options(parser)
    _add_configuration_options(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep every round here (JSON lines), and resume from it"
    )
    add_system_options(parser)
    parser.set_defaults(run=run)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is decoded").add_argument
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        help="files of JSON lines: prompt, id, category (default: our own)",
    )
    add("--num-prompts", type=positive, default=60, help="how many, the categories in turn (default 60)")
    add("--max-tokens", type=positive, default=128)
    add("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    add("--seed", type=int, default=1)
    add("--batch", type=positive, nargs="*", default=[], metavar="B", help="batch sizes besides 1, like 2 4 8 16")
    add("--batch-prompts", type=positive, default=16, help="how many prompts are also decoded in batches (default 16)")


def _add_configuration_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is decoded").add_argument
    add("--depth", type=positive, default=3, help="levels of static trees (default 3; the paper has 8)")
    add(
        "--wide-level", type=positive, default=1, help="the level with more than one child (default 1; the paper has 3)"
    )
    add("--width", type=positive, nargs="*", default=[2, 3, 4, 5], metavar="K", help="children there (default 2 3 4 5)")
    add("--compare-tree", type=widths, nargs="*", default=[(2,)], metavar="K1,K2,..", help="more static trees")
    add("--one", help="name of the SSM that drafts alone (default: the first)")
    add("--independent", nargs="*", default=[], metavar="NAME", help="SSMs that were trained without each other")
    add("--boosted", nargs="*", default=[], metavar="NAME", help="SSMs that were boosted")
    add("--suffix", default=_SUFFIX, metavar="NAME", help=f"the suffix SSM (default {_SUFFIX!r})")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = system_config(args)
    cases = read_cases(args.prompts, args.num_prompts)
    wanted = batches(cases, args.batch_prompts, _checked_sizes(args, len(cases)))
    journal = Journal(args.json, setup_of(args, config))
    for fault in journal.setup.left_out:
        tell(f"left out: {fault}")
    return run_until_signal(lambda: _run(config, journal, wanted, args.temperature))


async def _run(config: SystemConfig, journal: Journal, wanted: Sequence[Batch], temperatures: Sequence[float]) -> int:
    async with gateway(None, config) as client:
        with tqdm(unit="answer", leave=False, disable=None) as bar:
            measurement = Measurement(client, journal, bar.update)
            bar.total = len(temperatures) * sum(measurement.num_answers(len(batch)) for batch in wanted)
            await measurement.run(wanted, temperatures)
    say(as_text(Results(journal.setup, journal.rounds)))
    return 0


def setup_of(args: argparse.Namespace, config: SystemConfig) -> Setup:
    """The run that the flags describe; raises ConfigError."""
    running = tuple(ssm.name for ssm in config.ssms)
    kept, left_out = possible(configurations(_cast(args, running), _shapes(args)), running)
    return Setup(
        model=config.model.name,
        ssms=running,
        dtype=config.dtype,
        threads=config.threads,
        cpu=_cpu(),
        max_tokens=args.max_tokens,
        seed=args.seed,
        configurations=kept,
        left_out=left_out,
    )


def _cast(args: argparse.Namespace, running: Sequence[str]) -> Cast:
    first = next((name for name in running if name != args.suffix), "")
    return Cast(args.one or first, tuple(args.independent), tuple(args.boosted), args.suffix)


def _shapes(args: argparse.Namespace) -> Shapes:
    if args.wide_level > args.depth:
        raise ConfigError(f"--wide-level {args.wide_level}: trees of --depth {args.depth} have no such level")
    return Shapes(args.depth, args.wide_level, tuple(args.width), tuple(args.compare_tree))


def _checked_sizes(args: argparse.Namespace, num_prompts: int) -> list[int]:
    most = min(args.batch_prompts, num_prompts)
    if max(args.batch, default=1) > most:
        raise ConfigError(f"--batch {max(args.batch)}: only {most} prompts are decoded in batches (--batch-prompts)")
    return sorted(set(args.batch))


def _cpu() -> str:
    """Cores and model of this machine's processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return f"{num_cores()} cores of {found[1] if found else 'an unknown processor'}"
