"""An SSM without weights: it drafts what followed the last tokens where they stood before.

Knows messages, books and laws from counts; must not know NATS or the LLM. Its trees are no better than what repeats
in a text, and cost next to nothing.
"""

import heapq
import math
import time
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from ssm_worker.automaton import SuffixAutomaton
from ssm_worker.repeats import Cursors, Law, Repeats
from ssm_worker.texts import HeldTexts, Text
from treecore.child_laws import ChildLaw
from treecore.errors import EspalierError, StateMissing, WireError
from treecore.expand import MAX_WORKER_NODES, Expansion, Growth
from treecore.law import Paths
from treecore.messages import DraftedItem, DraftItem, DraftReply, DraftRequest, RefusedItem, WorkerId
from treecore.noise import gumbel_at
from treecore.sapling import check_item
from treecore.sprout import Drafting, pack_laws

_MAX_NOISY = 16  # followers of a context whose noise is drawn, at some 5 us each: a corpus may know hundreds

Scored = list[tuple[int, float]]
"""Tokens that may follow, each with the log of its share; the best, or the first drawn, first."""


@dataclass(frozen=True, slots=True)
class _Node:
    """Number, tokens below the root, and the contexts behind it."""

    idx: int
    path: tuple[int, ...]
    at: Cursors


@dataclass(slots=True)
class _Tree:
    """A tree in the making: node i + 1 is `tokens[i]`, node 0 the root."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    laws: dict[int, ChildLaw] = field(default_factory=dict)

    def drafted(self, item: DraftItem) -> DraftedItem:
        """The tree as it travels."""
        tokens, parents = np.array(self.tokens, np.int32), np.array(self.parents, np.int32)
        scores = None if item.growth is None else np.array(self.scores, np.float32)
        return DraftedItem(item.request_id, item.step, tokens, parents, pack_laws(self.laws), scores)


@dataclass(slots=True)
class _Grower:
    """Grows one request's tree. It keeps nothing between steps: growing again costs less than keeping."""

    text: Text
    repeats: Repeats
    ssm_idx: int
    tree: _Tree = field(default_factory=_Tree)

    def by_levels(self, expansion: Expansion) -> None:
        """<k1..km>, narrower where less is known."""
        level = [self._root()]
        for width in expansion:
            level = [self._add(node, *child) for node in level for child in self._children(node, width)]

    def best_first(self, growth: Growth, max_depth: int) -> None:
        """The `max_nodes` most likely nodes, the most likely first; there is no forward to be sparing with."""
        most = min(growth.max_nodes, MAX_WORKER_NODES)
        serial = count()  # of equal nodes the first found goes first
        found: list[tuple[float, int, _Node, int, float]] = []
        node, cost = self._root(), 0.0
        while len(self.tree.tokens) < most:
            for token, score in self._children(node, growth.num_children) if len(node.path) < max_depth else ():
                heapq.heappush(found, (cost - score, next(serial), node, token, score))
            if not found:
                return
            cost, _, parent, token, score = heapq.heappop(found)
            node = self._add(parent, token, score)

    def _root(self) -> _Node:
        return _Node(0, (), self.repeats.here(self.text.tokens))

    def _add(self, parent: _Node, token: int, score: float) -> _Node:
        self.tree.tokens.append(token)
        self.tree.parents.append(parent.idx)
        self.tree.scores.append(score)
        return _Node(len(self.tree.tokens), (*parent.path, token), self.repeats.follow(parent.at, token))

    def _children(self, node: _Node, width: int) -> Scored:
        law, params = self.repeats.law(node.at), self.text.params
        if not law.shares:
            return []
        if params.draws_drafts:
            return self._drawn(node, law, width)
        if params.rule == "coupled" and not params.is_greedy:
            law = self._with_noise(law, len(self.text.tokens) + len(node.path))
        best = sorted(law.shares.items(), key=lambda entry: -entry[1])[:width]
        return [(token, math.log(share)) for token, share in best]

    def _with_noise(self, law: Law, position: int) -> Law:
        """The LLM takes the best of log p + G: with the same noise, a token of good luck is likelier than its count."""
        seed = self.text.params.seed
        best = heapq.nlargest(_MAX_NOISY, law.shares.items(), key=lambda entry: entry[1])
        lucky = {token: share * math.exp(gumbel_at(seed, position, token)) for token, share in best}
        left = 1.0 - sum(share for _, share in best)
        total = sum(lucky.values()) + left
        return Law({token: share / total for token, share in lucky.items()}, left / total)

    def _drawn(self, node: _Node, law: Law, width: int) -> Scored:
        """Draws from the law, with the law on record, as the multi_step rules need them."""
        token_ids = np.array(sorted(law.shares), np.int32)
        logits = np.log(np.array([[law.shares[token] for token in token_ids.tolist()]], np.float32))
        drafting = Drafting(self.text.params, token_ids, self.ssm_idx)
        (children,) = drafting.children(logits, Paths(self.text.tokens, [node.path]), width)
        if children.law is not None:
            self.tree.laws[node.idx] = children.law
        return [(token, 0.0) for token in children.tokens.tolist()]


class SuffixDrafter:
    """Answers DraftRequests with one tree a request, an empty one where nothing repeats.

    Grammars are not followed: the verifier rejects what they forbid.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        held: HeldTexts,
        vocab_size: int,
        context_len: int,
        min_match: int,
        corpus: SuffixAutomaton | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._held = held
        self._vocab_size = vocab_size
        self._context_len = context_len
        self._min_match = min_match
        self._corpus = corpus

    def step(self, request: DraftRequest) -> DraftReply:
        """Draft for all items. An item that cannot be drafted is refused and harms no other."""
        started = time.perf_counter()
        self._held.begin_step(request.session, request.released)
        outcomes = [self._draft(item, request.ssm_idx) for item in request.items]
        drafted = tuple(outcome for outcome in outcomes if isinstance(outcome, DraftedItem))
        refused = tuple(outcome for outcome in outcomes if isinstance(outcome, RefusedItem))
        took_ms = (time.perf_counter() - started) * 1e3
        return DraftReply(self._worker_id, drafted, refused, 0.0, took_ms, self._held.usage())

    def _draft(self, item: DraftItem, ssm_idx: int) -> DraftedItem | RefusedItem:
        try:
            check_item(item, self._vocab_size, self._context_len)
            return self._grown(item, self._held.take(item), ssm_idx)
        except StateMissing as error:
            return RefusedItem(item.request_id, item.step, error.held_len, error.code)
        except EspalierError as error:
            return RefusedItem(item.request_id, item.step, 0, error.code)

    def _grown(self, item: DraftItem, text: Text, ssm_idx: int) -> DraftedItem:
        grower = _Grower(text, Repeats(text.automaton, self._corpus, self._min_match), ssm_idx)
        if item.growth is None:
            grower.by_levels(item.expansion)
        elif text.params.draws_drafts:
            raise WireError("a tree that grows best first, by a rule that draws")
        else:
            grower.best_first(item.growth, self._context_len - len(text.tokens))
        return grower.tree.drafted(item)
