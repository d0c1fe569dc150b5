"""Tree attention in Triton: split-KV partials over a list of work items, then an ordered merge (SpecInfer, 4.2).

Knows pointers and tiles; what an item holds is treecore.model.kernels.work's. A tile has rows x columns: rows are
nodes x query heads that share a KV head, so that K and V are read once for all of them. Scores are in units of log2,
because exp2 is what the hardware has. Arithmetic is fp32; only tl.dot sees the cache's dtype.
"""

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(5)  # of kernels.work.Item, int32 each


@triton.jit
def fast_partials(
    q_ptr,  # [R, num_heads, D]
    kv_ptr,  # [num_slots, 2, num_kv_heads, D]
    acc_ptr,  # fp32 [P, num_heads, D]: sums of exp2(score - max) * v, not yet divided
    stats_ptr,  # fp32 [P, num_heads, 2]: the maximum and the sum of exp2(score - max)
    items_ptr,  # int32 [I, ITEM_FIELDS]
    rows_ptr,  # int32 [I, nodes of a tile]: row of the batch, -1 for none
    partials_ptr,  # int32 [I, nodes of a tile]: which of the P that row's part goes to
    tables_ptr,  # int32 [S, table_len]: a segment's blocks
    words_ptr,  # int64 [R, num_words]: bit j of word w: the row sees column mask_begin + 64 w + j of its segment
    lows_ptr,  # int32 [R]: the first position within the row's window
    tails_ptr,  # not read here: both kernels take the same arguments
    table_len,
    num_words,
    scale,
    cap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One item and one group of heads: whole prefix tiles without a mask, then the tree's tiles, one mask word each."""
    item = tl.program_id(0)
    field = items_ptr + item * ITEM_FIELDS
    table, begin, end, mask_begin = tl.load(field), tl.load(field + 1), tl.load(field + 2), tl.load(field + 3)
    row, head, node, is_real = _rows(item, rows_ptr, TILE_HEADS, BLOCK_M)
    kv_head = tl.program_id(1) * TILE_HEADS // GROUP
    q = _load_q(q_ptr, row, head, is_real, NUM_HEADS, HEAD_DIM, BLOCK_D)
    low = tl.load(lows_ptr + row, mask=is_real, other=0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    for start in range(begin, tl.minimum(end, mask_begin), BLOCK_N):
        columns = start + offsets
        slots = _table_slots(tables_ptr + table * table_len, columns, None, BLOCK_LEN)
        k, v = _load_kv(kv_ptr, slots, None, kv_head, NUM_HEADS // GROUP, HEAD_DIM, BLOCK_D)
        visible = columns[None, :] >= low[:, None]
        m, total, acc = _attend_tile(q, k, v, visible, m, total, acc, scale, cap, SOFT_CAP, WINDOW)
    for start in range(tl.maximum(begin, mask_begin), end, BLOCK_N):
        columns = start + offsets
        word_idx = (start - mask_begin) // BLOCK_N
        word = tl.load(words_ptr + row.to(tl.int64) * num_words + word_idx, mask=is_real, other=0)
        slots = _table_slots(tables_ptr + table * table_len, columns, columns < end, BLOCK_LEN)
        k, v = _load_kv(kv_ptr, slots, columns < end, kv_head, NUM_HEADS // GROUP, HEAD_DIM, BLOCK_D)
        visible = ((word[:, None] >> offsets[None, :].to(tl.int64)) & 1) == 1
        m, total, acc = _attend_tile(q, k, v, visible, m, total, acc, scale, cap, SOFT_CAP, True)
    place = _place(item, node, head, is_real, partials_ptr, NUM_HEADS, BLOCK_M, TILE_HEADS)
    _store_partial(acc_ptr, stats_ptr, place, is_real, m, total, acc, HEAD_DIM, BLOCK_D)


@triton.jit
def invariant_partials(
    q_ptr,
    kv_ptr,
    acc_ptr,
    stats_ptr,
    items_ptr,
    rows_ptr,
    partials_ptr,
    tables_ptr,
    words_ptr,  # not read: columns are the path's own
    lows_ptr,
    tails_ptr,  # int32: slots of the columns from mask_begin on, one after another in logical order, item by item
    table_len,
    num_words,
    scale,
    cap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """As fast_partials, but columns are logical positions of one path, and every tile runs through the same code.

    One code path, because a compiler may fuse a multiplication with what follows where no mask stands between.
    """
    item = tl.program_id(0)
    field = items_ptr + item * ITEM_FIELDS
    table, begin, end, mask_begin = tl.load(field), tl.load(field + 1), tl.load(field + 2), tl.load(field + 3)
    tail = tl.load(field + 4) - tl.maximum(begin, mask_begin)
    row, head, node, is_real = _rows(item, rows_ptr, TILE_HEADS, BLOCK_M)
    kv_head = tl.program_id(1) * TILE_HEADS // GROUP
    q = _load_q(q_ptr, row, head, is_real, NUM_HEADS, HEAD_DIM, BLOCK_D)
    low = tl.load(lows_ptr + row, mask=is_real, other=0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        in_prefix = columns < tl.minimum(mask_begin, end)
        in_tail = (columns >= mask_begin) & (columns < end)
        slots = _table_slots(tables_ptr + table * table_len, columns, in_prefix, BLOCK_LEN)
        slots = tl.where(in_tail, tl.load(tails_ptr + tail + columns, mask=in_tail, other=0).to(tl.int64), slots)
        k, v = _load_kv(kv_ptr, slots, columns < end, kv_head, NUM_HEADS // GROUP, HEAD_DIM, BLOCK_D)
        visible = (columns[None, :] >= low[:, None]) & (columns < end)[None, :]
        m, total, acc = _attend_tile(q, k, v, visible, m, total, acc, scale, cap, SOFT_CAP, True)
    place = _place(item, node, head, is_real, partials_ptr, NUM_HEADS, BLOCK_M, TILE_HEADS)
    _store_partial(acc_ptr, stats_ptr, place, is_real, m, total, acc, HEAD_DIM, BLOCK_D)


@triton.jit
def merge_partials(
    acc_ptr,
    stats_ptr,
    starts_ptr,  # int32 [R + 1]: row r's parts are starts[r] .. starts[r + 1] - 1, in the order of its columns
    out_ptr,  # [R, num_heads, D]
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and BLOCK_H heads: its parts one after another, whatever else is in the batch. No parts give 0."""
    row = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_head = heads < NUM_HEADS
    is_inside = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    first = tl.load(starts_ptr + row)
    for part in range(tl.load(starts_ptr + row + 1) - first):
        place = (first + part).to(tl.int64) * NUM_HEADS + heads
        part_m = tl.load(stats_ptr + place * 2, mask=is_head, other=float("-inf"))
        part_total = tl.load(stats_ptr + place * 2 + 1, mask=is_head, other=0.0)
        part_acc = tl.load(acc_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=is_inside, other=0.0)
        new_m = tl.maximum(m, part_m)
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        old, new = tl.exp2(m - shift), tl.exp2(part_m - shift)
        acc = acc * old[:, None] + part_acc * new[:, None]
        total = total * old + part_total * new
        m = new_m
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (row.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _rows(item, rows_ptr, TILE_HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each tile row: the batch's row, the query head, which of the item's nodes it is, and whether it is any."""
    NODES: tl.constexpr = BLOCK_M // TILE_HEADS
    folded = tl.arange(0, BLOCK_M)
    node = folded // TILE_HEADS
    row = tl.load(rows_ptr + item * NODES + node, mask=node < NODES, other=-1)
    head = tl.program_id(1) * TILE_HEADS + folded % TILE_HEADS
    return row, head, node, row >= 0


@triton.jit
def _load_q(q_ptr, row, head, is_real, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    place = (row.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(q_ptr + place, mask=is_real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _table_slots(table_ptr, columns, is_wanted, BLOCK_LEN: tl.constexpr):
    """The slots of `columns` by the block table, int64 [N]; any where not wanted. None wants all."""
    if is_wanted is None:
        block = tl.load(table_ptr + columns // BLOCK_LEN)
    else:
        block = tl.load(table_ptr + columns // BLOCK_LEN, mask=is_wanted, other=0)
    return block.to(tl.int64) * BLOCK_LEN + columns % BLOCK_LEN


@triton.jit
def _load_kv(
    kv_ptr,
    slots,
    is_wanted,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """K and V of `slots` and one KV head, both [N, D]; where not wanted 0, whatever the slot holds. None wants all."""
    dims = tl.arange(0, BLOCK_D)
    k_ptrs = kv_ptr + (slots * (2 * NUM_KV_HEADS) + kv_head)[:, None] * HEAD_DIM + dims[None, :]
    v_ptrs = k_ptrs + NUM_KV_HEADS * HEAD_DIM
    if is_wanted is not None:
        mask = is_wanted[:, None] & (dims < HEAD_DIM)[None, :]
        return tl.load(k_ptrs, mask=mask, other=0.0), tl.load(v_ptrs, mask=mask, other=0.0)
    if BLOCK_D == HEAD_DIM:
        return tl.load(k_ptrs), tl.load(v_ptrs)
    mask = (dims < HEAD_DIM)[None, :]
    return tl.load(k_ptrs, mask=mask, other=0.0), tl.load(v_ptrs, mask=mask, other=0.0)


@triton.jit
def _attend_tile(q, k, v, visible, m, total, acc, scale, cap, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr):
    """The running softmax (m, total, acc) after one more tile of columns."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFT_CAP:
        scores = cap * (
            2.0 / (1.0 + tl.exp2(scores)) - 1.0
        )  # cap tanh(x / cap) log2(e); `scale` is -2 log2(e) / cap of x's
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    shift = new_m
    if MASKED:
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)  # nothing seen yet: -inf - -inf would be NaN
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(m - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_m, total, acc


@triton.jit
def _place(
    item,
    node,
    head,
    is_real,
    partials_ptr,
    NUM_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    part = tl.load(partials_ptr + item * (BLOCK_M // TILE_HEADS) + node, mask=is_real, other=0)
    return part.to(tl.int64) * NUM_HEADS + head


@triton.jit
def _store_partial(acc_ptr, stats_ptr, place, is_real, m, total, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    is_inside = is_real[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(acc_ptr + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_inside)
    tl.store(stats_ptr + place * 2, m, mask=is_real)
    tl.store(stats_ptr + place * 2 + 1, total, mask=is_real)
