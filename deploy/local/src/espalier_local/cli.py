"""The `espalier` command: its subcommands, and how it ends.

Whatever goes wrong is one line on stderr: exit status 1 for what cannot be done, 2 for wrong usage, 130 after Ctrl-C.
"""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence

from espalier_local import catalogue, doctor, generate, up
from espalier_local.output import tell
from treecore.errors import EspalierError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status and raises nothing but SystemExit for wrong usage."""
    args = build_parser().parse_args(argv)
    logging.getLogger().addHandler(logging.NullHandler())  # what matters to the user is told, not logged
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except (EspalierError, OSError) as error:
        tell(" ".join(str(error).split()))
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="espalier", description="LLM serving with tree-based speculative decoding.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (up, generate, catalogue, doctor):
        command.add_parser(commands)
    if importlib.util.find_spec("espalier_local.bench") is not None:
        importlib.import_module("espalier_local.bench").add_parser(commands)
    return parser


def _forget_stdout() -> None:
    """Whoever read our output has gone; keep the interpreter from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
