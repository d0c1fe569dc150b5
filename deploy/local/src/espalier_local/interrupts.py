"""How the command ends when it is told to: one signal stops it in order, a second one at once, never a traceback."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_until_signal(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main()` to its exit status; a signal cancels it, and the status is then 128 + the signal's number.

    SIGINT works even where a shell started us with it ignored (`espalier up &` in a script).
    """
    received: list[int] = []

    async def supervised() -> int:
        _cancel_on_signals(received)
        return await main()

    try:
        return asyncio.run(supervised())
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


def _cancel_on_signals(received: list[int]) -> None:
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
