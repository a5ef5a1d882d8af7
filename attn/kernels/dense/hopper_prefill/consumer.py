"""The consumers: warp groups that multiply, and write 64 query rows of a tile each."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_prefill.scheduler import is_joint, sum_of_own, told, wide
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.masks import biased, is_visible, own_range, reach_of, seen_by_all
from attn.kernels.lang.numerics import encode_e4m3
from attn.kernels.lang.opaque import opaque_zero

_LN2 = tl.constexpr(0.6931471805599453)
_OWN = gl.constexpr(55)
"""Bits of a row's number that say which thread has it in a product's result; that of 8 says which
of its registers."""
_EDGE, _INNER, _FAR = (gl.constexpr("mov.b32 $0, $1; // " + name) for name in ("a", "b", "c"))


@gluon.jit
def _up_to(scores, key, last):
    """Scores of keys up to the last, minus infinity for others.

    Of comparisons that it sees LLVM makes bits of a mask, and takes them apart again: five
    instructions for each score in place of two.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [scores, key, last], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _within(scores, key, query, window):
    """The same of keys from the query's own back, ``window`` of them."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; sub.s32 a, $3, $2; setp.lt.u32 p, a, $4;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r,r", [scores, key, query, window], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax(
    scores, m, l, factor, soft_cap, query, reach, kv_len, first_key, window, chunk, lookback,
    range_first, range_last, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
    FIRST: gl.constexpr = False,
):  # fmt: skip
    """Weights of a tile of scores and the row's new maximum, sum and what its past is worth.

    A row's scores are in four threads of a warp, which exchange maxima; sums stay by thread,
    ``[64, 4]``, until the row is written. ``factor`` turns the maximum (of raw scores, or of log2
    units under a soft cap) into log2 units. FIRST: there is no past.
    """
    if SOFT_CAP:
        scores = biased(scores * factor, None, None, soft_cap, True, 0, False)
        factor = 1.0
    if MASKED:
        number = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        # A column is the sum of a constant of its register and a number of its thread, which goes
        # to the other side: each score is compared by a constant, in one instruction. With fewer
        # keys heads are wide, and leave no register for that number.
        MANY: gl.constexpr = scores.shape[1] >= 128
        BACK: gl.constexpr = CAUSAL == 1 and WINDOW and not CHUNK and not RANGES
        known, others = number & ~6, number & 6
        if MANY and not (WINDOW or CHUNK or RANGES):
            scores = _up_to(scores, known[None, :], (reach - first_key)[:, None] - others[None, :])
        elif MANY and BACK:
            # Both edges in one comparison: a query is one of the keys that it sees, the last.
            away = (query - first_key)[:, None] - others[None, :]
            scores = _within(scores, known[None, :], away, window)
        else:
            key = first_key + number
            if BACK:
                away = query[:, None] - key[None, :]
                seen = away.to(gl.uint32, bitcast=True) < window.to(gl.uint32)
            else:
                seen = is_visible(
                    query[:, None], key[None, :], reach[:, None], kv_len, window, chunk, lookback,
                    0, range_first[:, None], range_last[:, None], CAUSAL, WINDOW, CHUNK, False,
                    RANGES, CLAMP,
                )  # fmt: skip
            scores = gl.where(seen, scores, float("-inf"))
    if MASKED:
        most = gl.max(scores, 1)
    else:
        # Of pairs first, which do not wait for each other: with it a step issues in 1000 clocks,
        # without in 1060.
        left, right = gl.split(gl.reshape(scores, [scores.shape[0], scores.shape[1] // 2, 2]))
        most = gl.convert_layout(gl.max(gl.maximum(left, right), 1), m.type.layout)
    if FIRST:
        top = most
    else:
        top = gl.maximum(m, most)
    if MASKED:
        # A row may see nothing of this tile.
        base = gl.where(top == float("-inf"), 0.0, top) * factor
    else:
        base = top * factor
    weights = gl.exp2(scores * factor - base[:, None])
    sums = sum_of_own(weights)
    shrink = base
    if not FIRST:
        shrink = gl.exp2(m * factor - base)
        own = gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))
        sums = gl.fma(l, own[:, None].broadcast_to(64, 4), sums)
    return weights, top, sums, shrink


@gluon.jit
def _computed(l):
    """The sums, behind an event that would be counted if one were negative. It never is, but the
    sums, and with them the whole softmax, have to be known for it: they are computed here, under
    the product that is under way, where ptxas would move all of it behind the wait for that.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p;"
        " @p pmevent 1; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [l], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr, KV_TILE: gl.constexpr):
    """Weights as pairs of 16 bits, to be carried to the next iteration: as single 16-bit values
    they would be split and joined again, as fp32 they would hold twice the registers.
    """
    low, high = gl.split(gl.reshape(weights, [64, KV_TILE // 2, 2]))
    if DTYPE.is_bf16():
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return pairs


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr, KV_TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand of the output's product; no instruction is left of it."""
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, KV_TILE]), LAYOUT)


@gluon.jit
def _scores(q, q_more, k_tiles, k_more, stage, KV_TILE: gl.constexpr, EXTRA: gl.constexpr):
    """Scores of a tile of keys, under way: of EXTRA columns in a product of their own."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    scores = warpgroup_mma(
        q,
        k_tiles.index(stage).permute((1, 0)),
        gl.zeros([64, KV_TILE], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    if EXTRA > 0:
        scores = warpgroup_mma(q_more, k_more.index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _step(
    i, done, high, place, is_last, q_tiles, q_more, k_tiles, k_more, v_tiles, q_empty, k_full,
    k_empty, v_full, v_empty, acc, pairs, m, l, factor, soft_cap, query, reach, kv_len, window,
    chunk, lookback, range_first, range_last, MASKED: gl.constexpr, DTYPE: gl.constexpr,
    KV_TILE: gl.constexpr, WIDTH: gl.constexpr, EXTRA: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, JOINT: gl.constexpr, SOFT_CAP: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``i`` (from the last), output of the tile before it.

    Both products are issued and waited for here: one in flight over a loop's edge would be
    serialised by ptxas. Keys are given back before the softmax, so that the next are on their way
    under it, and so are queries of which there is one stage; narrow heads lose more to the barrier
    than they gain. JOINT: keys and the values before them are given back by one.
    """
    EARLY: gl.constexpr = WIDTH > 64
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left = _unpack(pairs, DTYPE, KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
    now = done + i
    before = now - 1
    mbarrier.wait(k_full.index(now % STAGES), (now // STAGES) & 1)
    scores = _scores(
        q_tiles.index(place), q_more.index(place), k_tiles, k_more, now % STAGES, KV_TILE, EXTRA
    )
    mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    acc = warpgroup_mma(left, v_tiles.index(before % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    # Each is a barrier of the warp group: side by side they cost one.
    if EARLY:
        mbarrier.arrive(k_empty.index(now % STAGES), count=1)
    if Q_STAGES == 1:
        mbarrier.arrive(q_empty.index(0), count=1, pred=is_last)
    weights, m, l, shrink = _softmax(
        scores, m, l, factor, soft_cap, query, reach, kv_len, (high - 1 - i) * KV_TILE, window,
        chunk, lookback, range_first, range_last, MASKED, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES,
        CLAMP,
    )  # fmt: skip
    if WIDTH <= 64:
        l = _computed(l)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if JOINT:
        mbarrier.arrive(k_empty.index(now % STAGES), count=1)
    else:
        if not EARLY:
            mbarrier.arrive(k_empty.index(now % STAGES), count=1)
        mbarrier.arrive(v_empty.index(before % STAGES), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    return acc, _pack(weights, DTYPE, KV_TILE), m, l


@gluon.jit
def _clear_tail(
    v_boxes, stage, live, KV_TILE: gl.constexpr, HALVES: gl.constexpr, RUN: gl.constexpr
):
    """Zero the values from ``live`` to the end of its run."""
    RUNS: gl.constexpr = KV_TILE // RUN
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    run = live // RUN
    row = run * RUN + gl.arange(0, RUN, layout=gl.SliceLayout(1, LAYOUT))
    for half in gl.static_range(HALVES):
        box = v_boxes.index((stage * HALVES + half) * RUNS + run)
        rows = box.load(LAYOUT)
        box.store(gl.where((row < live)[:, None], rows, 0.0))
    # Generic stores before wgmma reads them, and before TMA overwrites them.
    fence_async_shared()


@gluon.jit
def _taken_apart(row, OWN: gl.constexpr, PACKED: gl.constexpr):
    """Token and query head, within its tile, of a row's number.

    OWN are the bits that say which thread has it: what comes of them is computed where it is used.
    The others say which of its registers, and become constants. Together they were a register for
    each row of a thread, from the kernel's beginning on.
    """
    own, rest = (row & OWN) + opaque_zero(), row & ~OWN
    return own // PACKED + rest // PACKED, own % PACKED + rest % PACKED


@gluon.jit
def _write(
    m, l, acc, factor, v_factor, first_row, left, head, out_ptr, lse_ptr, output_scale_ptr,
    sinks_ptr, out_token, out_head, lse_token, PACKED: gl.constexpr, WIDTH: gl.constexpr,
    SIZE: gl.constexpr, SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8_OUT: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """Normalise 64 rows, and write those of the ``left`` tokens of the request."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = m.type.layout
    row = gl.arange(0, 64, layout=SUMS)
    wanted = row // PACKED < left
    at = (first_row + row // PACKED).to(gl.int64)
    some = m > float("-inf")
    l = gl.convert_layout(gl.sum(l, 1), SUMS)
    if not SOFT_CAP:
        m = m * factor
    if SINKS:
        sink = gl.load(sinks_ptr + head * PACKED + row % PACKED).to(gl.float32) * LOG2E
        top = gl.where(some, gl.maximum(m, sink), m)
        base = gl.where(some, top, 0.0)
        shrink = gl.exp2(m - base)
        l = l * shrink + gl.where(some, gl.exp2(sink - base), 0.0)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
        m = top
    inverse = v_factor / gl.where(some, l, 1.0)
    if FP8_OUT:
        inverse = inverse / gl.load(output_scale_ptr)
    out = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    if FP8_OUT:
        narrow = encode_e4m3(out, True)
    else:
        narrow = out.to(out_ptr.dtype.element_ty)
    # By way of shared memory to rows of 16 bytes per thread, where there is room for it.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    IS_NARROW: gl.constexpr = WIDTH <= 128 and out_ptr.dtype.element_ty != gl.float32
    ROWS: gl.constexpr = WIDE if IS_NARROW else OUTPUT
    narrow = gl.convert_layout(narrow, ROWS)
    # Of narrow heads Triton 3.8 has no register for the constants' sake.
    OWN: gl.constexpr = (63 if WIDTH <= 64 else 7) if IS_NARROW else _OWN
    token, lane = _taken_apart(gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)), OWN, PACKED)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    offset = (first_row + token).to(gl.int64) * wide(out_token)
    offset += (head * PACKED + lane) * wide(out_head)
    mask = (token < left)[:, None] & (column < SIZE)[None, :]
    if IS_NARROW:
        places = offset[:, None] + column[None, :]
    else:
        # The thread's bits first, so that the others become constants: a register for each of its
        # columns was kept otherwise. Columns lie in pairs.
        own = gl.max_constancy(gl.multiple_of(column & 6, 2), 2)
        rest = gl.max_contiguous(gl.multiple_of(column & ~6, 2), 2)
        places = (offset[:, None] + own[None, :]) + rest[None, :]
    gl.store(out_ptr + places, narrow, mask=mask)
    if LSE:
        lse = gl.where(some, (m + gl.log2(l)) * _LN2, float("-inf"))
        gl.store(lse_ptr + at * wide(lse_token) + head * PACKED + row % PACKED, lse, mask=wanted)


@gluon.jit
def _rows_of(
    position, left, kv_len, causal, req, ranges_ptr, num_ranges, LAYOUT: gl.constexpr,
    PACKED: gl.constexpr, WIDTH: gl.constexpr, CAUSAL: gl.constexpr, RANGES: gl.constexpr,
):  # fmt: skip
    """Positions of a warp group's first, last and each row, and what each reaches.

    Rows past the request's last are copies of it, and not written.
    """
    SPAN: gl.constexpr = 64 // PACKED
    first = position + gl.minimum(left - 1, 0)
    last = position + gl.minimum(left, SPAN) - 1
    row = gl.arange(0, 64, layout=LAYOUT)
    if WIDTH > 64:
        # Not kept in registers from the kernel's beginning on, of which narrow heads spare none.
        row += opaque_zero()
    query = gl.minimum(position + row // PACKED, last)
    reach = reach_of(query, kv_len, causal, CAUSAL)
    range_first = query
    range_last = query
    if RANGES:
        ranges = ranges_ptr + req.to(gl.int64) * num_ranges * 2
        range_first, range_last = own_range(query, ranges, num_ranges)
    return first, last, query, reach, range_first, range_last


@gluon.jit
def _anew(place, ASM: gl.constexpr):
    """``place``, in a way that the compiler cannot see through, other than with another ASM.

    Loops that share an operand's address made ptxas compute part of it ahead of the first of them
    only, which need not run at all: see ``undefined_reads`` in ``tests/tools/sass.py``.
    """
    return gl.inline_asm_elementwise(ASM, "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _factors(
    factor, head, k_scale_ptr, v_scale_ptr, scale_head, PACKED: gl.constexpr, GROUP: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """What scores and outputs of a tile of heads are multiplied with."""
    v_factor = 1.0
    if SCALED:
        at = (head * PACKED // GROUP) * scale_head
        factor = factor * gl.load(k_scale_ptr + at)
        v_factor = gl.load(v_scale_ptr + at)
    return factor, v_factor


@gluon.jit
def _first_scores(
    place, q_tiles, q_more, k_tiles, k_more, k_full, now, there_is, KV_TILE: gl.constexpr,
    EXTRA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of a tile's first keys, under way."""
    mbarrier.wait(k_full.index(now % STAGES), (now // STAGES) & 1, pred=there_is)
    return _scores(
        q_tiles.index(place), q_more.index(place), k_tiles, k_more, now % STAGES, KV_TILE, EXTRA
    )


@gluon.jit
def _first_weights(
    scores, high, position, left, kv_len, causal, req, ranges_ptr, num_ranges, factor, soft_cap,
    window, chunk, lookback, DTYPE: gl.constexpr, KV_TILE: gl.constexpr, WIDTH: gl.constexpr,
    PACKED: gl.constexpr, SOFT_CAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """Weights, maximum and sum of a tile's first keys, the last that any row of it sees."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    _, _, query, reach, range_first, range_last = _rows_of(
        position, left, kv_len, causal, req, ranges_ptr, num_ranges, SUMS, PACKED, WIDTH, CAUSAL,
        RANGES,
    )  # fmt: skip
    m = gl.full([64], float("-inf"), gl.float32, SUMS)
    weights, m, l, _ = _softmax(
        scores, m, m, factor, soft_cap, query, reach, kv_len, (high - 1) * KV_TILE, window, chunk,
        lookback, range_first, range_last, True, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
        True,
    )  # fmt: skip
    return _pack(weights, DTYPE, KV_TILE), m, l


@gluon.jit
def consume(
    PART: gl.constexpr, q_tiles, q_more, k_tiles, k_more, v_tiles, v_boxes, records, q_full,
    q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr,
    k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges, scale, soft_cap, window, chunk,
    lookback, scale_head, out_token, out_head, lse_token, GROUP: gl.constexpr, PACKED: gl.constexpr,
    WARP_GROUPS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, KV_TILE: gl.constexpr,
    HALVES: gl.constexpr, WIDTH: gl.constexpr, EXTRA: gl.constexpr, SIZE: gl.constexpr,
    RUN: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
    SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8_OUT: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``[64 * PART, 64 * PART + 64)`` of every tile.

    The last output of a tile and the first scores of the next are issued together; the finished
    tile is written under the latter. Every warp group takes every tile of keys, also where none of
    its own rows sees one: it would wait for the others otherwise.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SPAN: gl.constexpr = 64 // PACKED
    JOINT: gl.constexpr = is_joint(WIDTH, KIND)
    turn = 0
    done = 0
    parity = 0
    mbarrier.wait(q_full.index(0), 0)
    head, req, row, left, position, kv_len, causal, low, high = told(records, 0)
    row, left, position = row + PART * SPAN, left - PART * SPAN, position + PART * SPAN
    scores = _first_scores(
        PART, q_tiles, q_more, k_tiles, k_more, k_full, done, high > 0, KV_TILE, EXTRA, STAGES
    )
    factor, v_factor = _factors(
        scale, head, k_scale_ptr, v_scale_ptr, scale_head, PACKED, GROUP, KIND != 0
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1, pred=high > 0)
    if Q_STAGES == 1:
        mbarrier.arrive(q_empty.index(0), count=1, pred=(high > 0) & (high - low == 1))
    pairs, m, l = _first_weights(
        scores, high, position, left, kv_len, causal, req, ranges_ptr, num_ranges, factor,
        soft_cap, window, chunk, lookback, DTYPE, KV_TILE, WIDTH, PACKED, SOFT_CAP, CAUSAL, WINDOW,
        CHUNK, RANGES, CLAMP,
    )  # fmt: skip
    while high > 0:
        first, last, query, reach, range_first, range_last = _rows_of(
            position, left, kv_len, causal, req, ranges_ptr, num_ranges, SUMS, PACKED, WIDTH,
            CAUSAL, RANGES,
        )  # fmt: skip
        all_low, all_high = seen_by_all(
            first, last, kv_len, causal, window, chunk, lookback, CAUSAL, WINDOW, CHUNK, False
        )
        # Tiles of keys, from the last: every row sees all of those in ``[inner, outer)``.
        count = high - low
        inner = gl.minimum(gl.maximum(high - all_high // KV_TILE, 1), count)
        outer = count
        if WINDOW or CHUNK:
            outer = gl.maximum(high - (all_low + KV_TILE - 1) // KV_TILE, inner)
            outer = gl.minimum(outer, count)
        live = kv_len - (high - 1) * KV_TILE
        has_tail = (KIND <= 0) & (live < KV_TILE) & (live % RUN != 0)
        if has_tail:
            if PART == WARP_GROUPS - 1:
                mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
                _clear_tail(v_boxes, done % STAGES, live, KV_TILE, HALVES, RUN)
            # Everybody arrives: of one that waits alone, the other could be two tails ahead,
            # and the phase that it waits for would look as if it were still to come.
            mbarrier.arrive(cleared, count=1)
            mbarrier.wait(cleared, parity)
        parity = parity ^ has_tail.to(gl.int32)
        acc = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
        place = (turn % Q_STAGES) * WARP_GROUPS + PART
        for i in range(1, inner):
            acc, pairs, m, l = _step(
                i, done, high, _anew(place, _EDGE), i == count - 1, q_tiles, q_more, k_tiles,
                k_more, v_tiles, q_empty, k_full, k_empty, v_full, v_empty, acc, pairs, m, l,
                factor, soft_cap, query, reach, kv_len, window, chunk, lookback, range_first,
                range_last, True, DTYPE, KV_TILE, WIDTH, EXTRA, Q_STAGES, STAGES, JOINT, SOFT_CAP,
                CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
            )  # fmt: skip
        for i in range(inner, outer):
            acc, pairs, m, l = _step(
                i, done, high, _anew(place, _INNER), i == count - 1, q_tiles, q_more, k_tiles,
                k_more, v_tiles, q_empty, k_full, k_empty, v_full, v_empty, acc, pairs, m, l,
                factor, soft_cap, query, reach, kv_len, window, chunk, lookback, range_first,
                range_last, False, DTYPE, KV_TILE, WIDTH, EXTRA, Q_STAGES, STAGES, JOINT, SOFT_CAP,
                CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
            )  # fmt: skip
        if WINDOW or CHUNK:
            for i in range(outer, count):
                acc, pairs, m, l = _step(
                    i, done, high, _anew(place, _FAR), i == count - 1, q_tiles, q_more, k_tiles,
                    k_more, v_tiles, q_empty, k_full, k_empty, v_full, v_empty, acc, pairs, m, l,
                    factor, soft_cap, query, reach, kv_len, window, chunk, lookback, range_first,
                    range_last, True, DTYPE, KV_TILE, WIDTH, EXTRA, Q_STAGES, STAGES, JOINT,
                    SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                )  # fmt: skip
        if Q_STAGES > 1:
            mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)
        weights = _unpack(pairs, DTYPE, KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
        done += count
        before = done - 1
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(before % STAGES), acc, is_async=True)
        # The next tile. After the last one its scores are of whatever is there.
        this_head, this_row, this_left = head, row, left
        turn += 1
        stage = turn % Q_STAGES
        mbarrier.wait(q_full.index(stage), (turn // Q_STAGES) & 1)
        head, req, row, left, position, kv_len, causal, low, high = told(records, stage)
        row, left, position = row + PART * SPAN, left - PART * SPAN, position + PART * SPAN
        # Of one stage, operands' addresses would be kept in registers from the first tile on.
        scores = _first_scores(
            stage * WARP_GROUPS + PART + opaque_zero(), q_tiles, q_more, k_tiles, k_more, k_full,
            done, high > 0, KV_TILE, EXTRA, STAGES,
        )  # fmt: skip
        acc = warpgroup_mma_wait(2 if EXTRA > 0 else 1, deps=[acc])
        if not JOINT:
            mbarrier.arrive(v_empty.index(before % STAGES), count=1)
        _write(
            m, l, acc, factor, v_factor, this_row, this_left, this_head, out_ptr, lse_ptr,
            output_scale_ptr, sinks_ptr, out_token, out_head, lse_token, PACKED, WIDTH, SIZE,
            SOFT_CAP, SINKS, FP8_OUT, LSE,
        )  # fmt: skip
        factor, v_factor = _factors(
            scale, head, k_scale_ptr, v_scale_ptr, scale_head, PACKED, GROUP, KIND != 0
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(done % STAGES), count=1, pred=high > 0)
        if Q_STAGES == 1:
            mbarrier.arrive(q_empty.index(0), count=1, pred=(high > 0) & (high - low == 1))
        pairs, m, l = _first_weights(
            scores, high, position, left, kv_len, causal, req, ranges_ptr, num_ranges, factor,
            soft_cap, window, chunk, lookback, DTYPE, KV_TILE, WIDTH, PACKED, SOFT_CAP, CAUSAL,
            WINDOW, CHUNK, RANGES, CLAMP,
        )  # fmt: skip
