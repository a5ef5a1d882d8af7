"""The producer: one warp that asks TMA for queries, keys and values, in the order of their use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.hopper.compat import async_load
from attn.kernels.hopper.tiles import share_of, tile_at


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
    q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, table_ptr, tile_starts_ptr, num_tiles_ptr,
    query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr,
    num_reqs, programs, num_ranges, table_row, window, chunk, lookback, HEADS: gl.constexpr,
    GROUP: gl.constexpr, PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr, KV_TILE: gl.constexpr,
    HALVES: gl.constexpr, BLOCK_SIZE: gl.constexpr, RUN: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    RANGES: gl.constexpr, CLAMP: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """One warp: everything that is loaded, in the order in which it is consumed.

    SHARED: keys and values go through the same stages, one after the other.
    """
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    # Halves of a row of keys, and of a row of the query.
    BOXES: gl.constexpr = k_boxes.shape[0] * RUN // (STAGES * KV_TILE)
    BYTES: gl.constexpr = KV_TILE * BOXES * k_boxes.shape[4] * (1 if SHARED else 2)
    EACH: gl.constexpr = 2 if SHARED else 1
    turns = share_of(num_tiles_ptr, programs, HEADS)
    done = 0
    for turn in range(turns):
        head, req, begin, token, _, kv_len, _, start, low, high = tile_at(
            turn, tile_starts_ptr, num_tiles_ptr,
            query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr,
            num_reqs, programs, num_ranges, window, chunk, lookback, HEADS, TOKENS, KV_TILE, CAUSAL,
            WINDOW, CHUNK, RANGES, CLAMP,
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
        mbarrier.expect(q_full.index(stage), WARP_GROUPS * HALVES * 64 * 128)
        for part in gl.static_range(WARP_GROUPS):
            for half in gl.static_range(HALVES):
                async_load(
                    q_desc,
                    [begin + token + part * (64 // PACKED), head * PACKED, half * 64],
                    q_full.index(stage),
                    q_boxes.index((stage * WARP_GROUPS + part) * HALVES + half),
                )
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
