"""A cache whose fake forward stores in each slot a hash of the tokens up to that row: for tests of SequenceCache.

So every row can check that what it sees is the prefix and the path it belongs to, nothing more, nothing stale.
"""

from zlib import crc32

import torch

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
