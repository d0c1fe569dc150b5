"""The operations port: what each path says, whoever computes, hangs or has gone; and what start-up refuses."""

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from http.client import HTTPConnection, RemoteDisconnected

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from treecore.errors import ConfigError
from treecore.service.operations import Operations, _Exchange, open_operations
from treecore.service.settings import ServiceSettings
from treecore.service.vitals import Vitals

SOON_S = 10.0
LOCAL = "127.0.0.1"
PROBES = ("/startupz", "/readyz", "/livez")


def settings(port: int | None = 0, host: str = LOCAL) -> ServiceSettings:
    """A service's, with an operations port."""
    return ServiceSettings(operations_port=port, operations_host=host)


def fetch(operations: Operations, path: str, method: str = "GET", host: str = LOCAL) -> tuple[int, str]:
    """Status and body. Blocks the thread."""
    assert operations.port is not None
    connection = HTTPConnection(host, operations.port, timeout=SOON_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


async def statuses(operations: Operations) -> tuple[int, ...]:
    """Of start-up, readiness, liveness."""
    return tuple([(await asyncio.to_thread(fetch, operations, path))[0] for path in PROBES])


async def until(operations: Operations, wanted: tuple[int, ...]) -> None:
    """Return once the probes say so; fails loudly if they never do."""
    async with asyncio.timeout(SOON_S):
        while await statuses(operations) != wanted:
            pass


@asynccontextmanager
async def opened(port: int | None = 0) -> AsyncIterator[Operations]:
    """Operations of a process that has not started."""
    async with open_operations(settings(port)) as operations:
        yield operations


# -- vitals -----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds, as a test says."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def vitals_at(live_timeout_s: float = 30) -> Iterator[tuple[Vitals, Clock]]:
    """Vitals and their clock."""
    clock = Clock()
    yield Vitals(live_timeout_s, clock), clock


def test_a_loop_that_stands_still_is_not_alive_and_not_ready() -> None:
    """Until it turns again."""
    with vitals_at() as (vitals, clock):
        vitals.start(lambda: True)
        vitals.beat()
        clock.now_s += 29
        assert (vitals.is_alive, vitals.is_ready) == (True, True)
        clock.now_s += 2
        assert (vitals.is_alive, vitals.is_ready) == (False, False)
        vitals.beat()
        assert (vitals.is_alive, vitals.is_ready) == (True, True)


def test_work_in_the_loops_thread_is_life_up_to_a_bound() -> None:
    """A long step is no death; one that outlasts every deadline is. Its end counts as a turn of the loop."""
    with vitals_at() as (vitals, clock):
        vitals.start(lambda: True)
        vitals.beat()
        with vitals.working():
            clock.now_s += 299
            assert vitals.is_alive
            assert vitals.is_ready
        assert vitals.is_alive
        with vitals.working():
            clock.now_s += 301
            assert not vitals.is_alive
        assert vitals.is_alive


def test_work_that_fails_leaves_no_trace() -> None:
    """The bound of a step is not granted to what comes behind it."""
    with vitals_at() as (vitals, clock):
        with pytest.raises(RuntimeError), vitals.working():
            raise RuntimeError("a bug")
        clock.now_s += 31
        assert not vitals.is_alive


@given(st.lists(st.tuples(st.sampled_from(["beat", "begin", "end"]), st.floats(0, 100)), max_size=20))
def test_alive_means_a_turn_or_work_lately(story: list[tuple[str, float]]) -> None:
    """Against a plain reading of the rule, whatever happens in which order."""
    with vitals_at() as (vitals, clock), ExitStack() as stack:
        turned_s, begun_s = clock.now_s, None
        for event, later_s in story:
            if event == "beat":
                vitals.beat()
                turned_s = clock.now_s
            elif event == "begin" and begun_s is None:
                stack.enter_context(vitals.working())
                begun_s = clock.now_s
            elif event == "end" and begun_s is not None:
                stack.close()
                turned_s, begun_s = clock.now_s, None
            clock.now_s += later_s
            works = begun_s is not None and clock.now_s - begun_s < 300
            assert vitals.is_alive == (works or clock.now_s - turned_s < 30)


# -- over HTTP --------------------------------------------------------------------------------------------------------


async def test_three_probes_answer_three_questions() -> None:
    """Starting; started, but without what it needs; at work; draining."""
    can_work = False
    async with opened() as operations:
        assert await statuses(operations) == (503, 503, 200)
        operations.vitals.start(lambda: can_work)
        await until(operations, (200, 503, 200))
        can_work = True
        await until(operations, (200, 200, 200))
        can_work = False
        await until(operations, (200, 503, 200))


async def test_metrics_are_prometheus_text_of_the_process() -> None:
    """What was registered, process metrics, each under our own prefix, and no `_created`."""
    async with opened() as operations:
        Counter("espalier_things", "Things", ["kind"], registry=operations.registry).labels("a").inc(3)
        status, page = await asyncio.to_thread(fetch, operations, "/metrics")
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = {sample.name: sample.value for sample in samples}
    assert found["espalier_things_total"] == 3
    assert found["espalier_process_resident_memory_bytes"] > 0
    assert all(name.startswith("espalier_") and not name.endswith("_created") for name in found)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics/", 404), ("GET", "/metrics?x=1", 200), ("POST", "/livez", 501)],
)
async def test_nothing_else_is_told(method: str, path: str, status: int) -> None:
    """A query is ignored; another path or method is refused."""
    async with opened() as operations:
        assert (await asyncio.to_thread(fetch, operations, path, method))[0] == status


async def test_clients_that_hang_hold_up_nobody() -> None:
    """Connections that say nothing, stop in the middle of a line, or ask and never read."""
    async with opened() as operations:
        with ExitStack() as stack:
            for words in (b"", b"GET /livez HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
                for _ in range(20):
                    hanging = stack.enter_context(socket.create_connection((LOCAL, operations.port or 0)))
                    hanging.sendall(words)
            async with asyncio.timeout(SOON_S):
                assert await statuses(operations) == (503, 503, 200)


async def test_the_oldest_of_too_many_connections_is_cut_off() -> None:
    """However slowly its client goes on: there are never more than 32 threads of them, and a probe is always heard."""
    async with opened() as operations:
        with ExitStack() as stack:
            address = LOCAL, operations.port or 0
            hanging = [stack.enter_context(socket.create_connection(address, SOON_S)) for _ in range(40)]
            assert await asyncio.to_thread(hanging[0].recv, 1) == b""
            assert await statuses(operations) == (503, 503, 200)
            exchanges = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
            assert len(exchanges) <= 33  # one may not have found yet that it was cut off


async def test_a_client_that_hangs_is_left_alone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, after some seconds."""
    assert 1 <= _Exchange.timeout <= 10
    monkeypatch.setattr("treecore.service.operations._Exchange.timeout", 0.01)
    async with opened() as operations:
        reader, writer = await asyncio.open_connection(LOCAL, operations.port)
        writer.write(b"GET /livez HT")
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_client_that_resets_its_connection_is_nobodys_concern(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback on stderr, no error in the log."""
    caplog.set_level(logging.INFO)
    async with opened() as operations:
        for _ in range(20):
            gone = socket.create_connection((LOCAL, operations.port or 0))
            gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            gone.close()
        await statuses(operations)
    assert [record.message for record in caplog.records] == ["operations port open"]


async def test_a_step_that_computes_does_not_hold_up_probes() -> None:
    """The event loop's own thread is at work: all four answers come all the same."""
    loop, blocked, release = asyncio.new_event_loop(), threading.Event(), threading.Event()
    found: list[Operations] = []

    async def process() -> None:
        async with opened() as operations:
            found.append(operations)
            operations.vitals.start(lambda: True)
            operations.vitals.beat()
            with operations.vitals.working():
                blocked.set()
                assert release.wait(SOON_S)

    running = asyncio.create_task(asyncio.to_thread(loop.run_until_complete, process()))
    assert await asyncio.to_thread(blocked.wait, SOON_S)
    try:
        assert await statuses(found[0]) == (200, 200, 200)
        assert (await asyncio.to_thread(fetch, found[0], "/metrics"))[0] == 200
    finally:
        release.set()
        await running
        loop.close()


async def test_a_collector_that_fails_is_logged_and_harms_no_other_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A bug of ours is told, on the page's connection alone."""

    class Broken:
        def collect(self) -> list[object]:
            raise RuntimeError("a bug")

        def describe(self) -> list[object]:
            return []

    async with opened() as operations:
        operations.registry.register(Broken())  # type: ignore[arg-type]
        with pytest.raises(RemoteDisconnected):
            await asyncio.to_thread(fetch, operations, "/metrics")
        assert (await asyncio.to_thread(fetch, operations, "/livez"))[0] == 200
    assert "operations exchange failed" in [record.message for record in caplog.records if record.levelname == "ERROR"]


# -- start and end ----------------------------------------------------------------------------------------------------


async def test_off_unless_asked_for() -> None:
    """No port, and nothing for the process to do differently."""
    async with opened(None) as operations:
        assert operations.port is None
        operations.vitals.start(lambda: True)
        with operations.vitals.working():
            pass


async def test_a_port_that_is_taken_is_one_clear_line() -> None:
    """It names the setting and the address."""
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--operations-port: cannot listen on {LOCAL}:{port}: .*in use$"):
            async with opened(port):
                pass


async def test_a_host_that_is_not_ours_is_one_clear_line() -> None:
    """An address of another machine."""
    with pytest.raises(ConfigError, match=r"--operations-port: cannot listen on 192\.0\.2\.1:0"):
        async with open_operations(settings(0, "192.0.2.1")):
            pass


async def test_ipv6() -> None:
    """A cluster may have nothing else."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    async with open_operations(settings(0, "::1")) as operations:
        status, _ = await asyncio.to_thread(fetch, operations, "/livez", host="::1")
    assert status == 200


async def test_the_port_closes_with_the_process() -> None:
    """Whether the body ends or fails."""
    operations = None
    with pytest.raises(RuntimeError, match="crash"):
        async with opened() as operations:
            raise RuntimeError("crash")
    assert operations is not None
    with pytest.raises(ConnectionRefusedError):
        fetch(operations, "/livez")


async def fail_when_asked() -> None:
    """A process whose readiness check has a bug."""
    asked = asyncio.Event()

    def broken() -> bool:
        asked.set()
        raise RuntimeError("a bug")

    async with opened() as operations:
        operations.vitals.start(broken)
        await asked.wait()
        assert not operations.vitals.is_ready


async def test_a_readiness_check_that_fails_is_seen() -> None:
    """The process ends with its error."""
    with pytest.raises(RuntimeError, match="a bug"):
        await fail_when_asked()
