"""A chi-square test with a stated false-alarm rate, without a statistics library."""

from collections.abc import Sequence
from statistics import NormalDist


def chi_square_limit(num_cells: int, false_alarm: float) -> float:
    """What the statistic of `num_cells` cells exceeds with chance `false_alarm`, to about 1 % (Wilson and Hilferty)."""
    degrees = num_cells - 1
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread + NormalDist().inv_cdf(1.0 - false_alarm) * spread**0.5) ** 3)


def chi_square(counts: Sequence[int], law: Sequence[float]) -> float:
    """The statistic of counts against a law that sums to 1; every cell must be expected at least 5 times."""
    total = sum(counts)
    expected = [p * total for p in law]
    assert min(expected) >= 5.0, "too few draws for so rare a cell"
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))
