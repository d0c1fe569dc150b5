"""Iteration-level scheduling (Orca): which requests take part in the next step, and with what. Pure.

Knows lengths, blocks and budgets; must not know workers, tokens or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treecore.expand import NO_DRAFT, Expansion, num_nodes
from treecore.messages import BlockUsage, RequestId

_NUM_KEPT = 4  # rows that prompts leave to a tree that is shaped; where those are all read it has many more


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """A tree that is shaped when its candidates are known: at most `max_nodes` below the root, `max_depth` deep."""

    max_nodes: int
    max_depth: int

    def __len__(self) -> int:
        return self.max_depth


Shape = Expansion | DynamicTree
"""What tree a request may have; its length is its depth, and 0 means none."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch: requests that run. step_rows: rows (tokens and nodes) computed in a step, over all requests.

    blocks: the verifier's cache behind the last step. max_tree_nodes: with the root. num_ssms: each brings a tree.
    """

    max_batch: int
    step_rows: int
    blocks: BlockUsage
    max_tree_nodes: int
    num_ssms: int = 1

    def num_drafted(self, shape: Shape) -> int:
        """Nodes below the root in the merged tree, at most; not a function of what is drawn."""
        if isinstance(shape, DynamicTree):
            return min(self.max_tree_nodes - 1, shape.max_nodes) if shape else 0
        return min(self.max_tree_nodes - 1, self.num_ssms * (num_nodes(shape) - 1))


@dataclass(frozen=True, slots=True)
class Standing:
    """What the scheduler needs to know of one request.

    held_len: committed tokens that the verifier holds. held_rows: tokens and nodes that it has blocks for.
    """

    request_id: RequestId
    committed_len: int
    held_len: int
    held_rows: int
    final_len: int
    shape: Shape

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
    shape: Shape
    is_complete: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: `items` run. `admitted` have just left the queue; `preempted` go back to its front, in this order."""

    items: tuple[PlannedItem, ...]
    admitted: tuple[RequestId, ...]
    preempted: tuple[RequestId, ...] = ()


def plan_step(running: Sequence[Standing], waiting: Sequence[Standing], limits: Limits) -> StepPlan:
    """The next step of those who run and who wait, both oldest first.

    Blocks are promised to nobody in advance: while the growth of those who run fits, whoever waits is admitted in
    order; when it does not, the youngest are preempted. So the oldest always gets on, whoever waits comes to be the
    oldest, and nobody is preempted by one who came later: no two requests can evict each other for ever.
    """
    staying = _staying(running, limits)
    preempted = running[len(staying) :]
    admitted = [] if preempted else _admitted(staying, waiting, limits)
    items = _items(_with_trees([*staying, *admitted], limits), limits)
    return StepPlan(tuple(items), _ids(admitted), _ids(preempted))


def fits_alone(final_len: int, blocks: BlockUsage) -> bool:
    """Whether a request can be served to its end if it has the whole cache; it may have to do without trees."""
    return blocks.holding(final_len) <= blocks.total


def _staying(running: Sequence[Standing], limits: Limits) -> list[Standing]:
    """The oldest of those who run whose committed tokens fit once the others' blocks are free; at least one.

    Shared blocks are counted as if each user had its own. Where that is too hopeful the verifier refuses, and
    the next plan knows better.
    """
    staying, room = list(running), limits.blocks.room
    while len(staying) > 1 and sum(_growth(standing, 0, limits) for standing in staying) > room:
        room += limits.blocks.holding(staying.pop().held_rows)
    return staying


def _admitted(running: Sequence[Standing], waiting: Sequence[Standing], limits: Limits) -> list[Standing]:
    """The first of `waiting` that fit, each with a tree's worth of room to grow; nobody overtakes.

    Where nobody runs the first is admitted in any case: what is over frees its blocks as the step begins.
    """
    ahead = limits.max_tree_nodes
    room = limits.blocks.room - sum(_growth(standing, ahead, limits) for standing in running)
    admitted: list[Standing] = []
    for standing in waiting[: max(0, limits.max_batch - len(running))]:
        room -= _growth(standing, ahead, limits)
        if room < 0 and (running or admitted):
            break
        admitted.append(standing)
    return admitted


def _growth(standing: Standing, num_more: int, limits: Limits) -> int:
    """Blocks that the request lacks for its committed tokens and `num_more` rows."""
    blocks = limits.blocks
    return max(0, blocks.holding(standing.committed_len + num_more) - blocks.holding(standing.held_rows))


def _with_trees(taking_part: Sequence[Standing], limits: Limits) -> list[Standing]:
    """A tree that does not fit costs its tree only; the oldest get theirs first."""
    room = limits.blocks.room - sum(_growth(standing, 0, limits) for standing in taking_part)
    found = []
    for standing in taking_part:
        num_more = limits.num_drafted(standing.shape)
        extra = _growth(standing, num_more, limits) - _growth(standing, 0, limits)
        fits = extra <= max(room, 0)
        room -= extra if fits else 0
        found.append(standing if fits else replace(standing, shape=NO_DRAFT))
    return found


def _items(taking_part: Sequence[Standing], limits: Limits) -> list[PlannedItem]:
    """One budget of rows: who decodes takes what it needs, prompts get what is left, in order.

    The first prompt gets a block at least, so that it gets on beside any number of others.
    """
    items = [_decoding(standing) for standing in taking_part if not _is_prefill(standing, limits)]
    rows_left = limits.step_rows - sum(_num_rows(item, limits) for item in items)
    rows_left = max(rows_left, limits.blocks.block_len)
    for standing in taking_part:
        if _is_prefill(standing, limits) and (item := _chunk(standing, rows_left, limits)):
            items.append(item)
            rows_left -= _num_rows(item, limits)
    return items


def _is_prefill(standing: Standing, limits: Limits) -> bool:
    """More to compute than any accepted run: a prompt, or a request that was preempted or lost its verifier."""
    return standing.held_len == 0 or standing.num_uncached > limits.max_tree_nodes


def _decoding(standing: Standing) -> PlannedItem:
    """Everything uncached, and a tree; a step never yields more than what remains, so deeper nodes would be in vain."""
    remaining = standing.final_len - standing.committed_len
    shape = cut(standing.shape, remaining - 1)
    return PlannedItem(standing.request_id, standing.held_len, standing.committed_len, shape, is_complete=True)


def cut(shape: Shape, max_depth: int) -> Shape:
    """The shape without what would be deeper."""
    if isinstance(shape, DynamicTree):
        return replace(shape, max_depth=min(shape.max_depth, max_depth))
    return Expansion(shape[:max_depth])


def _chunk(standing: Standing, num_rows: int, limits: Limits) -> PlannedItem | None:
    """At most `num_rows` tokens: all that is left, or up to the end of a block; None if that end is not among them.

    A tree only grows behind a prompt of which a part is cached: until then the SSM reads, too.
    """
    if standing.num_uncached <= num_rows:
        item = _decoding(standing)
        return item if standing.held_len else replace(item, shape=NO_DRAFT)
    block_len = limits.blocks.block_len
    end = (standing.held_len + num_rows) // block_len * block_len
    if end <= standing.held_len:
        return None
    return PlannedItem(standing.request_id, standing.held_len, end, NO_DRAFT, is_complete=False)


def _num_rows(item: PlannedItem, limits: Limits) -> int:
    """What prompts leave of the budget: a static tree's nodes, few of one that takes what is left when it is shaped."""
    num_nodes = limits.num_drafted(item.shape)
    return item.end - item.start + (min(num_nodes, _NUM_KEPT) if isinstance(item.shape, DynamicTree) else num_nodes)


def _ids(standings: Sequence[Standing]) -> tuple[RequestId, ...]:
    return tuple(standing.request_id for standing in standings)
