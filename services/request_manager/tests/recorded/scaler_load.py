"""Writes scaler_load.csv: two hours of arrivals as public chat services see them, from a fixed seed.

    python services/request_manager/tests/recorded/scaler_load.py

A slow wave of demand; on it, rates that a gamma law redraws every 20 s (bursts: arrivals vary several times more than
Poisson's); three crowds that come within seconds and stay for minutes; and one quiet quarter of an hour.
"""

import math
import random
from pathlib import Path

BIN_S = 5
DURATION_S = 7200
_REDRAW_S = 20
_CROWDS = ((1500, 400, 5.0), (3900, 700, 7.0), (6300, 240, 9.0))  # begin, duration (s), requests/s on top
_QUIET = (4900, 5800)


def load() -> list[int]:
    """Requests that arrive in each bin."""
    chance = random.Random(20240511)
    rates = [_base(second) * chance.gammavariate(1.2, 1 / 1.2) for second in range(0, DURATION_S, _REDRAW_S)]
    bins = range(0, DURATION_S, BIN_S)
    return [_poisson(chance, BIN_S * (rates[second // _REDRAW_S] + _crowd(second))) for second in bins]


def _base(second: int) -> float:
    """Requests per second that the time of day brings."""
    if _QUIET[0] <= second < _QUIET[1]:
        return 0.05
    return 1.6 - 1.2 * math.cos(2 * math.pi * second / DURATION_S)


def _crowd(second: int) -> float:
    return sum(rate for begin, duration, rate in _CROWDS if begin <= second < begin + duration)


def _poisson(chance: random.Random, mean: float) -> int:
    """How many arrivals of a Poisson process fit into `mean` units of time."""
    count, at = 0, chance.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + chance.expovariate(1.0)
    return count


def text() -> str:
    """The file."""
    rows = [f"{index * BIN_S},{requests}" for index, requests in enumerate(load())]
    return "\n".join(["start_s,requests", *rows]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".csv").write_text(text())
