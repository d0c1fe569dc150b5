"""Things that run side by side until one of them ends. Knows asyncio only."""

import asyncio
from collections.abc import Awaitable


async def first_of(*parts: Awaitable[object]) -> None:
    """Run the parts until one ends; cancel the others, wait for them, and raise what the first one raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
