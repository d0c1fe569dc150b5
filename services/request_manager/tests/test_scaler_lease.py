"""One scaler acts: leases taken, kept, lost, given up, with clocks that do not agree and an API that fails."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from kubernetes.aio.client import ApiClient

from request_manager.scaler.kubernetes import connect
from request_manager.scaler.lease import Candidacy, Lease, Terms
from request_manager.scaler.testing import NAMESPACE, FakeKubernetes, Fault, Misbehaviour, fake_kubernetes, role

TERMS = Terms(duration_s=30, hold_s=20.0, interval_s=5.0, timeout_s=9.0)
HOW = [400, 403, 409, 500, "hang", "hang up", "html", "nonsense"]


class Candidate(Lease):
    """With a clock of its own, by hand."""

    def __init__(self, client: ApiClient, identity: str, now_s: float) -> None:
        self.now_s = now_s
        super().__init__(client, Candidacy(NAMESPACE, "lease", identity), lambda: self.now_s, TERMS)

    async def turn_after(self, seconds: float) -> bool:
        """A turn so much later; whether it then holds the lease."""
        self.now_s += seconds
        await self.turn()
        return self.is_held()

    @contextmanager
    def failing(self, kubernetes: FakeKubernetes, fault: Fault) -> Iterator[None]:
        """With a fault, also if the client tries again by itself, and little patience if nothing comes."""
        kubernetes.faults += [fault] * 2
        if fault.how == "hang":
            self._terms = replace(TERMS, timeout_s=0.1)
        yield
        kubernetes.faults.clear()
        self._terms = TERMS


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    """A cluster without the lease."""
    with fake_kubernetes(role([], [], "lease")) as kubernetes:
        yield kubernetes


@pytest.fixture
async def client(kubernetes: FakeKubernetes) -> AsyncIterator[ApiClient]:
    """Its API."""
    async with connect(kubernetes.url) as client:
        yield client


@pytest.fixture
def a(client: ApiClient) -> Candidate:
    """A candidate."""
    return Candidate(client, "a", 1000.0)


@pytest.fixture
def b(client: ApiClient) -> Candidate:
    """Another one, on a machine that was started long ago."""
    return Candidate(client, "b", 900000.0)


async def test_the_first_takes_it_and_keeps_it(kubernetes: FakeKubernetes, a: Candidate, b: Candidate) -> None:
    """The other watches for as long as the lease changes."""
    assert not a.is_held()
    assert await a.turn_after(0)
    for _ in range(20):
        assert await a.turn_after(5)
        assert not await b.turn_after(5)
    spec = kubernetes.objects["leases", "lease"]["spec"]
    assert spec["holderIdentity"] == "a"
    assert spec["leaseDurationSeconds"] == 30
    assert spec["leaseTransitions"] == 0
    assert spec["acquireTime"] < spec["renewTime"]


async def test_a_holder_that_falls_silent_stops_before_another_begins(a: Candidate, b: Candidate) -> None:
    """20 s after it last asked; the other one waits for 30 s from when it first looked."""
    await a.turn()
    assert not await b.turn_after(0)
    a.now_s += 19.9
    assert a.is_held()
    a.now_s += 0.2
    assert not a.is_held()
    assert not await b.turn_after(29.9)
    assert await b.turn_after(0.2)
    assert not await a.turn_after(0)


async def test_who_is_late_loses_to_who_wrote_in_between(
    kubernetes: FakeKubernetes, a: Candidate, b: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the same version: the second write conflicts, and its author stops."""
    await a.turn()
    read = a._read

    async def read_and_sleep() -> object:
        lease = await read()
        await b.turn_after(0)
        await b.turn_after(31)
        return lease

    monkeypatch.setattr(a, "_read", read_and_sleep)
    assert not await a.turn_after(5)
    assert b.is_held()
    assert kubernetes.holder("lease") == "b"


async def test_two_that_create_it_at_once(
    kubernetes: FakeKubernetes, a: Candidate, b: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them gets a conflict."""
    read = a._read

    async def read_and_sleep() -> object:
        lease = await read()
        await b.turn()
        return lease

    monkeypatch.setattr(a, "_read", read_and_sleep)
    assert not await a.turn_after(0)
    assert b.is_held()
    assert kubernetes.holder("lease") == "b"


async def test_what_is_given_up_is_free_at_once(kubernetes: FakeKubernetes, a: Candidate, b: Candidate) -> None:
    """A rolling update of the scaler does not wait for leases to end."""
    await a.turn()
    assert not await b.turn_after(0)
    await a.release()
    assert not a.is_held()
    assert await b.turn_after(1)
    assert kubernetes.objects["leases", "lease"]["spec"]["leaseTransitions"] == 1
    await a.release()
    assert kubernetes.holder("lease") == "b"


async def test_a_slow_answer_does_not_prolong_it(a: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others count from when the API wrote, which is after we asked."""
    read = a._read

    async def read_slowly() -> object:
        a.now_s += 8
        return await read()

    monkeypatch.setattr(a, "_read", read_slowly)
    for _ in range(2):
        await a.turn()
        a.now_s += 11.9
        assert a.is_held()
        a.now_s += 0.2
        assert not a.is_held()


async def test_what_somebody_else_holds_is_not_given_up(kubernetes: FakeKubernetes, a: Candidate) -> None:
    """Even if the clock here says that it is ours."""
    await a.turn()
    kubernetes.objects["leases", "lease"]["spec"]["holderIdentity"] = "b"
    await a.release()
    assert kubernetes.holder("lease") == "b"


async def test_releasing_never_fails(kubernetes: FakeKubernetes, a: Candidate) -> None:
    """Then it ends by itself."""
    await a.turn()
    kubernetes.faults.append(Fault("PUT", "lease", 500))
    await a.release()
    assert not a.is_held()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", ["GET", "PUT"])
async def test_a_failed_renewal_is_one_line_and_tried_again(
    kubernetes: FakeKubernetes, a: Candidate, caplog: pytest.LogCaptureFixture, method: str, how: Misbehaviour
) -> None:
    """The lease is kept meanwhile, except after a conflict: then somebody else has written."""
    await a.turn()
    caplog.clear()
    with a.failing(kubernetes, Fault(method, "lease", how)):
        assert await a.turn_after(5) is (how != 409)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == ["lease call failed"]
    assert await a.turn_after(5)


@pytest.mark.parametrize("how", HOW)
async def test_a_failed_creation_is_tried_again(kubernetes: FakeKubernetes, a: Candidate, how: Misbehaviour) -> None:
    """Nothing is held that was not confirmed."""
    with a.failing(kubernetes, Fault("POST", "leases", how)):
        assert not await a.turn_after(0)
    assert await a.turn_after(5)


async def test_an_api_that_stays_away_ends_it(
    kubernetes: FakeKubernetes, a: Candidate, caplog: pytest.LogCaptureFixture
) -> None:
    """After 20 s, not before; taken and lost are told once each."""
    caplog.set_level(logging.INFO)
    await a.turn()
    kubernetes.faults += [Fault("GET", "lease", 500)] * 6
    assert [await a.turn_after(5) for _ in range(6)] == [True, True, True, False, False, False]
    told = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert told == ["lease taken", "lease lost"]


async def test_a_lease_without_a_holder_is_free(kubernetes: FakeKubernetes, a: Candidate) -> None:
    """As somebody may have made it by hand."""
    kubernetes.objects["leases", "lease"] = {"metadata": {"name": "lease", "resourceVersion": "7"}, "spec": {}}
    assert await a.turn_after(0)


async def test_the_times_leave_room_for_a_last_call() -> None:
    """What a holder sent at its last moment has arrived before anybody else may act."""
    assert Terms().hold_s + Terms().timeout_s < Terms().duration_s
    with pytest.raises(AssertionError):
        Terms(duration_s=20, hold_s=16.0, timeout_s=5.0)
