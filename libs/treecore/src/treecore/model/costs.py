"""How long this model's forwards take here, measured before any request comes; which also warms everything up.

Knows HeldRequests and a clock; must not know what is done with the figures.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from treecore.errors import ConfigError
from treecore.expand import NO_DRAFT
from treecore.messages import DraftItem, ForwardCost, RequestId
from treecore.model.choosing import Chosen, Rows
from treecore.model.held import HeldRequests
from treecore.noise import Seed
from treecore.params import SamplingParams

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_NUM_RUNS = 3
_PATIENCE_S = 2.0
_PREFIX_LEN = 16
_SCRATCH = RequestId("scratch")


def measure_costs(
    held: HeldRequests, name: str, clock: Callable[[], float] = time.perf_counter
) -> tuple[ForwardCost, ...]:
    """The cost of forwards over 1, 2, 4 .. 64 rows behind a short prefix, as far as blocks and two seconds reach.

    Nothing of it stays in the cache. Raises ConfigError naming the checkpoint `name` if its logits are not numbers.
    """
    deadline = clock() + _PATIENCE_S
    costs: list[ForwardCost] = []
    try:
        if _put(held, 1):
            _run_ms(held, name)  # the prefix, which stays
        while len(costs) < len(_ROWS) and (cost := _cost(held, _ROWS[len(costs)], lambda: clock() < deadline, name)):
            costs.append(cost)
    finally:
        held.forget(_SCRATCH)
    return tuple(costs)


def _cost(held: HeldRequests, num_rows: int, has_time: Callable[[], bool], name: str) -> ForwardCost | None:
    """None where there is no room, or no time left; one row is measured in any case."""
    found: list[float] = []
    while len(found) < _NUM_RUNS and (has_time() or (num_rows == 1 and not found)):
        if not _put(held, num_rows):
            break
        found.append(_run_ms(held, name))
    return ForwardCost(num_rows, median(found)) if found else None


def _put(held: HeldRequests, num_rows: int) -> bool:
    """A root and its children are pending behind the prefix; False where that does not fit."""
    # Blocks are sealed, and then found by others, once they are full of tokens before the root: this one never is.
    prefix_len = max(1, min(_PREFIX_LEN, held.usage().block_len, held.context_len - 1))
    params = SamplingParams(0.0, 0, 1.0, Seed(0))
    held.begin_step("", ())
    if held.take(DraftItem(_SCRATCH, 0, 0, np.zeros(prefix_len, np.int32), params, NO_DRAFT)) is not None:
        return False
    return held.extend(_SCRATCH, [0] * (num_rows - 1), [0] * (num_rows - 1))


def _run_ms(held: HeldRequests, name: str) -> float:
    (answer,) = held.answer([_SCRATCH], {_SCRATCH})
    if not _is_numbers(answer):
        raise ConfigError(f"{name}: the model's logits are not numbers")
    return held.forward_ms


def _is_numbers(answer: Rows | Chosen) -> bool:
    return bool(np.all(answer.tokens >= 0) if isinstance(answer, Chosen) else np.isfinite(answer.max()))
