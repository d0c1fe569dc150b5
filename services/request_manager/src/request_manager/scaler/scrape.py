"""Fetching what processes expose: every address behind a name, at once, all or nothing.

Knows HTTP and DNS. Must not know which metrics there are.

A headless Service's name stands for the pods that are ready. If one of those does not answer, the others' sum is not
the load, so there is no snapshot; a pod that keeps failing is soon not ready any more, and not behind the name.
"""

import asyncio
import socket
from collections.abc import Callable

import aiohttp

from request_manager.scaler.samples import Page, Snapshot
from treecore.errors import Unavailable

_RESOLVE_S = 5.0


class ScrapeFailed(Unavailable):
    """A process that should be there did not answer, or not with metrics. The message names it."""


class Scraper:
    """Scrapes `/metrics`. `clock` is monotonic, in seconds. An async context manager."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def __aenter__(self) -> "Scraper":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def scrape(self, endpoints: tuple[str, ...]) -> Snapshot:
        """What all processes behind the endpoints (host:port) expose now; raises ScrapeFailed."""
        at_s = self._clock()
        addresses = sorted({address for endpoint in endpoints for address in await self._resolve(endpoint)})
        pages = await asyncio.gather(*[self._page(address) for address in addresses], return_exceptions=True)
        return Snapshot(at_s, dict(zip(addresses, map(_page_or_raise, pages), strict=True)))

    async def _resolve(self, endpoint: str) -> list[str]:
        host, _, port = endpoint.rpartition(":")
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            raise ScrapeFailed(f"{endpoint}: {_reason(error)}") from error
        return [_authority(str(address[0]), port) for *_, address in found]

    async def _page(self, address: str) -> Page:
        try:
            async with self._session.get(f"http://{address}/metrics", raise_for_status=True) as answer:
                return Page.parse(await answer.text())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ScrapeFailed(f"{address}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or "no answer in time"


def _page_or_raise(page: Page | BaseException) -> Page:
    if isinstance(page, BaseException):
        raise page
    return page


def _authority(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
