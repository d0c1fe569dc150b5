"""Workers with scripted models in place of weights: they answer real step messages, and keep books as real ones do.

Knows the messages and the workers' promises (StateMissing, sessions, releases, blocks); no torch.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from treecore.codec import decode, encode
from treecore.errors import OutOfBlocks, WireError
from treecore.law import Paths
from treecore.messages import (
    Announcement,
    BlockUsage,
    DraftedItem,
    DraftItem,
    DraftReply,
    DraftRequest,
    ForwardCost,
    RefusedItem,
    RequestId,
    VerifiedItem,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
    WorkerId,
    WorkerKind,
    join_tree,
    step_subject,
)
from treecore.params import SamplingParams
from treecore.sapling import Sapling, plan_of
from treecore.service.bus import Bus
from treecore.sessions import manager_of
from treecore.sprout import Drafting
from treecore.testing.scripted import LanguageModel
from treecore.tree import TokenTree
from treecore.verify import answer_nodes

_FORWARD_TURNS = 16  # of the event loop that an LLM takes; an SSM is faster


@dataclass(slots=True)
class _Books:
    """What a worker holds of one request; `num_rows` are cached rows, tree nodes included.

    sapling: a tree that grows best first and was not given up yet.
    """

    tokens: list[int]
    params: SamplingParams
    num_rows: int = 0
    sapling: Sapling | None = None


@dataclass(frozen=True, slots=True)
class FakeSize:
    """How large a fake worker is, and how long its forwards seem to take: the first row, each other."""

    context_len: int = 4096
    num_blocks: int = 1024
    block_len: int = 8
    eos_token_ids: tuple[int, ...] = ()
    forward_ms: float = 0.0
    row_ms: float = 0.0

    def ms(self, num_rows: int) -> float:
        """What a forward is said to take."""
        return self.forward_ms + self.row_ms * max(0, num_rows - 1) if self.forward_ms else 0.0


@dataclass(slots=True)
class _FakeWorker:
    """Bookkeeping that both kinds share. `steps` are the requests so far, in order."""

    model: LanguageModel
    worker_id: WorkerId
    name: str = "fake"
    size: FakeSize = field(default_factory=FakeSize)
    session: str = ""
    num_steps: int = 0
    _held: dict[RequestId, _Books] = field(default_factory=dict)

    @property
    def held_ids(self) -> set[RequestId]:
        """The requests that it holds."""
        return set(self._held)

    def forget(self) -> None:
        """Lose all state, as a process does that restarts under the same name."""
        self._held.clear()
        self.session = ""

    def usage(self) -> BlockUsage:
        """The integrity equation of its imagined cache."""
        used = sum(self._blocks(books.num_rows) for books in self._held.values())
        return BlockUsage(self.size.num_blocks - used, used, 0, self.size.num_blocks, self.size.block_len)

    def _announcement(self, kind: WorkerKind, *, leaving: bool) -> Announcement:
        size = self.size
        return Announcement(
            self.worker_id,
            kind,
            self.name,
            self.model.vocab_size,
            size.context_len,
            size.eos_token_ids,
            self.usage(),
            leaving,
            costs=tuple(ForwardCost(rows, size.ms(rows)) for rows in (1, 2)) if size.forward_ms else (),
        )

    def _begin(self, session: str, released: Iterable[RequestId]) -> None:
        self.num_steps += 1
        if session != self.session:
            self._held.clear()
        self.session = session
        for request_id in released:
            self._held.pop(request_id, None)

    def _take(self, item: DraftItem | VerifyItem, num_nodes: int) -> _Books | RefusedItem:
        held = self._held.get(item.request_id)
        held_len = len(held.tokens) if held else 0
        if item.start > held_len or (held is None and item.params is None):
            return RefusedItem(item.request_id, item.step, held_len, "state_missing")
        if self._is_malformed(item):
            return RefusedItem(item.request_id, item.step, 0, WireError.code)
        params = item.params or held.params  # type: ignore[union-attr]  # one of both is there
        kept = held.tokens[: item.start] if held else []
        books = _Books([*kept, *item.tokens.tolist()], params, item.start + len(item.tokens) + num_nodes)
        if not self._fits(item, num_nodes):
            self._held.pop(item.request_id, None)
            return RefusedItem(item.request_id, item.step, 0, OutOfBlocks.code)
        self._held[item.request_id] = books
        return books

    def _fits(self, item: DraftItem | VerifyItem, num_nodes: int) -> bool:
        held = self._held.get(item.request_id)
        room = self.usage().free + (self._blocks(held.num_rows) if held else 0)
        return self._blocks(item.start + len(item.tokens) + num_nodes) <= room

    def _is_malformed(self, item: DraftItem | VerifyItem) -> bool:
        tokens = item.tokens
        end = item.start + len(tokens)
        return (
            not len(tokens) or tokens.min() < 0 or tokens.max() >= self.model.vocab_size or end > self.size.context_len
        )

    def _blocks(self, num_rows: int) -> int:
        return -(-num_rows // self.size.block_len)


@dataclass(slots=True)
class FakeVerifier(_FakeWorker):
    """A verifier whose LLM is `model`."""

    def announcement(self, *, leaving: bool = False) -> Announcement:
        """What it tells everyone."""
        return self._announcement("verifier", leaving=leaving)

    async def attach(self, bus: Bus) -> None:
        """Take steps from `bus`."""

        async def answer(body: bytes) -> bytes | None:
            for _ in range(_FORWARD_TURNS):
                await asyncio.sleep(0)
            return encode(self.step(decode(body, VerifyRequest)))

        await bus.subscribe(step_subject("verifier", self.worker_id), answer)

    def step(self, request: VerifyRequest) -> VerifyReply:
        """The LLM's token behind every node, path by path."""
        self._begin(request.session, request.released)
        answers = [self._verify(item) for item in request.items]
        verified = tuple(answer for answer in answers if isinstance(answer, VerifiedItem))
        refused = tuple(answer for answer in answers if isinstance(answer, RefusedItem))
        manager = manager_of(request.session)
        ms = self.size.ms(sum(len(item.tokens) + len(item.tree_tokens) for item in request.items))
        return VerifyReply(self.worker_id, verified, refused, ms, 0.0, self.usage(), manager)

    def _verify(self, item: VerifyItem) -> VerifiedItem | RefusedItem:
        if np.any(item.tree_tokens >= self.model.vocab_size):
            return RefusedItem(item.request_id, item.step, 0, WireError.code)
        tree = join_tree(int(item.tokens[-1]), item.tree_tokens, item.tree_parents)
        if item.supports is None and not self._fits(item, len(tree) - 1):
            tree = TokenTree.of_root(int(item.tokens[-1]))
        books = self._take(item, len(tree) - 1)
        if isinstance(books, RefusedItem):
            return books
        if not item.wants_token:
            return VerifiedItem(item.request_id, item.step, np.empty(0, np.int32), 0)
        paths = tuple(tree.paths())
        logits = np.stack([self.model.logits([*books.tokens, *path]) for path in paths])
        answer = answer_nodes(logits, books.params, Paths(books.tokens, paths), item.supports)
        return VerifiedItem(item.request_id, item.step, answer.tokens, 0, answer.masses, answer.logprobs)


@dataclass(slots=True)
class FakeSsm(_FakeWorker):
    """An SSM worker that drafts with `model`."""

    def announcement(self, *, leaving: bool = False) -> Announcement:
        """What it tells everyone."""
        return self._announcement("ssm", leaving=leaving)

    async def attach(self, bus: Bus) -> None:
        """Take steps from `bus`."""

        async def answer(body: bytes) -> bytes | None:
            return encode(self.step(decode(body, DraftRequest)))

        await bus.subscribe(step_subject("ssm", self.worker_id), answer)

    def step(self, request: DraftRequest) -> DraftReply:
        """A tree a request, level by level or best first."""
        self._begin(request.session, request.released)
        answers = [self._draft(item, request.ssm_idx) for item in request.items]
        drafted = tuple(answer for answer in answers if isinstance(answer, DraftedItem))
        refused = tuple(answer for answer in answers if isinstance(answer, RefusedItem))
        return DraftReply(self.worker_id, drafted, refused, self.size.forward_ms, 0.0, self.usage())

    def _draft(self, item: DraftItem, ssm_idx: int) -> DraftedItem | RefusedItem:
        before = self._held.get(item.request_id)
        books = self._take(item, 0)
        if isinstance(books, RefusedItem):
            return books
        if item.growth is not None and (books.params.draws_drafts or item.expansion):
            return RefusedItem(item.request_id, item.step, 0, WireError.code)
        sapling = _kept(before, books) if before and item.growth is not None else Sapling()
        self._grow(item, sapling, books, ssm_idx)
        books.sapling = sapling if item.growth is not None else None
        return sapling.drafted(item)

    def _grow(self, item: DraftItem, sapling: Sapling, books: _Books, ssm_idx: int) -> None:
        drafting = Drafting(books.params, None, ssm_idx)
        children = drafting.children if item.growth is None else drafting.scored_children
        plan = plan_of(item, sapling, self.size.context_len)
        while nodes := plan.next_nodes(sapling):
            paths = Paths(books.tokens, [sapling.paths[node] for node in nodes])
            logits = np.stack([self.model.logits([*books.tokens, *path]) for path in paths.below])
            sapling.sprout(nodes, children(logits, paths, plan.width))


def _kept(before: _Books, books: _Books) -> Sapling:
    """What stays of the tree behind `before` once the tokens are those of `books`."""
    num_before = len(before.tokens)
    if before.sapling is None or before.params != books.params or books.tokens[:num_before] != before.tokens:
        return Sapling()
    return before.sapling.below(before.sapling.inner_below(books.tokens[num_before:]))
