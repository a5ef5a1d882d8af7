"""Absorbed latent (MLA) decode, speculative verify and short extends, split over the keys.

This is the portable latent kernel. It runs the same kind of plan as the dense decode kernel
(:mod:`attn.kernels.dense.decode`): a work item is a tile of query tokens and heads, its keys are
cut into segments by position, the states of segments are folded in order, and no program waits for
another.

A row of the latent cache has a latent and a rotary part. Both together are the key, and the latent
part is also the value, so a tile of it is read once for both products.

There is one KV head. Where products are computed by warp groups, up to 64 query rows therefore
share one walk over the keys. The state of so many rows fills half a multiprocessor's registers, so
the folded state lies in scratch memory between two segments. With 16 query rows it stays in
registers. :mod:`attn.kernels.latent.states` stores and folds the states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.query_rows import load_query
from attn.kernels.dense.tile import (
    dot,
    fold,
    page_ids,
    paged_rows,
    recomputed,
    scores_of,
    store_state,
)
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.stored import E4M3, plane_of
from attn.kernels.latent.states import (
    close_segment,
    fields_of,
    finish_row,
    own_states,
    prefix_at,
    share_of,
    write_row,
)
from builders.splitkv.device.segments import segment_of, segment_start
from builders.splitkv.record import (
    SHARE_FIELDS,
)

_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_E4M3 = tl.constexpr(E4M3)
_TO_BF16 = tl.constexpr(2.0**120)


@triton.jit
def _tiles_of(
    fields, part, past, window, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """First KV tile, and the end, that a work item sees of segments ``[part, past)``."""
    first = tl.load(fields + 4)
    low = segment_start(part) // SEGMENT_UNIT
    if WINDOW:
        low = tl.maximum(low, tl.maximum(first - window + 1, 0) // KV_TILE)
    seen = tl.minimum(tl.load(fields + 3), first + tl.load(fields + 2))
    return low, tl.minimum(segment_start(past) // SEGMENT_UNIT, tl.cdiv(seen, KV_TILE))


@triton.jit
def _elements(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr,
              COMPUTE: tl.constexpr):  # fmt: skip
    """One plane of stored words, converted exactly to the type of the products."""
    if KIND == _E4M3 and tl.bfloat16 == COMPUTE:
        # The bits of an e4m3 number, moved to bf16's places, are 2^-120 times the number.
        upper = words & -256 if PLANE == 1 else words << 8
        bits = ((upper >> 4) & 0x07F0) | (upper & -32768)
        plane = bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * _TO_BF16
    else:
        plane = plane_of(words, PLANE, KIND, DECODE)
    return plane.to(COMPUTE)


@triton.jit
def _weights_of(
    scores, m, token, query, limit, scale, window, SIMPLE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """New maxima, factors for old sums and weights, from ``[ROWS, KV_TILE]`` scores."""
    if not SIMPLE:
        scores = scores * scale
    seen = token[None, :] <= limit[:, None]
    if WINDOW:
        seen = seen & (query[:, None] - token[None, :] < window)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = scores - base[:, None]
    alpha = m - base
    if SIMPLE:
        # Unlike the dense kernels this does not use fma(scores, scale, -base * scale): that rounds
        # the two products differently.
        weights = weights * scale
        alpha = alpha * scale
    return top, tl.exp2(alpha), tl.exp2(weights)


@triton.jit
def _attend_tile(
    m, sums, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query, limit, scale, latent_ptr,
    rope_ptr, table_ptr, block, stride, kv_len, floor, window, KV_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    ROPE_USED: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, DECODE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGN: tl.constexpr, SIMPLE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys.

    ``sums`` are ``[ROWS]``, or ``[ROWS, KV_TILE]`` for the caller to add up. Slots below ``floor``
    and from ``kv_len`` on are not read. Query rows see tokens up to ``limit``. Page ids are loaded
    two tiles before the rows that they lead to.
    """
    SUB: tl.constexpr = KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    PAGES: tl.constexpr = KV_TILE // SUB
    PARTS: tl.constexpr = BLOCK_SIZE // SUB
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    HIDES_SCORES: tl.constexpr = m.shape[0] >= 64 and not IEEE
    column = tl.arange(0, WIDTH)
    rotary = tl.arange(0, ROPE_WIDTH)
    token = tile * KV_TILE + tl.arange(0, KV_TILE)
    at = paged_rows(
        pages, tile, floor, kv_len, 0, block, stride, True, SUB, PARTS, PAGES, WINDOW, False, ALIGN
    )
    if USED < WIDTH:
        latent = tl.load(
            latent_ptr + (at[:, None] + column[None, :]), mask=(column < USED)[None, :], other=0
        )
    else:
        latent = tl.load(latent_ptr + (at[:, None] + column[None, :]))
    if ROPE_USED < ROPE_WIDTH:
        rope = tl.load(
            rope_ptr + (at[:, None] + rotary[None, :]), mask=(rotary < ROPE_USED)[None, :], other=0
        )
    else:
        rope = tl.load(rope_ptr + (at[:, None] + rotary[None, :]))
    # Triton does not pipeline a loop that merely hands a value on to the next turn. This maximum
    # changes nothing, since ids are not negative, and makes it pipeline.
    pages = tl.maximum(ahead, 0)
    ahead = page_ids(table_ptr, tile + 2, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)

    k0 = _elements(latent, 0, KIND, DECODE, COMPUTE)
    zero = tl.zeros([m.shape[0], KV_TILE], tl.float32)
    scores = zero
    if not HIDES_SCORES:
        scores = scores_of(q0, k0, scores, IEEE)
    scores = scores_of(r0, _elements(rope, 0, KIND, DECODE, COMPUTE), scores, IEEE)
    k1 = k0
    if PLANES > 1:
        k1 = _elements(latent, 1, KIND, DECODE, COMPUTE)
        scores = scores_of(q1, k1, scores, IEEE)
        scores = scores_of(r1, _elements(rope, 1, KIND, DECODE, COMPUTE), scores, IEEE)
    if HIDES_SCORES:
        # Where Triton sees that one product feeds another, it has both warp groups compute all of
        # the first. The fma keeps it from merging the two score products into one chain, and the
        # branch hides that the scores feed the next product. The fma also makes Triton wait for
        # the product; before a branch alone it forgets to.
        scores = tl.fma(scores_of(q0, k0, zero, IEEE), zero + 1.0, scores)
        top = m
        alpha = m
        weights = scores
        if kv_len > 0:
            top, alpha, weights = _weights_of(
                scores, m, token, query, limit, scale, window, SIMPLE, WINDOW
            )
    else:
        top, alpha, weights = _weights_of(
            scores, m, token, query, limit, scale, window, SIMPLE, WINDOW
        )
    if len(sums.shape) == 1:
        sums = sums * alpha + tl.sum(weights, 1)
    else:
        sums = sums * alpha[:, None] + weights
    weights = weights.to(COMPUTE)
    acc0 = dot(weights, k0, acc0 * alpha[:, None], IEEE)
    if PLANES > 1:
        acc1 = dot(weights, k1, acc1 * alpha[:, None], IEEE)
    return top, sums, acc0, acc1, pages, ahead


@triton.jit(
    do_not_specialize=["groups", "window", "table_row", "lse_token"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "scale_ptr"],
)
def mla_decode_kernel(
    query_ptr,
    rotary_ptr,
    latent_ptr,
    rope_ptr,
    scale_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    out_token,
    out_head,
    lse_token,
    table_row,
    block,
    stride,
    scale,
    window,
    groups,
    HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SEGMENT_GROUPS: tl.constexpr,
    AREA: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
    KV_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    USED: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    ROPE_USED: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    DECODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    SIMPLE: tl.constexpr,
    WINDOW: tl.constexpr,
    LSE: tl.constexpr,
    SPARE: tl.constexpr,
    FINISH_ROWS: tl.constexpr,
    FINISH_WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Latent attention of the plan's work items; grid ``(groups * HEADS,)``.

    Shapes: query ``[T, NUM_HEADS, SIZE]``, rotary ``[T, NUM_HEADS, ROPE_SIZE]``, latent and rope
    ``[N, BLOCK_SIZE, words]`` each, with the same strides in stored words; out
    ``[T, NUM_HEADS, SIZE]``; LSE ``[T, NUM_HEADS]`` fp32.

    The other pointers are the tensors of :class:`builders.splitkv.record.SplitPlan`. Its scratch is
    laid out as :func:`builders.splitkv.record.latent_states` counts it.
    """
    CELLS: tl.constexpr = TILE_HEADS * QUERY_TOKENS
    # A warp group multiplies tiles of 64 rows; then all of a row belongs to one warp.
    BY_GROUP: tl.constexpr = ROWS >= 64
    SUB: tl.constexpr = KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    PAGES: tl.constexpr = KV_TILE // SUB
    PARTS: tl.constexpr = BLOCK_SIZE // SUB
    pid = tl.program_id(0)
    lane = pid % HEADS
    mine = shares_ptr + (pid // HEADS) * _SHARE_FIELDS
    row = tl.arange(0, ROWS)
    first_row = tl.load(mine)
    past_row = tl.load(mine + 2) + (tl.load(mine + 3) > 0).to(tl.int32)
    for turn in tl.range(0, past_row - first_row, num_stages=1, disable_licm=True):
        # The loop does not count r itself: Triton would keep r, and every address, in 64 bits.
        r = tl.load(mine) + turn
        fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
        req = tl.load(fields)
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        kv_len = tl.load(fields + 3)
        first = tl.load(fields + 4)
        begin, end, first_part, parts, slots = share_of(
            r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
        )
        if end > begin:
            in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
            head = in_group + row % TILE_HEADS
            at = token + row // TILE_HEADS
            wanted = (row < count * TILE_HEADS) & (row < CELLS) & (head < NUM_HEADS)
            offset = at.to(tl.int64) * query_token + head * query_head
            q0 = load_query(query_ptr, offset, wanted, 0, WIDTH, USED, SIZE, KIND).to(COMPUTE)
            q1 = q0
            if PLANES > 1:
                q1 = load_query(query_ptr, offset, wanted, 1, WIDTH, USED, SIZE, KIND).to(COMPUTE)
            offset = at.to(tl.int64) * rotary_token + head * rotary_head
            r0 = load_query(
                rotary_ptr, offset, wanted, 0, ROPE_WIDTH, ROPE_USED, ROPE_SIZE, KIND
            ).to(COMPUTE)
            r1 = r0
            if PLANES > 1:
                r1 = load_query(
                    rotary_ptr, offset, wanted, 1, ROPE_WIDTH, ROPE_USED, ROPE_SIZE, KIND
                ).to(COMPUTE)
            factor = 1.0
            if KIND > 0:
                factor = tl.load(scale_ptr)
            logits_scale = scale * factor * LOG2E
            query = first + row // TILE_HEADS
            limit = tl.minimum(query, kv_len - 1)
            table = table_ptr + req.to(tl.int64) * table_row
            floor = 0
            if WINDOW:
                floor = tl.maximum(first - window + 1, 0)
            low, high = _tiles_of(
                fields, first_part + begin, first_part + end, window, KV_TILE, SEGMENT_UNIT, WINDOW
            )
            pages = page_ids(table, low, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)
            ahead = page_ids(table, low + 1, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)
            segment = first_part + begin
            if BY_GROUP:
                last_part = tl.maximum(segment_of(tl.maximum(high - 1, 0) * SEGMENT_UNIT), segment)
                # The loop over segments encloses a loop over tiles for two reasons: Triton does not
                # pipeline a loop that has a barrier, and before a branch it forgets to wait for
                # products of warp groups.
                for part in tl.range(segment, last_part + 1, num_stages=1, disable_licm=True):
                    since, until = _tiles_of(
                        fields_of(r, mine, rows_ptr, HEAD_LOOPS), part, part + 1, window, KV_TILE,
                        SEGMENT_UNIT, WINDOW,
                    )  # fmt: skip
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)
                    acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
                    acc1 = acc0
                    for tile in tl.range(since, until, num_stages=STAGES, disable_licm=True):
                        m, l, acc0, acc1, pages, ahead = _attend_tile(
                            m, l, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query, limit,
                            logits_scale, latent_ptr, rope_ptr, table, block, stride, kv_len, floor,
                            window, KV_TILE, BLOCK_SIZE, WIDTH, USED, ROPE_WIDTH, ROPE_USED, KIND,
                            PLANES, DECODE, COMPUTE, ALIGN, SIMPLE, WINDOW,
                        )  # fmt: skip
                    if SIMPLE:
                        m = m * logits_scale
                    close_segment(
                        m, l, acc0, acc1, recomputed(r, DECODE), part, part == last_part, mine, pid,
                        lane, groups, factor, rows_ptr, total_ptr, states_ptr, sums_ptr, out_ptr,
                        lse_ptr, out_token, out_head, lse_token, HEADS, HEAD_LOOPS, NUM_HEADS,
                        TILE_HEADS, CELLS, WIDTH, USED, SIZE, KIND, PLANES, DECODE, LSE, SLOTS,
                        SEGMENT_GROUPS, AREA, SPARE, FINISH_ROWS, FINISH_WIDTH,
                    )  # fmt: skip
            else:
                M = tl.full([ROWS], float("-inf"), tl.float32)
                L = tl.zeros([ROWS], tl.float32)
                A0 = tl.zeros([ROWS, WIDTH], tl.float32)
                A1 = A0
                m = M
                # Several warps have keys of a row: their sums are added once, not for every tile.
                sums = tl.zeros([ROWS, KV_TILE], tl.float32)
                acc0 = A0
                acc1 = A0
                part = tl.maximum(segment_of(low * SEGMENT_UNIT), segment)
                part_end = segment_start(part + 1) // SEGMENT_UNIT
                if begin > 0:
                    # If the layer's window is narrower than the plan's, the segments before it need
                    # empty states: the fold reads a state of every segment.
                    for unseen in range(segment, tl.minimum(part, first_part + end)):
                        store_state(
                            states_ptr, sums_ptr, slots + unseen - first_part, M, L, A0, A1, A0, A1,
                            CELLS, WIDTH, PLANES,
                        )  # fmt: skip
                for tile in tl.range(low, high, num_stages=STAGES):
                    m, sums, acc0, acc1, pages, ahead = _attend_tile(
                        m, sums, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query, limit,
                        logits_scale, latent_ptr, rope_ptr, table, block, stride, kv_len, floor,
                        window, KV_TILE, BLOCK_SIZE, WIDTH, USED, ROPE_WIDTH, ROPE_USED, KIND,
                        PLANES, DECODE, COMPUTE, ALIGN, SIMPLE, WINDOW,
                    )  # fmt: skip
                    if (tile + 1 == part_end) | (tile + 1 == high):
                        l = tl.sum(sums, 1)
                        highest = m
                        if SIMPLE:
                            highest = m * logits_scale
                        if begin > 0:
                            store_state(
                                states_ptr, sums_ptr, slots + part - first_part, highest, l, acc0,
                                acc1, acc0, acc1, CELLS, WIDTH, PLANES,
                            )  # fmt: skip
                        else:
                            M0 = M
                            L0 = L
                            M, L, A0 = fold(M0, L0, A0, highest, l, acc0)
                            if PLANES > 1:
                                _, _, A1 = fold(M0, L0, A1, highest, l, acc1)
                        m = tl.full([ROWS], float("-inf"), tl.float32)
                        sums = tl.zeros([ROWS, KV_TILE], tl.float32)
                        acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
                        acc1 = acc0
                        part += 1
                        part_end = segment_start(part + 1) // SEGMENT_UNIT
                fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
                begin, end, first_part, parts, slots = share_of(
                    r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
                )
                if begin == 0:
                    token = tl.load(fields + 1)
                    count = tl.load(fields + 2)
                    is_whole = end == parts
                    if is_whole & (tl.load(fields + 11) == 1):
                        in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
                        write_row(
                            M, L, A0, A1, token, count, in_group, out_ptr, lse_ptr, factor,
                            out_token, out_head, lse_token, NUM_HEADS, TILE_HEADS, CELLS, WIDTH,
                            USED, SIZE, KIND, PLANES, DECODE, LSE,
                        )  # fmt: skip
                    else:
                        own, spare = own_states(
                            pid, groups, HEADS, HEAD_LOOPS, AREA, SEGMENT_GROUPS, SPARE
                        )
                        prefix = slots
                        if is_whole:
                            prefix = prefix_at(
                                r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS,
                                HEAD_LOOPS, AREA, SLOTS, SEGMENT_GROUPS,
                            )  # fmt: skip
                        store_state(
                            states_ptr, sums_ptr, prefix, M, L, A0, A1, A0, A1, CELLS, WIDTH, PLANES
                        )
            finish_row(
                r, mine, pid, lane, groups, factor, rows_ptr, total_ptr, starts_ptr, counters_ptr,
                states_ptr, sums_ptr, out_ptr, lse_ptr, out_token, out_head, lse_token, HEADS,
                HEAD_LOOPS, NUM_HEADS, TILE_HEADS, CELLS, WIDTH, USED, SIZE, KIND, PLANES, LSE,
                SLOTS, SEGMENT_GROUPS, AREA, SPARE, FINISH_ROWS, FINISH_WIDTH,
            )  # fmt: skip
