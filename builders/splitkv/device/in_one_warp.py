"""Plans few work items: every warp has all of them, so no thread reads what another one stored.

Tensors have a line per warp and a column per thread of a warp. Work items that are more than a
warp's threads come in several *turns*: each thread has one work item of every turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.device.work_items import (
    FIELDS,
    SHARE_FIELDS,
    first_place,
    request_at,
    row_of,
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
def _row_of_lane(
    j, num_rows, num_reqs, most_rows, req_rows, requests, window, chunk, lookback, dcp_size,
    dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr,
    DCP: tl.constexpr, SEGMENTS_PER_GROUP: tl.constexpr, TURNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Work item ``j`` of each thread of a turn.

    Returns its numbers in the order of ROW_FIELDS, without the place and the segments, which are
    not known yet. Where there are several turns, each request has one work item.
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
            if SEGMENTS_PER_GROUP:
                # fp32 gives the right quotient of numbers up to a warp's threads.
                turn = ((later.to(tl.float32) + 0.5) / segment_groups.to(tl.float32)).to(tl.int32)
                segment_group = later - turn * segment_groups
            skipped = turn * QUERY_TOKENS
    token, tokens, first, first_tile, tiles = row_of(
        j < num_rows, segment_group, skipped, begin, count, kv_len, window, chunk, lookback,
        dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK,
        TRIM, DCP, SEGMENTS_PER_GROUP,
    )  # fmt: skip
    return req, token, tokens, kv_len, first, first_tile, tiles, segment_group, segment_groups


@triton.jit
def _store_turns(
    rows_ptr, rows, num_rows, cost, lanes, line, SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Store the work items of all turns, each turn by a warp of its own.

    Returns for each turn the numbers of its work items in the order of ROW_FIELDS, their ends among
    the tiles, and the end of the turn.
    """
    placed = ()
    begun = line * 0
    for k in tl.static_range(TURNS):
        j = k * IN_A_WARP + lanes
        live = j < num_rows
        req, token, tokens, kv_len, first, first_tile, tiles, segment_group, segment_groups = rows[
            k
        ]
        taken = tl.where(live, (tiles + cost) * HEAD_LOOPS, 0)
        ends = begun + tl.cumsum(taken, 1)
        begun += tl.sum(taken, 1, keep_dims=True)
        place = ends - taken
        tiles = tl.maximum(tiles, 1)
        part, parts = segments_of(first_tile, tiles, SEGMENT_UNIT)
        mine = live & (line == k)
        store_four(rows_ptr, j, FIELDS, 0, mine, req, token, tokens, kv_len)
        store_four(rows_ptr, j, FIELDS, 4, mine, first, first_tile, tiles, place)
        store_four(rows_ptr, j, FIELDS, 8, mine, part, parts, segment_group, segment_groups)
        stored = (
            req, token, tokens, kv_len, first, first_tile, tiles, place, part, parts, segment_group,
            segment_groups, ends, begun,
        )  # fmt: skip
        placed += (stored,)  # type: ignore[assignment]
    return placed


@triton.jit
def plan_few(
    rows_ptr, total_ptr, starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, num_reqs, num_rows,
    most_rows, req_rows, reqs, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
    dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr, HEAD_LOOPS: tl.constexpr, DEPENDS_ON_BATCH: tl.constexpr,
    LEAST: tl.constexpr, ROW_COST: tl.constexpr, NUM_GROUPS: tl.constexpr, LINES: tl.constexpr,
    TURNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Plan few work items: every warp has all of them, and each thread has one of every turn.

    With one turn, there are no more requests and work items than a warp has threads. With more
    turns, every request has one work item. ``reqs`` holds four tensors for each turn: first tokens,
    numbers of tokens, KV lengths, and segment groups of its requests.

    Tensors have a line for each warp, so that an operation along a line stays within the warp.
    """
    lane = tl.arange(0, IN_A_WARP)[None, :]
    line = tl.arange(0, LINES)[:, None]
    lanes = line * 0 + lane
    rows = ()
    total, fewest, largest = line * 0, line * 0 + max_kv_len + 1, line * 0 + 1
    for k in tl.static_range(TURNS):
        j = k * IN_A_WARP + lanes
        row = _row_of_lane(
            j, num_rows, num_reqs, most_rows, req_rows, reqs[k], window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            SEGMENTS_PER_GROUP, TURNS, STEPS,
        )  # fmt: skip
        rows += (row,)  # type: ignore[assignment]
        total += tl.sum(row[6], 1, keep_dims=True)
        least = tl.min(tl.where(j < num_rows, row[6], max_kv_len + 1), 1, keep_dims=True)
        fewest = tl.minimum(fewest, least)
        largest = tl.maximum(largest, tl.max(row[6], 1, keep_dims=True))
    cost, total, sharers, shared = sharing(
        total, fewest, largest, num_rows, HEAD_LOOPS, DEPENDS_ON_BATCH, LEAST, ROW_COST, NUM_GROUPS
    )
    once = (line == 0) & (lane < 2)
    tl.store(total_ptr + lanes, tl.where(lane == 0, num_rows, shared), mask=once)
    placed = _store_turns(
        rows_ptr, rows, num_rows, cost, lanes, line, SEGMENT_UNIT, HEAD_LOOPS, TURNS
    )
    _share_turns(
        starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, placed, lane, line, num_rows, cost,
        total, sharers, shared, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
        dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
        SEGMENTS_PER_GROUP, HEAD_LOOPS, DEPENDS_ON_BATCH, NUM_GROUPS, LINES, TURNS,
    )  # fmt: skip


@triton.jit
def _share_turns(
    starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, placed, lane, line, num_rows, cost,
    total, sharers, shared, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr, HEAD_LOOPS: tl.constexpr, DEPENDS_ON_BATCH: tl.constexpr,
    NUM_GROUPS: tl.constexpr, LINES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Store where every group starts, and its share, from work items that every warp has.

    A share holds the start of the next group too. The last thread of a warp computes that for the
    thread before it, and stores nothing: its group is the next warp's first.
    """
    LANES: tl.constexpr = IN_A_WARP
    c = line * (LANES - 1) + lane
    own = lane < LANES - 1
    position = first_place(c, shared, sharers)
    of = c * 0
    for k in tl.static_range(TURNS - 1):
        of += (placed[k][FIELDS + 1] <= position).to(tl.int32)
    at = c * 0
    for step in tl.static_range(_WARP_STEPS):
        half = LANES >> (step + 1)
        ends = _of_row(placed, FIELDS, of, at + half - 1, TURNS)
        at += tl.where(ends <= position, half, 0)
    _, first_tile, tiles, place = _four_of_row(placed, 4, of, at, TURNS)
    start, segment = start_from(
        of * LANES + at, position, (c <= NUM_GROUPS) & (position < total), place, first_tile, tiles,
        cost, num_rows, SEGMENT_UNIT, HEAD_LOOPS, DEPENDS_ON_BATCH,
    )  # fmt: skip
    store_two(starts_ptr, c, own & (c <= NUM_GROUPS), start, segment)
    following = tl.minimum(line * 0 + lane + 1, LANES - 1)
    stop, stop_segment = tl.gather(start, following, 1), tl.gather(segment, following, 1)
    real = own & (c < NUM_GROUPS)
    store_four(shares_ptr, c, SHARE_FIELDS, 0, real, start, segment, stop, stop_segment)
    real = real & (start < num_rows * HEAD_LOOPS)
    if not DEPENDS_ON_BATCH:
        row = tl.minimum(start // HEAD_LOOPS, TURNS * LANES - 1)
        of, at = row // LANES, row % LANES
    if TURNS == 1:
        for part in tl.static_range(FIELDS // 4):
            w, x, y, z = _four_of_row(placed, 4 * part, of, at, TURNS)
            store_four(shares_ptr, c, SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)
    else:
        # With several turns every number would take an exchange per turn. So the work item is
        # computed again from its request. Tensors get one dimension for that, which leaves the
        # compiler no choice of the dimension to load along.
        place = tl.reshape(_of_row(placed, 7, of, at, TURNS), [LINES * LANES])
        req = tl.reshape(of * LANES + at, [LINES * LANES])
        c, real = tl.reshape(c, [LINES * LANES]), tl.reshape(real, [LINES * LANES])
        begin, count, kv_len = request_at(req, real, seq_lens_ptr, query_start_ptr, max_kv_len)
        token, tokens, first, first_tile, tiles = row_of(
            real, c * 0, c * 0, begin, count, kv_len, window, chunk, lookback, dcp_size, dcp_rank,
            dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            SEGMENTS_PER_GROUP,
        )  # fmt: skip
        tiles = tl.maximum(tiles, 1)
        part, parts = segments_of(first_tile, tiles, SEGMENT_UNIT)
        store_four(shares_ptr, c, SHARE_FIELDS, 4, real, req, token, tokens, kv_len)
        store_four(shares_ptr, c, SHARE_FIELDS, 8, real, first, first_tile, tiles, place)
        store_four(shares_ptr, c, SHARE_FIELDS, 12, real, part, parts, c * 0, c * 0 + 1)


@triton.jit
def requests_by_warp(
    seq_lens_ptr, query_start_ptr, num_reqs, max_kv_len, LINES: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Requests of one work item each, as :func:`plan_few` takes them: every warp loads them all."""
    line = tl.arange(0, LINES)[:, None] * 0
    lanes = line + tl.arange(0, IN_A_WARP)[None, :]
    reqs = ()
    for k in tl.static_range(TURNS):
        i = k * IN_A_WARP + lanes
        begin, count, kv_len = request_at(
            i, i < num_reqs, seq_lens_ptr, query_start_ptr, max_kv_len
        )
        reqs += ((begin, count, kv_len, i * 0 + 1),)  # type: ignore[assignment]
    return reqs
