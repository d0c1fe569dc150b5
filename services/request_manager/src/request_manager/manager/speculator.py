"""The tree that each request of a step has: drafted ahead or waited for, merged, chosen. And the next step's drafts.

Knows SSMs and what trees cost and bring; must not know how they are verified, or write requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from request_manager.manager.drafting import DraftWish
from request_manager.manager.economy import Chosen, Economy, StepTimes
from request_manager.manager.registry import Worker
from request_manager.manager.request import Request
from request_manager.manager.scheduler import DynamicTree, PlannedItem
from request_manager.manager.ssm_pool import Round, SsmPool
from request_manager.manager.step_record import Observer
from treecore.accept import Accepted
from treecore.choice import Bounds, StepPrice
from treecore.forest import ScoredDraft, merge_drafts
from treecore.merge import merge, prune
from treecore.messages import RequestId, VerifyReply
from treecore.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's part in a step."""

    request: Request
    item: PlannedItem

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

    def root(self) -> TokenTree:
        """The tree of incremental decoding."""
        return TokenTree.of_root(self.request.committed[self.item.end - 1])


@dataclass(frozen=True, slots=True)
class StepTrees:
    """A step's trees by request, and how they came about.

    turns: those whose trees were chosen, in the order of `chosen.forest`. hidden: the requests whose drafts were there
    before the step began. draft_ms: waited for drafts; *_forward_ms, *_sample_ms: of that, inside an SSM.
    """

    trees: dict[RequestId, TokenTree]
    turns: tuple[Turn, ...] = ()
    chosen: Chosen | None = None
    hidden: frozenset[RequestId] = frozenset()
    num_rows: int = 0
    waited: bool = False
    draft_ms: float = 0.0
    draft_forward_ms: float = 0.0
    draft_sample_ms: float = 0.0


Candidates = dict[RequestId, list[ScoredDraft]]


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
    _num_rows: int = 1  # of the last step

    async def trees(self, turns: Sequence[Turn], llm: Worker) -> StepTrees:
        """What each turn verifies; the root alone where nothing arrived in time or nothing pays."""
        started = perf_counter()
        dynamic = [turn for turn in turns if turn.is_dynamic]
        candidates = await self._drafted_ahead(dynamic, llm)
        hidden = frozenset(request_id for request_id, drafts in candidates.items() if any(map(len, drafts)))
        price = self.economy.price(
            llm.announcement, sum(turn.num_rows for turn in turns if not turn.is_dynamic), len(turns) - len(dynamic)
        )
        wishes = self._wishes(turns, [turn for turn in dynamic if turn.request_id not in hidden], price, len(dynamic))
        drafted = await self._draft(wishes)
        draft_ms = (perf_counter() - started) * 1e3
        for turn in dynamic:
            if grown := drafted.grown.get(turn.request_id):
                candidates[turn.request_id] = [found.draft for found in grown]
        trees = {turn.request_id: self._static(turn, drafted) for turn in turns if not turn.is_dynamic}
        num_rows = price.num_other_rows + sum(len(tree) - 1 for tree in trees.values())
        chosen = None
        if dynamic:
            price = replace(price, num_other_rows=num_rows)
            chosen = self._choose(dynamic, candidates, price, draft_ms if wishes else 0.0)
            found = chosen.forest.trees(chosen.choice.kept)
            trees |= {turn.request_id: tree for turn, tree in zip(dynamic, found, strict=True)}
            num_rows = chosen.choice.num_rows
        self._num_rows = num_rows
        return StepTrees(
            trees,
            tuple(dynamic),
            chosen,
            hidden,
            num_rows,
            bool(wishes),
            draft_ms,
            drafted.forward_ms,
            drafted.sample_ms,
        )

    def look_ahead(self, turns: Sequence[Turn], llm: Worker) -> None:
        """While the LLM is at work, have the SSMs draft on, and read the prompts that it reads."""
        ahead = [turn for turn in turns if turn.is_dynamic and self._is_ahead(turn)]
        growth = self.economy.growth_ahead(llm.announcement, self.ssms.live(), len(ahead), self._num_rows)
        wishes = [DraftWish(turn.request, turn.item.end, growth=growth) for turn in ahead if growth is not None]
        wishes += [DraftWish(turn.request, turn.item.end) for turn in turns if _reads_for_later(turn)]
        self.ssms.begin(wishes)

    def learn(
        self, step: StepTrees, llm: Worker, accepted: Mapping[RequestId, Accepted], reply: VerifyReply, total_ms: float
    ) -> None:
        """From a step that was committed."""
        nothing = Accepted((), ())
        paths = [accepted.get(turn.request_id, nothing) for turn in step.turns]
        times = StepTimes(
            total_ms, reply.forward_ms + reply.sample_ms, step.draft_forward_ms + step.draft_sample_ms, step.waited
        )
        self.economy.learn(llm.announcement, step.chosen, [path.tokens for path in paths], times)
        ahead = [turn.request_id for turn in step.turns if self._is_ahead(turn) and turn.request_id in step.hidden]
        if ahead:
            gained = sum(len(accepted[request_id].nodes) for request_id in ahead if request_id in accepted)
            self.economy.learn_ahead(len(ahead), gained)

    def _is_ahead(self, turn: Turn) -> bool:
        wanted = turn.request.generation.draft_ahead
        return self.drafts_ahead if wanted is None else wanted

    async def _drafted_ahead(self, dynamic: Sequence[Turn], llm: Worker) -> Candidates:
        """What was drafted during the last step, as far as the committed tokens did not leave it."""
        if not any(self._is_ahead(turn) for turn in dynamic):
            return {}
        patience_s = min(self.deadline_s, self.economy.patience_s(llm.announcement, self._num_rows))
        grown = (await self.ssms.collect(patience_s)).grown
        found = {}
        for turn in dynamic:
            drafts = [entry.now(turn.request) for entry in grown.get(turn.request_id, ()) if self._is_ahead(turn)]
            found[turn.request_id] = [draft for draft in drafts if draft is not None]
        return found

    def _wishes(
        self, turns: Sequence[Turn], bare: Sequence[Turn], price: StepPrice, num_dynamic: int
    ) -> list[DraftWish]:
        """Drafts to wait for: static trees always, dynamic ones where that pays."""
        wishes = [
            DraftWish(turn.request, turn.item.end, turn.item.shape)
            for turn in turns
            if not isinstance(turn.item.shape, DynamicTree) and turn.item.shape
        ]
        max_depth = max((len(turn.item.shape) for turn in bare), default=0)
        growth = self.economy.growth_to_wait_for(price, self.ssms.live(), num_dynamic, len(bare), max_depth)
        if growth is not None:
            wishes += [DraftWish(turn.request, turn.item.end, growth=growth) for turn in bare]
        return wishes

    async def _draft(self, wishes: Sequence[DraftWish]) -> Round:
        drafted = await self.ssms.draft(wishes, self.deadline_s)
        for wish in wishes:
            request_id = wish.request.request_id
            if request_id not in drafted.trees and request_id not in drafted.grown:
                self.observer.on_dropped("no_draft")
        return drafted

    def _static(self, turn: Turn, drafted: Round) -> TokenTree:
        """The merged tree of what arrived; the root alone if nothing did."""
        trees = drafted.trees.get(turn.request_id)
        return prune(merge(trees), self.max_tree_nodes, len(turn.item.shape)) if trees else turn.root()

    def _choose(self, dynamic: Sequence[Turn], candidates: Candidates, price: StepPrice, waited_ms: float) -> Chosen:
        roots = [turn.request.committed[turn.item.end - 1] for turn in dynamic]
        forest = merge_drafts(roots, [candidates.get(turn.request_id, ()) for turn in dynamic])
        shapes = [turn.item.shape for turn in dynamic if isinstance(turn.item.shape, DynamicTree)]
        bounds = Bounds(
            np.array([shape.max_nodes + 1 for shape in shapes]),
            np.array([shape.max_depth for shape in shapes]),
            self.max_rows,
        )
        return self.economy.choose(forest, bounds, price, waited_ms)


def _reads_for_later(turn: Turn) -> bool:
    """Whether it still reads its prompt and will be drafted for."""
    item, request = turn.item, turn.request
    reads = item.start < len(request.generation.prompt)
    return not item.shape and reads and request.generation.speculation and request.remaining > 1
