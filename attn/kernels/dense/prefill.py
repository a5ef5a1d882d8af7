"""The portable prefill kernel: prefill, chunked prefill and encoders, one pass over the keys.

A program takes one query head and one tile of query tokens at a time. The latest tokens come first,
since they see most keys. A tile of keys that every query of the tile sees whole is not masked. The
kernel reads the number of the step's tiles from the device, because a captured graph launches the
same grid for every batch.

With batch invariance a row has the bits that the split-KV kernel gives it. The kernel then walks
that kernel's tiles of keys, with sums in its order. Where a tile begins a segment, the state of the
segment before it is folded into the one of earlier segments, as there, and the next one starts
empty. Nothing is cut between programs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attn.kernels.dense.groups import Cache, Keys, Queries, Query, Run, Tile
from attn.kernels.dense.query_rows import (
    factors_of,
    fold_slots,
    load_outputs,
    load_planes,
    prepared_queries,
    write_state,
)
from attn.kernels.dense.tile import (
    attend_tiles,
    causal_and_prefix,
    closed_state,
    empty_state,
    fold_into_slot,
    fold_states,
    keys_seen,
    opened,
    readable,
    recomputed,
    store_planes,
)
from attn.kernels.lang.groups import Mask, OptionalTensor, Out, Rows, Scratch, State, Stripe
from attn.kernels.lang.masks import seen_by_all
from builders.splitkv.device.segments import (
    local_len,
    local_position,
    segment_of,
    segment_start,
)


class _Schedule(NamedTuple):
    """The tiles of a step: each is some tokens of one request, for one query head."""

    tile_starts_ptr: tl.tensor
    """``[R + 1]`` int32, tiles of tokens before each request."""
    query_start_ptr: tl.tensor
    """``[R + 1]`` int32, where each request's tokens begin."""
    seq_lens_ptr: OptionalTensor
    """``[R]`` int32, tokens of each request's keys; read where the cache has pages."""
    first_ptr: OptionalTensor
    """``[R]`` int32, position of each request's first query; None where the last query of a request
    has the position of its last key."""
    num_reqs: tl.tensor
    """int32, number of requests."""
    HEADS: tl.constexpr
    """int, query heads."""
    REQ_STEPS: tl.constexpr
    """int, steps in which a binary search finds a request."""


class _QueryTile(NamedTuple):
    """A tile of queries."""

    row: tl.tensor
    """``[ROWS]`` int32, numbers of the tile's query rows."""
    head: tl.tensor
    """int32, the query head."""
    req: tl.tensor
    """int32, the request."""
    number: tl.tensor
    """int32, number of the tile among the request's."""
    begin: tl.tensor
    """int32, the request's first token in the step."""
    query_len: tl.tensor
    """int32, number of the request's tokens."""
    kv_len: tl.tensor
    """int32, number of the request's keys."""
    context: tl.tensor
    """int32, position of the request's first query."""


_VARYING = [
    "num_reqs",
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
    "tile_starts_ptr",
    "query_start_ptr",
    "seq_lens_ptr",
    "first_ptr",
    "lse_ptr",
    "causal_ptr",
    "prefix_ptr",
    "ranges_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "output_scale_ptr",
    "sinks_ptr",
    "slopes_ptr",
    "states_ptr",
    "sums_ptr",
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def prefill_kernel(
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
    tile_starts_ptr,
    query_start_ptr,
    seq_lens_ptr,
    first_ptr,
    causal_ptr,
    prefix_ptr,
    ranges_ptr,
    sinks_ptr,
    slopes_ptr,
    states_ptr,
    sums_ptr,
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
    num_reqs,
    window,
    chunk,
    lookback,
    dcp_size,
    dcp_rank,
    dcp_interleave,
    num_ranges,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    REQ_STEPS: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
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
    STAGES: tl.constexpr,
    REST: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr,
    TOTALS_STORED: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Attention of requests with many new tokens; grid ``(programs,)``, any number of programs.

    Shapes: query is ``[T, H, K_SIZE]``, out is ``[T, H, V_SIZE]``, LSE is ``[T, H]`` fp32. Key and
    value are ``[N, BLOCK_SIZE, Hk, words]``, and their strides count stored words. tile_starts
    ``[R + 1]`` int32 gives the first query tile of each request.

    With BLOCK_SIZE 0 (encoders) key and value are ``[T, Hk, words]``, and the keys of a request are
    the rows of its own tokens. With first_ptr ``[R]`` int32 the first query of a request has that
    position; without it the last query of a request has the position of its last key. REST is the
    number of key columns beyond K_WIDTH.

    With SEGMENT_UNIT, keys are cut as the split-KV kernel cuts them. A tile of keys then spans so
    many positions of :mod:`builders.splitkv.segments`, and a segment group has SEGMENTS_PER_GROUP
    segments; 0 says that every request has one segment group. A slot is a row of states ``[slots,
    QUERY_TILE, PLANES * V_WIDTH]`` and of sums ``[slots, 2, QUERY_TILE]``, both fp32. Every program
    has the slot of its number, for whole segment groups. With TOTALS_STORED it has another,
    behind those of all programs, for the segments of one group.
    """
    _attend_all(
        _Schedule(
            tile_starts_ptr=tile_starts_ptr, query_start_ptr=query_start_ptr,
            seq_lens_ptr=seq_lens_ptr, first_ptr=first_ptr, num_reqs=num_reqs, HEADS=HEADS,
            REQ_STEPS=REQ_STEPS,
        ),
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
            GROUP=GROUP, TILE_HEADS=1, HEAD_TILES=GROUP, ROWS=QUERY_TILE, KV_TILE=KV_TILE,
            COMPUTE=COMPUTE, STAGES=STAGES, REST=REST, SUMS=SUMS,
            UNIT=SEGMENT_UNIT, PER_GROUP=SEGMENTS_PER_GROUP, STORED=TOTALS_STORED,
        ),
        Scratch(
            states_ptr=states_ptr, sums_ptr=sums_ptr, USED=QUERY_TILE, WIDTH=V_WIDTH, PLANES=PLANES,
        ),
    )  # fmt: skip


@triton.jit
def _attend_all(schedule, query, cache, mask, stripe, out, tile, scratch):
    """Attention of the step's tiles of queries, of which each program takes some."""
    num_tiles = tl.load(schedule.tile_starts_ptr + schedule.num_reqs)
    row = tl.arange(0, tile.ROWS)
    for work in range(tl.program_id(0), num_tiles * schedule.HEADS, tl.num_programs(0)):
        query_tile = _load_tile(work, num_tiles, row, schedule, cache)
        state, v_factor = _attend(query_tile, query, cache, mask, stripe, tile, scratch)
        _write(query_tile, state, v_factor, cache, out, tile)


@triton.jit
def _load_tile(work, num_tiles, row, schedule, cache):
    """Find the ``work``-th tile of queries of the step, and load the numbers of its request.

    ``row`` ``[ROWS]`` int32 are the numbers of the tile's query rows.
    """
    head = work % schedule.HEADS
    # The last tiles see most keys, so they start first.
    number = num_tiles - 1 - work // schedule.HEADS
    req = 0
    above = schedule.num_reqs
    for _ in range(schedule.REQ_STEPS):
        middle = (req + above) // 2
        go = (above - req > 1) & (tl.load(schedule.tile_starts_ptr + middle) <= number)
        stay = (above - req > 1) & (not go)
        req = tl.where(go, middle, req)
        above = tl.where(stay, middle, above)
    number = number - tl.load(schedule.tile_starts_ptr + req)
    begin = tl.load(schedule.query_start_ptr + req)
    query_len = tl.load(schedule.query_start_ptr + req + 1) - begin
    kv_len = query_len
    if cache.BLOCK_SIZE > 0:
        kv_len = tl.load(schedule.seq_lens_ptr + req)
    context = tl.maximum(kv_len - query_len, 0)
    if schedule.first_ptr is not None:
        context = tl.load(schedule.first_ptr + req)
    return _QueryTile(
        row=row, head=head, req=req, number=number, begin=begin, query_len=query_len, kv_len=kv_len,
        context=context,
    )  # fmt: skip


@triton.jit
def _load_queries(offset, wanted, heads, position, kv_head, query, cache, tile):
    """Load the queries of a tile, and the factor of its outputs.

    ``offset`` ``[ROWS]`` int64 are offsets of queries, ``heads`` ``[ROWS]`` int32 their heads.
    """
    natural, v_factor = factors_of(kv_head, query, cache)
    q0, q1, q2, q3, scales = prepared_queries(offset, wanted, natural, query, cache, tile.COMPUTE)
    if tile.REST > 0:
        rest = cache.K_WIDTH + tl.arange(0, tile.REST)
        at_rest = query.query_ptr + offset[:, None] + rest[None, :]
        q1 = tl.load(at_rest, mask=wanted[:, None], other=0.0).to(tile.COMPUTE)
    slope = scales
    if query.ALIBI > 0:
        slope = tl.load(query.slopes_ptr + heads).to(tl.float32)
    return Queries(q0, q1, q2, q3, position=position, scale=scales, slope=slope), v_factor


@triton.jit
def _attend(query_tile, query, cache, mask, stripe, tile, scratch):
    """Attention of one tile of queries.

    Returns:
        The tile's state, and the factor of its outputs, fp32.
    """
    KV_TILE: tl.constexpr = tile.KV_TILE
    req = query_tile.req
    token = query_tile.number * tile.ROWS + query_tile.row
    wanted = token < query_tile.query_len
    context = query_tile.context
    position = context + token
    first = context + query_tile.number * tile.ROWS
    last = context + tl.minimum((query_tile.number + 1) * tile.ROWS, query_tile.query_len) - 1
    kv_len = query_tile.kv_len
    if stripe.DCP:
        position = local_position(position, stripe.size, stripe.rank, stripe.interleave)
        first = local_position(first, stripe.size, stripe.rank, stripe.interleave)
        last = local_position(last, stripe.size, stripe.rank, stripe.interleave)
        kv_len = local_len(kv_len, stripe.size, stripe.rank, stripe.interleave)
    kv_head = query_tile.head // tile.GROUP
    at = query_tile.begin + token
    heads = query_tile.row * 0 + query_tile.head
    offset = at.to(tl.int64) * query.query_token + query_tile.head * query.query_head
    queries, v_factor = _load_queries(offset, wanted, heads, position, kv_head, query, cache, tile)
    causal, prefix = causal_and_prefix(req, kv_len, mask)
    ranges = mask.ranges_ptr
    if mask.RANGES:
        ranges = mask.ranges_ptr + req.to(tl.int64) * mask.num_ranges * 2
    start, stop = keys_seen(first, last, kv_len, causal, ranges, mask)
    all_low, all_high = seen_by_all(first, last, kv_len, causal, mask, mask.RSWA)
    table = cache.table_ptr
    k_base = kv_head.to(tl.int64) * cache.k_head
    v_base = kv_head.to(tl.int64) * cache.v_head
    if cache.BLOCK_SIZE > 0:
        table = cache.table_ptr + req.to(tl.int64) * cache.table_row
    else:
        k_base += query_tile.begin.to(tl.int64) * cache.k_token
        v_base += query_tile.begin.to(tl.int64) * cache.v_token
    s_base = kv_head.to(tl.int64) * cache.s_head
    safe_low, hole = readable(start, prefix, cache, mask, KV_TILE)
    keys = Keys(
        table_ptr=table, ranges_ptr=ranges, kv_len=kv_len, causal=causal, prefix=prefix,
        safe_low=safe_low, hole=hole, k_base=k_base, v_base=v_base, s_base=s_base,
    )  # fmt: skip
    low = start // KV_TILE
    high = tl.cdiv(stop, KV_TILE)
    full_low = tl.cdiv(all_low, KV_TILE)
    full_high = tl.maximum(all_high // KV_TILE, full_low)
    if tile.UNIT > 0:
        if mask.RSWA:
            low = tl.where(prefix > 0, 0, low)
        run = Run(low, high, full_low=full_low, full_high=full_high)
        state = _attend_groups(queries, keys, run, query, cache, mask, tile, scratch)
    else:
        state = empty_state(
            tl.full([tile.ROWS], float("-inf"), tl.float32), tl.zeros([tile.ROWS], tl.float32),
            tile.ROWS, cache.V_WIDTH,
        )  # fmt: skip
        if mask.RSWA:
            prefix_tiles = tl.minimum(tl.cdiv(prefix, KV_TILE), high)
            run = Run(0, prefix_tiles, full_low=0, full_high=0)
            state, _ = attend_tiles(
                state, state, queries, keys, None, run, query, cache, mask, None, scratch, tile,
                True, False,
            )  # fmt: skip
            low = tl.maximum(low, prefix_tiles)
        run = Run(low, high, full_low=full_low, full_high=full_high)
        state, _ = _attend_run(state, state, queries, keys, run, query, cache, mask, tile, scratch)
        m = state.m
        if query.SIMPLE:
            m = m * queries.scale
        state = State(m, state.l, state.acc0, state.acc1, state.acc2, state.acc3)
    return state, v_factor


@triton.jit
def _attend_groups(queries, keys, run, query, cache, mask, tile, scratch):
    """The state over a run of tiles, folded as the split-KV kernel folds it.

    The states of the segments of a segment group are folded in registers. Registers have no room
    for a third state, so the state over whole segment groups waits in the program's slot.
    """
    top = tl.full([tile.ROWS], float("-inf"), tl.float32)
    total = empty_state(top, tl.zeros([tile.ROWS], tl.float32), tile.ROWS, cache.V_WIDTH)
    # Where outputs over the segments of one segment group are, if they are not in registers.
    slot = tl.program_id(0) + tl.num_programs(0)
    if tile.PER_GROUP == 0:
        total = _attend_group(total, queries, keys, run, query, cache, mask, tile, scratch)
    else:
        first = segment_of(run.low * tile.UNIT) // tile.PER_GROUP
        past = segment_of(tl.maximum(run.high - 1, 0) * tile.UNIT) // tile.PER_GROUP + 1
        past = tl.where(run.high > run.low, past, first)
        for group in range(first, past):
            empty = empty_state(top, tl.zeros([tile.ROWS], tl.float32), tile.ROWS, cache.V_WIDTH)
            low = tl.maximum(segment_start(group * tile.PER_GROUP) // tile.UNIT, run.low)
            high = segment_start((group + 1) * tile.PER_GROUP) // tile.UNIT
            part = Run(low, tl.minimum(high, run.high), run.full_low, run.full_high)
            total = _attend_group(empty, queries, keys, part, query, cache, mask, tile, scratch)
            if first + 1 < past:
                # Numbers that the loop over keys does not need are computed here.
                slot = recomputed(tl.program_id(0), cache.DECODE)
                if tile.STORED:
                    own = slot + tl.num_programs(0)
                    total = fold_slots(total, slot, own, group > first, scratch)
                else:
                    before = load_planes(scratch, slot, group > first, tile.ROWS)
                    total = fold_states(before, total.m, total.l, total, cache.PLANES)
                    if group + 1 < past:
                        # Threads load what other threads stored.
                        tl.debug_barrier()
                        store_planes(scratch, slot, total.m, total.l, total)
                        tl.debug_barrier()
    if tile.STORED:
        tl.debug_barrier()
        total = load_outputs(total, slot, scratch)
    return total


@triton.jit
def _attend_group(total, queries, keys, run, query, cache, mask, tile, scratch):
    """The state over a run of tiles within one segment group; ``total`` is the empty state."""
    sums = tl.zeros([tile.ROWS, tile.SUMS], tl.float32)
    state = empty_state(total.m, sums, tile.ROWS, cache.V_WIDTH)
    state, total = _attend_run(state, total, queries, keys, run, query, cache, mask, tile, scratch)
    highest, sums = closed_state(state, queries, query, tile)
    if tile.STORED:
        stored = opened(run.high, run.low, tile.UNIT) & (run.high > run.low)
        total = fold_into_slot(total, highest, sums, state, stored, scratch, cache.DECODE)
    else:
        total = fold_states(total, highest, sums, state, cache.PLANES)
    return total


@triton.jit
def _attend_run(state, total, queries, keys, run, query, cache, mask, tile, scratch):
    """The states over a run of tiles too, see :func:`attend_tiles`.

    Tiles that every row sees whole are taken apart from those before and behind them: only the
    others are masked.
    """
    low = run.low
    if mask.WINDOW or mask.CHUNK or mask.RSWA or mask.RANGES:
        edge = tl.minimum(run.full_low, run.high)
        state, total = _attend_part(
            state, total, queries, keys, low, edge, run, query, cache, mask, tile, scratch, True
        )
        low = tl.maximum(low, edge)
    full = tl.maximum(tl.minimum(run.full_high, run.high), low)
    state, total = _attend_part(
        state, total, queries, keys, low, full, run, query, cache, mask, tile, scratch, False
    )
    return _attend_part(
        state, total, queries, keys, full, run.high, run, query, cache, mask, tile, scratch, True
    )


@triton.jit
def _attend_part(
    state, total, queries, keys, low, high, run, query, cache, mask, tile, scratch,
    MASK: tl.constexpr,
):  # fmt: skip
    """The states over the tiles ``[low, high)`` of a run too."""
    part = Run(low, high, full_low=0, full_high=0, begin=run.low)
    return attend_tiles(
        state, total, queries, keys, None, part, query, cache, mask, None, scratch, tile, MASK,
        False,
    )  # fmt: skip


@triton.jit
def _write(query_tile, state, v_factor, cache, out, tile):
    """Write the results of a tile of queries."""
    heads = query_tile.row * 0 + query_tile.head
    token = recomputed(query_tile.number, cache.DECODE) * tile.ROWS + query_tile.row
    rows = Rows(token=query_tile.begin + token, head=heads, wanted=token < query_tile.query_len)
    write_state(state, rows, out, v_factor, cache.PLANES)
