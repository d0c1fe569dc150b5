"""Commands as bytes: what comes out is what went in, and it is small."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_verifier.group.commands import Command, Forward, Move, NewPool, pack, unpack
from llm_verifier.group.wire import packed
from treecore.errors import WireError
from treecore.model.batch import IntArray, Segment
from treecore.model.sequence import SequenceCache

INTS = st.lists(st.one_of(st.integers(0, 2**40), st.integers(0, 5)), max_size=12).map(lambda x: np.array(x, np.int64))


class Slots:
    """Slots without memory."""

    num_slots = 4096

    def move(self, src_slots: IntArray, dst_slots: IntArray) -> None:
        """Nothing is there to be moved."""


def travelled(command: Command) -> Command:
    """Through the wire's format."""
    return unpack(msgpack.unpackb(msgpack.packb(pack(command))))


def assert_equal(found: Segment, wanted: Segment) -> None:
    """Every field, in value and type."""
    for name in Segment.__slots__:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert type(ours) is type(theirs), name
        np.testing.assert_array_equal(ours, theirs, strict=True)


def segments(num_tokens: int, num_nodes: int, seed: int) -> list[Segment]:
    """What a cache makes of a prompt and a random tree, in one piece and in several."""
    rng = np.random.default_rng(seed)
    cache = SequenceCache(Slots(), block_len=16)
    cache.advance("other", 0, [1] * int(rng.integers(1, 40)))
    cache.advance("r", 0, rng.integers(0, 50_000, num_tokens))
    cache.extend("r", rng.integers(0, 50_000, num_nodes), [int(rng.integers(0, node + 1)) for node in range(num_nodes)])
    whole = cache.next_segment("r")
    half = whole.num_rows // 2
    return [whole, *([whole.rows(0, half), whole.rows(half, whole.num_rows)] if half else [])]


@given(st.integers(1, 80), st.integers(0, 30), st.integers(0, 2**32))
def test_segments_travel(num_tokens: int, num_nodes: int, seed: int) -> None:
    """Prompts, trees, and pieces of them."""
    wanted = segments(num_tokens, num_nodes, seed)
    found = travelled(Forward(tuple(wanted)))
    assert isinstance(found, Forward)
    for ours, theirs in zip(found.segments, wanted, strict=True):
        assert_equal(ours, theirs)


@given(INTS, INTS)
def test_moves_travel(src: IntArray, dst: IntArray) -> None:
    """Any numbers, runs among them or not."""
    found = travelled(Move(src, dst))
    assert isinstance(found, Move)
    np.testing.assert_array_equal(found.src_slots, src, strict=True)
    np.testing.assert_array_equal(found.dst_slots, dst, strict=True)


def test_pools_travel() -> None:
    """A number."""
    assert travelled(NewPool(64)) == NewPool(64)


def test_a_step_is_small() -> None:
    """A tree of 16 nodes behind 2000 tokens: half a kilobyte, not a mask of 32,000 and 16,000 bytes of slots."""
    cache = SequenceCache(Slots(), block_len=16)
    cache.advance("r", 0, np.arange(2000))
    cache.mark_written("r", 1999)
    cache.extend("r", np.arange(16), [0] * 16)
    assert len(packed("do", pack(Forward((cache.next_segment("r"),))))) < 600


def test_what_is_no_command_is_refused() -> None:
    """By its name."""
    with pytest.raises(WireError, match="no command: 'dance'"):
        unpack(["dance", 1])
