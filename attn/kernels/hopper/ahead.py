"""The consumers for narrow heads: scores are a tile of keys ahead of the softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.hopper.consume import (
    _anew,
    _clear_tail,
    _computed,
    _first_scores,
    _pack,
    _rows_of,
    _scores,
    _softmax,
    _unpack,
    _write,
)
from attn.kernels.hopper.tiles import told
from attn.kernels.masks import seen_by_all

_EDGE, _INNER, _FAR, _ONCE = (
    gl.constexpr("mov.b32 $0, $1; // " + name) for name in ("a", "b", "c", "d")
)


@gluon.jit
def _ahead(
    i, count, done, high, place, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    scores, acc, pairs, m, l, factor, soft_cap, query, reach, kv_len, window, chunk, lookback,
    range_first, range_last, FIRST: gl.constexpr, MASKED: gl.constexpr, DTYPE: gl.constexpr,
    KV_TILE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, SOFT_CAP: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr,
    CLAMP: gl.constexpr,
):  # fmt: skip
    """Softmax of tile ``i`` (from the last), under the scores of the next one and the output of the
    one before. Of the last tile, the next scores are of whatever is there.
    """
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    now = done + i
    following = now + 1
    before = now - 1
    there_is = i + 1 < count
    mbarrier.wait(k_full.index(following % STAGES), (following // STAGES) & 1, pred=there_is)
    q = q_tiles.index(place)
    ahead = _scores(q, q, k_tiles, k_tiles, following % STAGES, KV_TILE, 0)
    if not FIRST:
        left = _unpack(pairs, DTYPE, KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        acc = warpgroup_mma(left, v_tiles.index(before % STAGES), acc, is_async=True)
    weights, m, l, shrink = _softmax(
        scores, m, l, factor, soft_cap, query, reach, kv_len, (high - 1 - i) * KV_TILE, window,
        chunk, lookback, range_first, range_last, MASKED, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES,
        CLAMP,
    )  # fmt: skip
    l = _computed(l)
    if FIRST:
        ahead = warpgroup_mma_wait(0, deps=[ahead])
    else:
        ahead, acc = warpgroup_mma_wait(0, deps=[ahead, acc])
    mbarrier.arrive(k_empty.index(following % STAGES), count=1, pred=there_is)
    if not FIRST:
        mbarrier.arrive(v_empty.index(before % STAGES), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    return ahead, acc, _pack(weights, DTYPE, KV_TILE), m, l


@gluon.jit
def consume_ahead(
    PART: gl.constexpr, q_tiles, k_tiles, v_tiles, v_boxes, records, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr, ranges_ptr,
    num_ranges, factor, soft_cap, window, chunk, lookback, out_token, out_head, lse_token,
    PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, DTYPE: gl.constexpr, KV_TILE: gl.constexpr,
    HALVES: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr, RUN: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr, SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr, FP8_OUT: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``[64 * PART, 64 * PART + 64)`` of every tile.

    As :func:`attn.kernels.hopper.consume.consume`, but no product is ever waited for before a
    softmax: with narrow heads that takes as long as the products. It needs registers for the scores
    of two tiles of keys.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SPAN: gl.constexpr = 64 // PACKED
    turn = 0
    done = 0
    parity = 0
    mbarrier.wait(q_full.index(0), 0)
    head, req, row, left, position, kv_len, causal, low, high = told(records, 0)
    row, left, position = row + PART * SPAN, left - PART * SPAN, position + PART * SPAN
    scores = _first_scores(
        PART, q_tiles, q_tiles, k_tiles, k_tiles, k_full, done, high > 0, KV_TILE, 0, STAGES
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0), count=1, pred=high > 0)
    while high > 0:
        first, last, query, reach, range_first, range_last = _rows_of(
            position, left, kv_len, causal, req, ranges_ptr, num_ranges, SUMS, PACKED, CAUSAL,
            RANGES,
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
        has_tail = (live < KV_TILE) & (live % RUN != 0)
        if has_tail:
            if PART == WARP_GROUPS - 1:
                mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
                _clear_tail(v_boxes, done % STAGES, live, KV_TILE, HALVES, RUN)
            # Everybody arrives, as in consume.
            mbarrier.arrive(cleared, count=1)
            mbarrier.wait(cleared, parity)
        parity = parity ^ has_tail.to(gl.int32)
        acc = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
        m = gl.full([64], float("-inf"), gl.float32, SUMS)
        l = gl.zeros([64], gl.float32, SUMS)
        place = (turn % Q_STAGES) * WARP_GROUPS + PART
        scores, acc, pairs, m, l = _ahead(
            0, count, done, high, _anew(place, _ONCE), q_tiles, k_tiles, v_tiles, k_full, k_empty,
            v_full, v_empty, scores, acc, 0, m, l, factor, soft_cap, query, reach, kv_len, window,
            chunk, lookback, range_first, range_last, True, True, DTYPE, KV_TILE, WIDTH, STAGES,
            SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
        )  # fmt: skip
        for i in range(1, inner):
            scores, acc, pairs, m, l = _ahead(
                i, count, done, high, _anew(place, _EDGE), q_tiles, k_tiles, v_tiles, k_full,
                k_empty, v_full, v_empty, scores, acc, pairs, m, l, factor, soft_cap, query, reach,
                kv_len, window, chunk, lookback, range_first, range_last, False, True, DTYPE,
                KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
            )  # fmt: skip
        for i in range(inner, outer):
            scores, acc, pairs, m, l = _ahead(
                i, count, done, high, _anew(place, _INNER), q_tiles, k_tiles, v_tiles, k_full,
                k_empty, v_full, v_empty, scores, acc, pairs, m, l, factor, soft_cap, query, reach,
                kv_len, window, chunk, lookback, range_first, range_last, False, False, DTYPE,
                KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
            )  # fmt: skip
        if WINDOW or CHUNK:
            for i in range(outer, count):
                scores, acc, pairs, m, l = _ahead(
                    i, count, done, high, _anew(place, _FAR), q_tiles, k_tiles, v_tiles, k_full,
                    k_empty, v_full, v_empty, scores, acc, pairs, m, l, factor, soft_cap, query,
                    reach, kv_len, window, chunk, lookback, range_first, range_last, False, True,
                    DTYPE, KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                )  # fmt: skip
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
        scores = _first_scores(
            stage * WARP_GROUPS + PART, q_tiles, q_tiles, k_tiles, k_tiles, k_full, done, high > 0,
            KV_TILE, 0, STAGES,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(v_empty.index(before % STAGES), count=1)
        _write(
            m, l, acc, factor, 1.0, this_row, this_left, this_head, out_ptr, lse_ptr,
            output_scale_ptr, sinks_ptr, out_token, out_head, lse_token, PACKED, WIDTH, SIZE,
            SOFT_CAP, SINKS, FP8_OUT, LSE,
        )  # fmt: skip
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(done % STAGES), count=1, pred=high > 0)
