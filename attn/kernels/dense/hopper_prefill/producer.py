"""The producer: one warp that asks TMA for queries, keys and values, in the order of their use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_prefill.scheduler import is_joint, publish, tile_at
from attn.kernels.lang.compat import async_load

_LEAD = gl.constexpr(2)
"""Tiles of keys that are still to be asked for when the next tile of queries is taken."""


@gluon.jit
def _load_keys(
    desc, table_ptr, table, tile, start, kv_len, kv_head, turn, room, full, empty, boxes, more,
    KV_TILE: gl.constexpr, HALVES: gl.constexpr, EXTRA: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr, STAGES: gl.constexpr, WAITS: gl.constexpr = True,
):  # fmt: skip
    """Fill stage ``turn % STAGES`` with a tile of keys or values, their EXTRA columns in ``more``.
    WAITS: when ``empty`` says that there is room for turn ``room``.

    ``table`` is where the request's part of the block table begins, or, without pages, its keys.
    """
    RUNS: gl.constexpr = KV_TILE // RUN
    stage = turn % STAGES
    # A fresh barrier lets parity 1 pass at once.
    if WAITS:
        mbarrier.wait(empty.index(room % STAGES), ((room // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), KV_TILE * (HALVES * 128 + EXTRA * 2))
    for run in gl.static_range(RUNS):
        key = tile * KV_TILE + run * RUN
        live = (key < kv_len) & (key + RUN > start)
        # Outside the cache a box is zeros.
        if BLOCK_SIZE > 0:
            page = gl.load(table_ptr + table + key // BLOCK_SIZE, mask=live, other=-1)
            row = key % BLOCK_SIZE
        else:
            page = gl.where(live, 0, -1)
            row = table + key
        for half in gl.static_range(HALVES):
            async_load(
                desc,
                [page, row, kv_head, half * 64],
                full.index(stage),
                boxes.index((stage * HALVES + half) * RUNS + run),
            )
        if EXTRA > 0:
            async_load(
                desc,
                [page, row, kv_head, HALVES * 64],
                full.index(stage),
                more.index(stage * RUNS + run),
            )


@gluon.jit
def load_queries(
    turn, q_desc, q_boxes, q_more, records, q_full, q_empty, head, req, row, left, position, kv_len,
    causal, start, low, high, PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, HALVES: gl.constexpr,
    EXTRA: gl.constexpr, Q_STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Say which tile it is, and ask for its queries."""
    stage = turn % Q_STAGES
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    publish(records, stage, head, req, row, left, position, kv_len, causal, start, low, high, WARPS)
    mbarrier.expect(q_full.index(stage), WARP_GROUPS * 64 * (HALVES * 128 + EXTRA * 2))
    for part in gl.static_range(WARP_GROUPS):
        for half in gl.static_range(HALVES):
            async_load(
                q_desc,
                [row + part * (64 // PACKED), head * PACKED, half * 64],
                q_full.index(stage),
                q_boxes.index((stage * WARP_GROUPS + part) * HALVES + half),
            )
        if EXTRA > 0:
            async_load(
                q_desc,
                [row + part * (64 // PACKED), head * PACKED, HALVES * 64],
                q_full.index(stage),
                q_more.index(stage * WARP_GROUPS + part),
            )


@gluon.jit
def next_tile(counter_ptr, total, programs):
    """The next tile that nobody took.

    Programs count one for each tile that they do, so that together they count to the number of
    tiles; who is last there sets the counter back.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
    if taken == total - 1:
        gl.store(counter_ptr, 0)
    return programs + taken


@gluon.jit
def say_the_end(turn, records, q_full, q_empty, Q_STAGES: gl.constexpr, WARPS: gl.constexpr):
    """There is no tile of that turn."""
    stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    publish(records, stage, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, WARPS)
    mbarrier.arrive(q_full.index(stage), count=1)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_boxes, q_more, k_boxes, k_more, v_boxes, records, q_full, q_empty,
    k_full, k_empty, v_full, v_empty, table_ptr, tile_starts_ptr, num_tiles_ptr, counter_ptr,
    query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, programs, num_ranges,
    table_row, window, chunk, lookback, HEADS: gl.constexpr, GROUP: gl.constexpr,
    PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, KV_TILE: gl.constexpr, HALVES: gl.constexpr,
    EXTRA: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """One warp: everything that is loaded, in the order in which it is consumed.

    Tiles differ in length, and so do multiprocessors in speed: after its first tile a program takes
    the next that nobody took.
    """
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    # The producer has no register left for it with three warp groups, nor, on Triton 3.9, ranges.
    LATE: gl.constexpr = WARP_GROUPS == 2 and not RANGES
    # Of narrow heads keys of a turn and values of the one before are free together: behind keys,
    # values need not be waited for.
    JOINT: gl.constexpr = is_joint(HALVES * 64, 0)
    MORE: gl.constexpr = 1 if JOINT else 0
    v_room = k_empty if JOINT else v_empty
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * HEADS
    work = gl.program_id(0)
    turn = 0
    done = 0
    head, req, row, left, position, kv_len, causal, start, low, high = tile_at(
        gl.minimum(work, total - 1), num_tiles, programs, tile_starts_ptr, query_start_ptr,
        seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, num_ranges, window, chunk, lookback, HEADS,
        GROUP // PACKED, TOKENS, KV_TILE, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
    )  # fmt: skip
    while work < total:
        # A table has fewer than 2^31 entries.
        table = req * table_row
        if BLOCK_SIZE == 0:
            # Keys lie as queries do.
            table = row - position
        kv_head = head * PACKED // GROUP
        _load_keys(
            k_desc, table_ptr, table, high - 1, start, kv_len, kv_head, done, done, k_full, k_empty,
            k_boxes, k_more, KV_TILE, HALVES, EXTRA, BLOCK_SIZE, RUN, STAGES,
        )  # fmt: skip
        load_queries(
            turn, q_desc, q_boxes, q_more, records, q_full, q_empty, head, req, row, left, position,
            kv_len, causal, start, low, high, PACKED, WARP_GROUPS, HALVES, EXTRA, Q_STAGES, 1,
        )  # fmt: skip
        # In the midst of loads it costs nothing: what is asked for next has to wait for room. Late,
        # since whoever takes one of the last tiles early ends after all others.
        count = high - low
        if not LATE or count == 1:
            work = next_tile(counter_ptr, total, programs)
        for i in range(1, count):
            _load_keys(
                k_desc, table_ptr, table, gl.maximum(high - 1 - i, 0), start, kv_len, kv_head,
                done + i, done + i, k_full, k_empty, k_boxes, k_more, KV_TILE, HALVES, EXTRA,
                BLOCK_SIZE, RUN, STAGES,
            )  # fmt: skip
            _load_keys(
                v_desc, table_ptr, table, high - i, start, kv_len, kv_head, done + i - 1,
                done + i - 1, v_full, v_room, v_boxes, v_boxes, KV_TILE, HALVES, 0, BLOCK_SIZE, RUN,
                STAGES, not JOINT,
            )  # fmt: skip
            if LATE:
                # As a maximum of both, ptxas of Triton 3.7 has a register too few.
                if (i == count - _LEAD) | ((count <= _LEAD) & (i == 1)):
                    work = next_tile(counter_ptr, total, programs)
        done += count
        # Before the last values, for which there is no room yet: the keys of the next tile are to
        # be asked for right behind them, and where it is takes thousands of clocks to find out.
        last, first_key, keys = low, start, kv_len
        head, req, row, left, position, kv_len, causal, start, low, high = tile_at(
            gl.minimum(work, total - 1), num_tiles, programs, tile_starts_ptr, query_start_ptr,
            seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, num_ranges, window, chunk, lookback,
            HEADS, GROUP // PACKED, TOKENS, KV_TILE, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
        )  # fmt: skip
        _load_keys(
            v_desc, table_ptr, table, last, first_key, keys, kv_head, done - 1, done - 1 + MORE,
            v_full, v_room, v_boxes, v_boxes, KV_TILE, HALVES, 0, BLOCK_SIZE, RUN, STAGES,
        )  # fmt: skip
        turn += 1
    say_the_end(turn, records, q_full, q_empty, Q_STAGES, 1)
