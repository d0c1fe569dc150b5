"""Grow token trees level by level (SpecInfer, section 3: expansion-based construction), batched over requests.

Knows the small model through HeldRequests; must not know NATS or the LLM. Which children a node gets is in
treecore.sprout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treecore.child_laws import ChildLaw
from treecore.errors import EspalierError, WireError
from treecore.expand import MAX_WORKER_NODES, num_nodes
from treecore.messages import DraftedItem, DraftItem, DraftReply, DraftRequest, RefusedItem, RequestId, WorkerId
from treecore.model.held import HeldRequests, refusal
from treecore.params import SamplingParams
from treecore.sprout import Children, Drafting, pack_laws


@dataclass(slots=True)
class _Sapling:
    """A tree while it grows: node i + 1 is `tokens[i]`, node 0 the root, `frontier` the nodes of the last level.

    paths: each node's tokens below the root, the root's own (none) first.
    """

    item: DraftItem
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    laws: dict[int, ChildLaw] = field(default_factory=dict)
    frontier: range = range(1)
    level: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.item.request_id

    @property
    def widths_left(self) -> int:
        return len(self.item.expansion) - self.level

    @property
    def can_grow(self) -> bool:
        """Whether there are nodes to give children to."""
        return self.widths_left > 0 and len(self.frontier) > 0

    def sprout(self, families: Sequence[Children]) -> None:
        """Give each frontier node its children."""
        first = len(self.tokens) + 1
        for node, children in zip(self.frontier, families, strict=True):
            tokens = children.tokens.tolist()
            self.tokens += tokens
            self.parents += [node] * len(tokens)
            self.paths += [(*self.paths[node], token) for token in tokens]
            if children.law is not None and tokens:
                self.laws[node] = children.law
        self.frontier = range(first, len(self.tokens) + 1)
        self.level += 1

    def frontier_arrays(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the last level."""
        nodes = slice(self.frontier.start - 1, self.frontier.stop - 1)
        return self.tokens[nodes], self.parents[nodes]

    def drafted(self) -> DraftedItem:
        """The tree as it travels."""
        tokens, parents = np.array(self.tokens, np.int32), np.array(self.parents, np.int32)
        return DraftedItem(self.request_id, self.item.step, tokens, parents, pack_laws(self.laws))


class Grower:
    """Answers DraftRequests with one tree a request."""

    def __init__(
        self, worker_id: WorkerId, held: HeldRequests, vocab_size: int, head_token_ids: NDArray[np.int32] | None
    ) -> None:
        self._worker_id = worker_id
        self._held = held
        self._vocab_size = vocab_size
        self._head_token_ids = head_token_ids

    def step(self, request: DraftRequest) -> DraftReply:
        """Draft for all items in shared forwards. An item that cannot be drafted is refused and harms no other."""
        self._held.begin_step(request.owner, request.released)
        outcomes = [self._take(item) for item in request.items]
        saplings = [outcome for outcome in outcomes if isinstance(outcome, _Sapling)]
        refused = tuple(outcome for outcome in outcomes if isinstance(outcome, RefusedItem))
        self._grow(saplings, request.ssm_idx)
        drafted = tuple(sapling.drafted() for sapling in saplings)
        times = self._held.forward_ms, self._held.sample_ms
        return DraftReply(self._worker_id, drafted, refused, *times, self._held.usage())

    def _take(self, item: DraftItem) -> _Sapling | RefusedItem:
        if len(item.tokens) == 0 or item.start < 0 or np.any(item.tokens < 0) or item.tokens.max() >= self._vocab_size:
            return refusal(item, WireError("tokens outside the vocabulary"))
        if any(width < 1 for width in item.expansion) or num_nodes(item.expansion) > MAX_WORKER_NODES:
            return refusal(item, WireError("a level without children, or too many of them"))
        if item.start + len(item.tokens) + len(item.expansion) - 1 > self._held.context_len:
            return refusal(item, WireError("a tree beyond the model's context"))
        return self._held.take(item) or _Sapling(item, self._held.params(item.request_id))

    def _grow(self, saplings: list[_Sapling], ssm_idx: int) -> None:
        prefills = [sapling.request_id for sapling in saplings if not sapling.widths_left]
        self._held.compute(prefills, with_logits=False)
        growing = [sapling for sapling in saplings if sapling.widths_left]
        while growing:
            logits = self._held.compute([sapling.request_id for sapling in growing])
            with self._held.sampling():
                rows = zip(growing, logits, strict=True)
                growing = [sapling for sapling, found in rows if self._sprout(sapling, found, ssm_idx)]
            growing = [sapling for sapling in growing if sapling.can_grow and self._put_level(sapling)]

    def _sprout(self, sapling: _Sapling, logits: NDArray[np.float32], ssm_idx: int) -> bool:
        """One level more; False, with nothing changed, where grammar or model gave up."""
        below = sapling.paths[sapling.frontier.start : sapling.frontier.stop]
        try:
            paths = self._held.paths(sapling.request_id, below)
        except EspalierError:
            return False
        if np.isnan(logits.max()):
            return False
        drafting = Drafting(sapling.params, self._head_token_ids, ssm_idx)
        sapling.sprout(drafting.children(logits, paths, sapling.item.expansion[sapling.level]))
        return True

    def _put_level(self, sapling: _Sapling) -> bool:
        """Put the last level into the cache, so that the next can grow on it; False where blocks ran out."""
        return self._held.extend(sapling.request_id, *sapling.frontier_arrays())
