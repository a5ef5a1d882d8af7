"""The producer: one warp that asks TMA for queries, keys and values, in the order of their use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.hopper.compat import async_load
from attn.kernels.hopper.tiles import publish, tile_at


@gluon.jit
def _load_keys(
    desc, table_ptr, table, tile, start, kv_len, kv_head, turn, full, empty, boxes,
    KV_TILE: gl.constexpr, HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr,
    STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Fill stage ``turn % STAGES`` with a tile of keys or values."""
    RUNS: gl.constexpr = KV_TILE // RUN
    COLUMNS: gl.constexpr = boxes.shape[4]
    stage = turn % STAGES
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for run in gl.static_range(RUNS):
        key = tile * KV_TILE + run * RUN
        live = (key < kv_len) & (key + RUN > start)
        # Outside the cache a box is zeros.
        page = gl.load(table_ptr + table + key // BLOCK_SIZE, mask=live, other=-1)
        for half in gl.static_range(HALVES):
            async_load(
                desc,
                [page, key % BLOCK_SIZE, kv_head, half * COLUMNS],
                full.index(stage),
                boxes.index((stage * HALVES + half) * RUNS + run),
            )


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, records, q_full, q_empty, k_full, k_empty,
    v_full, v_empty, table_ptr, tile_starts_ptr, num_tiles_ptr, counter_ptr, query_start_ptr,
    seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, programs, num_ranges, table_row, window, chunk,
    lookback, HEADS: gl.constexpr,
    GROUP: gl.constexpr, PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, KV_TILE: gl.constexpr,
    HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    RANGES: gl.constexpr, CLAMP: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """One warp: everything that is loaded, in the order in which it is consumed.

    Tiles differ in length, and so do multiprocessors in speed: after its first tile a program takes
    the next that nobody has taken. Programs count one tile ahead for each that they do, so that
    together they count to the number of tiles; who is last there sets the counter back.

    SHARED: keys and values go through the same stages, one after the other.
    """
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    # Halves of a row of keys, and of a row of the query.
    BOXES: gl.constexpr = k_boxes.shape[0] * RUN // (STAGES * KV_TILE)
    BYTES: gl.constexpr = KV_TILE * BOXES * k_boxes.shape[4] * (1 if SHARED else 2)
    EACH: gl.constexpr = 2 if SHARED else 1
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * HEADS
    work = gl.program_id(0)
    turn = 0
    done = 0
    while work < total:
        head, req, row, left, position, kv_len, causal, start, low, high = tile_at(
            work, num_tiles, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr,
            num_reqs, num_ranges, window, chunk, lookback, HEADS, TOKENS, KV_TILE, CAUSAL, WINDOW,
            CHUNK, RANGES, CLAMP,
        )  # fmt: skip
        # A table has fewer than 2^31 entries.
        table = req * table_row
        kv_head = head * PACKED // GROUP
        _load_keys(
            k_desc, table_ptr, table, high - 1, start, kv_len, kv_head, EACH * done, k_full,
            k_empty, k_boxes, KV_TILE, BOXES, BLOCK_SIZE, RUN, STAGES, BYTES,
        )  # fmt: skip
        stage = turn % Q_STAGES
        mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
        publish(records, stage, head, req, row, left, position, kv_len, causal, low, high)
        mbarrier.expect(q_full.index(stage), WARP_GROUPS * HALVES * 64 * 128)
        for part in gl.static_range(WARP_GROUPS):
            for half in gl.static_range(HALVES):
                async_load(
                    q_desc,
                    [row + part * (64 // PACKED), head * PACKED, half * 64],
                    q_full.index(stage),
                    q_boxes.index((stage * WARP_GROUPS + part) * HALVES + half),
                )
        # Here it costs nothing: what is asked for next has to wait for room.
        taken = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
        if taken == total - 1:
            gl.store(counter_ptr, 0)
        work = programs + taken
        for i in range(1, high - low):
            _load_keys(
                k_desc, table_ptr, table, gl.maximum(high - 1 - i, 0), start, kv_len, kv_head,
                EACH * (done + i) - (EACH - 1), k_full, k_empty, k_boxes, KV_TILE, BOXES,
                BLOCK_SIZE, RUN, STAGES, BYTES,
            )  # fmt: skip
            _load_keys(
                v_desc, table_ptr, table, high - i, start, kv_len, kv_head,
                EACH * (done + i) - (2 - EACH), v_full, v_empty, v_boxes, KV_TILE, BOXES,
                BLOCK_SIZE, RUN, STAGES, BYTES,
            )  # fmt: skip
        done += high - low
        _load_keys(
            v_desc, table_ptr, table, low, start, kv_len, kv_head, EACH * done - 1, v_full, v_empty,
            v_boxes, KV_TILE, BOXES, BLOCK_SIZE, RUN, STAGES, BYTES,
        )  # fmt: skip
        turn += 1
    stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    publish(records, stage, 0, 0, 0, 0, 0, 0, 1, 0, 0)
    mbarrier.arrive(q_full.index(stage), count=1)
