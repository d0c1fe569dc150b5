"""A gateway to talk to: one that runs already, or one of our own for as long as it is needed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from espalier_local.client import open_client
from espalier_local.output import ChildLog
from espalier_local.system import LocalSystem, SystemConfig


@asynccontextmanager
async def gateway(url: str | None, config: SystemConfig | None) -> AsyncIterator[httpx.AsyncClient]:
    """A client for the gateway at `url`, or (url None) for a system of our own that is started for it.

    Raises what LocalSystem raises, also while the client is in use.
    """
    if url is not None:
        async with open_client(url) as client:
            yield client
        return
    assert config is not None, "either a url or a system to start"
    async with LocalSystem(config, ChildLog()) as system, open_client(system.base_url) as client:
        yield client
