"""The narrow Hopper latent kernel: decode and verify by work items of up to 16 query rows.

It serves requests of few rows (query tokens x query heads), and requests of any size if the
layer asks for batch invariance.

**Products by warp.** Each warp multiplies by itself (``mma_v2``). A product of a warp group would
compute 64 rows for 16, and its state would be as large, which leaves no room for a second state.
Here registers hold two: the state of the current segment, and the folded state of the segments
before it in its block of four. Shared memory holds the folded state of all blocks before that.
Work items are cut like those of :mod:`attn.kernels.dense.decode`, and folded as
:mod:`attn.kernels.latent.hopper_narrow.finish` says, so the bits of a work item do not depend on
the batch.

**e4m3.** A latent row of e4m3 is 512 bytes of latent and 64 bytes of rotary key, half of a 16-bit
row. Bytes are converted exactly to fp16 in registers, on their way into an operand: once along
columns for scores, once along keys for the output. The scale of the cache multiplies scores and the
output.

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
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import Out, Plan, Tile, causal_mask
from attn.kernels.latent.hopper_narrow.consumer import consume_narrow
from attn.kernels.latent.structures import (
    LatentCache,
    LatentQuery,
    NarrowRing,
    NarrowRoom,
    clear_padding,
)

_REGISTERS = tl.constexpr(40)
"""Registers of a thread of the producer."""
_MANY_RUNS_REGISTERS = tl.constexpr(48)
"""Registers of a thread of the producer where a tile of 16-bit rows has several runs of tokens,
whose pages lie in registers. Over e4m3 the consumer needs these registers."""


@gluon.jit
def _load_tile(key_tile, stage, pages, cache, ring):
    """Ask TMA for a tile of latent rows, into the boxes of stage ``stage``.

    ``pages`` ``[RUNS]`` int32 are the pages of the tile's runs of tokens.
    """
    RUNS: gl.constexpr = ring.KV_TILE // ring.RUN
    run = gl.arange(0, RUNS, layout=gl.BlockedLayout([RUNS], [32], [1], [0]))
    mbarrier.expect(ring.full.index(stage), ring.KV_TILE * ring.ROW_BYTES)
    for i in range(RUNS):
        # Page -1 is outside the cache, where TMA fills a box with zeros.
        page = gl.max(gl.where(run == i, pages, -1), 0)
        within = (key_tile * ring.KV_TILE + i * ring.RUN) % cache.BLOCK_SIZE
        async_load(
            cache.rope_desc, [page, within, 2 * ring.BOXES * 64], ring.full.index(stage),
            ring.rope_boxes.index(stage * RUNS + i),
        )  # fmt: skip
        for box in gl.static_range(ring.BOXES):
            async_load(
                cache.k_desc, [page, within, box * 64], ring.full.index(stage),
                ring.left_boxes.index((stage * ring.BOXES + box) * RUNS + i),
            )  # fmt: skip
            async_load(
                cache.k_desc, [page, within, (ring.BOXES + box) * 64], ring.full.index(stage),
                ring.right_boxes.index((stage * ring.BOXES + box) * RUNS + i),
            )  # fmt: skip


@gluon.jit
def produce_narrow(num_rows, cache, ring, plan, mask, out, HEADS: gl.constexpr):
    """Load the latent rows of the program's share, tile after tile; then clear padding.

    One warp runs this. It is done before the consumers are, so that padding costs no time.
    """
    KV_TILE: gl.constexpr = ring.KV_TILE
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    turn = 0
    for r in range(first_row, past_row):
        work = load_work_item(r, 0, mine, fields, begin, mask, KV_TILE, plan.SEGMENT_UNIT)
        start, low, high, kv_len = work.start, work.low, work.high, work.kv_len
        # A block table has fewer than 2^31 entries, so that 32 bits hold the offset.
        table = cache.table_ptr + work.req * cache.table_row
        pages = pages_of(table, low, start, kv_len, KV_TILE, ring.RUN, cache.BLOCK_SIZE)
        for key_tile in range(low, high):
            stage = turn % ring.STAGES
            # Page ids are loaded one tile ahead; those past the part's last tile are not used.
            after = gl.minimum(key_tile + 1, high - 1)
            ahead = pages_of(table, after, start, kv_len, KV_TILE, ring.RUN, cache.BLOCK_SIZE)
            # A fresh barrier lets parity 1 pass at once.
            mbarrier.wait(ring.empty.index(stage), ((turn // ring.STAGES) & 1) ^ 1)
            _load_tile(key_tile, stage, pages, cache, ring)
            pages = ahead
            turn += 1
        begin = 0
        fields = plan.rows_ptr + ((r + 1) // plan.HEAD_LOOPS) * FIELDS
    clear_padding(num_rows, plan, out, opaque_zero(), HEADS)


@gluon.jit(
    do_not_specialize=[
        *("groups", "table_row", "num_rows"),
        *("query_token", "query_head", "rotary_token", "rotary_head"),
    ],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "k_scale_ptr"],
)
def hopper_mla_narrow_kernel(
    query_ptr,
    rotary_ptr,
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
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    num_rows,
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

    Of the ``num_rows`` rows of output and LSE, those that no work item has are cleared.

    Query is ``[T, H, 512]`` and rotary ``[T, H, 64]``, whose strides of tokens and heads are in
    units of 16 bytes; out is ``[T, H, 512]``, LSE ``[T, H]`` fp32, ``k_scale`` an fp32 scalar.
    The descriptors are of latent rows ``[N, BLOCK_SIZE, 576]`` in boxes of RUN tokens and 64
    columns. With E4M3 they are of ``[N, BLOCK_SIZE, 288]`` int16 words of two elements, in boxes of
    RUN tokens and 64 words, or 32 words for the rotary part.

    Names and meaning of the other arguments are those of
    :func:`attn.kernels.dense.decode.decode_kernel`.
    """
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])
    # KEY is the type of keys in shared memory, COMPUTE the type of products.
    KEY: gl.constexpr = gl.float8e4nv if E4M3 else k_desc.dtype
    COMPUTE: gl.constexpr = gl.float16 if E4M3 else k_desc.dtype
    mask = causal_mask()
    plan = Plan(
        rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
        counters_ptr=counters_ptr, states_ptr=states_ptr, sums_ptr=sums_ptr, groups=groups,
        HEADS=HEADS, HEAD_LOOPS=HEAD_LOOPS, HEAD_TILES=1, SLOTS=SLOTS,
        SEGMENT_GROUPS=SEGMENT_GROUPS, AREA=AREA, SEGMENT_UNIT=SEGMENT_UNIT,
    )  # fmt: skip
    cache = LatentCache(
        k_desc=k_desc, rope_desc=rope_desc, table_ptr=table_ptr, table_row=table_row,
        k_scale_ptr=k_scale_ptr, cache_ptr=None, cache_block=0,
        BLOCK_SIZE=BLOCK_SIZE, PREFETCH=False, E4M3=E4M3,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
        out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False, FP8_OUT=False,
        LSE=LSE,
    )  # fmt: skip
    tile = Tile(
        GROUP=GROUP, TILE_HEADS=TILE_HEADS, USED=TILE_HEADS * QUERY_TOKENS, ROWS=16, SIZE=512,
        WIDTH=512,
        DTYPE=COMPUTE, E4M3=E4M3, SCORES=OUTPUT, OUTPUT=OUTPUT, CONSUMERS=1,
        FINISH_ROWS=FINISH_ROWS, FINISH_WIDTH=FINISH_WIDTH,
    )  # fmt: skip
    RUNS: gl.constexpr = KV_TILE // RUN
    BOXES: gl.constexpr = 2 if E4M3 else 4
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
    q_left = gl.allocate_shared_memory(COMPUTE, [1, 16, 256], QUERY)
    q_right = gl.allocate_shared_memory(COMPUTE, [1, 16, 256], QUERY)
    q_rope = gl.allocate_shared_memory(COMPUTE, [1, 16, 64], QUERY)
    # Warps exchange the maxima of rows here, and weights on their way to being an operand.
    exchange = gl.allocate_shared_memory(
        gl.float32, [16, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    turned = gl.allocate_shared_memory(COMPUTE, [16, KV_TILE], TURNED)
    # The fold of a part's blocks of segments, which registers have no room for.
    PREFIX: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    prefix = gl.allocate_shared_memory(gl.float32, [1, 16, 512], PREFIX)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    prefix_sums = gl.allocate_shared_memory(gl.float32, [2, 16], SUMS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    # TMA sees memory through another proxy than threads do: make the barriers visible to it.
    fence_async_shared()
    wait_for_kernels_before()
    query = LatentQuery(
        query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token, query_head=query_head,
        rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
    )  # fmt: skip
    ring = NarrowRing(
        left_boxes=left_boxes, right_boxes=right_boxes, rope_boxes=rope_boxes, k_left=k_left,
        k_right=k_right, k_rope=k_rope, v_left=v_left, v_right=v_right, left_rows=left_rows,
        right_rows=right_rows, full=full, empty=empty, STAGES=STAGES, BOXES=BOXES,
        ROW_BYTES=576 if E4M3 else 1152, KV_TILE=KV_TILE, RUN=RUN,
    )  # fmt: skip
    room = NarrowRoom(
        q_left=q_left, q_right=q_right, q_rope=q_rope, exchange=exchange, turned=turned,
        prefix=prefix, prefix_sums=prefix_sums,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume_narrow, (query, cache, ring, room, plan, mask, out, tile)),
            (produce_narrow, (num_rows, cache, ring, plan, mask, out, GROUP)),
        ],
        [1],
        [_REGISTERS if RUNS == 1 or E4M3 else _MANY_RUNS_REGISTERS],
    )
