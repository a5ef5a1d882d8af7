"""The portable split-KV kernel: decode, speculative verify and short extends.

A work item is a tile of query rows of one request, together with one segment group of that
request's keys. A query row is one query head of one query token; the heads of a tile share a KV
head. The step's plan (:mod:`builders.splitkv.planner`) gives every group of programs a run of
segments, which may begin and end in the middle of a work item. The programs of a group, one per
tile of heads, walk the same keys at the same time.

Each segment's state starts empty, and the states of a work item are folded in the order of its
segments. The bits of a result therefore depend on its request alone: neither on the rest of the
batch nor on where the plan cut the work.

A program that enters a work item at its start folds its segments in registers. A program that
enters later stores one state per segment. A counter, which resets itself, says which program of the
work item arrives last: that program folds the stored states and writes the result. Where the keys
of the same queries fill several segment groups, the states of the groups are folded in a second
round by the last program to arrive there. No program waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn.kernels.dense.query_rows import fold_parts, prepared_queries, write_rows
from attn.kernels.dense.tile import attend_tiles, store_state
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.masks import last_visible, seen_by_all
from attn.kernels.lang.stored import plane_columns
from builders.splitkv.device.segments import (
    first_visible,
    local_len,
    local_position,
    segment_of,
    segment_start,
)
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


@triton.jit
def _places(
    tile_of_heads, token, count, row, HEAD_TILES: tl.constexpr, TILE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The KV head of a tile of heads, and the token and query head of each of its rows ``[ROWS]``.

    The fourth result, ``[ROWS]`` bool, is False for the padding rows of the tile.
    """
    kv_head = tile_of_heads // HEAD_TILES
    in_group = (tile_of_heads % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (in_group < GROUP)
    return kv_head, token + row // TILE_HEADS, kv_head * GROUP + in_group, wanted


@triton.jit
def _fields_of(r, mine, rows_ptr, HEAD_LOOPS: tl.constexpr):
    """Pointer to the numbers of work item ``r``.

    ``mine`` points to the program group's share, which holds a copy of its first work item's
    numbers; the numbers of all others are read from the plan's table.
    """
    copy = mine + (_SHARE_FIELDS - _FIELDS)
    return tl.where(r == tl.load(mine), copy, rows_ptr + (r // HEAD_LOOPS) * _FIELDS)


@triton.jit
def _place_of(fields, loop, end):
    """The place of a work item's first KV tile among all KV tiles of the step.

    With ``end`` 1, the place behind its last KV tile.
    """
    return tl.load(fields + 7) + (loop + end) * tl.load(fields + 6)


_VARYING = [
    "groups",
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
    shares_ptr,
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
    s_block,
    s_token,
    s_head,
    scale_head,
    scale,
    soft_cap,
    groups,
    window,
    chunk,
    lookback,
    dcp_size,
    dcp_rank,
    dcp_interleave,
    num_ranges,
    HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEGMENT_GROUPS: tl.constexpr,
    AREA: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
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
    DEPENDS_ON_BATCH: tl.constexpr,
    FINISH_ROWS: tl.constexpr,
    FINISH_WIDTH: tl.constexpr,
    WAITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of the plan's work items; grid ``(groups * HEADS,)``.

    Shapes: query is ``[T, H, K_SIZE]``, out is ``[T, H, V_SIZE]``, LSE is ``[T, H]`` fp32. Key and
    value are ``[N, BLOCK_SIZE, Hk, words]``, and their strides count stored words. The shapes of
    the plan's tensors are in :class:`builders.splitkv.record.SplitPlan`.

    Flags: DCP says that the cache holds the keys of one rank only, see
    :class:`builders.splitkv.stripe.Stripe`. DEPENDS_ON_BATCH cuts work items between any two KV
    tiles, so that bits depend on the batch; benchmarks measure the cost of invariance against it.
    WAITS says that the kernel may start before the kernels ahead of it have ended.
    """
    if WAITS:
        # Wait before any read: kernels ahead write the plan, the queries and the keys. Every
        # program waits: a kernel behind takes the end of this one for the end of all before it.
        gdc_wait()
    USED: tl.constexpr = TILE_HEADS * QUERY_TOKENS
    EDGES: tl.constexpr = WINDOW or CHUNK or RSWA
    RUN: tl.constexpr = KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    pid = tl.program_id(0)
    lane = pid % HEADS
    mine = shares_ptr + (pid // HEADS) * _SHARE_FIELDS
    row = tl.arange(0, ROWS)
    first_row = tl.load(mine)
    # The loop needs the number of the step's tiles soon. Loading it here hides its latency. The
    # number is never negative, so this minimum is 0 and changes nothing but the load's place.
    unwanted = tl.minimum(tl.load(total_ptr + 1), 0)
    past_row = tl.load(mine + 2) + (tl.load(mine + 3) > 0).to(tl.int32) + unwanted
    # Registers are for keys. A work item's numbers are therefore loaded again where they are
    # needed, and with quantised caches the compiler may hoist nothing out of this loop.
    for r in tl.range(first_row, past_row, num_stages=1, disable_licm=PLANES > 1):
        total = tl.load(total_ptr + 1)
        shares = groups
        if DEPENDS_ON_BATCH:
            shares = tl.minimum(groups, total)
        is_last = r == tl.load(mine + 2)
        last_segment = tl.load(mine + 3)
        fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
        req = tl.load(fields)
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        kv_len = tl.load(fields + 3)
        first = tl.load(fields + 4)
        first_part = tl.load(fields + 8)
        parts = tl.load(fields + 9)
        segment_group = tl.load(fields + 10)
        begin = tl.where(r == tl.load(mine), tl.load(mine + 1), 0)
        base = tl.load(fields + 7) + (r % HEAD_LOOPS) * tl.load(fields + 6)
        owner = (base.to(tl.int64) * shares // total).to(tl.int32)
        if DEPENDS_ON_BATCH:
            # Shares start at tiles here, not at segments. The run of tiles that one program group
            # has of a work item counts as one part.
            tiles = tl.load(fields + 6)
            first_tile = tl.load(fields + 5)
            cut_low = first_tile + begin
            cut_high = first_tile + tl.where(is_last, last_segment, tiles)
            parts = ((base + tiles - 1).to(tl.int64) * shares // total).to(tl.int32) - owner + 1
            begin = tl.where(begin > 0, pid // HEADS - owner, 0)
            end = tl.where(cut_high > cut_low, begin + 1, begin)
            first_part = 0
        else:
            end = tl.where(is_last, last_segment, parts)
        if end > begin:
            tile_of_heads = (r % HEAD_LOOPS) * HEADS + lane
            kv_head, at, head, wanted = _places(
                tile_of_heads, token, count, row, HEAD_TILES, TILE_HEADS, GROUP
            )
            query = first + row // TILE_HEADS
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
            slope = scales
            if ALIBI > 0:
                slope = tl.load(slopes_ptr + head, mask=wanted, other=0.0).to(tl.float32)
            causal = 1
            if CAUSAL == 2:
                causal = tl.load(causal_ptr + req).to(tl.int32)
            prefix = 0
            if RSWA:
                # Engines may pass the largest int32 for "all keys"; rounding that up to a tile
                # would overflow.
                prefix = tl.minimum(tl.load(prefix_ptr + req), kv_len)
            ranges = ranges_ptr
            if RANGES:
                ranges = ranges_ptr + req.to(tl.int64) * num_ranges * 2
            last = first + count - 1
            if DCP:
                query = local_position(query, dcp_size, dcp_rank, dcp_interleave)
                first = local_position(first, dcp_size, dcp_rank, dcp_interleave)
                last = local_position(last, dcp_size, dcp_rank, dcp_interleave)
                kv_len = local_len(kv_len, dcp_size, dcp_rank, dcp_interleave)
            kv_start = first_visible(
                first,
                last,
                window,
                chunk,
                lookback,
                ranges,
                num_ranges,
                EDGES,
                CHUNK,
                RANGES,
                CLAMP,
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
            table = table_ptr + req.to(tl.int64) * table_row
            k_base = kv_head.to(tl.int64) * k_head
            v_base = kv_head.to(tl.int64) * v_head
            s_base = kv_head.to(tl.int64) * s_head
            M = tl.full([ROWS], float("-inf"), tl.float32)
            L = tl.zeros([ROWS], tl.float32)
            A0 = tl.zeros([ROWS, V_WIDTH], tl.float32)
            A1 = A0
            A2 = A0
            A3 = A0
            safe_low = kv_start
            hole = 0
            if RSWA:
                # Slots between prefix and window, if any, are seen by no query: never read them.
                apart = tl.cdiv(prefix, RUN) * RUN < kv_start
                safe_low = tl.where(apart, kv_start, 0)
                hole = tl.where(apart, prefix, 0)
            # A layer whose window is longer than the plan's starts before the plan's first segment.
            begins = first_part + begin
            stop = first_part + end
            if not DEPENDS_ON_BATCH:
                cut_low = segment_start(begins) // SEGMENT_UNIT
                cut_high = segment_start(stop) // SEGMENT_UNIT
            low = tl.maximum(cut_low, own_first)
            if (begin == 0) & (segment_group == 0):
                low = own_first
            high = tl.minimum(cut_high, own_last)
            all_low, all_high = seen_by_all(
                first, last, kv_len, causal, window, chunk, lookback, CAUSAL, WINDOW, CHUNK, RSWA
            )
            m = tl.full([ROWS], float("-inf"), tl.float32)
            l = tl.zeros([ROWS, KV_TILE], tl.float32)
            # The lending program belongs to the first group that starts inside this work item. It
            # starts inside no other one, so its state slots are free for this work item.
            lending_group = owner + 1
            slots = (lending_group * HEADS + lane) * AREA
            if begin > 0:
                # The fold reads a state for every segment of the part. Segments that no query of
                # this layer sees get an empty state.
                seen = begins
                unseen = stop
                if not DEPENDS_ON_BATCH:
                    seen = segment_of(low * SEGMENT_UNIT)
                    unseen = segment_of(tl.maximum(high - 1, 0) * SEGMENT_UNIT) + 1
                for s in range(begins, stop):
                    if (high <= low) | (s < seen) | (s >= unseen):
                        store_state(
                            states_ptr, sums_ptr, slots + s - first_part, m, L, A0, A1, A2, A3,
                            USED, V_WIDTH, PLANES,
                        )  # fmt: skip
            segment = begins
            if not DEPENDS_ON_BATCH:
                segment = segment_of(low * SEGMENT_UNIT)
            _, _, _, _, _, _, M, L, A0, A1, A2, A3 = attend_tiles(
                m, l, A0, A0, A0, A0, M, L, A0, A1, A2, A3, segment, states_ptr, sums_ptr,
                slots - first_part, begin > 0, q0, q1, q2, q3, query, scales, slope, soft_cap,
                key_ptr, value_ptr, k_inline_ptr, v_inline_ptr, table, k_base, v_base, k_block,
                k_token, v_block, v_token, s_base, s_block, s_token, low, high, safe_low, kv_len,
                hole, kv_len, causal, window, chunk, lookback, prefix, ranges, num_ranges,
                tl.cdiv(all_low, KV_TILE), all_high // KV_TILE, True, SAME_ROWS, RSWA, SEGMENT_UNIT,
                KV_TILE, BLOCK_SIZE, K_WIDTH, K_USED, V_WIDTH, V_USED, KIND, PLANES, INLINE, DECODE,
                COMPUTE, ALIGN, CAUSAL, WINDOW, CHUNK, RSWA, RANGES, CLAMP, SOFT_CAP, ALIBI, SIMPLE,
                True, DEPENDS_ON_BATCH, USED, STAGES,
            )  # fmt: skip
            fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
            token = tl.load(fields + 1)
            count = tl.load(fields + 2)
            tile_of_heads = (r % HEAD_LOOPS) * HEADS + lane
            kv_head, at, head, wanted = _places(
                tile_of_heads, token, count, row, HEAD_TILES, TILE_HEADS, GROUP
            )
            segment_groups = tl.load(fields + 11)
            is_whole = (begin == 0) & (end == parts)
            if is_whole & (segment_groups == 1):
                index = tl.arange(0, V_WIDTH)
                valid = index < V_USED
                columns = plane_columns(index, 0, V_SIZE, KIND)
                write_rows(
                    M, L, A0, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr,
                    v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT, LSE,
                    HARDWARE_E4M3,
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
                in_parts = (begin > 0) | (end < parts)
                after_prefix = 1
                if not DEPENDS_ON_BATCH:
                    # Only the last program to arrive needs this number, and then without delay.
                    after_prefix = tl.load(
                        starts_ptr + 2 * lending_group + 1, mask=in_parts, other=1
                    )
                segment_group = tl.load(fields + 10)
                loop = r % HEAD_LOOPS
                row_owner = owner
                spans = segment_groups > 1
                mine_too = slots
                if segment_groups > 1:
                    # The states of the segment groups go to slots of the first program that starts
                    # in the middle of these tokens' keys. Where no program starts there, one
                    # program has all segment groups and uses its own slots.
                    total = tl.load(total_ptr + 1)
                    which = r // HEAD_LOOPS - segment_group
                    place = _place_of(rows_ptr + which * _FIELDS, loop, 0)
                    row_owner = (place.to(tl.int64) * shares // total).to(tl.int32)
                    place = (
                        _place_of(rows_ptr + (which + segment_groups - 1) * _FIELDS, loop, 1) - 1
                    )
                    spans = (place.to(tl.int64) * shares // total).to(tl.int32) > row_owner
                    lends = tl.where(spans, row_owner + 1, row_owner)
                    mine_too = (lends * HEADS + lane) * AREA + SLOTS
                    mine_too += (tl.where(spans, 0, HEAD_LOOPS) + loop) * SEGMENT_GROUPS
                if begin == 0:
                    slot = tl.where(is_whole, mine_too + segment_group, slots)
                    store_state(
                        states_ptr, sums_ptr, slot, M, L, A0, A1, A2, A3, USED, V_WIDTH, PLANES
                    )
                counter = counters_ptr + slots // AREA
                # All threads must have stored their states before the counter says so.
                tl.debug_barrier()
                arrived = tl.atomic_add(
                    counter, end - begin, mask=in_parts, sem="acq_rel", scope="gpu"
                )
                ready = is_whole | (arrived + end - begin == parts)
                tl.store(counter, 0, mask=ready & in_parts)
                if ready:
                    # Level 0 folds the segments of this segment group, where several programs have
                    # them. Level 1 folds the segment groups.
                    for level in range(is_whole.to(tl.int32), tl.where(segment_groups > 1, 2, 1)):
                        slot = slots
                        after = after_prefix
                        count_of = parts
                        goes_on = ready
                        if level == 1:
                            slot = mine_too
                            after = after_prefix * 0 + 1
                            count_of = segment_groups
                            goes_on = segment_group + 1 == segment_groups
                            tl.debug_barrier()
                            if spans:
                                counter = counters_ptr + groups * HEADS
                                counter += ((row_owner + 1) * HEADS + lane) * HEAD_LOOPS + loop
                                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                                goes_on = arrived + 1 == segment_groups
                                if goes_on:
                                    tl.store(counter, 0)
                        if goes_on:
                            fold_parts(
                                kv_head, (tile_of_heads % HEAD_TILES) * TILE_HEADS, token, count,
                                slot, after, count_of, mine_too + segment_group,
                                (level == 0) & (segment_groups > 1), states_ptr, sums_ptr, out_ptr,
                                lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head,
                                lse_token, GROUP, TILE_HEADS, USED, V_WIDTH, PLANES, KIND, V_USED,
                                V_SIZE, FINISH_ROWS, FINISH_WIDTH, SINKS, FP8_OUT, LSE,
                                HARDWARE_E4M3,
                            )  # fmt: skip
