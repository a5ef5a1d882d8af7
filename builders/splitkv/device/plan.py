"""The Triton kernel that plans a step's rows on the device. Imported lazily; a twin in torch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from builders.splitkv.device.across_warps import plan_many
from builders.splitkv.device.in_one_warp import IN_A_WARP, plan_few, requests_by_warp
from builders.splitkv.device.work_items import bundles_of, request_at

_MOST_TURNS = tl.constexpr(4)
"""Of a warp's threads, to requests of one row each that every warp has all of."""
_MOST_LINES = tl.constexpr(8)
"""Of groups, where requests take several turns: a thread has each turn as often as lines."""


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
def _sums_of_requests(rows, tiles, others, WITHIN: tl.constexpr):
    """The sum and the most of rows, and the sums of tiles: each within a warp, or all by one
    exchange between warps.
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
    begin, count, kv_len = request_at(i, i < num_reqs, seq_lens_ptr, query_start_ptr, max_kv_len)
    TURNS: tl.constexpr = (1 << STEPS) // IN_A_WARP
    TAKES_TURNS: tl.constexpr = (
        REQS > IN_A_WARP and TURNS > 1 and TURNS <= _MOST_TURNS and LINES <= _MOST_LINES
    )
    if TAKES_TURNS:
        # On the way meanwhile.
        reqs = requests_by_warp(seq_lens_ptr, query_start_ptr, num_reqs, max_kv_len, LINES, TURNS)
    bundles = bundles_of(
        kv_len, dcp_size, dcp_rank, dcp_interleave, KV_TILE, SEGMENT_UNIT, DCP, BUNDLE
    )
    is_decode = (count > 0) & (count <= decode_max)
    req_rows = tl.where(is_decode, tl.cdiv(count, QUERY_TOKENS) * bundles, 0)
    tiles, others = _tiles_of_long(count, decode_max, PREFILL_TILE, HOPPER_TILE)
    num_rows, most_rows, num_tiles, num_others = _sums_of_requests(
        req_rows, tiles, others, REQS <= IN_A_WARP
    )
    if TAKES_TURNS and (most_rows <= 1) & (num_rows == num_reqs):
        plan_few(
            rows_ptr, total_ptr, starts_ptr, shares_ptr, seq_lens_ptr, query_start_ptr, num_reqs,
            num_rows, most_rows, 0, reqs, max_kv_len, window, chunk, lookback, dcp_size, dcp_rank,
            dcp_interleave, QUERY_TOKENS, KV_TILE, SEGMENT_UNIT, WINDOW, CHUNK, TRIM, DCP, BUNDLE,
            HEAD_LOOPS, FREE, LEAST, ROW_COST, NUM_GROUPS, LINES, TURNS, STEPS,
        )  # fmt: skip
        # None of them has a long query.
        tile_ends, other_ends = tiles, others
    elif REQS <= IN_A_WARP and num_rows <= IN_A_WARP:
        line = tl.arange(0, LINES)[:, None] * 0
        every = (
            begin[None, :] + line, count[None, :] + line, kv_len[None, :] + line,
            bundles[None, :] + line,
        )  # fmt: skip
        plan_few(
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
        plan_many(
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
