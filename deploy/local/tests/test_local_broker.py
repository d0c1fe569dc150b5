"""The broker child and reserved ports."""

import asyncio
import json
import os
import signal
import socket
import tempfile
from pathlib import Path

import nats
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_local.broker import broker_spec, nats_url, running_broker, wait_listening
from espalier_local.ports import ReservedPort
from espalier_local.supervise import RestartPolicy, Supervisor
from treecore.errors import ConfigError


async def test_two_brokers_run_side_by_side_with_jetstream() -> None:
    """Each on a port of its own, private to this machine, with JetStream and the payload limit that we rely on."""
    async with running_broker() as first, running_broker() as second:
        assert first != second
        for url in (first, second):
            client = await nats.connect(url)
            assert client.max_payload == 8 * 1024 * 1024
            assert (await client.jetstream().account_info()).streams == 0
            await client.close()


async def test_a_broker_that_dies_comes_back_on_its_port(heard, tmp_path) -> None:
    """So that clients that know only the URL find it again."""
    port = ReservedPort("127.0.0.1", 0)
    kept = Supervisor(heard, RestartPolicy(first_delay_s=0.001))
    await kept.start(broker_spec(tmp_path, port.number))
    await wait_listening(port.number)
    os.kill(kept.pid("nats"), signal.SIGKILL)
    await heard.when(lambda h: sum("Server is ready" in line for line in h.of("nats")) == 2)
    client = await nats.connect(nats_url(port.number))
    await client.close()
    await kept.stop()
    port.close()


def test_a_port_in_use_is_one_clear_line() -> None:
    """It names the port and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port {number} is in use; choose another with --port$"):
            ReservedPort("127.0.0.1", number)


async def test_a_reserved_port_can_be_listened_on_by_a_server() -> None:
    """Also twice in a row, as when a server is started again."""
    port = ReservedPort("127.0.0.1", 0)
    for _ in range(2):
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", port.number)
        server.close()
        await server.wait_closed()
    port.close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "a b", "a..b", "\udcff"])
def test_a_host_that_is_not_ours_is_one_clear_line(host) -> None:
    """An address of another machine, or no address at all."""
    with pytest.raises(ConfigError, match=r"^(host|cannot listen)"):
        ReservedPort(host, 0)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 20))
def test_reserved_ports_differ(count: int) -> None:
    """The kernel gives a held port to nobody else."""
    ports = [ReservedPort("127.0.0.1", 0) for _ in range(count)]
    try:
        assert len({port.number for port in ports}) == count
    finally:
        for port in ports:
            port.close()


def test_the_brokers_files_stay_in_its_directory() -> None:
    """Settings and JetStream store."""
    with tempfile.TemporaryDirectory() as directory:
        spec = broker_spec(Path(directory), 4242)
        config = (Path(directory) / "nats.conf").read_text()
        assert spec.argv[1:] == ("-c", f"{directory}/nats.conf")
        assert json.dumps(f"{directory}/jetstream") in config
        assert '"127.0.0.1:4242"' in config
