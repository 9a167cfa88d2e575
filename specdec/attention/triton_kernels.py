"""The Triton kernels of `attention.triton`. Importing this needs the `triton` package.

Shape letters as in `attention.base`; M rows of a tile (query rows times the query heads of one key/value
head), n keys of a tile. R = H / G. Scores are kept in base 2 (times log2 e), so that `exp2` is the only
exponential.

A unit of work is one sequence, one tile of its query rows, one split of its keys and one key/value head. All
tile boundaries lie at fixed positions of the sequence, never at places that depend on its company, and what a
row does not see adds exact zeros: a row's result is the same in whatever batch, tile or number of programs.
With IN_ORDER, nodes of trees are taken where they would lie if the path of the row were a chain, so that they
add up to the same bits as there.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    # The libdevice one is not known to Triton's interpreter. Off by at most one rounding of 1.
    return 1.0 - 2.0 / (tl.exp2(2.885390081777927 * x) + 1.0)


@triton.jit(do_not_specialize=["num_sequences"])
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    out,
    slots,
    query_start,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    num_sequences,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: its K and V into the pool; zeros as the output of a row of no sequence."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    for first in tl.static_range(0, NUM_KV_HEADS * HEAD_DIM, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < NUM_KV_HEADS * HEAD_DIM
        head, lane = index // HEAD_DIM, index % HEAD_DIM
        place = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset) * HEAD_DIM + lane
        key_values = tl.load(key + row * key_row_stride + head * key_head_stride + lane, mask=inside)
        tl.store(key_cache + place, key_values, mask=inside)
        values = tl.load(value + row * value_row_stride + head * value_head_stride + lane, mask=inside)
        tl.store(value_cache + place, values, mask=inside)
    if row >= tl.load(query_start + num_sequences):
        for first in tl.static_range(0, OUT_WIDTH, BLOCK):
            index = first + tl.arange(0, BLOCK)
            tl.store(out + row * OUT_WIDTH + index, tl.zeros([BLOCK], tl.float32), mask=index < OUT_WIDTH)


@triton.jit
def _visible(
    own_n,
    row_M,
    first_row,
    query_len,
    context_len,
    positions,
    ancestor_mask,
    mask_width,
    in_tile_M,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Which of the keys `own_n` (their row of this step, negative: older) the rows see, bool [M, n]."""
    if HAS_MASK:
        is_own_n = (own_n >= 0) & (own_n < query_len)
        both = in_tile_M[:, None] & is_own_n[None, :]
        related = tl.load(
            ancestor_mask + (first_row + row_M)[:, None] * mask_width + own_n[None, :], mask=both, other=0
        )
        visible = (own_n < 0)[None, :] | (both & (related != 0))
    else:
        visible = own_n[None, :] <= row_M[:, None]
    if WINDOW > 0:
        start = context_len - query_len
        if HAS_MASK:
            row_position_M = tl.load(positions + first_row + row_M, mask=in_tile_M, other=0).to(tl.int32)
            own_position_n = tl.load(positions + first_row + own_n, mask=is_own_n, other=0).to(tl.int32)
            key_position_n = tl.where(is_own_n, own_position_n, start + own_n)
        else:
            row_position_M = start + row_M
            key_position_n = start + own_n
        visible = visible & (row_position_M[:, None] - key_position_n[None, :] < WINDOW)
    return visible


@triton.jit
def _path(ancestor_mask, row, mask_width, wanted_n, BLOCK_N: tl.constexpr):
    """Nodes that a row sees, by their numbers in the order of its path, int32 [n], and how many it sees."""
    node_n = tl.zeros([BLOCK_N], tl.int32)
    before = 0
    for low in range(0, mask_width, BLOCK_N):
        node_c = low + tl.arange(0, BLOCK_N)
        seen_c = tl.load(ancestor_mask + row * mask_width + node_c, mask=node_c < mask_width, other=0) != 0
        count_c = seen_c.to(tl.int32)
        number_c = before + tl.cumsum(count_c, 0) - count_c
        is_it_nc = seen_c[None, :] & (number_c[None, :] == wanted_n[:, None])
        node_n = tl.maximum(node_n, tl.max(tl.where(is_it_nc, node_c[None, :], 0), 1))
        before += tl.sum(count_c, 0)
    return node_n, before


@triton.jit
def _unit(work, item, num_items, NUM_KV_HEADS: tl.constexpr):
    """The unit of work of an item, `triton_work.WorkUnit`; zeros where there is none."""
    entry = work + (item // NUM_KV_HEADS) * 8
    there = item < num_items
    sequence = tl.load(entry, mask=there, other=0)
    tile = tl.load(entry + 1, mask=there, other=0)
    split = tl.load(entry + 2, mask=there, other=0)
    first_row = tl.load(entry + 3, mask=there, other=0)
    query_len = tl.load(entry + 4, mask=there, other=0)
    first_place = tl.load(entry + 5, mask=there, other=0)
    places_per_row = tl.load(entry + 6, mask=there, other=0)
    return sequence, tile, split, first_row, query_len, first_place, places_per_row


@triton.jit
def _blocks(block_tables, sequence, table_width, cached_n, BLOCK_SIZE: tl.constexpr):
    """Blocks of cached keys, int32 [n]; those of keys that do not exist may be any."""
    index_n = cached_n // BLOCK_SIZE
    table = block_tables + sequence.to(tl.int64) * table_width
    return tl.load(table + index_n, mask=index_n < table_width, other=0)


@triton.jit
def _places(
    block_n,
    cached_n,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Where in the pools the keys and values of a head begin, int64 [n]."""
    return ((block_n.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + cached_n % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def _take_keys(
    query_MD,
    key_nD,
    value_nD,
    seen_Mn,
    max_M,
    sum_M,
    acc_MD,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    ALL_SEEN: tl.constexpr,
    DEFER_SUM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One step of the online softmax (Milakov and Gimelshein, arXiv 1805.02867) over a tile of keys.

    With DEFER_SUM `sum_M` is [M, n], and what the lanes have is added up by the caller, once.

    Whether a row's keys come with a mask depends on where its step began, so that both ways must give the
    same bits: a product and a sum are one `fma` by name, not where the compiler finds nothing between them.
    """
    dtype = value_nD.dtype
    if WIDEN:
        key_nD = key_nD.to(tl.float32)
        value_nD = value_nD.to(tl.float32)
    score_Mn = tl.dot(query_MD, tl.trans(key_nD), input_precision="ieee")
    factor = scale
    if HAS_SOFTCAP:
        score_Mn = _tanh(score_Mn * scale / softcap)
        factor = softcap * 1.4426950408889634
    if not ALL_SEEN:
        score_Mn = tl.where(seen_Mn, score_Mn, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(score_Mn, 1) * factor)
    # Rows that have seen no key yet: -inf minus -inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weight_Mn = tl.exp2(tl.fma(score_Mn, factor, -base_M[:, None]))
    shrink_M = tl.exp2(max_M - base_M)
    if DEFER_SUM:
        sum_M = sum_M * shrink_M[:, None] + weight_Mn
    else:
        sum_M = sum_M * shrink_M + tl.sum(weight_Mn, 1)
    rounded_Mn = weight_Mn.to(dtype)
    if WIDEN:
        rounded_Mn = rounded_Mn.to(tl.float32)
    acc_MD = acc_MD * shrink_M[:, None]
    acc_MD = tl.dot(rounded_Mn, value_nD, acc_MD, input_precision="ieee")
    return new_max_M, sum_M, acc_MD


# Work lists are packed without alignment: specialised on it, the kernels would be compiled again and again.
@triton.jit(do_not_specialize=["work", "num_work", "table_width", "mask_width"])
def attend_kernel(
    query,
    key_cache,
    value_cache,
    out,
    partial_out,
    partial_max,
    partial_sum,
    work,
    num_work,
    context_lens,
    block_tables,
    positions,
    ancestor_mask,
    is_tree,
    query_row_stride,
    query_head_stride,
    table_width,
    mask_width,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEFER_SUM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attention of units of work, which the programs take in turns.

    `work` is int32 [num_work, 8], `triton_work.WorkUnit`s. With SPLIT_KEYS = 0 there are no splits; otherwise
    a sequence of one split writes its output, and one of several leaves partial results, fp32: `partial_out`
    [places, H, D], not divided by their sum, `partial_max` and `partial_sum` [places, H].
    `scale` is in base 2 unless there is a softcap. With IN_ORDER, for which there must be a mask, `is_tree`
    says which sequences are trees: from the tile of keys in which they begin, each of their rows has keys of
    its own, so that these tiles are computed for one row of the sequence after the other. DEFER_SUM adds
    weights up once per unit instead of once per tile, which takes registers. WIDEN computes products of
    low-precision numbers in fp32, for the interpreter, which has no bfloat16.

    Reading K/V is what takes the time, so that nothing may wait between two reads: keys are copied two tiles
    ahead, the blocks that they are in are known another tile ahead, and what the next unit begins with is
    loaded during this one.
    """
    num_items = tl.load(num_work) * NUM_KV_HEADS
    index_M = tl.arange(0, BLOCK_M)
    index_n = tl.arange(0, BLOCK_N)
    lane_D = tl.arange(0, BLOCK_D)
    in_head_D = lane_D < HEAD_DIM
    item = tl.program_id(0)
    sequence, tile, split, first_row, query_len, first_place, places_per_row = _unit(
        work, item, num_items, NUM_KV_HEADS
    )
    context_len = tl.load(context_lens + sequence)
    block_n = _blocks(block_tables, sequence, table_width, split * SPLIT_KEYS + index_n, BLOCK_SIZE)
    (
        next_sequence,
        next_tile,
        next_split,
        next_first_row,
        next_query_len,
        next_first_place,
        next_places_per_row,
    ) = _unit(work, item + tl.num_programs(0), num_items, NUM_KV_HEADS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        next_context_len = tl.load(context_lens + next_sequence)
        next_block_n = _blocks(
            block_tables, next_sequence, table_width, next_split * SPLIT_KEYS + index_n, BLOCK_SIZE
        )
        (
            third_sequence,
            third_tile,
            third_split,
            third_first_row,
            third_query_len,
            third_first_place,
            third_places_per_row,
        ) = _unit(work, item + 2 * tl.num_programs(0), num_items, NUM_KV_HEADS)
        kv_head = item % NUM_KV_HEADS
        start = context_len - query_len
        lowest_row = (tile * BLOCK_M) // RATIO
        lowest_key = 0
        if WINDOW > 0:
            lowest_position = start  # positions of tree rows are at least that
            if not HAS_MASK:
                lowest_position = start + lowest_row
            lowest_key = tl.maximum(lowest_position - (WINDOW - 1), 0)
        first = split * SPLIT_KEYS
        end = context_len
        if SPLIT_KEYS > 0:
            end = tl.minimum(context_len, first + SPLIT_KEYS)
        if (first < context_len) & (lowest_key < end):
            flat_M = tile * BLOCK_M + index_M
            row_M = flat_M // RATIO
            head_M = kv_head * RATIO + flat_M % RATIO
            in_tile_M = row_M < query_len
            if not HAS_MASK:
                highest_row = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // RATIO, query_len - 1)
                end = tl.minimum(end, start + highest_row + 1)
            if WINDOW > 0:
                first = tl.maximum(first, lowest_key // BLOCK_N * BLOCK_N)
                block_n = _blocks(block_tables, sequence, table_width, first + index_n, BLOCK_SIZE)
            query_offset_M = (first_row + row_M).to(tl.int64) * query_row_stride + head_M * query_head_stride
            query_MD = tl.load(
                query + query_offset_M[:, None] + lane_D[None, :],
                mask=in_tile_M[:, None] & in_head_D[None, :],
                other=0.0,
            )
            if WIDEN:
                query_MD = query_MD.to(tl.float32)
            max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            if DEFER_SUM:
                sum_M = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            else:
                sum_M = tl.zeros([BLOCK_M], tl.float32)
            # Keys older than this step are seen by all its rows: whole tiles of them need no mask.
            masked_from = first
            if WINDOW == 0:
                masked_from = first + tl.maximum(tl.minimum(end, start) - first, 0) // BLOCK_N * BLOCK_N
            for low in range(first, masked_from, BLOCK_N):
                cached_n = low + index_n
                place_n = _places(block_n, cached_n, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
                block_n = _blocks(block_tables, sequence, table_width, cached_n + BLOCK_N, BLOCK_SIZE)
                place_nD = place_n[:, None] + lane_D[None, :]
                if HEAD_DIM == BLOCK_D:
                    key_nD = tl.load(key_cache + place_nD)
                    value_nD = tl.load(value_cache + place_nD)
                else:
                    key_nD = tl.load(key_cache + place_nD, mask=in_head_D[None, :], other=0.0)
                    value_nD = tl.load(value_cache + place_nD, mask=in_head_D[None, :], other=0.0)
                max_M, sum_M, acc_MD = _take_keys(
                    query_MD,
                    key_nD,
                    value_nD,
                    None,
                    max_M,
                    sum_M,
                    acc_MD,
                    scale,
                    softcap,
                    HAS_SOFTCAP,
                    True,
                    DEFER_SUM,
                    WIDEN,
                )
            shared_end = end
            last_apart = lowest_row  # rows whose last tiles are computed apart from those of others
            if IN_ORDER:
                is_apart = tl.load(is_tree + sequence) != 0
                older_end = first + tl.maximum(tl.minimum(end, start) - first, 0) // BLOCK_N * BLOCK_N
                shared_end = tl.where(is_apart, older_end, end)
                end_row = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // RATIO + 1, query_len)
                last_apart = tl.where(is_apart, end_row, lowest_row)
            for low in range(masked_from, shared_end, BLOCK_N):
                cached_n = low + index_n
                place_n = _places(block_n, cached_n, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
                block_n = _blocks(block_tables, sequence, table_width, cached_n + BLOCK_N, BLOCK_SIZE)
                place_nD = place_n[:, None] + lane_D[None, :]
                # Keys and values past the context may be anything, NaN included: they are never read.
                exists_n = cached_n < context_len
                loaded_nD = exists_n[:, None] & in_head_D[None, :]
                key_nD = tl.load(key_cache + place_nD, mask=loaded_nD, other=0.0)
                value_nD = tl.load(value_cache + place_nD, mask=loaded_nD, other=0.0)
                visible_Mn = _visible(
                    cached_n - start,
                    row_M,
                    first_row,
                    query_len,
                    context_len,
                    positions,
                    ancestor_mask,
                    mask_width,
                    in_tile_M,
                    WINDOW,
                    HAS_MASK,
                )
                max_M, sum_M, acc_MD = _take_keys(
                    query_MD,
                    key_nD,
                    value_nD,
                    visible_Mn & exists_n[None, :],
                    max_M,
                    sum_M,
                    acc_MD,
                    scale,
                    softcap,
                    HAS_SOFTCAP,
                    False,
                    DEFER_SUM,
                    WIDEN,
                )
            if IN_ORDER:
                for row in range(lowest_row, last_apart):
                    _numbers_n, seen = _path(ancestor_mask, first_row + row, mask_width, index_n, BLOCK_N)
                    own = start + seen - 1
                    for low in range(shared_end, tl.minimum(end, own + 1), BLOCK_N):
                        place_n = low + index_n
                        node_n, _all_seen = _path(
                            ancestor_mask, first_row + row, mask_width, place_n - start, BLOCK_N
                        )
                        cached_n = tl.where(place_n < start, place_n, start + node_n)
                        block_of_n = _blocks(block_tables, sequence, table_width, cached_n, BLOCK_SIZE)
                        at_n = _places(block_of_n, cached_n, kv_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
                        at_nD = at_n[:, None] + lane_D[None, :]
                        exists_n = place_n <= own
                        loaded_nD = exists_n[:, None] & in_head_D[None, :]
                        key_nD = tl.load(key_cache + at_nD, mask=loaded_nD, other=0.0)
                        value_nD = tl.load(value_cache + at_nD, mask=loaded_nD, other=0.0)
                        if WINDOW > 0:
                            exists_n = exists_n & (own - place_n < WINDOW)
                        max_M, sum_M, acc_MD = _take_keys(
                            query_MD,
                            key_nD,
                            value_nD,
                            (row_M == row)[:, None] & exists_n[None, :],
                            max_M,
                            sum_M,
                            acc_MD,
                            scale,
                            softcap,
                            HAS_SOFTCAP,
                            False,
                            DEFER_SUM,
                            WIDEN,
                        )
            if DEFER_SUM:
                total_M = tl.sum(sum_M, 1)
            else:
                total_M = sum_M
            kept_MD = in_tile_M[:, None] & in_head_D[None, :]
            if SPLIT_KEYS == 0 or context_len <= SPLIT_KEYS:
                divisor_M = tl.where(total_M == 0.0, 1.0, total_M)  # rows beyond the tile have seen nothing
                out_row_M = (first_row + row_M).to(tl.int64) * (NUM_KV_HEADS * RATIO) + head_M
                tl.store(
                    out + out_row_M[:, None] * HEAD_DIM + lane_D[None, :],
                    acc_MD / divisor_M[:, None],
                    mask=kept_MD,
                )
            else:
                place_M = (first_place + row_M * places_per_row + split).to(tl.int64)
                place_M = place_M * (NUM_KV_HEADS * RATIO) + head_M
                tl.store(partial_out + place_M[:, None] * HEAD_DIM + lane_D[None, :], acc_MD, mask=kept_MD)
                tl.store(partial_max + place_M, max_M, mask=in_tile_M)
                tl.store(partial_sum + place_M, total_M, mask=in_tile_M)
        sequence, tile, split = next_sequence, next_tile, next_split
        first_row, query_len = next_first_row, next_query_len
        first_place, places_per_row = next_first_place, next_places_per_row
        context_len, block_n = next_context_len, next_block_n
        next_sequence, next_tile, next_split = third_sequence, third_tile, third_split
        next_first_row, next_query_len = third_first_row, third_query_len
        next_first_place, next_places_per_row = third_first_place, third_places_per_row


@triton.jit(do_not_specialize=["partial_places", "first_row"])
def combine_kernel(
    out,
    partial_out,
    partial_max,
    partial_sum,
    partial_places,
    row_sequences,
    context_lens,
    query_start,
    first_row,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per row (from `first_row` on) and head: the output from partial results of all splits.

    Rows whose `row_sequences` is negative, and those of sequences of one split, are left alone. Sums are over
    places that do not depend on the context, of which those without a split add exact zeros.
    """
    row = first_row + tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(row_sequences + row)
    if sequence >= 0:
        context_len = tl.load(context_lens + sequence)
        if context_len > SPLIT_KEYS:
            begin = tl.load(query_start + sequence)
            lowest_split = 0
            if WINDOW > 0:
                # What lies before every key that the row sees was neither computed nor written.
                position = context_len - (tl.load(query_start + sequence + 1) - begin)
                if not HAS_MASK:
                    position += row - begin
                lowest_split = tl.maximum(position - (WINDOW - 1), 0) // SPLIT_KEYS
            first_place = tl.load(partial_places + 2 * sequence)
            places_per_row = tl.load(partial_places + 2 * sequence + 1)
            place = (first_place + (row - begin) * places_per_row).to(tl.int64)
            all_s = tl.arange(0, MAX_SPLITS)
            written_s = (all_s * SPLIT_KEYS < context_len) & (all_s >= lowest_split)
            index_s = (place + all_s) * NUM_HEADS + head
            max_s = tl.load(partial_max + index_s, mask=written_s, other=float("-inf"))
            sum_s = tl.load(partial_sum + index_s, mask=written_s, other=0.0)
            highest = tl.max(max_s, 0)
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = tl.sum(sum_s * tl.exp2(max_s - base), 0)
            lane_D = tl.arange(0, BLOCK_D)
            in_head_D = lane_D < HEAD_DIM
            acc_D = tl.zeros([BLOCK_D], tl.float32)
            num_splits = (context_len + SPLIT_KEYS - 1) // SPLIT_KEYS
            for first in range(0, num_splits, SPLITS_AT_ONCE):
                some_s = first + tl.arange(0, SPLITS_AT_ONCE)
                wanted_s = (some_s < num_splits) & (some_s >= lowest_split)
                some_index_s = (place + some_s) * NUM_HEADS + head
                some_max_s = tl.load(partial_max + some_index_s, mask=wanted_s, other=float("-inf"))
                parts_sD = tl.load(
                    partial_out + some_index_s[:, None] * HEAD_DIM + lane_D[None, :],
                    mask=wanted_s[:, None] & in_head_D[None, :],
                    other=0.0,
                )
                acc_D += tl.sum(parts_sD * tl.exp2(some_max_s - base)[:, None], 0)
            place_D = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + lane_D
            tl.store(out + place_D, acc_D / total, mask=in_head_D)
