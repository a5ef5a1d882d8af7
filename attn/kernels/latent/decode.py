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
    store_planes,
)
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.groups import Block, Out, Plan, Scratch, State
from attn.kernels.lang.stored import E4M3, plane_of
from attn.kernels.latent.groups import Cache, Item, Keys, Program, Queries, Query, Tile
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
def _tiles_of(fields, part, past, query, plan, KV_TILE: tl.constexpr):
    """First KV tile, and the end, that a work item sees of segments ``[part, past)``.

    ``fields`` points to the numbers of the work item.
    """
    first = tl.load(fields + 4)
    low = segment_start(part) // plan.SEGMENT_UNIT
    if query.WINDOW:
        low = tl.maximum(low, tl.maximum(first - query.window + 1, 0) // KV_TILE)
    seen = tl.minimum(tl.load(fields + 3), first + tl.load(fields + 2))
    return low, tl.minimum(segment_start(past) // plan.SEGMENT_UNIT, tl.cdiv(seen, KV_TILE))


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
def _weights_of(scores, m, token, queries, query):
    """New maxima, factors for old sums, and weights, from the scores of one tile of keys.

    ``scores`` ``[ROWS, KV_TILE]`` are products that are still to be scaled. ``m`` ``[ROWS]`` are
    the maxima so far, ``token`` ``[KV_TILE]`` the positions of the keys.
    """
    if not query.SIMPLE:
        scores = scores * queries.scale
    seen = token[None, :] <= queries.limit[:, None]
    if query.WINDOW:
        seen = seen & (queries.position[:, None] - token[None, :] < query.window)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = scores - base[:, None]
    alpha = m - base
    if query.SIMPLE:
        # Unlike the dense kernels this does not use fma(scores, scale, -base * scale): that rounds
        # the two products differently.
        weights = weights * queries.scale
        alpha = alpha * queries.scale
    return top, tl.exp2(alpha), tl.exp2(weights)


@triton.jit
def _pages_of(number, keys, cache, query, KV_TILE: tl.constexpr):
    """The page of each run of tokens of tile ``number``, int32."""
    return page_ids(
        keys.table_ptr, number, keys.floor, keys.kv_len, 0, cache.RUN,
        cache.BLOCK_SIZE // cache.RUN, KV_TILE // cache.RUN, query.WINDOW, False,
    )  # fmt: skip


@triton.jit
def _load_part(part_ptr, at, WIDTH: tl.constexpr, USED: tl.constexpr):
    """Load the words ``[KV_TILE, WIDTH]`` of the latent or rotary parts of a tile of rows.

    ``at`` ``[KV_TILE]`` int64 are the offsets of the rows. Padding is 0.
    """
    column = tl.arange(0, WIDTH)
    if USED < WIDTH:
        words = tl.load(
            part_ptr + (at[:, None] + column[None, :]), mask=(column < USED)[None, :], other=0
        )
    else:
        words = tl.load(part_ptr + (at[:, None] + column[None, :]))
    return words


@triton.jit
def _attend_tile(
    m, sums, acc0, acc1, pages, ahead, number, queries, keys, query, cache, tile
):  # fmt: skip
    """Online softmax over one tile of keys.

    ``sums`` are ``[ROWS]``, or ``[ROWS, KV_TILE]`` for the caller to add up. Slots below the keys'
    floor and from their ``kv_len`` on are not read. Page ids are loaded two tiles before the rows
    that they lead to: ``pages`` are those of tile ``number``, ``ahead`` those of the next one.

    Returns:
        m, sums, acc0, acc1, pages and ahead for the next tile.
    """
    IEEE: tl.constexpr = tl.float32 == tile.COMPUTE
    HIDES_SCORES: tl.constexpr = m.shape[0] >= 64 and not IEEE
    KV_TILE: tl.constexpr = tile.KV_TILE
    KIND: tl.constexpr = cache.KIND
    DECODE: tl.constexpr = cache.DECODE
    COMPUTE: tl.constexpr = tile.COMPUTE
    token = number * KV_TILE + tl.arange(0, KV_TILE)
    at = paged_rows(
        pages, number, keys.floor, keys.kv_len, 0, cache.block, cache.stride, True, cache.RUN,
        cache.BLOCK_SIZE // cache.RUN, KV_TILE // cache.RUN, query.WINDOW, False, cache.ALIGN,
    )  # fmt: skip
    latent = _load_part(cache.latent_ptr, at, cache.WIDTH, cache.USED)
    rope = _load_part(cache.rope_ptr, at, cache.ROPE_WIDTH, cache.ROPE_USED)
    # Triton does not pipeline a loop that merely hands a value on to the next turn. This maximum
    # changes nothing, since ids are not negative, and makes it pipeline.
    pages = tl.maximum(ahead, 0)
    ahead = _pages_of(number + 2, keys, cache, query, KV_TILE)

    k0 = _elements(latent, 0, KIND, DECODE, COMPUTE)
    zero = tl.zeros([m.shape[0], KV_TILE], tl.float32)
    scores = zero
    if not HIDES_SCORES:
        scores = scores_of(queries.q0, k0, scores, IEEE)
    scores = scores_of(queries.r0, _elements(rope, 0, KIND, DECODE, COMPUTE), scores, IEEE)
    k1 = k0
    if cache.PLANES > 1:
        k1 = _elements(latent, 1, KIND, DECODE, COMPUTE)
        scores = scores_of(queries.q1, k1, scores, IEEE)
        scores = scores_of(queries.r1, _elements(rope, 1, KIND, DECODE, COMPUTE), scores, IEEE)
    if HIDES_SCORES:
        # Where Triton sees that one product feeds another, it has both warp groups compute all of
        # the first. The fma keeps it from merging the two score products into one chain, and the
        # branch hides that the scores feed the next product. The fma also makes Triton wait for
        # the product; before a branch alone it forgets to.
        scores = tl.fma(scores_of(queries.q0, k0, zero, IEEE), zero + 1.0, scores)
        top = m
        alpha = m
        weights = scores
        if keys.kv_len > 0:
            top, alpha, weights = _weights_of(scores, m, token, queries, query)
    else:
        top, alpha, weights = _weights_of(scores, m, token, queries, query)
    if len(sums.shape) == 1:
        sums = sums * alpha + tl.sum(weights, 1)
    else:
        sums = sums * alpha[:, None] + weights
    weights = weights.to(COMPUTE)
    acc0 = dot(weights, k0, acc0 * alpha[:, None], IEEE)
    if cache.PLANES > 1:
        acc1 = dot(weights, k1, acc1 * alpha[:, None], IEEE)
    return top, sums, acc0, acc1, pages, ahead


@triton.jit
def _load_item(fields):
    """Load the numbers of a work item to which ``fields`` points."""
    req = tl.load(fields)
    token = tl.load(fields + 1)
    tokens = tl.load(fields + 2)
    kv_len = tl.load(fields + 3)
    return Item(req=req, token=token, tokens=tokens, kv_len=kv_len, first=tl.load(fields + 4))


@triton.jit
def _load_queries(r, row, item, program, query, cache, plan, tile):
    """Load the queries of work item ``r``, whose numbers are ``item``, for the program's heads.

    ``row`` ``[ROWS]`` int32 are the numbers of the query rows.

    Returns:
        The queries, and the factor of all elements of the cache.
    """
    KIND: tl.constexpr = cache.KIND
    COMPUTE: tl.constexpr = tile.COMPUTE
    in_group = ((r % plan.HEAD_LOOPS) * plan.HEADS + program.lane) * tile.TILE_HEADS
    head = in_group + row % tile.TILE_HEADS
    at = item.token + row // tile.TILE_HEADS
    wanted = (row < item.tokens * tile.TILE_HEADS) & (row < tile.USED) & (head < tile.NUM_HEADS)
    offset = at.to(tl.int64) * query.query_token + head * query.query_head
    q0 = load_query(
        query.query_ptr, offset, wanted, 0, cache.WIDTH, cache.USED, cache.SIZE, KIND
    ).to(COMPUTE)
    q1 = q0
    if cache.PLANES > 1:
        q1 = load_query(
            query.query_ptr, offset, wanted, 1, cache.WIDTH, cache.USED, cache.SIZE, KIND
        ).to(COMPUTE)
    offset = at.to(tl.int64) * query.rotary_token + head * query.rotary_head
    r0 = load_query(
        query.rotary_ptr, offset, wanted, 0, cache.ROPE_WIDTH, cache.ROPE_USED, cache.ROPE_SIZE,
        KIND,
    ).to(COMPUTE)  # fmt: skip
    r1 = r0
    if cache.PLANES > 1:
        r1 = load_query(
            query.rotary_ptr, offset, wanted, 1, cache.ROPE_WIDTH, cache.ROPE_USED, cache.ROPE_SIZE,
            KIND,
        ).to(COMPUTE)  # fmt: skip
    factor = 1.0
    if KIND > 0:
        factor = tl.load(cache.scale_ptr)
    logits_scale = query.scale * factor * LOG2E
    position = item.first + row // tile.TILE_HEADS
    limit = tl.minimum(position, item.kv_len - 1)
    queries = Queries(
        q0=q0, q1=q1, r0=r0, r1=r1, position=position, limit=limit, scale=logits_scale
    )
    return queries, factor


@triton.jit
def decode_share(query, cache, plan, scratch, out, tile):
    """Attention of the work items in a program's share; the arguments are groups."""
    pid = tl.program_id(0)
    program = Program(
        pid=pid, lane=pid % plan.HEADS,
        share=plan.shares_ptr + (pid // plan.HEADS) * _SHARE_FIELDS,
    )  # fmt: skip
    row = tl.arange(0, tile.ROWS)
    first_row = tl.load(program.share)
    past_row = tl.load(program.share + 2) + (tl.load(program.share + 3) > 0).to(tl.int32)
    for turn in tl.range(0, past_row - first_row, num_stages=1, disable_licm=True):
        # The loop does not count r itself: Triton would keep r, and every address, in 64 bits.
        r = tl.load(program.share) + turn
        decode_item(r, row, program, query, cache, plan, scratch, out, tile)


@triton.jit
def decode_item(r, row, program, query, cache, plan, scratch, out, tile):
    """Attention of a program's segments of work item ``r``, which may be none.

    ``row`` ``[ROWS]`` int32 are the numbers of the query rows. The states of the segments are
    folded, and written as the result or stored for others. The last program to arrive at the item
    folds what others stored.
    """
    fields = fields_of(r, program, plan)
    item = _load_item(fields)
    segments = share_of(r, fields, program, plan)
    if segments.end > segments.begin:
        queries, factor = _load_queries(r, row, item, program, query, cache, plan, tile)
        table = cache.table_ptr + item.req.to(tl.int64) * cache.table_row
        floor = 0
        if query.WINDOW:
            floor = tl.maximum(item.first - query.window + 1, 0)
        keys = Keys(table_ptr=table, kv_len=item.kv_len, floor=floor)
        low, high = _tiles_of(
            fields, segments.first + segments.begin, segments.first + segments.end, query, plan,
            tile.KV_TILE,
        )  # fmt: skip
        # A warp group multiplies tiles of 64 rows; then all of a row belongs to one warp.
        if tile.ROWS >= 64:
            _attend_by_group(
                r, low, high, segments, factor, queries, keys, program, query, cache, plan, scratch,
                out, tile,
            )  # fmt: skip
        else:
            _attend_by_warps(
                r, low, high, segments, factor, queries, keys, program, query, cache, plan, scratch,
                out, tile,
            )  # fmt: skip
        finish_row(r, program, factor, plan, scratch, out, tile)


@triton.jit
def _attend_by_group(
    r, low, high, segments, factor, queries, keys, program, query, cache, plan, scratch, out, tile
):
    """Attention of 64 query rows over the tiles ``[low, high)`` of a program's segments.

    The state of each segment goes to scratch memory, where the states are folded.
    """
    pages = _pages_of(low, keys, cache, query, tile.KV_TILE)
    ahead = _pages_of(low + 1, keys, cache, query, tile.KV_TILE)
    segment = segments.first + segments.begin
    last_part = tl.maximum(segment_of(tl.maximum(high - 1, 0) * plan.SEGMENT_UNIT), segment)
    # The loop over segments encloses a loop over tiles for two reasons: Triton does not pipeline a
    # loop that has a barrier, and before a branch it forgets to wait for products of warp groups.
    for part in tl.range(segment, last_part + 1, num_stages=1, disable_licm=True):
        since, until = _tiles_of(
            fields_of(r, program, plan), part, part + 1, query, plan, tile.KV_TILE
        )
        m = tl.full([tile.ROWS], float("-inf"), tl.float32)
        l = tl.zeros([tile.ROWS], tl.float32)
        acc0 = tl.zeros([tile.ROWS, cache.WIDTH], tl.float32)
        acc1 = acc0
        for number in tl.range(since, until, num_stages=tile.STAGES, disable_licm=True):
            m, l, acc0, acc1, pages, ahead = _attend_tile(
                m, l, acc0, acc1, pages, ahead, number, queries, keys, query, cache, tile
            )
        if query.SIMPLE:
            m = m * queries.scale
        close_segment(
            State(m, l, acc0, acc1, acc0, acc1), recomputed(r, cache.DECODE), part,
            part == last_part, program, factor, plan, scratch, out, tile, cache.DECODE,
        )  # fmt: skip


@triton.jit
def _attend_by_warps(
    r, low, high, segments, factor, queries, keys, program, query, cache, plan, scratch, out, tile
):
    """Attention of 16 query rows over the tiles ``[low, high)`` of a program's segments.

    The folded state stays in registers. If the program has the item's first segment, the state is
    written as the result, or stored for the fold of segment groups. Else the state of each segment
    is stored.
    """
    ROWS: tl.constexpr = tile.ROWS
    KV_TILE: tl.constexpr = tile.KV_TILE
    pages = _pages_of(low, keys, cache, query, KV_TILE)
    ahead = _pages_of(low + 1, keys, cache, query, KV_TILE)
    segment = segments.first + segments.begin
    M = tl.full([ROWS], float("-inf"), tl.float32)
    L = tl.zeros([ROWS], tl.float32)
    A0 = tl.zeros([ROWS, cache.WIDTH], tl.float32)
    A1 = A0
    m = M
    # Several warps have keys of a row: their sums are added once, not for every tile.
    sums = tl.zeros([ROWS, KV_TILE], tl.float32)
    acc0 = A0
    acc1 = A0
    part = tl.maximum(segment_of(low * plan.SEGMENT_UNIT), segment)
    part_end = segment_start(part + 1) // plan.SEGMENT_UNIT
    if segments.begin > 0:
        # If the layer's window is narrower than the plan's, the segments before it need empty
        # states: the fold reads a state of every segment.
        for unseen in range(segment, tl.minimum(part, segments.first + segments.end)):
            store_planes(
                scratch, segments.slots + unseen - segments.first, M, L, State(M, L, A0, A1, A0, A1)
            )
    for number in tl.range(low, high, num_stages=tile.STAGES):
        m, sums, acc0, acc1, pages, ahead = _attend_tile(
            m, sums, acc0, acc1, pages, ahead, number, queries, keys, query, cache, tile
        )
        if (number + 1 == part_end) | (number + 1 == high):
            l = tl.sum(sums, 1)
            highest = m
            if query.SIMPLE:
                highest = m * queries.scale
            if segments.begin > 0:
                store_planes(
                    scratch, segments.slots + part - segments.first, highest, l,
                    State(highest, l, acc0, acc1, acc0, acc1),
                )  # fmt: skip
            else:
                M0 = M
                L0 = L
                M, L, A0 = fold(M0, L0, A0, highest, l, acc0)
                if cache.PLANES > 1:
                    _, _, A1 = fold(M0, L0, A1, highest, l, acc1)
            m = tl.full([ROWS], float("-inf"), tl.float32)
            sums = tl.zeros([ROWS, KV_TILE], tl.float32)
            acc0 = tl.zeros([ROWS, cache.WIDTH], tl.float32)
            acc1 = acc0
            part += 1
            part_end = segment_start(part + 1) // plan.SEGMENT_UNIT
    _write_or_store(
        State(M, L, A0, A1, A0, A1), r, factor, program, plan, scratch, out, tile, cache.DECODE
    )


@triton.jit
def _write_or_store(
    state, r, factor, program, plan, scratch, out, tile, DECODE: tl.constexpr
):  # fmt: skip
    """Write or store the folded state of a program that has the first segment of work item ``r``.

    If the program has all keys of the item's tokens, the state is the result.
    """
    fields = fields_of(r, program, plan)
    segments = share_of(r, fields, program, plan)
    if segments.begin == 0:
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        is_whole = segments.end == segments.parts
        if is_whole & (tl.load(fields + 11) == 1):
            in_group = ((r % plan.HEAD_LOOPS) * plan.HEADS + program.lane) * tile.TILE_HEADS
            block = Block(token=token, tokens=count, kv_head=0, in_group=in_group)
            write_row(state, block, factor, out, scratch, tile, DECODE)
        else:
            own, spare = own_states(program, plan, tile.SPARE)
            prefix = segments.slots
            if is_whole:
                prefix = prefix_at(r, fields, program, plan, own, spare)
            store_planes(scratch, prefix, state.m, state.l, state)


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
    decode_share(
        Query(
            query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token,
            query_head=query_head, rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
            window=window, WINDOW=WINDOW, SIMPLE=SIMPLE,
        ),
        Cache(
            latent_ptr=latent_ptr, rope_ptr=rope_ptr, scale_ptr=scale_ptr, table_ptr=table_ptr,
            table_row=table_row, block=block, stride=stride, BLOCK_SIZE=BLOCK_SIZE,
            RUN=KV_TILE if BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE), SIZE=SIZE,
            WIDTH=WIDTH, USED=USED, ROPE_SIZE=ROPE_SIZE, ROPE_WIDTH=ROPE_WIDTH, ROPE_USED=ROPE_USED,
            KIND=KIND, PLANES=PLANES, DECODE=DECODE, ALIGN=ALIGN,
        ),
        Plan(
            rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
            counters_ptr=counters_ptr, groups=groups, HEADS=HEADS, HEAD_LOOPS=HEAD_LOOPS,
            SLOTS=SLOTS, SEGMENT_GROUPS=SEGMENT_GROUPS, AREA=AREA, SEGMENT_UNIT=SEGMENT_UNIT,
        ),
        Scratch(
            states_ptr=states_ptr, sums_ptr=sums_ptr, USED=TILE_HEADS * QUERY_TOKENS, WIDTH=WIDTH,
            PLANES=PLANES, FINISH_ROWS=FINISH_ROWS, FINISH_WIDTH=FINISH_WIDTH,
        ),
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
            out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=False, FP8_OUT=False,
            LSE=LSE, COLUMNS=USED, SIZE=SIZE, KIND=KIND,
        ),
        Tile(
            NUM_HEADS=NUM_HEADS, TILE_HEADS=TILE_HEADS, ROWS=ROWS, USED=TILE_HEADS * QUERY_TOKENS,
            KV_TILE=KV_TILE, COMPUTE=COMPUTE, SPARE=SPARE, STAGES=STAGES,
        ),
    )  # fmt: skip
