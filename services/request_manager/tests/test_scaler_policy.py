"""The policy alone: how many replicas, for what reason, and when it must keep its hands off."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_manager.scaler.policy import Decision, Limits, Memory, Reading, Reason, acted, decide, remember

PERIOD_S = 15.0
LIMITS = Limits(min_replicas=1, max_replicas=6, requests_per_replica=10, step_up=2, step_down=1, cooldown_down_s=300.0)
IDLE = Reading(at_s=0.0, running=0, waiting=0, live=1, pressure=0.0)


class Steered:
    """A target that does at once what is decided, turn by turn."""

    def __init__(self, replicas: int, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.replicas = replicas
        self.now_s = 1000.0
        self.memory = Memory()

    def turn(self, reading: Reading | None = IDLE, live: int | None = None) -> Decision:
        """One period later, with such a reading."""
        self.now_s += PERIOD_S
        if reading is not None:
            reading = replace(reading, at_s=self.now_s, live=self.replicas if live is None else live)
        self.memory = remember(self.limits, self.memory, self.replicas, reading)
        decision = decide(self.limits, self.memory, self.now_s)
        self.memory = acted(self.memory, decision, self.now_s)
        self.replicas = decision.replicas
        return decision

    def turns(self, num: int, reading: Reading | None = IDLE) -> list[int]:
        """The replicas after each of so many turns."""
        return [self.turn(reading).replicas for _ in range(num)]


def busy(running: int, waiting: int = 0, pressure: float | None = 0.5) -> Reading:
    """A load."""
    return replace(IDLE, running=running, waiting=waiting, pressure=pressure)


def test_requests_that_do_not_fit_get_replicas_in_the_second_turn() -> None:
    """One look may have caught a moment; two that agree have not. Then in steps, to what is needed."""
    target = Steered(1)
    assert target.turns(4, busy(10, 40)) == [1, 3, 5, 5]


def test_a_moment_s_burst_changes_nothing() -> None:
    """Many requests at every second look only."""
    target = Steered(1)
    assert {target.turn(busy(10, 40 * (i % 2))).replicas for i in range(20)} == {1}


def test_a_slow_period_gets_a_replica_at_once() -> None:
    """A quantile is no moment. Its size says little about how many are missing: at most as many again as work."""
    target = Steered(1)
    decision = target.turn(busy(8, 1, pressure=40.0))
    assert decision == Decision(1, 2, Reason.PRESSURE)


def test_pressure_waits_for_what_it_has_asked_for() -> None:
    """While the new replica starts, the old one's slowness asks for no third; nor in the cooldown after its arrival."""
    target = Steered(1)
    slow = busy(9, 9, pressure=40.0)
    target.turn(slow, live=1)
    assert [target.turn(slow, live=1).replicas for _ in range(20)] == [2] * 20
    assert [target.turn(slow, live=2).replicas for _ in range(4)] == [2] * 4
    assert target.turn(slow, live=2).replicas == 4


def test_pressure_of_few_requests_is_no_reason_for_more() -> None:
    """Neither of too few to tell, nor for more replicas than there are requests."""
    assert Steered(1).turn(replace(busy(5, pressure=3.0), is_significant=False)).reason == Reason.ENOUGH
    assert Steered(2).turn(busy(2, pressure=3.0)).reason == Reason.ENOUGH


def test_fewer_only_after_they_have_been_enough_for_the_whole_cooldown() -> None:
    """One at a time, and each time anew."""
    target = Steered(3)
    replicas = target.turns(60)
    assert replicas == [3] * 20 + [2] * 21 + [1] * 19
    assert replicas.index(2) * PERIOD_S == LIMITS.cooldown_down_s


def test_one_busy_period_is_remembered_for_the_whole_cooldown() -> None:
    """The least of the last five minutes counts."""
    target = Steered(2)
    target.turns(15)
    target.turn(busy(18))
    assert target.turns(19) == [2] * 19
    assert target.turns(2) == [2, 1]


def test_in_the_band_nothing_changes() -> None:
    """From 0.85 of what one replica less is good for to 1.15 of what is there, for ever."""
    for replicas, lowest, highest in ((1, 0, 11), (2, 9, 23), (4, 26, 46)):
        for present in (lowest, highest):
            assert set(Steered(replicas).turns(50, busy(present, pressure=0.0))) == {replicas}
    assert Steered(2).turns(50, busy(24))[-1] == 3
    assert Steered(2).turns(50, busy(8, pressure=0.0))[-1] == 1
    assert Steered(4).turns(50, busy(25, pressure=0.0))[-1] == 3


def test_the_minimum_stays() -> None:
    """However idle it is."""
    assert Steered(3, replace(LIMITS, min_replicas=2)).turns(100)[-1] == 2


def test_pressure_waits_after_a_removal_too() -> None:
    """The others are as slow as they are because of it: first see."""
    target = Steered(3)
    while target.turn().replicas == 3:
        pass
    assert target.turns(4, busy(8, 1, pressure=2.0)) == [2, 2, 2, 4]


def test_running_requests_keep_their_replicas() -> None:
    """Also where the settings allow fewer now, and where not all work: those that go may be those that do."""
    target = Steered(6, replace(LIMITS, max_replicas=2))
    assert target.turn(busy(41)) == Decision(6, 5, Reason.ABOVE_MAX)
    assert target.turn(busy(41)) == Decision(5, 5, Reason.ABOVE_MAX)
    assert target.turn(busy(15)) == Decision(5, 2, Reason.ABOVE_MAX)
    target = Steered(3, replace(LIMITS, band=0.0))
    for _ in range(60):
        assert target.turn(busy(20, pressure=0.0), live=2).replicas == 3
    assert target.turn(busy(10, pressure=0.0), live=2) == Decision(3, 2, Reason.SPARE)


def test_without_a_live_replica_nothing_is_removed() -> None:
    """No load where nobody serves is no sign of rest."""
    target = Steered(3)
    assert {target.turn(IDLE, live=0).replicas for _ in range(60)} == {3}


def test_replicas_on_their_way_out_do_not_count_as_spare() -> None:
    """Three live, one of them leaving: of the two that stay, both are needed."""
    target = Steered(2, replace(LIMITS, max_replicas=1))
    assert target.turn(busy(15), live=3).replicas == 2


def test_what_was_switched_off_stays_off() -> None:
    """No replicas at all is a person's decision."""
    target = Steered(0)
    assert target.turn(busy(0, 100)) == Decision(0, 0, Reason.OFF)


def test_too_few_are_brought_to_the_minimum() -> None:
    """At once, but not without a reading."""
    target = Steered(1, replace(LIMITS, min_replicas=3))
    assert target.turn(None) == Decision(1, 1, Reason.UNKNOWN)
    assert target.turn() == Decision(1, 3, Reason.BELOW_MIN)


@pytest.mark.parametrize("reading", [busy(10, 90, pressure=9.0), IDLE])
def test_without_a_fresh_reading_nothing_changes(reading: Reading) -> None:
    """None at all, the same once more, an old one, one from the future: under load and without."""
    target = Steered(2)
    target.turns(2, reading)
    before = target.replicas
    for _ in range(50):
        target.memory = remember(LIMITS, target.memory, before, replace(reading, at_s=target.now_s))
        assert decide(LIMITS, target.memory, target.now_s) == Decision(before, before, Reason.UNKNOWN)
    assert set(target.turns(100, None)) == {before}
    for age_s in (LIMITS.stale_after_s + 1, -1.0):
        memory = remember(LIMITS, Memory(), 3, replace(reading, at_s=5000.0))
        assert decide(LIMITS, memory, 5000.0 + age_s).reason == Reason.STALE


def test_a_gap_in_the_readings_is_no_rest() -> None:
    """One missed turn is bridged; after more, the five minutes begin anew."""
    target = Steered(2)
    for _ in range(19):
        assert target.turn().replicas == 2
    target.turn(None)
    assert target.turn().replicas == 1
    target = Steered(2)
    target.turns(19)
    target.turns(3, None)
    assert target.turns(20) == [2] * 20


def test_evidence_that_is_not_whole_adds_but_never_removes() -> None:
    """A process that is gone took its requests' numbers along; pressure that nobody could measure is not low."""
    for odd in (replace(IDLE, is_whole=False), busy(1, pressure=None)):
        target = Steered(2)
        target.turns(10)
        target.turn(odd)
        assert target.turns(19) == [2] * 19
    assert Steered(1).turns(2, replace(busy(10, 40), is_whole=False)) == [1, 3]


def test_a_change_by_somebody_else_starts_the_cooldown_anew() -> None:
    """What was enough then was seen at another size."""
    target = Steered(3)
    target.turns(19)
    target.replicas = 4
    assert target.turns(20) == [4] * 20


def test_a_decision_that_was_not_carried_out_is_taken_again() -> None:
    """The API failed: `acted` is not called, and the next turn decides the same."""
    memory, decisions = Memory(), []
    for turn in range(1, 4):
        memory = remember(LIMITS, memory, 1, replace(busy(10, 40), at_s=PERIOD_S * turn))
        decisions.append(decide(LIMITS, memory, PERIOD_S * turn))
    assert [decision.replicas for decision in decisions] == [1, 3, 3]


limits_strategy = st.builds(
    Limits,
    min_replicas=st.integers(1, 3),
    max_replicas=st.integers(3, 9),
    requests_per_replica=st.integers(1, 20),
    band=st.floats(0, 0.9),
    step_up=st.integers(1, 4),
    step_down=st.integers(1, 4),
    cooldown_up_s=st.sampled_from([0.0, 30.0, 60.0]),
    cooldown_down_s=st.sampled_from([0.0, 30.0, 60.0]),
    stale_after_s=st.sampled_from([20.0, 40.0]),
)
readings = st.builds(
    Reading,
    at_s=st.just(0.0),
    running=st.integers(0, 120),
    waiting=st.integers(0, 120),
    live=st.integers(0, 10),
    pressure=st.none() | st.floats(0, 100),
    is_significant=st.booleans(),
    is_whole=st.booleans(),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Limits, Memory, float]:
    """Some turns, some of them without a reading, with whatever was decided carried out or not."""
    limits, memory, now_s = draw(limits_strategy), Memory(), 100.0
    replicas = draw(st.integers(0, 12))
    for reading in draw(st.lists(st.none() | readings, max_size=12)):
        now_s += draw(st.sampled_from([10.0, 15.0, 50.0]))
        memory = remember(limits, memory, replicas, reading and replace(reading, at_s=now_s))
        decision = decide(limits, memory, now_s)
        if draw(st.booleans()):
            memory, replicas = acted(memory, decision, now_s), decision.replicas
    return limits, memory, now_s + draw(st.sampled_from([10.0, 15.0]))


@given(histories(), readings, st.integers(0, 12))
def test_every_decision_keeps_the_limits(
    history: tuple[Limits, Memory, float], reading: Reading, replicas: int
) -> None:
    """Bounds, steps, and the replicas that running requests need; and the same question has the same answer."""
    limits, memory, now_s = history
    memory = remember(limits, memory, replicas, replace(reading, at_s=now_s))
    decision = decide(limits, memory, now_s)
    assert decide(limits, memory, now_s) == decision
    assert decision.current == replicas
    if decision.replicas > replicas:
        assert 0 < replicas < decision.replicas <= limits.max_replicas
        assert decision.reason == Reason.BELOW_MIN or decision.replicas - replicas <= limits.step_up
    if decision.replicas < replicas:
        assert decision.replicas >= limits.min_replicas
        assert decision.reason == Reason.ABOVE_MAX or replicas - decision.replicas <= limits.step_down
        staying = min(reading.live, replicas) - (replicas - decision.replicas)
        assert staying * limits.requests_per_replica >= reading.running
    after = acted(memory, decision, now_s)
    if decision.is_change:
        assert not decide(limits, after, now_s).is_change


@given(histories(), readings, readings, st.integers(1, 12))
def test_more_load_never_means_fewer_replicas(
    history: tuple[Limits, Memory, float], reading: Reading, more: Reading, replicas: int
) -> None:
    """Whatever was before: a reading that is nowhere lower leads to a decision that is not lower."""
    limits, memory, now_s = history
    low = replace(reading, at_s=now_s)
    high = replace(low, running=max(low.running, more.running), waiting=max(low.waiting, more.waiting))
    if low.pressure is not None and more.pressure is not None:
        high = replace(high, pressure=max(low.pressure, more.pressure))
    answers = [decide(limits, remember(limits, memory, replicas, each), now_s).replicas for each in (low, high)]
    assert answers[0] <= answers[1]


@given(histories(), st.integers(0, 12), st.floats(0, 1e6))
def test_time_alone_changes_nothing(history: tuple[Limits, Memory, float], replicas: int, later_s: float) -> None:
    """A turn without a reading keeps what is there, whatever was before, however long ago."""
    limits, memory, now_s = history
    memory = remember(limits, memory, replicas, None)
    assert decide(limits, memory, now_s + later_s).replicas == replicas
