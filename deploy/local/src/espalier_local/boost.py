"""`espalier boost`: train SSMs for a model. Becomes the trainer (python -m ssm_worker.boost), which has the flags.

All that is known here is what a model's name means.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from espalier_local.cache import ModelCache
from espalier_local.models import resolve_model
from espalier_local.output import StageBars

_NO_PREFIX = "\0"  # nothing is a flag here: argparse leaves all of them, --help included, to the trainer


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser("boost", help="train SSMs for a model", prefix_chars=_NO_PREFIX, add_help=False)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Become the trainer; raises ConfigError where there is no such model."""
    os.execv(sys.executable, [sys.executable, "-m", "ssm_worker.boost", *with_directory(args.arguments)])


def with_directory(arguments: Sequence[str]) -> list[str]:
    """The arguments with the directory of the model that --llm names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--llm")
    known, rest = parser.parse_known_args(arguments)
    if known.llm is None:
        return rest
    with StageBars() as bars:
        model = resolve_model(known.llm, ModelCache.from_environment(), bars)
    return [*rest, "--llm", str(model.directory)]
