"""The requests that a worker holds for its managers: cached tokens and sampling parameters. Both workers use it.

Knows items, caches and forwards; must not know trees' meaning, NATS or who asks. Losing all of it costs time only.
"""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treecore.errors import ConfigError, EspalierError, OutOfBlocks, StateMissing, WireError, code_of
from treecore.law import Paths
from treecore.messages import (
    Announcement,
    BlockUsage,
    DraftItem,
    RefusedItem,
    RequestId,
    VerifyItem,
    WorkerId,
    WorkerKind,
)
from treecore.model.batch import ForwardBatch, Segment
from treecore.model.choosing import ChooseTokens, Chosen, Rows, joined, read_answers, read_logits
from treecore.model.kv_pool import Slots
from treecore.model.sequence import SequenceCache
from treecore.model.spec import ModelSpec
from treecore.params import Grammar, SamplingParams
from treecore.sessions import Sessions

MAX_SEGMENT_ROWS = 512  # longer runs of uncached tokens are computed in several forwards
_MIN_TWIN_ROWS = 64  # fewer rows are cheaper computed twice than waited for: a wait is a forward more


class GrammarState(Protocol):
    """Which tokens one request's grammar allows; treecore.grammar has the real one."""

    def masks(self, output: Sequence[int], below: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
        """Allowed tokens behind each path below `output`: bool [n, V]; a function of its arguments."""


GrammarStarter = Callable[[Grammar], GrammarState]

P = TypeVar("P", bound=Slots)
T = TypeVar("T")
Read = Callable[[list[RequestId], ForwardBatch, Tensor], list[T]]


class Forwards(Protocol[P]):
    """What computes: a Decoder, or a group of ranks that together are one. See Decoder for what each promises."""

    @property
    def spec(self) -> ModelSpec: ...  # noqa: D102 - see Decoder

    def new_pool(self, num_slots: int) -> P: ...  # noqa: D102

    def forward(self, batch: ForwardBatch, pool: P) -> Tensor: ...  # noqa: D102


class HeldRequests:
    """Owns the cache and the parameters of every request at this worker; not thread-safe.

    reuses_prefixes: whether requests share the K and V of equal beginnings. choose_tokens: how the device chooses the
    tokens of plain requests; None leaves them all to whoever asks for logits. Raises ConfigError for no block.
    `forward_ms` and `sample_ms`: time in model forwards, the choice of tokens on the device included, and within
    `sampling()`, since the step began.
    """

    def __init__(
        self,
        decoder: Forwards[P],
        num_blocks: int,
        block_len: int,
        start_grammar: GrammarStarter | None = None,
        *,
        reuses_prefixes: bool = True,
        choose_tokens: ChooseTokens | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(f"--kv-tokens is below --block-len {block_len}: the cache would hold no block")
        pool = decoder.new_pool(num_blocks * block_len)
        self._run: Callable[[ForwardBatch], Tensor] = lambda batch: decoder.forward(batch, pool)
        self._spec = decoder.spec
        self._cache = SequenceCache(pool, block_len, reuses_prefixes=reuses_prefixes)
        self._block_len = block_len
        self._start_grammar = start_grammar
        self._choose_tokens = choose_tokens
        self._params: dict[RequestId, SamplingParams] = {}
        self._grammars: dict[RequestId, GrammarState] = {}
        self._taken: set[RequestId] = set()
        self._sessions = Sessions(time.monotonic)
        self.forward_ms = 0.0
        self.sample_ms = 0.0

    @property
    def follows_grammars(self) -> bool:
        """Whether requests are held to their grammars here. An SSM may do without, a verifier may not."""
        return self._start_grammar is not None

    @property
    def context_len(self) -> int:
        """Positions that the model has; every committed token and every node needs one."""
        return self._spec.context_len

    def begin_step(self, session: str, released: Iterable[RequestId]) -> None:
        """Forget what is released, and what nobody will ask for again (see Sessions)."""
        self.forward_ms = self.sample_ms = 0.0
        self._taken.clear()
        for request_id in (*self._sessions.begin_step(session), *released):
            self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        """The request holds nothing here any more; what it computed may still be found by its text."""
        self._cache.release(request_id)
        self._sessions.forget(request_id)
        self._params.pop(request_id, None)
        self._grammars.pop(request_id, None)

    def forget_all(self) -> None:
        """No request holds anything here any more."""
        for request_id in list(self._params):
            self.forget(request_id)

    def take(self, item: DraftItem | VerifyItem, *, keeps_tree: bool = False) -> RefusedItem | None:
        """Take the item's committed tokens in; says why not. keeps_tree: see SequenceCache.advance, and `kept_nodes`.

        A refused item changes nothing, but that a request for which there is no room is forgotten: it will come again
        with all of its tokens, and others can use its blocks.
        """
        try:
            self._take(item, keeps_tree=keeps_tree)
        except OutOfBlocks as error:
            self.forget(item.request_id)
            return refusal(item, error)
        except StateMissing as error:
            return RefusedItem(item.request_id, item.step, error.held_len, error.code)
        except EspalierError as error:
            return refusal(item, error)
        return None

    def _take(self, item: DraftItem | VerifyItem, *, keeps_tree: bool) -> None:
        if item.params is None and item.request_id not in self._params:
            raise StateMissing(0)
        if item.request_id in self._taken:
            raise WireError("a request twice in one message: the cache can follow only one of them")
        if item.start + len(item.tokens) > self.context_len:
            raise WireError("tokens beyond the model's context")
        if item.params is not None:
            self._check_ids(item.params)
        grammar = self._grammar(item)
        self._cache.advance(item.request_id, item.start, item.tokens, keeps_tree=keeps_tree)
        self._taken.add(item.request_id)
        self._sessions.take(item.request_id)
        if item.params is not None:
            self._params[item.request_id] = item.params
            self._grammars.pop(item.request_id, None)
        if grammar is not None:
            self._grammars[item.request_id] = grammar

    def _check_ids(self, params: SamplingParams) -> None:
        if any(token >= self._spec.vocab_size for token in (*params.bias_ids, *params.end_token_ids)):
            raise WireError("a parameter names a token id outside the vocabulary")

    def _grammar(self, item: DraftItem | VerifyItem) -> GrammarState | None:
        """The request's grammar from its start, if the item brings one."""
        if item.params is None or item.params.grammar is None or self._start_grammar is None:
            return None
        return self._start_grammar(item.params.grammar)

    def holds(self, request_id: RequestId) -> bool:
        """Whether anything of the request is held."""
        return request_id in self._params

    def params(self, request_id: RequestId) -> SamplingParams:
        """How the request's tokens are chosen."""
        return self._params[request_id]

    def paths(self, request_id: RequestId, below: Sequence[tuple[int, ...]]) -> Paths:
        """What stands before the tokens behind some nodes, each given by its tokens below the root."""
        committed, grammar = self._cache.tokens(request_id), self._grammars.get(request_id)
        if grammar is None:
            return Paths(committed, below)
        output = committed[self._params[request_id].prompt_len :]
        return Paths(committed, below, grammar.masks(output, below))

    def num_found(self, request_id: RequestId) -> int:
        """How many of the tokens that the item brought were cached already, by another request or an older one."""
        return self._cache.num_found(request_id)

    def kept_nodes(self, request_id: RequestId) -> list[int]:
        """The nodes of the last tree that the cache kept as it took the item, root first; see SequenceCache."""
        return self._cache.kept_nodes(request_id)

    def extend(self, request_id: RequestId, tokens: Sequence[int], parents: Sequence[int]) -> bool:
        """Put tree nodes behind the tokens (0 is the root); False, with nothing changed, if no block is left."""
        try:
            self._cache.extend(request_id, tokens, parents)
        except OutOfBlocks:
            return False
        return True

    def compute(self, request_ids: Sequence[RequestId], *, with_logits: bool = True) -> list[NDArray[np.float32]]:
        """Compute all pending rows; per request the logits of its root and nodes, fp32 [n, V], in their order."""
        found = self._compute(request_ids, lambda _, batch, logits: read_logits(batch, logits), with_logits=with_logits)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in found]

    def answer(self, request_ids: Sequence[RequestId], plain: Container[RequestId]) -> list[Rows | Chosen]:
        """As `compute`, but of those in `plain` the tokens behind root and nodes, if the device can choose them."""
        choose = self._choose_tokens
        if choose is None:
            return [*self.compute(request_ids)]

        def read(ids: list[RequestId], batch: ForwardBatch, logits: Tensor) -> list[Rows | Chosen]:
            params = [self._params[request_id] if request_id in plain else None for request_id in ids]
            return read_answers(batch, logits, params, choose)

        return [joined(parts) for parts in self._compute(request_ids, read, with_logits=True)]

    def _compute(self, request_ids: Sequence[RequestId], read: Read[T], *, with_logits: bool) -> list[list[T]]:
        """Per request what `read` makes of its logits, forward by forward."""
        found: list[list[T]] = [[] for _ in request_ids]
        pending = [idx for idx, request_id in enumerate(request_ids) if self._cache.num_pending(request_id)]
        while pending:
            ready = self._ready(request_ids, pending)
            segments = {
                request_ids[idx]: self._next_segment(request_ids[idx], with_logits=with_logits) for idx in ready
            }
            for idx, part in zip(ready, self._forward(segments, read), strict=True):
                self._cache.mark_written(request_ids[idx], segments[request_ids[idx]].num_rows)
                found[idx].append(part)
            pending = [idx for idx in pending if self._cache.num_pending(request_ids[idx])]
        return found

    def _ready(self, request_ids: Sequence[RequestId], pending: Sequence[int]) -> list[int]:
        """Those of `pending` that compute now; whoever needs the very rows that another computes adopts them next time.

        Equal prompts that arrive together (n > 1) are computed once.
        """
        ready: list[int] = []
        for idx in pending:
            self._cache.adopt(request_ids[idx])
            is_short = self._cache.num_pending(request_ids[idx]) < _MIN_TWIN_ROWS  # most are; comparing is quadratic
            if is_short or not any(self._is_twin(request_ids[idx], request_ids[other]) for other in ready):
                ready.append(idx)
        return ready

    def _is_twin(self, request_id: RequestId, other_id: RequestId) -> bool:
        return self._cache.num_twin_rows(request_id, other_id) >= _MIN_TWIN_ROWS

    def _next_segment(self, request_id: RequestId, *, with_logits: bool) -> Segment:
        segment = self._cache.next_segment(request_id, MAX_SEGMENT_ROWS)
        return segment if with_logits else replace(segment, logit_rows=segment.logit_rows[:0])

    def _forward(self, segments: Mapping[RequestId, Segment], read: Read[T]) -> list[T]:
        started = time.perf_counter()
        batch = ForwardBatch.from_segments(list(segments.values()))
        parts = read(list(segments), batch, self._run(batch))
        self.forward_ms += (time.perf_counter() - started) * 1e3
        return parts

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the time of the body as sampling."""
        started = time.perf_counter()
        yield
        self.sample_ms += (time.perf_counter() - started) * 1e3

    def announcement(self, worker_id: WorkerId, kind: WorkerKind, name: str, *, leaving: bool) -> Announcement:
        """What the worker that holds these requests tells of itself. May be called from another thread."""
        spec = self._spec
        eos_token_ids, usage = spec.eos_token_ids, self.usage()
        return Announcement(worker_id, kind, name, spec.vocab_size, spec.context_len, eos_token_ids, usage, leaving)

    def usage(self) -> BlockUsage:
        """The integrity equation of this worker's cache."""
        usage = self._cache.usage()
        return BlockUsage(usage.free, usage.used, usage.cached, usage.total, self._block_len)


def refusal(item: DraftItem | VerifyItem, error: EspalierError) -> RefusedItem:
    """The item was not done because of `error`; the worker keeps what it held before, of which it promises nothing."""
    return RefusedItem(item.request_id, item.step, 0, code_of(error))
