"""What speculation costs and brings here, learned step by step: which nodes to verify, which drafts to wait for.

Owns what was learned of the LLM, the SSMs and the bus; it outlives every worker. Must not know requests or links.
"""

from collections import defaultdict
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
class DraftedFor:
    """By which SSMs, and for whom (each bool [R]), a step's candidates were drafted.

    waited: who waited for them in this step. asked_ahead: for whom SSMs were asked during the last one; ahead: who has
    candidates of those.
    """

    ssms: Sequence[Announcement]
    waited: NDArray[np.bool_]
    asked_ahead: NDArray[np.bool_]
    ahead: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BesideLlm:
    """What SSMs do while the LLM verifies.

    growth: of trees, where they draft; patience_s: for how long they are waited for then. reads: whether they read for
    all that have trees, or will.
    """

    growth: Growth | None
    patience_s: float
    reads: bool


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The nodes of a step and what they were chosen from; what is learned from the step refers to it.

    path_p: fp64 [M], how likely each candidate was thought to be. price: of the step without a draft that is waited
    for.
    """

    forest: Forest
    path_p: Probabilities
    choice: Choice
    price: StepPrice

    @property
    def num_expected(self) -> float:
        """Of the nodes below the roots, how many should become tokens."""
        return self.choice.num_tokens - self.forest.num_requests - self.price.num_other_tokens


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one step, in ms: all of it; inside the LLM's forward and sampling; waiting for drafts.

    late_ms: of that, for those that were made ahead. num_found: rows that the LLM was asked for and had in its cache.
    beside_drafts: whether SSMs were at work while the LLM was.
    """

    total_ms: float
    verify_ms: float
    waited_ms: float
    late_ms: float = 0.0
    num_found: int = 0
    beside_drafts: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Drafts that num_waiting of num_requests with dynamic trees could wait for, up to max_depth deep.

    num_unread: tokens of theirs that an SSM would read first.
    """

    num_requests: int
    num_waiting: int
    num_unread: int
    max_depth: int


class _Experience:
    """With the drafts of certain SSMs: a slow one makes none of those dear that are made without it."""

    def __init__(self) -> None:
        self.depth = DraftDepth()
        self.ahead = DraftingAhead()


class Economy:
    """Chooses by what it has learned. One for all requests of a verifier group."""

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._experience: dict[frozenset[str], _Experience] = defaultdict(_Experience)
        self._verify: dict[str, ForwardCosts] = {}
        self._draft: dict[str, ForwardCosts] = {}
        self._draft_ahead: dict[str, ForwardCosts] = {}  # beside the LLM, which may share its cores
        self._other = Typical(_OTHER_MS)
        self._wait, self._wait_ahead = Typical(_WAIT_MS), Typical(_WAIT_MS)

    def price(self, llm: Announcement, other_rows: int, other_tokens: int) -> StepPrice:
        """Of a step that waits for no draft; other_rows: all but the roots and nodes of trees that are chosen."""
        return StepPrice(self._costs_of(self._verify, llm), self._other.value, other_rows, float(other_tokens))

    def choose(self, forest: Forest, bounds: Bounds, price: StepPrice, waited_ms: float) -> StepChoice:
        """The nodes that make this step pay best, which has waited so long already."""
        path_p = self._calibration.path_probabilities(forest)
        paid = replace(price, fixed_ms=price.fixed_ms + waited_ms)
        return StepChoice(forest, path_p, choose(forest, path_p, bounds, paid), price)

    def growth_to_wait_for(self, price: StepPrice, ssms: Sequence[Announcement], wanted: Wanted) -> Growth | None:
        """What to have drafted before this step for those without candidates; None: verify their roots alone."""
        if not ssms or not wanted.num_waiting:
            return None
        offer = self._offer(price, ssms, wanted)
        depth = self._with(ssms).depth.best(offer)
        return Growth(depth, offer.width, _NUM_CHILDREN, _MAX_NODES) if depth else None

    def beside_llm(
        self, llm: Announcement, ssms: Sequence[Announcement], num_dynamic: int, num_ahead: int, num_rows: int
    ) -> BesideLlm:
        """What the SSMs of num_dynamic requests do while the LLM verifies `num_rows`; num_ahead may draft ahead.

        Where drafts pay neither ahead nor otherwise, SSMs need not even read.
        """
        if not ssms or not num_dynamic:
            return BesideLlm(None, 0.0, reads=False)
        known, price, growth, pays = self._with(ssms), self.price(llm, 0, 0), None, False
        if num_ahead:
            pays = known.ahead.pays(price, num_ahead)
            if known.ahead.is_due(pays=pays):
                growth = self._growth_ahead(ssms, num_ahead, price.verify.ms(num_rows))
        patience_s = known.ahead.patience_ms(price, num_ahead) / 1e3 if growth else 0.0
        everybody = Wanted(num_dynamic, num_dynamic, num_dynamic, _MAX_FORWARDS)
        reads = pays or known.depth.would_wait(self._offer(price, ssms, everybody))
        return BesideLlm(growth, patience_s, reads)

    def learn(
        self,
        llm: Announcement,
        chosen: StepChoice | None,
        drafted: DraftedFor,
        committed: Sequence[Sequence[int]],
        times: StepTimes,
    ) -> None:
        """From a step that was committed. committed: per request of the forest, what the step brought it."""
        self._other.observe(max(0.0, times.total_ms - times.verify_ms - times.waited_ms))
        if chosen is None:
            return
        forest, path_p, known = chosen.forest, chosen.path_p, self._with(drafted.ssms)
        self._calibration.observe(forest, committed)
        verify, num_rows = self._costs_of(self._verify, llm), max(1, chosen.choice.num_rows - times.num_found)
        verify.observe(num_rows, times.verify_ms)
        known.ahead.learn_forward(verify, num_rows, times.verify_ms, beside_drafts=times.beside_drafts)
        known.ahead.learn_drafts(forest, path_p, drafted.ahead, int(drafted.asked_ahead.sum()), times.late_ms)
        known.depth.observe(forest, path_p, drafted.waited)
        price = replace(chosen.price, num_other_rows=chosen.price.num_other_rows - times.num_found)
        known.depth.on_step(forest.num_requests, sum(map(len, committed)), times.total_ms, price)

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

    def _with(self, ssms: Sequence[Announcement]) -> _Experience:
        return self._experience[frozenset(ssm.name for ssm in ssms)]

    def _offer(self, price: StepPrice, ssms: Sequence[Announcement], wanted: Wanted) -> DraftOffer:
        draft = self._slowest(self._draft, ssms)
        return DraftOffer(
            price,
            draft,
            _width(draft, wanted.num_waiting),
            self._wait.value,
            wanted.num_requests,
            wanted.num_waiting,
            wanted.num_unread,
            min(wanted.max_depth, _MAX_FORWARDS),
        )

    def _growth_ahead(self, ssms: Sequence[Announcement], num_requests: int, verify_ms: float) -> Growth:
        """Forwards that fit into a verification."""
        spare_ms = _SPARE * verify_ms - self._wait_ahead.value
        num_forwards, width = _most_nodes(self._slowest(self._draft_ahead, ssms), num_requests, spare_ms)
        return Growth(num_forwards, width, _NUM_CHILDREN, _MAX_NODES_AHEAD)

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
