"""Triton kernels that write a step's metadata on the device. Imported lazily; twins in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from builders import segments
from builders.split_kv import ROW_FIELDS, SHARE_FIELDS, WASTE

_SEGMENT = tl.constexpr(segments.SEGMENT)
_LIMIT = tl.constexpr(segments.LIMIT)
_PER_OCTAVE = tl.constexpr(segments.PER_OCTAVE)
_BUNDLE = tl.constexpr(segments.BUNDLE)
_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_WASTE = tl.constexpr(WASTE)


@triton.jit
def segment_of(position):
    """See :func:`builders.segments.segment_of`; scalars or tensors of int32."""
    # floor(log2) of the number of whole limits, exact in fp32: its exponent.
    limits = (position // _LIMIT).to(tl.float32)
    octave = tl.maximum((limits.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    far = _LIMIT // _SEGMENT + _PER_OCTAVE * octave
    far += (position - (_LIMIT << octave)) // ((2 * _SEGMENT) << octave)
    return tl.where(position < _LIMIT, position // _SEGMENT, far)


@triton.jit
def segment_start(segment):
    """See :func:`builders.segments.segment_start`."""
    beyond = tl.maximum(segment - _LIMIT // _SEGMENT, 0)
    octave = beyond // _PER_OCTAVE
    far = (_LIMIT << octave) + (beyond % _PER_OCTAVE) * ((2 * _SEGMENT) << octave)
    return tl.where(segment <= _LIMIT // _SEGMENT, segment * _SEGMENT, far)


@triton.jit
def local_len(length, dcp_size, dcp_rank, dcp_interleave):
    """See :meth:`builders.paging.Stripe.local_len`; scalars or tensors of int32."""
    turn = dcp_interleave * dcp_size
    rest = length % turn - dcp_rank * dcp_interleave
    return length // turn * dcp_interleave + tl.minimum(tl.maximum(rest, 0), dcp_interleave)


@triton.jit
def local_position(position, dcp_size, dcp_rank, dcp_interleave):
    """The last of a rank's keys that a query at ``position`` may see, counted on that rank; -1 when
    there is none. Causality between queries and the rank's keys is as between these numbers.
    """
    return local_len(position + 1, dcp_size, dcp_rank, dcp_interleave) - 1


@triton.jit
def first_visible(
    first,
    last,
    window,
    chunk,
    lookback,
    ranges_ptr,
    num_ranges,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RANGES: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """First key position that a query in ``[first, last]`` may see, ranges included."""
    start = first * 0
    if CHUNK:
        start = (first // chunk - lookback) * chunk
    elif WINDOW:
        start = first - window + 1
    start = tl.maximum(start, 0)
    if RANGES:
        for i in range(num_ranges):
            low = tl.load(ranges_ptr + 2 * i)
            high = tl.load(ranges_ptr + 2 * i + 1)
            meets = (low < high) & (low <= last) & (high >= first)
            if CLAMP:
                # Keys before the window may be gone.
                low = tl.maximum(low, first - window + 1)
            start = tl.where(meets, tl.minimum(start, low), start)
    return start


@triton.jit
def _first_above(ends, x, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Smallest i with ``ends[i] > x``, or the last; ends ``[SIZE]`` never fall.

    All in registers: gathers go through shared memory, which global loads would not.
    """
    low = x * 0
    for step in tl.static_range(STEPS):
        below = tl.gather(ends, low + ((SIZE >> (step + 1)) - 1), 0) <= x
        low = tl.where(below, low + (SIZE >> (step + 1)), low)
    return low


@triton.jit
def _bundles_of(
    keys, dcp_size, dcp_rank, dcp_interleave, KV_TILE: tl.constexpr, SEGMENT_UNIT: tl.constexpr,
    DCP: tl.constexpr, BUNDLED: tl.constexpr,
):  # fmt: skip
    """Bundles that requests of so many keys are cut into."""
    bundles = keys * 0 + 1
    if BUNDLED:
        if DCP:
            keys = local_len(keys, dcp_size, dcp_rank, dcp_interleave)
        last_tile = tl.maximum(tl.cdiv(keys, KV_TILE) - 1, 0)
        bundles = segment_of(last_tile * SEGMENT_UNIT) // _BUNDLE + 1
    return bundles


@triton.jit
def _rows_at(
    j, num_rows, req_ends, req_rows, begins, counts, kv_lens, req_bundles, window, chunk, lookback,
    dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TRIM: tl.constexpr,
    DCP: tl.constexpr, BUNDLED: tl.constexpr, REQS: tl.constexpr, REQ_STEPS: tl.constexpr,
):  # fmt: skip
    """Rows ``j``: request, first token, tokens, KV length, first position, first KV tile, KV tiles,
    bundle, bundles.

    A few query tokens and one bundle of keys of one request each; no tiles past the last row.
    """
    req = _first_above(req_ends, j, REQS, REQ_STEPS)
    place = j - tl.gather(req_ends - req_rows, req, 0)
    bundles = tl.maximum(tl.gather(req_bundles, req, 0), 1)
    bundle = place % bundles
    skipped = place // bundles * QUERY_TOKENS
    begin = tl.gather(begins, req, 0)
    count = tl.gather(counts, req, 0)
    kv_len = tl.gather(kv_lens, req, 0)
    first = tl.maximum(kv_len - count, 0) + skipped
    tokens = tl.minimum(count - skipped, QUERY_TOKENS)
    last = first + tokens - 1
    start = first_visible(
        first, last, window, chunk, lookback, None, 0, WINDOW, CHUNK, False, False
    )
    first_tile = start // KV_TILE
    stop = kv_len
    if TRIM:
        stop = tl.minimum(kv_len, last + 1)
    if DCP:
        stop = local_len(stop, dcp_size, dcp_rank, dcp_interleave)
    stop_tile = tl.cdiv(stop, KV_TILE)
    if BUNDLED:
        first_tile = segment_start(bundle * _BUNDLE) // SEGMENT_UNIT
        past = segment_start((bundle + 1) * _BUNDLE) // SEGMENT_UNIT
        stop_tile = tl.minimum(stop_tile, past)
    # A row without keys costs one tile, so that somebody writes its zeros.
    tiles = tl.where(j < num_rows, tl.maximum(stop_tile - first_tile, 1), 0)
    return req, begin + skipped, tokens, kv_len, first, first_tile, tiles, bundle, bundles


@triton.jit
def _shared_tiles(total, least, most, num_groups):
    """See :func:`builders.split_kv.shared_tiles`."""
    tiles = most.to(tl.int64)
    share = tl.cdiv(total, num_groups * tiles) * tiles
    parts = tl.maximum(num_groups * tiles // tl.maximum(total, 1), 1)
    share = tl.where(total < num_groups * tiles, tl.cdiv(tiles, parts), share)
    shared = share * num_groups
    even = (least == most) & ((shared - total) * _WASTE <= total)
    return tl.where(even, shared, total.to(tl.int64))


@triton.jit
def _group_starts(
    position, row_ends, row_tiles, first_tiles, SEGMENT_UNIT: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, ROWS: tl.constexpr, ROW_STEPS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Row (of these, times head loops) and segment of the first segment at or after a position.

    The rows' ends, tiles and first tiles are ``[ROWS]``; position lies among their tiles.
    """
    row = _first_above(row_ends, position, ROWS, ROW_STEPS)
    tiles = tl.maximum(tl.gather(row_tiles, row, 0), 1)
    first_tile = tl.gather(first_tiles, row, 0)
    offset = position - tl.gather(row_ends - row_tiles * HEAD_LOOPS, row, 0)
    loop = offset // tiles
    tile = first_tile + offset % tiles
    at = segment_of(tile * SEGMENT_UNIT)
    # Inside a segment the next one is meant; past the row's last, the next row.
    inside = tl.maximum(segment_start(at) // SEGMENT_UNIT, first_tile) < tile
    at = at + inside.to(tl.int32)
    row = row * HEAD_LOOPS + loop
    past = at > segment_of((first_tile + tiles - 1) * SEGMENT_UNIT)
    segment = tl.where(past, 0, at - segment_of(first_tile * SEGMENT_UNIT))
    if FREE:
        segment = offset % tiles
    else:
        row = tl.where(past, row + 1, row)
    return row, segment


@triton.jit
def _store_shares(
    rows_ptr, starts_ptr, shares_ptr, c, num_groups, num_rows, HEAD_LOOPS: tl.constexpr
):
    """What each group ``c`` begins with, see :data:`builders.split_kv.SHARE_FIELDS`."""
    # Rows and starts are other threads' stores.
    tl.debug_barrier()
    real = c < num_groups
    row = tl.load(starts_ptr + 2 * c, mask=real, other=0)
    out = shares_ptr + c * _SHARE_FIELDS
    tl.store(out, row, mask=real)
    for field in tl.static_range(1, 4):
        tl.store(out + field, tl.load(starts_ptr + 2 * c + field, mask=real), mask=real)
    k = tl.arange(0, 16)[None, :]
    mask = (real & (row < num_rows * HEAD_LOOPS))[:, None] & (k < _FIELDS)
    fields = tl.load(rows_ptr + (row // HEAD_LOOPS * _FIELDS)[:, None] + k, mask=mask)
    tl.store(out[:, None] + (_SHARE_FIELDS - _FIELDS) + k, fields, mask=mask)


@triton.jit
def _store_tiles(starts_ptr, i, count, decode_max, max_reqs, TILE: tl.constexpr):
    """First tile of each request ``i``, of those with more than ``decode_max`` query tokens."""
    tile_ends = tl.cumsum(tl.where(count > decode_max, tl.cdiv(count, TILE), 0), 0)
    tl.store(starts_ptr + i, 0, mask=i == 0)
    # Past the last request too: a graph was captured with more of them, perhaps.
    tl.store(starts_ptr + 1 + i, tile_ends, mask=i < max_reqs)


_VARYING = [
    "num_reqs",
    "max_reqs",
    "max_kv_len",
    "num_groups",
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
    num_groups,
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
    BUNDLED: tl.constexpr,
    REQS: tl.constexpr,
    REQ_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_STEPS: tl.constexpr,
    GROUPS: tl.constexpr,
    FREE: tl.constexpr,
    LEAST: tl.constexpr,
    HASTENS: tl.constexpr,
):
    """The step's plan, by one program: rows, their tiles, and where each group of programs starts.

    seq_lens ``[R]``; query_start ``[R + 1]``; rows ``[rows, ROW_FIELDS]``; total ``[2]``: rows, and
    tiles that the groups share; starts ``[num_groups + 1, 2]``: row * HEAD_LOOPS + head loop, and
    segment of the row; shares ``[num_groups, SHARE_FIELDS]``; prefill_starts ``[max_reqs + 1]``:
    first prefill tile of each request; hopper_starts likewise, unless HOPPER_TILE is 0. All are
    int32.

    TRIM: no query sees past itself. DCP: keys are those of one rank, in their order there; lengths
    and positions of rows are the request's. With FREE a group starts at its share's first tile, and
    starts hold tiles of rows; a share has LEAST of them at least. HASTENS: the next kernel may
    start, and waits by itself.
    """
    if HASTENS:
        gdc_launch_dependents()
    i = tl.arange(0, REQS)
    real = i < num_reqs
    begin = tl.load(query_start_ptr + i, mask=real, other=0)
    count = tl.load(query_start_ptr + 1 + i, mask=real, other=0) - begin
    # A length beyond the limit would spoil other rows' scratch; its own row is lost anyway.
    kv_len = tl.minimum(tl.load(seq_lens_ptr + i, mask=real, other=0), max_kv_len)
    bundles = _bundles_of(
        kv_len, dcp_size, dcp_rank, dcp_interleave, KV_TILE, SEGMENT_UNIT, DCP, BUNDLED
    )
    is_decode = (count > 0) & (count <= decode_max)
    req_rows = tl.where(is_decode, tl.cdiv(count, QUERY_TOKENS) * bundles, 0)
    req_ends = tl.cumsum(req_rows, 0)
    _store_tiles(prefill_starts_ptr, i, count, decode_max, max_reqs, PREFILL_TILE)
    if HOPPER_TILE > 0:
        _store_tiles(hopper_starts_ptr, i, count, decode_max, max_reqs, HOPPER_TILE)
    num_rows = tl.max(req_ends, 0)
    # In blocks, so that a step costs what its own rows cost and not what the largest step could.
    total = 0
    least = max_kv_len + 1
    most = 1
    for block in range(0, num_rows, ROWS):
        j = block + tl.arange(0, ROWS)
        _, _, _, _, _, _, tiles, _, _ = _rows_at(
            j, num_rows, req_ends, req_rows, begin, count, kv_len, bundles, window, chunk, lookback,
            dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK,
            TRIM, DCP, BUNDLED, REQS, REQ_STEPS,
        )  # fmt: skip
        total += tl.sum(tiles, 0) * HEAD_LOOPS
        least = tl.minimum(least, tl.min(tl.where(j < num_rows, tiles, least), 0))
        most = tl.maximum(most, tl.max(tiles, 0))

    # Group c owns the segments that start in its share of the tiles,
    # ``[c * shared / groups, (c + 1) * shared / groups)``.
    c = tl.arange(0, GROUPS)
    sharers = num_groups
    if FREE:
        # A group without a tile would be waited for in vain.
        sharers = tl.maximum(tl.minimum(num_groups, total // LEAST), 1)
    shared = _shared_tiles(total, least, most, sharers)
    tl.store(total_ptr, num_rows)
    tl.store(total_ptr + 1, shared.to(tl.int32))
    position = ((c * shared + sharers - 1) // sharers).to(tl.int32)
    idle = (c <= num_groups) & (position >= total)
    tl.store(starts_ptr + 2 * c, num_rows * HEAD_LOOPS, mask=idle)
    tl.store(starts_ptr + 2 * c + 1, 0, mask=idle)
    place = 0
    for block in range(0, num_rows, ROWS):
        j = block + tl.arange(0, ROWS)
        live = j < num_rows
        req, token, tokens, lens, first, first_tile, tiles, which, of = _rows_at(
            j, num_rows, req_ends, req_rows, begin, count, kv_len, bundles, window, chunk, lookback,
            dcp_size, dcp_rank, dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK,
            TRIM, DCP, BUNDLED, REQS, REQ_STEPS,
        )  # fmt: skip
        ends = place + tl.cumsum(tiles * HEAD_LOOPS, 0)
        out = rows_ptr + j * _FIELDS
        tl.store(out, req, mask=live)
        tl.store(out + 1, token, mask=live)
        tl.store(out + 2, tokens, mask=live)
        tl.store(out + 3, lens, mask=live)
        tl.store(out + 4, first, mask=live)
        tl.store(out + 5, first_tile, mask=live)
        tl.store(out + 6, tiles, mask=live)
        tl.store(out + 7, ends - tiles * HEAD_LOOPS, mask=live)
        part = segment_of(first_tile * SEGMENT_UNIT)
        tl.store(out + 8, part, mask=live)
        tl.store(out + 9, segment_of((first_tile + tiles - 1) * SEGMENT_UNIT) + 1 - part, mask=live)
        tl.store(out + 10, which, mask=live)
        tl.store(out + 11, of, mask=live)
        row, segment = _group_starts(
            position, ends, tiles, first_tile, SEGMENT_UNIT, HEAD_LOOPS, ROWS, ROW_STEPS, FREE
        )
        here = (c <= num_groups) & (position >= place) & (position < tl.max(ends, 0))
        tl.store(starts_ptr + 2 * c, block * HEAD_LOOPS + row, mask=here)
        tl.store(starts_ptr + 2 * c + 1, segment, mask=here)
        place = tl.max(ends, 0)

    _store_shares(rows_ptr, starts_ptr, shares_ptr, c, num_groups, num_rows, HEAD_LOOPS)
