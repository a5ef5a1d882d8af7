"""Work items of a step's plan on the device: their keys, their shares among programs, their stores.

A work item is a ``row`` in names, and a segment group a ``segment_group``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv import record as split_plan
from builders.splitkv.device.groups import Rows, Shares
from builders.splitkv.device.segments import first_visible, local_len, segment_of, segment_start

FIELDS = tl.constexpr(split_plan.ROW_FIELDS)
SHARE_FIELDS = tl.constexpr(split_plan.SHARE_FIELDS)
_WASTE = tl.constexpr(split_plan.WASTE)
_MOST_SHARED = tl.constexpr(split_plan.MOST_SHARED)


@triton.jit
def segment_groups_of(keys, rules):
    """Segment groups of requests with ``keys`` keys, of which DCP counts only this rank's.

    ``keys`` is a tensor of int32; the result has its shape. ``rules`` are
    :class:`builders.splitkv.device.groups.Rules`.
    """
    segment_groups = keys * 0 + 1
    if rules.tile.SEGMENTS_PER_GROUP:
        if rules.stripe.DCP:
            keys = local_len(keys, rules.stripe.size, rules.stripe.rank, rules.stripe.interleave)
        last_tile = tl.maximum(tl.cdiv(keys, rules.tile.KV_TILE) - 1, 0)
        last = segment_of(last_tile * rules.tile.SEGMENT_UNIT)
        segment_groups = last // rules.tile.SEGMENTS_PER_GROUP + 1
    return segment_groups


@triton.jit
def rows_of(live, req, segment_group, skipped, requests, rules):
    """One work item of each of the requests ``req``, of which ``requests`` has the numbers.

    The work item has the tokens that follow the request's ``skipped`` first ones, and the keys of
    segment group ``segment_group``. It has no KV tiles where it is not ``live``. The tensors and
    the fields of the returned :class:`builders.splitkv.device.groups.Rows` have one shape.
    """
    first = tl.maximum(requests.kv_len - requests.count, 0) + skipped
    tokens = tl.minimum(requests.count - skipped, rules.tile.QUERY_TOKENS)
    last = first + tokens - 1
    start = first_visible(
        first, last, rules.mask.window, rules.mask.chunk, rules.mask.lookback, None, 0,
        rules.mask.WINDOW, rules.mask.CHUNK, False, False,
    )  # fmt: skip
    first_tile = start // rules.tile.KV_TILE
    stop_tile = _stop_tile(last + 1, requests.kv_len, rules)
    if rules.tile.SEGMENTS_PER_GROUP:
        first_tile, past = _tiles_of_group(segment_group, rules)
        stop_tile = tl.minimum(stop_tile, past)
    # A work item without keys counts as one tile, so that some program writes its zeros.
    tiles = tl.where(live, tl.maximum(stop_tile - first_tile, 1), 0)
    return Rows(
        req=req, token=requests.begin + skipped, tokens=tokens, kv_len=requests.kv_len, first=first,
        first_tile=first_tile, tiles=tiles, segment_group=segment_group,
        segment_groups=requests.segment_groups,
    )  # fmt: skip


@triton.jit
def tiles_of_tokens(live, skipped, requests, rules):
    """KV tiles of all work items of some tokens of each request, and the most of one of them.

    The tokens follow the request's ``skipped`` first ones. Both are 0 where not ``live``.
    """
    rows = rows_of(live, skipped, skipped * 0, skipped, requests, rules)
    tiles, most = rows.tiles, rows.tiles
    if rules.tile.SEGMENTS_PER_GROUP:
        # Segment groups before the last one with keys are full and grow, and each one behind it
        # counts as one tile.
        tiles = tl.maximum(_stop_tile(rows.first + rows.tokens, requests.kv_len, rules), 1)
        last = segment_of((tiles - 1) * rules.tile.SEGMENT_UNIT) // rules.tile.SEGMENTS_PER_GROUP
        first_tile, _ = _tiles_of_group(last, rules)
        full, _ = _tiles_of_group(tl.maximum(last - 1, 0), rules)
        most = tl.maximum(tiles - first_tile, first_tile - full)
        tiles += requests.segment_groups - 1 - last
    return tl.where(live, tiles, 0), tl.where(live, most, 0)


@triton.jit
def _stop_tile(stop, kv_len, rules):
    """The tile after the last one that tokens before position ``stop`` see."""
    stop = tl.minimum(kv_len, stop) if rules.mask.TRIM else kv_len
    if rules.stripe.DCP:
        stop = local_len(stop, rules.stripe.size, rules.stripe.rank, rules.stripe.interleave)
    return tl.cdiv(stop, rules.tile.KV_TILE)


@triton.jit
def _tiles_of_group(segment_group, rules):
    """First KV tile of segment groups, and the tile after their last one."""
    first = segment_start(segment_group * rules.tile.SEGMENTS_PER_GROUP)
    first_tile = first // rules.tile.SEGMENT_UNIT
    past = segment_start((segment_group + 1) * rules.tile.SEGMENTS_PER_GROUP)
    return first_tile, past // rules.tile.SEGMENT_UNIT


@triton.jit
def _shared_tiles(total, length, is_even, num_groups):
    """KV tiles that groups share evenly, see :func:`builders.splitkv.host_twin.shared_tiles`.

    ``length`` is the most tiles of a work item; ``is_even`` if every work item has as many.
    """
    most = tl.minimum(length, (length * 0 + _MOST_SHARED) // num_groups)
    wave = num_groups * most
    few = total < wave
    # Parts of a work item, or whole work items of a share: one division serves both cases.
    times = tl.where(few, wave, total - 1) // tl.where(few, tl.maximum(total, 1), wave)
    times += tl.where(few, 0, 1)
    share = tl.where(few, tl.cdiv(most, times), times * most)
    shared = share * num_groups
    even = is_even & (length == most) & (total <= _MOST_SHARED)
    even = even & (shared - total <= total // _WASTE)
    return tl.where(even, shared, total)


@triton.jit
def _aligned_tiles(total, num_groups):
    """KV tiles that groups share if each gets a power of two, and whether few groups idle then.

    See :func:`builders.splitkv.host_twin.aligned_tiles`.
    """
    share = tl.maximum(tl.cdiv(total, num_groups) - 1, 0)
    for step in tl.static_range(5):
        share = share | (share >> (1 << step))
    aligned = (share + 1) * num_groups
    return aligned, (total <= _MOST_SHARED) & (aligned - total <= total // _WASTE)


@triton.jit
def sharing(total, largest, num_rows, batch, rules, split):
    """The :class:`builders.splitkv.device.groups.Shares` of a step.

    They follow from the tiles of all ``num_rows`` work items (argument ``total``), and from the
    ``largest`` number of tiles of one work item. ``batch``, ``rules`` and ``split`` are structures
    of :mod:`builders.splitkv.device.groups`.

    Group c owns the segments that start in ``[c * shared / sharers, (c + 1) * shared / sharers)``.
    """
    is_even = total == largest.to(tl.int64) * num_rows
    is_alone = (batch.num_reqs == 1) & (rules.tile.SEGMENTS_PER_GROUP > 0)
    aligned, is_aligned = _aligned_tiles(total * split.HEAD_LOOPS, split.NUM_GROUPS)
    is_aligned = is_aligned & is_alone & (is_even == 0)
    cost = 0
    if split.ROW_COST > 0:
        # Work items of one length are cut into equal parts: each share has as many beginnings.
        # Few aligned shares have the beginning of a second work item.
        cost = tl.where(is_even | is_aligned, 0, split.ROW_COST)
    total = (total + cost * num_rows) * split.HEAD_LOOPS
    sharers = split.NUM_GROUPS
    if split.DEPENDS_ON_BATCH:
        # Arrivals of groups are counted, and a group without a tile would never arrive.
        sharers = tl.maximum(tl.minimum(split.NUM_GROUPS, total // split.LEAST), 1)
    shared = tl.where(is_aligned, aligned, _shared_tiles(total, largest, is_even, sharers))
    return Shares(cost=cost, total=total, sharers=sharers, shared=shared)


@triton.jit
def first_place(c, shared, sharers):
    """The first tile of the share of group ``c``, ``c * shared / sharers`` rounded up."""
    whole = shared // sharers
    return c * whole + tl.cdiv(c * (shared - whole * sharers), sharers)


@triton.jit
def segments_of(first_tile, tiles, SEGMENT_UNIT: tl.constexpr):
    """The first segment of work items, and their number of segments."""
    part = segment_of(first_tile * SEGMENT_UNIT)
    return part, segment_of((first_tile + tiles - 1) * SEGMENT_UNIT) + 1 - part


@triton.jit
def store_four(ptr, j, STRIDE: tl.constexpr, first: tl.constexpr, live, a, b, c, d):
    """Store four numbers of each of the rows ``j`` of a table with STRIDE numbers a row.

    The four are stored together, since apart each number is a store to as many lines of memory as
    there are rows. There are at least as many rows as threads: of fewer, warps would have to
    exchange them first.
    """
    # Flatten the rows: only behind this reshape does the compiler see where each row lies.
    j = tl.reshape(j, [live.numel])
    live = tl.reshape(live, [live.numel])
    # The last of the two joined dimensions changes first, so a, b, c, d end up in order.
    fields = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [live.numel, 4])
    places = (ptr + first + j * STRIDE)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(places, fields, mask=live[:, None])


@triton.jit
def store_two(ptr, j, STRIDE: tl.constexpr, live, a, b):
    """Store two numbers of each of the rows ``j`` of a table with STRIDE numbers a row.

    There are at least as many rows as threads.
    """
    j = tl.reshape(j, [live.numel])
    places = (ptr + j * STRIDE)[:, None] + tl.arange(0, 2)[None, :]
    live = tl.reshape(live, [live.numel])
    tl.store(places, tl.reshape(tl.join(a, b), [live.numel, 2]), mask=live[:, None])


@triton.jit
def _start_in_row(offset, first_tile, tiles, cost, SEGMENT_UNIT: tl.constexpr, split):
    """Where the first segment at or after each place among a work item's tiles is.

    ``offset`` counts from where the work item's beginning, of ``cost`` tiles, is placed. Returns
    the head loop, the segment, and whether that segment is past the loop's last one, so that the
    next loop or work item begins there. With DEPENDS_ON_BATCH the second number is a tile.
    """
    loop = offset * 0
    if split.HEAD_LOOPS > 1:
        loop = offset // (tiles + cost)
    within = tl.maximum(offset - loop * (tiles + cost) - cost, 0)
    # Always False here: a tile is never past the loop's last one.
    past = within < 0
    if split.DEPENDS_ON_BATCH:
        segment = within
    else:
        tile = first_tile + within
        at = segment_of(tile * SEGMENT_UNIT)
        # A place inside a segment means the next segment, and a place past the last segment means
        # the next work item.
        inside = tl.maximum(segment_start(at) // SEGMENT_UNIT, first_tile) < tile
        at = at + inside.to(tl.int32)
        past = at > segment_of((first_tile + tiles - 1) * SEGMENT_UNIT)
        segment = tl.where(past, 0, at - segment_of(first_tile * SEGMENT_UNIT))
    return loop, segment, past


@triton.jit
def start_from(
    row, position, real, place, first_tile, tiles, cost, num_rows, SEGMENT_UNIT: tl.constexpr, split
):  # fmt: skip
    """Work item (times head loops) and segment where a group starts.

    The group starts at the first segment at or after its ``position``, which is within work item
    ``row``. Groups that are not ``real`` start behind the last work item.
    """
    tiles = tl.maximum(tiles, 1)
    loop, segment, past = _start_in_row(
        position - place + cost, first_tile, tiles, cost, SEGMENT_UNIT, split
    )
    row = row * split.HEAD_LOOPS + loop + past.to(tl.int32)
    return tl.where(real, row, num_rows * split.HEAD_LOOPS), tl.where(real, segment, 0)


@triton.jit
def request_at(i, real, batch):
    """First token, number of tokens and KV length of requests ``i``; zeros if not ``real``.

    ``i`` is a tensor of int32, ``batch`` a :class:`builders.splitkv.device.groups.Batch`.
    """
    begin = tl.load(batch.query_start_ptr + i, mask=real, other=0)
    count = tl.load(batch.query_start_ptr + 1 + i, mask=real, other=0) - begin
    # A length beyond the limit would spoil the scratch of other requests. The result of a request
    # with such a length is wrong anyway.
    kv_len = tl.minimum(tl.load(batch.seq_lens_ptr + i, mask=real, other=0), batch.max_kv_len)
    return begin, count, kv_len
