"""One child process: its own process group, its output line by line, and an end that leaves nothing behind.

Knows processes; must not know what a child is for, nor whether it is started again.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

LineSink = Callable[[str, str], None]
"""Takes (child's name, a line of its output)."""

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 65536
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a child is started. env: what is set on top of our own environment.

    speaks_as: the name under which the program reports that it cannot start (`speaks_as: message`). group: children of
    one group live and die together; None: a child by itself.
    """

    name: str
    argv: tuple[str, ...]
    speaks_as: str
    env: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended. code: exit status, or minus the signal's number. line: the last thing it said."""

    code: int
    line: str

    def describe(self) -> str:
        """What happened, for people."""
        how = f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}"
        return f"{how}: {self.line}" if self.line else how


class Child:
    """A living child, reaped by a task of its own. It is killed when the thread that spawned it ends (kill -9 too)."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, output: "_Pipe", sink: LineSink) -> None:
        self.spec = spec
        self._process = process
        self._output = output
        self._lines = _Lines(spec, sink)
        self._pump = asyncio.create_task(self._read_output())
        self._ended = asyncio.create_task(self._reap())

    @classmethod
    async def spawn(cls, spec: ChildSpec, sink: LineSink) -> "Child":
        """Start the process; raises OSError if the program cannot be run."""
        output = await _Pipe.open()
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                env={**os.environ, **spec.env},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except BaseException:
            output.close()
            raise
        finally:
            os.close(output.write_end)
        return cls(spec, process, output, sink)

    @property
    def pid(self) -> int:
        """The process id, also of its process group."""
        return self._process.pid

    async def wait(self) -> ChildExit:
        """How it ended, once it and its group are gone and its output is read."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Ask it to end (SIGTERM), kill it after `grace_s` or when this call is cancelled."""
        if not self._ended.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait({self._ended}, timeout=grace_s)
        finally:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Kill it and its whole group now."""
        if not self._ended.done():
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> ChildExit:
        code = await self._process.wait()
        self._kill_group()
        await asyncio.wait({self._pump}, timeout=_DRAIN_S)
        self._pump.cancel()
        self._output.close()
        return ChildExit(code, self._lines.end(refused=code == 1))

    async def _read_output(self) -> None:
        while chunk := await self._output.reader.read(_CHUNK_BYTES):
            self._lines.feed(chunk)


class _Pipe:
    """A pipe of our own: asyncio's would keep `wait` from returning while a grandchild holds the other end open."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self.reader = reader
        self.write_end = write_end
        self._transport = transport

    @classmethod
    async def open(cls) -> "_Pipe":
        """Both ends; whoever starts the child closes the write end."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        file = os.fdopen(read_end, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        return cls(reader, transport, write_end)

    def close(self) -> None:
        """Close the read end."""
        self._transport.close()


class _Lines:
    """Cuts a child's output into lines, hands them on, and keeps the last one.

    A refusal (`speaks_as: message`) is held back: it becomes the launcher's own last word, not a log line before it.
    """

    def __init__(self, spec: ChildSpec, sink: LineSink) -> None:
        self._spec = spec
        self._sink = sink
        self._rest = b""
        self._last = ""
        self._held: list[str] = []

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(line)

    def end(self, *, refused: bool) -> str:
        """The refusal if there was one, else the last line; what was held back for nothing is handed on."""
        self._take(self._rest)
        self._rest = b""
        if refused and self._held:
            return self._held[-1]
        for line in self._held:
            self._sink(self._spec.name, line)
        return self._last

    def _take(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if not line:
            return
        self._last = line
        if line.startswith(f"{self._spec.speaks_as}: "):
            self._held.append(line)
        else:
            self._sink(self._spec.name, line)


def die_with_parent() -> Callable[[], None]:
    """What a forked child runs before exec so that the kernel kills it when its parent goes, however it goes."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it went before the kernel knew
            os._exit(1)

    return before_exec
