"""A whole Espalier on this machine: which children make it up, and when it is ready.

`async with LocalSystem(config) as system:` is how the command, the benchmarks and the tests get one.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx

from espalier_local import broker
from espalier_local.child import ChildSpec, LineSink
from espalier_local.client import Tree
from espalier_local.models import ServedModel
from espalier_local.ports import ReservedPort
from espalier_local.rollcall import SUBJECT_PREFIX, RollCall
from espalier_local.supervise import ChildFailed, RestartPolicy, Supervisor
from treecore.messages import WorkerKind
from treecore.service.tasks import first_of

Dtype = Literal["float32", "bfloat16", "float16"]
Offload = Literal["none", "cpu", "disk"]
LogLevel = Literal["debug", "info", "warning", "error"]

VERIFIER = "llm_verifier"
SSM = "ssm_worker"
MANAGER = "request_manager"
GATEWAY = "gateway"

_POLL_S = 0.05
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """What a system serves and how. port 0: any free one. tree None: the manager's default.

    batch_invariant: the verifier's logits do not depend on tree or batch, bit by bit. offload: where its
    layers are while they do not compute, the first offload_resident_layers excepted. threads: CPU threads of each
    model process. start_timeout_s: for everything to become ready. The verifier is
    tensor_parallel_size x pipeline_parallel_size processes. split: gateway and manager are processes of their own, as
    in a cluster. operations: every process has an operations port, on this machine alone.
    """

    model: ServedModel
    ssms: tuple[ServedModel, ...] = ()
    dtype: Dtype = "float32"
    threads: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    tree: Tree | None = None
    draft_ahead: bool = True
    batch_invariant: bool = False
    offload: Offload = "none"
    offload_resident_layers: int = 0
    prefix_cache: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    split: bool = False
    operations: bool = False
    log_level: LogLevel = "warning"
    start_timeout_s: float = 300.0

    @property
    def num_ranks(self) -> int:
        """Processes of the verifier."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the parts of one system meet; the verifier's ranks at rendezvous_port. operations: ports, by child."""

    nats_url: str
    host: str
    port: int
    rendezvous_port: int = 0
    operations: Mapping[str, int] = field(default_factory=dict)


ServicesOf = Callable[[SystemConfig, Addresses], tuple[ChildSpec, ...]]


def services(config: SystemConfig, at: Addresses) -> tuple[ChildSpec, ...]:
    """The services of a system, in the order of their start; the broker comes before them."""
    teacher = str(config.model.directory)
    model = ("--model", teacher)
    worker_flags = ("--dtype", config.dtype, *(() if config.prefix_cache else ("--no-prefix-cache",)))
    listen = ("--host", at.host, "--port", str(at.port))

    def service(name: str, module: str, *flags: str, group: str | None = None) -> ChildSpec:
        common = ("--nats-url", at.nats_url, "--subject-prefix", SUBJECT_PREFIX, "--log-level", config.log_level)
        operations = ("--operations-port", str(at.operations[name])) if name in at.operations else ()
        env = {"OMP_NUM_THREADS": str(config.threads), "PYTHONUNBUFFERED": "1"}
        return ChildSpec(
            name, (sys.executable, "-m", module, *common, *operations, *flags), speaks_as=module, env=env, group=group
        )

    workers = [
        service(ssm_child(idx), SSM, *_kind_flags(ssm), "--teacher", teacher, "--name", ssm.name, *worker_flags)
        for idx, ssm in enumerate(config.ssms)
    ]
    verifier_flags = (*model, "--name", config.model.name, *worker_flags, *_mode_flags(config))
    ranks = [
        service(rank_child(rank), VERIFIER, *verifier_flags, *_rank_flags(config, at, rank), group=VERIFIER)
        for rank in range(config.num_ranks)
    ]
    tree_flags = _tree_flags(config)
    front = [service(MANAGER, MANAGER, *model, *listen, *tree_flags)]
    if config.split:
        gateway = service(GATEWAY, MANAGER, "--role", "gateway", *model, *listen)
        front = [service(MANAGER, MANAGER, "--role", "manager", *tree_flags), gateway]
    return (
        *ranks,
        *workers,
        *front,
    )


def _kind_flags(ssm: ServedModel) -> tuple[str, ...]:
    if ssm.kind == "model":
        return ("--ssm", str(ssm.directory))
    return ("--kind", ssm.kind, *(() if ssm.corpus is None else ("--corpus", str(ssm.corpus))))


def _tree_flags(config: SystemConfig) -> tuple[str, ...]:
    ahead = () if config.draft_ahead else ("--no-draft-ahead",)
    if config.tree is None:
        return ahead
    return (*ahead, "--tree", config.tree if isinstance(config.tree, str) else ",".join(map(str, config.tree)))


def _mode_flags(config: SystemConfig) -> tuple[str, ...]:
    invariant = ("--batch-invariant",) if config.batch_invariant else ()
    if config.offload == "none":
        return invariant
    return (*invariant, "--offload", config.offload, "--offload-resident-layers", str(config.offload_resident_layers))


def _rank_flags(config: SystemConfig, at: Addresses, rank: int) -> tuple[str, ...]:
    if config.num_ranks == 1:
        return ()
    sizes = {"tensor": config.tensor_parallel_size, "pipeline": config.pipeline_parallel_size}
    size_flags = [part for kind, size in sizes.items() for part in (f"--{kind}-parallel-size", str(size))]
    return (*size_flags, "--rank", str(rank), "--rendezvous", f"{broker.HOST}:{at.rendezvous_port}")


def rank_child(rank: int) -> str:
    """The name of a verifier rank's process: llm_verifier, llm_verifier-1, ..."""
    return VERIFIER if rank == 0 else f"{VERIFIER}-{rank}"


def ssm_child(idx: int) -> str:
    """The name of the idx-th SSM's process: ssm_worker, ssm_worker-2, ..."""
    return SSM if idx == 0 else f"{SSM}-{idx + 1}"


class LocalSystem:
    """A running system. Entering starts every part and returns when a token can be produced and every SSM can draft.

    Entering raises ConfigError (the port is in use, nats-server is missing) and ChildFailed (a part refused to start,
    kept dying or was not ready in time). A part that gives up later cancels the body, and leaving raises ChildFailed.
    Leaving, however it comes about, stops all parts and removes their files.
    """

    def __init__(
        self,
        config: SystemConfig,
        sink: LineSink = lambda _name, _line: None,
        policy: RestartPolicy | None = None,
        services_of: ServicesOf = services,
    ) -> None:
        self._config = config
        self._services_of = services_of
        self._sink = sink
        self._supervisor = Supervisor(self._log, policy)
        self._rollcall = RollCall()
        self._ports: list[ReservedPort] = []
        self._directory: Path | None = None
        self._addresses: Addresses | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._lost: ChildFailed | None = None
        self._is_quiet = False

    async def __aenter__(self) -> "LocalSystem":
        """See the class."""
        try:
            self._addresses = self._reserve()
            await self._start(self._addresses)
        except BaseException:
            self._is_quiet = True  # the error is the last word, not what the others say as they go
            await self._stop()
            raise
        self._alarm = asyncio.create_task(self._cancel_on_failure(asyncio.current_task()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See the class."""
        await self._stop()
        if self._lost is not None and isinstance(error, asyncio.CancelledError):
            raise self._lost from error

    @property
    def config(self) -> SystemConfig:
        """What this system was started with."""
        return self._config

    @property
    def base_url(self) -> str:
        """http://host:port of the gateway, without a path."""
        at = self._at
        host = _ANY_HOST.get(at.host, at.host)
        return f"http://[{host}]:{at.port}" if ":" in host else f"http://{host}:{at.port}"

    def operations_url(self, child_name: str) -> str:
        """http://host:port of a service's operations port, without a path."""
        return f"http://{broker.HOST}:{self._at.operations[child_name]}"

    @property
    def nats_url(self) -> str:
        """Where the broker listens."""
        return self._at.nats_url

    @property
    def child_names(self) -> tuple[str, ...]:
        """nats, llm_verifier (llm_verifier-1, ...), ssm_worker (ssm_worker-2, ...), request_manager (, gateway)."""
        return self._supervisor.names()

    def pid(self, child_name: str) -> int:
        """The process id of a part; it changes when the part is started again."""
        return self._supervisor.pid(child_name)

    async def wait_for_ssm(self, idx: int = 0) -> None:
        """Until the idx-th SSM announces itself afresh: after a kill, until its next life can draft."""
        await self._rollcall.next_announcement("ssm", self._config.ssms[idx].name)

    async def wait_for_verifier(self) -> None:
        """Until the verifier announces itself afresh."""
        await self._rollcall.next_announcement("verifier", self._config.model.name)

    @property
    def _at(self) -> Addresses:
        assert self._addresses is not None, "enter the system first"
        return self._addresses

    def _reserve(self) -> Addresses:
        http = self._hold(ReservedPort(self._config.host, self._config.port))
        ranks = self._hold(ReservedPort(broker.HOST, 0))
        operations = self._reserve_operations()
        nats = self._hold(ReservedPort(broker.HOST, 0))
        return Addresses(broker.nats_url(nats.number), self._config.host, http.number, ranks.number, operations)

    def _reserve_operations(self) -> dict[str, int]:
        if not self._config.operations:
            return {}
        nowhere = Addresses("", self._config.host, 0)
        names = [spec.name for spec in self._services_of(self._config, nowhere)]
        return {name: self._hold(ReservedPort(broker.HOST, 0)).number for name in names}

    def _hold(self, port: ReservedPort) -> ReservedPort:
        self._ports.append(port)
        return port

    async def _cancel_on_failure(self, owner: asyncio.Task[Any] | None) -> None:
        """What `asyncio.timeout` does, for another reason: interrupt the body of the `async with`."""
        try:
            await self._supervisor.failure()
        except ChildFailed as failure:
            self._lost = failure
            if owner is not None:
                owner.cancel()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`; raises ChildFailed, and cancels it, as soon as a part has given up."""
        await first_of(work, self._supervisor.failure())

    async def _start(self, at: Addresses) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="espalier-"))
        nats_port = self._ports[-1].number
        await self._supervisor.start(broker.broker_spec(self._directory, nats_port))
        await self._guard(self._when_listening(at, nats_port))
        for _, group in groupby(self._services_of(self._config, at), key=lambda spec: spec.group or spec.name):
            await self._supervisor.start(*group)
        await self._guard(self._when_ready())

    async def _when_listening(self, at: Addresses, nats_port: int) -> None:
        await broker.wait_listening(nats_port)
        self._supervisor.mark_ready(broker.NAME)
        await self._rollcall.listen(at.nats_url)

    async def _when_ready(self) -> None:
        timeout_s = self._config.start_timeout_s
        front = {MANAGER, GATEWAY} if self._config.split else {MANAGER}
        waiting = {VERIFIER, *front}
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(self._when_answering((VERIFIER, *front), waiting))
                for idx, ssm in enumerate(self._config.ssms):
                    waiting.add(ssm_child(idx))
                    group.create_task(self._when_announced("ssm", ssm.name, ssm_child(idx), waiting))
        except TimeoutError as error:
            raise ChildFailed(f"not ready within {timeout_s:g} s: {', '.join(sorted(waiting))}") from error

    async def _when_announced(self, kind: WorkerKind, name: str, child_name: str, waiting: set[str]) -> None:
        await self._rollcall.next_announcement(kind, name)
        self._supervisor.mark_ready(child_name)
        waiting.discard(child_name)

    async def _when_answering(self, child_names: Iterable[str], waiting: set[str]) -> None:
        async with httpx.AsyncClient(base_url=self.base_url, timeout=5.0, trust_env=False) as client:
            while not await _is_ready(client):  # noqa: ASYNC110 - another process: there is no event
                await asyncio.sleep(_POLL_S)
        for child_name in child_names:
            self._supervisor.mark_ready(child_name)
            waiting.discard(child_name)

    def _log(self, name: str, line: str) -> None:
        if self._is_quiet or (name == broker.NAME and "[INF]" in line and self._config.log_level != "debug"):
            return
        self._sink(name, line)

    async def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        try:
            await self._rollcall.close()
        finally:
            try:
                await self._supervisor.stop()
            finally:
                self._clean_up()

    def _clean_up(self) -> None:
        for port in self._ports:
            port.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
