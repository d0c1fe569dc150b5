"""Whose requests a worker holds: each manager's own, until a new session or a long silence."""

from treecore.messages import RequestId
from treecore.sessions import SILENCE_S, Sessions


class Clock:
    """Time, by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def holding(sessions: Sessions, session: str, *request_ids: str) -> list[RequestId]:
    """What is over as this session's message comes, which brings these requests."""
    gone = sessions.begin_step(session)
    for request_id in gone:
        sessions.forget(request_id)
    for request_id in request_ids:
        sessions.take(RequestId(request_id))
    return gone


def test_managers_do_not_disturb_each_other() -> None:
    """Two that take turns keep what each has."""
    sessions = Sessions(Clock())
    assert holding(sessions, "a.1", "x") == []
    assert holding(sessions, "b.1", "y") == []
    assert holding(sessions, "a.1", "x") == []
    assert holding(sessions, "b.1") == []


def test_a_new_session_starts_from_nothing_but_only_its_own() -> None:
    """What the manager's last session had is over, once; the other manager's is not."""
    sessions = Sessions(Clock())
    holding(sessions, "a.1", "x", "z")
    holding(sessions, "b.1", "y")
    assert sorted(holding(sessions, "a.2")) == ["x", "z"]
    assert holding(sessions, "a.2") == []
    assert holding(sessions, "b.2") == ["y"]


def test_a_manager_that_falls_silent_is_gone() -> None:
    """Exactly behind the limit, whoever speaks next; who spoke in between stays."""
    clock = Clock()
    sessions = Sessions(clock)
    holding(sessions, "quiet.1", "x")
    holding(sessions, "alive.1", "y")
    clock.now_s += SILENCE_S
    assert holding(sessions, "alive.1") == []
    clock.now_s += 0.01
    assert holding(sessions, "alive.1") == ["x"]
    assert holding(sessions, "quiet.1") == []


def test_what_is_over_is_not_told_again() -> None:
    """Released requests are nobody's."""
    sessions = Sessions(Clock())
    holding(sessions, "a.1", "x")
    sessions.forget(RequestId("x"))
    assert holding(sessions, "a.2") == []
