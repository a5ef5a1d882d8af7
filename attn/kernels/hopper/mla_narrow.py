"""Latent attention on Hopper over a cache of e4m3: decode and verify of up to 16 rows to a tile.

A latent row is 512 bytes of latent and 64 of rotary key, 576 together: half of what the kernel of
:mod:`attn.kernels.hopper.mla` reads. That one would have to widen every block in shared memory, and
its products, whose operands all come from there, are limited by what shared memory gives already.
So here products are by warp, and bytes are widened in registers on their way into an operand, which
is exact: once along columns for scores, once along keys for output. The scale of the cache is a
factor of scores and of the output.

A tile is 128 keys, 72 KiB; two are in shared memory, one of them on its way.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.hopper.compat import async_load, reinterpret, wait_for_kernels_before
from attn.kernels.hopper.decode_parts import FIELDS, part_at, share_at
from attn.kernels.hopper.decode_produce import pages_of
from attn.kernels.hopper.mla_narrow_consume import TILE, consume_narrow

_LOG2E = tl.constexpr(1.4426950408889634)
_REGISTERS = tl.constexpr(40)
"""Of the producer's thread."""


@gluon.jit
def produce_narrow(
    k_desc, rope_desc, left_boxes, right_boxes, rope_boxes, full, empty, table_ptr, rows_ptr,
    shares_ptr, table_row, HEADS: gl.constexpr, HEAD_LOOPS: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr, RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp: latent rows of all parts that the program takes, tile after tile."""
    RUNS: gl.constexpr = TILE // RUN
    run = gl.arange(0, RUNS, layout=gl.BlockedLayout([RUNS], [32], [1], [0]))
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    turn = 0
    for r in range(first_row, past_row):
        _, req, kv_len, _, _, _, start, low, high = part_at(
            r, mine, fields, begin, table_ptr, table_ptr, 0, 0, 1, 0, TILE, SEGMENT_UNIT, 1, False,
            False, False, False,
        )  # fmt: skip
        # A table has fewer than 2^31 entries.
        table = table_ptr + req * table_row
        pages = pages_of(table, low, start, kv_len, TILE, RUN, BLOCK_SIZE)
        for tile in range(low, high):
            stage = turn % STAGES
            # A tile ahead; past the last of the part it is not used.
            after = gl.minimum(tile + 1, high - 1)
            ahead = pages_of(table, after, start, kv_len, TILE, RUN, BLOCK_SIZE)
            # A fresh barrier lets parity 1 pass at once.
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), TILE * 576)
            for i in range(RUNS):
                # Outside the cache a box is zeros.
                page = gl.max(gl.where(run == i, pages, -1), 0)
                within = (tile * TILE + i * RUN) % BLOCK_SIZE
                # Words of two elements.
                async_load(
                    rope_desc, [page, within, 256], full.index(stage),
                    rope_boxes.index(stage * RUNS + i),
                )  # fmt: skip
                for half in gl.static_range(2):
                    async_load(
                        k_desc, [page, within, half * 64], full.index(stage),
                        left_boxes.index((stage * 2 + half) * RUNS + i),
                    )  # fmt: skip
                    async_load(
                        k_desc, [page, within, 128 + half * 64], full.index(stage),
                        right_boxes.index((stage * 2 + half) * RUNS + i),
                    )  # fmt: skip
            pages = ahead
            turn += 1
        begin = 0
        fields = rows_ptr + ((r + 1) // HEAD_LOOPS) * FIELDS


@gluon.jit(
    do_not_specialize=["groups", "table_row"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "k_scale_ptr"],
)
def hopper_mla_narrow_kernel(
    query_ptr,
    k_desc,
    rope_desc,
    out_ptr,
    lse_ptr,
    k_scale_ptr,
    table_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    table_row,
    scale,
    groups,
    HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    SLOTS: gl.constexpr,
    BUNDLES: gl.constexpr,
    AREA: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    STAGES: gl.constexpr,
    QUERY_TOKEN: gl.constexpr,
    QUERY_HEAD: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    FINISH_ROWS: gl.constexpr,
    FINISH_WIDTH: gl.constexpr,
    LSE: gl.constexpr,
):
    """Attention of the plan's rows; grid ``(groups * HEADS,)``, eight warps and one.

    Descriptors: latent rows ``[N, BLOCK_SIZE, 288]`` in int16 words of two elements, in boxes of
    RUN tokens and 64 words, and of 32 words for the rotary part. Query ``[T, H, 576]``, out
    ``[T, H, 512]``, LSE ``[T, H]``, ``k_scale`` a scalar; the rest as in
    :func:`attn.kernels.decode.decode_kernel`.
    """
    RUNS: gl.constexpr = TILE // RUN
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    THIN: gl.constexpr = gl.NVMMASharedLayout(64, 16, 3)
    VALUES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # What TMA writes, boxes; and the same bytes as tiles of keys, of values, and as rows.
    left_boxes = gl.allocate_shared_memory(gl.int16, [STAGES * 2 * RUNS, 1, RUN, 64], WIDE)
    right_boxes = gl.allocate_shared_memory(gl.int16, [STAGES * 2 * RUNS, 1, RUN, 64], WIDE)
    rope_boxes = gl.allocate_shared_memory(gl.int16, [STAGES * RUNS, 1, RUN, 32], THIN)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    k_left = reinterpret(left_boxes, gl.float8e4nv, [STAGES, TILE, 256], KEYS)
    k_right = reinterpret(right_boxes, gl.float8e4nv, [STAGES, TILE, 256], KEYS)
    k_rope = reinterpret(
        rope_boxes, gl.float8e4nv, [STAGES, TILE, 64], gl.NVMMASharedLayout(64, 8, 2)
    )
    v_left = reinterpret(left_boxes, gl.int16, [STAGES, TILE, 128], VALUES)
    v_right = reinterpret(right_boxes, gl.int16, [STAGES, TILE, 128], VALUES)
    left_rows = reinterpret(left_boxes, gl.int32, [STAGES * 2 * TILE, 32], FLAT)
    right_rows = reinterpret(right_boxes, gl.int32, [STAGES * 2 * TILE, 32], FLAT)
    # Read 8 bytes of a row at a time, four rows together: 32 bytes of each in other banks.
    QUERY: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 4, [1, 0])
    q_left = gl.allocate_shared_memory(gl.float16, [16, 256], QUERY)
    q_right = gl.allocate_shared_memory(gl.float16, [16, 256], QUERY)
    q_rope = gl.allocate_shared_memory(gl.float16, [16, 64], ROPE)
    # Where warps meet: maxima of rows, and weights on their way to being an operand.
    exchange = gl.allocate_shared_memory(
        gl.float32, [16, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    turned = gl.allocate_shared_memory(
        gl.float16, [16, TILE], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # TMA sees barriers by another way than threads do.
    fence_async_shared()
    wait_for_kernels_before()
    gl.warp_specialize(
        [
            (consume_narrow, (query_ptr, q_left, q_right, q_rope, k_left, k_right, k_rope, v_left,
                v_right, left_rows, right_rows, exchange, turned, full, empty, out_ptr, lse_ptr,
                k_scale_ptr, rows_ptr, total_ptr, starts_ptr, shares_ptr, counters_ptr, states_ptr,
                sums_ptr, scale * _LOG2E, groups, HEADS, HEAD_LOOPS, GROUP, TILE_HEADS,
                QUERY_TOKENS, SLOTS, BUNDLES, AREA, SEGMENT_UNIT, RUN, STAGES, QUERY_TOKEN,
                QUERY_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, FINISH_ROWS, FINISH_WIDTH, LSE)),
            (produce_narrow, (k_desc, rope_desc, left_boxes, right_boxes, rope_boxes, full, empty,
                table_ptr, rows_ptr, shares_ptr, table_row, HEADS, HEAD_LOOPS, SEGMENT_UNIT, RUN,
                BLOCK_SIZE, STAGES)),
        ],
        [1],
        [_REGISTERS],
    )  # fmt: skip
