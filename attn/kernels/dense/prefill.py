"""The portable prefill kernel: prefill, chunked prefill and encoders, one pass over the keys.

A program takes one query head and one tile of query tokens at a time. The latest tokens come first,
since they see most keys. A tile of keys that every query of the tile sees whole is not masked. The
kernel reads the number of the step's tiles from the device, because a captured graph launches the
same grid for every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.query_rows import prepared_queries, write_rows
from attn.kernels.dense.tile import attend_tiles, recomputed
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.masks import last_visible, seen_by_all
from attn.kernels.lang.stored import plane_columns
from builders.splitkv.device.segments import first_visible, local_len, local_position

_VARYING = [
    "num_reqs",
    "window",
    "chunk",
    "lookback",
    "dcp_size",
    "dcp_rank",
    "dcp_interleave",
    "num_ranges",
    "table_row",
    "lse_token",
]
_ANYWHERE = [
    "table_ptr",
    "tile_starts_ptr",
    "query_start_ptr",
    "seq_lens_ptr",
    "first_ptr",
    "lse_ptr",
    "causal_ptr",
    "prefix_ptr",
    "ranges_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "output_scale_ptr",
    "sinks_ptr",
    "slopes_ptr",
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def prefill_kernel(
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
    tile_starts_ptr,
    query_start_ptr,
    seq_lens_ptr,
    first_ptr,
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
    s_block,
    s_token,
    s_head,
    scale_head,
    scale,
    soft_cap,
    num_reqs,
    window,
    chunk,
    lookback,
    dcp_size,
    dcp_rank,
    dcp_interleave,
    num_ranges,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    REQ_STEPS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
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
    DCP: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SIMPLE: tl.constexpr,
    FP8_OUT: tl.constexpr,
    LSE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    STAGES: tl.constexpr,
    REST: tl.constexpr,
):
    """Attention of requests with many new tokens; grid ``(programs,)``, any number of programs.

    Shapes: query is ``[T, H, K_SIZE]``, out is ``[T, H, V_SIZE]``, LSE is ``[T, H]`` fp32. Key and
    value are ``[N, BLOCK_SIZE, Hk, words]``, and their strides count stored words. tile_starts
    ``[R + 1]`` int32 gives the first query tile of each request.

    With BLOCK_SIZE 0 (encoders) key and value are ``[T, Hk, words]``, and the keys of a request are
    the rows of its own tokens. With first_ptr ``[R]`` int32 the first query of a request has that
    position; without it the last query of a request has the position of its last key. REST is the
    number of key columns beyond K_WIDTH.
    """
    EDGES: tl.constexpr = WINDOW or CHUNK or RSWA
    RUN: tl.constexpr = KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    num_tiles = tl.load(tile_starts_ptr + num_reqs)
    within = tl.arange(0, QUERY_TILE)
    for work in range(tl.program_id(0), num_tiles * HEADS, tl.num_programs(0)):
        head = work % HEADS
        # The last tiles see most keys, so they start first.
        tile = num_tiles - 1 - work // HEADS
        req = 0
        above = num_reqs
        for _ in range(REQ_STEPS):
            middle = (req + above) // 2
            go = (above - req > 1) & (tl.load(tile_starts_ptr + middle) <= tile)
            stay = (above - req > 1) & (not go)
            req = tl.where(go, middle, req)
            above = tl.where(stay, middle, above)
        tile = tile - tl.load(tile_starts_ptr + req)
        begin = tl.load(query_start_ptr + req)
        query_len = tl.load(query_start_ptr + req + 1) - begin
        kv_len = query_len
        if BLOCK_SIZE > 0:
            kv_len = tl.load(seq_lens_ptr + req)
        context = tl.maximum(kv_len - query_len, 0)
        if first_ptr is not None:
            context = tl.load(first_ptr + req)
        token = tile * QUERY_TILE + within
        wanted = token < query_len
        query = context + token
        first = context + tile * QUERY_TILE
        last = context + tl.minimum((tile + 1) * QUERY_TILE, query_len) - 1
        if DCP:
            query = local_position(query, dcp_size, dcp_rank, dcp_interleave)
            first = local_position(first, dcp_size, dcp_rank, dcp_interleave)
            last = local_position(last, dcp_size, dcp_rank, dcp_interleave)
            kv_len = local_len(kv_len, dcp_size, dcp_rank, dcp_interleave)
        kv_head = head // GROUP
        at = begin + token
        heads = within * 0 + head
        offset = at.to(tl.int64) * query_token + head * query_head
        natural = scale
        v_factor = 1.0
        if PER_TENSOR:
            natural = scale * tl.load(k_scale_ptr + kv_head * scale_head)
            v_factor = tl.load(v_scale_ptr + kv_head * scale_head)
        if not SOFT_CAP:
            natural = natural * LOG2E
        q0, q1, q2, q3, scales = prepared_queries(
            query_ptr, offset, wanted, natural, K_WIDTH, K_USED, K_SIZE, KIND, PLANES, GUARD,
            COMPUTE,
        )  # fmt: skip
        if REST > 0:
            rest = K_WIDTH + tl.arange(0, REST)
            at_rest = query_ptr + offset[:, None] + rest[None, :]
            q1 = tl.load(at_rest, mask=wanted[:, None], other=0.0).to(COMPUTE)
        slope = scales
        if ALIBI > 0:
            slope = tl.load(slopes_ptr + heads).to(tl.float32)
        causal = 1
        if CAUSAL == 2:
            causal = tl.load(causal_ptr + req).to(tl.int32)
        prefix = 0
        if RSWA:
            # Engines may pass the largest int32 for "all keys"; rounding that up to a tile would
            # overflow.
            prefix = tl.minimum(tl.load(prefix_ptr + req), kv_len)
        ranges = ranges_ptr
        if RANGES:
            ranges = ranges_ptr + req.to(tl.int64) * num_ranges * 2
        kv_start = first_visible(
            first, last, window, chunk, lookback, ranges, num_ranges, EDGES, CHUNK, RANGES, CLAMP
        )
        kv_stop = last_visible(
            last, kv_len, causal, window, ranges, num_ranges, first, CAUSAL, WINDOW, CHUNK, RSWA,
            RANGES,
        )  # fmt: skip
        all_low, all_high = seen_by_all(
            first, last, kv_len, causal, window, chunk, lookback, CAUSAL, WINDOW, CHUNK, RSWA
        )
        table = table_ptr
        k_base = kv_head.to(tl.int64) * k_head
        v_base = kv_head.to(tl.int64) * v_head
        if BLOCK_SIZE > 0:
            table = table_ptr + req.to(tl.int64) * table_row
        else:
            k_base += begin.to(tl.int64) * k_token
            v_base += begin.to(tl.int64) * v_token
        s_base = kv_head.to(tl.int64) * s_head
        safe_low = kv_start
        hole = 0
        if RSWA:
            # Slots between prefix and window, if any, are seen by no query and must not be read.
            apart = tl.cdiv(prefix, RUN) * RUN < kv_start
            safe_low = tl.where(apart, kv_start, 0)
            hole = tl.where(apart, prefix, 0)
        low = kv_start // KV_TILE
        high = tl.cdiv(kv_stop, KV_TILE)
        full_low = tl.cdiv(all_low, KV_TILE)
        full_high = tl.maximum(all_high // KV_TILE, full_low)
        m = tl.full([QUERY_TILE], float("-inf"), tl.float32)
        l = tl.zeros([QUERY_TILE], tl.float32)
        acc0 = tl.zeros([QUERY_TILE, V_WIDTH], tl.float32)
        acc1 = acc0
        acc2 = acc0
        acc3 = acc0
        if EDGES or RANGES:
            if RSWA:
                prefix_tiles = tl.minimum(tl.cdiv(prefix, KV_TILE), high)
                m, l, acc0, acc1, acc2, acc3, _, _, _, _, _, _ = attend_tiles(
                    m, l, acc0, acc1, acc2, acc3, m, m, m, m, m, m, 0, None, None, 0, False, q0, q1,
                    q2, q3, query, scales, slope, soft_cap, key_ptr, value_ptr, k_inline_ptr,
                    v_inline_ptr, table, k_base, v_base, k_block, k_token, v_block, v_token, s_base,
                    s_block, s_token, 0, prefix_tiles, safe_low, kv_len, hole, kv_len, causal,
                    window, chunk, lookback, prefix, ranges, num_ranges, 0, 0, True,
                    SAME_ROWS, RSWA, 1,
                    KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH, V_USED, KIND, PLANES, INLINE,
                    DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK, RSWA, RANGES, CLAMP, SOFT_CAP,
                    ALIBI, SIMPLE, False, False, 0, STAGES, REST,
                )  # fmt: skip
                low = tl.maximum(low, prefix_tiles)
            edge = tl.minimum(full_low, high)
            m, l, acc0, acc1, acc2, acc3, _, _, _, _, _, _ = attend_tiles(
                m, l, acc0, acc1, acc2, acc3, m, m, m, m, m, m, 0, None, None, 0, False, q0, q1, q2,
                q3, query, scales, slope, soft_cap, key_ptr, value_ptr, k_inline_ptr, v_inline_ptr,
                table, k_base, v_base, k_block, k_token, v_block, v_token, s_base, s_block, s_token,
                low, edge, safe_low, kv_len, hole, kv_len, causal, window, chunk, lookback, prefix,
                ranges, num_ranges, 0, 0, True,
                SAME_ROWS, RSWA, 1, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED,
                V_WIDTH, V_USED, KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW,
                CHUNK, RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, False, False, 0, STAGES, REST,
            )  # fmt: skip
            low = tl.maximum(low, edge)
        full = tl.minimum(full_high, high)
        m, l, acc0, acc1, acc2, acc3, _, _, _, _, _, _ = attend_tiles(
            m, l, acc0, acc1, acc2, acc3, m, m, m, m, m, m, 0, None, None, 0, False, q0, q1, q2, q3,
            query, scales, slope, soft_cap, key_ptr, value_ptr, k_inline_ptr, v_inline_ptr, table,
            k_base, v_base, k_block, k_token, v_block, v_token, s_base, s_block, s_token, low, full,
            safe_low, kv_len, hole, kv_len, causal, window, chunk, lookback, prefix, ranges,
            num_ranges, 0, 0, False,
            SAME_ROWS, RSWA, 1, KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH,
            V_USED, KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK, RSWA,
            RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, False, False, 0, STAGES, REST,
        )  # fmt: skip
        m, l, acc0, acc1, acc2, acc3, _, _, _, _, _, _ = attend_tiles(
            m, l, acc0, acc1, acc2, acc3, m, m, m, m, m, m, 0, None, None, 0, False, q0, q1, q2, q3,
            query, scales, slope, soft_cap, key_ptr, value_ptr, k_inline_ptr, v_inline_ptr, table,
            k_base, v_base, k_block, k_token, v_block, v_token, s_base, s_block, s_token,
            tl.maximum(low, full), high, safe_low, kv_len, hole, kv_len, causal, window, chunk,
            lookback, prefix, ranges, num_ranges, 0, 0, True,
            SAME_ROWS, RSWA, 1, KV_TILE, BLOCK_SIZE,
            K_WIDTH, K_USED, V_WIDTH, V_USED, KIND, PLANES, INLINE, DECODE, COMPUTE, ALIGN, CAUSAL,
            WINDOW, CHUNK, RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE, False, False, 0, STAGES,
            REST,
        )  # fmt: skip
        if SIMPLE:
            m = m * scales
        token = recomputed(tile, DECODE) * QUERY_TILE + within
        at = begin + token
        wanted = token < query_len
        index = tl.arange(0, V_WIDTH)
        valid = index < V_USED
        write_rows(
            m, l, acc0, at, heads, wanted, plane_columns(index, 0, V_SIZE, KIND), valid, out_ptr,
            lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS,
            FP8_OUT, LSE, HARDWARE_E4M3,
        )  # fmt: skip
        if PLANES > 1:
            write_rows(
                m, l, acc1, at, heads, wanted, plane_columns(index, 1, V_SIZE, KIND), valid,
                out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head,
                lse_token, SINKS, FP8_OUT, False, HARDWARE_E4M3,
            )  # fmt: skip
        if PLANES > 2:
            write_rows(
                m, l, acc2, at, heads, wanted, plane_columns(index, 2, V_SIZE, KIND), valid,
                out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head,
                lse_token, SINKS, FP8_OUT, False, HARDWARE_E4M3,
            )  # fmt: skip
            write_rows(
                m, l, acc3, at, heads, wanted, plane_columns(index, 3, V_SIZE, KIND), valid,
                out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head,
                lse_token, SINKS, FP8_OUT, False, HARDWARE_E4M3,
            )  # fmt: skip
