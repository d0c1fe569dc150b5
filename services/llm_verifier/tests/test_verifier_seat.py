"""Who am I, and where does my group meet: settings, LeaderWorkerSet, StatefulSet, and what contradicts."""

from pathlib import Path
from typing import Any

import pytest

from llm_verifier.group.seat import Seat, find_seat
from llm_verifier.settings import VerifierSettings
from treecore.errors import ConfigError
from treecore.model.parallel import Place


def seat(environ: dict[str, str] | None = None, hostname: str = "host", **settings: Any) -> Seat:
    """The seat in a 2x2 group, if not said otherwise."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return find_seat(VerifierSettings(model=Path("m"), **{**sizes, **settings}), environ or {}, hostname)


def lws(index: int, size: int = 4) -> dict[str, str]:
    """What a LeaderWorkerSet sets."""
    return {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "group-0.svc", "LWS_GROUP_SIZE": str(size)}


def test_one_rank_needs_nothing() -> None:
    """The default."""
    assert seat(tensor_parallel_size=1, pipeline_parallel_size=1).size == 1


def test_ranks_of_a_stage_are_neighbours() -> None:
    """As rank = pp_rank * tp_size + tp_rank."""
    places = [seat(rank=rank, rendezvous="a:1").place for rank in range(4)]
    assert places == [Place(0, 2, 0, 2), Place(1, 2, 0, 2), Place(0, 2, 1, 2), Place(1, 2, 1, 2)]


@pytest.mark.parametrize("where", ["10.0.0.1:7800", "[fd00::1]:7800", "leader.svc:7800"])
def test_explicit_settings(where: str) -> None:
    """Host and port as told."""
    found = seat(rank=3, rendezvous=where)
    assert (found.rank, found.rendezvous) == (3, (where.removesuffix(":7800").strip("[]"), 7800))


def test_a_leader_worker_set_says_it_all() -> None:
    """Index, leader and size."""
    found = seat(lws(2), group_port=99)
    assert (found.rank, found.rendezvous) == (2, ("group-0.svc", 99))


@pytest.mark.parametrize(("ordinal", "rank", "leader"), [(0, 0, 0), (3, 3, 0), (4, 0, 4), (6, 2, 4)])
def test_a_stateful_set_holds_groups_one_after_another(ordinal: int, rank: int, leader: int) -> None:
    """Pods 0-3 are one group, 4-7 the next."""
    found = seat(hostname=f"my-llm-{ordinal}", group_service="ranks")
    assert (found.rank, found.rendezvous) == (rank, (f"my-llm-{leader}.ranks", 7800))


def test_an_explicit_rendezvous_wins() -> None:
    """It may be another name of the same host, so it is no contradiction."""
    assert seat(lws(1), rendezvous="here:1").rendezvous == ("here", 1)


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        ({}, {"rendezvous": "a:1"}, "needs --rank"),
        ({}, {"rank": 1}, "needs --rendezvous"),
        ({}, {"rank": 4, "rendezvous": "a:1"}, r"--rank 4: the group has ranks 0 to 3"),
        (lws(1), {"rank": 2}, r"--rank 2 contradicts LWS_WORKER_INDEX=1"),
        (lws(1), {"group_service": "s"}, r"LWS_WORKER_INDEX=1 contradicts the ordinal of pod-2"),
        (lws(1, size=8), {}, r"LWS_GROUP_SIZE=8 contradicts"),
        (lws(1), {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}, r"LWS_GROUP_SIZE=4 contradicts .* = 1"),
        ({**lws(1), "LWS_WORKER_INDEX": "-1"}, {}, "LWS_WORKER_INDEX=-1 is no number"),
        ({}, {"rank": 1, "rendezvous": "nowhere"}, "must look like host:port"),
        ({}, {"rank": 1, "rendezvous": "a:99999"}, "must look like host:port"),
        (
            {},
            {"rank": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1},
            "--rank 1: the group has ranks 0 to 0",
        ),
    ],
)
def test_what_is_absent_or_contradicts_is_named(environ: dict[str, str], settings: dict[str, Any], words: str) -> None:
    """One line each."""
    with pytest.raises(ConfigError, match=words):
        seat(environ, "pod-2", **settings)


def test_a_hostname_without_an_ordinal() -> None:
    """A StatefulSet's has one."""
    with pytest.raises(ConfigError, match="'host' does not end in"):
        seat(group_service="s")


@pytest.mark.parametrize(
    ("ordinal", "local", "rank", "leader"), [(0, 1, 1, 0), (1, 0, 2, 0), (2, 1, 1, 2), (3, 1, 3, 2)]
)
def test_pods_with_several_ranks(ordinal: int, local: int, rank: int, leader: int) -> None:
    """Two ranks a pod, two pods a group: pods 0 and 1, 2 and 3."""
    found = seat(hostname=f"llm-{ordinal}", group_service="ranks", ranks_per_pod=2, local_rank=local)
    assert (found.rank, found.rendezvous) == (rank, (f"llm-{leader}.ranks", 7800))


def test_a_leader_worker_set_of_pods_with_several_ranks() -> None:
    """Its index and size count pods."""
    found = seat(lws(1, size=2), ranks_per_pod=2, local_rank=1)
    assert (found.rank, found.rendezvous) == (3, ("group-0.svc", 7800))


@pytest.mark.parametrize("environ", [{}, lws(0, size=1)])
def test_a_group_within_one_pod_meets_there(environ: dict[str, str]) -> None:
    """It needs no name, and no network."""
    found = seat(environ, ranks_per_pod=4, local_rank=3)
    assert (found.rank, found.rendezvous) == (3, ("127.0.0.1", 7800))


@pytest.mark.parametrize(
    ("environ", "settings", "words"),
    [
        ({}, {"ranks_per_pod": 3}, "--ranks-per-pod 3 does not divide the 4 ranks"),
        ({}, {"ranks_per_pod": 2, "local_rank": 2}, "--local-rank 2: a pod has the local ranks 0 to 1"),
        ({}, {"ranks_per_pod": 2, "local_rank": 0}, "a group of 4 ranks needs --rank"),
        (lws(1, size=4), {"ranks_per_pod": 2, "local_rank": 0}, r"LWS_GROUP_SIZE=4 contradicts .* = 2"),
        (lws(0, size=1), {"ranks_per_pod": 4, "local_rank": 1, "rank": 2}, "--rank 2 contradicts LWS_WORKER_INDEX=0"),
    ],
)
def test_what_is_wrong_with_pods_is_named(environ: dict[str, str], settings: dict[str, Any], words: str) -> None:
    """One line each."""
    with pytest.raises(ConfigError, match=words):
        seat(environ, "pod", **settings)
