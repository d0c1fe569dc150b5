"""`espalier bench`: every claim of speed or identity, as a command that anyone can run."""

import argparse

from espalier_local.bench import acceptance, demo, forward, identity, latency, offload, overhead, trees, verify
from espalier_local.bench.speculate import command as speculate
from espalier_local.bench.speculate import report as speculate_report


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand and its own subcommands."""
    parser = commands.add_parser("bench", help="measure this machine; medians and ratios of one run")
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for bench in (
        demo,
        latency,
        identity,
        offload,
        overhead,
        forward,
        acceptance,
        trees,
        verify,
        speculate,
        speculate_report,
    ):
        bench.add_parser(benches)
