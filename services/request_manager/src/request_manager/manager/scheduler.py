"""Iteration-level scheduling (Orca): which requests take part in the next step, and with what. Pure.

Knows lengths and budgets; must not know workers, tokens or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from treecore.expand import NO_DRAFT, Expansion
from treecore.messages import RequestId


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch: requests in a step. prefill_rows: uncached tokens computed in a step, over all requests.

    num_blocks, block_len: the verifier's KV cache. max_tree_nodes: with the root.
    """

    max_batch: int
    prefill_rows: int
    num_blocks: int
    block_len: int
    max_tree_nodes: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What the scheduler needs to know of one request. held_len: committed tokens that the verifier holds."""

    request_id: RequestId
    committed_len: int
    held_len: int
    final_len: int
    expansion: Expansion

    @property
    def num_uncached(self) -> int:
        """Committed tokens that the verifier has not seen."""
        return self.committed_len - self.held_len


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One request's part in a step: committed tokens [start, end) are sent; a tree only grows behind all of them."""

    request_id: RequestId
    start: int
    end: int
    expansion: Expansion
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `items` run, of which `admitted` have just left the queue."""

    items: tuple[PlannedItem, ...]
    admitted: tuple[RequestId, ...]


def plan_step(running: Sequence[Standing], waiting: Sequence[Standing], limits: Limits) -> StepPlan:
    """Everyone who runs takes part; whoever waits is admitted in order while batch and blocks allow.

    Blocks are reserved for a request's final length, so nothing admitted is ever dropped for want of cache; when a
    smaller verifier takes over, the latest of those who run sit out until the others are done. Rows go to short pieces
    (accepted runs) first: whoever decodes is not slowed by a prompt. Everyone gets at least one.
    """
    fitting = _fitting(running, limits.num_blocks, limits)
    admitted = _admit(fitting, waiting, limits) if len(fitting) == len(running) else []
    rows_left = limits.prefill_rows
    items = []
    for standing in sorted([*fitting, *admitted], key=lambda standing: standing.num_uncached > limits.max_tree_nodes):
        item = _plan_item(standing, max(rows_left, 1))
        rows_left -= item.end - item.start
        items.append(item)
        rows_left = max(0, rows_left)
    return StepPlan(tuple(items), tuple(standing.request_id for standing in admitted))


def reserved_blocks(final_len: int, limits: Limits) -> int:
    """Blocks that a request may ever need, its tree included."""
    return -(-(final_len + limits.max_tree_nodes) // limits.block_len)


def _admit(running: Sequence[Standing], waiting: Sequence[Standing], limits: Limits) -> list[Standing]:
    num_reserved = sum(reserved_blocks(standing.final_len, limits) for standing in running)
    return _fitting(waiting[: max(0, limits.max_batch - len(running))], limits.num_blocks - num_reserved, limits)


def _fitting(standings: Sequence[Standing], num_blocks: int, limits: Limits) -> list[Standing]:
    """The first of `standings` that fit together; whoever does not holds up all behind it, so that nobody starves."""
    needed = accumulate(reserved_blocks(standing.final_len, limits) for standing in standings)
    return [standing for standing, total in zip(standings, needed, strict=True) if total <= num_blocks]


def _plan_item(standing: Standing, rows_left: int) -> PlannedItem:
    """Send what is uncached, at most `rows_left` tokens; draft only for a request whose prompt is in the cache.

    A step never yields more than what remains, bonus token included, so deeper nodes would be in vain.
    """
    end = standing.held_len + min(standing.num_uncached, rows_left)
    is_complete = end == standing.committed_len
    remaining = standing.final_len - standing.committed_len
    can_draft = is_complete and standing.held_len > 0
    expansion = Expansion(standing.expansion[: remaining - 1]) if can_draft else NO_DRAFT
    return PlannedItem(standing.request_id, standing.held_len, end, expansion, is_complete)
