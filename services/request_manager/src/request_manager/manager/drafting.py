"""One SSM worker as the manager sees it: what it holds, whether it is busy, and a draft within the deadline.

Owns what is known of the worker's draft cache. A slow or dead SSM costs its part of the tree, nothing else.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from request_manager.manager.registry import Worker
from request_manager.manager.request import Request
from request_manager.manager.step_record import Observer
from treecore.codec import decode, encode
from treecore.errors import EspalierError, Unavailable, WireError
from treecore.expand import NO_DRAFT, Expansion, Growth, num_nodes
from treecore.forest import ScoredDraft
from treecore.messages import (
    DraftedItem,
    DraftItem,
    DraftReply,
    DraftRequest,
    ForwardCost,
    RequestId,
    join_tree,
    step_subject,
)
from treecore.service.bus import Bus
from treecore.service.telemetry import log_event
from treecore.service.tracing import current_trace
from treecore.tree import TokenTree

logger = logging.getLogger(__name__)

_FEW_TOKENS = 64  # a worker reads so many in about the time of one forward
_LOST_S = 30.0  # an answer this late is no answer; registry and broker notice a death much earlier


@dataclass(frozen=True, slots=True)
class DraftWish:
    """A tree wanted for a request behind its first `end` committed tokens: <k1..km>, or one that grows best first.

    Neither only fills the cache.
    """

    request: Request
    end: int
    expansion: Expansion = NO_DRAFT
    growth: Growth | None = None

    @property
    def last_position(self) -> int:
        """The last that the SSM has to compute."""
        return self.end + len(self.expansion) - 1

    @property
    def max_nodes(self) -> int:
        """Below the root."""
        return num_nodes(self.expansion) - 1 if self.growth is None else self.growth.max_nodes


@dataclass(frozen=True, slots=True)
class Grown:
    """What an SSM grew behind the first `end` committed tokens of a request."""

    end: int
    draft: ScoredDraft

    def now(self, request: Request) -> ScoredDraft | None:
        """What of it stands behind all that is committed by now; None if the tokens took another way."""
        return self.draft.below(request.committed[self.end :])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees by request, as wished, and the SSM's time inside forwards and sampling.

    cost: what a forward and its sampling took, where there was nothing but trees to grow. other_ms: of the exchange,
    what was neither forward nor sampling.
    """

    trees: dict[RequestId, TokenTree]
    grown: dict[RequestId, Grown]
    forward_ms: float
    sample_ms: float
    cost: ForwardCost | None = None
    other_ms: float = 0.0


NOTHING = Drafts({}, {}, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DraftLink:
    """How one SSM worker is reached, and who it is."""

    bus: Bus
    session: str
    worker: Worker
    ssm_idx: int
    observer: Observer


class Drafter:
    """Talks to one SSM worker, one message at a time."""

    def __init__(self, link: DraftLink) -> None:
        self._link = link
        self._held: dict[RequestId, int] = {}
        self._released: set[RequestId] = set()
        self._in_flight: asyncio.Task[Drafts] | None = None
        self._is_collected = True
        self._is_late = False

    @property
    def worker(self) -> Worker:
        """The life of a worker that it talks to."""
        return self._link.worker

    @property
    def is_late(self) -> bool:
        """Whether it still owes an answer whose deadline has passed."""
        return self._is_late and self._is_busy

    @property
    def is_drafting(self) -> bool:
        """Whether it is at work on an answer that may still be waited for."""
        return self._is_busy and not self._is_late

    @property
    def owes_answer(self) -> bool:
        """Whether something was asked for that was not collected."""
        return self._in_flight is not None and not self._is_collected

    @property
    def owes_release(self) -> bool:
        """Whether the worker may still hold requests that are over."""
        return bool(self._released) or self._is_busy

    @property
    def _is_busy(self) -> bool:
        return self._in_flight is not None and not self._in_flight.done()

    def release(self, request_id: RequestId) -> None:
        """Tell the worker with the next message that the request is over."""
        if self._held.pop(request_id, None) is not None:
            self._released.add(request_id)

    def num_unread(self, wish: DraftWish) -> int:
        """How many of the tokens that the tree stands behind the worker, as far as is known, has yet to read."""
        return wish.end - self._held.get(wish.request.request_id, 0)

    def has_read(self, wish: DraftWish) -> bool:
        """Whether it has read all but a few."""
        return self.num_unread(wish) <= _FEW_TOKENS

    def could_draft(self, wish: DraftWish) -> bool:
        """Whether it could at once: it need not read, and is not reading for others."""
        return not self._is_busy and self.has_read(wish)

    async def draft(self, wishes: Sequence[DraftWish], deadline_s: float) -> Drafts:
        """Trees that the worker grew within `deadline_s`. Missing ones mean: verify the root alone."""
        if self.is_late:
            return NOTHING
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + deadline_s
        if self._is_busy and not await self._wait(deadline_s):
            return NOTHING
        self._send(wishes)
        return await self.collect(give_up_at - loop.time())

    def begin(self, wishes: Sequence[DraftWish]) -> bool:
        """Have the worker draft, or read, while the LLM is at work. Does nothing, and says False, while it is busy."""
        if self._is_busy:
            return False
        if wishes or self._released:
            self._send(wishes)
        return True

    async def collect(self, deadline_s: float) -> Drafts:
        """What was asked for last, once, if it is there within `deadline_s`; if it is late, at once."""
        patience_s = 0.0 if self.is_late else deadline_s
        if not self.owes_answer or not await self._wait(patience_s):
            return NOTHING
        assert self._in_flight is not None
        self._is_collected = True
        return self._in_flight.result()

    def close(self) -> None:
        """Stop waiting for the worker."""
        if self._in_flight is not None:
            self._in_flight.cancel()

    async def _wait(self, timeout_s: float) -> bool:
        assert self._in_flight is not None
        await asyncio.wait({self._in_flight}, timeout=max(timeout_s, 0.0))
        self._is_late = self._is_busy
        return not self._is_late

    def _send(self, wishes: Sequence[DraftWish]) -> None:
        items = tuple(self._item(wish) for wish in wishes)
        link, released = self._link, tuple(self._released)
        request = DraftRequest(link.session, link.ssm_idx, released, items, current_trace())
        self._released.clear()
        sent = {wish.request.request_id: wish for wish in wishes}
        for request_id in sent:
            self._held[request_id] = 0  # until the answer says otherwise: whatever happens, sending all again is right
        self._is_collected = self._is_late = False
        self._in_flight = asyncio.create_task(self._exchange(request, sent), name=f"draft {self.worker.worker_id}")

    def _item(self, wish: DraftWish) -> DraftItem:
        request = wish.request
        start = min(self._held.get(request.request_id, 0), wish.end - 1)
        return DraftItem(
            request.request_id,
            request.step,
            start,
            request.tokens_between(start, wish.end),
            request.generation.params if start == 0 else None,
            wish.expansion,
            wish.growth,
        )

    async def _exchange(self, request: DraftRequest, sent: dict[RequestId, DraftWish]) -> Drafts:
        subject, started = step_subject("ssm", self.worker.worker_id), perf_counter()
        try:
            async with self._link.worker.life.hold():
                reply = decode(await self._link.bus.request(subject, encode(request), _LOST_S), DraftReply)
        except (Unavailable, WireError) as error:
            log_event(logger, logging.WARNING, "no draft", worker_id=self.worker.worker_id, error=error)
            self._count(error)
            self._released.update(request.released)
            return NOTHING
        for refused in reply.refused:
            self._link.observer.on_dropped(refused.reason)
        other_ms = max(0.0, (perf_counter() - started) * 1e3 - reply.forward_ms - reply.sample_ms)
        drafts = Drafts({}, {}, reply.forward_ms, reply.sample_ms, _cost(request.items, reply), other_ms)
        for item in reply.items:
            wish = sent.get(item.request_id)
            if wish is None or item.request_id not in self._held:
                continue
            self._held[item.request_id] = wish.end
            try:
                self._put(drafts, wish, item)
            except WireError as error:
                log_event(logger, logging.WARNING, "draft is no tree", worker_id=self.worker.worker_id, error=error)
                self._count(error)
        return drafts

    def _count(self, error: EspalierError) -> None:
        """What was no message, or no tree, is counted; what never came is by the coordinator, as `no_draft`."""
        if isinstance(error, WireError):
            self._link.observer.on_dropped(error.code)

    def _put(self, drafts: Drafts, wish: DraftWish, item: DraftedItem) -> None:
        """Raises WireError for what was not wished."""
        if len(item.tokens) > wish.max_nodes:
            raise WireError(f"a tree of {len(item.tokens)} nodes; {wish.max_nodes} were asked for")
        if wish.growth is None:
            drafts.trees[item.request_id] = self._tree(wish, item)
            return
        vocab_size = self._link.worker.announcement.vocab_size
        draft = ScoredDraft.checked(self._link.ssm_idx, item.tokens, item.parents, item.scores, vocab_size)
        drafts.grown[item.request_id] = Grown(wish.end, draft)

    def _tree(self, wish: DraftWish, item: DraftedItem) -> TokenTree:
        """Raises WireError for a tree that the verifier would refuse, or that was not made by the request's rule."""
        vocab_size = self._link.worker.announcement.vocab_size
        if np.any(item.tokens >= vocab_size):
            raise WireError("a token id outside the vocabulary")
        if item.laws is not None and np.any(item.laws.supports.token_ids >= vocab_size):
            raise WireError("a draft law of tokens outside the vocabulary")
        draws = wish.request.generation.params.draws_drafts and len(item.tokens) > 0
        if (item.laws is not None) != draws:
            raise WireError("draws without laws, or laws of what was not drawn")
        root = wish.request.committed[wish.end - 1]
        return join_tree(root, item.tokens, item.parents, self._link.ssm_idx, item.laws)


def _cost(items: Sequence[DraftItem], reply: DraftReply) -> ForwardCost | None:
    """Of a forward over so many rows as they had in the mean: the first reads what is new, the others expand nodes."""
    growths = [item.growth for item in items]
    num_forwards = max((growth.num_forwards for growth in growths if growth is not None), default=0)
    ms = reply.forward_ms + reply.sample_ms
    if None in growths or not num_forwards or ms <= 0.0:
        return None
    width = sum(growth.width for growth in growths if growth is not None)
    num_rows = sum(len(item.tokens) for item in items) + (num_forwards - 1) * width
    return ForwardCost(max(1, round(num_rows / num_forwards)), ms / num_forwards)
