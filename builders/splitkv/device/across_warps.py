"""Plans any number of work items: threads store them, and find the stores of other threads.

Barriers separate the stores from the loads. :mod:`builders.splitkv.device.in_one_warp` plans few
work items without barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.device.work_items import (
    FIELDS,
    SHARE_FIELDS,
    first_group,
    first_place,
    load_four,
    row_after,
    row_of,
    segment_groups_of,
    sharing,
    start_from,
    store_four,
    store_row,
    store_two,
)

_SERIAL = tl.constexpr(4)
"""Most work items of a request that the request's thread makes one after the other. If any request
has more, every work item has a thread."""


@triton.jit
def _store_rows(
    rows_ptr, names_ptr, i, j, place, cost, most_rows, shared, sharers, req_rows, begin, count,
    kv_len, segment_groups, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr, HEAD_LOOPS: tl.constexpr,
):  # fmt: skip
    """Store the work items of every request ``i``, one after the other, from number ``j`` on.

    The request's first work item stands at ``place`` among the tiles; each takes the place of
    ``cost`` tiles more than it has. The number of a work item in which groups begin is stored in
    ``names`` at the first of these groups.
    """
    group = first_group(place, shared, sharers)
    segment_group, skipped = i * 0, i * 0
    for k in range(0, most_rows):
        live = k < req_rows
        token, tokens, first, first_tile, tiles = row_of(
            live, segment_group, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            SEGMENTS_PER_GROUP,
        )  # fmt: skip
        store_row(
            rows_ptr, live, j, i, token, tokens, kv_len, first, first_tile, tiles, place,
            segment_group, segment_groups, SEGMENT_UNIT,
        )  # fmt: skip
        place += (tiles + cost) * HEAD_LOOPS
        after = first_group(place, shared, sharers)
        tl.store(names_ptr + 2 * group, j, mask=live & (group < after))
        group = after
        segment_group, skipped = row_after(
            segment_group, skipped, segment_groups, QUERY_TOKENS, SEGMENTS_PER_GROUP
        )
        j += 1


@triton.jit
def _rows_at(
    j, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window, chunk, lookback,
    dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr,
    DCP: tl.constexpr, SEGMENTS_PER_GROUP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Work items ``j``, each computed by one thread.

    Returns whether there is such a work item, its request, KV length and segment groups, the five
    numbers of :func:`row_of`, and its segment group.
    """
    live = j < num_rows
    # Count the requests whose work items end at or before ``j``: that is the request of ``j``.
    req = j * 0
    for step in tl.static_range(STEPS):
        half = (1 << STEPS) >> (step + 1)
        end = tl.load(row_ends_ptr + req + half - 1, mask=live, other=0)
        req = tl.where(end <= j, req + half, req)
    req = tl.where(live, req, 0)
    before = tl.load(row_ends_ptr + req - 1, mask=live & (req > 0), other=0)
    begin = tl.load(query_start_ptr + req, mask=live, other=0)
    count = tl.load(query_start_ptr + 1 + req, mask=live, other=0) - begin
    kv_len = tl.minimum(tl.load(seq_lens_ptr + req, mask=live, other=0), max_kv_len)
    segment_groups = segment_groups_of(
        kv_len, dcp_size, dcp_rank, dcp_interleave, KV_TILE, SEGMENT_UNIT, DCP, SEGMENTS_PER_GROUP
    )
    segment_group = (j - before) % segment_groups
    skipped = (j - before) // segment_groups * QUERY_TOKENS
    token, tokens, first, first_tile, tiles = row_of(
        live, segment_group, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
        dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
        SEGMENTS_PER_GROUP,
    )  # fmt: skip
    return live, req, kv_len, segment_groups, token, tokens, first, first_tile, tiles, segment_group


@triton.jit
def _count_serially(
    tiles_of, least, most, most_rows, req_rows, begin, count, kv_len, segment_groups, window, chunk,
    lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr,
    KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    TRIM: tl.constexpr, DCP: tl.constexpr, SEGMENTS_PER_GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of every request, and the fewest and the most tiles of a work item.

    Each thread counts the work items of its request one after the other, so no thread needs
    another's numbers.
    """
    segment_group, skipped = tiles_of * 0, tiles_of * 0
    for k in range(0, most_rows):
        live = k < req_rows
        _, _, _, _, tiles = row_of(
            live, segment_group, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            SEGMENTS_PER_GROUP,
        )  # fmt: skip
        tiles_of += tiles
        least = tl.where(live, tl.minimum(least, tiles), least)
        most = tl.maximum(most, tiles)
        segment_group, skipped = row_after(
            segment_group, skipped, segment_groups, QUERY_TOKENS, SEGMENTS_PER_GROUP
        )
    return tiles_of, least, most


@triton.jit
def _count_by_row(
    tiles_of, least, most, i, req_ends, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr,
    max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    TRIM: tl.constexpr, DCP: tl.constexpr, SEGMENTS_PER_GROUP: tl.constexpr, REQS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Tiles of the work items of each thread ``i``, and the fewest and the most of a work item.

    Work items go to threads in turn, whatever requests they are of.
    """
    tl.store(row_ends_ptr + i, req_ends, mask=i < (1 << STEPS))
    # Other threads look up requests in these ends.
    tl.debug_barrier()
    for block in range(0, num_rows, REQS):
        live, _, _, _, _, _, _, _, tiles, _ = _rows_at(
            block + i, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window,
            chunk, lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE,
            SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, SEGMENTS_PER_GROUP, STEPS,
        )  # fmt: skip
        tiles_of += tiles
        least = tl.where(live, tl.minimum(least, tiles), least)
        most = tl.maximum(most, tiles)
    return tiles_of, least, most


@triton.jit
def _store_by_row(
    rows_ptr, names_ptr, i, num_rows, cost, shared, sharers, seq_lens_ptr, query_start_ptr,
    row_ends_ptr, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr, HEAD_LOOPS: tl.constexpr, REQS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Store all work items, each by one thread, and name them as :func:`_store_rows` does."""
    begun = 0
    for block in range(0, num_rows, REQS):
        j = block + i
        live, req, lens, of, token, tokens, first, first_tile, tiles, segment_group = _rows_at(
            j, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window, chunk,
            lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT,
            WINDOW, CHUNK, TRIM, DCP, SEGMENTS_PER_GROUP, STEPS,
        )  # fmt: skip
        taken = tl.where(live, (tiles + cost) * HEAD_LOOPS, 0)
        past = begun + tl.cumsum(taken, 0)
        place = past - taken
        store_row(
            rows_ptr, live, j, req, token, tokens, lens, first, first_tile, tiles, place,
            segment_group, of, SEGMENT_UNIT,
        )  # fmt: skip
        group = first_group(place, shared, sharers)
        begins = group < first_group(past, shared, sharers)
        tl.store(names_ptr + 2 * group, j, mask=live & begins)
        begun += tl.sum(taken, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _store_groups(
    rows_ptr, names_ptr, starts_ptr, shares_ptr, c, shared, sharers, total, cost, num_groups,
    num_rows, SEGMENT_UNIT: tl.constexpr, HEAD_LOOPS: tl.constexpr, DEPENDS_ON_BATCH: tl.constexpr,
):  # fmt: skip
    """Store where every group ``c`` starts, and its share.

    See :data:`builders.splitkv.record.SHARE_FIELDS` for the numbers of a share. ``names`` holds a
    work item at the first group that begins within it, and -1 elsewhere. Each thread computes the
    start of the next group too, since fetching it from another thread would take a barrier.
    """
    named = tl.load(names_ptr + 2 * c, mask=c <= num_groups, other=-1)
    named_next = tl.load(names_ptr + 2 * c + 2, mask=c < num_groups, other=-1)
    held = tl.associative_scan(named, 0, _larger)
    real = c < num_groups
    _, first_tile, tiles, place = load_four(
        rows_ptr, held, FIELDS, 4, (c <= num_groups) & (held >= 0)
    )
    held_next = tl.maximum(held, named_next)
    _, first_tile_next, tiles_next, place_next = load_four(
        rows_ptr, held_next, FIELDS, 4, real & (held_next >= 0)
    )
    position = first_place(c, shared, sharers)
    row, segment = start_from(
        held, position, (c <= num_groups) & (position < total), place, first_tile, tiles, cost,
        num_rows, SEGMENT_UNIT, HEAD_LOOPS, DEPENDS_ON_BATCH,
    )  # fmt: skip
    position = first_place(c + 1, shared, sharers)
    next_row, next_segment = start_from(
        held_next, position, real & (position < total), place_next, first_tile_next, tiles_next,
        cost, num_rows, SEGMENT_UNIT, HEAD_LOOPS, DEPENDS_ON_BATCH,
    )  # fmt: skip
    store_two(starts_ptr, c, c <= num_groups, row, segment)
    store_four(shares_ptr, c, SHARE_FIELDS, 0, real, row, segment, next_row, next_segment)
    real = real & (row < num_rows * HEAD_LOOPS)
    for part in tl.static_range(FIELDS // 4):
        w, x, y, z = load_four(rows_ptr, row // HEAD_LOOPS, FIELDS, 4 * part, real)
        store_four(shares_ptr, c, SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)


@triton.jit
def plan_many(
    rows_ptr, total_ptr, starts_ptr, shares_ptr, row_ends_ptr, names_ptr, seq_lens_ptr,
    query_start_ptr, num_rows, most_rows, req_ends, req_rows, begin, count, kv_len, segment_groups,
    max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    SEGMENTS_PER_GROUP: tl.constexpr, HEAD_LOOPS: tl.constexpr, DEPENDS_ON_BATCH: tl.constexpr,
    LEAST: tl.constexpr, ROW_COST: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr,
    REQS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Plan any number of work items.

    First work items are stored, and each is named at the first group that begins within it. Then
    every group finds by these names the work item where it starts.
    """
    i, c = tl.arange(0, REQS), tl.arange(0, GROUPS)
    tl.store(names_ptr + 2 * c, -1, mask=c <= NUM_GROUPS)
    is_serial = most_rows <= _SERIAL
    req_tiles = tl.zeros([REQS], tl.int32)
    least = tl.zeros([REQS], tl.int32) + max_kv_len + 1
    most = tl.zeros([REQS], tl.int32) + 1
    if is_serial:
        req_tiles, least, most = _count_serially(
            req_tiles, least, most, most_rows, req_rows, begin, count, kv_len, segment_groups,
            window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE,
            SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, SEGMENTS_PER_GROUP,
        )  # fmt: skip
    else:
        req_tiles, least, most = _count_by_row(
            req_tiles, least, most, i, req_ends, num_rows, seq_lens_ptr, query_start_ptr,
            row_ends_ptr, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
            QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, SEGMENTS_PER_GROUP, REQS,
            STEPS,
        )  # fmt: skip
    total, fewest, largest = tl.reduce((req_tiles, least, most), 0, _totalled)
    # Tiles are summed without the cost of a work item, which is not known yet. So the sum need not
    # wait for it.
    tiles_before = tl.cumsum(req_tiles, 0) - req_tiles
    cost, total, sharers, shared = sharing(
        total, fewest, largest, num_rows, HEAD_LOOPS, DEPENDS_ON_BATCH, LEAST, ROW_COST, NUM_GROUPS
    )
    tl.store(total_ptr, num_rows)
    tl.store(total_ptr + 1, shared)
    place = (tiles_before + cost * (req_ends - req_rows)) * HEAD_LOOPS
    # No thread may store a name before all threads have cleared theirs.
    tl.debug_barrier()
    if is_serial:
        _store_rows(
            rows_ptr, names_ptr, i, req_ends - req_rows, place, cost, most_rows, shared, sharers,
            req_rows, begin, count, kv_len, segment_groups, window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            SEGMENTS_PER_GROUP, HEAD_LOOPS,
        )  # fmt: skip
    else:
        _store_by_row(
            rows_ptr, names_ptr, i, num_rows, cost, shared, sharers, seq_lens_ptr, query_start_ptr,
            row_ends_ptr, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
            QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, SEGMENTS_PER_GROUP,
            HEAD_LOOPS, REQS, STEPS,
        )  # fmt: skip
    # Groups load work items and names that other threads stored.
    tl.debug_barrier()
    _store_groups(
        rows_ptr, names_ptr, starts_ptr, shares_ptr, c, shared, sharers, total, cost, NUM_GROUPS,
        num_rows, SEGMENT_UNIT, HEAD_LOOPS, DEPENDS_ON_BATCH,
    )  # fmt: skip


@triton.jit
def _totalled(a, b, c, d, e, f):
    return a + d, tl.minimum(b, e), tl.maximum(c, f)
