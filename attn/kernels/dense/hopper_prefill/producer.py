"""The producer: one warp that asks TMA for queries, keys and values, in the order of their use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_prefill.scheduler import publish, tile_at
from attn.kernels.lang.compat import async_load
from attn.kernels.lang.opaque import opaque_zero, program_number
from attn.kernels.lang.structures import QueryTile

_LEAD = gl.constexpr(2)
"""Tiles of keys that are still to be asked for when the next tile of queries is taken."""


@gluon.jit
def _load_tile(
    ring, desc, table, kv_head, key_tile, tile, turn, room, cache, WAITS: gl.constexpr = True
):
    """Fill the ring's stage of ``turn`` with tile ``key_tile`` of the keys or values of ``tile``.

    ``table`` is where the request's part of the block table begins, or, without pages, its keys.
    With WAITS this waits until there is room for turn ``room``.
    """
    RUNS: gl.constexpr = ring.KV_TILE // ring.RUN
    HALVES: gl.constexpr = ring.HALVES
    stage = turn % ring.STAGES
    if WAITS:
        ring.wait_empty(room)
    full = ring.full.index(stage)
    mbarrier.expect(full, ring.KV_TILE * (HALVES * 128 + ring.EXTRA * 2))
    for run in gl.static_range(RUNS):
        key = key_tile * ring.KV_TILE + run * ring.RUN
        live = (key < tile.kv_len) & (key + ring.RUN > tile.start)
        # Outside the cache a box is zeros.
        if cache.BLOCK_SIZE > 0:
            at = cache.table_ptr + table + key // cache.BLOCK_SIZE
            if HALVES * 64 + ring.EXTRA > 128:
                # Kernels of wide heads have no register to keep an address in from their beginning
                # on; with the opaque zero it is computed here.
                at = cache.table_ptr + (table + key // cache.BLOCK_SIZE + opaque_zero())
            page = gl.load(at, mask=live, other=-1)
            row = key % cache.BLOCK_SIZE
        else:
            page = gl.where(live, 0, -1)
            row = table + key
        for half in gl.static_range(HALVES):
            box = ring.boxes.index((stage * HALVES + half) * RUNS + run)
            async_load(desc, [page, row, kv_head, half * 64], full, box)
        if ring.EXTRA > 0:
            box = ring.extra_boxes.index(stage * RUNS + run)
            async_load(ring.extra_desc, [page, row, kv_head, HALVES * 64], full, box)


@gluon.jit
def _key_tile(tile, i, ASCENDING: gl.constexpr):
    """The tile of keys that is walked after ``i`` others."""
    if ASCENDING:
        number = tile.low + i
    else:
        number = tile.high - 1 - i
    return number


@gluon.jit
def load_queries(turn, tile, queries, shape, WARPS: gl.constexpr):
    """Say which tile it is, and ask for its queries."""
    HALVES: gl.constexpr = shape.WIDTH // 64
    stage = turn % queries.STAGES
    queries.wait_empty(turn)
    publish(queries.records, stage, tile, WARPS)
    full = queries.full.index(stage)
    mbarrier.expect(full, shape.WARP_GROUPS * 64 * (HALVES * 128 + shape.EXTRA * 2))
    for part in gl.static_range(shape.WARP_GROUPS):
        row = tile.row + part * (64 // shape.PACKED)
        head = tile.head * shape.PACKED
        place = stage * shape.WARP_GROUPS + part
        for half in gl.static_range(HALVES):
            box = queries.boxes.index(place * HALVES + half)
            async_load(queries.desc, [row, head, half * 64], full, box)
        if shape.EXTRA > 0:
            box = queries.extra_boxes.index(place)
            async_load(queries.extra_desc, [row, head, HALVES * 64], full, box)


@gluon.jit
def next_tile(total, schedule):
    """The next tile that nobody took, of ``total``.

    Programs count one for each tile that they do, so that together they count to the number of
    tiles; who is last there sets the counter back.
    """
    taken = gl.atomic_add(schedule.counter_ptr, 1, sem="relaxed", scope="gpu")
    if taken == total - 1:
        gl.store(schedule.counter_ptr, 0)
    return schedule.programs + taken


@gluon.jit
def say_the_end(turn, queries, WARPS: gl.constexpr):
    """There is no tile of that turn."""
    stage = turn % queries.STAGES
    queries.wait_empty(turn)
    nothing = QueryTile(
        head=0, req=0, row=0, left=0, position=0, kv_len=0, causal=1, start=0, low=0, high=0
    )
    publish(queries.records, stage, nothing, WARPS)
    mbarrier.arrive(queries.full.index(stage), count=1)


@gluon.jit
def produce(queries, rings, cache, schedule, mask, shape):
    """One warp: everything that is loaded, in the order in which it is consumed.

    Tiles differ in length, and so do multiprocessors in speed: after its first tile a program takes
    the next that nobody took.
    """
    # The producer has no register left for it with three warp groups, nor, on Triton 3.9, ranges.
    LATE: gl.constexpr = shape.WARP_GROUPS == 2 and not mask.RANGES
    # With JOINT rings the keys of a turn and the values of the turn before are freed
    # together, so that values need no wait of their own behind keys.
    JOINT: gl.constexpr = rings.JOINT
    MORE: gl.constexpr = 1 if JOINT else 0
    ASCENDING: gl.constexpr = shape.ASCENDING
    num_tiles = gl.load(schedule.num_tiles_ptr)
    total = num_tiles * schedule.HEADS
    work = program_number(True)
    turn = 0
    done = 0
    tile = tile_at(gl.minimum(work, total - 1), num_tiles, schedule, mask, shape)
    while work < total:
        # A table has fewer than 2^31 entries.
        table = tile.req * cache.table_row
        if cache.BLOCK_SIZE == 0:
            # Keys lie as queries do.
            table = tile.row - tile.position
        kv_head = tile.head * shape.PACKED // shape.GROUP
        _load_tile(
            rings.keys, cache.k_desc, table, kv_head, _key_tile(tile, 0, ASCENDING), tile, done,
            done, cache,
        )  # fmt: skip
        load_queries(turn, tile, queries, shape, 1)
        # In the midst of loads it costs nothing: what is asked for next has to wait for room. Late,
        # since whoever takes one of the last tiles early ends after all others.
        count = tile.high - tile.low
        if not LATE or count == 1:
            work = next_tile(total, schedule)
        for i in range(1, count):
            key_tile = _key_tile(tile, i, ASCENDING)
            if not ASCENDING:
                key_tile = gl.maximum(key_tile, 0)
            _load_tile(
                rings.keys, cache.k_desc, table, kv_head, key_tile, tile, done + i, done + i, cache
            )  # fmt: skip
            _load_tile(
                rings.values, cache.v_desc, table, kv_head, _key_tile(tile, i - 1, ASCENDING),
                tile, done + i - 1, done + i - 1, cache, not JOINT,
            )  # fmt: skip
            if LATE:
                # As a maximum of both, ptxas of Triton 3.7 has a register too few.
                if (i == count - _LEAD) | ((count <= _LEAD) & (i == 1)):
                    work = next_tile(total, schedule)
        done += count
        # Before the last values, for which there is no room yet: the keys of the next tile are to
        # be asked for right behind them, and where it is takes thousands of clocks to find out.
        before = tile
        tile = tile_at(gl.minimum(work, total - 1), num_tiles, schedule, mask, shape)
        _load_tile(
            rings.values, cache.v_desc, table, kv_head,
            before.low + (count - 1) if ASCENDING else before.low, before, done - 1,
            done - 1 + MORE, cache,
        )  # fmt: skip
        turn += 1
    say_the_end(turn, queries, 1)
