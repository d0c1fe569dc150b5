"""Grow token trees, level by level or best first (SpecInfer, section 3: expansion-based), batched over requests.

Knows the small model through HeldRequests; must not know NATS or the LLM. How a tree grows is in treecore.sapling,
which children a node gets in treecore.sprout.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treecore.errors import EspalierError, WireError
from treecore.messages import DraftItem, DraftReply, DraftRequest, RefusedItem, RequestId, WorkerId
from treecore.model.held import HeldRequests, refusal
from treecore.params import SamplingParams
from treecore.sapling import Plan, Sapling, check_item, plan_of
from treecore.sprout import NO_CHILDREN, Children, Drafting


@dataclass(slots=True)
class _Plant:
    """A request's tree while it grows. nodes: those that get children now; their rows are in the cache."""

    item: DraftItem
    params: SamplingParams
    sapling: Sapling
    plan: Plan
    nodes: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return self.item.request_id

    @property
    def is_prefill(self) -> bool:
        return self.item.growth is None and not self.item.expansion

    def rows(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of `nodes` as the cache numbers them; the root's row is there already."""
        sapling = self.sapling
        places = {node: place for place, node in enumerate(sapling.inner)}
        nodes = [node for node in self.nodes if node > 0]
        return [sapling.tokens[node - 1] for node in nodes], [places[sapling.parents[node - 1]] for node in nodes]


class Grower:
    """Answers DraftRequests with one tree a request.

    Trees that grow best first stay until the request's next item: what is below its root is neither computed nor
    chosen again. The cache says what that is; its tree and the sapling's inner nodes have the same numbers.
    """

    def __init__(
        self, worker_id: WorkerId, held: HeldRequests, vocab_size: int, head_token_ids: NDArray[np.int32] | None
    ) -> None:
        self._worker_id = worker_id
        self._held = held
        self._vocab_size = vocab_size
        self._head_token_ids = head_token_ids
        self._plants: dict[RequestId, _Plant] = {}  # as they were when their last step ended

    def step(self, request: DraftRequest) -> DraftReply:
        """Draft for all items in shared forwards. An item that cannot be drafted is refused and harms no other."""
        self._held.begin_step(request.session, request.released)
        self._plants = {key: plant for key, plant in self._plants.items() if self._held.holds(key)}
        outcomes = [self._take(item) for item in request.items]
        plants = [outcome for outcome in outcomes if isinstance(outcome, _Plant)]
        refused = tuple(outcome for outcome in outcomes if isinstance(outcome, RefusedItem))
        self._grow(plants, request.ssm_idx)
        self._plants |= {plant.request_id: plant for plant in plants if plant.item.growth is not None}
        drafted = tuple(plant.sapling.drafted(plant.item) for plant in plants)
        times = self._held.forward_ms, self._held.sample_ms
        return DraftReply(self._worker_id, drafted, refused, *times, self._held.usage())

    def _take(self, item: DraftItem) -> _Plant | RefusedItem:
        before = self._plants.pop(item.request_id, None)
        try:
            check_item(item, self._vocab_size, self._held.context_len)
        except WireError as error:
            return refusal(item, error)
        is_same = before is not None and item.growth is not None and item.params in (None, before.params)
        refused = self._held.take(item, keeps_tree=is_same)
        if refused:
            return refused
        params = self._held.params(item.request_id)
        if item.growth is not None and params.draws_drafts:
            return refusal(item, WireError("a tree that grows best first, by a rule that draws"))
        sapling = before.sapling.below(self._held.kept_nodes(item.request_id)) if before and is_same else Sapling()
        return _Plant(item, params, sapling, plan_of(item, sapling, self._held.context_len))

    def _grow(self, plants: list[_Plant], ssm_idx: int) -> None:
        prefills = [plant.request_id for plant in plants if plant.is_prefill]
        self._held.compute(prefills, with_logits=False)
        growing = [plant for plant in plants if self._put_next(plant)]
        while growing:
            logits = self._held.compute([plant.request_id for plant in growing])
            with self._held.sampling():
                for plant, rows in zip(growing, logits, strict=True):
                    plant.sapling.sprout(plant.nodes, self._children(plant, rows, ssm_idx))
            growing = [plant for plant in growing if self._put_next(plant)]

    def _put_next(self, plant: _Plant) -> bool:
        """Put the nodes that grow next into the cache; False where there are none, or no blocks for them."""
        plant.nodes = plant.plan.next_nodes(plant.sapling)
        return len(plant.nodes) > 0 and self._held.extend(plant.request_id, *plant.rows())

    def _children(self, plant: _Plant, logits: NDArray[np.float32], ssm_idx: int) -> list[Children]:
        """The children of the plant's nodes; none where grammar or model gave up."""
        below = [plant.sapling.paths[node] for node in plant.nodes]
        try:
            paths = self._held.paths(plant.request_id, below)
        except EspalierError:
            return [NO_CHILDREN] * len(below)
        if not np.isfinite(logits.max()):
            return [NO_CHILDREN] * len(below)
        drafting = Drafting(plant.params, self._head_token_ids, ssm_idx)
        children = drafting.children if plant.item.growth is None else drafting.scored_children
        return children(logits, paths, plant.plan.width)
