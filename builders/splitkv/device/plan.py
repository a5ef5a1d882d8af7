"""The Triton kernel that plans a step on the device.

Its twin on the host is :mod:`builders.splitkv.host_twin`. Builders import this module only when
they launch the kernel, so that they need no Triton before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from builders.splitkv.device.across_warps import plan_many
from builders.splitkv.device.groups import (
    Batch,
    Mask,
    Plan,
    PrefillTiles,
    Requests,
    Rules,
    Sizes,
    Split,
    Stripe,
    Tile,
)
from builders.splitkv.device.in_one_warp import IN_A_WARP, plan_few, requests_by_warp
from builders.splitkv.device.work_items import request_at, segment_groups_of

_MOST_TURNS = tl.constexpr(4)
"""Most turns, each of as many requests as a warp has threads, that every warp plans by itself."""
_MOST_LINES = tl.constexpr(8)
"""Most lines of groups where requests take several turns: a thread holds every turn once for each
of its lines."""


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
def _three_added(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _counted(a, b, c, d, e, f, g, h):
    return a + e, tl.maximum(b, f), c + g, d + h


@triton.jit
def _tiles_of_long(count, prefill):
    """Prefill tiles of each request of more than ``decode_max`` query tokens; 0 for others.

    ``count`` ``[REQS]`` int32 are the query tokens. Returns the tiles of the portable kernel, and
    of the Hopper kernel unless there is none.
    """
    is_long = count > prefill.decode_max
    tiles = tl.where(is_long, tl.cdiv(count, prefill.TILE), 0)
    others = tiles
    if prefill.HOPPER_TILE > 0:
        others = tl.where(is_long, tl.cdiv(count, prefill.HOPPER_TILE), 0)
    return tiles, others


@triton.jit
def _sums_of_requests(rows, tiles, others, WITHIN: tl.constexpr):
    """The sum of work items, the most work items of a request, and the sums of both kinds of tiles.

    WITHIN: all requests are in one warp, so four reductions need no barrier. Otherwise one
    reduction computes all four, so that warps exchange numbers once.
    """
    if WITHIN:
        num_rows = tl.sum(rows, 0)
        most_rows = tl.max(rows, 0)
        num_tiles = tl.sum(tiles, 0)
        num_others = tl.sum(others, 0)
    else:
        num_rows, most_rows, num_tiles, num_others = tl.reduce(
            (rows, rows, tiles, others), 0, _counted
        )
    return num_rows, most_rows, num_tiles, num_others


@triton.jit
def plan_step(batch, rules, split, plan, prefill, sizes):
    """Plan a step: a warp by itself where there are few work items, else all warps together.

    The arguments are the structures of :mod:`builders.splitkv.device.groups`. See
    :func:`plan_kernel` for what is written.
    """
    REQS: tl.constexpr = sizes.REQS
    i = tl.arange(0, REQS)
    begin, count, kv_len = request_at(i, i < batch.num_reqs, batch)
    TURNS: tl.constexpr = (1 << sizes.STEPS) // IN_A_WARP
    TAKES_TURNS: tl.constexpr = (
        REQS > IN_A_WARP and TURNS > 1 and TURNS <= _MOST_TURNS and sizes.LINES <= _MOST_LINES
    )
    if TAKES_TURNS:
        # These loads are under way while the sums are computed.
        turns = requests_by_warp(batch, sizes.LINES, TURNS)
    segment_groups = segment_groups_of(kv_len, rules)
    is_decode = (count > 0) & (count <= prefill.decode_max)
    req_rows = tl.where(is_decode, tl.cdiv(count, rules.tile.QUERY_TOKENS) * segment_groups, 0)
    tiles, others = _tiles_of_long(count, prefill)
    num_rows, most_rows, num_tiles, num_others = _sums_of_requests(
        req_rows, tiles, others, REQS <= IN_A_WARP
    )
    if TAKES_TURNS and (most_rows <= 1) & (num_rows == batch.num_reqs):
        plan_few(
            batch, plan, num_rows, most_rows, 0, turns, rules, split, sizes.LINES, TURNS,
            sizes.STEPS,
        )  # fmt: skip
        # No request has a long query here, so there are no prefill tiles to sum.
        tile_ends, other_ends = tiles, others
    elif REQS <= IN_A_WARP and num_rows <= IN_A_WARP:
        line = tl.arange(0, sizes.LINES)[:, None] * 0
        every = Requests(
            begin=begin[None, :] + line, count=count[None, :] + line, kv_len=kv_len[None, :] + line,
            segment_groups=segment_groups[None, :] + line,
        )  # fmt: skip
        plan_few(
            batch, plan, num_rows, most_rows, req_rows[None, :] + line, (every,), rules, split,
            sizes.LINES, 1, sizes.STEPS,
        )  # fmt: skip
        tile_ends, other_ends = tiles, others
        if num_tiles > 0:
            tile_ends, other_ends = tl.cumsum(tiles, 0), tl.cumsum(others, 0)
    else:
        req_ends, tile_ends, other_ends = tl.associative_scan(
            (req_rows, tiles, others), 0, _three_added
        )
        requests = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=segment_groups)
        plan_many(
            batch, plan, num_rows, most_rows, req_ends, req_rows, requests, rules, split, sizes
        )
    # Stored last, since nothing in this kernel depends on these.
    _store_tiles(prefill.starts_ptr, i, tile_ends, num_tiles, prefill)
    if prefill.HOPPER_TILE > 0:
        _store_tiles(prefill.hopper_starts_ptr, i, other_ends, num_others, prefill)


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
    row_ends_ptr,
    names_ptr,
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
    STEPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDS_ON_BATCH: tl.constexpr,
    LEAST: tl.constexpr,
    ROW_COST: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Plan a step by one program: work items, and where each group of programs starts.

    Tensors, all int32. Read: seq_lens ``[R]``; query_start ``[R + 1]``. Written:

    - rows ``[work items, ROW_FIELDS]``: the work items;
    - total ``[2]``: the number of work items, and the tiles that the groups share;
    - starts ``[NUM_GROUPS + 1, 2]``: work item * HEAD_LOOPS + head loop, and segment of the work
      item;
    - shares ``[NUM_GROUPS, SHARE_FIELDS]``: the share of each group;
    - prefill_starts ``[max_reqs + 1]``: first tile of each request for the portable prefill kernel;
    - hopper_starts ``[max_reqs + 1]``: first tile of each request for the Hopper prefill kernel,
      not written if HOPPER_TILE is 0.

    Scratch: row_ends ``[2 ** STEPS]``; names ``[NUM_GROUPS + 1, 2]``, with the strides of starts so
    that the same thread has a group in both.

    Sizes: there are at most ``2 ** STEPS`` requests. REQS, GROUPS and LINES are powers of two. REQS
    is 32, or at least the number of the program's threads. GROUPS is at least that number too, and
    at least NUM_GROUPS + 1. A line has 31 groups, and there are at least as many LINES as warps.

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
            row_ends_ptr=row_ends_ptr, names_ptr=names_ptr,
        ),
        PrefillTiles(
            starts_ptr=prefill_starts_ptr, hopper_starts_ptr=hopper_starts_ptr, max_reqs=max_reqs,
            decode_max=decode_max, TILE=PREFILL_TILE, HOPPER_TILE=HOPPER_TILE, MOST_REQS=MOST_REQS,
        ),
        Sizes(REQS=REQS, STEPS=STEPS, GROUPS=GROUPS, LINES=LINES),
    )  # fmt: skip
