"""`espalier up`: everything on this machine, until Ctrl-C."""

import argparse
import asyncio
import json

from espalier_local.interrupts import run_until_signal
from espalier_local.options import add_listen_options, add_system_options, system_config
from espalier_local.output import ChildLog, say
from espalier_local.ports import ReservedPort
from espalier_local.system import LocalSystem, SystemConfig


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser("up", help="serve on this machine until Ctrl-C", description=__doc__)
    add_listen_options(parser)
    add_system_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve; returns the exit status: 0 after Ctrl-C or SIGTERM."""
    ReservedPort(args.host, args.port).close()  # say so before a .gguf file is converted or a hub is asked
    config = system_config(args)
    return run_until_signal(lambda: _serve(config))


async def _serve(config: SystemConfig) -> int:
    is_up = False
    try:
        async with LocalSystem(config, ChildLog()) as system:
            say(_greeting(system))
            is_up = True
            await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:  # a signal: what this command is waiting for
        if not is_up:
            raise
    return 0


def _greeting(system: LocalSystem) -> str:
    config = system.config
    body = json.dumps({"model": config.model.name, "prompt": "The capital of France is", "max_tokens": 16})
    precision = f"{config.dtype}, batch-invariant" if config.batch_invariant else config.dtype
    drafts = ", ".join(ssm.name for ssm in config.ssms) or "none (incremental decoding)"
    return (
        f"espalier is ready: {system.base_url}/v1\n"
        f"  model {config.model.name} ({precision}), SSM {drafts}; Ctrl-C stops it\n"
        f"  curl {system.base_url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    )
