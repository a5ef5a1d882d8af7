"""Absorbed latent (MLA) decode, speculative verify and short extends, split over the keys.

The plan is that of :mod:`attn.kernels.decode`: rows of query tokens and heads, segments of their
keys by position, states folded in order, no program waits for another. What differs is the row of
the cache: a latent and a rotary part. Both are the key, the latent is the value too, and a tile of
it is read once for both products. There is one KV head, so that up to 64 rows share a walk over the
keys where the products are by warp group; a state of those fills half a multiprocessor's registers,
so that what is folded so far lies in scratch between two segments, in place of registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.rows import fold_parts, load_query, write_rows
from attn.kernels.stored import E4M3, plane_columns, plane_of
from attn.kernels.tile import dot, fold, page_ids, paged_rows, scores_of, store_state
from builders.kernels import segment_of, segment_start
from builders.split_kv import ROW_FIELDS, SHARE_FIELDS

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_LOG2E = tl.constexpr(1.4426950408889634)
_E4M3 = tl.constexpr(E4M3)
_TO_BF16 = tl.constexpr(2.0**120)


@triton.jit
def _fields_of(r, mine, rows_ptr, HEAD_LOOPS: tl.constexpr):
    """Where a row's numbers are: a group's first row has a copy beside the group's start."""
    copy = mine + (_SHARE_FIELDS - _FIELDS)
    return tl.where(r == tl.load(mine), copy, rows_ptr + (r // HEAD_LOOPS) * _FIELDS)


@triton.jit
def _place_of(fields, loop, end):
    """Place of a row's first tile among all tiles of the step, or (end 1) past its last."""
    return tl.load(fields + 7) + (loop + end) * tl.load(fields + 6)


@triton.jit
def _bundles_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, BUNDLES: tl.constexpr,
):  # fmt: skip
    """Where states of the bundles of a row's tokens go: one after another into what is lent by the
    first group that starts in the middle of their keys, or the program's ``own`` when there is
    none, where they are folded as they come. Then the group that has the first of their tiles, and
    whether others have some too.
    """
    bundle = tl.load(fields + 10)
    bundles = tl.load(fields + 11)
    total = tl.load(total_ptr + 1)
    loop = r % HEAD_LOOPS
    which = r // HEAD_LOOPS - bundle
    place = _place_of(rows_ptr + which * _FIELDS, loop, 0)
    owner = (place.to(tl.int64) * groups // total).to(tl.int32)
    place = _place_of(rows_ptr + (which + bundles - 1) * _FIELDS, loop, 1) - 1
    spans = (place.to(tl.int64) * groups // total).to(tl.int32) > owner
    spans = spans & (bundles > 1)
    lent = ((owner + 1) * HEADS + lane) * AREA + SLOTS + loop * BUNDLES
    return tl.where(spans, lent, own + loop), owner, spans


@triton.jit
def _prefix_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, BUNDLES: tl.constexpr,
):  # fmt: skip
    """Where the state of a bundle that is all the program's goes."""
    bundle = tl.load(fields + 10)
    place, _, spans = _bundles_at(
        r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS, HEAD_LOOPS, AREA, SLOTS, BUNDLES
    )
    return tl.where(spans | (bundle == 0), place + bundle, spare)


@triton.jit
def _write(
    m, l, acc0, acc1, row, token, count, in_group, out_ptr, lse_ptr, factor, out_token, out_head,
    lse_token, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, CELLS: tl.constexpr,
    WIDTH: tl.constexpr, USED: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    PLANES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Output and LSE of a row whose keys are all folded."""
    at = token + row // TILE_HEADS
    head = in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (row < CELLS) & (head < NUM_HEADS)
    index = tl.arange(0, WIDTH)
    valid = index < USED
    columns = plane_columns(index, 0, SIZE, KIND)
    write_rows(
        m, l, acc0, at, head, wanted, columns, valid, out_ptr, lse_ptr, None, factor, None,
        out_token, out_head, lse_token, False, False, LSE, False,
    )  # fmt: skip
    if PLANES > 1:
        columns = plane_columns(index, 1, SIZE, KIND)
        write_rows(
            m, l, acc1, at, head, wanted, columns, valid, out_ptr, lse_ptr, None, factor, None,
            out_token, out_head, lse_token, False, False, False, False,
        )  # fmt: skip


@triton.jit
def _elements(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr,
              COMPUTE: tl.constexpr):  # fmt: skip
    """One plane of stored words in the type of the products, exactly."""
    if KIND == _E4M3 and tl.bfloat16 == COMPUTE:
        # The same bits, three exponent bits further right, are 2^-120 times as much in bf16.
        upper = words & -256 if PLANE == 1 else words << 8
        bits = ((upper >> 4) & 0x07F0) | (upper & -32768)
        plane = bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * _TO_BF16
    else:
        plane = plane_of(words, PLANE, KIND, DECODE)
    return plane.to(COMPUTE)


@triton.jit
def _attend_tile(
    m, sums, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query, scale, latent_ptr, rope_ptr,
    table_ptr, block, stride, kv_len, floor, window, KV_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, ROPE_WIDTH: tl.constexpr,
    ROPE_USED: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, DECODE: tl.constexpr,
    COMPUTE: tl.constexpr, ALIGN: tl.constexpr, SIMPLE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys; sums are ``[ROWS]``, or ``[ROWS, KV_TILE]`` to be added
    up by the caller.

    Slots below ``floor`` and from ``kv_len`` on are not read; page ids come two tiles ahead of
    their rows.
    """
    SUB: tl.constexpr = KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    PAGES: tl.constexpr = KV_TILE // SUB
    PARTS: tl.constexpr = BLOCK_SIZE // SUB
    IEEE: tl.constexpr = tl.float32 == COMPUTE
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
    # Triton does not pipeline a loop that merely hands a value on, so something is done to it; ids
    # are not negative.
    pages = tl.maximum(ahead, 0)
    ahead = page_ids(table_ptr, tile + 2, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)

    k0 = _elements(latent, 0, KIND, DECODE, COMPUTE)
    scores = tl.zeros([m.shape[0], KV_TILE], tl.float32)
    scores = scores_of(q0, k0, scores, IEEE)
    scores = scores_of(r0, _elements(rope, 0, KIND, DECODE, COMPUTE), scores, IEEE)
    k1 = k0
    if PLANES > 1:
        k1 = _elements(latent, 1, KIND, DECODE, COMPUTE)
        scores = scores_of(q1, k1, scores, IEEE)
        scores = scores_of(r1, _elements(rope, 1, KIND, DECODE, COMPUTE), scores, IEEE)
    if not SIMPLE:
        scores = scores * scale
    seen = token[None, :] <= tl.minimum(query, kv_len - 1)[:, None]
    if WINDOW:
        seen = seen & (query[:, None] - token[None, :] < window)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = scores - base[:, None]
    alpha = m - base
    if SIMPLE:
        # Not fma(scores, scale, -base * scale), as in the dense kernels: that rounds apart.
        weights = weights * scale
        alpha = alpha * scale
    weights = tl.exp2(weights)
    alpha = tl.exp2(alpha)
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
    BUNDLES: tl.constexpr,
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
    """Latent attention of the plan's rows; grid ``(groups * HEADS,)``.

    Shapes: query ``[T, NUM_HEADS, SIZE]`` and rotary ``[T, NUM_HEADS, ROPE_SIZE]``; latent
    ``[N, BLOCK_SIZE, words]`` and rope likewise, with the same strides in stored words; out
    ``[T, NUM_HEADS, SIZE]``; LSE ``[T, NUM_HEADS]``; the rest as in the plan, whose scratch is laid
    out as :func:`builders.split_kv.latent_states` counts it.
    """
    CELLS: tl.constexpr = TILE_HEADS * QUERY_TOKENS
    # Tiles of 64 rows are what a warp group multiplies; a row is one warp's then.
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
    OWN: tl.constexpr = HEAD_LOOPS if BUNDLES > 1 else 0
    own = groups * HEADS * AREA + pid * (OWN + SPARE)
    spare = own + OWN
    for r in tl.range(first_row, past_row, num_stages=1, disable_licm=True):
        total = tl.load(total_ptr + 1)
        fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
        req = tl.load(fields)
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        kv_len = tl.load(fields + 3)
        first = tl.load(fields + 4)
        first_part = tl.load(fields + 8)
        parts = tl.load(fields + 9)
        begin = tl.where(r == tl.load(mine), tl.load(mine + 1), 0)
        end = tl.where(r == tl.load(mine + 2), tl.load(mine + 3), parts)
        base = tl.load(fields + 7) + (r % HEAD_LOOPS) * tl.load(fields + 6)
        owner = (base.to(tl.int64) * groups // total).to(tl.int32)
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
            logits_scale = scale * factor * _LOG2E
            query = first + row // TILE_HEADS
            last = first + count - 1
            table = table_ptr + req.to(tl.int64) * table_row
            floor = 0
            low = segment_start(first_part + begin) // SEGMENT_UNIT
            if WINDOW:
                floor = tl.maximum(first - window + 1, 0)
                low = tl.maximum(low, floor // KV_TILE)
            high = tl.minimum(
                segment_start(first_part + end) // SEGMENT_UNIT,
                tl.cdiv(tl.minimum(kv_len, last + 1), KV_TILE),
            )
            # The first group that starts inside the row lends it its slots: no other row can.
            lender = owner + 1
            slots = (lender * HEADS + lane) * AREA
            is_whole = (begin == 0) & (end == parts)
            pages = page_ids(table, low, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)
            ahead = page_ids(table, low + 1, floor, kv_len, 0, SUB, PARTS, PAGES, WINDOW, False)
            segment = first_part + begin
            if BY_GROUP:
                last_part = tl.maximum(segment_of(tl.maximum(high - 1, 0) * SEGMENT_UNIT), segment)
                held = 0
                # A loop over segments around one over tiles: Triton does not pipeline a loop with a
                # barrier, and before a branch it forgets to wait for products by warp group.
                for part in tl.range(segment, last_part + 1, num_stages=1, disable_licm=True):
                    since = tl.maximum(segment_start(part) // SEGMENT_UNIT, low)
                    until = tl.minimum(segment_start(part + 1) // SEGMENT_UNIT, high)
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)
                    acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
                    acc1 = acc0
                    for tile in tl.range(since, until, num_stages=STAGES):
                        m, l, acc0, acc1, pages, ahead = _attend_tile(
                            m, l, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query,
                            logits_scale, latent_ptr, rope_ptr, table, block, stride, kv_len, floor,
                            window, KV_TILE, BLOCK_SIZE, WIDTH, USED, ROPE_WIDTH, ROPE_USED, KIND,
                            PLANES, DECODE, COMPUTE, ALIGN, SIMPLE, WINDOW,
                        )  # fmt: skip
                    if SIMPLE:
                        m = m * logits_scale
                    # Read again where needed: registers are for the loop. Counts are not negative.
                    fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
                    token = tl.load(fields + 1)
                    count = tl.load(fields + 2)
                    writes = is_whole & (tl.load(fields + 11) == 1)
                    in_group = (r % HEAD_LOOPS) * HEADS + lane
                    in_group = in_group * TILE_HEADS + tl.minimum(count, 0)
                    is_last = part == last_part
                    prefix = slots
                    if is_whole & is_last:
                        prefix = _prefix_at(
                            r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS,
                            HEAD_LOOPS, AREA, SLOTS, BUNDLES,
                        )  # fmt: skip
                    alone = (part == segment) & is_last & (begin == 0)
                    if alone & writes:
                        _write(
                            m, l, acc0, acc1, row, token, count, in_group, out_ptr, lse_ptr, factor,
                            out_token, out_head, lse_token, NUM_HEADS, TILE_HEADS, CELLS, WIDTH,
                            USED, SIZE, KIND, PLANES, LSE,
                        )  # fmt: skip
                    else:
                        slot = tl.where(alone, prefix, spare + held)
                        slot = tl.where(begin > 0, slots + part - first_part, slot)
                        store_state(
                            states_ptr, sums_ptr, slot, m, l, acc0, acc1, acc0, acc1, CELLS, WIDTH,
                            PLANES,
                        )  # fmt: skip
                        held += 1
                        if (begin == 0) & (alone == 0) & (is_last | (held == SPARE)):
                            # Other threads of the program stored what is read now.
                            tl.debug_barrier()
                            target = tl.where(is_last, prefix, spare)
                            fold_parts(
                                0, in_group, token, count, spare, 1, held, target,
                                (is_last & writes) == 0, states_ptr, sums_ptr, out_ptr, lse_ptr,
                                None, factor, None, out_token, out_head, lse_token, NUM_HEADS,
                                TILE_HEADS, CELLS, WIDTH, PLANES, KIND, USED, SIZE, FINISH_ROWS,
                                FINISH_WIDTH, False, False, LSE, False,
                            )  # fmt: skip
                            held = 1
                            tl.debug_barrier()
            else:
                M = tl.full([ROWS], float("-inf"), tl.float32)
                L = tl.zeros([ROWS], tl.float32)
                A0 = tl.zeros([ROWS, WIDTH], tl.float32)
                A1 = A0
                m = M
                # Keys of a row are several warps': added up once, and not for every tile.
                sums = tl.zeros([ROWS, KV_TILE], tl.float32)
                acc0 = A0
                acc1 = A0
                part = tl.maximum(segment_of(low * SEGMENT_UNIT), segment)
                part_end = segment_start(part + 1) // SEGMENT_UNIT
                if begin > 0:
                    # Segments before a window narrower than the plan's are states all the same.
                    for unseen in range(segment, tl.minimum(part, first_part + end)):
                        store_state(
                            states_ptr, sums_ptr, slots + unseen - first_part, M, L, A0, A1, A0, A1,
                            CELLS, WIDTH, PLANES,
                        )  # fmt: skip
                for tile in tl.range(low, high, num_stages=STAGES):
                    m, sums, acc0, acc1, pages, ahead = _attend_tile(
                        m, sums, acc0, acc1, pages, ahead, tile, q0, q1, r0, r1, query,
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
                if begin == 0:
                    fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
                    token = tl.load(fields + 1)
                    count = tl.load(fields + 2)
                    if is_whole & (tl.load(fields + 11) == 1):
                        in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
                        _write(
                            M, L, A0, A1, row, token, count, in_group, out_ptr, lse_ptr, factor,
                            out_token, out_head, lse_token, NUM_HEADS, TILE_HEADS, CELLS, WIDTH,
                            USED, SIZE, KIND, PLANES, LSE,
                        )  # fmt: skip
                    else:
                        prefix = slots
                        if is_whole:
                            prefix = _prefix_at(
                                r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS,
                                HEAD_LOOPS, AREA, SLOTS, BUNDLES,
                            )  # fmt: skip
                        store_state(
                            states_ptr, sums_ptr, prefix, M, L, A0, A1, A0, A1, CELLS, WIDTH, PLANES
                        )
            fields = _fields_of(r, mine, rows_ptr, HEAD_LOOPS)
            bundles = tl.load(fields + 11)
            if (is_whole == 0) | (bundles > 1):
                token = tl.load(fields + 1)
                count = tl.load(fields + 2)
                bundle = tl.load(fields + 10)
                in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
                loop = r % HEAD_LOOPS
                mine_too, row_owner, spans = _bundles_at(
                    r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS, HEAD_LOOPS, AREA,
                    SLOTS, BUNDLES,
                )  # fmt: skip
                in_parts = (begin > 0) | (end < parts)
                # Only the last to arrive needs it, and then at once.
                after_prefix = tl.load(starts_ptr + 2 * lender + 1, mask=in_parts, other=1)
                counter = counters_ptr + slots // AREA
                # All threads have stored before one of them says so.
                tl.debug_barrier()
                arrived = tl.atomic_add(
                    counter, end - begin, mask=in_parts, sem="acq_rel", scope="gpu"
                )
                ready = is_whole | (arrived + end - begin == parts)
                tl.store(counter, 0, mask=ready & in_parts)
                if ready:
                    # First the bundle's segments, if they are in parts, then the bundles.
                    for level in range(is_whole.to(tl.int32), tl.where(bundles > 1, 2, 1)):
                        slot = slots
                        after = after_prefix
                        count_of = parts
                        target = mine_too + bundle
                        stores = bundles > 1
                        goes_on = ready
                        if level == 1:
                            slot = mine_too
                            # Without others there are two: what is folded so far, and the last.
                            after = tl.where(spans, 1, spare - mine_too)
                            count_of = tl.where(spans, bundles, after + 1)
                            target = mine_too
                            stores = (spans == 0) & (bundle + 1 < bundles)
                            goes_on = bundle > 0
                            tl.debug_barrier()
                            if spans:
                                counter = counters_ptr + groups * HEADS
                                counter += ((row_owner + 1) * HEADS + lane) * HEAD_LOOPS + loop
                                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                                goes_on = arrived + 1 == bundles
                                if goes_on:
                                    tl.store(counter, 0)
                        if goes_on:
                            fold_parts(
                                0, in_group, token, count, slot, after, count_of,
                                target, stores, states_ptr, sums_ptr, out_ptr, lse_ptr, None,
                                factor, None, out_token, out_head, lse_token, NUM_HEADS, TILE_HEADS,
                                CELLS, WIDTH, PLANES, KIND, USED, SIZE, FINISH_ROWS, FINISH_WIDTH,
                                False, False, LSE, False,
                            )  # fmt: skip
                            # The next bundle's state comes to where this one's was read.
                            tl.debug_barrier()
