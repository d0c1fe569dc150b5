"""SequenceCache as a state machine against a naive model that knows token paths only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treecore.errors import OutOfBlocks, StateMissing
from treecore.model.blocks import BlockCounts
from treecore.testing.hashed_cache import BLOCK_SIZE, NUM_BLOCKS, Path, content, fake_forward, new_cache


@dataclass
class Naive:
    """What one request should hold: paths of rows in order, which are computed, and how many blocks are sealed."""

    tokens: Path = ()
    nodes: list[Path] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)
    num_sealed: int = 0
    num_blocks: int = 0

    def rows(self) -> list[Path]:
        return [self.tokens[:length] for length in range(1, len(self.tokens) + 1)] + self.nodes

    def num_written(self) -> int:
        """Of committed tokens, in a row from the first."""
        lengths = range(len(self.tokens))
        return next((length for length in lengths if self.tokens[: length + 1] not in self.written), len(self.tokens))

    def texts(self) -> list[Path]:
        """Of the sealed blocks: all tokens from the start of the text up to the block's end."""
        return [self.tokens[: (idx + 1) * BLOCK_SIZE] for idx in range(self.num_sealed)]


def kept_nodes(request: Naive, target: Path) -> list[Path]:
    """The root `target` and what is computed of the tree below it, if the root is in the request's tree; else none."""
    is_inside = target in request.written and target[: len(request.tokens)] == request.tokens
    below = [path for path in request.nodes if path in request.written and path[: len(target)] == target != path]
    return [target, *below] if is_inside else []


class Books:
    """The cache as an accountant would keep it: in texts, not in blocks. Knows nothing of slots.

    known: each text whose K and V can be found, and when its last user left.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Naive] = {}
        self.known: dict[Path, int] = {}
        self._clock = 0

    def in_use(self) -> set[Path]:
        return {text for request in self.requests.values() for text in request.texts()}

    def counts(self) -> BlockCounts:
        own = sum(request.num_blocks - request.num_sealed for request in self.requests.values())
        used = own + len(self.in_use())
        cached = len(self.known.keys() - self.in_use())
        return BlockCounts(NUM_BLOCKS - used - cached, used, cached, NUM_BLOCKS)

    def advance(self, request_id: str, start: int, tokens: Path, *, keeps_tree: bool = False) -> int | None:
        """How many tokens are cached afterwards; None if there was no room."""
        request = self.requests.setdefault(request_id, Naive())
        target = request.tokens[:start] + tokens
        nodes = kept_nodes(request, target) if keeps_tree else []
        kept = next(
            (length for length in range(len(target)) if target[: length + 1] not in request.written), len(target)
        )
        kept = min(kept, len(target) if nodes else len(target) - 1)
        with self._leaving():
            if kept // BLOCK_SIZE < request.num_sealed:
                request.num_sealed = request.num_blocks = kept // BLOCK_SIZE
                kept = request.num_sealed * BLOCK_SIZE
            request.tokens, request.nodes = target, nodes[1:]
            request.written = {target[:length] for length in range(1, kept + 1)} | set(nodes)
            request.num_blocks = min(request.num_blocks, -(-len(request.rows()) // BLOCK_SIZE))
        self.seal(request)
        self.adopt(request)
        if not self.reserve(request, len(target)):
            self.release(request_id)
            return None
        return request.num_written()

    def adopt(self, request: Naive) -> None:
        while self._next_text(request) in self.known:
            request.num_sealed += 1
            request.num_blocks = max(request.num_blocks, request.num_sealed)
            request.written |= {request.tokens[:length] for length in range(1, request.num_sealed * BLOCK_SIZE + 1)}

    def seal(self, request: Naive) -> None:
        while len(self._next_text(request)) and self._next_text(request) in request.written:
            self.known.setdefault(self._next_text(request), 0)
            request.num_sealed += 1

    def _next_text(self, request: Naive) -> Path:
        """Of the first block that is not sealed; empty if it is not full or has the root."""
        end = (request.num_sealed + 1) * BLOCK_SIZE
        return request.tokens[:end] if end < len(request.tokens) else ()

    def reserve(self, request: Naive, num_rows: int) -> bool:
        missing = max(0, -(-num_rows // BLOCK_SIZE) - request.num_blocks)
        counts = self.counts()
        if missing > counts.free + counts.cached:
            return False
        idle = sorted(self.known.keys() - self.in_use(), key=lambda text: self.known[text])
        for text in idle[: max(0, missing - counts.free)]:
            del self.known[text]
        request.num_blocks += missing
        return True

    def release(self, request_id: str) -> None:
        with self._leaving():
            self.requests.pop(request_id, None)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Texts that lose their last user in the body; the longest leave first."""
        before = self.in_use()
        yield
        for text in sorted(before - self.in_use(), key=len, reverse=True):
            self._clock += 1
            self.known[text] = self._clock


class SequenceMachine(RuleBasedStateMachine):
    """Random steps of four requests; few tokens, so that texts share prefixes and paths often match."""

    ids = st.sampled_from(["a", "b", "c", "d"])
    token = st.integers(0, 1)
    tokens = st.lists(token, min_size=1, max_size=11)
    keeps = st.booleans()

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = new_cache()
        self.books = Books()
        self.last: tuple[str, int, Path, bool] | None = None
        self.evicted: dict[str, Path] = {}
        self.committed: set[Path] = set()

    @rule(request_id=ids, tokens=tokens)
    def admit_or_resend_all(self, request_id: str, tokens: list[int]) -> None:
        self._advance(request_id, 0, tuple(tokens))

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), tokens=tokens, keeps=keeps)
    def commit_some_tokens_from_anywhere(self, data: st.DataObject, tokens: list[int], keeps: bool) -> None:
        request_id = self._any(data)
        start = data.draw(st.integers(0, len(self.books.requests[request_id].tokens)))
        self._advance(request_id, start, tuple(tokens), keeps_tree=keeps)

    @precondition(lambda self: any(request.nodes for request in self.books.requests.values()))
    @rule(data=st.data(), bonus=st.lists(token, max_size=1), keeps=keeps)
    def accept_a_path(self, data: st.DataObject, bonus: list[int], keeps: bool) -> None:
        """With the bonus token in the tree or not, or (as no step does) without one."""
        request_id = data.draw(st.sampled_from(sorted(key for key, one in self.books.requests.items() if one.nodes)))
        request = self.books.requests[request_id]
        node = data.draw(st.sampled_from(request.nodes))
        self._advance(request_id, len(request.tokens), (*node[len(request.tokens) :], *bonus), keeps_tree=keeps)

    @precondition(lambda self: any(request.nodes for request in self.books.requests.values()))
    @rule(data=st.data(), num_below=st.integers(0, 2))
    def grow_on(self, data: st.DataObject, num_below: int) -> None:
        """A tree is computed, moves on by a few of its own tokens, and what stays grows at its end."""
        request_id = data.draw(st.sampled_from(sorted(key for key, one in self.books.requests.items() if one.nodes)))
        request = self.books.requests[request_id]
        self._forward(request_id)
        deepest = max(request.nodes, key=len)[len(request.tokens) :]
        committed = (*request.tokens[-1:], *deepest[:num_below])
        self._advance(request_id, len(request.tokens) - 1, committed, keeps_tree=True)
        self._extend(request_id, [(len(request.nodes), 0), (len(request.nodes), 1)])
        self._forward(request_id)

    @precondition(lambda self: self.last is not None and self.last[0] in self.books.requests)
    @rule()
    def retry_the_last_step(self) -> None:
        assert self.last is not None
        *step, keeps_tree = self.last
        self._advance(*step, keeps_tree=keeps_tree)

    @rule(request_id=ids, beyond=st.integers(1, 3))
    def tokens_in_between_are_missing(self, request_id: str, beyond: int) -> None:
        held_len = len(self.books.requests.get(request_id, Naive()).tokens)
        with pytest.raises(StateMissing) as error:
            self.cache.advance(request_id, held_len + beyond, [1])
        assert error.value.held_len == held_len == self.cache.held_len(request_id)

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), nodes=st.lists(st.tuples(st.integers(0, 9), token), min_size=1, max_size=6))
    def extend(self, data: st.DataObject, nodes: list[tuple[int, int]]) -> None:
        self._extend(self._any(data), nodes)

    def _extend(self, request_id: str, nodes: list[tuple[int, int]]) -> None:
        request = self.books.requests[request_id]
        paths, parents, tokens = [request.tokens, *request.nodes], [], []
        for wanted, token in nodes:
            parent = wanted % len(paths)
            if (*paths[parent], token) not in paths:
                parents.append(parent)
                tokens.append(token)
                paths.append((*paths[parent], token))
        if self.books.reserve(request, len(request.tokens) + len(paths) - 1):
            self.cache.extend(request_id, tokens, parents)
            request.nodes = paths[1:]
        else:
            with pytest.raises(OutOfBlocks):
                self.cache.extend(request_id, tokens, parents)

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data(), max_rows=st.sampled_from([1, 3, None, None]))
    def forward(self, data: st.DataObject, max_rows: int | None) -> None:
        self._forward(self._any(data), max_rows)

    def _forward(self, request_id: str, max_rows: int | None = None) -> None:
        """As HeldRequests does it: adopt what others have computed by now, compute some rows, seal."""
        request = self.books.requests[request_id]
        self.cache.adopt(request_id)
        self.books.adopt(request)
        pending = [path for path in request.rows() if path not in request.written]
        assert self.cache.num_pending(request_id) == len(pending)
        if not pending:
            return
        segment = self.cache.next_segment(request_id, max_rows)
        paths = pending[:max_rows]
        assert segment.num_rows == len(paths)
        assert segment.logit_rows.tolist() == [idx for idx, p in enumerate(paths) if len(p) >= len(request.tokens)]
        fake_forward(self.pool, segment, paths)
        self.cache.mark_written(request_id, len(paths))
        request.written.update(paths)
        self.books.seal(request)

    @precondition(lambda self: self.books.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = self._any(data)
        self.evicted[request_id] = self.books.requests[request_id].tokens
        self.abort(request_id)

    @precondition(lambda self: self.evicted.keys() - self.books.requests.keys())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.evicted.keys() - self.books.requests.keys())))
        self._advance(request_id, 0, self.evicted.pop(request_id))

    @rule(request_id=ids)
    def abort(self, request_id: str) -> None:
        self.cache.release(request_id)
        self.books.release(request_id)

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def evict(self, num_blocks: int) -> None:
        """A passing request takes so many blocks, if it can."""
        self._advance("filler", 0, (9,) * (num_blocks * BLOCK_SIZE))
        self.abort("filler")

    @invariant()
    def the_books_agree(self) -> None:
        counts = self.cache.usage()
        assert counts == self.books.counts()
        assert counts.free + counts.used + counts.cached == counts.total == NUM_BLOCKS
        assert sorted(self.cache.request_ids()) == sorted(self.books.requests)

    @invariant()
    def every_computed_row_is_untouched(self) -> None:
        """Whoever shares a block with whom: what a request would attend to is its own text's."""
        for request_id, request in self.books.requests.items():
            if self.cache.num_pending(request_id):
                written = [path for path in request.rows() if path in request.written]
                slots = self.cache.next_segment(request_id).column_slots[: len(written)]
                assert self.pool.kv[0, slots, 0, 0, 0].tolist() == [content(path) for path in written]

    @invariant()
    def only_committed_texts_are_known(self) -> None:
        """A rejected node's tokens are never found."""
        assert self.books.known.keys() <= self.committed

    def _any(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.books.requests)))

    def _advance(self, request_id: str, start: int, tokens: Path, *, keeps_tree: bool = False) -> None:
        if start > len(self.books.requests.get(request_id, Naive()).tokens):
            return
        request = self.books.requests.get(request_id, Naive())
        target = request.tokens[:start] + tokens
        places = {path: place for place, path in enumerate([request.tokens, *request.nodes])}
        kept = [places[path] for path in kept_nodes(request, target)] if keeps_tree else []
        self.committed.update(target[:length] for length in range(len(target)))
        expected = self.books.advance(request_id, start, tokens, keeps_tree=keeps_tree)
        sent = np.array(tokens, dtype=np.int32)
        if expected is None:
            with pytest.raises(OutOfBlocks):
                self.cache.advance(request_id, start, sent, keeps_tree=keeps_tree)
            return
        assert self.cache.advance(request_id, start, sent, keeps_tree=keeps_tree) == expected
        assert self.cache.kept_nodes(request_id) == kept
        self.last = (request_id, start, tokens, keeps_tree)


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(max_examples=100, stateful_step_count=100, deadline=None)
