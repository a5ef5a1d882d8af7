"""The tiles of a step: where one of them is, and how the producer tells the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.structures import Mask

RECORD = gl.constexpr(16)
"""Room for the numbers of a tile."""
_LEAST = gl.constexpr(8)
"""Tiles of heads that are walked together, at least: tiles that were measured have no more."""


@gluon.constexpr_function
def is_joint(width: int, kind: int) -> bool:
    """Keys of a turn and the values of the one before are given back by one barrier, that of keys:
    of narrow heads that are read as they are stored.
    """
    return width <= 64 and kind <= 0


@gluon.jit
def sum_of_own(x):
    """``[64, keys]`` summed up by thread: ``[64, 4]``, the four threads of a row."""
    return gl.sum(gl.sum(gl.reshape(x, [64, x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def wide(stride):
    """A stride, which is not negative, as int64: of a signed one, copies of the sign would be kept
    in registers for the whole kernel.
    """
    return stride.to(gl.uint32).to(gl.int64)


@gluon.jit
def _place_of(work, num_tiles, programs, HEADS: gl.constexpr, SHARED: gl.constexpr):
    """Tile of heads and tile of tokens of a number; SHARED tiles of heads have the same keys.

    Numbers count heads first, then tiles from the last, which see most keys and have to start
    first. Of many heads some are walked together, all their tiles, and then the next: programs that
    run at once should share keys. With 128 heads that share none, every tile of keys came from
    memory: with tiles of 128 rows 30 bytes per clock and multiprocessor, more than there are. But
    there have to be tiles enough for every program to find short ones at the end, too.
    """
    if HEADS <= _LEAST:
        head = work % HEADS
        tile = num_tiles - 1 - work // HEADS
    else:
        # Two tiles for each program: those of the last heads take about as long as the longest.
        num_tiles = gl.maximum(num_tiles, 1)
        group = gl.maximum((2 * programs) // num_tiles, _LEAST // 2)
        group = gl.minimum((group + SHARED - 1) // SHARED * SHARED, HEADS)
        first = work // (group * num_tiles) * group
        rest = work - first * num_tiles
        group = gl.minimum(group, HEADS - first)
        head = first + rest % group
        tile = num_tiles - 1 - rest // group
    return head, tile


@gluon.jit
def keys_seen(
    req, first, last, kv_len, causal_ptr, ranges_ptr, num_ranges, window, chunk, lookback,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr,
    CLAMP: gl.constexpr,
):  # fmt: skip
    """What a request's queries from position ``first`` to ``last`` see: whether it is causal, and
    keys ``[start, stop)``.
    """
    mask = Mask(
        causal_ptr=causal_ptr, ranges_ptr=ranges_ptr, num_ranges=num_ranges, window=window,
        chunk=chunk, lookback=lookback, CAUSAL=CAUSAL, WINDOW=WINDOW, CHUNK=CHUNK, RANGES=RANGES,
        CLAMP=CLAMP,
    )  # fmt: skip
    return mask.keys_seen(req, first, last, kv_len)


@gluon.jit
def tile_at(
    work, num_tiles, programs, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr,
    ranges_ptr, num_reqs, num_ranges, window, chunk, lookback, HEADS: gl.constexpr,
    SHARED: gl.constexpr, TOKENS: gl.constexpr, KV_TILE: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """The tile of that number, of a step's ``num_tiles`` for each of HEADS tiles of heads.

    Returns tile of heads, request, first row of the query, tokens left from there, position of the
    first, keys of the request, whether it is causal, the first visible key, and the tiles of keys
    ``[low, high)``, one at least.
    """
    head, tile = _place_of(work, num_tiles, programs, HEADS, SHARED)
    req = 0
    above = num_reqs
    while above - req > 1:
        middle = (req + above) // 2
        go = gl.load(tile_starts_ptr + middle) <= tile
        req = gl.where(go, middle, req)
        above = gl.where(go, above, middle)
    token = (tile - gl.load(tile_starts_ptr + req)) * TOKENS
    begin = gl.load(query_start_ptr + req)
    query_len = gl.load(query_start_ptr + req + 1) - begin
    kv_len = gl.load(seq_lens_ptr + req)
    first = gl.maximum(kv_len - query_len, 0) + token
    last = gl.maximum(kv_len - query_len, 0) + gl.minimum(token + TOKENS, query_len) - 1
    causal, start, stop = keys_seen(
        req, first, last, kv_len, causal_ptr, ranges_ptr, num_ranges, window, chunk, lookback,
        CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
    )  # fmt: skip
    low = start // KV_TILE
    high = gl.maximum((stop + KV_TILE - 1) // KV_TILE, low + 1)
    row, left = begin + token, query_len - token
    return head, req, row, left, first, kv_len, causal, start, low, high


@gluon.jit
def _put(records, place, number, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    records.index(place).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def _take(records, place):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(records.index(place).load(LAYOUT), 0)


@gluon.jit
def publish(
    records, stage, head, req, row, left, position, kv_len, causal, start, low, high,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The producer's part: say which tile the queries of that stage are of; ``high`` 0 if of none.

    Once per tile, so that nobody else has to search for it.
    """
    place = stage * RECORD
    _put(records, place, head, WARPS)
    _put(records, place + 1, req, WARPS)
    _put(records, place + 2, row, WARPS)
    _put(records, place + 3, left, WARPS)
    _put(records, place + 4, position, WARPS)
    _put(records, place + 5, kv_len, WARPS)
    _put(records, place + 6, causal, WARPS)
    _put(records, place + 7, low, WARPS)
    _put(records, place + 8, high, WARPS)
    _put(records, place + 9, start, WARPS)
    # One thread arrives at the stage's barrier, for all that wrote here.
    thread_barrier()


@gluon.jit
def told(records, stage):
    """The others' part: as :func:`tile_at`, without the first visible key."""
    place = stage * RECORD
    return (
        _take(records, place),
        _take(records, place + 1),
        _take(records, place + 2),
        _take(records, place + 3),
        _take(records, place + 4),
        _take(records, place + 5),
        _take(records, place + 6),
        _take(records, place + 7),
        _take(records, place + 8),
    )


@gluon.jit
def told_of_keys(records, stage):
    """Who loads values is told: tile of heads, request, the first visible key, keys of the request,
    and the tiles of keys.
    """
    place = stage * RECORD
    return (
        _take(records, place),
        _take(records, place + 1),
        _take(records, place + 9),
        _take(records, place + 5),
        _take(records, place + 7),
        _take(records, place + 8),
    )
