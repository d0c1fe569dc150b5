"""SequenceCache: an example of each rule."""

import pytest

from treecore.errors import OutOfBlocks
from treecore.model.kv_pool import KvPool
from treecore.model.sequence import SequenceCache
from treecore.testing.hashed_cache import BLOCK_SIZE, NUM_BLOCKS, Path, fake_forward, new_cache


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


def test_the_tree_below_the_bonus_token_stays() -> None:
    """Tree 5 -> (6, 7 -> (8, 9 -> 10 -> 11)); 7 and 9 are committed: 10 and 11 stay, behind a root that is computed.

    The rows of 7, 9, 10 and 11 move, over each other; what is added below is computed alone.
    """
    pool, cache = new_cache()
    cache.advance("a", 0, [4, 5])
    cache.extend("a", [6, 7, 8, 9, 10, 11], [0, 0, 2, 2, 4, 5])
    nodes = [(6,), (7,), (7, 8), (7, 9), (7, 9, 10), (7, 9, 10, 11)]
    compute(pool, cache, [(4,), (4, 5), *((4, 5, *path) for path in nodes)])
    assert cache.advance("a", 2, [7, 9], keeps_tree=True) == 4
    assert cache.kept_nodes("a") == [4, 5, 6]
    assert cache.num_pending("a") == 0
    cache.extend("a", [12, 13], [2, 0])
    compute(pool, cache, [(4, 5, 7, 9, 10, 11, 12), (4, 5, 7, 9, 13)])


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
    """The manager of an older step wins; what it does not know is forgotten. A sealed block is not written again."""
    pool, cache = new_cache()
    cache.advance("a", 0, [1, 2, 3, 4, 5, 6, 7])
    compute(pool, cache, [(1, 2, 3, 4, 5, 6, 7)[:length] for length in range(1, 8)])
    assert cache.advance("a", 5, [6]) == 5
    assert cache.advance("a", 2, [3]) == 0
    assert cache.held_len("a") == 3
    assert cache.usage() == (NUM_BLOCKS - 2, 1, 1, NUM_BLOCKS)


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
    """A second request that does not fit is unknown afterwards; a tree that does not is not put; the first goes on."""
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
