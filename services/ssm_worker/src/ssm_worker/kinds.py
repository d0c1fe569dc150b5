"""Which kind of SSM this process is. Knows settings alone: what a kind needs is imported with it."""

import asyncio
import sys

from ssm_worker.settings import SsmSettings
from treecore.service.lifecycle import run_service
from treecore.service.operations import open_operations


async def serve(settings: SsmSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises ConfigError for settings or files that do not fit."""
    async with open_operations(settings) as operations:
        if settings.kind == "suffix":
            from ssm_worker.suffix_worker import serve_suffix  # noqa: PLC0415 - a kind's imports do without the other's

            await serve_suffix(settings, stop, operations)
        else:
            from ssm_worker.worker import serve_model  # noqa: PLC0415 - torch, which takes seconds and 200 MB

            await serve_model(settings, stop, operations)


def main() -> int:
    """Run the SSM worker; returns the exit status."""
    return run_service("ssm_worker", SsmSettings, serve, sys.argv[1:])
