"""The wide Hopper latent kernel: decode and verify over rows of 512 latent and 64 rotary columns.

A work item is up to 64 query rows (query tokens x query heads). Two consumer warp groups multiply,
each with half of the output's columns. A row of the cache is read once: all of it is the key, and
its first 512 columns are the value.

**Cuts.** Every program takes the same number of key tiles, and a work item is cut wherever that
falls. The state of 64 query rows is 128 KiB, all that registers hold. Keeping one such state for
every few hundred keys, so that a request's bits do not depend on its batch, took a quarter of the
time on an H200. Instead a program has at most two incomplete items, its first and its last. Another
kernel, :mod:`attn.kernels.latent.hopper_wide.fold`, folds their states. The result depends on the
lengths in the batch, and is the same in every launch.

**Dead keys.** A page is not read if no query row sees a key of it; TMA fills its place with zeros,
by a box outside the cache. Slots past the end of a request share a page with live slots and may
hold anything. As values they are overwritten with zeros, since zero times NaN is NaN.
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
    """Attention of the plan's work items, and states of those cut; grid ``(groups * HEADS,)``.

    ``k_desc`` describes latent rows ``[N, BLOCK_SIZE, 576]`` in boxes of RUN tokens and 64 columns;
    ``cache_ptr`` is their address, for prefetches. Query is ``[T, H, 576]``, out ``[T, H, 512]``,
    LSE ``[T, H]``; rows and shares are tensors of the plan.

    A program has two states, fp32 ``[TILE_HEADS * QUERY_TOKENS, 512]``: first of a work item that
    another program began, then of an item that goes on in another program. The sums of a state are
    ``[2, TILE_HEADS * QUERY_TOKENS]``: maxima in units of log 2, and sums.
    """
    DTYPE: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    RUNS: gl.constexpr = 64 // RUN
    factor = scale * LOG2E
    # Registers of warp group 1 and of the producer; warp group 0 has the rest. Without EARLY,
    # Triton 3.9 keeps more values in warp group 1.
    SECOND: gl.constexpr = 224 if EARLY else 248
    PRODUCER: gl.constexpr = 56 if EARLY else 40
    # Both blocks of a tile of keys: left half of the latents, right half, rope.
    left_boxes = gl.allocate_shared_memory(DTYPE, [8 * RUNS, 1, RUN, 64], STAGES)
    right_boxes = gl.allocate_shared_memory(DTYPE, [8 * RUNS, 1, RUN, 64], STAGES)
    rope_boxes = gl.allocate_shared_memory(DTYPE, [2 * RUNS, 1, RUN, 64], STAGES)
    # Queries: left half and right half in one allocation, rope in another. Triton 3.8 can read an
    # allocation as tiles only if the tiles are all of it.
    q_boxes = gl.allocate_shared_memory(DTYPE, [8, 64, 64], LAYOUT)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    p = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    m_first = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m_second = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    sums_of = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    # A barrier for each part of a block: 0 and 1 rope, 2 and 3 left half, 4 and 5 right half.
    full = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    # 0 and 1: the weights of either block are stored. 2 and 3: the sums of either warp group are.
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    loaded = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(loaded.index(0), count=2)
    # TMA sees memory through another proxy than threads do: make the barriers visible to it.
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
