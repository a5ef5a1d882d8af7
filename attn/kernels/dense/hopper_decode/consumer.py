"""The consumers of the split-KV kernel: warp groups that multiply."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_decode.finish import finish_part, lender_of, store_state
from attn.kernels.dense.hopper_decode.parts import FIELDS, part_at, share_at
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.query_rows import write_rows
from attn.kernels.dense.tile import fold, power_of_two_guard
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.masks import biased, reach_of
from attn.kernels.lang.opaque import opaque_zero, program_number
from builders.splitkv.device.segments import segment_of, segment_start

_LOG2E = tl.constexpr(1.4426950408889634)


@gluon.jit
def _clear_tail(
    v_runs, stage, live, KV_TILE: gl.constexpr, HALVES: gl.constexpr, RUN: gl.constexpr
):
    """Zero the values from ``live`` to the end of its run: nobody wrote them, they may be NaN."""
    RUNS: gl.constexpr = KV_TILE // RUN
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    run = live // RUN
    row = run * RUN + gl.arange(0, RUN, layout=gl.SliceLayout(1, LAYOUT))
    for half in gl.static_range(HALVES):
        box = v_runs.index((stage * HALVES + half) * RUNS + run)
        rows = box.load(LAYOUT)
        box.store(gl.where((row < live)[:, None], rows, gl.zeros_like(rows)))
    # Before TMA overwrites them, and before other threads and wgmma read them.
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _sum_of_own(x, KV_TILE: gl.constexpr):
    """``[ROWS, KV_TILE]`` summed up by thread: ``[16, 16]``, a row's threads over all warps; where
    a row is one warp's, ``[64, 4]``.
    """
    ROWS: gl.constexpr = x.shape[0]
    THREADS: gl.constexpr = 16 if ROWS == 16 else 4
    x = gl.reshape(x, [ROWS, KV_TILE // (2 * THREADS), THREADS, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _row_maximum(x, exchange, KV_TILE: gl.constexpr):
    """Maximum of each row, whose columns lie in four warps: they meet once, in shared memory."""
    SCORES: gl.constexpr = x.type.layout
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [],
        [16, 4],
    )  # fmt: skip
    # First what a thread has, then what its warp has.
    x = gl.max(gl.max(gl.reshape(x, [16, KV_TILE // 32, 4, 8]), 1), 2)
    exchange.store(x)
    # A barrier of the warp group belongs here, and is put here by the compiler.
    return gl.convert_layout(gl.max(exchange.load(EVERYWHERE), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _e4m3_planes(words):
    """fp16 of the elements in the low and in the high byte of words."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; .reg .b16 low, high; prmt.b32 a, $2, 0, 0x3120; mov.b32 {low, high}, a; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _joined(low, high, WIDTH: gl.constexpr):
    """Planes of columns side by side again; one plane is all of them."""
    if low.shape[1] < WIDTH:
        low = gl.reshape(gl.join(low, high), [low.shape[0], WIDTH])
    return low


@gluon.jit
def _queries_of(first, m, TILE_HEADS: gl.constexpr):
    """Positions of the tile's rows, whose maxima are ``m``."""
    return first + gl.arange(0, m.shape[0], layout=m.type.layout) // TILE_HEADS


@gluon.jit
def _tile(
    tile, turn, q, m, l, acc, odd, k_tiles, v_tiles, v_runs, exchange, turned, k_full, v_full,
    empty, factor, soft_cap, first, causal, kv_len, mask, range_first, range_last, all_low,
    all_high, DTYPE: gl.constexpr, TILE_HEADS: gl.constexpr, KV_TILE: gl.constexpr,
    HALVES: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    SOFT_CAP: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """One tile of keys: scores, online softmax, output. ``l`` is summed up by thread."""
    ROWS: gl.constexpr = acc.shape[0]
    OUTPUT: gl.constexpr = acc.type.layout
    K_WIDTH: gl.constexpr = 4 if E4M3 else 2
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    SCORES: gl.constexpr = OUTPUT if ROWS == 16 else BY_KEY
    stage = turn % STAGES
    phase = (turn // STAGES) & 1
    if CONSUMERS > 1:
        # What was in this stage before may have been the other consumer's, and still be on its way:
        # then the barrier is two phases behind, which looks like none.
        mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.wait(k_full.index(stage), phase)
    keys = k_tiles.index(stage).permute((1, 0))
    zero = gl.zeros([ROWS, KV_TILE], gl.float32, SCORES)
    if ROWS == 16:
        keys = keys.load(gl.DotOperandLayout(1, SCORES, K_WIDTH))
        scores = mma_v2(q, keys.to(gl.float16) if E4M3 else keys, zero)
    else:
        scores = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    scale = factor
    by_row = factor[:, None] if E4M3 else factor
    if SOFT_CAP:
        scores = biased(scores * by_row, None, None, soft_cap, True, 0, False)
        scale = 1.0
        by_row = 1.0
    edge = (tile + 1) * KV_TILE > all_high
    if mask.WINDOW or mask.CHUNK:
        edge = edge | (tile * KV_TILE < all_low)
    if edge:
        key = tile * KV_TILE + gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, SCORES))
        query = _queries_of(first, m, TILE_HEADS)
        reach = reach_of(query, kv_len, causal, mask.CAUSAL)
        scores = mask.masked(scores, query, key, reach, kv_len, range_first, range_last)
    if ROWS == 16:
        top = gl.maximum(m, _row_maximum(scores, exchange, KV_TILE))
    else:
        top = gl.maximum(m, gl.max(scores, 1))
    # A row may see nothing so far.
    base = gl.where(top == float("-inf"), 0.0, top)
    # Not the difference of products, whose rounding error is large where scores are.
    weights = gl.exp2((scores - base[:, None]) * by_row)
    shrink = gl.exp2((m - base) * scale)
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    l = gl.fma(l, own[:, None].broadcast_to(ROWS, l.shape[1]), _sum_of_own(weights, KV_TILE))
    if ROWS == 16:
        turned.store(weights.to(DTYPE))
        left = turned.load(gl.DotOperandLayout(0, OUTPUT, 2))
    else:
        left = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, OUTPUT, 2))
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    acc = acc * shrink
    mbarrier.wait(v_full.index(stage), phase)
    live = kv_len - tile * KV_TILE
    if (live < KV_TILE) & (live % RUN != 0):
        _clear_tail(v_runs, stage, live, KV_TILE, HALVES, RUN)
    if ROWS == 16:
        values = v_tiles.index(stage).load(gl.DotOperandLayout(1, OUTPUT, 2))
        mbarrier.arrive(empty.index(stage), count=1)
        if E4M3:
            values, odd_values = _e4m3_planes(values)
            odd = mma_v2(left, odd_values, odd * shrink)
        acc = mma_v2(left, values, acc)
    else:
        # Not left in flight over the loop's edge, where ptxas would serialise it.
        acc = warpgroup_mma(left, v_tiles.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
    return top, l, acc, odd


@gluon.jit
def _send(m, l, acc, times, letter, top, sums, sent, taken):
    """A state to the other consumer, who has taken all before it."""
    mbarrier.wait(taken, (times & 1) ^ 1)
    letter.index(0).store(acc)
    top.store(m)
    sums.store(l)
    mbarrier.arrive(sent, count=1)


@gluon.jit
def _with_sent(m, l, acc, times, letter, top, sums, sent, taken):
    """A state, and the one that the other consumer sent folded onto it."""
    STATE: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    mbarrier.wait(sent, times & 1)
    m1 = top.load(ROW)
    l1 = sums.load(ROW)
    acc1 = letter.index(0).load(STATE)
    mbarrier.arrive(taken, count=1)
    return fold(m, l, acc, m1, l1, acc1)


@gluon.jit
def consume(
    PART: gl.constexpr, query_ptr, k_tiles, v_tiles, v_runs, queries, exchange, turned, letter,
    letter_top, letter_sum, k_full, v_full, empty, sent, taken, out_ptr, lse_ptr, output_scale_ptr,
    rows_ptr, total_ptr, starts_ptr, shares_ptr, counters_ptr, states_ptr, sums_ptr, mask,
    sinks_ptr, k_scale_ptr, v_scale_ptr, scale_head, query_token, query_head, out_token,
    out_head, lse_token, factor, soft_cap, groups, HEADS: gl.constexpr, HEAD_LOOPS: gl.constexpr,
    HEAD_TILES: gl.constexpr, GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    BUNDLES: gl.constexpr, AREA: gl.constexpr, SEGMENT_UNIT: gl.constexpr, DTYPE: gl.constexpr,
    KV_TILE: gl.constexpr, WIDTH: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, FINISH_ROWS: gl.constexpr, FINISH_WIDTH: gl.constexpr,
    SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8_OUT: gl.constexpr,
    LSE: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """All parts that the program takes. Of 16 rows, warps lie along keys for scores and along
    columns for output, so that no key is read twice; of 64, each warp has 16.

    Of two consumers, the one that takes even tiles, and folds, finishes and writes; or (PART 1) the
    one that takes odd tiles.
    """
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    BY_COLUMN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SCORES: gl.constexpr = NARROW if ROWS == 16 else BY_KEY
    OUTPUT: gl.constexpr = NARROW if ROWS == 16 else BY_COLUMN
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    USED: gl.constexpr = TILE_HEADS * QUERY_TOKENS
    HALVES: gl.constexpr = WIDTH // (128 if E4M3 else 64)
    # States under way at a row's end: what there are registers for, up to all of a bundle.
    CELLS: gl.constexpr = FINISH_ROWS * FINISH_WIDTH // 128
    FEW: gl.constexpr = 8 if ROWS == 16 and CONSUMERS == 1 else 4
    AT_ONCE: gl.constexpr = 16 if CELLS * CONSUMERS <= 4 else 12 if CELLS * CONSUMERS <= 8 else FEW
    lane = program_number() % HEADS
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    exchange = exchange.index(PART)
    turned = turned.index(PART)
    queries = queries.index(PART)
    turn = 0
    letters = 0
    for r in range(first_row, past_row):
        end, req, kv_len, first, last, causal, _, low, high = part_at(
            r, mine, fields, begin, mask, KV_TILE, SEGMENT_UNIT
        )
        if end > begin:
            token = gl.load(fields + 1)
            count = gl.load(fields + 2)
            first_part = gl.load(fields + 8)
            tile_of_heads = (r % HEAD_LOOPS) * HEADS + lane
            kv_head = tile_of_heads // HEAD_TILES
            in_group = (tile_of_heads % HEAD_TILES) * TILE_HEADS
            q_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
            q_column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LOADED))
            q_head = in_group + q_row % TILE_HEADS
            offset = (token + q_row // TILE_HEADS).to(gl.int64) * wide(query_token)
            offset += (kv_head * GROUP + q_head) * query_head
            wanted = (q_row < count * TILE_HEADS) & (q_head < GROUP)
            q = gl.load(
                query_ptr + offset[:, None] + q_column[None, :], mask=wanted[:, None], other=0.0
            )
            natural = factor
            v_factor = 1.0
            if E4M3:
                natural = natural * gl.load(k_scale_ptr + kv_head * scale_head)
                v_factor = gl.load(v_scale_ptr + kv_head * scale_head)
                up = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, LOADED))
                if q.dtype == gl.bfloat16:
                    # fp16 has not its range: a power of two per row moves it there.
                    q = q.to(gl.float32)
                    down, up = power_of_two_guard(gl.max(gl.abs(q), 1))
                    q = q * down[:, None]
                q = q.to(gl.float16)
                natural = natural * gl.convert_layout(up, SUMS)
            if ROWS == 16:
                q = gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 4 if E4M3 else 2))
            else:
                # Nobody multiplies the row's before it any more: each waits for its products.
                thread_barrier()
                queries.store(q)
                fence_async_shared()
                thread_barrier()
                q = queries
            top = gl.full([ROWS], float("-inf"), gl.float32, SUMS)
            range_first, range_last = mask.own_range(_queries_of(first, top, TILE_HEADS), req)
            all_low, all_high = mask.seen_by_all(first, last, kv_len, causal)
            zero = gl.zeros([ROWS, WIDTH // 2 if E4M3 else WIDTH], gl.float32, OUTPUT)
            A = _joined(zero, zero, WIDTH)
            STATE: gl.constexpr = A.type.layout
            M = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, STATE))
            L = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, STATE))
            is_all = True
            lender = 0
            if PART == 0:
                parts = gl.load(fields + 9)
                is_all = (begin == 0) & (end == parts) & (gl.load(fields + 11) == 1)
                if not is_all:
                    base = gl.load(fields + 7) + (r % HEAD_LOOPS) * gl.load(fields + 6)
                    lender = lender_of(base, groups, total_ptr)
            slots = (lender * HEADS + lane) * AREA
            seen = segment_of(low * SEGMENT_UNIT, True)
            unseen = segment_of(gl.maximum(high - 1, 0) * SEGMENT_UNIT, True) + 1
            unseen = gl.where(high > low, unseen, seen)
            if PART == 0:
                if begin > 0:
                    # Segments of which this layer's queries see nothing are states all the same.
                    for s in range(first_part + begin, first_part + end):
                        if (s < seen) | (s >= unseen):
                            store_state(
                                states_ptr, sums_ptr, slots + s - first_part, M, L, A,
                                opaque_zero(), USED, WIDTH,
                            )  # fmt: skip
            for s in range(seen, unseen):
                m = top
                l = _sum_of_own(gl.zeros([ROWS, KV_TILE], gl.float32, SCORES), KV_TILE)
                acc = zero
                odd = zero
                from_tile = gl.maximum(segment_start(s) // SEGMENT_UNIT, low)
                to_tile = gl.minimum(segment_start(s + 1) // SEGMENT_UNIT, high)
                if CONSUMERS > 1:
                    from_tile += (from_tile ^ PART) & 1
                for tile in range(from_tile, to_tile, CONSUMERS):
                    m, l, acc, odd = _tile(
                        tile, turn + tile - low, q, m, l, acc, odd, k_tiles, v_tiles, v_runs,
                        exchange, turned, k_full, v_full, empty, natural, soft_cap, first, causal,
                        kv_len, mask, range_first, range_last, all_low, all_high, DTYPE, TILE_HEADS,
                        KV_TILE, HALVES, RUN, STAGES, CONSUMERS, SOFT_CAP, E4M3,
                    )  # fmt: skip
                if not SOFT_CAP:
                    m = m * natural
                acc = _joined(acc, odd, WIDTH)
                m = gl.convert_layout(m, gl.SliceLayout(1, STATE))
                total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, STATE))
                if PART == 1:
                    _send(m, total, acc, letters, letter, letter_top, letter_sum, sent, taken)
                else:
                    if CONSUMERS > 1:
                        m, total, acc = _with_sent(
                            m, total, acc, letters, letter, letter_top, letter_sum, sent, taken
                        )
                    if begin > 0:
                        store_state(
                            states_ptr, sums_ptr, slots + s - first_part, m, total, acc,
                            opaque_zero(), USED, WIDTH,
                        )  # fmt: skip
                    else:
                        M, L, A = fold(M, L, A, m, total, acc)
                letters += 1
            turn += gl.maximum(high - low, 0)
            if PART == 0:
                # Once more, instead of being kept in registers meanwhile.
                token = gl.load(fields + 1)
                count = gl.load(fields + 2)
                if is_all:
                    place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STATE)) + opaque_zero()
                    in_tile = in_group + place % TILE_HEADS
                    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STATE))
                    write_rows(
                        M, L, A, token + place // TILE_HEADS, kv_head * GROUP + in_tile,
                        (place < count * TILE_HEADS) & (in_tile < GROUP), column, column >= 0,
                        out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, wide(out_token),
                        out_head, wide(lse_token), SINKS, FP8_OUT, LSE, True,
                    )  # fmt: skip
                else:
                    finish_part(
                        r, fields, lane, begin, end, lender, M, L, A, kv_head, in_group, rows_ptr,
                        total_ptr, starts_ptr, counters_ptr, states_ptr, sums_ptr, out_ptr, lse_ptr,
                        sinks_ptr, v_factor, output_scale_ptr, groups, wide(out_token), out_head,
                        wide(lse_token), opaque_zero(), HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED,
                        SLOTS, BUNDLES, AREA, WIDTH, FINISH_ROWS, FINISH_WIDTH, SINKS, FP8_OUT, LSE,
                        4, AT_ONCE,
                    )  # fmt: skip
        begin = 0
        fields = rows_ptr + wide(((r + 1) // HEAD_LOOPS) * FIELDS)
