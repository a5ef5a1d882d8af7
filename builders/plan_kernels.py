"""The Triton kernel that plans a step's rows on the device. Imported lazily; a twin in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from builders.kernels import first_visible, local_len, segment_of, segment_start
from builders.split_plan import (
    ONE_WARP,
    ROW_FIELDS,
    SHARE_FIELDS,
    WASTE,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_SERIAL = tl.constexpr(4)
"""Rows of a request that its thread makes one after the other; of more, every row has a thread."""
_IN_A_WARP = tl.constexpr(ONE_WARP)
_WARP_STEPS = tl.constexpr(ONE_WARP.bit_length() - 1)
_MOST_TURNS = tl.constexpr(4)
"""Of a warp's threads, to requests of one row each that every warp has all of."""
_MOST_LINES = tl.constexpr(8)
"""Of groups, where requests take several turns: a thread has each turn as often as lines."""
_WASTE = tl.constexpr(WASTE)


@triton.jit
def _bundles_of(
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
def _row_of(
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
def _row_after(bundle, skipped, bundles, QUERY_TOKENS: tl.constexpr, BUNDLE: tl.constexpr):
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
    """See :func:`builders.split_host.shared_tiles`."""
    wave = num_groups * most
    few = total < wave
    # Of a row that parts are cut from, or of rows to a share: one division for both.
    times = tl.where(few, wave, total + wave - 1) // tl.where(few, tl.maximum(total, 1), wave)
    share = tl.where(few, tl.cdiv(most, times), times * most)
    shared = share * num_groups
    even = (least == most) & (shared - total <= total // _WASTE)
    return tl.where(even, shared, total)


@triton.jit
def _sharing(
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
def _first_group(place, shared, sharers):
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
def _first_place(c, shared, sharers):
    """The first tile of the share of group ``c``, ``c * shared / sharers`` rounded up."""
    whole = shared // sharers
    return c * whole + tl.cdiv(c * (shared - whole * sharers), sharers)


@triton.jit
def _segments_of(first_tile, tiles, SEGMENT_UNIT: tl.constexpr):
    """The first segment of rows, and their segments."""
    part = segment_of(first_tile * SEGMENT_UNIT)
    return part, segment_of((first_tile + tiles - 1) * SEGMENT_UNIT) + 1 - part


@triton.jit
def _store_row(
    rows_ptr, live, j, req, token, tokens, kv_len, first, first_tile, tiles, place, bundle, bundles,
    SEGMENT_UNIT: tl.constexpr,
):  # fmt: skip
    """Row ``j``, see :data:`builders.split_plan.ROW_FIELDS`."""
    part, parts = _segments_of(first_tile, tiles, SEGMENT_UNIT)
    _store_four(rows_ptr, j, _FIELDS, 0, live, req, token, tokens, kv_len)
    _store_four(rows_ptr, j, _FIELDS, 4, live, first, first_tile, tiles, place)
    _store_four(rows_ptr, j, _FIELDS, 8, live, part, parts, bundle, bundles)


@triton.jit
def _store_four(ptr, j, STRIDE: tl.constexpr, first: tl.constexpr, live, a, b, c, d):
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
def _store_two(ptr, j, live, a, b):
    """Two numbers of rows ``j``, which are no fewer than threads."""
    j = tl.reshape(j, [live.numel])
    places = (ptr + 2 * j)[:, None] + tl.arange(0, 2)[None, :]
    live = tl.reshape(live, [live.numel])
    tl.store(places, tl.reshape(tl.join(a, b), [live.numel, 2]), mask=live[:, None])


@triton.jit
def _load_four(ptr, j, STRIDE: tl.constexpr, first: tl.constexpr, mask):
    """Four numbers of each of the rows ``j``, which are no fewer than threads; 0 where masked."""
    places = (ptr + first + j * STRIDE)[:, None] + tl.arange(0, 4)[None, :]
    fields = tl.load(places, mask=mask[:, None], other=0)
    even, odd = tl.split(tl.reshape(fields, [j.numel, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _store_rows(
    rows_ptr, names_ptr, i, j, place, cost, most_rows, shared, sharers, req_rows, begin, count,
    kv_len, bundles, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    BUNDLE: tl.constexpr, HEAD_LOOPS: tl.constexpr,
):  # fmt: skip
    """Rows ``j`` on of every request ``i``, of which the first stands at ``place`` among the tiles;
    a row in which groups begin is named at the first of them. A row takes the place of ``cost``
    tiles more.
    """
    group = _first_group(place, shared, sharers)
    bundle, skipped = i * 0, i * 0
    for k in range(0, most_rows):
        live = k < req_rows
        token, tokens, first, first_tile, tiles = _row_of(
            live, bundle, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            BUNDLE,
        )  # fmt: skip
        _store_row(
            rows_ptr, live, j, i, token, tokens, kv_len, first, first_tile, tiles, place, bundle,
            bundles, SEGMENT_UNIT,
        )  # fmt: skip
        place += (tiles + cost) * HEAD_LOOPS
        after = _first_group(place, shared, sharers)
        tl.store(names_ptr + 2 * group, j, mask=live & (group < after))
        group = after
        bundle, skipped = _row_after(bundle, skipped, bundles, QUERY_TOKENS, BUNDLE)
        j += 1


@triton.jit
def _rows_at(
    j, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window, chunk, lookback,
    dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr,
    DCP: tl.constexpr, BUNDLE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Rows ``j``, each by a thread: request, KV length, bundles, and what :func:`_row_of` says."""
    live = j < num_rows
    # Requests whose rows end at or before it.
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
    bundles = _bundles_of(
        kv_len, dcp_size, dcp_rank, dcp_interleave, KV_TILE, SEGMENT_UNIT, DCP, BUNDLE
    )
    bundle = (j - before) % bundles
    skipped = (j - before) // bundles * QUERY_TOKENS
    token, tokens, first, first_tile, tiles = _row_of(
        live, bundle, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size, dcp_rank,
        dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
    )  # fmt: skip
    return live, req, kv_len, bundles, token, tokens, first, first_tile, tiles, bundle


@triton.jit
def _count_serially(
    tiles_of, least, most, most_rows, req_rows, begin, count, kv_len, bundles, window, chunk,
    lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr,
    KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    TRIM: tl.constexpr, DCP: tl.constexpr, BUNDLE: tl.constexpr,
):  # fmt: skip
    """Tiles of every request, and the fewest and the most of a row: of all requests at once, one
    row after the other, so that nothing of one is another thread's.
    """
    bundle, skipped = tiles_of * 0, tiles_of * 0
    for k in range(0, most_rows):
        live = k < req_rows
        _, _, _, _, tiles = _row_of(
            live, bundle, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            BUNDLE,
        )  # fmt: skip
        tiles_of += tiles
        least = tl.where(live, tl.minimum(least, tiles), least)
        most = tl.maximum(most, tiles)
        bundle, skipped = _row_after(bundle, skipped, bundles, QUERY_TOKENS, BUNDLE)
    return tiles_of, least, most


@triton.jit
def _count_by_row(
    tiles_of, least, most, i, req_ends, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr,
    max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    TRIM: tl.constexpr, DCP: tl.constexpr, BUNDLE: tl.constexpr, REQS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Tiles of the rows of each thread ``i``, and the fewest and the most of a row."""
    tl.store(row_ends_ptr + i, req_ends, mask=i < (1 << STEPS))
    # Other threads look requests up there.
    tl.debug_barrier()
    for block in range(0, num_rows, REQS):
        live, _, _, _, _, _, _, _, tiles, _ = _rows_at(
            block + i, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window,
            chunk, lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE,
            SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE, STEPS,
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
    BUNDLE: tl.constexpr, HEAD_LOOPS: tl.constexpr, REQS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """As :func:`_store_rows`, each row by a thread."""
    begun = 0
    for block in range(0, num_rows, REQS):
        j = block + i
        live, req, lens, of, token, tokens, first, first_tile, tiles, bundle = _rows_at(
            j, num_rows, seq_lens_ptr, query_start_ptr, row_ends_ptr, max_kv_len, window, chunk,
            lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT,
            WINDOW, CHUNK, TRIM, DCP, BUNDLE, STEPS,
        )  # fmt: skip
        taken = tl.where(live, (tiles + cost) * HEAD_LOOPS, 0)
        past = begun + tl.cumsum(taken, 0)
        place = past - taken
        _store_row(
            rows_ptr, live, j, req, token, tokens, lens, first, first_tile, tiles, place, bundle,
            of, SEGMENT_UNIT,
        )  # fmt: skip
        group = _first_group(place, shared, sharers)
        begins = group < _first_group(past, shared, sharers)
        tl.store(names_ptr + 2 * group, j, mask=live & begins)
        begun += tl.sum(taken, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


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
def _start_from(
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
def _store_groups(
    rows_ptr, names_ptr, starts_ptr, shares_ptr, c, shared, sharers, total, cost, num_groups,
    num_rows, SEGMENT_UNIT: tl.constexpr, HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Where every group ``c`` starts, and its share, see :data:`builders.split_plan.SHARE_FIELDS`.

    Where ``names`` has a row, that is the first group that begins within it; -1 elsewhere. The next
    group's start is computed once more in place of being another thread's.
    """
    named = tl.load(names_ptr + 2 * c, mask=c <= num_groups, other=-1)
    named_next = tl.load(names_ptr + 2 * c + 2, mask=c < num_groups, other=-1)
    held = tl.associative_scan(named, 0, _larger)
    real = c < num_groups
    _, first_tile, tiles, place = _load_four(
        rows_ptr, held, _FIELDS, 4, (c <= num_groups) & (held >= 0)
    )
    held_next = tl.maximum(held, named_next)
    _, first_tile_next, tiles_next, place_next = _load_four(
        rows_ptr, held_next, _FIELDS, 4, real & (held_next >= 0)
    )
    position = _first_place(c, shared, sharers)
    row, segment = _start_from(
        held, position, (c <= num_groups) & (position < total), place, first_tile, tiles, cost,
        num_rows, SEGMENT_UNIT, HEAD_LOOPS, FREE,
    )  # fmt: skip
    position = _first_place(c + 1, shared, sharers)
    next_row, next_segment = _start_from(
        held_next, position, real & (position < total), place_next, first_tile_next, tiles_next,
        cost, num_rows, SEGMENT_UNIT, HEAD_LOOPS, FREE,
    )  # fmt: skip
    _store_two(starts_ptr, c, c <= num_groups, row, segment)
    _store_four(shares_ptr, c, _SHARE_FIELDS, 0, real, row, segment, next_row, next_segment)
    real = real & (row < num_rows * HEAD_LOOPS)
    for part in tl.static_range(_FIELDS // 4):
        w, x, y, z = _load_four(rows_ptr, row // HEAD_LOOPS, _FIELDS, 4 * part, real)
        _store_four(shares_ptr, c, _SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)


@triton.jit
def _of_row(rows, field: tl.constexpr, turn, lane, TURNS: tl.constexpr):
    """A field of the rows of the turns and lanes given."""
    found = tl.gather(rows[0][field], lane, 1)
    for k in tl.static_range(1, TURNS):
        found = tl.where(turn == k, tl.gather(rows[k][field], lane, 1), found)
    return found


@triton.jit
def _four_of_row(rows, first: tl.constexpr, turn, lane, TURNS: tl.constexpr):
    return (
        _of_row(rows, first, turn, lane, TURNS), _of_row(rows, first + 1, turn, lane, TURNS),
        _of_row(rows, first + 2, turn, lane, TURNS), _of_row(rows, first + 3, turn, lane, TURNS),
    )  # fmt: skip


@triton.jit
def _row_of_lane(
    j, num_rows, num_reqs, most_rows, req_rows, requests, window, chunk, lookback, dcp_size,
    dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr,
    DCP: tl.constexpr, BUNDLE: tl.constexpr, TURNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Row ``j`` of each thread of a turn, in the order of ROW_FIELDS, but for what is not known
    yet. Of several turns each request has one.
    """
    begin, count, kv_len, bundles = requests
    req, bundle, skipped = j, j * 0, j * 0
    if TURNS == 1:
        if (most_rows > 1) | (num_rows != num_reqs):
            # Requests whose rows end at or before it.
            req = j * 0
            req_ends = tl.cumsum(req_rows, 1)
            for step in tl.static_range(STEPS):
                half = (1 << STEPS) >> (step + 1)
                req += tl.where(tl.gather(req_ends, req + half - 1, 1) <= j, half, 0)
            later = j - tl.gather(req_ends - req_rows, req, 1)
            begin, count = tl.gather(begin, req, 1), tl.gather(count, req, 1)
            kv_len, bundles = tl.gather(kv_len, req, 1), tl.gather(bundles, req, 1)
            turn = later
            if BUNDLE:
                # Of numbers up to a warp's threads the quotient is right in fp32.
                turn = ((later.to(tl.float32) + 0.5) / bundles.to(tl.float32)).to(tl.int32)
                bundle = later - turn * bundles
            skipped = turn * QUERY_TOKENS
    token, tokens, first, first_tile, tiles = _row_of(
        j < num_rows, bundle, skipped, begin, count, kv_len, window, chunk, lookback, dcp_size,
        dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
        BUNDLE,
    )  # fmt: skip
    return req, token, tokens, kv_len, first, first_tile, tiles, bundle, bundles


@triton.jit
def _store_turns(
    rows_ptr, rows, num_rows, cost, lanes, line, SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Store the rows of all turns, each by a warp of its own; and their fields, their ends among
    the tiles, and the ends of turns.
    """
    placed = ()
    begun = line * 0
    for k in tl.static_range(TURNS):
        j = k * _IN_A_WARP + lanes
        live = j < num_rows
        req, token, tokens, kv_len, first, first_tile, tiles, bundle, bundles = rows[k]
        taken = tl.where(live, (tiles + cost) * HEAD_LOOPS, 0)
        ends = begun + tl.cumsum(taken, 1)
        begun += tl.sum(taken, 1, keep_dims=True)
        place = ends - taken
        tiles = tl.maximum(tiles, 1)
        part, parts = _segments_of(first_tile, tiles, SEGMENT_UNIT)
        mine = live & (line == k)
        _store_four(rows_ptr, j, _FIELDS, 0, mine, req, token, tokens, kv_len)
        _store_four(rows_ptr, j, _FIELDS, 4, mine, first, first_tile, tiles, place)
        _store_four(rows_ptr, j, _FIELDS, 8, mine, part, parts, bundle, bundles)
        stored = (
            req, token, tokens, kv_len, first, first_tile, tiles, place, part, parts, bundle,
            bundles, ends, begun,
        )  # fmt: skip
        placed += (stored,)  # type: ignore[assignment]
    return placed


@triton.jit
def _plan_few(
    rows_ptr, total_ptr, starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, num_reqs, num_rows,
    most_rows, req_rows, reqs, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
    dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    BUNDLE: tl.constexpr, HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr, LEAST: tl.constexpr,
    ROW_COST: tl.constexpr, NUM_GROUPS: tl.constexpr, LINES: tl.constexpr, TURNS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The plan of few rows: every warp has them all, one of each turn to a thread, and nothing is
    read that another thread has stored. Of one turn, no more requests and rows than a warp has
    threads; of more, requests of one row each.

    Tensors have a line for each warp, so that all along a line is an exchange within it. ``reqs``:
    of each turn first tokens, numbers of tokens, lengths, and bundles.
    """
    lane = tl.arange(0, _IN_A_WARP)[None, :]
    line = tl.arange(0, LINES)[:, None]
    lanes = line * 0 + lane
    rows = ()
    total, fewest, largest = line * 0, line * 0 + max_kv_len + 1, line * 0 + 1
    for k in tl.static_range(TURNS):
        j = k * _IN_A_WARP + lanes
        row = _row_of_lane(
            j, num_rows, num_reqs, most_rows, req_rows, reqs[k], window, chunk, lookback, dcp_size,
            dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP,
            BUNDLE, TURNS, STEPS,
        )  # fmt: skip
        rows += (row,)  # type: ignore[assignment]
        total += tl.sum(row[6], 1, keep_dims=True)
        least = tl.min(tl.where(j < num_rows, row[6], max_kv_len + 1), 1, keep_dims=True)
        fewest = tl.minimum(fewest, least)
        largest = tl.maximum(largest, tl.max(row[6], 1, keep_dims=True))
    cost, total, sharers, shared = _sharing(
        total, fewest, largest, num_rows, HEAD_LOOPS, FREE, LEAST, ROW_COST, NUM_GROUPS
    )
    once = (line == 0) & (lane < 2)
    tl.store(total_ptr + lanes, tl.where(lane == 0, num_rows, shared), mask=once)
    placed = _store_turns(
        rows_ptr, rows, num_rows, cost, lanes, line, SEGMENT_UNIT, HEAD_LOOPS, TURNS
    )
    _share_turns(
        starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, placed, lane, line, num_rows, cost,
        total, sharers, shared, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
        dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
        HEAD_LOOPS, FREE, NUM_GROUPS, LINES, TURNS,
    )  # fmt: skip


@triton.jit
def _share_turns(
    starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, placed, lane, line, num_rows, cost,
    total, sharers, shared, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    BUNDLE: tl.constexpr, HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    LINES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Where every group starts, and its share, of rows that every warp has.

    The last thread of a warp computes what is the next warp's, for the group before it.
    """
    LANES: tl.constexpr = _IN_A_WARP
    c = line * (LANES - 1) + lane
    own = lane < LANES - 1
    position = _first_place(c, shared, sharers)
    of = c * 0
    for k in tl.static_range(TURNS - 1):
        of += (placed[k][_FIELDS + 1] <= position).to(tl.int32)
    at = c * 0
    for step in tl.static_range(_WARP_STEPS):
        half = LANES >> (step + 1)
        ends = _of_row(placed, _FIELDS, of, at + half - 1, TURNS)
        at += tl.where(ends <= position, half, 0)
    _, first_tile, tiles, place = _four_of_row(placed, 4, of, at, TURNS)
    start, segment = _start_from(
        of * LANES + at, position, (c <= NUM_GROUPS) & (position < total), place, first_tile, tiles,
        cost, num_rows, SEGMENT_UNIT, HEAD_LOOPS, FREE,
    )  # fmt: skip
    _store_two(starts_ptr, c, own & (c <= NUM_GROUPS), start, segment)
    following = tl.minimum(line * 0 + lane + 1, LANES - 1)
    stop, stop_segment = tl.gather(start, following, 1), tl.gather(segment, following, 1)
    real = own & (c < NUM_GROUPS)
    _store_four(shares_ptr, c, _SHARE_FIELDS, 0, real, start, segment, stop, stop_segment)
    real = real & (start < num_rows * HEAD_LOOPS)
    if not FREE:
        row = tl.minimum(start // HEAD_LOOPS, TURNS * LANES - 1)
        of, at = row // LANES, row % LANES
    if TURNS == 1:
        for part in tl.static_range(_FIELDS // 4):
            w, x, y, z = _four_of_row(placed, 4 * part, of, at, TURNS)
            _store_four(shares_ptr, c, _SHARE_FIELDS, 4 * part + 4, real, w, x, y, z)
    else:
        # Of so many turns each field is as many exchanges, for which all warps stand in one line.
        # Of one dimension the compiler has no choice of which to load along.
        place = tl.reshape(_of_row(placed, 7, of, at, TURNS), [LINES * LANES])
        req = tl.reshape(of * LANES + at, [LINES * LANES])
        c, real = tl.reshape(c, [LINES * LANES]), tl.reshape(real, [LINES * LANES])
        begin, count, kv_len = _request_at(req, real, seq_lens_ptr, query_start_ptr, max_kv_len)
        token, tokens, first, first_tile, tiles = _row_of(
            real, c * 0, c * 0, begin, count, kv_len, window, chunk, lookback, dcp_size, dcp_rank,
            dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
        )  # fmt: skip
        tiles = tl.maximum(tiles, 1)
        part, parts = _segments_of(first_tile, tiles, SEGMENT_UNIT)
        _store_four(shares_ptr, c, _SHARE_FIELDS, 4, real, req, token, tokens, kv_len)
        _store_four(shares_ptr, c, _SHARE_FIELDS, 8, real, first, first_tile, tiles, place)
        _store_four(shares_ptr, c, _SHARE_FIELDS, 12, real, part, parts, c * 0, c * 0 + 1)


@triton.jit
def _request_at(i, real, seq_lens_ptr, query_start_ptr, max_kv_len):
    """First token, tokens and length of requests ``i``."""
    begin = tl.load(query_start_ptr + i, mask=real, other=0)
    count = tl.load(query_start_ptr + 1 + i, mask=real, other=0) - begin
    # A length beyond the limit would spoil other rows' scratch; its own row is lost anyway.
    return begin, count, tl.minimum(tl.load(seq_lens_ptr + i, mask=real, other=0), max_kv_len)


@triton.jit
def _requests_by_warp(
    seq_lens_ptr, query_start_ptr, num_reqs, max_kv_len, LINES: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """Requests of one row each as :func:`_plan_few` takes them: each warp loads them all."""
    line = tl.arange(0, LINES)[:, None] * 0
    lanes = line + tl.arange(0, _IN_A_WARP)[None, :]
    reqs = ()
    for k in tl.static_range(TURNS):
        i = k * _IN_A_WARP + lanes
        begin, count, kv_len = _request_at(
            i, i < num_reqs, seq_lens_ptr, query_start_ptr, max_kv_len
        )
        reqs += ((begin, count, kv_len, i * 0 + 1),)  # type: ignore[assignment]
    return reqs


@triton.jit
def _plan_many(
    rows_ptr, total_ptr, starts_ptr, shares_ptr, row_ends_ptr, names_ptr, seq_lens_ptr,
    query_start_ptr, num_rows, most_rows, req_ends, req_rows, begin, count, kv_len, bundles,
    max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
    QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr, DCP: tl.constexpr,
    BUNDLE: tl.constexpr, HEAD_LOOPS: tl.constexpr, FREE: tl.constexpr, LEAST: tl.constexpr,
    ROW_COST: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, REQS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The plan of any number of rows: each is named at the first group that begins within it, then
    the groups by those names.
    """
    i, c = tl.arange(0, REQS), tl.arange(0, GROUPS)
    tl.store(names_ptr + 2 * c, -1, mask=c <= NUM_GROUPS)
    is_serial = most_rows <= _SERIAL
    req_tiles = tl.zeros([REQS], tl.int32)
    least = tl.zeros([REQS], tl.int32) + max_kv_len + 1
    most = tl.zeros([REQS], tl.int32) + 1
    if is_serial:
        req_tiles, least, most = _count_serially(
            req_tiles, least, most, most_rows, req_rows, begin, count, kv_len, bundles, window,
            chunk, lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE,
            SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
        )  # fmt: skip
    else:
        req_tiles, least, most = _count_by_row(
            req_tiles, least, most, i, req_ends, num_rows, seq_lens_ptr, query_start_ptr,
            row_ends_ptr, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
            QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE, REQS, STEPS,
        )  # fmt: skip
    total, fewest, largest = tl.reduce((req_tiles, least, most), 0, _totalled)
    # Summed before the cost of a row is known, which is found meanwhile.
    tiles_before = tl.cumsum(req_tiles, 0) - req_tiles
    cost, total, sharers, shared = _sharing(
        total, fewest, largest, num_rows, HEAD_LOOPS, FREE, LEAST, ROW_COST, NUM_GROUPS
    )
    tl.store(total_ptr, num_rows)
    tl.store(total_ptr + 1, shared)
    place = (tiles_before + cost * (req_ends - req_rows)) * HEAD_LOOPS
    # Nobody is named before all names are gone.
    tl.debug_barrier()
    if is_serial:
        _store_rows(
            rows_ptr, names_ptr, i, req_ends - req_rows, place, cost, most_rows, shared, sharers,
            req_rows, begin, count, kv_len, bundles, window, chunk, lookback, dcp_size, dcp_rank,
            dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
            HEAD_LOOPS,
        )  # fmt: skip
    else:
        _store_by_row(
            rows_ptr, names_ptr, i, num_rows, cost, shared, sharers, seq_lens_ptr, query_start_ptr,
            row_ends_ptr, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave,
            QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE, HEAD_LOOPS, REQS,
            STEPS,
        )  # fmt: skip
    # Rows and their names are other threads' stores.
    tl.debug_barrier()
    _store_groups(
        rows_ptr, names_ptr, starts_ptr, shares_ptr, c, shared, sharers, total, cost, NUM_GROUPS,
        num_rows, SEGMENT_UNIT, HEAD_LOOPS, FREE,
    )  # fmt: skip


@triton.jit
def _store_tiles(starts_ptr, i, tile_ends, num_tiles, max_reqs, MOST_REQS: tl.constexpr):
    """First tile of each request ``i``, of those with long queries; their ends, and the last."""
    tl.store(starts_ptr + i, 0, mask=i == 0)
    tl.store(starts_ptr + 1 + i, tile_ends, mask=i < max_reqs)
    if i.shape[0] < MOST_REQS:
        # Past the last request too: a graph was captured with more of them, perhaps.
        every = tl.arange(0, MOST_REQS)
        beyond = (every >= i.shape[0]) & (every < max_reqs)
        tl.store(starts_ptr + 1 + every, every * 0 + num_tiles, mask=beyond)


@triton.jit
def _three_added(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _counted(a, b, c, d, e, f, g, h):
    return a + e, tl.maximum(b, f), c + g, d + h


@triton.jit
def _tiles_of_long(count, decode_max, TILE: tl.constexpr, OTHER_TILE: tl.constexpr):
    """Tiles of each request with more than ``decode_max`` query tokens, of either kind."""
    tiles = tl.where(count > decode_max, tl.cdiv(count, TILE), 0)
    others = tiles
    if OTHER_TILE > 0:
        others = tl.where(count > decode_max, tl.cdiv(count, OTHER_TILE), 0)
    return tiles, others


@triton.jit
def _sums_of_requests(rows, tiles, others, IN_A_WARP: tl.constexpr):
    """The sum and the most of rows, and the sums of tiles: each within a warp, or all by one
    exchange between warps.
    """
    if IN_A_WARP:
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
def _totalled(a, b, c, d, e, f):
    return a + d, tl.minimum(b, e), tl.maximum(c, f)


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
    BUNDLE: tl.constexpr,
    MOST_REQS: tl.constexpr,
    REQS: tl.constexpr,
    STEPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    LINES: tl.constexpr,
    FREE: tl.constexpr,
    LEAST: tl.constexpr,
    ROW_COST: tl.constexpr,
    WAITS: tl.constexpr,
):
    """The step's plan, by one program: rows, their tiles, and where each group of programs starts.

    seq_lens ``[R]``; query_start ``[R + 1]``; rows ``[rows, ROW_FIELDS]``; total ``[2]``: rows, and
    tiles that the groups share; starts ``[NUM_GROUPS + 1, 2]``: row * HEAD_LOOPS + head loop, and
    segment of the row; shares ``[NUM_GROUPS, SHARE_FIELDS]``; prefill_starts ``[max_reqs + 1]``:
    first prefill tile of each request; hopper_starts likewise, unless HOPPER_TILE is 0; row_ends
    ``[2 ** STEPS]`` and names ``[NUM_GROUPS + 1, 2]``: scratch, the latter strided as starts are,
    so that a group stays with one thread. All are int32. Requests are no more than two to the
    STEPS. REQS, GROUPS and LINES are powers of two: REQS is 32, or no fewer than the program's
    threads, GROUPS no fewer than these and than NUM_GROUPS + 1, of which 31 make a line; there are
    no fewer LINES than warps.

    TRIM: no query sees past itself. DCP: keys are those of one rank, in their order there; lengths
    and positions of rows are the request's. BUNDLE: segments of a bundle, 0 where rows are of all
    keys. With FREE a group starts at its share's first tile, and starts hold tiles of rows; a share
    has LEAST of them at least, and the beginning of a row counts as ROW_COST tiles. WAITS: this
    kernel may have been started ahead. The next is not started so by it: it would read no earlier,
    on other multiprocessors than without a plan before it, and where eight heads are read side by
    side took 8 us of 1430 more.
    """
    if WAITS:
        gdc_wait()
    i = tl.arange(0, REQS)
    begin, count, kv_len = _request_at(i, i < num_reqs, seq_lens_ptr, query_start_ptr, max_kv_len)
    TURNS: tl.constexpr = (1 << STEPS) // _IN_A_WARP
    TAKES_TURNS: tl.constexpr = (
        REQS > _IN_A_WARP and TURNS > 1 and TURNS <= _MOST_TURNS and LINES <= _MOST_LINES
    )
    if TAKES_TURNS:
        # On the way meanwhile.
        reqs = _requests_by_warp(seq_lens_ptr, query_start_ptr, num_reqs, max_kv_len, LINES, TURNS)
    bundles = _bundles_of(
        kv_len, dcp_size, dcp_rank, dcp_interleave, KV_TILE, SEGMENT_UNIT, DCP, BUNDLE
    )
    is_decode = (count > 0) & (count <= decode_max)
    req_rows = tl.where(is_decode, tl.cdiv(count, QUERY_TOKENS) * bundles, 0)
    tiles, others = _tiles_of_long(count, decode_max, PREFILL_TILE, HOPPER_TILE)
    num_rows, most_rows, num_tiles, num_others = _sums_of_requests(
        req_rows, tiles, others, REQS <= _IN_A_WARP
    )
    if TAKES_TURNS and (most_rows <= 1) & (num_rows == num_reqs):
        _plan_few(
            rows_ptr, total_ptr, starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, num_reqs,
            num_rows, most_rows, 0, reqs, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
            dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
            HEAD_LOOPS, FREE, LEAST, ROW_COST, NUM_GROUPS, LINES, TURNS, STEPS,
        )  # fmt: skip
        # None of them has a long query.
        tile_ends, other_ends = tiles, others
    elif REQS <= _IN_A_WARP and num_rows <= _IN_A_WARP:
        line = tl.arange(0, LINES)[:, None] * 0
        every = (
            begin[None, :] + line, count[None, :] + line, kv_len[None, :] + line,
            bundles[None, :] + line,
        )  # fmt: skip
        _plan_few(
            rows_ptr, total_ptr, starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, num_reqs,
            num_rows, most_rows, req_rows[None, :] + line, (every,), max_kv_len, window, chunk,
            lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT,
            WINDOW, CHUNK, TRIM, DCP, BUNDLE, HEAD_LOOPS, FREE, LEAST, ROW_COST, NUM_GROUPS, LINES,
            1, STEPS,
        )  # fmt: skip
        tile_ends, other_ends = tiles, others
        if num_tiles > 0:
            tile_ends, other_ends = tl.cumsum(tiles, 0), tl.cumsum(others, 0)
    else:
        req_ends, tile_ends, other_ends = tl.associative_scan(
            (req_rows, tiles, others), 0, _three_added
        )
        _plan_many(
            rows_ptr, total_ptr, starts_ptr, shares_ptr, row_ends_ptr, names_ptr, seq_lens_ptr,
            query_start_ptr, num_rows, most_rows, req_ends, req_rows, begin, count, kv_len, bundles,
            max_kv_len, window, chunk, lookback, dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS,
            KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE, HEAD_LOOPS, FREE, LEAST,
            ROW_COST, NUM_GROUPS, GROUPS, REQS, STEPS,
        )  # fmt: skip
    # Nothing here waits for these.
    _store_tiles(prefill_starts_ptr, i, tile_ends, num_tiles, max_reqs, MOST_REQS)
    if HOPPER_TILE > 0:
        _store_tiles(hopper_starts_ptr, i, other_ends, num_others, max_reqs, MOST_REQS)
