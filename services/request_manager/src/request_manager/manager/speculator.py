"""The tree that each request of a step has: drafted ahead or waited for, merged, chosen. And the next step's drafts.

Knows SSMs and what trees cost and bring; must not know how they are verified, or write requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from request_manager.manager.drafting import DraftWish
from request_manager.manager.economy import DraftedFor, Economy, StepChoice, StepTimes, Wanted
from request_manager.manager.registry import Worker
from request_manager.manager.request import Request
from request_manager.manager.scheduler import DynamicTree, PlannedItem
from request_manager.manager.ssm_pool import NO_DRAFTS, DraftCosts, DraftRound, SsmPool
from request_manager.manager.step_record import Observer
from treecore.accept import Accepted
from treecore.choice import Bounds, StepPrice
from treecore.forest import ScoredDraft, merge_drafts
from treecore.merge import merge, prune
from treecore.messages import Announcement, RequestId
from treecore.tree import TokenTree

_NUM_TRIED = 1  # requests that SSMs read for where drafts do not pay


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's part in a step. is_shaped: whether its trees are shaped step by step, once its prompt is read."""

    request: Request
    item: PlannedItem
    is_shaped: bool

    @property
    def request_id(self) -> RequestId:
        """The request's identity."""
        return self.item.request_id

    @property
    def is_dynamic(self) -> bool:
        """Whether its tree is shaped in this step."""
        return isinstance(self.item.shape, DynamicTree) and len(self.item.shape) > 0

    @property
    def num_rows(self) -> int:
        """Rows of the LLM's forward for what is committed: the root, or a piece of the prompt."""
        reads = self.item.start < len(self.request.generation.prompt)
        return self.item.end - self.item.start if reads else 1

    def can_have(self, ssm: Announcement) -> bool:
        """Whether this SSM may draft for it, and has a position for its root."""
        return self.request.generation.may_draft(ssm.name) and self.item.end <= ssm.context_len

    def root(self) -> TokenTree:
        """The tree of incremental decoding."""
        return TokenTree.of_root(self.request.committed[self.item.end - 1])


Candidates = dict[RequestId, list[ScoredDraft]]


@dataclass(frozen=True, slots=True)
class Drafted:
    """What there is to choose a step's trees from.

    candidates: of dynamic trees. asked_ahead: the requests that SSMs were asked for during the last step. ahead: those
    of them that have candidates for it. is_hidden: whether all that was asked for then was there at once. waited:
    the requests whose drafts were asked for in this step. round: what came of that. waited_ms: for all drafts. late_ms:
    for those made ahead, which cost `costs_ahead`.
    """

    candidates: Candidates
    asked_ahead: frozenset[RequestId]
    ahead: frozenset[RequestId]
    is_hidden: bool
    waited: frozenset[RequestId]
    round: DraftRound
    waited_ms: float
    late_ms: float
    costs_ahead: DraftCosts


@dataclass(frozen=True, slots=True)
class StepTrees:
    """Trees by request, and how they came about. turns: of the dynamic ones, in the order of `chosen.forest`.

    ssms: that could draft for those. num_rows: of the LLM's forward.
    """

    trees: dict[RequestId, TokenTree]
    turns: tuple[Turn, ...]
    ssms: tuple[Announcement, ...]
    chosen: StepChoice | None
    drafted: Drafted
    num_rows: int


@dataclass(slots=True)
class Speculator:
    """Owns the drafts of the next step, and through `economy` all that was learned."""

    ssms: SsmPool
    max_tree_nodes: int
    max_rows: int
    deadline_s: float
    drafts_ahead: bool
    observer: Observer
    economy: Economy = field(default_factory=Economy)
    _patience_s: float = 0.0  # with what is being drafted ahead, once the LLM is done
    _asked_ahead: frozenset[RequestId] = frozenset()

    async def trees(self, turns: Sequence[Turn], llm: Worker) -> StepTrees:
        """What each turn verifies; the root alone where nothing arrived in time or nothing pays."""
        dynamic = tuple(turn for turn in turns if turn.is_dynamic)
        others = [turn for turn in turns if not turn.is_dynamic]
        num_other_rows = sum(turn.num_rows for turn in turns) - len(dynamic)
        price = self.economy.price(llm.announcement, num_other_rows, len(others))
        ssms = self._ssms_of(dynamic)
        drafted = await self._drafted(dynamic, others, price, ssms)
        trees = {turn.request_id: self._static(turn, drafted.round) for turn in others}
        num_rows = price.num_other_rows + sum(len(tree) - 1 for tree in trees.values())
        if not dynamic:
            return StepTrees(trees, (), (), None, drafted, num_rows)
        chosen = self._choose(dynamic, drafted, replace(price, num_other_rows=num_rows))
        for turn, tree in zip(dynamic, chosen.forest.trees(chosen.choice.kept), strict=True):
            trees[turn.request_id] = tree
        return StepTrees(trees, dynamic, ssms, chosen, drafted, chosen.choice.num_rows)

    def look_ahead(self, turns: Sequence[Turn], llm: Worker, num_rows: int) -> bool:
        """While the LLM is at work on `num_rows`, have the SSMs draft on, and read the prompts that it reads.

        Returns whether any SSM is at work then.
        """
        shaped = self._draftable([turn for turn in turns if turn.is_shaped])
        num_ahead = sum(map(self._may_draft_ahead, shaped))
        beside = self.economy.beside_llm(llm.announcement, self._ssms_of(shaped), len(shaped), num_ahead, num_rows)
        self._patience_s = min(self.deadline_s, beside.patience_s)
        dynamic = [turn for turn in shaped if turn.is_dynamic]
        growing = [turn for turn in dynamic if beside.growth is not None and self._may_draft_ahead(turn)]
        trees = [DraftWish(turn.request, turn.item.end, growth=beside.growth) for turn in growing]
        prompts = [turn for turn in turns if _reads_for_later(turn) and (beside.reads or not turn.is_shaped)]
        behind = dynamic if beside.reads else dynamic[:_NUM_TRIED]
        self._asked_ahead = self.ssms.begin(trees, _to_read(prompts), _to_read(behind))
        return self.ssms.is_drafting

    def learn(self, step: StepTrees, llm: Worker, accepted: Mapping[RequestId, Accepted], times: StepTimes) -> None:
        """From a step that was committed."""
        nothing = Accepted((), ())
        paths = [accepted.get(turn.request_id, nothing) for turn in step.turns]
        sets = step.drafted.waited, step.drafted.asked_ahead, step.drafted.ahead
        drafted_for = DraftedFor(
            step.ssms, *[np.array([turn.request_id in ids for turn in step.turns]) for ids in sets]
        )
        self.economy.learn(llm.announcement, step.chosen, drafted_for, [path.tokens for path in paths], times)
        for is_ahead, drafts in ((False, step.drafted.round.costs), (True, step.drafted.costs_ahead)):
            for ssm, cost, other_ms in drafts:
                self.economy.learn_draft(ssm, cost, other_ms, is_ahead=is_ahead)
        for model, name, costs in self.economy.known_costs():
            self.observer.on_costs(model, name, costs)

    def _may_draft_ahead(self, turn: Turn) -> bool:
        wanted = turn.request.generation.draft_ahead
        return self.drafts_ahead if wanted is None else wanted

    async def _drafted(
        self, dynamic: Sequence[Turn], others: Sequence[Turn], price: StepPrice, ssms: Sequence[Announcement]
    ) -> Drafted:
        """What was drafted ahead; and where that is nothing, or no use, what is drafted now."""
        started = perf_counter()
        is_hidden = not self.ssms.is_drafting
        candidates, costs = await self._drafted_ahead([turn for turn in dynamic if self._may_draft_ahead(turn)])
        late_ms = (perf_counter() - started) * 1e3
        ahead = frozenset(request_id for request_id, drafts in candidates.items() if any(map(len, drafts)))
        bare = self._draftable([turn for turn in dynamic if turn.request_id not in ahead])
        wishes = self._static_wishes(others) + self._dynamic_wishes(bare, price, ssms, len(dynamic))
        found = await self._draft(wishes)
        candidates |= {request_id: [grown.draft for grown in drafts] for request_id, drafts in found.grown.items()}
        waited = frozenset(wish.request.request_id for wish in wishes)
        waited_ms = (perf_counter() - started) * 1e3
        return Drafted(candidates, self._asked_ahead, ahead, is_hidden, waited, found, waited_ms, late_ms, costs)

    async def _drafted_ahead(self, ahead: Sequence[Turn]) -> tuple[Candidates, DraftCosts]:
        """What was drafted during the last step, as far as the committed tokens did not leave it; and its costs."""
        if not ahead:
            return {}, ()
        found = await self.ssms.collect(self._patience_s)
        candidates = {}
        for turn in ahead:
            drafts = [grown.now(turn.request) for grown in found.grown.get(turn.request_id, ())]
            candidates[turn.request_id] = [draft for draft in drafts if draft is not None]
        return candidates, found.costs

    def _static_wishes(self, turns: Sequence[Turn]) -> list[DraftWish]:
        return [
            DraftWish(turn.request, turn.item.end, turn.item.shape)
            for turn in turns
            if not isinstance(turn.item.shape, DynamicTree) and turn.item.shape
        ]

    def _dynamic_wishes(
        self, bare: Sequence[Turn], price: StepPrice, ssms: Sequence[Announcement], num_dynamic: int
    ) -> list[DraftWish]:
        """Drafts for those without candidates for whom an SSM could draft at once, if waiting pays."""
        unread = self.ssms.unread(_to_read(bare))
        due = [turn for turn in bare if turn.request_id in unread]
        wanted = Wanted(
            num_dynamic, len(due), sum(unread.values()), max((len(turn.item.shape) for turn in due), default=0)
        )
        growth = self.economy.growth_to_wait_for(price, ssms, wanted)
        return [] if growth is None else [DraftWish(turn.request, turn.item.end, growth=growth) for turn in due]

    def _ssms_of(self, turns: Sequence[Turn]) -> tuple[Announcement, ...]:
        """Those that can draft for one of the requests at least."""
        return tuple(ssm for ssm in self.ssms.live() if any(turn.can_have(ssm) for turn in turns))

    def _draftable(self, turns: Sequence[Turn]) -> list[Turn]:
        """Those that some SSM can draft for; the others' trees say nothing of what drafts are worth."""
        ssms = self.ssms.live()
        return [turn for turn in turns if any(map(turn.can_have, ssms))]

    async def _draft(self, wishes: Sequence[DraftWish]) -> DraftRound:
        if not wishes:
            return NO_DRAFTS
        drafted = await self.ssms.draft(wishes, self.deadline_s)
        for wish in wishes:
            request_id = wish.request.request_id
            if request_id not in drafted.trees and request_id not in drafted.grown:
                self.observer.on_dropped("no_draft")
        return drafted

    def _static(self, turn: Turn, drafted: DraftRound) -> TokenTree:
        """The merged tree of what arrived; the root alone if nothing did."""
        trees = drafted.trees.get(turn.request_id)
        return prune(merge(trees), self.max_tree_nodes, len(turn.item.shape)) if trees else turn.root()

    def _choose(self, dynamic: Sequence[Turn], drafted: Drafted, price: StepPrice) -> StepChoice:
        roots = [turn.request.committed[turn.item.end - 1] for turn in dynamic]
        forest = merge_drafts(roots, [drafted.candidates.get(turn.request_id, ()) for turn in dynamic])
        shapes = [turn.item.shape for turn in dynamic if isinstance(turn.item.shape, DynamicTree)]
        bounds = Bounds(
            np.array([shape.max_nodes + 1 for shape in shapes]),
            np.array([shape.max_depth for shape in shapes]),
            self.max_rows,
        )
        return self.economy.choose(forest, bounds, price, drafted.waited_ms)


def _to_read(turns: Sequence[Turn]) -> list[DraftWish]:
    return [DraftWish(turn.request, turn.item.end) for turn in turns]


def _reads_for_later(turn: Turn) -> bool:
    """Whether it still reads its prompt and will be drafted for."""
    item, request = turn.item, turn.request
    reads = item.start < len(request.generation.prompt)
    return not item.shape and reads and request.generation.speculation and request.remaining > 1
