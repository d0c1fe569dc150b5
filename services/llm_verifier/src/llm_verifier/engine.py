"""One verification step: committed tokens and trees in, the LLM's token after every node out.

Knows the model through HeldRequests; must not know NATS. Deterministic: the same request gives the same reply.
"""

from dataclasses import dataclass

import numpy as np

from treecore.child_laws import support_keys
from treecore.errors import EspalierError, InvalidRequest, ModelFailed, OutOfBlocks, WireError
from treecore.expand import MAX_WORKER_NODES
from treecore.law import Paths
from treecore.messages import (
    RefusedItem,
    VerifiedItem,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
    WorkerId,
    join_tree,
)
from treecore.model.choosing import Chosen, Rows
from treecore.model.held import HeldRequests, refusal
from treecore.tree import TokenTree
from treecore.verify import answer_nodes

_NO_NUMBERS = "the model's logits are not numbers"


@dataclass(frozen=True, slots=True)
class _Taken:
    """An item whose tokens and tree are in the cache, ready to be computed."""

    item: VerifyItem
    tree: TokenTree


class Engine:
    """Verifies steps of many requests; owns nothing but what HeldRequests holds."""

    def __init__(self, worker_id: WorkerId, held: HeldRequests, vocab_size: int) -> None:
        self.worker_id = worker_id
        self._held = held
        self._vocab_size = vocab_size

    def step(self, request: VerifyRequest) -> VerifyReply:
        """Verify all items in shared forwards. An item that cannot be done is refused and harms no other."""
        self._held.begin_step(request.session, request.released)
        taken: list[_Taken] = []
        refused: list[RefusedItem] = []
        for item in request.items:
            outcome = self._take(item)
            taken.append(outcome) if isinstance(outcome, _Taken) else refused.append(outcome)
        chunks = [entry.item for entry in taken if not entry.item.wants_token]
        self._held.compute([item.request_id for item in chunks], with_logits=False)
        outcomes = self._verify([entry for entry in taken if entry.item.wants_token])
        verified = [outcome for outcome in outcomes if isinstance(outcome, VerifiedItem)]
        verified += [self._prefilled(item) for item in chunks]
        refused += [outcome for outcome in outcomes if isinstance(outcome, RefusedItem)]
        times = self._held.forward_ms, self._held.sample_ms
        return VerifyReply(self.worker_id, tuple(verified), tuple(refused), *times, self._held.usage())

    def _take(self, item: VerifyItem) -> _Taken | RefusedItem:
        try:
            tree = self._checked_tree(item)
        except EspalierError as error:
            return refusal(item, error)
        refused = self._held.take(item)
        if refused:
            return refused
        if item.supports is not None and not self._held.params(item.request_id).draws_drafts:
            return refusal(item, WireError("a support for a rule that has none"))
        if self._held.extend(item.request_id, item.tree_tokens.tolist(), item.tree_parents.tolist()):
            return _Taken(item, tree)
        if item.supports is None:
            return _Taken(item, TokenTree.of_root(int(item.tokens[-1])))
        # The size of a drawn tree depends on the draws: to leave out the large ones would bend the law.
        self._held.forget(item.request_id)
        return refusal(item, OutOfBlocks("no room for the tree"))

    def _checked_tree(self, item: VerifyItem) -> TokenTree:
        if len(item.tokens) == 0 or item.start < 0:
            raise WireError("an item without committed tokens")
        if len(item.tree_tokens) >= MAX_WORKER_NODES:
            raise WireError(f"a tree of more than {MAX_WORKER_NODES} nodes")
        for tokens in (item.tokens, item.tree_tokens):
            if np.any(tokens < 0) or np.any(tokens >= self._vocab_size):
                raise WireError("a token id outside the vocabulary")
        tree = join_tree(int(item.tokens[-1]), item.tree_tokens, item.tree_parents)
        params = item.params
        if params is not None and params.grammar is not None and not self._held.follows_grammars:
            raise InvalidRequest("this model has no structured output", code="grammar_failed")
        if item.supports is not None:
            support_keys(item.supports, len(tree))
            if np.any(item.supports.token_ids >= self._vocab_size):
                raise WireError("a support outside the vocabulary")
        if _committed_len(item) + int(tree.depths.max()) > self._held.context_len:
            raise WireError("a tree beyond the model's context")
        return tree

    def _verify(self, taken: list[_Taken]) -> list[VerifiedItem | RefusedItem]:
        plain = {entry.item.request_id for entry in taken if self._is_plain(entry.item)}
        found = self._held.answer([entry.item.request_id for entry in taken], plain)
        with self._held.sampling():
            return [self._answer(entry, part) for entry, part in zip(taken, found, strict=True)]

    def _is_plain(self, item: VerifyItem) -> bool:
        return item.supports is None and self._held.params(item.request_id).is_plain

    def _answer(self, entry: _Taken, found: Rows | Chosen) -> VerifiedItem | RefusedItem:
        return self._told(entry.item, found) if isinstance(found, Chosen) else self._drawn(entry, found)

    def _told(self, item: VerifyItem, chosen: Chosen) -> VerifiedItem | RefusedItem:
        if np.any(chosen.tokens < 0):
            return refusal(item, ModelFailed(_NO_NUMBERS))
        return VerifiedItem(item.request_id, item.step, chosen.tokens, self._held.num_found(item.request_id))

    def _drawn(self, entry: _Taken, logits: Rows) -> VerifiedItem | RefusedItem:
        item = entry.item
        try:
            paths = self._held.paths(item.request_id, tuple(entry.tree.paths()))
            _check_possible(logits, paths)
        except EspalierError as error:
            return refusal(item, error)
        answer = answer_nodes(logits, self._held.params(item.request_id), paths, item.supports)
        num_found = self._held.num_found(item.request_id)
        return VerifiedItem(item.request_id, item.step, answer.tokens, num_found, answer.masses, answer.logprobs)

    def _prefilled(self, item: VerifyItem) -> VerifiedItem:
        return VerifiedItem(item.request_id, item.step, np.empty(0, np.int32), self._held.num_found(item.request_id))


def _check_possible(logits: Rows, paths: Paths) -> None:
    """Raises EspalierError where nobody can say which token follows."""
    if np.isnan(logits.max()):
        raise ModelFailed(_NO_NUMBERS)
    if paths.is_closed[0]:
        raise InvalidRequest("the output has left its grammar", code="grammar_failed")


def _committed_len(item: VerifyItem) -> int:
    return item.start + len(item.tokens)
