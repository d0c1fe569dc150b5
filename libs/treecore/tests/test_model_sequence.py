"""SequenceCache as a state machine against a naive model that knows token paths only, and examples of each rule.

A fake forward stores in each slot a hash of the tokens up to that row. So every row can check that what it sees is the
prefix and the path it belongs to, nothing more, nothing stale.
"""

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treecore.errors import OutOfBlocks, StateMissing
from treecore.model.batch import Segment
from treecore.model.kv_pool import KvPool, KvShape
from treecore.model.sequence import SequenceCache

BLOCK_SIZE = 4
NUM_BLOCKS = 12
SHAPE = KvShape(num_layers=2, num_kv_heads=1, head_dim=2)

Path = tuple[int, ...]


def new_cache() -> tuple[KvPool, SequenceCache]:
    """A small pool of NaN."""
    pool = KvPool(SHAPE, NUM_BLOCKS * BLOCK_SIZE, torch.float64, torch.device("cpu"))
    pool.kv.fill_(float("nan"))
    return pool, SequenceCache(pool, BLOCK_SIZE)


def content(path: Path) -> float:
    """What the fake forward stores for the row whose tokens from the start of the text are `path`."""
    return float(crc32(repr(path).encode()))


def fake_forward(pool: KvPool, segment: Segment, paths: list[Path]) -> None:
    """Writes the rows of `segment`, whose paths are `paths`, and checks what each of them sees."""
    pool.kv[:, segment.slots] = torch.tensor([content(path) for path in paths], dtype=torch.float64)[
        :, None, None, None
    ]
    columns = pool.kv[:, segment.column_slots]
    for row, path in enumerate(paths):
        assert segment.tokens[row] == path[-1]
        assert segment.positions[row] == len(path) - 1
        visible = slice(None) if segment.visible is None else segment.visible[row]
        assert segment.column_positions[visible].tolist() == list(range(len(path)))
        seen = columns[:, visible].flatten(2)
        expected = torch.tensor([content(path[:length]) for length in range(1, len(path) + 1)], dtype=torch.float64)
        assert torch.equal(seen, expected[None, :, None].expand_as(seen))


@dataclass
class Naive:
    """What one request should hold: paths of rows in order, and which of them have been computed."""

    tokens: Path
    nodes: list[Path] = field(default_factory=list)
    written: set[Path] = field(default_factory=set)

    def rows(self) -> list[Path]:
        return [self.tokens[:length] for length in range(1, len(self.tokens) + 1)] + self.nodes

    def advance(self, tokens: Path) -> int:
        prefixes = [tokens[:length] for length in range(1, len(tokens) + 1)]
        num_kept = next((idx for idx, prefix in enumerate(prefixes) if prefix not in self.written), len(tokens))
        cached_len = min(num_kept, len(tokens) - 1)
        self.tokens, self.nodes, self.written = tokens, [], set(prefixes[:cached_len])
        return cached_len

    def num_blocks(self) -> int:
        return -(-len(self.rows()) // BLOCK_SIZE)


class SequenceMachine(RuleBasedStateMachine):
    """Random steps of three requests; few tokens, so that texts share prefixes and paths often match."""

    ids = st.sampled_from(["a", "b", "c"])
    token = st.integers(0, 2)
    tokens = st.lists(token, min_size=1, max_size=7)

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = new_cache()
        self.naive: dict[str, Naive] = {}
        self.last: tuple[str, int, Path] | None = None

    @rule(request_id=ids, tokens=tokens)
    def begin_or_resend_all(self, request_id: str, tokens: list[int]) -> None:
        self._advance(request_id, 0, tuple(tokens))

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), tokens=tokens)
    def commit_some_tokens_from_anywhere(self, data: st.DataObject, tokens: list[int]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive)))
        start = data.draw(st.integers(0, len(self.naive[request_id].tokens)))
        self._advance(request_id, start, tuple(tokens))

    @precondition(lambda self: any(request.nodes for request in self.naive.values()))
    @rule(data=st.data(), bonus=token)
    def accept_a_path(self, data: st.DataObject, bonus: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(key for key, request in self.naive.items() if request.nodes)))
        request = self.naive[request_id]
        node = data.draw(st.sampled_from(request.nodes))
        self._advance(request_id, len(request.tokens), (*node[len(request.tokens) :], bonus))

    @precondition(lambda self: self.last is not None and self.last[0] in self.naive)
    @rule()
    def retry_the_last_step(self) -> None:
        assert self.last is not None
        self._advance(*self.last)

    @rule(request_id=ids, beyond=st.integers(1, 3))
    def tokens_in_between_are_missing(self, request_id: str, beyond: int) -> None:
        held = self.naive.get(request_id)
        held_len = len(held.tokens) if held else 0
        with pytest.raises(StateMissing) as error:
            self.cache.advance(request_id, held_len + beyond, [1])
        assert error.value.held_len == held_len == self.cache.held_len(request_id)

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), nodes=st.lists(st.tuples(st.integers(0, 9), token), min_size=1, max_size=6))
    def extend(self, data: st.DataObject, nodes: list[tuple[int, int]]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive)))
        request = self.naive[request_id]
        paths, parents, tokens = [request.tokens, *request.nodes], [], []
        for wanted, token in nodes:
            parent = wanted % len(paths)
            if (*paths[parent], token) not in paths:
                parents.append(parent)
                tokens.append(token)
                paths.append((*paths[parent], token))
        grown = Naive(request.tokens, paths[1:], request.written)
        if self._fits(grown.num_blocks() - request.num_blocks()):
            self.cache.extend(request_id, tokens, parents)
            self.naive[request_id] = grown
        else:
            with pytest.raises(OutOfBlocks):
                self.cache.extend(request_id, tokens, parents)

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), max_rows=st.sampled_from([1, 3, None]))
    def forward(self, data: st.DataObject, max_rows: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive)))
        request = self.naive[request_id]
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

    @rule(request_id=ids)
    def release(self, request_id: str) -> None:
        self.cache.release(request_id)
        self.naive.pop(request_id, None)

    @invariant()
    def no_block_is_lost_or_shared(self) -> None:
        free, used, total = self.cache.usage()
        assert used == sum(request.num_blocks() for request in self.naive.values())
        assert free + used == total == NUM_BLOCKS
        assert sorted(self.cache.request_ids()) == sorted(self.naive)

    def _advance(self, request_id: str, start: int, tokens: Path) -> None:
        request = self.naive.get(request_id, Naive(()))
        if start > len(request.tokens):
            return
        target = request.tokens[:start] + tokens
        if not self._fits(Naive(target).num_blocks() - request.num_blocks()):
            with pytest.raises(OutOfBlocks):
                self.cache.advance(request_id, start, np.array(tokens, dtype=np.int32))
            return
        assert self.cache.advance(request_id, start, np.array(tokens, dtype=np.int32)) == request.advance(target)
        self.naive[request_id] = request
        self.last = (request_id, start, tokens)

    def _fits(self, num_blocks: int) -> bool:
        return num_blocks <= self.cache.usage().free


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def compute(pool: KvPool, cache: SequenceCache, paths: list[Path]) -> None:
    """Runs the fake forward over all pending rows of request a, which must be `paths`."""
    segment = cache.next_segment("a")
    fake_forward(pool, segment, paths)
    cache.mark_written("a", segment.num_rows)


def test_an_accepted_path_is_compacted_and_the_bonus_token_is_the_new_root() -> None:
    """Tree 5 -> (6, 7 -> 8); 7 and 8 are accepted, 9 is the bonus: two rows move, one is left to compute."""
    pool, cache = new_cache()
    assert cache.advance("a", 0, [4, 5]) == 0
    cache.extend("a", [6, 7, 8], [0, 0, 2])
    compute(pool, cache, [(4,), (4, 5), (4, 5, 6), (4, 5, 7), (4, 5, 7, 8)])
    assert cache.advance("a", 2, [7, 8, 9]) == 4
    compute(pool, cache, [(4, 5, 7, 8, 9)])


def test_a_step_sent_twice_gives_the_same_work_twice() -> None:
    """The retry finds its rows cached but for the root, and no tree."""
    pool, cache = new_cache()
    cache.advance("a", 0, [1, 2, 3])
    cache.extend("a", [4], [0])
    compute(pool, cache, [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)])
    assert cache.advance("a", 0, [1, 2, 3]) == 2
    assert cache.num_pending("a") == 1
    compute(pool, cache, [(1, 2, 3)])


def test_an_older_step_truncates() -> None:
    """The manager of an older step wins; what it does not know is forgotten."""
    pool, cache = new_cache()
    cache.advance("a", 0, [1, 2, 3, 4, 5])
    compute(pool, cache, [(1, 2, 3, 4, 5)[:length] for length in range(1, 6)])
    assert cache.advance("a", 2, [3]) == 2
    assert cache.held_len("a") == 3
    assert cache.usage().used == 1


def test_rows_that_no_forward_wrote_are_not_kept() -> None:
    """A step whose forward failed leaves nothing behind that could be taken for its result."""
    _, cache = new_cache()
    cache.advance("a", 0, [1, 2])
    cache.extend("a", [3], [0])
    assert cache.advance("a", 2, [3, 4]) == 0


def test_a_tree_across_a_block_boundary_moves_rows_between_blocks() -> None:
    """Three tokens and blocks of four: nodes lie in the second block, the accepted one ends up in the first."""
    pool, cache = new_cache()
    cache.advance("a", 0, [1, 2, 3])
    cache.extend("a", [4, 5, 6, 7], [0, 0, 0, 3])
    compute(pool, cache, [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 6), (1, 2, 3, 6, 7)])
    assert cache.advance("a", 3, [6, 7, 8]) == 5
    compute(pool, cache, [(1, 2, 3, 6, 7, 8)])


def test_a_full_cache_changes_nothing() -> None:
    """A second request that does not fit is unknown afterwards; the first goes on."""
    _, cache = new_cache()
    cache.advance("a", 0, [1] * (NUM_BLOCKS * BLOCK_SIZE - 1))
    before = cache.usage()
    with pytest.raises(OutOfBlocks):
        cache.advance("b", 0, [1, 2, 3])
    with pytest.raises(OutOfBlocks):
        cache.extend("a", [1, 2], [0, 0])
    assert cache.usage() == before
    assert cache.request_ids() == ["a"]
    cache.extend("a", [1], [0])
    assert cache.usage().free == 0
