"""Whose requests a worker holds: each manager's own, until a new session or a long silence."""

from treecore.messages import RequestId
from treecore.owners import SILENCE_S, Owners


class Clock:
    """Time, by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def holding(owners: Owners, owner: str, *request_ids: str) -> list[RequestId]:
    """What is over as this owner's message comes, which brings these requests."""
    gone = owners.begin_step(owner)
    for request_id in gone:
        owners.forget(request_id)
    for request_id in request_ids:
        owners.take(RequestId(request_id))
    return gone


def test_managers_do_not_disturb_each_other() -> None:
    """Two that take turns keep what each has."""
    owners = Owners(Clock())
    assert holding(owners, "a.1", "x") == []
    assert holding(owners, "b.1", "y") == []
    assert holding(owners, "a.1", "x") == []
    assert holding(owners, "b.1") == []


def test_a_new_session_starts_from_nothing_but_only_its_own() -> None:
    """What the manager's last session had is over, once; the other manager's is not."""
    owners = Owners(Clock())
    holding(owners, "a.1", "x", "z")
    holding(owners, "b.1", "y")
    assert sorted(holding(owners, "a.2")) == ["x", "z"]
    assert holding(owners, "a.2") == []
    assert holding(owners, "b.2") == ["y"]


def test_a_manager_that_falls_silent_is_gone() -> None:
    """Exactly behind the limit, whoever speaks next; who spoke in between stays."""
    clock = Clock()
    owners = Owners(clock)
    holding(owners, "quiet.1", "x")
    holding(owners, "alive.1", "y")
    clock.now_s += SILENCE_S
    assert holding(owners, "alive.1") == []
    clock.now_s += 0.01
    assert holding(owners, "alive.1") == ["x"]
    assert holding(owners, "quiet.1") == []


def test_what_is_over_is_not_told_again() -> None:
    """Released requests are nobody's."""
    owners = Owners(Clock())
    holding(owners, "a.1", "x")
    owners.forget(RequestId("x"))
    assert holding(owners, "a.2") == []
