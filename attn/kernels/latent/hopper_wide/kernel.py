"""Latent attention on Hopper: decode and verify over a cache of 512 latent and 64 rotary columns.

Rows of 64 (query tokens x query heads) go through two warp groups that multiply, each with half of
the output's columns; a latent row is read once, as the key and, in its first 512 columns, as the
value.

Every program takes as many tiles of keys as any other, and rows are cut wherever that leads: a
state is 128 KiB, all that registers hold, and one for every few hundred keys, kept apart so that a
row's bits did not depend on its batch, cost a quarter of the time on an H200. So a program has at
most two parts of rows, its first and its last, and what it has of them is folded by another kernel,
:mod:`attn.kernels.latent.hopper_wide.fold`: whoever came last would fold the parts of a row by
itself. The bits of a batch are those of its lengths, in every launch.

No page is read of which no row of the tile sees a key: its place is filled with zeros by a box
outside the cache. Slots past the end of the request share a page with live ones and may hold
anything; as values they are overwritten with zeros, since zero times NaN is NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.lang.compat import wait_for_kernels_before
from attn.kernels.lang.constants import LOG2E
from attn.kernels.latent.hopper_wide.consumer import consume_latents
from attn.kernels.latent.hopper_wide.producer import produce_latents


@gluon.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr"],
)
def hopper_mla_kernel(
    query_ptr,
    k_desc,
    cache_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    table_row,
    cache_block,
    scale,
    HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    QUERY_TOKEN: gl.constexpr,
    QUERY_HEAD: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    EARLY: gl.constexpr,
    PREFETCH: gl.constexpr,
    LSE: gl.constexpr,
):
    """Attention of the plan's rows, and states of those that are cut; grid ``(groups * HEADS,)``.

    Descriptor: latent rows ``[N, BLOCK_SIZE, 576]`` in boxes of RUN tokens and 64 columns; the same
    by its address, for prefetches. Query ``[T, H, 576]``, out ``[T, H, 512]``, LSE ``[T, H]``;
    rows and shares of the plan. Of each program two states fp32 ``[TILE_HEADS * QUERY_TOKENS,
    512]``: of a row that another program began, and of one that goes on in another; sums
    ``[2, TILE_HEADS * QUERY_TOKENS]`` of each, maximum (in units of log 2) and sum.
    """
    DTYPE: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    RUNS: gl.constexpr = 64 // RUN
    factor = scale * LOG2E
    # Registers of warp group 1 and of the producer: the rest is warp group 0's. Triton 3.9 keeps
    # more in warp group 1 where EARLY does not bind it.
    SECOND: gl.constexpr = 224 if EARLY else 248
    PRODUCER: gl.constexpr = 56 if EARLY else 40
    # Of each pair of blocks: left half, right half, rope.
    left_boxes = gl.allocate_shared_memory(DTYPE, [8 * RUNS, 1, RUN, 64], STAGES)
    right_boxes = gl.allocate_shared_memory(DTYPE, [8 * RUNS, 1, RUN, 64], STAGES)
    rope_boxes = gl.allocate_shared_memory(DTYPE, [2 * RUNS, 1, RUN, 64], STAGES)
    # Left half, right half; rope apart, so that the halves are all of an allocation: as such, and
    # no other way, Triton 3.8 reads it as tiles.
    q_boxes = gl.allocate_shared_memory(DTYPE, [8, 64, 64], LAYOUT)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    p = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    m_first = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m_second = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    sums_of = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    # Of each pair: rope, left and right half of both blocks.
    full = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    # Weights of either block, sums of either warp group.
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    loaded = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(loaded.index(0), count=2)
    # TMA sees barriers by another way than threads do.
    fence_async_shared()
    wait_for_kernels_before()
    gl.warp_specialize(
        [
            (consume_latents, (query_ptr, q_boxes, q_rope, left_boxes, right_boxes, rope_boxes, p,
                m_first, m_second, sums_of, full, empty, ready, loaded.index(0), out_ptr, lse_ptr,
                rows_ptr, shares_ptr, states_ptr, sums_ptr, factor, 0, HEADS, HEAD_LOOPS, GROUP,
                TILE_HEADS, QUERY_TOKENS, DTYPE, RUN, QUERY_TOKEN, QUERY_HEAD, OUT_TOKEN, OUT_HEAD,
                LSE_TOKEN, EARLY, LSE)),
            (consume_latents, (query_ptr, q_boxes, q_rope, left_boxes, right_boxes, rope_boxes, p,
                m_first, m_second, sums_of, full, empty, ready, loaded.index(0), out_ptr, lse_ptr,
                rows_ptr, shares_ptr, states_ptr, sums_ptr, factor, 1, HEADS, HEAD_LOOPS, GROUP,
                TILE_HEADS, QUERY_TOKENS, DTYPE, RUN, QUERY_TOKEN, QUERY_HEAD, OUT_TOKEN, OUT_HEAD,
                LSE_TOKEN, EARLY, LSE)),
            (produce_latents, (k_desc, cache_ptr, rope_boxes, left_boxes, right_boxes, full, empty,
                table_ptr, rows_ptr, shares_ptr, table_row, cache_block, HEADS, HEAD_LOOPS, RUN,
                BLOCK_SIZE, PREFETCH)),
        ],
        [4, 1],
        [SECOND, PRODUCER],
    )  # fmt: skip
