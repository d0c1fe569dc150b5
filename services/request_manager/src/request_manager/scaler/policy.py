"""How many replicas a target should have: pure functions of what was measured and of the clock.

Knows numbers. Must not know metrics' names, Kubernetes, or what a target is: the replicas of an SSM's Deployment and
the verifier groups (one group counts as one replica) are steered by the same rules. docs/scaling.md explains them.

A turn is: `remember` the reading, `decide`, and `acted` once the decision has been carried out. A decision that was not
carried out leaves no trace, so the next turn comes to it again.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

_MAX_PRESSURE = 2.0  # beyond this a latency tells that requests pile up, no longer how many replicas are missing


@dataclass(frozen=True, slots=True)
class Limits:
    """What a target may do. Shares are of 1, times in seconds.

    requests_per_replica: as many run on one replica at once. band: a demand that is up to this share above or below
    what the replicas are good for changes nothing. step_up, step_down: the most replicas that one decision adds,
    removes. cooldown_up_s: after a change, or once new replicas work, pressure adds none for so long. cooldown_down_s:
    for so long fewer must have been enough, without a change, before any are removed. stale_after_s: a reading older
    than this, or a longer gap between two, is no evidence.
    """

    min_replicas: int
    max_replicas: int
    requests_per_replica: int
    band: float = 0.15
    step_up: int = 1
    step_down: int = 1
    cooldown_up_s: float = 60.0
    cooldown_down_s: float = 600.0
    stale_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured of a target at `at_s`.

    running, waiting: requests that it serves, that it should serve. live: replicas that work. pressure: latency or
    utilisation in shares of what it should be at most (1: just so); None: nothing could be measured of the requests
    that are there. is_significant: enough was measured to add replicas for it. is_whole: every process that was
    measured the last time is still there; if not, its requests may be about to turn up elsewhere.
    """

    at_s: float
    running: int
    waiting: int
    live: int
    pressure: float | None
    is_significant: bool = True
    is_whole: bool = True

    @property
    def present(self) -> int:
        """Requests that are there."""
        return self.running + self.waiting


class Reason(StrEnum):
    """Why a decision is what it is: the word for logs and metrics."""

    OFF = "off"  # somebody set the target to no replicas: it is not ours to turn on again
    UNKNOWN = "unknown"  # nothing was measured
    STALE = "stale"
    BELOW_MIN = "below_min"
    ABOVE_MAX = "above_max"
    REQUESTS = "requests"  # more are there than fit
    PRESSURE = "pressure"  # slower, or busier, than the target
    SPARE = "spare"  # fewer have been enough for a while
    ENOUGH = "enough"


@dataclass(frozen=True, slots=True)
class Decision:
    """`replicas` instead of `current`."""

    current: int
    replicas: int
    reason: Reason

    @property
    def is_change(self) -> bool:
        """Whether there is something to do."""
        return self.replicas != self.current


@dataclass(frozen=True, slots=True)
class Low:
    """At `at_s`, `replicas` would have been enough, with the band to spare."""

    at_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What is kept of a target between turns; a new leader begins with an empty one.

    replicas: as Kubernetes was told. reading: this turn's, None if there is none (any more). filled: requests that are
    there, in replicas that they fill, as far as the last two readings agree. lows: oldest first, without a gap.
    """

    replicas: int = 0
    reading: Reading | None = None
    filled: float = 0.0
    last: Reading | None = None
    changed_at_s: float = -math.inf
    lows: tuple[Low, ...] = ()


def remember(limits: Limits, memory: Memory, replicas: int, reading: Reading | None) -> Memory:
    """The memory with this turn's `reading` of a target that has `replicas`, and without what it makes obsolete."""
    if replicas != memory.replicas:  # also when somebody else changed it: what was seen before is of another size
        memory = replace(memory, replicas=replicas, lows=())
    if reading is None or (memory.last is not None and reading.at_s <= memory.last.at_s):
        return replace(memory, reading=None)
    if memory.last is None or reading.at_s - memory.last.at_s > limits.stale_after_s:
        memory = replace(memory, last=None, lows=())
    return replace(
        memory,
        reading=reading,
        last=reading,
        filled=min(_filled(limits, reading), _filled(limits, memory.last)),
        changed_at_s=reading.at_s if _arrived(memory.last, reading) else memory.changed_at_s,
        lows=_lows(limits, memory, reading),
    )


def decide(limits: Limits, memory: Memory, now_s: float) -> Decision:
    """What to do with the target now. Without a fresh reading: nothing, ever."""
    current, reading = memory.replicas, memory.reading
    if current == 0:
        return Decision(current, current, Reason.OFF)
    if reading is None:
        return Decision(current, current, Reason.UNKNOWN)
    if not 0 <= now_s - reading.at_s <= limits.stale_after_s:
        return Decision(current, current, Reason.STALE)
    if current < limits.min_replicas:
        return Decision(current, limits.min_replicas, Reason.BELOW_MIN)
    return _more(limits, memory, reading, now_s) or _fewer(limits, memory, reading)


def acted(memory: Memory, decision: Decision, now_s: float) -> Memory:
    """The memory once `decision` has been carried out: the reading is used up, and waiting times begin anew."""
    if not decision.is_change:
        return memory
    return replace(memory, replicas=decision.replicas, reading=None, changed_at_s=now_s, lows=())


def _more(limits: Limits, memory: Memory, reading: Reading, now_s: float) -> Decision | None:
    pressed = _pressed(reading) if reading.is_significant else 0.0
    if now_s - memory.changed_at_s < limits.cooldown_up_s:  # what was added has yet to show what it does
        pressed = 0.0
    wanted = math.ceil(max(memory.filled, pressed) / (1 + limits.band))
    replicas = min(wanted, memory.replicas + limits.step_up, limits.max_replicas)
    if replicas <= memory.replicas:
        return None
    return Decision(memory.replicas, replicas, Reason.REQUESTS if memory.filled >= pressed else Reason.PRESSURE)


def _fewer(limits: Limits, memory: Memory, reading: Reading) -> Decision:
    """Never fewer than what runs now needs, if those that go are among those that work."""
    current = memory.replicas
    removable = max(0, min(reading.live, current) - math.ceil(reading.running / limits.requests_per_replica))
    if current > limits.max_replicas:
        return Decision(current, max(limits.max_replicas, current - removable), Reason.ABOVE_MAX)
    enough = _enough_for_long(limits, memory, reading)
    replicas = max(enough, limits.min_replicas, current - min(removable, limits.step_down))
    if replicas >= current:
        return Decision(current, current, Reason.ENOUGH)
    return Decision(current, replicas, Reason.SPARE)


def _enough_for_long(limits: Limits, memory: Memory, reading: Reading) -> int:
    if not memory.lows or memory.lows[0].at_s > reading.at_s - limits.cooldown_down_s:
        return memory.replicas
    return max(low.replicas for low in memory.lows)


def _lows(limits: Limits, memory: Memory, reading: Reading) -> tuple[Low, ...]:
    """The lows with this reading's, from the last one that is old enough on."""
    begin_s = reading.at_s - limits.cooldown_down_s
    old = sum(low.at_s <= begin_s for low in memory.lows)
    return (*memory.lows[max(0, old - 1) :], Low(reading.at_s, _enough(limits, memory, reading)))


def _enough(limits: Limits, memory: Memory, reading: Reading) -> int:
    if reading.pressure is None or not reading.is_whole:
        return memory.replicas  # no evidence that fewer would do
    return math.ceil(max(_filled(limits, reading), _pressed(reading)) / (1 - limits.band))


def _filled(limits: Limits, reading: Reading | None) -> float:
    """How many replicas the requests that are there fill."""
    return reading.present / limits.requests_per_replica if reading else 0.0


def _pressed(reading: Reading) -> float:
    """How many replicas would bring the pressure to 1; one more than there are requests would serve nobody."""
    return min(reading.live * min(reading.pressure or 0.0, _MAX_PRESSURE), float(reading.present))


def _arrived(before: Reading | None, now: Reading) -> bool:
    return before is not None and now.live > before.live
