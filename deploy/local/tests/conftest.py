"""What the launcher's tests share: a sink that can be waited on, and children made of a line of Python."""

import asyncio
import os
import select
import sys
from collections.abc import Callable

import pytest

from espalier_local.child import ChildSpec


class Heard:
    """A LineSink that keeps (name, line) and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self._news = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._news.set()

    def of(self, name: str) -> list[str]:
        """What this child said."""
        return [line for each, line in self.lines if each == name]

    async def when(self, condition: Callable[["Heard"], bool]) -> None:
        """Wait until the condition holds."""
        async with asyncio.timeout(20):
            while not condition(self):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def heard() -> Heard:
    """A fresh sink."""
    return Heard()


def python_child(name: str, code: str, *args: str) -> ChildSpec:
    """A child that runs `code`; isolated, so that it starts fast."""
    return ChildSpec(name, (sys.executable, "-I", "-S", "-u", "-c", code, *args), speaks_as=name)


def wait_gone(pid: int) -> bool:
    """Whether the process ends within 10 s (it need not be ours)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10.0)[0])
    finally:
        os.close(handle)


@pytest.fixture
def child_of() -> Callable[..., ChildSpec]:
    """`python_child` as a fixture: test modules cannot import this file."""
    return python_child


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """`wait_gone` as a fixture."""
    return wait_gone
