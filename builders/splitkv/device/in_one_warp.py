"""Plans few work items: every warp has all of them, so no thread reads what another one stored.

Tensors have a line per warp and a column per thread of a warp. Work items that are more than a
warp's threads come in several *turns*: each thread has one work item of every turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.device.groups import PlacedRows, Requests, Rows
from builders.splitkv.device.work_items import (
    FIELDS,
    SHARE_FIELDS,
    first_place,
    request_at,
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
def _of_row(rows, field: tl.constexpr, turn, lane, TURNS: tl.constexpr):
    """Number ``field`` of the work items that are named by their ``turn`` and their ``lane``."""
    found = tl.gather(rows[0][field], lane, 1)
    for k in tl.static_range(1, TURNS):
        found = tl.where(turn == k, tl.gather(rows[k][field], lane, 1), found)
    return found


@triton.jit
def _four_of_row(rows, first: tl.constexpr, turn, lane, TURNS: tl.constexpr):
    """Numbers ``first`` to ``first + 3`` of the work items at ``turn`` and ``lane``."""
    return (
        _of_row(rows, first, turn, lane, TURNS), _of_row(rows, first + 1, turn, lane, TURNS),
        _of_row(rows, first + 2, turn, lane, TURNS), _of_row(rows, first + 3, turn, lane, TURNS),
    )  # fmt: skip


@triton.jit
def _rows_of_lanes(
    j, num_rows, num_reqs, most_rows, req_rows, requests, rules, TURNS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Work items ``j`` ``[LINES, threads of a warp]`` of a turn, a column for each thread.

    Where there are several turns, each request has one work item. Returns
    :class:`builders.splitkv.device.groups.Rows`: their places and segments are not known yet.
    """
    begin, count, kv_len, segment_groups = requests
    req, segment_group, skipped = j, j * 0, j * 0
    if TURNS == 1:
        if (most_rows > 1) | (num_rows != num_reqs):
            # Count the requests whose work items end at or before ``j``: that is the request of
            # ``j``.
            req = j * 0
            req_ends = tl.cumsum(req_rows, 1)
            for step in tl.static_range(STEPS):
                half = (1 << STEPS) >> (step + 1)
                req += tl.where(tl.gather(req_ends, req + half - 1, 1) <= j, half, 0)
            later = j - tl.gather(req_ends - req_rows, req, 1)
            begin, count = tl.gather(begin, req, 1), tl.gather(count, req, 1)
            kv_len, segment_groups = tl.gather(kv_len, req, 1), tl.gather(segment_groups, req, 1)
            turn = later
            if rules.tile.SEGMENTS_PER_GROUP:
                # fp32 gives the right quotient of numbers up to a warp's threads.
                turn = ((later.to(tl.float32) + 0.5) / segment_groups.to(tl.float32)).to(tl.int32)
                segment_group = later - turn * segment_groups
            skipped = turn * rules.tile.QUERY_TOKENS
    found = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=segment_groups)
    return rows_of(j < num_rows, req, segment_group, skipped, found, rules)


@triton.jit
def _store_turns(rows_ptr, turns, num_rows, shares, lanes, line, rules, split):
    """Store the work items of all turns, each turn by a warp of its own.

    ``turns`` has the :class:`builders.splitkv.device.groups.Rows` of each turn. Returns
    :class:`builders.splitkv.device.groups.PlacedRows` for each turn.
    """
    placed = ()
    begun = line * 0
    for k in tl.static_range(len(turns)):
        j = k * IN_A_WARP + lanes
        live = j < num_rows
        rows = Rows(*turns[k])
        taken = tl.where(live, (rows.tiles + shares.cost) * split.HEAD_LOOPS, 0)
        ends = begun + tl.cumsum(taken, 1)
        begun += tl.sum(taken, 1, keep_dims=True)
        place = ends - taken + shares.cost
        tiles = tl.maximum(rows.tiles, 1)
        part, parts = segments_of(rows.first_tile, tiles, rules.tile.SEGMENT_UNIT)
        mine = live & (line == k)
        store_four(rows_ptr, j, FIELDS, 0, mine, rows.req, rows.token, rows.tokens, rows.kv_len)
        store_four(rows_ptr, j, FIELDS, 4, mine, rows.first, rows.first_tile, tiles, place)
        store_four(
            rows_ptr, j, FIELDS, 8, mine, part, parts, rows.segment_group, rows.segment_groups
        )
        stored = PlacedRows(
            req=rows.req, token=rows.token, tokens=rows.tokens, kv_len=rows.kv_len,
            first=rows.first, first_tile=rows.first_tile, tiles=tiles, place=place, part=part,
            parts=parts, segment_group=rows.segment_group, segment_groups=rows.segment_groups,
            ends=ends, turn_end=begun,
        )  # fmt: skip
        placed += (stored,)  # type: ignore[assignment]
    return placed


@triton.jit
def plan_few(
    batch, plan, num_rows, most_rows, req_rows, turns, rules, split, LINES: tl.constexpr,
    TURNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Plan few work items: every warp has all of them, and each thread has one of every turn.

    With one turn, there are no more requests and work items than a warp has threads. With more
    turns, every request has one work item. ``turns`` holds the
    :class:`builders.splitkv.device.groups.Requests` of each turn. ``req_rows`` are the work items
    of each request of the first turn; with more turns they are not read. ``num_rows`` is the sum of
    all requests' work items and ``most_rows`` the most of a request.

    Tensors have a line for each warp, ``[LINES, threads of a warp]`` int32, so that an operation
    along a line stays within the warp.
    """
    lane = tl.arange(0, IN_A_WARP)[None, :]
    line = tl.arange(0, LINES)[:, None]
    lanes = line * 0 + lane
    found = ()
    total, fewest, largest = line * 0, line * 0 + batch.max_kv_len + 1, line * 0 + 1
    for k in tl.static_range(TURNS):
        j = k * IN_A_WARP + lanes
        rows = _rows_of_lanes(
            j, num_rows, batch.num_reqs, most_rows, req_rows, turns[k], rules, TURNS, STEPS
        )
        found += (rows,)  # type: ignore[assignment]
        total += tl.sum(rows.tiles, 1, keep_dims=True)
        least = tl.where(j < num_rows, rows.tiles, batch.max_kv_len + 1)
        fewest = tl.minimum(fewest, tl.min(least, 1, keep_dims=True))
        largest = tl.maximum(largest, tl.max(rows.tiles, 1, keep_dims=True))
    shares = sharing(total, fewest, largest, num_rows, split)
    once = (line == 0) & (lane < 2)
    tl.store(plan.total_ptr + lanes, tl.where(lane == 0, num_rows, shares.shared), mask=once)
    placed = _store_turns(plan.rows_ptr, found, num_rows, shares, lanes, line, rules, split)
    _share_turns(batch, plan, placed, lane, line, num_rows, shares, rules, split, LINES, TURNS)


@triton.jit
def _share_turns(
    batch, plan, placed, lane, line, num_rows, shares, rules, split, LINES: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Store where every group starts, and its share, from work items that every warp has.

    ``placed`` has the :class:`builders.splitkv.device.groups.PlacedRows` of each turn. A share
    holds the start of the next group too. The last thread of a warp computes that for the thread
    before it, and stores nothing: its group is the next warp's first.
    """
    LANES: tl.constexpr = IN_A_WARP
    c = line * (LANES - 1) + lane
    own = lane < LANES - 1
    position = first_place(c, shares.shared, shares.sharers)
    of = c * 0
    for k in tl.static_range(TURNS - 1):
        of += (PlacedRows(*placed[k]).turn_end <= position).to(tl.int32)
    at = c * 0
    for step in tl.static_range(_WARP_STEPS):
        half = LANES >> (step + 1)
        ends = _of_row(placed, FIELDS, of, at + half - 1, TURNS)
        at += tl.where(ends <= position, half, 0)
    _, first_tile, tiles, place = _four_of_row(placed, 4, of, at, TURNS)
    start, segment = start_from(
        of * LANES + at, position, (c <= split.NUM_GROUPS) & (position < shares.total), place,
        first_tile, tiles, shares.cost, num_rows, rules.tile.SEGMENT_UNIT, split,
    )  # fmt: skip
    store_two(plan.starts_ptr, c, own & (c <= split.NUM_GROUPS), start, segment)
    following = tl.minimum(line * 0 + lane + 1, LANES - 1)
    stop, stop_segment = tl.gather(start, following, 1), tl.gather(segment, following, 1)
    real = own & (c < split.NUM_GROUPS)
    store_four(plan.shares_ptr, c, SHARE_FIELDS, 0, real, start, segment, stop, stop_segment)
    real = real & (start < num_rows * split.HEAD_LOOPS)
    if not split.DEPENDS_ON_BATCH:
        row = tl.minimum(start // split.HEAD_LOOPS, TURNS * LANES - 1)
        of, at = row // LANES, row % LANES
    if TURNS == 1:
        for part in tl.static_range(FIELDS // 4):
            w, x, y, z = _four_of_row(placed, 4 * part, of, at, TURNS)
            store_four(plan.shares_ptr, c, SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)
    else:
        # Tensors get one dimension, which leaves the compiler no choice of the dimension to load
        # along.
        place = tl.reshape(_of_row(placed, 7, of, at, TURNS), [LINES * LANES])
        req = tl.reshape(of * LANES + at, [LINES * LANES])
        c, real = tl.reshape(c, [LINES * LANES]), tl.reshape(real, [LINES * LANES])
        _store_recomputed(batch, plan.shares_ptr, c, real, req, place, rules)


@triton.jit
def _store_recomputed(batch, shares_ptr, c, real, req, place, rules):
    """Store in the shares of groups ``c`` the only work item of each request ``req``.

    With several turns every number would take an exchange per turn. So the work item is computed
    again from its request. Only its ``place`` is exchanged. Tensors have one dimension.
    """
    begin, count, kv_len = request_at(req, real, batch)
    requests = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=c * 0 + 1)
    rows = rows_of(real, req, c * 0, c * 0, requests, rules)
    tiles = tl.maximum(rows.tiles, 1)
    part, parts = segments_of(rows.first_tile, tiles, rules.tile.SEGMENT_UNIT)
    store_four(shares_ptr, c, SHARE_FIELDS, 4, real, req, rows.token, rows.tokens, kv_len)
    store_four(shares_ptr, c, SHARE_FIELDS, 8, real, rows.first, rows.first_tile, tiles, place)
    store_four(
        shares_ptr, c, SHARE_FIELDS, 12, real, part, parts, rows.segment_group, rows.segment_groups
    )


@triton.jit
def requests_by_warp(batch, LINES: tl.constexpr, TURNS: tl.constexpr):
    """Requests of one work item each, as :func:`plan_few` takes them: every warp loads them all."""
    line = tl.arange(0, LINES)[:, None] * 0
    lanes = line + tl.arange(0, IN_A_WARP)[None, :]
    turns = ()
    for k in tl.static_range(TURNS):
        i = k * IN_A_WARP + lanes
        begin, count, kv_len = request_at(i, i < batch.num_reqs, batch)
        one = i * 0 + 1
        requests = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=one)
        turns += (requests,)  # type: ignore[assignment]
    return turns
