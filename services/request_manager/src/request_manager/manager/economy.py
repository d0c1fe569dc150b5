"""What speculation costs and brings here, learned step by step: which nodes to verify, which drafts to wait for.

Owns what was learned of the LLM, the SSMs and the bus; it outlives every worker. Must not know requests or links.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from request_manager.manager.ahead import DraftingAhead
from request_manager.manager.step_record import Model
from treecore.calibration import Calibration
from treecore.choice import Bounds, Choice, Probabilities, StepPrice, choose
from treecore.costs import ForwardCosts, Typical
from treecore.draft_depth import DraftDepth, DraftOffer, forwards_within
from treecore.expand import Growth
from treecore.forest import Forest
from treecore.messages import Announcement, ForwardCost

_NUM_CHILDREN = 5
_WIDEST = 4  # nodes that an SSM expands in a forward, for a request, where a step waits for it
_WIDTHS_AHEAD = 8, 6, 4, 3, 2, 1  # where none waits: the step may end in many ways
_LEAST_LEVELS = 3  # ... but what stands behind a likely end is worth more than one more unlikely end
_WIDENING = 1.25  # so much longer a forward may take for being wider than one node a request
_MAX_NODES = 32  # of a draft that is waited for
_MAX_NODES_AHEAD = 96  # the next tree is what stands below one of many possible next roots
_MAX_FORWARDS = 8
_OTHER_MS = 2.0  # first guesses, until steps were timed
_WAIT_MS = 2.0
_SPARE = 0.85  # of a verification: a draft that comes late costs more than its last forward brings


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The nodes of a step and what they were chosen from; what is learned from the step refers to it.

    path_p: fp64 [M], how likely each candidate was thought to be. price: of the step without a draft that is waited
    for. waited: bool [R], the requests whose drafts were.
    """

    forest: Forest
    path_p: Probabilities
    choice: Choice
    price: StepPrice
    waited: NDArray[np.bool_]

    @property
    def num_expected(self) -> float:
        """Of the nodes below the roots, how many should become tokens."""
        return self.choice.num_tokens - self.forest.num_requests - self.price.num_other_tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step, in ms: all of it; inside the LLM's forward and sampling; waiting for drafts.

    beside_drafts: whether SSMs were drafting while the LLM was at work.
    """

    total_ms: float
    verify_ms: float
    waited_ms: float
    beside_drafts: bool = False


class Economy:
    """Chooses by what it has learned. One for all requests of a verifier group."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._depth = DraftDepth()
        self._verify: dict[str, ForwardCosts] = {}
        self._draft: dict[str, ForwardCosts] = {}
        self._draft_ahead: dict[str, ForwardCosts] = {}  # beside the LLM, which may share its cores
        self._other = Typical(_OTHER_MS)
        self._wait, self._wait_ahead = Typical(_WAIT_MS), Typical(_WAIT_MS)
        self._ahead = DraftingAhead()

    def price(self, llm: Announcement, other_rows: int, other_tokens: int) -> StepPrice:
        """Of a step that waits for no draft; other_rows: all but the roots and nodes of trees that are chosen."""
        return StepPrice(self._costs_of(self._verify, llm), self._other.value, other_rows, float(other_tokens))

    def choose(
        self, forest: Forest, bounds: Bounds, price: StepPrice, waited_ms: float, waited: NDArray[np.bool_]
    ) -> StepChoice:
        """The nodes that make this step pay best, which has waited so long already; waited: bool [R], for whom."""
        path_p = self._calibration.path_probabilities(forest)
        paid = replace(price, fixed_ms=price.fixed_ms + waited_ms)
        return StepChoice(forest, path_p, choose(forest, path_p, bounds, paid), price, waited)

    def growth_to_wait_for(
        self, price: StepPrice, ssms: Sequence[Announcement], num_requests: int, num_waiting: int, max_depth: int
    ) -> Growth | None:
        """What to have drafted before this step for those without candidates; None: verify their roots alone."""
        if not ssms or not num_waiting:
            return None
        draft = self._slowest(self._draft, ssms)
        width = _width(draft, num_waiting)
        offer = DraftOffer(
            price,
            draft,
            width,
            self._wait.value,
            num_requests,
            num_waiting,
            min(max_depth, _MAX_FORWARDS),
            _MAX_NODES,
        )
        depth = self._depth.best(offer)
        return Growth(depth, width, _NUM_CHILDREN, _MAX_NODES) if depth else None

    def growth_ahead(
        self, llm: Announcement, ssms: Sequence[Announcement], num_requests: int, num_rows: int
    ) -> Growth | None:
        """What to have drafted while the LLM verifies `num_rows`; None where that does not pay."""
        verify = self._costs_of(self._verify, llm)
        plain_rate = num_requests / (self._other.value + verify.ms(max(1, num_requests)))
        if not ssms or not num_requests or not self._ahead.pays(num_requests, verify.ms(num_rows), plain_rate):
            return None
        spare_ms = _SPARE * verify.ms(num_rows) - self._wait_ahead.value
        num_forwards, width = _most_nodes(self._slowest(self._draft_ahead, ssms), num_requests, spare_ms)
        return Growth(num_forwards, width, _NUM_CHILDREN, _MAX_NODES_AHEAD)

    def patience_s(self, llm: Announcement, num_rows: int) -> float:
        """How long drafts made ahead are waited for once the LLM is done: as long as half a forward of it."""
        return self._costs_of(self._verify, llm).ms(num_rows) / 2e3

    def learn(
        self, llm: Announcement, chosen: StepChoice | None, committed: Sequence[Sequence[int]], times: StepTimes
    ) -> None:
        """From a step that was committed. committed: per request of the forest, what the step brought it."""
        self._other.observe(max(0.0, times.total_ms - times.verify_ms - times.waited_ms))
        if chosen is None:
            return
        self._calibration.observe(chosen.forest, committed)
        verify, num_rows = self._costs_of(self._verify, llm), chosen.choice.num_rows
        self._ahead.learn_step(times.verify_ms, verify.ms(num_rows), beside_drafts=times.beside_drafts)
        verify.observe(num_rows, times.verify_ms)
        self._depth.observe(chosen.forest, chosen.path_p, chosen.waited)
        self._depth.on_step(chosen.forest.num_requests, sum(map(len, committed)), times.total_ms, chosen.price)

    def learn_ahead(self, num_requests: int, num_gained: int, late_ms: float) -> None:
        """So many requests had drafts made ahead, for which the step waited; so many of their nodes became tokens."""
        self._ahead.learn_gain(num_requests, num_gained, late_ms)

    def learn_draft(self, ssm: str, cost: ForwardCost, other_ms: float, *, is_ahead: bool) -> None:
        """What a forward of that SSM cost, beside the LLM's or not, and all else until its answer was there."""
        known, wait = (self._draft_ahead, self._wait_ahead) if is_ahead else (self._draft, self._wait)
        wait.observe(other_ms)
        if ssm in known:
            known[ssm].observe(cost.num_rows, cost.ms)

    def known_costs(self) -> Iterator[tuple[Model, str, ForwardCosts]]:
        """What forwards of each model that was met are taken to cost."""
        for name, costs in self._verify.items():
            yield "verify", name, costs
        for name, costs in self._draft.items():
            yield "draft", name, costs

    def _slowest(self, known: dict[str, ForwardCosts], ssms: Sequence[Announcement]) -> ForwardCosts:
        costs = [self._costs_of(known, ssm) for ssm in ssms]
        return max(costs, key=lambda found: found.ms(1))

    def _costs_of(self, known: dict[str, ForwardCosts], worker: Announcement) -> ForwardCosts:
        """By name: replicas cost the same, and a worker that restarts costs what it did."""
        if worker.name not in known:
            known[worker.name] = ForwardCosts(worker.costs)
        return known[worker.name]


def _width(draft: ForwardCosts, num_requests: int) -> int:
    """How many nodes each request expands in a forward: more than one where that costs hardly more."""
    most_ms = _WIDENING * draft.ms(num_requests)
    return max(width for width in range(1, _WIDEST + 1) if width == 1 or draft.ms(width * num_requests) <= most_ms)


def _most_nodes(draft: ForwardCosts, num_requests: int, ms: float) -> tuple[int, int]:
    """(forwards, width) that expand most nodes of each request in `ms`, a few levels at least where there is time."""
    found = [(forwards_within(ms, draft, num_requests * width, _MAX_FORWARDS), width) for width in _WIDTHS_AHEAD]
    deep = [(forwards, width) for forwards, width in found if forwards >= _LEAST_LEVELS]
    forwards, width = max(deep, key=lambda pair: pair[0] * pair[1], default=found[-1])
    return max(1, forwards), width
