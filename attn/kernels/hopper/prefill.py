"""Prefill and extend on Hopper: paged keys through TMA, products by warp group, in Gluon.

A program stays on its multiprocessor and takes one tile after another: ``64 * GROUPS`` query rows,
tokens times PACKED query heads of one KV head, of one request. One warp is the producer: it walks
the block table and asks for keys and values, a run of a page and 64 columns at a time; the runs
land side by side, so that a tile of keys is one operand of a product. Each warp group of consumers
owns 64 rows: it issues the scores of one tile of keys and the output of the tile before it back to
back, and computes the softmax of the former under the latter. Keys are walked from the last visible
one down.

No page is read of which no row of the tile sees a key: its place in the operand is filled with
zeros by a box outside the cache. Slots past the end of the request share a page with live ones and
may hold anything; the values there are overwritten with zeros, since zero times NaN is NaN.
"""

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

from attn.kernels.hopper.compat import async_load, reinterpret
from attn.kernels.masks import biased, is_visible, last_visible, reach_of, seen_by_all
from attn.kernels.numerics import encode_e4m3
from builders.kernels import first_visible

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@gluon.jit
def _work_at(turn):
    """Number of the program's tile of that turn."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _share_of(tile_starts_ptr, num_reqs, HEADS: gl.constexpr):
    """How many tiles there are, and how many this program takes.

    Rounds of all programs go forth and back, so that nobody always gets the longer tiles.
    """
    num_tiles = gl.load(tile_starts_ptr + num_reqs)
    total = num_tiles * HEADS
    programs = gl.num_programs(0)
    rounds = total // programs
    return num_tiles, rounds + (_work_at(rounds) < total).to(gl.int32)


@gluon.jit
def _tile_at(
    turn, num_tiles, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, window,
    chunk, lookback, HEADS: gl.constexpr, TOKENS: gl.constexpr, KV_TILE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """The program's tile of that turn.

    Returns tile of heads, request, its first row of the query, the tile's first token, tokens and
    keys of the request, whether it is causal, and the tiles of keys ``[low, high)``, one at least.
    """
    work = _work_at(turn)
    head = work % HEADS
    # The last tiles see most keys: they start first.
    tile = num_tiles - 1 - work // HEADS
    req = 0
    above = num_reqs
    while above - req > 1:
        middle = (req + above) // 2
        go = gl.load(tile_starts_ptr + middle) <= tile
        req = gl.where(go, middle, req)
        above = gl.where(go, above, middle)
    token = (tile - gl.load(tile_starts_ptr + req)) * TOKENS
    begin = gl.load(query_start_ptr + req)
    query_len = gl.load(query_start_ptr + req + 1) - begin
    kv_len = gl.load(seq_lens_ptr + req)
    first = gl.maximum(kv_len - query_len, 0) + token
    last = gl.maximum(kv_len - query_len, 0) + gl.minimum(token + TOKENS, query_len) - 1
    causal = 1
    if CAUSAL == 2:
        causal = gl.load(causal_ptr + req).to(gl.int32)
    start = first_visible(
        first, last, window, chunk, lookback, None, 0, WINDOW or CHUNK, CHUNK, False, False
    )
    stop = last_visible(
        last, kv_len, causal, window, None, 0, first, CAUSAL, WINDOW, CHUNK, False, False
    )
    low = start // KV_TILE
    high = gl.maximum((stop + KV_TILE - 1) // KV_TILE, low + 1)
    return head, req, begin, token, query_len, kv_len, causal, start, low, high


@gluon.jit
def _load_keys(
    desc, table, tile, start, kv_len, kv_head, turn, full, empty, boxes,
    KV_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Fill stage ``turn % STAGES`` with a tile of keys or values."""
    RUNS: gl.constexpr = KV_TILE // RUN
    stage = turn % STAGES
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for run in gl.static_range(RUNS):
        key = tile * KV_TILE + run * RUN
        live = (key < kv_len) & (key + RUN > start)
        # Outside the cache a box is zeros.
        page = gl.load(table + key // BLOCK_SIZE, mask=live, other=-1)
        for half in gl.static_range(HALVES):
            async_load(
                desc,
                [page, key % BLOCK_SIZE, kv_head, half * 64],
                full.index(stage),
                boxes.index((stage * HALVES + half) * RUNS + run),
            )


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, table_ptr, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs,
    table_row, window, chunk, lookback, HEADS: gl.constexpr, GROUP: gl.constexpr,
    PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, KV_TILE: gl.constexpr, HALVES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """One warp: everything that is loaded, in the order in which it is consumed."""
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    BYTES: gl.constexpr = KV_TILE * HALVES * 128
    num_tiles, turns = _share_of(tile_starts_ptr, num_reqs, HEADS)
    done = 0
    for turn in range(turns):
        head, req, begin, token, _, kv_len, _, start, low, high = _tile_at(
            turn, num_tiles, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs,
            window, chunk, lookback, HEADS, TOKENS, KV_TILE, CAUSAL, WINDOW, CHUNK,
        )  # fmt: skip
        table = table_ptr + req.to(gl.int64) * table_row
        kv_head = head * PACKED // GROUP
        _load_keys(
            k_desc, table, high - 1, start, kv_len, kv_head, done, k_full, k_empty, k_boxes,
            KV_TILE, HALVES, BLOCK_SIZE, RUN, STAGES, BYTES,
        )  # fmt: skip
        stage = turn % Q_STAGES
        mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), WARP_GROUPS * HALVES * 64 * 128)
        for part in gl.static_range(WARP_GROUPS):
            for half in gl.static_range(HALVES):
                async_load(
                    q_desc,
                    [begin + token + part * (64 // PACKED), head * PACKED, half * 64],
                    q_full.index(stage),
                    q_boxes.index((stage * WARP_GROUPS + part) * HALVES + half),
                )
        for i in range(1, high - low):
            _load_keys(
                k_desc, table, high - 1 - i, start, kv_len, kv_head, done + i, k_full, k_empty,
                k_boxes, KV_TILE, HALVES, BLOCK_SIZE, RUN, STAGES, BYTES,
            )  # fmt: skip
            _load_keys(
                v_desc, table, high - i, start, kv_len, kv_head, done + i - 1, v_full, v_empty,
                v_boxes, KV_TILE, HALVES, BLOCK_SIZE, RUN, STAGES, BYTES,
            )  # fmt: skip
        done += high - low
        _load_keys(
            v_desc, table, low, start, kv_len, kv_head, done - 1, v_full, v_empty, v_boxes,
            KV_TILE, HALVES, BLOCK_SIZE, RUN, STAGES, BYTES,
        )  # fmt: skip


@gluon.jit
def _softmax(
    scores, m, l, factor, soft_cap, query, reach, kv_len, key, window, chunk, lookback,
    MASKED: gl.constexpr, SOFT_CAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Weights of a tile of scores and the row's new maximum, sum and what its past is worth.

    A row's scores are in one warp, so that reductions are shuffles. ``factor`` turns the maximum
    (of raw scores, or of log2 units under a soft cap) into log2 units.
    """
    if SOFT_CAP:
        scores = biased(scores * factor, None, None, soft_cap, True, 0, False)
        factor = 1.0
    if MASKED:
        if CAUSAL == 1 and WINDOW and not CHUNK:
            # Both edges in one comparison: a query is one of the keys that it sees, the last.
            away = query[:, None] - key[None, :]
            seen = away.to(gl.uint32, bitcast=True) < window.to(gl.uint32)
        else:
            seen = is_visible(
                query[:, None], key[None, :], reach[:, None], kv_len, window, chunk, lookback, 0, 0,
                0, CAUSAL, WINDOW, CHUNK, False, False, False,
            )  # fmt: skip
        scores = gl.where(seen, scores, float("-inf"))
    top = gl.maximum(m, gl.max(scores, 1))
    if MASKED:
        # A row may see nothing of this tile.
        base = gl.where(top == float("-inf"), 0.0, top) * factor
    else:
        base = top * factor
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(m * factor - base)
    return weights, top, l * shrink + gl.sum(weights, 1), shrink


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
def _step(
    i, done, high, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, pairs, m, l, factor,
    soft_cap, query, reach, kv_len, window, chunk, lookback, MASKED: gl.constexpr,
    DTYPE: gl.constexpr, KV_TILE: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``i`` (from the last), output of the tile before it.

    Both products are issued and waited for here: one in flight over a loop's edge would be
    serialised by ptxas.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left = _unpack(pairs, DTYPE, KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
    now = done + i
    before = now - 1
    mbarrier.wait(k_full.index(now % STAGES), (now // STAGES) & 1)
    scores = warpgroup_mma(
        q,
        k_tiles.index(now % STAGES).permute((1, 0)),
        gl.zeros([64, KV_TILE], gl.float32, SCORES),
        use_acc=False,
        is_async=True,
    )
    mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
    acc = warpgroup_mma(left, v_tiles.index(before % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    key = (high - 1 - i) * KV_TILE + gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, SCORES))
    weights, m, l, shrink = _softmax(
        scores, m, l, factor, soft_cap, query, reach, kv_len, key, window, chunk, lookback, MASKED,
        SOFT_CAP, CAUSAL, WINDOW, CHUNK,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    # Each is a barrier of the warp group: side by side they cost one.
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
def _write(
    m, l, acc, factor, token, begin, query_len, head, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
    out_token, out_head, lse_token, PACKED: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr,
    SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8_OUT: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Normalise 64 rows, from ``token`` of the request on, and write them."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SUMS: gl.constexpr = m.type.layout
    row = gl.arange(0, 64, layout=SUMS)
    wanted = token + row // PACKED < query_len
    at = (begin + token + row // PACKED).to(gl.int64)
    some = m > float("-inf")
    if not SOFT_CAP:
        m = m * factor
    if SINKS:
        sink = gl.load(sinks_ptr + head * PACKED + row % PACKED).to(gl.float32) * _LOG2E
        top = gl.where(some, gl.maximum(m, sink), m)
        base = gl.where(some, top, 0.0)
        shrink = gl.exp2(m - base)
        l = l * shrink + gl.where(some, gl.exp2(sink - base), 0.0)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
        m = top
    inverse = 1.0 / gl.where(some, l, 1.0)
    if FP8_OUT:
        inverse = inverse / gl.load(output_scale_ptr)
    out = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    if FP8_OUT:
        narrow = encode_e4m3(out, True)
    else:
        narrow = out.to(out_ptr.dtype.element_ty)
    # By way of shared memory to rows of 16 bytes per thread, where there is room for it.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = WIDE if WIDTH <= 128 else OUTPUT
    narrow = gl.convert_layout(narrow, ROWS)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS))
    offset = (begin + token + r // PACKED).to(gl.int64) * out_token
    offset += (head * PACKED + r % PACKED) * out_head
    mask = (token + r // PACKED < query_len)[:, None] & (column < SIZE)[None, :]
    gl.store(out_ptr + offset[:, None] + column[None, :], narrow, mask=mask)
    if LSE:
        lse = gl.where(some, (m + gl.log2(l)) * _LN2, float("-inf"))
        gl.store(lse_ptr + at * lse_token + head * PACKED + row % PACKED, lse, mask=wanted)


@gluon.jit
def _drain(i, stop, done, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr):
    """Let tiles ``[i, stop)`` pass."""
    for j in range(i, stop):
        now = done + j
        mbarrier.wait(k_full.index(now % STAGES), (now // STAGES) & 1)
        mbarrier.arrive(k_empty.index(now % STAGES), count=1)
        mbarrier.wait(v_full.index(now % STAGES), (now // STAGES) & 1)
        mbarrier.arrive(v_empty.index(now % STAGES), count=1)


@gluon.jit
def _consume(
    PART: gl.constexpr, q_tiles, k_tiles, v_tiles, v_boxes, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr, tile_starts_ptr,
    query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor, soft_cap, window, chunk, lookback,
    out_token, out_head, lse_token, HEADS: gl.constexpr, PACKED: gl.constexpr,
    WARP_GROUPS: gl.constexpr, DTYPE: gl.constexpr, KV_TILE: gl.constexpr, HALVES: gl.constexpr,
    WIDTH: gl.constexpr, SIZE: gl.constexpr, RUN: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, FP8_OUT: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """A warp group: rows ``[64 * PART, 64 * PART + 64)`` of every tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SPAN: gl.constexpr = 64 // PACKED
    num_tiles, turns = _share_of(tile_starts_ptr, num_reqs, HEADS)
    done = 0
    tails = 0
    for turn in range(turns):
        _, req, begin, token, query_len, kv_len, causal, _, low, high = _tile_at(
            turn, num_tiles, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs,
            window, chunk, lookback, HEADS, WARP_GROUPS * SPAN, KV_TILE, CAUSAL, WINDOW, CHUNK,
        )  # fmt: skip
        context = gl.maximum(kv_len - query_len, 0)
        token += PART * SPAN
        # Rows past the request's last are copies of it, and not written.
        first = context + gl.minimum(token, query_len - 1)
        last = context + gl.minimum(token + SPAN, query_len) - 1
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        query = gl.minimum(context + token + row // PACKED, last)
        reach = reach_of(query, kv_len, causal, CAUSAL)
        stop = last_visible(
            last, kv_len, causal, window, None, 0, first, CAUSAL, WINDOW, CHUNK, False, False
        )
        start = first_visible(
            first, last, window, chunk, lookback, None, 0, WINDOW or CHUNK, CHUNK, False, False
        )
        all_low, all_high = seen_by_all(
            first, last, kv_len, causal, window, chunk, lookback, CAUSAL, WINDOW, CHUNK, False
        )
        count = high - low
        # Tiles of keys, from the last: none of the rows sees those before ``skipped`` and from
        # ``ends`` on, every row sees all of those in ``[inner, outer)``.
        skipped = gl.maximum(high - gl.maximum((stop + KV_TILE - 1) // KV_TILE, low + 1), 0)
        ends = count
        inner = gl.maximum(high - all_high // KV_TILE, skipped + 1)
        if WINDOW or CHUNK:
            ends = gl.maximum(high - start // KV_TILE, skipped + 1)
            inner = gl.minimum(inner, ends)
            outer = gl.maximum(high - (all_low + KV_TILE - 1) // KV_TILE, inner)
            outer = gl.minimum(outer, ends)
        else:
            inner = gl.minimum(inner, ends)
            outer = ends
        live = kv_len - (high - 1) * KV_TILE
        has_tail = (live < KV_TILE) & (live % RUN != 0)
        if has_tail:
            if PART == WARP_GROUPS - 1:
                mbarrier.wait(v_full.index(done % STAGES), (done // STAGES) & 1)
                _clear_tail(v_boxes, done % STAGES, live, KV_TILE, HALVES, RUN)
                mbarrier.arrive(cleared, count=1)
            mbarrier.wait(cleared, tails & 1)
        tails += has_tail.to(gl.int32)
        _drain(0, skipped, done, k_full, k_empty, v_full, v_empty, STAGES)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, WIDTH], gl.float32, OUTPUT)
        q_stage = turn % Q_STAGES
        q = q_tiles.index(q_stage * WARP_GROUPS + PART)
        mbarrier.wait(q_full.index(q_stage), (turn // Q_STAGES) & 1)
        now = done + skipped
        mbarrier.wait(k_full.index(now % STAGES), (now // STAGES) & 1)
        scores = warpgroup_mma(
            q,
            k_tiles.index(now % STAGES).permute((1, 0)),
            gl.zeros([64, KV_TILE], gl.float32, SCORES),
            use_acc=False,
            is_async=True,
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(now % STAGES), count=1)
        key = (high - 1 - skipped) * KV_TILE
        key = key + gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, SCORES))
        weights, m, l, _ = _softmax(
            scores, m, l, factor, soft_cap, query, reach, kv_len, key, window, chunk, lookback,
            True, SOFT_CAP, CAUSAL, WINDOW, CHUNK,
        )  # fmt: skip
        pairs = _pack(weights, DTYPE, KV_TILE)
        for i in range(skipped + 1, inner):
            acc, pairs, m, l = _step(
                i, done, high, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, pairs, m,
                l, factor, soft_cap, query, reach, kv_len, window, chunk, lookback, True, DTYPE,
                KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK,
            )  # fmt: skip
        for i in range(inner, outer):
            acc, pairs, m, l = _step(
                i, done, high, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, pairs, m,
                l, factor, soft_cap, query, reach, kv_len, window, chunk, lookback, False, DTYPE,
                KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK,
            )  # fmt: skip
        if WINDOW or CHUNK:
            for i in range(outer, ends):
                acc, pairs, m, l = _step(
                    i, done, high, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc,
                    pairs, m, l, factor, soft_cap, query, reach, kv_len, window, chunk, lookback,
                    True, DTYPE, KV_TILE, WIDTH, STAGES, SOFT_CAP, CAUSAL, WINDOW, CHUNK,
                )  # fmt: skip
        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)
        left = _unpack(pairs, DTYPE, KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
        now = done + ends - 1
        mbarrier.wait(v_full.index(now % STAGES), (now // STAGES) & 1)
        acc = warpgroup_mma(left, v_tiles.index(now % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(now % STAGES), count=1)
        _drain(ends, count, done, k_full, k_empty, v_full, v_empty, STAGES)
        done += count
        # Once more, instead of being kept in registers meanwhile.
        begin = gl.load(query_start_ptr + req)
        query_len = gl.load(query_start_ptr + req + 1) - begin
        head = _work_at(turn) % HEADS
        _write(
            m, l, acc, factor, token, begin, query_len, head, out_ptr, lse_ptr, output_scale_ptr,
            sinks_ptr, out_token, out_head, lse_token, PACKED, WIDTH, SIZE, SOFT_CAP, SINKS,
            FP8_OUT, LSE,
        )  # fmt: skip


_VARYING = ["num_reqs", "window", "chunk", "lookback", "table_row", "lse_token"]
_ANYWHERE = [
    "table_ptr",
    "tile_starts_ptr",
    "query_start_ptr",
    "seq_lens_ptr",
    "lse_ptr",
    "causal_ptr",
    "output_scale_ptr",
    "sinks_ptr",
]


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    output_scale_ptr,
    table_ptr,
    tile_starts_ptr,
    query_start_ptr,
    seq_lens_ptr,
    causal_ptr,
    sinks_ptr,
    out_token,
    out_head,
    lse_token,
    table_row,
    scale,
    soft_cap,
    num_reqs,
    window,
    chunk,
    lookback,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    KV_TILE: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr,
    LSE: gl.constexpr,
):
    """Attention of requests with many new tokens; grid ``(programs,)``, any number of them.

    Descriptors: query ``[T, H, SIZE]`` in boxes of 64 rows and 64 columns; key and value
    ``[N, BLOCK_SIZE, Hk, SIZE]`` in boxes of RUN tokens and 64 columns. Out ``[T, H, SIZE]``, LSE
    ``[T, H]``, the rest as in :func:`attn.kernels.prefill.prefill_kernel`. HEADS is the number of
    tiles of PACKED query heads; REGISTERS those of a consumer's thread.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    HALVES: gl.constexpr = WIDTH // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BOXES: gl.constexpr = STAGES * HALVES * (KV_TILE // RUN)
    factor = scale
    if not SOFT_CAP:
        factor = scale * _LOG2E
    # What TMA writes, boxes, and what products read: the same bytes as tiles.
    q_boxes = gl.allocate_shared_memory(
        DTYPE,
        [Q_STAGES * WARP_GROUPS * HALVES, 64 // PACKED, PACKED, 64],
        gl.NVMMASharedLayout(128, 16, 3),
    )
    k_boxes = gl.allocate_shared_memory(
        DTYPE, [BOXES, 1, RUN, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    v_boxes = gl.allocate_shared_memory(
        DTYPE, [BOXES, 1, RUN, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    q_tiles = reinterpret(q_boxes, DTYPE, [Q_STAGES * WARP_GROUPS, 64, WIDTH], LAYOUT)
    k_tiles = reinterpret(k_boxes, DTYPE, [STAGES, KV_TILE, WIDTH], LAYOUT)
    v_tiles = reinterpret(v_boxes, DTYPE, [STAGES, KV_TILE, WIDTH], LAYOUT)
    v_runs = reinterpret(v_boxes, DTYPE, [BOXES, RUN, 64], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(cleared, count=1)
    for s in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=WARP_GROUPS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=WARP_GROUPS)
        mbarrier.init(v_empty.index(s), count=WARP_GROUPS)
    # Tuples must be literals here: held in a variable, their constexprs become tensors.
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, q_tiles, k_tiles, v_tiles, v_runs, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
                    tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor,
                    soft_cap, window, chunk, lookback, out_token, out_head, lse_token, HEADS,
                    PACKED, WARP_GROUPS, DTYPE, KV_TILE, HALVES, WIDTH, SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (_consume, (1, q_tiles, k_tiles, v_tiles, v_runs, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
                    tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor,
                    soft_cap, window, chunk, lookback, out_token, out_head, lse_token, HEADS,
                    PACKED, WARP_GROUPS, DTYPE, KV_TILE, HALVES, WIDTH, SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (_produce, (q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, table_ptr, tile_starts_ptr, query_start_ptr,
                    seq_lens_ptr, causal_ptr, num_reqs, table_row, window, chunk, lookback, HEADS,
                    GROUP, PACKED, WARP_GROUPS, KV_TILE, HALVES, BLOCK_SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, q_tiles, k_tiles, v_tiles, v_runs, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
                    tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor,
                    soft_cap, window, chunk, lookback, out_token, out_head, lse_token, HEADS,
                    PACKED, WARP_GROUPS, DTYPE, KV_TILE, HALVES, WIDTH, SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (_consume, (1, q_tiles, k_tiles, v_tiles, v_runs, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
                    tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor,
                    soft_cap, window, chunk, lookback, out_token, out_head, lse_token, HEADS,
                    PACKED, WARP_GROUPS, DTYPE, KV_TILE, HALVES, WIDTH, SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (_consume, (2, q_tiles, k_tiles, v_tiles, v_runs, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, cleared, out_ptr, lse_ptr, output_scale_ptr, sinks_ptr,
                    tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, num_reqs, factor,
                    soft_cap, window, chunk, lookback, out_token, out_head, lse_token, HEADS,
                    PACKED, WARP_GROUPS, DTYPE, KV_TILE, HALVES, WIDTH, SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK, SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (_produce, (q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, table_ptr, tile_starts_ptr, query_start_ptr,
                    seq_lens_ptr, causal_ptr, num_reqs, table_row, window, chunk, lookback, HEADS,
                    GROUP, PACKED, WARP_GROUPS, KV_TILE, HALVES, BLOCK_SIZE, RUN, Q_STAGES, STAGES,
                    CAUSAL, WINDOW, CHUNK)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
