"""The `espalier` command: its subcommands, and how it ends.

Whatever goes wrong is one line on stderr: exit status 1 for what cannot be done, 2 for wrong usage, 130 after Ctrl-C.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from treecore.errors import EspalierError

_INTERRUPTED = 130
_COMMANDS = {
    "up": "up",
    "generate": "generate",
    "bench": "bench",
    "models": "catalogue",
    "doctor": "doctor",
    "boost": "boost",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status and raises nothing but SystemExit for wrong usage."""
    logging.getLogger().addHandler(logging.NullHandler())  # what matters to the user is told, not logged
    try:
        arguments = sys.argv[1:] if argv is None else argv
        args = build_parser(arguments[:1]).parse_args(arguments)
        return int(args.run(args))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except (EspalierError, OSError) as error:
        print("espalier:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 1


def build_parser(wanted: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line with the wanted subcommand, or with all of them if it is none of ours.

    Modules are imported only here: one subcommand does not wait for another's imports, and Ctrl-C meanwhile is quiet.
    """
    parser = argparse.ArgumentParser(prog="espalier", description="LLM serving with tree-based speculative decoding.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in [name for name in wanted if name in _COMMANDS] or _COMMANDS:
        importlib.import_module(f"espalier_local.{_COMMANDS[name]}").add_parser(commands)
    return parser


def _forget_stdout() -> None:
    """Whoever read our output has gone; keep the interpreter from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
