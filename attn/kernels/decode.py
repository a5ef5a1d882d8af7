"""Decode, speculative verify and short extends: a few query tokens per row, split over the keys.

A row is a tile of query rows (query tokens x a KV head's group of query heads) of one request. The
step's plan (:mod:`builders.split_kv`) gives every group of programs a run of segments; the programs
of a group, one per KV head, walk the same tokens at the same time. Each segment's state starts from
nothing, and a row's states are folded in the order of its segments, so a row's bits depend on that
row alone: neither on the batch nor on where the work was cut.

A program that enters a row at its start folds in registers; one that enters later stores a state
per segment. The last of a row's programs to arrive, by a counter of segments that resets itself,
folds the stored states and writes the row. No program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.numerics import encode_e4m3
from attn.kernels.tile import (
    attend_tiles,
    fold,
    last_visible,
    plane_columns,
    power_of_two_guard,
)
from builders.kernels import ROW_FIELDS, first_visible, segment_of, segment_start

_FIELDS = tl.constexpr(ROW_FIELDS)
_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_rows(
    m, l, acc, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr, v_factor,
    output_scale_ptr, out_token, out_head, lse_token, SINKS: tl.constexpr,
    FP8_OUT: tl.constexpr, LSE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Normalise a row's state and write it: output ``[M, columns]`` and LSE ``[M]``."""
    some = m > float("-inf")
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=wanted, other=0.0) * _LOG2E
        top = tl.where(some, tl.maximum(m, sink), m)
        base = tl.where(some, top, 0.0)
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.where(some, tl.exp2(sink - base), 0.0)
        acc = acc * shrink[:, None]
        m = top
    # Rows without keys have nothing but zeros.
    out = (acc * v_factor) / tl.where(some, l, 1.0)[:, None]
    offset = at.to(tl.int64) * out_token + head * out_head
    mask = wanted[:, None] & valid[None, :]
    if FP8_OUT:
        bits = encode_e4m3(out / tl.load(output_scale_ptr), HARDWARE_E4M3)
        tl.store(out_ptr + offset[:, None] + columns[None, :], bits, mask=mask)
    else:
        tl.store(
            out_ptr + offset[:, None] + columns[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    if LSE:
        lse = tl.where(some, (m + tl.log2(l)) * _LN2, float("-inf"))
        tl.store(lse_ptr + at.to(tl.int64) * lse_token + head, lse, mask=wanted)


@triton.jit
def _slot(part, parts, bound, first_part, first_tile, base, groups, total, KV_TILE: tl.constexpr,
          HEADS: tl.constexpr, lane, SLOTS: tl.constexpr):  # fmt: skip
    """Where the state of a row's segment ``part`` lies, and whether there is such a segment."""
    real = part < parts
    part = tl.minimum(part, parts - 1)
    tile = tl.maximum(segment_start(first_part + part) // KV_TILE, first_tile)
    position = base + tile - first_tile
    group = (position.to(tl.int64) * groups // total).to(tl.int32)
    return real, ((group * HEADS + lane) * SLOTS + part).to(tl.int64)


@triton.jit
def _finish(
    head, at, head_of, wanted, lane, parts, first_part, first_tile, base, groups, total,
    states_ptr, sums_ptr, out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token,
    out_head, lse_token, KV_TILE: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, USED: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr,
    KIND: tl.constexpr, V_USED: tl.constexpr, V_SIZE: tl.constexpr, CHUNK_WIDTH: tl.constexpr,
    SINKS: tl.constexpr, FP8_OUT: tl.constexpr, LSE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Fold a row's stored states in the order of its segments, and write the row.

    Stored by other multiprocessors, they are read past the L1 cache. Four at a time are under way
    before the first is folded.
    """
    row = tl.arange(0, ROWS)
    mine = row < USED
    group = (base.to(tl.int64) * groups // total).to(tl.int32)
    prefix_slot = ((group * HEADS + lane) * SLOTS).to(tl.int64)
    # The prefix holds every segment that its group owns.
    beyond = ((group + 1).to(tl.int64) * total + groups - 1) // groups - base
    tile = first_tile + beyond.to(tl.int32)
    first = segment_of(tile * KV_TILE)
    inside = tl.maximum(segment_start(first) // KV_TILE, first_tile) < tile
    first = first + inside.to(tl.int32) - first_part
    for c0 in range(0, WIDTH * PLANES, CHUNK_WIDTH):
        column = c0 + tl.arange(0, CHUNK_WIDTH)
        cells = row[:, None] * (WIDTH * PLANES) + column[None, :]
        mask = mine[:, None] & (column < WIDTH * PLANES)[None, :]
        at_slot = prefix_slot
        m = tl.load(sums_ptr + at_slot * 2 * USED + row, mask=mine, other=0.0, cache_modifier=".cg")
        l = tl.load(
            sums_ptr + at_slot * 2 * USED + USED + row, mask=mine, other=0.0, cache_modifier=".cg"
        )
        acc = tl.load(
            states_ptr + at_slot * (USED * WIDTH * PLANES) + cells,
            mask=mask,
            other=0.0,
            cache_modifier=".cg",
        )
        for part in range(first, parts, 4):
            r0, s0 = _slot(part, parts, 0, first_part, first_tile, base, groups, total, KV_TILE, HEADS, lane, SLOTS)  # noqa: E501  # fmt: skip
            r1, s1 = _slot(part + 1, parts, 0, first_part, first_tile, base, groups, total, KV_TILE, HEADS, lane, SLOTS)  # noqa: E501  # fmt: skip
            r2, s2 = _slot(part + 2, parts, 0, first_part, first_tile, base, groups, total, KV_TILE, HEADS, lane, SLOTS)  # noqa: E501  # fmt: skip
            r3, s3 = _slot(part + 3, parts, 0, first_part, first_tile, base, groups, total, KV_TILE, HEADS, lane, SLOTS)  # noqa: E501  # fmt: skip
            m0, l0, a0 = _load_state(states_ptr, sums_ptr, s0, row, cells, mine, mask, USED, WIDTH * PLANES)  # noqa: E501  # fmt: skip
            m1, l1, a1 = _load_state(states_ptr, sums_ptr, s1, row, cells, mine, mask, USED, WIDTH * PLANES)  # noqa: E501  # fmt: skip
            m2, l2, a2 = _load_state(states_ptr, sums_ptr, s2, row, cells, mine, mask, USED, WIDTH * PLANES)  # noqa: E501  # fmt: skip
            m3, l3, a3 = _load_state(states_ptr, sums_ptr, s3, row, cells, mine, mask, USED, WIDTH * PLANES)  # noqa: E501  # fmt: skip
            m, l, acc = _fold_if(r0, m, l, acc, m0, l0, a0)
            m, l, acc = _fold_if(r1, m, l, acc, m1, l1, a1)
            m, l, acc = _fold_if(r2, m, l, acc, m2, l2, a2)
            m, l, acc = _fold_if(r3, m, l, acc, m3, l3, a3)
        plane = column // WIDTH
        index = column % WIDTH
        columns = plane_columns(index, plane, V_SIZE, KIND)
        valid = (index < V_USED) & (column < WIDTH * PLANES)
        write_rows(
            m, l, acc, at, head_of, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr, v_factor,
            output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT, LSE, HARDWARE_E4M3,
        )  # fmt: skip


@triton.jit
def _load_state(states_ptr, sums_ptr, slot, row, cells, mine, mask, USED: tl.constexpr, CELLS: tl.constexpr):  # noqa: E501  # fmt: skip
    sums = sums_ptr + slot * 2 * USED
    m = tl.load(sums + row, mask=mine, other=0.0, cache_modifier=".cg")
    l = tl.load(sums + USED + row, mask=mine, other=0.0, cache_modifier=".cg")
    at = states_ptr + slot * (USED * CELLS)
    return m, l, tl.load(at + cells, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _fold_if(real, m, l, acc, m_new, l_new, acc_new):
    m1, l1, acc1 = fold(m, l, acc, m_new, l_new, acc_new)
    return tl.where(real, m1, m), tl.where(real, l1, l), tl.where(real, acc1, acc)


@triton.jit
def _store_state(states_ptr, sums_ptr, slot, m, l, acc0, acc1, acc2, acc3, USED: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr):  # noqa: E501  # fmt: skip
    row = tl.arange(0, m.shape[0])
    column = tl.arange(0, WIDTH)
    mine = row < USED
    tl.store(sums_ptr + slot * 2 * USED + row, m, mask=mine)
    tl.store(sums_ptr + slot * 2 * USED + USED + row, l, mask=mine)
    at = states_ptr + slot * (USED * WIDTH * PLANES)
    cells = at + row[:, None] * (WIDTH * PLANES) + column[None, :]
    tl.store(cells, acc0, mask=mine[:, None])
    if PLANES > 1:
        tl.store(cells + WIDTH, acc1, mask=mine[:, None])
    if PLANES > 2:
        tl.store(cells + 2 * WIDTH, acc2, mask=mine[:, None])
        tl.store(cells + 3 * WIDTH, acc3, mask=mine[:, None])


@triton.jit
def load_query(query_ptr, offset, wanted, PLANE: tl.constexpr, K_WIDTH: tl.constexpr, K_USED: tl.constexpr, K_SIZE: tl.constexpr, KIND: tl.constexpr):  # noqa: E501  # fmt: skip
    """The elements of query rows that meet one plane of the stored keys, ``[M, K_WIDTH]``."""
    index = tl.arange(0, K_WIDTH)
    column = plane_columns(index, PLANE, K_SIZE, KIND)
    mask = wanted[:, None] & (index < K_USED)[None, :]
    return tl.load(query_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def prepared_queries(
    query_ptr, offset, wanted, scale, K_WIDTH: tl.constexpr, K_USED: tl.constexpr,
    K_SIZE: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, GUARD: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Query planes in the type of the product, and what scores are to be multiplied by, ``[M]``.

    GUARD: the product is in fp16, whose range bf16 exceeds; a power of two per row moves it there.
    """
    q0 = load_query(query_ptr, offset, wanted, 0, K_WIDTH, K_USED, K_SIZE, KIND)
    q1 = q0
    q2 = q0
    q3 = q0
    if PLANES > 1:
        q1 = load_query(query_ptr, offset, wanted, 1, K_WIDTH, K_USED, K_SIZE, KIND)
    if PLANES > 2:
        q2 = load_query(query_ptr, offset, wanted, 2, K_WIDTH, K_USED, K_SIZE, KIND)
        q3 = load_query(query_ptr, offset, wanted, 3, K_WIDTH, K_USED, K_SIZE, KIND)
    scales = tl.zeros([q0.shape[0]], tl.float32) + scale
    if GUARD:
        largest = tl.max(tl.abs(q0.to(tl.float32)), 1)
        if PLANES > 1:
            largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32)), 1))
        if PLANES > 2:
            largest = tl.maximum(largest, tl.max(tl.abs(q2.to(tl.float32)), 1))
            largest = tl.maximum(largest, tl.max(tl.abs(q3.to(tl.float32)), 1))
        down, up = power_of_two_guard(largest)
        scales = scales * up
        q0 = q0.to(tl.float32) * down[:, None]
        q1 = q1.to(tl.float32) * down[:, None]
        q2 = q2.to(tl.float32) * down[:, None]
        q3 = q3.to(tl.float32) * down[:, None]
    return q0.to(COMPUTE), q1.to(COMPUTE), q2.to(COMPUTE), q3.to(COMPUTE), scales


_VARYING = ["groups", "window", "chunk", "lookback", "num_ranges", "rswa_window"]


@triton.jit(do_not_specialize=_VARYING)
def decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    k_inline_ptr,
    v_inline_ptr,
    k_scale_ptr,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    output_scale_ptr,
    table_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    causal_ptr,
    prefix_ptr,
    ranges_ptr,
    sinks_ptr,
    slopes_ptr,
    query_token,
    query_head,
    out_token,
    out_head,
    lse_token,
    table_row,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    ks_block,
    ks_token,
    ks_head,
    vs_block,
    vs_token,
    vs_head,
    scale_head,
    scale,
    soft_cap,
    groups,
    window,
    chunk,
    lookback,
    num_ranges,
    HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_USED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_USED: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    INLINE: tl.constexpr,
    DECODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    GUARD: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RSWA: tl.constexpr,
    RANGES: tl.constexpr,
    CLAMP: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SIMPLE: tl.constexpr,
    FP8_OUT: tl.constexpr,
    LSE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    FINISH_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of the plan's rows; grid ``(groups * HEADS,)``.

    Shapes: query ``[T, H, K_SIZE]``, out ``[T, H, V_SIZE]``, LSE ``[T, H]``; key and value
    ``[N, BLOCK_SIZE, Hk, words]`` by their strides in stored words; the rest as in the plan.
    """
    USED: tl.constexpr = TILE_HEADS * QUERY_TOKENS
    EDGES: tl.constexpr = WINDOW or CHUNK or RSWA
    pid = tl.program_id(0)
    lane = pid % HEADS
    mine = starts_ptr + (pid // HEADS) * 2
    first_row = tl.load(mine)
    first_segment = tl.load(mine + 1)
    last_row = tl.load(mine + 2)
    last_segment = tl.load(mine + 3)
    total = tl.load(total_ptr + 1).to(tl.int64)
    row = tl.arange(0, ROWS)
    for r in range(first_row, last_row + (last_segment > 0).to(tl.int32)):
        fields = rows_ptr + (r // HEAD_LOOPS) * _FIELDS
        req = tl.load(fields)
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        kv_len = tl.load(fields + 3)
        first = tl.load(fields + 4)
        first_tile = tl.load(fields + 5)
        tiles = tl.load(fields + 6)
        base = tl.load(fields + 7) + (r % HEAD_LOOPS) * tiles
        first_part = segment_of(first_tile * KV_TILE)
        parts = segment_of((first_tile + tiles - 1) * KV_TILE) + 1 - first_part
        begin = tl.where(r == first_row, first_segment, 0)
        end = tl.where(r == last_row, last_segment, parts)
        if end > begin:
            tile_of_heads = (r % HEAD_LOOPS) * HEADS + lane
            kv_head = tile_of_heads // HEAD_TILES
            in_group = (tile_of_heads % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
            head = kv_head * GROUP + in_group
            wanted = (row < count * TILE_HEADS) & (in_group < GROUP)
            at = token + row // TILE_HEADS
            query = first + row // TILE_HEADS
            offset = at.to(tl.int64) * query_token + head * query_head
            natural = scale
            v_factor = 1.0
            if PER_TENSOR:
                natural = scale * tl.load(k_scale_ptr + kv_head * scale_head)
                v_factor = tl.load(v_scale_ptr + kv_head * scale_head)
            if not SOFT_CAP:
                natural = natural * _LOG2E
            q0, q1, q2, q3, scales = prepared_queries(
                query_ptr, offset, wanted, natural, K_WIDTH, K_USED, K_SIZE, KIND, PLANES, GUARD,
                COMPUTE,
            )  # fmt: skip
            slope = scales
            if ALIBI > 0:
                slope = tl.load(slopes_ptr + head, mask=wanted, other=0.0)
            causal = 1
            if CAUSAL == 2:
                causal = tl.load(causal_ptr + req).to(tl.int32)
            prefix = 0
            if RSWA:
                prefix = tl.load(prefix_ptr + req)
            ranges = ranges_ptr
            if RANGES:
                ranges = ranges_ptr + req.to(tl.int64) * num_ranges * 2
            last = first + count - 1
            kv_start = first_visible(
                first, last, window, chunk, lookback, ranges, num_ranges, EDGES, CHUNK, RANGES
            )
            kv_stop = last_visible(
                last, kv_len, causal, window, ranges, num_ranges, first, CAUSAL, WINDOW, CHUNK,
                RSWA, RANGES,
            )  # fmt: skip
            near_tile = kv_start // KV_TILE
            own_first = near_tile
            if RSWA:
                own_first = tl.where(prefix > 0, 0, near_tile)
            own_last = tl.cdiv(kv_stop, KV_TILE)
            # Only the first and the last tile hold slots that must not be read.
            clean_low = tl.cdiv(kv_start, KV_TILE)
            clean_high = tl.maximum(kv_len // KV_TILE, clean_low)
            table = table_ptr + req.to(tl.int64) * table_row
            k_base = kv_head.to(tl.int64) * k_head
            v_base = kv_head.to(tl.int64) * v_head
            k_inline = k_inline_ptr
            v_inline = v_inline_ptr
            if INLINE:
                k_inline = k_inline_ptr + kv_head.to(tl.int64) * ks_head
                v_inline = v_inline_ptr + kv_head.to(tl.int64) * vs_head
            M = tl.full([ROWS], float("-inf"), tl.float32)
            L = tl.zeros([ROWS], tl.float32)
            A0 = tl.zeros([ROWS, V_WIDTH], tl.float32)
            A1 = A0
            A2 = A0
            A3 = A0
            # A layer that sees further back than the plan knows starts earlier than the plan.
            start = first_part + begin
            if begin == 0:
                start = tl.minimum(start, segment_of(own_first * KV_TILE))
            for s in range(start, first_part + end):
                low = tl.maximum(segment_start(s) // KV_TILE, own_first)
                high = tl.minimum(segment_start(s + 1) // KV_TILE, own_last)
                m = tl.full([ROWS], float("-inf"), tl.float32)
                l = tl.zeros([ROWS, KV_TILE], tl.float32)
                acc0 = tl.zeros([ROWS, V_WIDTH], tl.float32)
                acc1 = acc0
                acc2 = acc0
                acc3 = acc0
                if EDGES:
                    edge = tl.minimum(clean_low, high)
                    if RSWA:
                        # Between prefix and window lies what no query sees.
                        hole = tl.minimum(tl.cdiv(prefix, KV_TILE), high)
                        m, l, acc0, acc1, acc2, acc3 = attend_tiles(
                            m, l, acc0, acc1, acc2, acc3, q0, q1, q2, q3, query, scales, slope,
                            soft_cap, key_ptr, value_ptr, k_inline, v_inline, table, k_base, v_base, k_block, k_token,
                            v_block, v_token, ks_block, ks_token, vs_block, vs_token, low, hole,
                            kv_start, kv_len, causal, window, chunk, lookback, prefix, ranges,
                            num_ranges, 2, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH, V_USED,
                            KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK,
                            RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, True, STAGES,
                        )  # fmt: skip
                        low = tl.maximum(low, tl.maximum(hole, near_tile))
                    m, l, acc0, acc1, acc2, acc3 = attend_tiles(
                        m, l, acc0, acc1, acc2, acc3, q0, q1, q2, q3, query, scales, slope,
                        soft_cap, key_ptr, value_ptr, k_inline, v_inline, table, k_base, v_base, k_block, k_token,
                        v_block, v_token, ks_block, ks_token, vs_block, vs_token, low, edge,
                        kv_start, kv_len, causal, window, chunk, lookback, prefix, ranges,
                        num_ranges, 2, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH, V_USED,
                        KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK,
                        RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, True, 1,
                    )  # fmt: skip
                    low = tl.maximum(low, edge)
                clean = tl.minimum(clean_high, high)
                m, l, acc0, acc1, acc2, acc3 = attend_tiles(
                    m, l, acc0, acc1, acc2, acc3, q0, q1, q2, q3, query, scales, slope,
                    soft_cap, key_ptr, value_ptr, k_inline, v_inline, table, k_base, v_base, k_block, k_token,
                    v_block, v_token, ks_block, ks_token, vs_block, vs_token, low, clean,
                    kv_start, kv_len, causal, window, chunk, lookback, prefix, ranges,
                    num_ranges, 1, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH, V_USED,
                    KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK,
                    RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, True, STAGES,
                )  # fmt: skip
                m, l, acc0, acc1, acc2, acc3 = attend_tiles(
                    m, l, acc0, acc1, acc2, acc3, q0, q1, q2, q3, query, scales, slope,
                    soft_cap, key_ptr, value_ptr, k_inline, v_inline, table, k_base, v_base, k_block, k_token,
                    v_block, v_token, ks_block, ks_token, vs_block, vs_token,
                    tl.maximum(low, clean), high, kv_start, kv_len, causal, window, chunk,
                    lookback, prefix, ranges, num_ranges, 2, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED,
                    V_WIDTH, V_USED, KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW,
                    CHUNK, RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, True, 1,
                )  # fmt: skip
                total_weight = tl.sum(l, 1)
                if begin > 0:
                    slot = (pid * SLOTS + s - first_part).to(tl.int64)
                    _store_state(
                        states_ptr, sums_ptr, slot, m, total_weight, acc0, acc1, acc2, acc3, USED,
                        V_WIDTH, PLANES,
                    )  # fmt: skip
                else:
                    M0 = M
                    L0 = L
                    M, L, A0 = fold(M0, L0, A0, m, total_weight, acc0)
                    if PLANES > 1:
                        _, _, A1 = fold(M0, L0, A1, m, total_weight, acc1)
                    if PLANES > 2:
                        _, _, A2 = fold(M0, L0, A2, m, total_weight, acc2)
                        _, _, A3 = fold(M0, L0, A3, m, total_weight, acc3)
            if (begin == 0) & (end == parts):
                index = tl.arange(0, V_WIDTH)
                valid = index < V_USED
                columns = plane_columns(index, 0, V_SIZE, KIND)
                write_rows(
                    M, L, A0, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr,
                    v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT,
                    LSE, HARDWARE_E4M3,
                )  # fmt: skip
                if PLANES > 1:
                    columns = plane_columns(index, 1, V_SIZE, KIND)
                    write_rows(
                        M, L, A1, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr,
                        v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT,
                        False, HARDWARE_E4M3,
                    )  # fmt: skip
                if PLANES > 2:
                    columns = plane_columns(index, 2, V_SIZE, KIND)
                    write_rows(
                        M, L, A2, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr,
                        v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT,
                        False, HARDWARE_E4M3,
                    )  # fmt: skip
                    columns = plane_columns(index, 3, V_SIZE, KIND)
                    write_rows(
                        M, L, A3, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr,
                        v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT,
                        False, HARDWARE_E4M3,
                    )  # fmt: skip
            else:
                if begin == 0:
                    slot = (pid * SLOTS).to(tl.int64)
                    _store_state(
                        states_ptr, sums_ptr, slot, M, L, A0, A1, A2, A3, USED, V_WIDTH, PLANES
                    )
                counter = counters_ptr + r * HEADS + lane
                # All threads have stored before one of them says so.
                tl.debug_barrier()
                arrived = tl.atomic_add(counter, end - begin, sem="acq_rel", scope="gpu")
                if arrived + end - begin == parts:
                    tl.store(counter, 0)
                    _finish(
                        kv_head, at, head, wanted, lane, parts, first_part, first_tile, base,
                        groups, total, states_ptr, sums_ptr, out_ptr, lse_ptr, sinks_ptr, v_factor,
                        output_scale_ptr, out_token, out_head, lse_token, KV_TILE, HEADS, SLOTS,
                        ROWS, USED, V_WIDTH, PLANES, KIND, V_USED, V_SIZE, FINISH_WIDTH, SINKS,
                        FP8_OUT, LSE, HARDWARE_E4M3,
                    )  # fmt: skip
