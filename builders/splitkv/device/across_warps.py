"""Plans any number of work items: threads store them, and find the stores of other threads.

Barriers separate the stores from the loads. :mod:`builders.splitkv.device.in_one_warp` plans few
work items without barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.device.groups import Requests
from builders.splitkv.device.work_items import (
    FIELDS,
    SHARE_FIELDS,
    first_group,
    first_place,
    load_four,
    request_at,
    row_after,
    rows_of,
    segment_groups_of,
    sharing,
    start_from,
    store_four,
    store_rows,
    store_two,
)

_SERIAL = tl.constexpr(4)
"""Most work items of a request that the request's thread makes one after the other. If any request
has more, every work item has a thread."""


@triton.jit
def _store_serially(plan, i, j, place, most_rows, req_rows, requests, shares, rules, split):
    """Store the work items of every request ``i``, one after the other, from number ``j`` on.

    The request's first work item stands at ``place`` among the tiles; each takes the place of
    ``shares.cost`` tiles more than it has. The number of a work item in which groups begin is
    stored in the plan's names at the first of these groups. Tensors are ``[REQS]`` int32.
    """
    group = first_group(place, shares.shared, shares.sharers)
    segment_group, skipped = i * 0, i * 0
    for k in range(0, most_rows):
        live = k < req_rows
        rows = rows_of(live, i, segment_group, skipped, requests, rules)
        store_rows(plan.rows_ptr, live, j, rows, place + shares.cost, rules.tile.SEGMENT_UNIT)
        place += (rows.tiles + shares.cost) * split.HEAD_LOOPS
        after = first_group(place, shares.shared, shares.sharers)
        tl.store(plan.names_ptr + 2 * group, j, mask=live & (group < after))
        group = after
        segment_group, skipped = row_after(segment_group, skipped, requests.segment_groups, rules)
        j += 1


@triton.jit
def _rows_at(j, num_rows, row_ends_ptr, batch, rules, STEPS: tl.constexpr):
    """Work items ``j`` ``[REQS]``, each computed by one thread: whether there are such, and they.

    ``row_ends_ptr`` points to the ends of each request's work items, ``[2 ** STEPS]`` int32.
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
    begin, count, kv_len = request_at(req, live, batch)
    segment_groups = segment_groups_of(kv_len, rules)
    segment_group = (j - before) % segment_groups
    skipped = (j - before) // segment_groups * rules.tile.QUERY_TOKENS
    requests = Requests(begin=begin, count=count, kv_len=kv_len, segment_groups=segment_groups)
    return live, rows_of(live, req, segment_group, skipped, requests, rules)


@triton.jit
def _count_serially(tiles_of, least, most, most_rows, req_rows, requests, rules):
    """Tiles of every request, and the fewest and the most tiles of a work item.

    Each thread counts the work items of its request one after the other, so no thread needs
    another's numbers. The numbers are added to ``tiles_of``, ``least`` and ``most``, ``[REQS]``
    int32.
    """
    segment_group, skipped = tiles_of * 0, tiles_of * 0
    for k in range(0, most_rows):
        live = k < req_rows
        rows = rows_of(live, tiles_of, segment_group, skipped, requests, rules)
        tiles_of += rows.tiles
        least = tl.where(live, tl.minimum(least, rows.tiles), least)
        most = tl.maximum(most, rows.tiles)
        segment_group, skipped = row_after(segment_group, skipped, requests.segment_groups, rules)
    return tiles_of, least, most


@triton.jit
def _count_by_row(
    tiles_of, least, most, i, req_ends, num_rows, row_ends_ptr, batch, rules, REQS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Tiles of the work items of each thread ``i``, and the fewest and the most of a work item.

    Work items go to threads in turn, whatever requests they are of. The numbers are added to
    ``tiles_of``, ``least`` and ``most``, ``[REQS]`` int32.
    """
    tl.store(row_ends_ptr + i, req_ends, mask=i < (1 << STEPS))
    # Other threads look up requests in these ends.
    tl.debug_barrier()
    for block in range(0, num_rows, REQS):
        live, rows = _rows_at(block + i, num_rows, row_ends_ptr, batch, rules, STEPS)
        tiles_of += rows.tiles
        least = tl.where(live, tl.minimum(least, rows.tiles), least)
        most = tl.maximum(most, rows.tiles)
    return tiles_of, least, most


@triton.jit
def _store_by_row(
    plan, i, num_rows, shares, batch, rules, split, REQS: tl.constexpr, STEPS: tl.constexpr
):  # fmt: skip
    """Store all work items, each by one thread ``i``, and name them as :func:`_store_serially`."""
    begun = 0
    for block in range(0, num_rows, REQS):
        j = block + i
        live, rows = _rows_at(j, num_rows, plan.row_ends_ptr, batch, rules, STEPS)
        taken = tl.where(live, (rows.tiles + shares.cost) * split.HEAD_LOOPS, 0)
        past = begun + tl.cumsum(taken, 0)
        place = past - taken
        store_rows(plan.rows_ptr, live, j, rows, place + shares.cost, rules.tile.SEGMENT_UNIT)
        group = first_group(place, shares.shared, shares.sharers)
        begins = group < first_group(past, shares.shared, shares.sharers)
        tl.store(plan.names_ptr + 2 * group, j, mask=live & begins)
        begun += tl.sum(taken, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _store_groups(plan, c, shares, num_rows, SEGMENT_UNIT: tl.constexpr, split):
    """Store where every group ``c`` ``[GROUPS]`` starts, and its share.

    See :data:`builders.splitkv.record.SHARE_FIELDS` for the numbers of a share. The plan's names
    hold a work item at the first group that begins within it, and -1 elsewhere. Each thread
    computes the start of the next group too, since fetching it from another thread would take a
    barrier.
    """
    named = tl.load(plan.names_ptr + 2 * c, mask=c <= split.NUM_GROUPS, other=-1)
    named_next = tl.load(plan.names_ptr + 2 * c + 2, mask=c < split.NUM_GROUPS, other=-1)
    held = tl.associative_scan(named, 0, _larger)
    real = c < split.NUM_GROUPS
    _, first_tile, tiles, place = load_four(
        plan.rows_ptr, held, FIELDS, 4, (c <= split.NUM_GROUPS) & (held >= 0)
    )
    held_next = tl.maximum(held, named_next)
    _, first_tile_next, tiles_next, place_next = load_four(
        plan.rows_ptr, held_next, FIELDS, 4, real & (held_next >= 0)
    )
    position = first_place(c, shares.shared, shares.sharers)
    row, segment = start_from(
        held, position, (c <= split.NUM_GROUPS) & (position < shares.total), place, first_tile,
        tiles, shares.cost, num_rows, SEGMENT_UNIT, split,
    )  # fmt: skip
    position = first_place(c + 1, shares.shared, shares.sharers)
    next_row, next_segment = start_from(
        held_next, position, real & (position < shares.total), place_next, first_tile_next,
        tiles_next, shares.cost, num_rows, SEGMENT_UNIT, split,
    )  # fmt: skip
    store_two(plan.starts_ptr, c, c <= split.NUM_GROUPS, row, segment)
    store_four(plan.shares_ptr, c, SHARE_FIELDS, 0, real, row, segment, next_row, next_segment)
    real = real & (row < num_rows * split.HEAD_LOOPS)
    for part in tl.static_range(FIELDS // 4):
        w, x, y, z = load_four(plan.rows_ptr, row // split.HEAD_LOOPS, FIELDS, 4 * part, real)
        store_four(plan.shares_ptr, c, SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)


@triton.jit
def plan_many(
    batch, plan, num_rows, most_rows, req_ends, req_rows, requests, rules, split, sizes
):  # fmt: skip
    """Plan any number of work items.

    First work items are stored, and each is named at the first group that begins within it. Then
    every group finds by these names the work item where it starts.

    ``req_rows`` and ``req_ends`` ``[REQS]`` int32 are the work items of each of the ``requests``,
    and of all requests up to it; ``num_rows`` is their sum and ``most_rows`` the most of a request.
    """
    REQS: tl.constexpr = sizes.REQS
    STEPS: tl.constexpr = sizes.STEPS
    i, c = tl.arange(0, REQS), tl.arange(0, sizes.GROUPS)
    tl.store(plan.names_ptr + 2 * c, -1, mask=c <= split.NUM_GROUPS)
    is_serial = most_rows <= _SERIAL
    req_tiles = tl.zeros([REQS], tl.int32)
    least = tl.zeros([REQS], tl.int32) + batch.max_kv_len + 1
    most = tl.zeros([REQS], tl.int32) + 1
    if is_serial:
        req_tiles, least, most = _count_serially(
            req_tiles, least, most, most_rows, req_rows, requests, rules
        )
    else:
        req_tiles, least, most = _count_by_row(
            req_tiles, least, most, i, req_ends, num_rows, plan.row_ends_ptr, batch, rules, REQS,
            STEPS,
        )  # fmt: skip
    total, fewest, largest = tl.reduce((req_tiles, least, most), 0, _totalled)
    # Tiles are summed without the cost of a work item, which is not known yet. So the sum need not
    # wait for it.
    tiles_before = tl.cumsum(req_tiles, 0) - req_tiles
    shares = sharing(total, fewest, largest, num_rows, split)
    tl.store(plan.total_ptr, num_rows)
    tl.store(plan.total_ptr + 1, shares.shared)
    place = (tiles_before + shares.cost * (req_ends - req_rows)) * split.HEAD_LOOPS
    # No thread may store a name before all threads have cleared theirs.
    tl.debug_barrier()
    if is_serial:
        _store_serially(
            plan, i, req_ends - req_rows, place, most_rows, req_rows, requests, shares, rules, split
        )
    else:
        _store_by_row(plan, i, num_rows, shares, batch, rules, split, REQS, STEPS)
    # Groups load work items and names that other threads stored.
    tl.debug_barrier()
    _store_groups(plan, c, shares, num_rows, rules.tile.SEGMENT_UNIT, split)


@triton.jit
def _totalled(a, b, c, d, e, f):
    return a + d, tl.minimum(b, e), tl.maximum(c, f)
