"""Plans work items in blocks that every warp has, so no thread reads what another one stored.

Tensors of a block have a line per warp and a column per thread of a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.device.groups import Requests
from builders.splitkv.device.work_items import (
    FIELDS,
    SHARE_FIELDS,
    first_place,
    rows_of,
    segments_of,
    sharing,
    start_from,
    store_four,
    store_two,
)
from builders.splitkv.record import ONE_WARP

IN_A_WARP = tl.constexpr(ONE_WARP)
_WARP_STEPS = tl.constexpr(ONE_WARP.bit_length() - 1)


@triton.jit
def _four_of_row(fields, at):
    """Four numbers of the work items in the columns ``at``."""
    a, b, c, d = fields
    return tl.gather(a, at, 1), tl.gather(b, at, 1), tl.gather(c, at, 1), tl.gather(d, at, 1)


@triton.jit
def _rows_of_lanes(j, num_rows, is_one_each, req, req_rows, requests, rules):
    """Work items ``j`` ``[LINES, threads of a warp]``, of which ``num_rows`` exist.

    ``req`` and ``requests`` are the requests in the columns, and ``req_rows`` their numbers of work
    items; ``is_one_each`` if work item ``j`` is the only one of the request in column ``j``.
    Returns :class:`builders.splitkv.device.groups.Rows`.
    """
    begin, count, kv_len, segment_groups = requests
    segment_group, skipped = j * 0, j * 0
    if not is_one_each:
        # Count the requests whose work items end at or before ``j``: that is the request of ``j``.
        at = j * 0
        req_ends = tl.cumsum(req_rows, 1)
        for step in tl.static_range(_WARP_STEPS):
            half = IN_A_WARP >> (step + 1)
            at += tl.where(tl.gather(req_ends, at + half - 1, 1) <= j, half, 0)
        later = j - tl.gather(req_ends - req_rows, at, 1)
        req, begin, count = tl.gather(req, at, 1), tl.gather(begin, at, 1), tl.gather(count, at, 1)
        kv_len, segment_groups = tl.gather(kv_len, at, 1), tl.gather(segment_groups, at, 1)
        turn = later
        if rules.tile.SEGMENTS_PER_GROUP:
            # fp32 gives the right quotient, since a request has far less than 2 ** 21 work items.
            turn = ((later.to(tl.float32) + 0.5) / segment_groups.to(tl.float32)).to(tl.int32)
            segment_group = later - turn * segment_groups
        skipped = turn * rules.tile.QUERY_TOKENS
    found = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=segment_groups)
    return rows_of(j < num_rows, req, segment_group, skipped, found, rules)


@triton.jit
def _plan_block(
    plan, rows, first_row, live, stored, begun, is_first, num_rows, shares, rules, split,
    LINES: tl.constexpr, HAS_ALL: tl.constexpr,
):  # fmt: skip
    """Store the work items of a block, and the shares that start in them.

    The block has the work items from ``first_row`` on, and the tiles before them are ``begun``. All
    ``live`` ``[LINES, threads of a warp]`` exist; those that are ``stored`` are this block's own.
    The work item behind the own ones has to be there if it exists, since a share that is cut in the
    last segment of the last one starts there. Shares behind all tiles belong to the block that
    ``is_first``. HAS_ALL: this is the only block. Returns the tiles up to the block's end.
    """
    LANES: tl.constexpr = IN_A_WARP
    line = tl.arange(0, LINES)[:, None]
    lane = line * 0 + tl.arange(0, LANES)[None, :]
    taken = tl.where(live, (rows.tiles + shares.cost) * split.HEAD_LOOPS, 0)
    ends = begun + tl.cumsum(taken, 1)
    place = ends - taken + shares.cost
    tiles = tl.maximum(rows.tiles, 1)
    part, parts = segments_of(rows.first_tile, tiles, rules.tile.SEGMENT_UNIT)
    head = rows.req, rows.token, rows.tokens, rows.kv_len
    keys = rows.first, rows.first_tile, tiles, place
    tail = part, parts, rows.segment_group, rows.segment_groups
    mine, j = stored & (line == 0), first_row + lane
    store_four(plan.rows_ptr, j, FIELDS, 0, mine, head[0], head[1], head[2], head[3])
    store_four(plan.rows_ptr, j, FIELDS, 4, mine, keys[0], keys[1], keys[2], keys[3])
    store_four(plan.rows_ptr, j, FIELDS, 8, mine, tail[0], tail[1], tail[2], tail[3])
    c = line * LANES + lane
    position = first_place(c, shares.shared, shares.sharers)
    owned = c <= split.NUM_GROUPS
    past = begun
    if not HAS_ALL:
        past += tl.sum(tl.where(stored, taken, 0), 1, keep_dims=True)
        is_here = (position >= begun) & (position < past)
        owned = owned & (is_here | ((position >= shares.total) & is_first))
    at = c * 0
    for step in tl.static_range(_WARP_STEPS):
        half = LANES >> (step + 1)
        at += tl.where(tl.gather(ends, at + half - 1, 1) <= position, half, 0)
    _, first_tile, row_tiles, row_place = _four_of_row(keys, at)
    start, segment = start_from(
        first_row + at, position, position < shares.total, row_place, first_tile, row_tiles,
        shares.cost, num_rows, rules.tile.SEGMENT_UNIT, split,
    )  # fmt: skip
    # A share also holds the start of the next share, which the next share's thread stores.
    real = owned & (c < split.NUM_GROUPS)
    store_two(plan.starts_ptr, c, 2, owned, start, segment)
    store_two(plan.shares_ptr, c, SHARE_FIELDS, real, start, segment)
    before = plan.shares_ptr + 2 - SHARE_FIELDS
    store_two(before, c, SHARE_FIELDS, owned & (c > 0), start, segment)
    real = real & (start < num_rows * split.HEAD_LOOPS)
    if not split.DEPENDS_ON_BATCH:
        at = tl.minimum(tl.maximum(start // split.HEAD_LOOPS - first_row, 0), LANES - 1)
    w, x, y, z = _four_of_row(head, at)
    store_four(plan.shares_ptr, c, SHARE_FIELDS, 4, real, w, x, y, z)
    w, x, y, z = _four_of_row(keys, at)
    store_four(plan.shares_ptr, c, SHARE_FIELDS, 8, real, w, x, y, z)
    w, x, y, z = _four_of_row(tail, at)
    store_four(plan.shares_ptr, c, SHARE_FIELDS, 12, real, w, x, y, z)
    return past


@triton.jit
def plan_few(
    batch, plan, num_rows, most_rows, req_rows, requests, rules, split, LINES: tl.constexpr
):
    """Plan a step of no more requests and work items than a warp has threads.

    ``req_rows`` ``[LINES, threads of a warp]`` int32 are the work items of each of the
    ``requests``, ``num_rows`` their sum and ``most_rows`` the most of a request.
    """
    line = tl.arange(0, LINES)[:, None]
    lane = line * 0 + tl.arange(0, IN_A_WARP)[None, :]
    is_one_each = (most_rows <= 1) & (num_rows == batch.num_reqs)
    rows = _rows_of_lanes(lane, num_rows, is_one_each, lane, req_rows, requests, rules)
    total = tl.sum(rows.tiles, 1, keep_dims=True)
    largest = tl.max(rows.tiles, 1, keep_dims=True)
    shares = sharing(total, largest, num_rows, batch, rules, split)
    once = (line == 0) & (lane < 2)
    tl.store(plan.total_ptr + lane, tl.where(lane == 0, num_rows, shares.shared), mask=once)
    live = lane < num_rows
    _plan_block(
        plan, rows, 0, live, live, line * 0, True, num_rows, shares, rules, split, LINES, True
    )


@triton.jit
def plan_slice(
    batch, plan, counts, own_rows, known_rows, is_one_each, req, req_rows, requests, is_first,
    rules, split, LINES: tl.constexpr,
):  # fmt: skip
    """Plan the work items of a slice of the requests, and the shares that start in them.

    ``counts`` are the :class:`builders.splitkv.device.groups.Counts` of the step and of the slice.
    ``req`` and ``requests`` ``[LINES, threads of a warp]`` have ``req_rows`` work items each, which
    are ``known_rows`` together: the slice's ``own_rows``, and the one behind them if there is one.
    ``is_one_each``: every request has one. The slice that ``is_first`` stores what belongs to none.
    """
    line = tl.arange(0, LINES)[:, None] * 0
    lane = line + tl.arange(0, IN_A_WARP)[None, :]
    shares = sharing(counts.total, counts.largest, counts.num_rows, batch, rules, split)
    tl.store(plan.total_ptr, counts.num_rows, mask=is_first)
    tl.store(plan.total_ptr + 1, shares.shared, mask=is_first)
    begun = line + (counts.tiles_before + shares.cost * counts.rows_before) * split.HEAD_LOOPS
    # The first slice takes the shares behind all tiles even if it has no work items.
    planned = tl.where(is_first, tl.maximum(own_rows, 1), own_rows)
    for block in range(0, planned, IN_A_WARP - 1):
        j = block + lane
        rows = _rows_of_lanes(j, known_rows, is_one_each, req, req_rows, requests, rules)
        stored = (j < own_rows) & (lane < IN_A_WARP - 1)
        begun = _plan_block(
            plan, rows, counts.rows_before + block, j < known_rows, stored, begun,
            is_first & (block == 0), counts.num_rows, shares, rules, split, LINES, False,
        )  # fmt: skip
