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
    A pod with several ranks has consecutive ones, told apart by --local-rank.
    Rendezvous: --rendezvous, else LWS_LEADER_ADDRESS, else the first pod of the group, both with --group-port.
    """
    size = settings.tensor_parallel_size * settings.pipeline_parallel_size
    num_pods = _num_pods(settings, environ)
    pod = _pod(settings.group_service, hostname, num_pods)
    rank = _rank(settings, environ, pod, num_pods)
    where = settings.rendezvous or _leader_address(settings, environ, pod, num_pods)
    if size > 1 and where is None:
        raise ConfigError(f"a group of {size} ranks needs --rendezvous, LWS_LEADER_ADDRESS or --group-service")
    rendezvous = _address(where or "127.0.0.1:0")
    return Seat(rank, settings.tensor_parallel_size, settings.pipeline_parallel_size, rendezvous)


@dataclass(frozen=True, slots=True)
class _Pod:
    """What a StatefulSet's hostname tells. With groups of n pods, 0..n-1 are the first, the next n the second, ...

    idx: within its group. leader: the group's first pod.
    """

    idx: int
    leader: str
    hostname: str


def _num_pods(settings: GroupSettings, environ: Mapping[str, str]) -> int:
    """Of a group; raises ConfigError if its ranks do not fill pods, or a LeaderWorkerSet says otherwise."""
    size = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if size % settings.ranks_per_pod:
        raise ConfigError(f"--ranks-per-pod {settings.ranks_per_pod} does not divide the {size} ranks of the group")
    num_pods = size // settings.ranks_per_pod
    told = environ.get("LWS_GROUP_SIZE")
    if told is not None and told != str(num_pods):
        ranks = "--tensor-parallel-size x --pipeline-parallel-size / --ranks-per-pod"
        raise ConfigError(f"LWS_GROUP_SIZE={told} contradicts {ranks} = {num_pods}")
    return num_pods


def _pod(service: str | None, hostname: str, num_pods: int) -> _Pod | None:
    if service is None:
        return None
    found = re.fullmatch(r"(.+)-(\d+)", hostname)
    if not found:
        raise ConfigError(f"--group-service: the hostname {hostname!r} does not end in a StatefulSet's ordinal")
    ordinal = int(found[2])
    return _Pod(ordinal % num_pods, f"{found[1]}-{ordinal // num_pods * num_pods}.{service}", hostname)


def _rank(settings: GroupSettings, environ: Mapping[str, str], pod: _Pod | None, num_pods: int) -> int:
    per_pod, local = settings.ranks_per_pod, settings.local_rank or 0
    size = num_pods * per_pod
    if local >= per_pod:
        raise ConfigError(f"--local-rank {local}: a pod has the local ranks 0 to {per_pod - 1}")
    claims = {} if settings.rank is None else {f"--rank {settings.rank}": settings.rank}
    if (index := environ.get("LWS_WORKER_INDEX")) is not None:
        claims[f"LWS_WORKER_INDEX={index}"] = _index(index) * per_pod + local
    if pod is not None:
        claims[f"the ordinal of {pod.hostname}"] = pod.idx * per_pod + local
    if not claims and num_pods > 1:
        raise ConfigError(f"a group of {size} ranks needs --rank, LWS_WORKER_INDEX or --group-service")
    if len(set(claims.values())) > 1:
        raise ConfigError(f"{' contradicts '.join(claims)}: which rank is this?")
    rank = next(iter(claims.values()), local)
    if rank >= size:
        raise ConfigError(f"{next(iter(claims))}: the group has ranks 0 to {size - 1}")
    return rank


def _index(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"LWS_WORKER_INDEX={text} is no number")
    return int(text)


def _leader_address(settings: GroupSettings, environ: Mapping[str, str], pod: _Pod | None, num_pods: int) -> str | None:
    host = environ.get("LWS_LEADER_ADDRESS") or (pod.leader if pod else None)
    if settings.ranks_per_pod > 1 and num_pods == 1:
        host = "127.0.0.1"  # the whole group is here, and a pod need not be able to resolve itself
    return f"{host}:{settings.group_port}" if host else None


def _address(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--rendezvous {where}: must look like host:port")
    return host.strip("[]"), int(port)
