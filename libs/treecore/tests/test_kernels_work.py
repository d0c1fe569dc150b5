"""Work items against what they must say: each row sees exactly its path, each column once; and what rows share."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treecore.model.kernels.work import SPLIT_LEN, SegmentView, Tiling, Variant, Work, plan_work
from treecore.topology import ancestor_mask

BLOCK_LEN = 8


def make_segments(trees: list[tuple[int, list[int]]]) -> list[SegmentView]:
    """Trees behind contexts, in scattered blocks."""
    free = iter(np.random.default_rng(0).permutation(1000).tolist())
    segments, first_row = [], 0
    for context, parents in trees:
        length = context + len(parents)
        blocks = np.array([next(free) for _ in range(-(-length // BLOCK_LEN))])
        slots = (blocks[:, None] * BLOCK_LEN + np.arange(BLOCK_LEN)).ravel()[:length]
        mask = ancestor_mask(np.array(parents, np.int32))
        visible = np.concatenate([np.ones((len(parents), context), np.bool_), mask], axis=1)
        segments.append(SegmentView(first_row, len(parents), slots, None if visible.all() else visible))
        first_row += len(parents)
    return segments


def seen_by_parts(variant: Variant, work: Work) -> dict[int, list[int]]:
    """What the kernels will read for each part: the slots, by the rules that their docstrings state."""
    seen: dict[int, list[int]] = {}
    for (table, begin, end, mask_begin, tail), rows, parts in zip(work.items, work.rows, work.partials, strict=True):
        for row, part in zip(rows.tolist(), parts.tolist(), strict=True):
            if row < 0:
                continue
            columns = np.arange(begin, end)
            in_table = (columns < mask_begin) if variant == "invariant" else np.ones(len(columns), np.bool_)
            slots = np.zeros(len(columns), np.int64)
            at = columns[in_table]
            slots[in_table] = work.tables[table, at // BLOCK_LEN].astype(np.int64) * BLOCK_LEN + at % BLOCK_LEN
            if not in_table.all():
                slots[~in_table] = work.tails[tail + columns[~in_table] - max(begin, mask_begin)]
            is_seen = np.ones(len(columns), np.bool_) if mask_begin >= end else columns >= 0
            bits = columns - mask_begin
            if variant == "fast" and begin >= mask_begin:
                words = work.words[row].view(np.uint64)[bits // 64]
                is_seen = (words >> (bits % 64).astype(np.uint64)) & np.uint64(1) == 1
            else:
                is_seen &= columns >= work.lows[row]
            assert part not in seen, "two items for one part"
            seen[part] = slots[is_seen].tolist()
    return seen


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """A batch of trees behind contexts."""
    batch = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 80))
        rng = np.random.default_rng(draw(st.integers(0, 999)))
        is_chain = draw(st.booleans())
        parents = [-1, *(node - 1 if is_chain else int(rng.integers(0, node)) for node in range(1, size))]
        batch.append((draw(st.integers(0, 600)), parents))
    return batch


@pytest.mark.parametrize("variant", ["fast", "invariant"])
@given(batch=trees(), group=st.integers(1, 33), window=st.sampled_from([None, 1, 7, 300]))
def test_every_row_sees_its_path_once(
    variant: Variant, batch: list[tuple[int, list[int]]], group: int, window: int | None
) -> None:
    """Over all parts of a row, in the order in which they are merged."""
    segments = make_segments(batch)
    work = plan_work(variant, segments, Tiling.of(group, 16), BLOCK_LEN, window)
    seen = seen_by_parts(variant, work)
    assert sorted(seen) == list(range(work.num_partials)), "a part that nobody writes would be garbage"
    for segment in segments:
        for idx in range(segment.num_rows):
            begin, end = work.starts[segment.first_row + idx : segment.first_row + idx + 2].tolist()
            found = [slot for part in range(begin, end) for slot in seen[part]]
            wanted = segment.slots[segment.seen[idx]].tolist()
            assert found == (wanted if window is None else wanted[-window:])


def test_a_prefix_is_shared_and_a_path_is_cut_by_position() -> None:
    """Two children behind 300 tokens: one item for the first split, one for each node's own rest."""
    (segment,) = make_segments([(300, [-1, 0, 0])])
    work = plan_work("invariant", [segment], Tiling.of(1, 16), BLOCK_LEN)
    assert work.items[:, 1:3].tolist() == [[0, SPLIT_LEN], [SPLIT_LEN, 301], [SPLIT_LEN, 302], [SPLIT_LEN, 302]]
    assert (work.rows >= 0).sum(axis=1).tolist() == [3, 1, 1, 1]


def test_prefix_tiles_of_the_fast_kernel_have_no_masks() -> None:
    """Splits of the prefix end at whole tiles; its rest belongs to the tree's split."""
    (segment,) = make_segments([(600, [-1, 0, 0])])
    work = plan_work("fast", [segment], Tiling.of(4, 16), BLOCK_LEN)
    assert work.items[:, 1:4].tolist() == [[0, 256, 576], [256, 512, 576], [512, 576, 576], [576, 603, 576]]


@pytest.mark.parametrize(("group", "heads"), [(1, 1), (4, 4), (7, 7), (16, 16), (32, 16), (33, 11), (71, 1)])
def test_a_group_is_divided_where_a_tile_cannot_hold_it(group: int, heads: int) -> None:
    """Into equal parts."""
    assert Tiling.of(group, 16).tile_heads == heads


def test_the_model_package_imports_no_triton() -> None:
    """It is an extra: only the backend that is chosen may need it."""
    modules = "treecore.model.load, treecore.model.held, treecore.model.graphs, treecore.model.kernels"
    code = f"import sys, {modules}; print('triton' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
