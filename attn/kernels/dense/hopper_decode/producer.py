"""The producer of the Hopper split-KV kernel: one warp that asks TMA for keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_decode.parts import FIELDS, share_at, tiles_of, walked_fields
from attn.kernels.lang.compat import async_load
from attn.kernels.lang.opaque import program_number


@gluon.jit
def pages_of(
    table_ptr, tile, start, kv_len, KV_TILE: gl.constexpr, RUN: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """The page of each run of a tile, ``[RUNS]`` int32; every lane has all of them.

    A run gets -1 if all of its tokens are before the first key that a query sees, or behind the
    request's last key.
    """
    RUNS: gl.constexpr = KV_TILE // RUN
    run = gl.arange(0, RUNS, layout=gl.BlockedLayout([RUNS], [32], [1], [0]))
    key = tile * KV_TILE + run * RUN
    live = (key < kv_len) & (key + RUN > start)
    return gl.load(table_ptr + key // BLOCK_SIZE, mask=live, other=-1)


@gluon.jit
def _load_tile(desc, pages, tile, kv_head, stage, full, boxes, ring, BLOCK_SIZE: gl.constexpr):
    """Ask TMA for a tile of keys or values, into the boxes of stage ``stage``."""
    RUNS: gl.constexpr = ring.KV_TILE // ring.RUN
    run = gl.arange(0, RUNS, layout=gl.BlockedLayout([RUNS], [32], [1], [0]))
    mbarrier.expect(full.index(stage), ring.KV_TILE * ring.HALVES * 128)
    for i in gl.static_range(RUNS):
        # Page -1 lies outside the cache, and TMA fills such a box with zeros.
        page = gl.max(gl.where(run == i, pages, -1), 0)
        within = (tile * ring.KV_TILE + i * ring.RUN) % BLOCK_SIZE
        for half in gl.static_range(ring.HALVES):
            async_load(
                desc,
                [page, within, kv_head, half * 64],
                full.index(stage),
                boxes.index((stage * ring.HALVES + half) * RUNS + i),
            )


@gluon.jit
def produce(cache, ring, plan, mask):
    """Load the keys and values of all parts that the program takes, tile after tile."""
    lane = program_number() % plan.HEADS
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    # The first work item's numbers are loaded together with the share, and those of every other
    # work item while the one before it is walked. Loads that wait for each other take most of a
    # microsecond each.
    next_row = gl.load(mine + 2)
    next_segment = gl.load(mine + 3)
    req, count, kv_len, first, first_part, parts, segment_group = walked_fields(fields, True)
    turn = 0
    for r in range(first_row, past_row):
        end = gl.where(r == next_row, next_segment, parts)
        _, _, start, low, high = tiles_of(
            begin, end, req, count, kv_len, first, first_part, segment_group, mask, ring.KV_TILE,
            plan.SEGMENT_UNIT,
        )  # fmt: skip
        kv_head = ((r % plan.HEAD_LOOPS) * plan.HEADS + lane) // plan.HEAD_TILES
        # A table has fewer than 2^31 entries.
        table = cache.table_ptr + req * cache.table_row
        own_len = kv_len
        req, count, kv_len, first, first_part, parts, segment_group = walked_fields(
            plan.rows_ptr + ((r + 1) // plan.HEAD_LOOPS) * FIELDS, r + 1 < past_row
        )
        pages = pages_of(table, low, start, own_len, ring.KV_TILE, ring.RUN, cache.BLOCK_SIZE)
        for tile in range(low, high):
            stage, parity = ring.stage_of(turn)
            # Page ids are loaded a tile ahead; behind the part's last tile they are not used.
            after = gl.minimum(tile + 1, high - 1)
            ahead = pages_of(table, after, start, own_len, ring.KV_TILE, ring.RUN, cache.BLOCK_SIZE)
            # In the first round of the ring nothing has to be emptied: a fresh barrier lets a wait
            # for parity 1 pass at once.
            mbarrier.wait(ring.empty.index(stage), parity ^ 1)
            _load_tile(
                cache.k_desc, pages, tile, kv_head, stage, ring.k_full, ring.k_boxes, ring,
                cache.BLOCK_SIZE,
            )  # fmt: skip
            _load_tile(
                cache.v_desc, pages, tile, kv_head, stage, ring.v_full, ring.v_boxes, ring,
                cache.BLOCK_SIZE,
            )  # fmt: skip
            pages = ahead
            turn += 1
        begin = 0
