"""Upper bounds of histograms' buckets, in seconds: 1 ms is well inside, and a percentile is off by a fifth at worst."""

_DECADE = (1, 1.5, 2, 3, 4, 6, 8)


def _from_to(first: float, last: float) -> tuple[float, ...]:
    found = (round(step * 10.0**power, 6) for power in range(-4, 4) for step in _DECADE)
    return tuple(bound for bound in found if first <= bound <= last)


LATENCY_S = _from_to(0.0004, 100)
"""Of waiting, of the first token, between tokens."""

ANSWER_S = _from_to(0.004, 1000)
"""Of whole answers."""

STEP_S = tuple(
    bound / 1000
    for bound in (
        *(0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 75, 100),
        *(150, 200, 300, 500, 1000, 2000, 5000),
    )
)
"""Of a step and its parts: finer where `espalier bench overhead` reads medians."""
