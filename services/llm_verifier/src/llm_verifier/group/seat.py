"""Which rank this process is and where its group meets: from settings, a LeaderWorkerSet or a StatefulSet. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llm_verifier.settings import GroupSettings
from treecore.errors import ConfigError
from treecore.model.parallel import Place


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's seat. rank = pp_rank * tp_size + tp_rank; `rendezvous` is where rank 0 waits for the others."""

    rank: int
    tp_size: int
    pp_size: int
    rendezvous: tuple[str, int]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.tp_size * self.pp_size

    @property
    def place(self) -> Place:
        """The part of the model that is this rank's."""
        return place_of(self.rank, self.tp_size, self.pp_size)


def place_of(rank: int, tp_size: int, pp_size: int) -> Place:
    """The place of a rank: tensor-parallel ranks of one stage are neighbours."""
    return Place(rank % tp_size, tp_size, rank // tp_size, pp_size)


def is_loopback(host: str) -> bool:
    """Whether the group is on this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def find_seat(settings: GroupSettings, environ: Mapping[str, str], hostname: str) -> Seat:
    """The seat that the settings and the environment give; raises ConfigError naming what is absent or contradicts.

    Rank: --rank, LWS_WORKER_INDEX, the hostname's ordinal (with --group-service); where several say it they must agree.
    Rendezvous: --rendezvous, else LWS_LEADER_ADDRESS, else the first pod of the group, both with --group-port.
    """
    size = settings.tensor_parallel_size * settings.pipeline_parallel_size
    _check_size(size, environ)
    pod = _pod(settings.group_service, hostname, size)
    rank = _rank(settings.rank, environ, pod, size)
    where = settings.rendezvous or _leader_address(environ, pod, settings.group_port)
    if size > 1 and where is None:
        raise ConfigError(f"a group of {size} ranks needs --rendezvous, LWS_LEADER_ADDRESS or --group-service")
    rendezvous = _address(where or "127.0.0.1:0")
    return Seat(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size, rendezvous)


@dataclass(frozen=True, slots=True)
class _Pod:
    """What a StatefulSet's hostname tells. Pods 0..size-1 are the first group, the next `size` the second, ..."""

    rank: int
    leader: str
    hostname: str


def _pod(service: str | None, hostname: str, size: int) -> _Pod | None:
    if service is None:
        return None
    found = re.fullmatch(r"(.+)-(\d+)", hostname)
    if not found:
        raise ConfigError(f"--group-service: the hostname {hostname!r} does not end in a StatefulSet's ordinal")
    ordinal = int(found[2])
    return _Pod(ordinal % size, f"{found[1]}-{ordinal // size * size}.{service}", hostname)


def _check_size(size: int, environ: Mapping[str, str]) -> None:
    told = environ.get("LWS_GROUP_SIZE")
    if told is not None and told != str(size):
        raise ConfigError(
            f"LWS_GROUP_SIZE={told} contradicts --tensor-parallel-size x --pipeline-parallel-size = {size}"
        )


def _rank(setting: int | None, environ: Mapping[str, str], pod: _Pod | None, size: int) -> int:
    claims = {} if setting is None else {f"--rank {setting}": setting}
    if (index := environ.get("LWS_WORKER_INDEX")) is not None:
        claims[f"LWS_WORKER_INDEX={index}"] = _index(index)
    if pod is not None:
        claims[f"the ordinal of {pod.hostname}"] = pod.rank
    if not claims and size > 1:
        raise ConfigError(f"a group of {size} ranks needs --rank, LWS_WORKER_INDEX or --group-service")
    if len(set(claims.values())) > 1:
        raise ConfigError(f"{' contradicts '.join(claims)}: which rank is this?")
    rank = next(iter(claims.values()), 0)
    if rank >= size:
        raise ConfigError(f"{next(iter(claims))}: the group has ranks 0 to {size - 1}")
    return rank


def _index(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"LWS_WORKER_INDEX={text} is no number")
    return int(text)


def _leader_address(environ: Mapping[str, str], pod: _Pod | None, port: int) -> str | None:
    host = environ.get("LWS_LEADER_ADDRESS") or (pod.leader if pod else None)
    return f"{host}:{port}" if host else None


def _address(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {where}: must look like host:port")
    return host.strip("[]"), int(port)
