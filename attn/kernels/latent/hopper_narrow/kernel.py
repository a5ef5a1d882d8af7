"""The narrow Hopper latent kernel: decode and verify by work items of up to 16 query rows.

It serves requests of at most 16 rows (query tokens x query heads), and requests of any size if the
cache is e4m3 or the layer asks for batch invariance.

**Products by warp.** Each warp multiplies by itself (``mma_v2``). A product of a warp group would
compute 64 rows for 16, and its state would be as large, which leaves no room for a second state.
Here registers hold two: the state of the current segment, and the folded state of all segments
before it. Work items are cut and folded like those of :mod:`attn.kernels.dense.decode`, so the bits
of a work item do not depend on the batch.

**e4m3.** A latent row of e4m3 is 512 bytes of latent and 64 bytes of rotary key, half of a 16-bit
row. Bytes are converted exactly to fp16 in registers, on their way into an operand: once along
columns for scores, once along keys for the output. Products of warp groups need their operands in
shared memory, and converting them there would take more of its bandwidth than products leave. The
scale of the cache multiplies scores and the output.

**Tiles.** A tile is 64 keys of 16 bits or 128 keys of e4m3, the same number of bytes. Tiles of half
the size took a fifth longer: shared memory is the limit with e4m3, and queries are read from it
once a tile.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_decode.parts import FIELDS, load_work_item, share_at
from attn.kernels.dense.hopper_decode.producer import pages_of
from attn.kernels.lang.compat import async_load, reinterpret, wait_for_kernels_before
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.structures import causal_mask
from attn.kernels.latent.hopper_narrow.consumer import consume_narrow

_REGISTERS = tl.constexpr(40)
"""Registers of a thread of the producer."""


@gluon.jit
def produce_narrow(
    k_desc, rope_desc, left_boxes, right_boxes, rope_boxes, full, empty, table_ptr, rows_ptr,
    shares_ptr, table_row, HEADS: gl.constexpr, HEAD_LOOPS: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr, KV_TILE: gl.constexpr, RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, E4M3: gl.constexpr,
):  # fmt: skip
    """Load the latent rows of the program's share, tile after tile; one warp runs this."""
    # Boxes of half a latent row. A box has 64 columns: elements, or words of two e4m3.
    BOXES: gl.constexpr = 2 if E4M3 else 4
    ROW_BYTES: gl.constexpr = 576 if E4M3 else 1152
    RUNS: gl.constexpr = KV_TILE // RUN
    run = gl.arange(0, RUNS, layout=gl.BlockedLayout([RUNS], [32], [1], [0]))
    mask = causal_mask()
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    turn = 0
    for r in range(first_row, past_row):
        work = load_work_item(r, 0, mine, fields, begin, mask, KV_TILE, SEGMENT_UNIT)
        start, low, high, kv_len = work.start, work.low, work.high, work.kv_len
        # A block table has fewer than 2^31 entries, so that 32 bits hold the offset.
        table = table_ptr + work.req * table_row
        pages = pages_of(table, low, start, kv_len, KV_TILE, RUN, BLOCK_SIZE)
        for tile in range(low, high):
            stage = turn % STAGES
            # Page ids are loaded one tile ahead; those past the part's last tile are not used.
            after = gl.minimum(tile + 1, high - 1)
            ahead = pages_of(table, after, start, kv_len, KV_TILE, RUN, BLOCK_SIZE)
            # A fresh barrier lets parity 1 pass at once.
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), KV_TILE * ROW_BYTES)
            for i in range(RUNS):
                # Page -1 is outside the cache, where TMA fills a box with zeros.
                page = gl.max(gl.where(run == i, pages, -1), 0)
                within = (tile * KV_TILE + i * RUN) % BLOCK_SIZE
                async_load(
                    rope_desc, [page, within, 2 * BOXES * 64], full.index(stage),
                    rope_boxes.index(stage * RUNS + i),
                )  # fmt: skip
                for box in gl.static_range(BOXES):
                    async_load(
                        k_desc, [page, within, box * 64], full.index(stage),
                        left_boxes.index((stage * BOXES + box) * RUNS + i),
                    )  # fmt: skip
                    async_load(
                        k_desc, [page, within, (BOXES + box) * 64], full.index(stage),
                        right_boxes.index((stage * BOXES + box) * RUNS + i),
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
    SEGMENT_GROUPS: gl.constexpr,
    AREA: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr,
    KV_TILE: gl.constexpr,
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
    E4M3: gl.constexpr,
):
    """Attention of the plan's work items; grid ``(groups * HEADS,)``, eight consumer warps and one
    producer warp.

    Query is ``[T, H, 576]``, out ``[T, H, 512]``, LSE ``[T, H]`` fp32, ``k_scale`` an fp32 scalar.
    The descriptors are of latent rows ``[N, BLOCK_SIZE, 576]`` in boxes of RUN tokens and 64
    columns. With E4M3 they are of ``[N, BLOCK_SIZE, 288]`` int16 words of two elements, in boxes of
    RUN tokens and 64 words, or 32 words for the rotary part.

    Names and meaning of the other arguments are those of
    :func:`attn.kernels.dense.decode.decode_kernel`.
    """
    RUNS: gl.constexpr = KV_TILE // RUN
    BOXES: gl.constexpr = 2 if E4M3 else 4
    # KEY is the type of keys in shared memory, COMPUTE the type of products.
    KEY: gl.constexpr = gl.float8e4nv if E4M3 else k_desc.dtype
    COMPUTE: gl.constexpr = gl.float16 if E4M3 else k_desc.dtype
    BITS: gl.constexpr = 8 if E4M3 else 16
    ROPE: gl.constexpr = 64 if E4M3 else 128
    COLUMNS: gl.constexpr = BOXES * 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    THIN: gl.constexpr = gl.NVMMASharedLayout(ROPE, 16, 3)
    VALUES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # TMA writes boxes. The same bytes are also seen as tiles of keys, tiles of values, and rows.
    WORD: gl.constexpr = k_desc.dtype
    left_boxes = gl.allocate_shared_memory(WORD, [STAGES * BOXES * RUNS, 1, RUN, 64], WIDE)
    right_boxes = gl.allocate_shared_memory(WORD, [STAGES * BOXES * RUNS, 1, RUN, 64], WIDE)
    rope_boxes = gl.allocate_shared_memory(WORD, [STAGES * RUNS, 1, RUN, ROPE // 2], THIN)
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    k_left = reinterpret(left_boxes, KEY, [STAGES, KV_TILE, 256], KEYS)
    k_right = reinterpret(right_boxes, KEY, [STAGES, KV_TILE, 256], KEYS)
    ROPE_KEYS: gl.constexpr = gl.NVMMASharedLayout(ROPE, BITS, 2)
    k_rope = reinterpret(rope_boxes, KEY, [STAGES, KV_TILE, 64], ROPE_KEYS)
    v_left = reinterpret(left_boxes, WORD, [STAGES, KV_TILE, COLUMNS], VALUES)
    v_right = reinterpret(right_boxes, WORD, [STAGES, KV_TILE, COLUMNS], VALUES)
    left_rows = reinterpret(left_boxes, gl.int32, [STAGES * BOXES * KV_TILE, 32], FLAT)
    right_rows = reinterpret(right_boxes, gl.int32, [STAGES * BOXES * KV_TILE, 32], FLAT)
    QUERY: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_left = gl.allocate_shared_memory(COMPUTE, [16, 256], QUERY)
    q_right = gl.allocate_shared_memory(COMPUTE, [16, 256], QUERY)
    q_rope = gl.allocate_shared_memory(COMPUTE, [16, 64], QUERY)
    # Warps exchange the maxima of rows here, and weights on their way to being an operand.
    exchange = gl.allocate_shared_memory(
        gl.float32, [16, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turned = gl.allocate_shared_memory(COMPUTE, [16, KV_TILE], TURNED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # TMA sees memory through another proxy than threads do: make the barriers visible to it.
    fence_async_shared()
    wait_for_kernels_before()
    gl.warp_specialize(
        [
            (consume_narrow, (query_ptr, q_left, q_right, q_rope, k_left, k_right, k_rope, v_left,
                v_right, left_rows, right_rows, exchange, turned, full, empty, out_ptr, lse_ptr,
                k_scale_ptr, rows_ptr, total_ptr, starts_ptr, shares_ptr, counters_ptr, states_ptr,
                sums_ptr, scale * LOG2E, groups, HEADS, HEAD_LOOPS, GROUP, TILE_HEADS,
                QUERY_TOKENS, SLOTS, SEGMENT_GROUPS, AREA, SEGMENT_UNIT, KV_TILE, RUN, STAGES,
                QUERY_TOKEN, QUERY_HEAD, OUT_TOKEN, OUT_HEAD, LSE_TOKEN, FINISH_ROWS, FINISH_WIDTH,
                LSE, E4M3)),
            (produce_narrow, (k_desc, rope_desc, left_boxes, right_boxes, rope_boxes, full, empty,
                table_ptr, rows_ptr, shares_ptr, table_row, HEADS, HEAD_LOOPS, SEGMENT_UNIT,
                KV_TILE, RUN, BLOCK_SIZE, STAGES, E4M3)),
        ],
        [1],
        [_REGISTERS],
    )  # fmt: skip
