"""`espalier models`: what can be fetched, and fetching it."""

import argparse

from espalier_local.cache import ModelCache
from espalier_local.fetch import Fetcher
from espalier_local.models import KNOWN, fetch_command
from espalier_local.output import StageBars, say, tell


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand."""
    parser = commands.add_parser("models", help="list and fetch models", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the models known by name")
    listing.set_defaults(run=run_list)
    fetching = actions.add_parser("fetch", help="get a model; does nothing if it is there")
    fetching.add_argument("name", choices=tuple(KNOWN), metavar="NAME", help=", ".join(KNOWN))
    fetching.set_defaults(run=run_fetch)


def run_list(_args: argparse.Namespace) -> int:
    """Print each known model and where it is; returns the exit status."""
    cache = ModelCache.from_environment()
    for model in KNOWN.values():
        place = cache.model_dir(model.name) if cache.has(model.name) else f"not here; {fetch_command(model.name)}"
        say(f"{model.name}  ({model.license})  {place}")
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Fetch one model and print its directory; returns the exit status."""
    with StageBars() as bars:
        directory = Fetcher(ModelCache.from_environment(), bars, tell).fetch(KNOWN[args.name])
    say(str(directory))
    return 0
