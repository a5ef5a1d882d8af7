"""The tiles of a step: where one of them is, and how the producer tells the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.structures import QueryTile

RECORD = gl.constexpr(16)
"""Room for the numbers of a tile."""
_LEAST = gl.constexpr(8)
"""Tiles of heads that are walked together, at least: tiles that were measured have no more."""


@gluon.constexpr_function
def is_joint(width: int, kind: int, two_states: bool) -> bool:
    """Keys of a turn and the values of the one before are given back by one barrier, that of keys:
    of narrow heads that are read as they are stored, and where registers hold two states.
    """
    return (width <= 64 and kind <= 0) or two_states


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
def _place_of(work, num_tiles, schedule, SHARED: gl.constexpr):
    """Tile of heads and tile of tokens of a number; SHARED tiles of heads have the same keys.

    Numbers count heads first, then tiles from the last, which see most keys and have to start
    first. Of many heads some are walked together, all their tiles, and then the next: programs that
    run at once should share keys. With 128 heads that share none, every tile of keys came from
    memory: with tiles of 128 rows 30 bytes per clock and multiprocessor, more than there are. But
    there have to be tiles enough for every program to find short ones at the end, too.
    """
    HEADS: gl.constexpr = schedule.HEADS
    if HEADS <= _LEAST:
        head = work % HEADS
        tile = num_tiles - 1 - work // HEADS
    else:
        # Two tiles for each program: those of the last heads take about as long as the longest.
        num_tiles = gl.maximum(num_tiles, 1)
        group = gl.maximum((2 * schedule.programs) // num_tiles, _LEAST // 2)
        group = gl.minimum((group + SHARED - 1) // SHARED * SHARED, HEADS)
        first = work // (group * num_tiles) * group
        rest = work - first * num_tiles
        group = gl.minimum(group, HEADS - first)
        head = first + rest % group
        tile = num_tiles - 1 - rest // group
    return head, tile


@gluon.jit
def tile_at(work, num_tiles, schedule, mask, shape):
    """Find the tile of queries number ``work``, of ``num_tiles`` for each tile of heads.

    It has at least one tile of keys.
    """
    TOKENS: gl.constexpr = shape.WARP_GROUPS * 64 // shape.PACKED
    KV_TILE: gl.constexpr = shape.KV_TILE
    head, tile = _place_of(work, num_tiles, schedule, shape.GROUP // shape.PACKED)
    req = 0
    above = schedule.num_reqs
    while above - req > 1:
        middle = (req + above) // 2
        go = gl.load(schedule.tile_starts_ptr + middle) <= tile
        req = gl.where(go, middle, req)
        above = gl.where(go, above, middle)
    token = (tile - gl.load(schedule.tile_starts_ptr + req)) * TOKENS
    begin = gl.load(schedule.query_start_ptr + req)
    query_len = gl.load(schedule.query_start_ptr + req + 1) - begin
    kv_len = gl.load(schedule.seq_lens_ptr + req)
    first = gl.maximum(kv_len - query_len, 0) + token
    last = gl.maximum(kv_len - query_len, 0) + gl.minimum(token + TOKENS, query_len) - 1
    causal, start, stop = mask.keys_seen(req, first, last, kv_len)
    low = start // KV_TILE
    high = gl.maximum((stop + KV_TILE - 1) // KV_TILE, low + 1)
    return QueryTile(
        head=head, req=req, row=begin + token, left=query_len - token, position=first,
        kv_len=kv_len, causal=causal, start=start, low=low, high=high,
    )  # fmt: skip


@gluon.jit
def _put(records, place, number, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    records.index(place).store(gl.full([1], number, gl.int32, LAYOUT))


@gluon.jit
def _take(records, place):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(records.index(place).load(LAYOUT), 0)


@gluon.jit
def publish(records, stage, tile, WARPS: gl.constexpr):
    """The producer's part: say which tile the queries of that stage are of.

    Once per tile, so that nobody else has to search for it.
    """
    place = stage * RECORD
    _put(records, place, tile.head, WARPS)
    _put(records, place + 1, tile.req, WARPS)
    _put(records, place + 2, tile.row, WARPS)
    _put(records, place + 3, tile.left, WARPS)
    _put(records, place + 4, tile.position, WARPS)
    _put(records, place + 5, tile.kv_len, WARPS)
    _put(records, place + 6, tile.causal, WARPS)
    _put(records, place + 7, tile.low, WARPS)
    _put(records, place + 8, tile.high, WARPS)
    _put(records, place + 9, tile.start, WARPS)
    # One thread arrives at the stage's barrier, for all that wrote here.
    thread_barrier()


@gluon.jit
def told(records, stage):
    """The consumers' part: read which tile a stage has, without the first visible key."""
    place = stage * RECORD
    return QueryTile(
        head=_take(records, place),
        req=_take(records, place + 1),
        row=_take(records, place + 2),
        left=_take(records, place + 3),
        position=_take(records, place + 4),
        kv_len=_take(records, place + 5),
        causal=_take(records, place + 6),
        start=None,
        low=_take(records, place + 7),
        high=_take(records, place + 8),
    )


@gluon.jit
def told_of_keys(records, stage):
    """The part of who loads values: read tile of heads, request, first visible key, tokens of the
    request's keys, and tiles of keys ``[low, high)``.
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
