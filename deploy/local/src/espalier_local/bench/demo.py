"""`espalier bench demo`: answer a prompt, then print what speculation bought on this machine."""

import argparse

from espalier_local.bench.contest import ways
from espalier_local.bench.latency import DEFAULT_TREE, measure, show
from espalier_local.bench.prompts import OWN
from espalier_local.client import Ask, complete, served_model
from espalier_local.gateway import gateway
from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_system_options, system_config
from espalier_local.output import ChildLog, say
from espalier_local.system import LocalSystem, SystemConfig

_MAX_TOKENS = 64


def add_parser(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the demonstration."""
    parser = benches.add_parser("demo", help="what `make demo` shows", description=__doc__)
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it; exit status 1 if speculation changed a single token."""
    config = system_config(args)
    return run_until_signal(lambda: _run(config))


async def _run(config: SystemConfig) -> int:
    say(f"Starting Espalier: {config.model.name}, {config.dtype}, {config.threads} thread(s) a process ...")
    async with LocalSystem(config, ChildLog()) as system, gateway(system.base_url, None) as client:
        for name in system.child_names:
            say(f"  {name:16} process {system.pid(name)}")
        asks = [Ask(prompt, max_tokens=_MAX_TOKENS, chat=True) for prompt in OWN]
        say(f"\n> {asks[0].prompt}")
        await complete(client, await served_model(client), asks[0], lambda text: say(text, end=""))
        say(
            f"\n\nThe same {len(asks)} prompts, {_MAX_TOKENS} tokens each, decoded in several ways (greedy, medians):\n"
        )
        return show(
            await measure(client, asks, ways([config.tree if isinstance(config.tree, tuple) else DEFAULT_TREE]))
        )
