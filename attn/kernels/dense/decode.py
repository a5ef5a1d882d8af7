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

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn.kernels.dense.groups import Cache, Keys, Queries, Query, Run, Slots, Tile
from attn.kernels.dense.query_rows import (
    factors_of,
    fold_parts,
    prepared_queries,
    write_state,
)
from attn.kernels.dense.tile import (
    attend_tiles,
    causal_and_prefix,
    empty_state,
    keys_seen,
    readable,
    store_planes,
)
from attn.kernels.lang.groups import Block, Mask, Out, Plan, Rows, Scratch, Stripe
from attn.kernels.lang.masks import seen_by_all
from builders.splitkv.device.segments import (
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


class _Work(NamedTuple):
    """A program's part of a work item: a run of its segments, for one tile of heads.

    If the plan depends on the batch, a part counts as one segment, whatever its number of tiles.
    """

    number: tl.tensor
    """int32, number of the work item: row of the plan times HEAD_LOOPS, plus head loop."""
    lane: tl.tensor
    """int32, number of the program in its group."""
    share: tl.tensor
    """Pointer to the SHARE_FIELDS numbers of the group's share."""
    row: tl.tensor
    """``[ROWS]`` int32, numbers of the tile's query rows."""
    req: tl.tensor
    """int32, the request."""
    token: tl.tensor
    """int32, the first query token in the step."""
    tokens: tl.tensor
    """int32, number of query tokens."""
    kv_len: tl.tensor
    """int32, number of the request's keys."""
    first: tl.tensor
    """int32, position of the first query."""
    first_part: tl.tensor
    """int32, the work item's first segment."""
    parts: tl.tensor
    """int32, number of the work item's segments."""
    segment_group: tl.tensor
    """int32, number of the segment group among the request's."""
    begin: tl.tensor
    """int32, the first segment of the part, counted from the work item's first segment."""
    end: tl.tensor
    """int32, the segment after the part's last, counted from the work item's first segment."""
    owner: tl.tensor
    """int32, the group that has the work item's first tile."""
    shares: tl.tensor
    """int32, number of groups that have tiles."""
    cut_low: tl.tensor
    """int32, the part's first tile; read if the plan depends on the batch."""
    cut_high: tl.tensor
    """int32, the tile after the part's last; read if the plan depends on the batch."""


@triton.jit
def _block_of(work, token, tokens, plan, tile):
    """The query rows of a work item, for the program's tile of heads."""
    tile_of_heads = (work.number % plan.HEAD_LOOPS) * plan.HEADS + work.lane
    kv_head = tile_of_heads // tile.HEAD_TILES
    in_group = (tile_of_heads % tile.HEAD_TILES) * tile.TILE_HEADS
    return Block(token=token, tokens=tokens, kv_head=kv_head, in_group=in_group)


@triton.jit
def _rows_of(block, row, tile):
    """The query rows of a block; ``row`` ``[ROWS]`` int32 are their numbers in the tile."""
    in_group = block.in_group + row % tile.TILE_HEADS
    wanted = (row < block.tokens * tile.TILE_HEADS) & (in_group < tile.GROUP)
    token = block.token + row // tile.TILE_HEADS
    return Rows(token=token, head=block.kv_head * tile.GROUP + in_group, wanted=wanted)


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
    SUMS: tl.constexpr,
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
    SUMS: the prefill kernel takes other rows of the same requests and gives the same bits, see
    :class:`attn.kernels.dense.groups.Tile`.
    WAITS says that the kernel may start before the kernels ahead of it have ended.
    """
    if WAITS:
        # Wait before any read: kernels ahead write the plan, the queries and the keys. Every
        # program waits: a kernel behind takes the end of this one for the end of all before it.
        gdc_wait()
    _attend_share(
        Query(
            query_ptr=query_ptr, slopes_ptr=slopes_ptr, query_token=query_token,
            query_head=query_head, scale=scale, soft_cap=soft_cap, GUARD=GUARD, SOFT_CAP=SOFT_CAP,
            ALIBI=ALIBI, SIMPLE=SIMPLE,
        ),
        Cache(
            key_ptr=key_ptr, value_ptr=value_ptr, k_inline_ptr=k_inline_ptr,
            v_inline_ptr=v_inline_ptr, k_scale_ptr=k_scale_ptr, v_scale_ptr=v_scale_ptr,
            table_ptr=table_ptr, table_row=table_row, k_block=k_block, k_token=k_token,
            k_head=k_head, v_block=v_block, v_token=v_token, v_head=v_head, s_block=s_block,
            s_token=s_token, s_head=s_head, scale_head=scale_head, BLOCK_SIZE=BLOCK_SIZE,
            SAME_ROWS=SAME_ROWS, K_SIZE=K_SIZE, K_WIDTH=K_WIDTH, K_USED=K_USED, V_WIDTH=V_WIDTH,
            V_USED=V_USED, KIND=KIND, PLANES=PLANES, DECODE=DECODE, INLINE=INLINE,
            PER_TENSOR=PER_TENSOR, ALIGN=ALIGN,
        ),
        Plan(
            rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
            counters_ptr=counters_ptr, groups=groups, HEADS=HEADS, HEAD_LOOPS=HEAD_LOOPS,
            SLOTS=SLOTS, SEGMENT_GROUPS=SEGMENT_GROUPS, AREA=AREA, SEGMENT_UNIT=SEGMENT_UNIT,
            DEPENDS_ON_BATCH=DEPENDS_ON_BATCH,
        ),
        Scratch(
            states_ptr=states_ptr, sums_ptr=sums_ptr, USED=TILE_HEADS * QUERY_TOKENS,
            WIDTH=V_WIDTH, PLANES=PLANES, FINISH_ROWS=FINISH_ROWS, FINISH_WIDTH=FINISH_WIDTH,
        ),
        Mask(
            causal_ptr=causal_ptr, prefix_ptr=prefix_ptr, ranges_ptr=ranges_ptr,
            num_ranges=num_ranges, window=window, chunk=chunk, lookback=lookback, CAUSAL=CAUSAL,
            WINDOW=WINDOW, CHUNK=CHUNK, RSWA=RSWA, RANGES=RANGES, CLAMP=CLAMP,
        ),
        Stripe(size=dcp_size, rank=dcp_rank, interleave=dcp_interleave, DCP=DCP),
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr,
            output_scale_ptr=output_scale_ptr, out_token=out_token, out_head=out_head,
            lse_token=lse_token, SINKS=SINKS, FP8_OUT=FP8_OUT, LSE=LSE,
            HARDWARE_E4M3=HARDWARE_E4M3, COLUMNS=V_USED, SIZE=V_SIZE, KIND=KIND,
        ),
        Tile(
            GROUP=GROUP, TILE_HEADS=TILE_HEADS, HEAD_TILES=HEAD_TILES, ROWS=ROWS, KV_TILE=KV_TILE,
            COMPUTE=COMPUTE, STAGES=STAGES, SUMS=SUMS,
        ),
    )  # fmt: skip


@triton.jit
def _attend_share(query, cache, plan, scratch, mask, stripe, out, tile):
    """Attention of the work items in the share of the program's group."""
    pid = tl.program_id(0)
    lane = pid % plan.HEADS
    share = plan.shares_ptr + (pid // plan.HEADS) * _SHARE_FIELDS
    row = tl.arange(0, tile.ROWS)
    first_row = tl.load(share)
    # The loop needs the number of the step's tiles soon. Loading it here hides its latency. The
    # number is never negative, so this minimum is 0 and changes nothing but the load's place.
    unwanted = tl.minimum(tl.load(plan.total_ptr + 1), 0)
    past_row = tl.load(share + 2) + (tl.load(share + 3) > 0).to(tl.int32) + unwanted
    # Registers are for keys. A work item's numbers are therefore loaded again where they are
    # needed, and with quantised caches the compiler may hoist nothing out of this loop.
    for number in tl.range(first_row, past_row, num_stages=1, disable_licm=cache.PLANES > 1):
        work = _load_work_item(number, share, pid, lane, row, plan)
        if work.end > work.begin:
            state, v_factor = _attend(work, query, cache, plan, scratch, mask, stripe, tile)
            _write_or_store(work, state, v_factor, plan, scratch, out, tile)


@triton.jit
def _load_work_item(number, share, pid, lane, row, plan):
    """Load the numbers of work item ``number`` and find the part of it of program ``pid``.

    The other arguments are fields of the result.
    """
    total = tl.load(plan.total_ptr + 1)
    shares = plan.groups
    if plan.DEPENDS_ON_BATCH:
        shares = tl.minimum(plan.groups, total)
    is_last = number == tl.load(share + 2)
    last_segment = tl.load(share + 3)
    fields = _fields_of(number, share, plan.rows_ptr, plan.HEAD_LOOPS)
    req = tl.load(fields)
    token = tl.load(fields + 1)
    tokens = tl.load(fields + 2)
    kv_len = tl.load(fields + 3)
    first = tl.load(fields + 4)
    first_part = tl.load(fields + 8)
    parts = tl.load(fields + 9)
    segment_group = tl.load(fields + 10)
    begin = tl.where(number == tl.load(share), tl.load(share + 1), 0)
    base = tl.load(fields + 7) + (number % plan.HEAD_LOOPS) * tl.load(fields + 6)
    owner = (base.to(tl.int64) * shares // total).to(tl.int32)
    cut_low = begin
    cut_high = begin
    if plan.DEPENDS_ON_BATCH:
        # Shares start at tiles here, not at segments. The run of tiles that one program group has
        # of a work item counts as one part.
        tiles = tl.load(fields + 6)
        first_tile = tl.load(fields + 5)
        cut_low = first_tile + begin
        cut_high = first_tile + tl.where(is_last, last_segment, tiles)
        parts = ((base + tiles - 1).to(tl.int64) * shares // total).to(tl.int32) - owner + 1
        begin = tl.where(begin > 0, pid // plan.HEADS - owner, 0)
        end = tl.where(cut_high > cut_low, begin + 1, begin)
        first_part = 0
    else:
        end = tl.where(is_last, last_segment, parts)
    return _Work(
        number=number, lane=lane, share=share, row=row, req=req, token=token, tokens=tokens,
        kv_len=kv_len, first=first, first_part=first_part, parts=parts,
        segment_group=segment_group, begin=begin, end=end, owner=owner, shares=shares,
        cut_low=cut_low, cut_high=cut_high,
    )  # fmt: skip


@triton.jit
def _load_queries(work, block, query, cache, tile):
    """Load the queries of a block, and the factor of its outputs."""
    rows = _rows_of(block, work.row, tile)
    position = work.first + work.row // tile.TILE_HEADS
    offset = rows.token.to(tl.int64) * query.query_token + rows.head * query.query_head
    natural, v_factor = factors_of(block.kv_head, query, cache)
    q0, q1, q2, q3, scales = prepared_queries(
        offset, rows.wanted, natural, query, cache, tile.COMPUTE
    )
    slope = scales
    if query.ALIBI > 0:
        slope = tl.load(query.slopes_ptr + rows.head, mask=rows.wanted, other=0.0).to(tl.float32)
    return Queries(q0, q1, q2, q3, position=position, scale=scales, slope=slope), v_factor


@triton.jit
def _bounds(work, own_first, own_last, plan):
    """The tiles ``[low, high)`` of a part that are among ``[own_first, own_last)``."""
    begins = work.first_part + work.begin
    ends = work.first_part + work.end
    cut_low = work.cut_low
    cut_high = work.cut_high
    if not plan.DEPENDS_ON_BATCH:
        cut_low = segment_start(begins) // plan.SEGMENT_UNIT
        cut_high = segment_start(ends) // plan.SEGMENT_UNIT
    low = tl.maximum(cut_low, own_first)
    # A layer whose window is longer than the plan's starts before the plan's first segment.
    if (work.begin == 0) & (work.segment_group == 0):
        low = own_first
    return low, tl.minimum(cut_high, own_last)


@triton.jit
def _lent_slots(work, plan):
    """The first of the state slots that are lent to a work item.

    The lending program belongs to the first group that starts inside the work item. It starts
    inside no other one, so its state slots are free for this work item.
    """
    return ((work.owner + 1) * plan.HEADS + work.lane) * plan.AREA


@triton.jit
def _store_empty_states(work, low, high, slots, empty, plan, scratch):
    """Store the ``empty`` state for the part's segments that have no tile in ``[low, high)``.

    The fold reads a state for every segment of the part, from slots that begin at ``slots``.
    """
    begins = work.first_part + work.begin
    ends = work.first_part + work.end
    seen = begins
    unseen = ends
    if not plan.DEPENDS_ON_BATCH:
        seen = segment_of(low * plan.SEGMENT_UNIT)
        unseen = segment_of(tl.maximum(high - 1, 0) * plan.SEGMENT_UNIT) + 1
    for s in range(begins, ends):
        if (high <= low) | (s < seen) | (s >= unseen):
            store_planes(scratch, slots + s - work.first_part, empty.m, empty.l, empty)


@triton.jit
def _attend(work, query, cache, plan, scratch, mask, stripe, tile):
    """Attention of a part of a work item.

    Returns:
        The state over the part's segments, and the factor of outputs, fp32. If the part begins
        inside the work item, its states have been stored, and the state is that of no keys.
    """
    KV_TILE: tl.constexpr = tile.KV_TILE
    block = _block_of(work, work.token, work.tokens, plan, tile)
    queries, v_factor = _load_queries(work, block, query, cache, tile)
    causal, prefix = causal_and_prefix(work.req, work.kv_len, mask)
    ranges = mask.ranges_ptr
    if mask.RANGES:
        ranges = mask.ranges_ptr + work.req.to(tl.int64) * mask.num_ranges * 2
    first = work.first
    last = work.first + work.tokens - 1
    kv_len = work.kv_len
    if stripe.DCP:
        queries = _striped(queries, stripe)
        first = local_position(first, stripe.size, stripe.rank, stripe.interleave)
        last = local_position(last, stripe.size, stripe.rank, stripe.interleave)
        kv_len = local_len(kv_len, stripe.size, stripe.rank, stripe.interleave)
    start, stop = keys_seen(first, last, kv_len, causal, ranges, mask)
    own_first = start // KV_TILE
    if mask.RSWA:
        own_first = tl.where(prefix > 0, 0, own_first)
    own_last = tl.cdiv(stop, KV_TILE)
    table = cache.table_ptr + work.req.to(tl.int64) * cache.table_row
    k_base = block.kv_head.to(tl.int64) * cache.k_head
    v_base = block.kv_head.to(tl.int64) * cache.v_head
    s_base = block.kv_head.to(tl.int64) * cache.s_head
    safe_low, hole = readable(start, prefix, cache, mask, KV_TILE)
    low, high = _bounds(work, own_first, own_last, plan)
    all_low, all_high = seen_by_all(first, last, kv_len, causal, mask, mask.RSWA)
    top = tl.full([tile.ROWS], float("-inf"), tl.float32)
    total = empty_state(top, tl.zeros([tile.ROWS], tl.float32), tile.ROWS, cache.V_WIDTH)
    SUMS: tl.constexpr = tile.SUMS if tile.SUMS > 0 else KV_TILE
    state = empty_state(top, tl.zeros([tile.ROWS, SUMS], tl.float32), tile.ROWS, cache.V_WIDTH)
    slots = _lent_slots(work, plan)
    if work.begin > 0:
        _store_empty_states(work, low, high, slots, total, plan, scratch)
    segment = work.first_part + work.begin
    if not plan.DEPENDS_ON_BATCH:
        segment = segment_of(low * plan.SEGMENT_UNIT)
    _, total = attend_tiles(
        state,
        total,
        queries,
        Keys(
            table_ptr=table, ranges_ptr=ranges, kv_len=kv_len, causal=causal, prefix=prefix,
            safe_low=safe_low, hole=hole, k_base=k_base, v_base=v_base, s_base=s_base,
        ),
        Slots(segment, slot=slots - work.first_part, stores=work.begin > 0),
        Run(low, high, full_low=tl.cdiv(all_low, KV_TILE), full_high=all_high // KV_TILE),
        query, cache, mask, plan, scratch, tile, True, True,
    )  # fmt: skip
    return total, v_factor


@triton.jit
def _striped(queries, stripe):
    """Queries whose positions are those of the last keys of the rank that they may see."""
    position = local_position(queries.position, stripe.size, stripe.rank, stripe.interleave)
    return Queries(
        queries.q0, queries.q1, queries.q2, queries.q3, position=position, scale=queries.scale,
        slope=queries.slope,
    )  # fmt: skip


@triton.jit
def _write_or_store(work, state, v_factor, plan, scratch, out, tile):
    """Write the result of a whole work item; else store the state and fold what has arrived."""
    fields = _fields_of(work.number, work.share, plan.rows_ptr, plan.HEAD_LOOPS)
    token = tl.load(fields + 1)
    tokens = tl.load(fields + 2)
    block = _block_of(work, token, tokens, plan, tile)
    rows = _rows_of(block, work.row, tile)
    segment_groups = tl.load(fields + 11)
    is_whole = (work.begin == 0) & (work.end == work.parts)
    if is_whole & (segment_groups == 1):
        write_state(state, rows, out, v_factor, scratch.PLANES)
    else:
        _arrive_and_fold(
            work, block, fields, segment_groups, state, v_factor, plan, scratch, out, tile
        )


@triton.jit
def _places_of_groups(work, segment_group, segment_groups, own, plan):
    """Where the states of the segment groups of a work item's tokens go.

    The states go to slots of the first program that starts in the middle of these tokens' keys.
    Where no program starts there, one program has all segment groups and uses its own slots.

    Returns:
        The first slot; the group of programs that has the first tile of these keys; and whether
        other groups have tiles of them too. With one segment group these results are ``own``, the
        owner of the work item, and False.
    """
    loop = work.number % plan.HEAD_LOOPS
    row_owner = work.owner
    spans = segment_groups > 1
    slots = own
    if segment_groups > 1:
        total = tl.load(plan.total_ptr + 1)
        which = work.number // plan.HEAD_LOOPS - segment_group
        place = _place_of(plan.rows_ptr + which * _FIELDS, loop, 0)
        row_owner = (place.to(tl.int64) * work.shares // total).to(tl.int32)
        place = _place_of(plan.rows_ptr + (which + segment_groups - 1) * _FIELDS, loop, 1) - 1
        spans = (place.to(tl.int64) * work.shares // total).to(tl.int32) > row_owner
        lends = tl.where(spans, row_owner + 1, row_owner)
        slots = (lends * plan.HEADS + work.lane) * plan.AREA + plan.SLOTS
        slots += (tl.where(spans, 0, plan.HEAD_LOOPS) + loop) * plan.SEGMENT_GROUPS
    return slots, row_owner, spans


@triton.jit
def _arrive_and_fold(
    work, block, fields, segment_groups, state, v_factor, plan, scratch, out, tile
):
    """Store the state of a part, count it, and fold the stored states if it is the last to arrive.

    ``fields`` points to the numbers of the work item.
    """
    slots = _lent_slots(work, plan)
    is_whole = (work.begin == 0) & (work.end == work.parts)
    in_parts = (work.begin > 0) | (work.end < work.parts)
    after_prefix = 1
    if not plan.DEPENDS_ON_BATCH:
        # Only the last program to arrive needs this number, and then without delay.
        after_prefix = tl.load(plan.starts_ptr + 2 * (work.owner + 1) + 1, mask=in_parts, other=1)
    segment_group = tl.load(fields + 10)
    group_slots, row_owner, spans = _places_of_groups(
        work, segment_group, segment_groups, slots, plan
    )
    if work.begin == 0:
        slot = tl.where(is_whole, group_slots + segment_group, slots)
        store_planes(scratch, slot, state.m, state.l, state)
    counter = plan.counters_ptr + slots // plan.AREA
    # All threads must have stored their states before the counter says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(
        counter, work.end - work.begin, mask=in_parts, sem="acq_rel", scope="gpu"
    )
    ready = is_whole | (arrived + work.end - work.begin == work.parts)
    tl.store(counter, 0, mask=ready & in_parts)
    if ready:
        # Level 0 folds the segments of this segment group, where several programs have them. Level
        # 1 folds the segment groups.
        for level in range(is_whole.to(tl.int32), tl.where(segment_groups > 1, 2, 1)):
            slot = slots
            after = after_prefix
            parts = work.parts
            goes_on = ready
            if level == 1:
                slot = group_slots
                after = after_prefix * 0 + 1
                parts = segment_groups
                goes_on = segment_group + 1 == segment_groups
                tl.debug_barrier()
                if spans:
                    counter = plan.counters_ptr + plan.groups * plan.HEADS
                    counter += (
                        (row_owner + 1) * plan.HEADS + work.lane
                    ) * plan.HEAD_LOOPS + work.number % plan.HEAD_LOOPS
                    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    goes_on = arrived + 1 == segment_groups
                    if goes_on:
                        tl.store(counter, 0)
            if goes_on:
                fold_parts(
                    block, slot, after, parts, group_slots + segment_group,
                    (level == 0) & (segment_groups > 1), scratch, out, v_factor, tile.GROUP,
                    tile.TILE_HEADS,
                )  # fmt: skip
