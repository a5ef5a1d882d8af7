"""The Triton kernel that plans a step on the device.

Its twin on the host is :mod:`builders.splitkv.host_twin`. Builders import this module only when
they launch the kernel, so that they need no Triton before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from builders.splitkv.device.blocks import IN_A_WARP, plan_few, plan_slice
from builders.splitkv.device.groups import (
    Batch,
    Counts,
    Mask,
    Plan,
    PrefillTiles,
    Requests,
    Rules,
    Split,
    Stripe,
    Tile,
)
from builders.splitkv.device.work_items import request_at, segment_groups_of, tiles_of_tokens
from builders.splitkv.record import SLICE

_SLICE = tl.constexpr(SLICE)


@triton.jit
def _store_tiles(starts_ptr, i, tile_ends, num_tiles, prefill):
    """Store the first prefill tile of each request ``i``, which is where the previous one ends.

    ``i`` and ``tile_ends`` are ``[REQS]`` int32. Only requests with long queries have tiles;
    ``num_tiles`` is the number of all.
    """
    tl.store(starts_ptr + i, 0, mask=i == 0)
    tl.store(starts_ptr + 1 + i, tile_ends, mask=i < prefill.max_reqs)
    if i.shape[0] < prefill.MOST_REQS:
        # Entries past the last request are stored too, since a captured graph may have been
        # captured with more requests.
        every = tl.arange(0, prefill.MOST_REQS)
        beyond = (every >= i.shape[0]) & (every < prefill.max_reqs)
        tl.store(starts_ptr + 1 + every, every * 0 + num_tiles, mask=beyond)


@triton.jit
def _plan_prefill(count, prefill):
    """Store where the prefill tiles of each request start, for both kernels.

    ``count`` ``[REQS]`` int32 are the query tokens. Only requests of more than ``decode_max`` have
    tiles.
    """
    i = tl.arange(0, count.shape[0])
    is_long = count > prefill.decode_max
    tiles = tl.where(is_long, tl.cdiv(count, prefill.TILE), 0)
    others = tiles
    if prefill.HOPPER_TILE > 0:
        others = tl.where(is_long, tl.cdiv(count, prefill.HOPPER_TILE), 0)
    tile_ends, other_ends = tiles, others
    num_tiles, num_others = tl.sum(tiles, 0), tl.sum(others, 0)
    if num_tiles > 0:
        tile_ends, other_ends = tl.cumsum(tiles, 0), tl.cumsum(others, 0)
    _store_tiles(prefill.starts_ptr, i, tile_ends, num_tiles, prefill)
    if prefill.HOPPER_TILE > 0:
        _store_tiles(prefill.hopper_starts_ptr, i, other_ends, num_others, prefill)


@triton.jit
def _query_tiles(count, prefill, rules):
    """Tiles of query tokens of each request that has work items; 0 for others."""
    is_decode = (count > 0) & (count <= prefill.decode_max)
    return tl.where(is_decode, tl.cdiv(count, rules.tile.QUERY_TOKENS), 0)


@triton.jit
def _combined(a, b, c, d, e, f, g, h, i, j, k, m, n, o):
    return a + h, b + i, c + j, d + k, tl.maximum(e, m), tl.maximum(f, n), tl.minimum(g, o)


@triton.jit
def _combined_tiles(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def _count(batch, begin, end, prefill, rules, REQS: tl.constexpr):
    """Count the work items of all requests, and those before request ``begin``.

    One reduction counts all, so that warps exchange numbers once. Returns
    :class:`builders.splitkv.device.groups.Counts`, and the first request from ``end`` on that has
    work items.
    """
    i = tl.arange(0, REQS)
    token, count, kv_len = request_at(i, i < batch.num_reqs, batch)
    segment_groups = segment_groups_of(kv_len, rules)
    query_tiles = _query_tiles(count, prefill, rules)
    requests = Requests(begin=token, count=count, kv_len=kv_len, segment_groups=segment_groups)
    rows = query_tiles * segment_groups
    tiles, most = tiles_of_tokens(query_tiles > 0, i * 0, requests, rules)
    num_rows, rows_before, total, before, largest, most_tiles, following = tl.reduce(
        (
            rows, tl.where(i < begin, rows, 0), tiles, tl.where(i < begin, tiles, 0), most,
            query_tiles, tl.where((i >= end) & (rows > 0), i, batch.num_reqs),
        ), 0, _combined
    )  # fmt: skip
    if most_tiles > 1:
        for k in range(1, most_tiles):
            skipped = k * rules.tile.QUERY_TOKENS
            more, most_more = tiles_of_tokens(k < query_tiles, i * 0 + skipped, requests, rules)
            tiles += more
            most = tl.maximum(most, most_more)
        total, before, largest = tl.reduce(
            (tiles, tl.where(i < begin, tiles, 0), most), 0, _combined_tiles
        )
    counts = Counts(
        num_rows=num_rows, rows_before=rows_before, total=total, tiles_before=before,
        largest=tl.maximum(largest, 1),
    )  # fmt: skip
    return counts, following


@triton.jit
def plan_step(
    batch, rules, split, plan, prefill, REQS: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """Plan a step: one program plans few requests, else each of several programs a slice of them.

    Programs tell one another nothing: each counts the work items of all requests.

    The arguments are the structures of :mod:`builders.splitkv.device.groups`. See
    :func:`plan_kernel` for what is written.
    """
    SLICES: tl.constexpr = REQS > IN_A_WARP
    if SLICES and tl.program_id(0) == 0:
        every = tl.arange(0, REQS)
        _plan_prefill(request_at(every, every < batch.num_reqs, batch)[1], prefill)
    else:
        lane = tl.arange(0, IN_A_WARP)
        req, own, is_first = lane, lane < IN_A_WARP, True
        if SLICES:
            first = (tl.program_id(0) - 1) * _SLICE
            counts, following = _count(batch, first, first + _SLICE, prefill, rules, REQS)
            own, is_first = lane < _SLICE, first == 0
            req = tl.where(lane == _SLICE, following, batch.num_reqs)
            req = tl.where(own, first + lane, req)
        real = req < batch.num_reqs
        begin, count, kv_len = request_at(req, real, batch)
        segment_groups = segment_groups_of(kv_len, rules)
        req_rows = _query_tiles(count, prefill, rules) * segment_groups
        req_rows = tl.where(own, req_rows, tl.minimum(req_rows, 1))
        line = tl.arange(0, LINES)[:, None] * 0
        requests = Requests(
            begin=begin[None, :] + line, count=count[None, :] + line, kv_len=kv_len[None, :] + line,
            segment_groups=segment_groups[None, :] + line,
        )  # fmt: skip
        reqs, rows = req[None, :] + line, req_rows[None, :] + line
        # Each warp has all of these, so the sums take no barrier.
        num_rows, most_rows = tl.sum(req_rows, 0), tl.max(req_rows, 0)
        if SLICES:
            own_rows = tl.sum(tl.where(own, req_rows, 0), 0)
            is_one_each = (most_rows == 1) & (tl.min(tl.where(real, req_rows, 1), 0) == 1)
            plan_slice(
                batch, plan, counts, own_rows, num_rows, is_one_each, reqs, rows, requests,
                is_first, rules, split, LINES,
            )  # fmt: skip
        else:
            if num_rows <= IN_A_WARP:
                plan_few(batch, plan, num_rows, most_rows, rows, requests, rules, split, LINES)
            else:
                counts, _ = _count(batch, 0, IN_A_WARP, prefill, rules, REQS)
                plan_slice(
                    batch, plan, counts, num_rows, num_rows, False, reqs, rows, requests, is_first,
                    rules, split, LINES,
                )  # fmt: skip
            # Stored last, since nothing in this kernel depends on these.
            _plan_prefill(count, prefill)


_VARYING = [
    "num_reqs",
    "max_reqs",
    "max_kv_len",
    "decode_max",
    "window",
    "chunk",
    "lookback",
    "dcp_size",
    "dcp_rank",
    "dcp_interleave",
]


_ANYWHERE = ["seq_lens_ptr", "query_start_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def plan_kernel(
    seq_lens_ptr,
    query_start_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    prefill_starts_ptr,
    hopper_starts_ptr,
    num_reqs,
    max_reqs,
    max_kv_len,
    decode_max,
    window,
    chunk,
    lookback,
    dcp_size,
    dcp_rank,
    dcp_interleave,
    QUERY_TOKENS: tl.constexpr,
    KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    PREFILL_TILE: tl.constexpr,
    HOPPER_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    TRIM: tl.constexpr,
    DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr,
    MOST_REQS: tl.constexpr,
    REQS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDS_ON_BATCH: tl.constexpr,
    LEAST: tl.constexpr,
    ROW_COST: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Plan a step: work items, and where each group of programs starts.

    Tensors, all int32. Read: seq_lens ``[R]``; query_start ``[R + 1]``. Written:

    - rows ``[work items, ROW_FIELDS]``: the work items;
    - total ``[2]``: the number of work items, and the tiles that the groups share;
    - starts ``[NUM_GROUPS + 1, 2]``: work item * HEAD_LOOPS + head loop, and segment of the work
      item;
    - shares ``[NUM_GROUPS, SHARE_FIELDS]``: the share of each group;
    - prefill_starts ``[max_reqs + 1]``: first tile of each request for the portable prefill kernel;
    - hopper_starts ``[max_reqs + 1]``: first tile of each request for the Hopper prefill kernel,
      not written if HOPPER_TILE is 0.

    Sizes: REQS and LINES are powers of two. There are at most REQS requests. With 32, one program
    plans them all. With more, which are at least the program's threads, the first program stores
    where prefill tiles start, and each further one plans a slice of SLICE requests. A line has 32
    groups; LINES hold NUM_GROUPS + 1, and are at least as many as warps.

    Switches: TRIM: no query sees past itself. DCP: keys are one rank's keys, in their order on that
    rank, while lengths and positions of work items are the request's. SEGMENTS_PER_GROUP: segments
    of a segment group, 0 where a work item has all keys. DEPENDS_ON_BATCH: a group starts at its
    share's first tile; starts hold tiles of work items, not segments; a share has at least LEAST
    tiles; the beginning of a work item counts as ROW_COST tiles. WAITS: this kernel may have been
    started before the kernel before it has ended, and waits for that.

    This kernel does not let the next one start early. The next kernel would read no earlier, and
    would run on other multiprocessors than without a plan before it. Where eight heads are read
    side by side, that took 8 us of 1430 more.
    """
    if WAITS:
        gdc_wait()
    plan_step(
        Batch(
            seq_lens_ptr=seq_lens_ptr, query_start_ptr=query_start_ptr, num_reqs=num_reqs,
            max_kv_len=max_kv_len,
        ),
        Rules(
            mask=Mask(
                window=window, chunk=chunk, lookback=lookback, WINDOW=WINDOW, CHUNK=CHUNK, TRIM=TRIM
            ),
            stripe=Stripe(size=dcp_size, rank=dcp_rank, interleave=dcp_interleave, DCP=DCP),
            tile=Tile(
                QUERY_TOKENS=QUERY_TOKENS, KV_TILE=KV_TILE, SEGMENT_UNIT=SEGMENT_UNIT,
                SEGMENTS_PER_GROUP=SEGMENTS_PER_GROUP,
            ),
        ),
        Split(
            HEAD_LOOPS=HEAD_LOOPS, DEPENDS_ON_BATCH=DEPENDS_ON_BATCH, LEAST=LEAST,
            ROW_COST=ROW_COST, NUM_GROUPS=NUM_GROUPS,
        ),
        Plan(
            rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
        ),
        PrefillTiles(
            starts_ptr=prefill_starts_ptr, hopper_starts_ptr=hopper_starts_ptr, max_reqs=max_reqs,
            decode_max=decode_max, TILE=PREFILL_TILE, HOPPER_TILE=HOPPER_TILE, MOST_REQS=MOST_REQS,
        ),
        REQS,
        LINES,
    )  # fmt: skip
