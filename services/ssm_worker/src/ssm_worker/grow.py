"""Grow token trees level by level (SpecInfer, section 3: expansion-based construction), batched over requests.

Knows the small model through HeldRequests; must not know NATS or the LLM. Drafting is coupled: the children of a node
are the top k of log q + G with the LLM's own noise (architecture section 4), of log q for greedy requests.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treecore.errors import WireError
from treecore.messages import DraftedItem, DraftItem, DraftReply, DraftRequest, RefusedItem, RequestId, WorkerId
from treecore.model.held import HeldRequests, refusal
from treecore.sampling import SamplingParams, best_tokens_of_nodes


@dataclass(slots=True)
class _Sapling:
    """A tree while it grows: node i + 1 is `tokens[i]`, node 0 the root, `frontier` the nodes of the last level."""

    item: DraftItem
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    frontier: range = range(1)
    level: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.item.request_id

    @property
    def widths_left(self) -> int:
        return len(self.item.expansion) - self.level

    def sprout(self, logits: NDArray[np.float32], head_token_ids: NDArray[np.int32] | None) -> None:
        """Give each frontier node its children. logits: fp32 [len(frontier), V]."""
        position = self.item.start + len(self.item.tokens) + self.level
        width = self.item.expansion[self.level]
        first = len(self.tokens) + 1
        chosen = best_tokens_of_nodes(logits, head_token_ids, self.params, [position] * len(logits), width)
        for node, children in zip(self.frontier, chosen, strict=True):
            self.tokens += children.tolist()
            self.parents += [node] * len(children)
        self.frontier = range(first, len(self.tokens) + 1)
        self.level += 1

    def frontier_arrays(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the last level."""
        nodes = slice(self.frontier.start - 1, self.frontier.stop - 1)
        return self.tokens[nodes], self.parents[nodes]

    def drafted(self) -> DraftedItem:
        """The tree as it travels."""
        return DraftedItem(
            self.request_id, self.item.step, np.array(self.tokens, np.int32), np.array(self.parents, np.int32)
        )


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
        self._grow(saplings)
        drafted = tuple(sapling.drafted() for sapling in saplings)
        times = self._held.forward_ms, self._held.sample_ms
        return DraftReply(self._worker_id, drafted, refused, *times, self._held.usage())

    def _take(self, item: DraftItem) -> _Sapling | RefusedItem:
        if len(item.tokens) == 0 or item.start < 0 or np.any(item.tokens < 0) or item.tokens.max() >= self._vocab_size:
            return refusal(item, WireError("tokens outside the vocabulary"))
        if any(width < 1 for width in item.expansion):
            return refusal(item, WireError("a level without children"))
        if item.start + len(item.tokens) + len(item.expansion) - 1 > self._held.context_len:
            return refusal(item, WireError("a tree beyond the model's context"))
        return self._held.take(item) or _Sapling(item, self._held.params(item.request_id))

    def _grow(self, saplings: list[_Sapling]) -> None:
        prefills = [sapling.request_id for sapling in saplings if not sapling.widths_left]
        self._held.compute(prefills, with_logits=False)
        growing = [sapling for sapling in saplings if sapling.widths_left]
        while growing:
            logits = self._held.compute([sapling.request_id for sapling in growing])
            with self._held.sampling():
                for sapling, rows in zip(growing, logits, strict=True):
                    sapling.sprout(rows, self._head_token_ids)
            growing = [sapling for sapling in growing if sapling.widths_left and self._put_level(sapling)]

    def _put_level(self, sapling: _Sapling) -> bool:
        """Put the last level into the cache, so that the next can grow on it; False where blocks ran out."""
        return self._held.extend(sapling.request_id, *sapling.frontier_arrays())
