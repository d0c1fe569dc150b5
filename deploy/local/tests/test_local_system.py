"""LocalSystem with a real broker and stand-ins for the services."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from espalier_local.models import ServedModel
from espalier_local.supervise import ChildFailed, RestartPolicy
from espalier_local.system import Addresses, LocalSystem, SystemConfig, services
from treecore.errors import ConfigError

FAKE = str(Path(__file__).with_name("fake_service.py"))
CONFIG = SystemConfig(
    model=ServedModel("llm", Path("/models/llm")),
    ssms=(ServedModel("draft", Path("/models/draft")),),
    start_timeout_s=30,
)
FAST = RestartPolicy(first_delay_s=0.001, max_delay_s=0.01)


def fakes(**kinds: str):
    """The real children's flags and names, run by stand-ins of these kinds."""
    kind_of = {"llm_verifier": "verifier", "ssm_worker": "ssm", "request_manager": "manager", **kinds}

    def of(config: SystemConfig, at: Addresses):
        return tuple(
            replace(spec, argv=(sys.executable, FAKE, kind_of[spec.name], *spec.argv[3:]))
            for spec in services(config, at)
        )

    return of


async def test_a_system_starts_serves_and_leaves_nothing(heard, gone) -> None:
    """Ready means: the gateway answers and the SSM has announced itself. Afterwards all processes are gone."""
    async with LocalSystem(CONFIG, heard, services_of=fakes()) as system:
        assert system.child_names == ("nats", "llm_verifier", "ssm_worker", "request_manager")
        pids = [system.pid(name) for name in system.child_names]
        async with httpx.AsyncClient(base_url=system.base_url) as client:
            assert (await client.get("/ready")).status_code == 200
        await system.wait_for_verifier()
    assert all(gone(pid) for pid in pids)
    assert [name for name, line in heard.lines if line == "bye"] == ["request_manager", "ssm_worker", "llm_verifier"]


async def test_operations_ports_are_of_their_own(heard) -> None:
    """One for each service, and none unless asked for."""
    asked: list[str] = []

    def noting(config: SystemConfig, at: Addresses):
        specs = fakes()(config, at)
        asked.extend(part for spec in specs for part in spec.argv if part == "--operations-port")
        return specs

    async with LocalSystem(replace(CONFIG, operations=True), heard, services_of=noting) as system:
        urls = {system.operations_url(name) for name in system.child_names if name != "nats"}
        assert len(urls) == len(asked) == 3
        assert system.base_url not in urls
    specs = services(CONFIG, Addresses("nats://127.0.0.1:1", "127.0.0.1", 2))
    assert not any("--operations-port" in spec.argv for spec in specs)


async def test_a_killed_ssm_comes_back(heard) -> None:
    """Kill -9, and the next life announces itself."""
    async with LocalSystem(CONFIG, heard, FAST, fakes()) as system:
        first = system.pid("ssm_worker")
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(system.wait_for_ssm(), 20)
        assert system.pid("ssm_worker") != first


async def test_a_killed_broker_comes_back_where_it_was(heard) -> None:
    """The services find it again and go on announcing."""
    async with LocalSystem(CONFIG, heard, FAST, fakes()) as system:
        os.kill(system.pid("nats"), signal.SIGKILL)
        await heard.when(lambda h: "nats died" in "".join(h.of("espalier")))
        await asyncio.wait_for(system.wait_for_ssm(), 20)


async def test_a_part_that_refuses_ends_the_start_with_its_own_line(heard) -> None:
    """All others are stopped, and say nothing."""
    with pytest.raises(ChildFailed, match=r"^llm_verifier: model.safetensors is corrupt$"):
        async with LocalSystem(CONFIG, heard, FAST, fakes(llm_verifier="refuse", request_manager="ssm")):
            pass
    assert heard.lines == []


async def test_a_part_that_keeps_dying_ends_the_start(heard) -> None:
    """One line that names it."""
    with pytest.raises(ChildFailed, match=r"^ssm_worker died 5 times within 60 s"):
        async with LocalSystem(CONFIG, heard, FAST, fakes(ssm_worker="crash")):
            pass


async def test_who_is_not_ready_in_time_is_named(heard) -> None:
    """An SSM that announces itself under another name never becomes ready."""
    config = replace(CONFIG, start_timeout_s=1.0)
    with pytest.raises(ChildFailed, match=r"^not ready within 1 s: .*ssm_worker"):
        async with LocalSystem(config, heard, FAST, fakes(ssm_worker="verifier")):
            pass


async def test_work_is_cut_short_when_a_part_gives_up(heard) -> None:
    """The body does not wait for an answer that cannot come."""
    policy = RestartPolicy(first_delay_s=0.001, max_deaths=1)

    async def wait_in_vain() -> None:
        async with LocalSystem(CONFIG, heard, policy, fakes()) as system:
            os.kill(system.pid("llm_verifier"), signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(ChildFailed, match="llm_verifier died"):
        await asyncio.wait_for(wait_in_vain(), 20)


async def test_a_cancelled_start_leaves_nothing(heard) -> None:
    """Ctrl-C while the parts come up."""

    async def start() -> None:
        async with LocalSystem(CONFIG, heard, FAST, fakes(request_manager="ssm")) as system:
            raise AssertionError(system)

    task = asyncio.create_task(start())
    async with asyncio.timeout(20):
        while len(asyncio.all_tasks()) < 8:  # noqa: ASYNC110 - the broker and a service or two are up
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1


async def test_a_port_in_use_is_told_before_anything_starts(heard) -> None:
    """No broker, no service."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = replace(CONFIG, port=server.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            async with LocalSystem(config, heard, services_of=fakes()):
                pass
    assert heard.lines == []


def test_the_children_get_their_flags() -> None:
    """As the services' settings name them."""
    config = replace(CONFIG, dtype="bfloat16", threads=2, tree=(2, 1), ssms=CONFIG.ssms * 2, prefix_cache=False)
    config = replace(config, batch_invariant=True, offload="disk", offload_resident_layers=2)
    modes = "--batch-invariant --offload disk --offload-resident-layers 2"
    specs = {spec.name: spec for spec in services(config, Addresses("nats://127.0.0.1:1", "127.0.0.1", 2))}
    assert list(specs) == ["llm_verifier", "ssm_worker", "ssm_worker-2", "request_manager"]
    common = "--nats-url nats://127.0.0.1:1 --subject-prefix espalier --log-level warning"
    cached = "--dtype bfloat16 --no-prefix-cache"
    assert {name: " ".join(spec.argv[1:]) for name, spec in specs.items() if name != "ssm_worker-2"} == {
        "llm_verifier": f"-m llm_verifier {common} --model /models/llm --name llm {cached} {modes}",
        "ssm_worker": f"-m ssm_worker {common} --ssm /models/draft --teacher /models/llm --name draft {cached}",
        "request_manager": f"-m request_manager {common} --model /models/llm --host 127.0.0.1 --port 2 --tree 2,1",
    }
    assert all(spec.env["OMP_NUM_THREADS"] == "2" for spec in specs.values())


def test_an_ssm_without_weights_gets_its_kind_and_corpus() -> None:
    """And no checkpoint."""
    llm = CONFIG.model.directory
    ssms = tuple(ServedModel("suffix", llm, "suffix", corpus) for corpus in (None, Path("/texts.jsonl")))
    specs = services(replace(CONFIG, ssms=ssms), Addresses("nats://127.0.0.1:1", "127.0.0.1", 2))
    flags = [" ".join(spec.argv) for spec in specs if spec.name.startswith("ssm_worker")]
    assert "--log-level warning --kind suffix --teacher /models/llm --name suffix" in flags[0]
    assert "--log-level warning --kind suffix --corpus /texts.jsonl --teacher /models/llm --name suffix" in flags[1]


def test_the_ranks_of_a_verifier_are_one_group() -> None:
    """Each has its own rank, and all the same sizes and rendezvous; nobody else is in the group."""
    config = replace(CONFIG, tensor_parallel_size=2, pipeline_parallel_size=2)
    specs = services(config, Addresses("nats://127.0.0.1:1", "127.0.0.1", 2, 3))
    ranks = [spec for spec in specs if spec.group == "llm_verifier"]
    assert ranks == list(specs[:4])
    assert [spec.name for spec in ranks] == ["llm_verifier", "llm_verifier-1", "llm_verifier-2", "llm_verifier-3"]
    sizes = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    for rank, spec in enumerate(ranks):
        assert spec.argv[-8:] == (*sizes, "--rank", str(rank), "--rendezvous", "127.0.0.1:3")
