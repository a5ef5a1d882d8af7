"""Rows of a step's plan, on the device: which keys a row is of, how rows are shared among groups of
programs, and how both are stored. What :mod:`builders.splitkv.device.in_one_warp` and
:mod:`builders.splitkv.device.across_warps` have in common.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv import record as split_plan
from builders.splitkv.device.segments import first_visible, local_len, segment_of, segment_start

FIELDS = tl.constexpr(split_plan.ROW_FIELDS)
SHARE_FIELDS = tl.constexpr(split_plan.SHARE_FIELDS)
_WASTE = tl.constexpr(split_plan.WASTE)
_MOST_SHARED = tl.constexpr(split_plan.MOST_SHARED)


@triton.jit
def bundles_of(
    keys, dcp_size, dcp_rank, dcp_interleave, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    DCP: tl.constexpr, BUNDLE: tl.constexpr,
):  # fmt: skip
    """Bundles that requests of so many keys are cut into."""
    bundles = keys * 0 + 1
    if BUNDLE:
        if DCP:
            keys = local_len(keys, dcp_size, dcp_rank, dcp_interleave)
        last_tile = tl.maximum(tl.cdiv(keys, KV_TILE) - 1, 0)
        bundles = segment_of(last_tile * SEGMENT_UNIT) // BUNDLE + 1
    return bundles


@triton.jit
def row_of(
    live, bundle, skipped, begins, counts, kv_lens, window, chunk, lookback, dcp_size, dcp_rank,
    dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    BUNDLE: tl.constexpr,
):  # fmt: skip
    """A row of every request, of the tokens that follow the ``skipped`` and a ``bundle`` of keys:
    first token, tokens, first position, first KV tile, KV tiles; none where it is not ``live``.
    """
    first = tl.maximum(kv_lens - counts, 0) + skipped
    tokens = tl.minimum(counts - skipped, QUERY_TOKENS)
    last = first + tokens - 1
    start = first_visible(
        first, last, window, chunk, lookback, None, 0, WINDOW, CHUNK, False, False
    )
    first_tile = start // KV_TILE
    stop = kv_lens
    if TRIM:
        stop = tl.minimum(kv_lens, last + 1)
    if DCP:
        stop = local_len(stop, dcp_size, dcp_rank, dcp_interleave)
    stop_tile = tl.cdiv(stop, KV_TILE)
    if BUNDLE:
        first_tile = segment_start(bundle * BUNDLE) // SEGMENT_UNIT
        past = segment_start((bundle + 1) * BUNDLE) // SEGMENT_UNIT
        stop_tile = tl.minimum(stop_tile, past)
    # A row without keys costs one tile, so that somebody writes its zeros.
    tiles = tl.where(live, tl.maximum(stop_tile - first_tile, 1), 0)
    return begins + skipped, tokens, first, first_tile, tiles


@triton.jit
def row_after(bundle, skipped, bundles, QUERY_TOKENS: tl.constexpr, BUNDLE: tl.constexpr):
    """Bundle and skipped tokens of the row that follows: all bundles of the same tokens first."""
    if BUNDLE:
        bundle += 1
        is_last = bundle == bundles
        bundle = tl.where(is_last, 0, bundle)
        skipped += tl.where(is_last, QUERY_TOKENS, 0)
    else:
        skipped += QUERY_TOKENS
    return bundle, skipped


@triton.jit
def _shared_tiles(total, least, most, num_groups):
    """See :func:`builders.splitkv.host_twin.shared_tiles`."""
    length = most
    most = tl.minimum(length, (length * 0 + _MOST_SHARED) // num_groups)
    wave = num_groups * most
    few = total < wave
    # Of a row that parts are cut from, or of rows to a share: one division for both.
    times = tl.where(few, wave, total - 1) // tl.where(few, tl.maximum(total, 1), wave)
    times += tl.where(few, 0, 1)
    share = tl.where(few, tl.cdiv(most, times), times * most)
    shared = share * num_groups
    even = (least == length) & (length == most) & (total <= _MOST_SHARED)
    even = even & (shared - total <= total // _WASTE)
    return tl.where(even, shared, total)


@triton.jit
def sharing(
    total, fewest, largest, num_rows, HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr,
    LEAST: tl.constexpr, ROW_COST: tl.constexpr, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """From the tiles of all rows, the fewest and the most of one: tiles that the beginning of a row
    counts as, all tiles of all head loops, groups that share them, and the tiles that are shared.

    Group c owns the segments that start in ``[c * shared / sharers, (c + 1) * shared / sharers)``.
    """
    cost = 0
    if ROW_COST > 0:
        # Rows of one length are cut into equal parts, which begin alike.
        cost = tl.where(fewest == largest, 0, ROW_COST)
    total = (total + cost * num_rows) * HEAD_LOOPS
    sharers = NUM_GROUPS
    if FREE:
        # A group without a tile would be waited for in vain.
        sharers = tl.maximum(tl.minimum(NUM_GROUPS, total // LEAST), 1)
    return cost, total, sharers, _shared_tiles(total, fewest, largest, sharers)


@triton.jit
def first_group(place, shared, sharers):
    """The first group whose share begins at that place among the tiles, or behind it."""
    # The product takes 64 bits, whose division is slow: it is guessed to within one, since there
    # are fewer groups than fp32 has whole numbers.
    before = tl.maximum(place - 1, 0)
    product = before.to(tl.int64) * sharers
    shared = tl.maximum(shared, 1)
    group = (before.to(tl.float32) * (sharers / shared.to(tl.float32))).to(tl.int32)
    group -= (group.to(tl.int64) * shared > product).to(tl.int32)
    group += ((group + 1).to(tl.int64) * shared <= product).to(tl.int32)
    return tl.where(place > 0, group + 1, 0)


@triton.jit
def first_place(c, shared, sharers):
    """The first tile of the share of group ``c``, ``c * shared / sharers`` rounded up."""
    whole = shared // sharers
    return c * whole + tl.cdiv(c * (shared - whole * sharers), sharers)


@triton.jit
def segments_of(first_tile, tiles, SEGMENT_UNIT: tl.constexpr):
    """The first segment of rows, and their segments."""
    part = segment_of(first_tile * SEGMENT_UNIT)
    return part, segment_of((first_tile + tiles - 1) * SEGMENT_UNIT) + 1 - part


@triton.jit
def store_row(
    rows_ptr, live, j, req, token, tokens, kv_len, first, first_tile, tiles, place, bundle, bundles,
    SEGMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """Row ``j``, see :data:`builders.splitkv.record.ROW_FIELDS`."""
    part, parts = segments_of(first_tile, tiles, SEGMENT_UNIT)
    store_four(rows_ptr, j, FIELDS, 0, live, req, token, tokens, kv_len)
    store_four(rows_ptr, j, FIELDS, 4, live, first, first_tile, tiles, place)
    store_four(rows_ptr, j, FIELDS, 8, live, part, parts, bundle, bundles)


@triton.jit
def store_four(ptr, j, STRIDE: tl.constexpr, first: tl.constexpr, live, a, b, c, d):
    """Four numbers of rows ``j``, of many at once: apart, each is a store to as many lines as there
    are rows. Few rows would be exchanged between warps for that.
    """
    if live.numel > 64:
        # Where a row is, the compiler sees behind this only.
        j = tl.reshape(j, [live.numel])
        live = tl.reshape(live, [live.numel])
        # Of the two inner dimensions the last changes first.
        fields = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [live.numel, 4])
        places = (ptr + first + j * STRIDE)[:, None] + tl.arange(0, 4)[None, :]
        tl.store(places, fields, mask=live[:, None])
    else:
        places = ptr + first + j * STRIDE
        tl.store(places, a, mask=live)
        tl.store(places + 1, b, mask=live)
        tl.store(places + 2, c, mask=live)
        tl.store(places + 3, d, mask=live)


@triton.jit
def store_two(ptr, j, live, a, b):
    """Two numbers of rows ``j``, which are no fewer than threads."""
    j = tl.reshape(j, [live.numel])
    places = (ptr + 2 * j)[:, None] + tl.arange(0, 2)[None, :]
    live = tl.reshape(live, [live.numel])
    tl.store(places, tl.reshape(tl.join(a, b), [live.numel, 2]), mask=live[:, None])


@triton.jit
def load_four(ptr, j, STRIDE: tl.constexpr, first: tl.constexpr, mask):
    """Four numbers of each of the rows ``j``, which are no fewer than threads; 0 where masked."""
    places = (ptr + first + j * STRIDE)[:, None] + tl.arange(0, 4)[None, :]
    fields = tl.load(places, mask=mask[:, None], other=0)
    even, odd = tl.split(tl.reshape(fields, [j.numel, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _start_in_row(
    offset, first_tile, tiles, cost, SEGMENT_UNIT: tl.constexpr, HEAD_LOOPS: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    """Of places among a row's tiles: the head loop and the segment of the first segment at or after
    each; and whether that is past the loop's last, where the next loop or row begins.
    """
    loop = offset * 0
    if HEAD_LOOPS > 1:
        loop = offset // (tiles + cost)
    within = offset - loop * (tiles + cost)
    # Never, of tiles.
    past = within < 0
    if FREE:
        segment = tl.maximum(within - cost, 0)
    else:
        tile = first_tile + within
        at = segment_of(tile * SEGMENT_UNIT)
        # Inside a segment the next one is meant; past the row's last, the next row.
        inside = tl.maximum(segment_start(at) // SEGMENT_UNIT, first_tile) < tile
        at = at + inside.to(tl.int32)
        past = at > segment_of((first_tile + tiles - 1) * SEGMENT_UNIT)
        segment = tl.where(past, 0, at - segment_of(first_tile * SEGMENT_UNIT))
    return loop, segment, past


@triton.jit
def start_from(
    row, position, real, place, first_tile, tiles, cost, num_rows, SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Row (times head loops) and segment of the first segment at or after a group's position, which
    is within ``row``.
    """
    tiles = tl.maximum(tiles, 1)
    loop, segment, past = _start_in_row(
        position - place, first_tile, tiles, cost, SEGMENT_UNIT, HEAD_LOOPS, FREE
    )
    row = row * HEAD_LOOPS + loop + past.to(tl.int32)
    return tl.where(real, row, num_rows * HEAD_LOOPS), tl.where(real, segment, 0)


@triton.jit
def request_at(i, real, seq_lens_ptr, query_start_ptr, max_kv_len):
    """First token, tokens and length of requests ``i``."""
    begin = tl.load(query_start_ptr + i, mask=real, other=0)
    count = tl.load(query_start_ptr + 1 + i, mask=real, other=0) - begin
    # A length beyond the limit would spoil other rows' scratch; its own row is lost anyway.
    return begin, count, tl.minimum(tl.load(seq_lens_ptr + i, mask=real, other=0), max_kv_len)
