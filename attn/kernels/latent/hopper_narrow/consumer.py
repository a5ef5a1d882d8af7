"""The consumers of the narrow Hopper latent kernel: eight warps.

For scores a warp has some of the keys, with all their columns. For the output it has some of the
columns, of all keys. So no two warps read the same byte of the cache for the same product.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_decode.finish import (
    arrive_and_fold,
    fold_states,
    lending_group_of,
    place_of,
    slots_of,
    store_state,
    write_state,
)
from attn.kernels.dense.hopper_decode.parts import FIELDS, load_work_item, share_at
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.tile import power_of_two_guard
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.packed import e4m3_planes
from attn.kernels.lang.structures import Head, Out, Plan, State, Tile, causal_mask
from builders.splitkv.device.segments import segment_of, segment_start

_WARPS = tl.constexpr(8)
_WIDTH = tl.constexpr(512)
_KEPT = tl.constexpr(128)
"""Columns of the queries' left half that stay in registers; the rotary columns do so too."""


@gluon.jit
def _clear_tail(
    rows, stage, live, BOXES: gl.constexpr, TILE: gl.constexpr, RUN: gl.constexpr
):  # fmt: skip
    """Zero a half of a tile's values from key ``live`` to the end of its run of RUN keys.

    No request wrote those slots, so they may hold NaN, and zero times NaN is NaN. The swizzle of a
    row's columns does not matter to zeros.
    """
    zeros = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [_WARPS], [0]))
    for row in range(live, (live // RUN + 1) * RUN):
        for box in gl.static_range(BOXES):
            rows.index((stage * BOXES + box) * TILE + row).store(zeros)


@gluon.jit
def _sum_of_own(x):
    """Sum ``[16, keys]`` within each thread: ``[16, 32]``, for a row's 32 threads in all warps."""
    x = gl.reshape(x, [16, x.shape[1] // (8 * _WARPS), 4 * _WARPS, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _row_maximum(x, exchange):
    """Maximum of each row, whose columns lie in eight warps that meet once, in shared memory."""
    SCORES: gl.constexpr = x.type.layout
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2], [0, 4]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0], [0, 0]], [], [16, 8],
    )  # fmt: skip
    # Take the maximum within a thread, then within its warp.
    x = gl.max(gl.max(gl.reshape(x, [16, x.shape[1] // (8 * _WARPS), _WARPS, 8]), 1), 2)
    exchange.store(x)
    # The exchange needs a barrier here, and the compiler inserts it.
    return gl.convert_layout(gl.max(exchange.load(EVERYWHERE), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _stored_order(part, E4M3: gl.constexpr):
    """Columns of queries in the order of shared memory, which :func:`_query_of` explains."""
    if E4M3:
        ROWS: gl.constexpr = part.shape[0]
        WIDTH: gl.constexpr = part.shape[1]
        part = gl.permute(gl.reshape(part, [ROWS, WIDTH // 32, 2, 4, 2, 2]), (0, 1, 4, 2, 3, 5))
        part = gl.reshape(part, [ROWS, WIDTH])
    return part


@gluon.jit
def _query_of(q, OUTPUT: gl.constexpr, E4M3: gl.constexpr):
    """Queries, loaded from shared memory as the first operand of a product.

    A thread has four neighbouring columns of an e4m3 key, where a 16-bit operand has two and then
    two more further on. Queries in natural order would be read 8 bytes at a time and then moved.
    They are stored in an order that lets a thread read 16 bytes at once, each where it belongs.
    """
    left = q.load(gl.DotOperandLayout(0, OUTPUT, 2))
    if E4M3:
        WIDTH: gl.constexpr = q.shape[1]
        left = gl.permute(gl.reshape(left, [16, WIDTH // 32, 2, 2, 4, 2]), (0, 1, 3, 4, 2, 5))
        left = gl.reshape(left, [16, WIDTH])
        left = gl.convert_layout(left, gl.DotOperandLayout(0, OUTPUT, 4), assert_trivial=True)
    return left


@gluon.jit
def _scored(left, keys, scores, E4M3: gl.constexpr):
    """``scores`` plus products of more columns; bytes become fp16 as they are loaded."""
    K_WIDTH: gl.constexpr = 4 if E4M3 else 2
    SCORES: gl.constexpr = scores.type.layout
    keys = keys.permute((1, 0)).load(gl.DotOperandLayout(1, SCORES, K_WIDTH)).to(left.dtype)
    return mma_v2(left, keys, scores)


@gluon.jit
def _values(v, HALF: gl.constexpr, RIGHT: gl.constexpr, E4M3: gl.constexpr):
    """Half of a tile's values as two operands, whose columns :func:`_joined` puts in order."""
    if E4M3:
        low, high = e4m3_planes(v.load(RIGHT))
    else:
        low = v.slice(0, HALF, dim=1).load(RIGHT)
        high = v.slice(HALF, HALF, dim=1).load(RIGHT)
    return low, high


@gluon.jit
def _scores_of(
    stage, kept_left, kept_rope, q_left, q_right, k_left, k_right, k_rope, OUTPUT: gl.constexpr,
    E4M3: gl.constexpr,
):  # fmt: skip
    """Scores of a tile, as two sums over columns that are added at the end.

    Within one sum every product waits for the product before it. Every warp reads the queries for
    its keys, which are more bytes than the keys. Shared memory is the limit with a cache of e4m3,
    so a third of the queries' columns stay in registers; no more registers are free.
    """
    KEPT: gl.constexpr = kept_left.shape[1]
    KV_TILE: gl.constexpr = k_left.shape[1]
    keys = k_left.index(stage)
    nothing = gl.zeros([16, KV_TILE], gl.float32, OUTPUT)
    scores = _scored(kept_rope, k_rope.index(stage), nothing, E4M3)
    scores = _scored(kept_left, keys.slice(0, KEPT, dim=1), scores, E4M3)
    q = _query_of(q_left.slice(KEPT, 256 - KEPT, dim=1), OUTPUT, E4M3)
    scores = _scored(q, keys.slice(KEPT, 256 - KEPT, dim=1), scores, E4M3)
    q = _query_of(q_right, OUTPUT, E4M3)
    return scores + _scored(q, k_right.index(stage), nothing, E4M3)


@gluon.jit
def _seen(scores, tile, limit, all_high):
    """Scores of a tile, with -inf for keys that a row does not see."""
    KV_TILE: gl.constexpr = scores.shape[1]
    if (tile + 1) * KV_TILE > all_high:
        KEYS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        key = tile * KV_TILE + gl.arange(0, KV_TILE, layout=KEYS)
        scores = gl.where(key[None, :] <= limit[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _narrow_tile(
    tile, turn, m, l, even0, odd0, even1, odd1, kept_left, kept_rope, q_left, q_right, k_left,
    k_right, k_rope, v_left, v_right, left_rows, right_rows, exchange, turned, full, empty, factor,
    limit, all_high, kv_len, RUN: gl.constexpr, STAGES: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """One tile of keys: scores, online softmax, output.

    ``l`` has a sum for each thread. Each half of the output's columns has two accumulators: the
    even and the odd columns with E4M3, the first and the second half of the columns otherwise.
    """
    OUTPUT: gl.constexpr = even0.type.layout
    HALF: gl.constexpr = even0.shape[1]
    KV_TILE: gl.constexpr = turned.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, OUTPUT, 2)
    BOXES: gl.constexpr = 2 if E4M3 else 4
    stage = turn % STAGES
    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
    scores = _scores_of(
        stage, kept_left, kept_rope, q_left, q_right, k_left, k_right, k_rope, OUTPUT, E4M3
    )
    scores = _seen(scores, tile, limit, all_high)
    top = gl.maximum(m, _row_maximum(scores, exchange))
    # A row that has seen no key yet has a maximum of -inf.
    base = gl.where(top == float("-inf"), 0.0, top)
    # Subtract before multiplying: products of large scores have large rounding errors.
    weights = gl.exp2((scores - base[:, None]) * factor[:, None])
    shrink = gl.exp2((m - base) * factor)
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    own = own[:, None].broadcast_to(16, l.shape[1])
    l = gl.fma(l, own, _sum_of_own(weights))
    turned.store(weights.to(turned.dtype))
    left = turned.load(LEFT)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    live = kv_len - tile * KV_TILE
    if (live < KV_TILE) & (live % RUN != 0):
        _clear_tail(left_rows, stage, live, BOXES, KV_TILE, RUN)
        _clear_tail(right_rows, stage, live, BOXES, KV_TILE, RUN)
        # The zeros must be visible before other threads read them and before TMA overwrites them.
        fence_async_shared()
        thread_barrier()
    low, high = _values(v_left.index(stage), HALF, RIGHT, E4M3)
    even0 = mma_v2(left, low, even0 * shrink)
    odd0 = mma_v2(left, high, odd0 * shrink)
    low, high = _values(v_right.index(stage), HALF, RIGHT, E4M3)
    # All warps must have read the tile before its stage is freed.
    thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    even1 = mma_v2(left, low, even1 * shrink)
    odd1 = mma_v2(left, high, odd1 * shrink)
    return top, l, even0, odd0, even1, odd1


@gluon.jit
def _query_part(
    query_ptr, token, count, in_group, first: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, TILE_HEADS: gl.constexpr, QUERY_TOKEN: gl.constexpr,
    QUERY_HEAD: gl.constexpr,
):  # fmt: skip
    """Some columns of the work item's queries as fp32, and the largest magnitude of each row.

    Rows past the item's query tokens or heads are zeros.
    """
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [_WARPS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    head = in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (head < GROUP)
    offset = (token + row // TILE_HEADS).to(gl.int64) * QUERY_TOKEN + head * QUERY_HEAD
    at = query_ptr + offset[:, None] + column[None, :]
    part = gl.load(at, mask=wanted[:, None], other=0.0).to(gl.float32)
    return part, gl.max(gl.abs(part), 1)


@gluon.jit
def _scaled(part, by, DTYPE: gl.constexpr):
    """Rows of queries times a power of two each, in the type of products."""
    by = gl.convert_layout(by, gl.SliceLayout(1, part.type.layout))
    return (part * by[:, None]).to(DTYPE)


@gluon.jit
def _load_queries(
    query_ptr, token, count, in_group, q_left, q_right, q_rope, SUMS: gl.constexpr,
    GROUP: gl.constexpr, TILE_HEADS: gl.constexpr, QUERY_TOKEN: gl.constexpr,
    QUERY_HEAD: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Copy the work item's queries to shared memory, in the type of products.

    With E4M3 the type is fp16, and every row is multiplied by a power of two that brings bf16 into
    fp16's range. Returns the factor of each row that undoes it; 1 without E4M3.
    """
    left, most = _query_part(
        query_ptr, token, count, in_group, 0, 256, GROUP, TILE_HEADS, QUERY_TOKEN, QUERY_HEAD
    )
    most = gl.convert_layout(most, SUMS)
    right, other = _query_part(
        query_ptr, token, count, in_group, 256, 256, GROUP, TILE_HEADS, QUERY_TOKEN, QUERY_HEAD
    )
    most = gl.maximum(most, gl.convert_layout(other, SUMS))
    rope, other = _query_part(
        query_ptr, token, count, in_group, 512, 64, GROUP, TILE_HEADS, QUERY_TOKEN, QUERY_HEAD
    )
    most = gl.maximum(most, gl.convert_layout(other, SUMS))
    if E4M3:
        down, up = power_of_two_guard(most)
    else:
        down = gl.full([16], 1.0, gl.float32, SUMS)
        up = down
    # All warps must have read the previous item's queries.
    thread_barrier()
    q_left.store(_stored_order(_scaled(left, down, q_left.dtype), E4M3))
    q_right.store(_stored_order(_scaled(right, down, q_left.dtype), E4M3))
    q_rope.store(_stored_order(_scaled(rope, down, q_left.dtype), E4M3))
    thread_barrier()
    return up


@gluon.jit
def _side_by_side(left, right):
    """Concatenate the columns of ``left`` and ``right``."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [16, 2 * left.shape[1]])


@gluon.jit
def _joined(even0, odd0, even1, odd1, E4M3: gl.constexpr):
    """Combine the four accumulators into all columns of the output, in natural order."""
    if E4M3:
        left = gl.reshape(gl.join(even0, odd0), [16, _WIDTH // 2])
        right = gl.reshape(gl.join(even1, odd1), [16, _WIDTH // 2])
    else:
        left = _side_by_side(even0, odd0)
        right = _side_by_side(even1, odd1)
    return _side_by_side(left, right)


@gluon.jit
def consume_narrow(
    query_ptr, q_left, q_right, q_rope, k_left, k_right, k_rope, v_left, v_right, left_rows,
    right_rows, exchange, turned, full, empty, out_ptr, lse_ptr, k_scale_ptr, rows_ptr, total_ptr,
    starts_ptr, shares_ptr, counters_ptr, states_ptr, sums_ptr, factor, groups, HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr, GROUP: gl.constexpr, TILE_HEADS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr, SLOTS: gl.constexpr, SEGMENT_GROUPS: gl.constexpr,
    AREA: gl.constexpr, SEGMENT_UNIT: gl.constexpr, KV_TILE: gl.constexpr, RUN: gl.constexpr,
    STAGES: gl.constexpr, QUERY_TOKEN: gl.constexpr, QUERY_HEAD: gl.constexpr,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr,
    FINISH_ROWS: gl.constexpr, FINISH_WIDTH: gl.constexpr, LSE: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Process the program's share of the plan."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, _WARPS], [16, 8])
    SUMS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    mask = causal_mask()
    plan = Plan(
        rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
        counters_ptr=counters_ptr, states_ptr=states_ptr, sums_ptr=sums_ptr, groups=groups,
        HEADS=HEADS, HEAD_LOOPS=HEAD_LOOPS, HEAD_TILES=1, SLOTS=SLOTS,
        SEGMENT_GROUPS=SEGMENT_GROUPS, AREA=AREA, SEGMENT_UNIT=SEGMENT_UNIT,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
        out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False, FP8_OUT=False,
        LSE=LSE,
    )  # fmt: skip
    sizes = Tile(
        GROUP=GROUP, TILE_HEADS=TILE_HEADS, USED=TILE_HEADS * QUERY_TOKENS, ROWS=16, SIZE=_WIDTH,
        DTYPE=None, E4M3=E4M3, SCORES=OUTPUT, OUTPUT=OUTPUT, CONSUMERS=1, FINISH_ROWS=FINISH_ROWS,
        FINISH_WIDTH=FINISH_WIDTH,
    )  # fmt: skip
    lane = gl.program_id(0) % HEADS
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    turn = 0
    for r in range(first_row, past_row):
        work = load_work_item(r, lane, mine, fields, begin, mask, KV_TILE, SEGMENT_UNIT)
        first, kv_len, low, high = work.first, work.kv_len, work.low, work.high
        if work.end > begin:
            in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
            first_part = gl.load(fields + 8)
            v_factor = 1.0
            if E4M3:
                v_factor = gl.load(k_scale_ptr)
            up = _load_queries(
                query_ptr, gl.load(fields + 1), gl.load(fields + 2), in_group, q_left, q_right,
                q_rope, SUMS, GROUP, TILE_HEADS, QUERY_TOKEN, QUERY_HEAD, E4M3,
            )  # fmt: skip
            kept_left = _query_of(q_left.slice(0, _KEPT, dim=1), OUTPUT, E4M3)
            kept_rope = _query_of(q_rope, OUTPUT, E4M3)
            natural = up * (factor * v_factor)
            row = gl.arange(0, 16, layout=SUMS)
            # Last visible key, not the key after it: LLVM would add that 1 in pairs of 16 bits,
            # which ptxas 12.8 gets wrong.
            limit = gl.minimum(first + row // TILE_HEADS, kv_len - 1)
            all_high = gl.minimum(first + 1, kv_len)
            zero = gl.zeros([16, _WIDTH // 4], gl.float32, OUTPUT)
            A = _joined(zero, zero, zero, zero, E4M3)
            STATE: gl.constexpr = A.type.layout
            M = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, STATE))
            L = gl.zeros([16], gl.float32, gl.SliceLayout(1, STATE))
            parts = gl.load(fields + 9)
            is_all = (begin == 0) & (work.end == parts) & (gl.load(fields + 11) == 1)
            lending_group = 0
            if not is_all:
                lending_group = lending_group_of(place_of(fields, r % HEAD_LOOPS, 0), plan)
            slots = slots_of(work, lending_group, plan)
            # The plan is causal like the kernel: every segment has a key that some row sees.
            seen = segment_of(low * SEGMENT_UNIT)
            unseen = segment_of(gl.maximum(high - 1, 0) * SEGMENT_UNIT) + 1
            unseen = gl.where(high > low, unseen, seen)
            for s in range(seen, unseen):
                m = gl.full([16], float("-inf"), gl.float32, SUMS)
                l = _sum_of_own(gl.zeros([16, KV_TILE], gl.float32, OUTPUT))
                even0 = zero
                odd0 = zero
                even1 = zero
                odd1 = zero
                from_tile = gl.maximum(segment_start(s) // SEGMENT_UNIT, low)
                to_tile = gl.minimum(segment_start(s + 1) // SEGMENT_UNIT, high)
                for tile in range(from_tile, to_tile):
                    m, l, even0, odd0, even1, odd1 = _narrow_tile(
                        tile, turn, m, l, even0, odd0, even1, odd1, kept_left, kept_rope, q_left,
                        q_right, k_left, k_right, k_rope, v_left, v_right, left_rows, right_rows,
                        exchange, turned, full, empty, natural, limit, all_high, kv_len, RUN,
                        STAGES, E4M3,
                    )  # fmt: skip
                    turn += 1
                m = gl.convert_layout(m * natural, gl.SliceLayout(1, STATE))
                total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, STATE))
                acc = _joined(even0, odd0, even1, odd1, E4M3)
                state = State(m=m, l=total, acc=acc)
                if begin > 0:
                    store_state(plan, slots + s - first_part, state, sizes, 0)
                else:
                    folded = fold_states(State(m=M, l=L, acc=A), state)
                    M, L, A = folded.m, folded.l, folded.acc
            # These are loaded once more instead of being kept in registers during the loop.
            token = gl.load(fields + 1)
            count = gl.load(fields + 2)
            whole = State(m=M, l=L, acc=A)
            if is_all:
                place = gl.arange(0, 16, layout=gl.SliceLayout(1, STATE))
                heads = in_group + place % TILE_HEADS
                column = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, STATE))
                at = token + place // TILE_HEADS
                wanted = (place < count * TILE_HEADS) & (heads < GROUP)
                write_state(whole, at, heads, wanted, column, v_factor, out)
            else:
                head = Head(kv_head=0, in_group=in_group, natural=natural, v_factor=v_factor)
                arrive_and_fold(work, head, whole, lending_group, plan, out, sizes, 0, _WARPS)
        begin = 0
        fields = rows_ptr + wide(((r + 1) // HEAD_LOOPS) * FIELDS)
