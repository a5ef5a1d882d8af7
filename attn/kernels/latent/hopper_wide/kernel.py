"""The wide Hopper latent kernel: decode and verify over rows of 512 latent and 64 rotary columns.

A work item is up to 64 query rows (query tokens x query heads). Two warp groups multiply, each with
half of the output's columns. A row of the cache is read once: all of it is the key, and its first
512 columns are the value.

Over 16 bits these two also compute scores (:mod:`attn.kernels.latent.hopper_wide.consumer`). Over
e4m3 another warp group does (:mod:`attn.kernels.latent.hopper_wide.scorer`), by products of e4m3,
and the two convert values to fp16 (:mod:`attn.kernels.latent.hopper_wide.columns`).

**Cuts.** Every program takes the same number of key tiles, and a work item is cut wherever that
falls. The state of 64 query rows is 128 KiB, all that registers hold. Keeping one such state for
every few hundred keys, so that a request's bits do not depend on its batch, took a quarter of the
time on an H200. Instead a program has at most two incomplete items, its first and its last. It
stores the output that their keys alone would give, in the output's type, and the LSE. Another
kernel, :mod:`attn.kernels.latent.hopper_wide.fold`, folds these parts. The result depends on the
lengths in the batch, and is the same in every launch.

**Dead keys.** A page is not read if no query row sees a key of it; TMA fills its place with zeros,
by a box outside the cache. Slots past the end of a request share a page with live slots and may
hold anything. As values they are overwritten with zeros, since zero times NaN is NaN.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.lang.compat import let_kernels_behind_start, wait_for_kernels_before
from attn.kernels.lang.structures import Out, Plan, Tile
from attn.kernels.latent.hopper_wide.columns import add_latents
from attn.kernels.latent.hopper_wide.consumer import consume_latents
from attn.kernels.latent.hopper_wide.parts import BLOCK, BUFFERS, HALF
from attn.kernels.latent.hopper_wide.producer import produce_latents
from attn.kernels.latent.hopper_wide.scorer import KEEPS_PLACE, LOOPS, weigh_latents
from attn.kernels.latent.structures import E4m3Room, LatentCache, LatentQuery, WideRing, WideRoom

_SECOND = tl.constexpr(232)
"""Registers of a thread of warp group 1. Warp group 0 has what is left: 216."""
_PRODUCER = tl.constexpr(56)
"""Registers of a thread of the producer. With fewer, Triton 3.9 spills values that both warp group
1 and the producer compute from the thread's number, since the producer's code keeps them."""
_COLUMNS = tl.constexpr(176)
"""Registers of a thread of warp group 1 over e4m3. Warp group 0 has as many."""
_SCORER = tl.constexpr(128)
"""Registers of a thread of the scorer, which keeps two sets of sums: of the run of products under
way, and of the runs before it."""
_MORE_COLUMNS = tl.constexpr(184)
"""Registers of a thread of warp groups 0 and 1 over e4m3, where the scorer needs fewer. With 176
registers Triton 3.8 and 3.9 spill there."""
_FEWER_SCORER = tl.constexpr(120 if LOOPS else 112)
"""Registers of a thread of the scorer, where its queries are rounded, its sums keep their place, or
its last runs of products are a loop."""
_PRODUCER_OF_E4M3 = tl.constexpr(24 if LOOPS else 32)
"""Registers of a thread of the producer over e4m3."""


@gluon.jit(
    do_not_specialize=[
        *("table_row", "num_rows"),
        *("query_token", "query_head", "rotary_token", "rotary_head"),
    ],
    do_not_specialize_on_alignment=["table_ptr", "lse_ptr", "k_scale_ptr"],
)
def hopper_mla_kernel(
    query_ptr,
    rotary_ptr,
    k_desc,
    rope_desc,
    cache_ptr,
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
    cache_block,
    scale,
    HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    EARLY: gl.constexpr,
    PREFETCH: gl.constexpr,
    LSE: gl.constexpr,
    E4M3: gl.constexpr,
    TERMS: gl.constexpr,
):
    """Attention of the plan's work items, and parts of those cut; grid ``(groups * HEADS,)``.

    Of the ``num_rows`` rows of output and LSE, those that no work item has are cleared.

    ``k_desc`` describes latent rows ``[N, BLOCK_SIZE, 576]`` in boxes of RUN tokens and 64 columns;
    ``cache_ptr`` is their address, for prefetches, and ``cache_block`` the elements from page to
    page. With E4M3 rows are bytes of e4m3, which descriptors and ``cache_block`` count as words of
    two: ``k_desc`` ``[N, BLOCK_SIZE, 288]``, and ``rope_desc`` the same in boxes of 32 words.
    ``k_scale`` is an fp32 scalar then, queries are bf16, and a query element becomes the sum of
    TERMS e4m3 numbers: 2, or 1, which rounds it. Query is ``[T, H, 512]`` and rotary
    ``[T, H, 64]``, whose strides of tokens and heads are in units of 16 bytes; out is
    ``[T, H, 512]``, LSE ``[T, H]``; rows and shares are tensors of the plan.

    A program has two parts ``[TILE_HEADS * QUERY_TOKENS, 512]`` of the output's type among the
    states: first of a work item that another program began, then of an item that goes on in another
    program. A part's sums are ``[TILE_HEADS * QUERY_TOKENS]``, the LSE in units of log 2.
    """
    DTYPE: gl.constexpr = gl.float16 if E4M3 else k_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STAGES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    ROPES: gl.constexpr = gl.NVMMASharedLayout(64 if E4M3 else 128, 16, 3)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BOXES: gl.constexpr = BLOCK // RUN
    # Stages of left and right halves; and of weights.
    LEFT: gl.constexpr = 4 if E4M3 else 2
    RIGHT: gl.constexpr = 3 if E4M3 else 2
    PARTS: gl.constexpr = 2 + LEFT + RIGHT
    SIDE: gl.constexpr = 2 if E4M3 else 4
    STORED: gl.constexpr = gl.int16 if E4M3 else k_desc.dtype
    rotary_columns = k_desc
    rows_ptr_of = cache_ptr
    if E4M3:
        rotary_columns = rope_desc
        rows_ptr_of = cache_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
    query = LatentQuery(
        query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token, query_head=query_head,
        rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
    )  # fmt: skip
    cache = LatentCache(
        k_desc=k_desc, rope_desc=rotary_columns, table_ptr=table_ptr, table_row=table_row,
        k_scale_ptr=None, cache_ptr=rows_ptr_of, cache_block=cache_block, BLOCK_SIZE=BLOCK_SIZE,
        PREFETCH=PREFETCH, E4M3=E4M3,
    )  # fmt: skip
    # Work items are cut between any two tiles, so this plan has no segments.
    plan = Plan(
        rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
        counters_ptr=counters_ptr, states_ptr=states_ptr, sums_ptr=sums_ptr, groups=0, HEADS=HEADS,
        HEAD_LOOPS=HEAD_LOOPS, HEAD_TILES=1, SLOTS=0, SEGMENT_GROUPS=1, AREA=0, SEGMENT_UNIT=1,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
        out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False, FP8_OUT=False,
        LSE=LSE,
    )  # fmt: skip
    # Over e4m3 keys are the rows of scores, and columns those of the output: what comes from the
    # cache is the first operand of products.
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32 if E4M3 else 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64 if E4M3 else HALF, 16])
    tile = Tile(
        GROUP=GROUP, TILE_HEADS=TILE_HEADS, USED=TILE_HEADS * QUERY_TOKENS, ROWS=64, SIZE=2 * HALF,
        WIDTH=2 * HALF, DTYPE=DTYPE, E4M3=E4M3, SCORES=SCORES, OUTPUT=OUTPUT, CONSUMERS=2,
        FINISH_ROWS=0, FINISH_WIDTH=0,
    )  # fmt: skip
    # Both blocks of a tile of keys, of two tiles over e4m3: left half of the latents, right half,
    # rope.
    left_boxes = gl.allocate_shared_memory(STORED, [LEFT * SIDE * BOXES, 1, RUN, 64], STAGES)
    right_boxes = gl.allocate_shared_memory(STORED, [RIGHT * SIDE * BOXES, 1, RUN, 64], STAGES)
    rope_boxes = gl.allocate_shared_memory(STORED, [2 * BOXES, 1, RUN, 16 * SIDE], ROPES)
    # Queries: left half and right half in one allocation, rope in another. Triton 3.8 can read an
    # allocation as tiles only if the tiles are all of it.
    q_boxes = gl.allocate_shared_memory(DTYPE, [8, 64, 64], LAYOUT)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    weights = gl.allocate_shared_memory(DTYPE, [BUFFERS if E4M3 else 1, 64, 64], LAYOUT)
    references = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(PARTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(loaded.index(i), count=2)
    ring = WideRing(
        left_boxes=left_boxes, right_boxes=right_boxes, rope_boxes=rope_boxes, full=full,
        empty=empty, LEFT=LEFT, RIGHT=RIGHT, RUN=RUN, EARLY=EARLY,
    )  # fmt: skip
    if E4M3:
        grown = gl.allocate_shared_memory(gl.float32, [BUFFERS, 64], FLAT)
        flags = gl.allocate_shared_memory(gl.int32, [BUFFERS, 1], FLAT)
        votes = gl.allocate_shared_memory(gl.uint8, [128], FLAT)
        factors = gl.allocate_shared_memory(gl.float32, [64], FLAT)
        row_numbers = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
        cache_scale = gl.allocate_shared_memory(gl.float32, [1], FLAT)
        taken = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
        summed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        for i in gl.static_range(BUFFERS):
            mbarrier.init(taken.index(i), count=2)
        mbarrier.init(summed, count=1)
        e4m3_room = E4m3Room(
            q_boxes=q_boxes, q_rope=q_rope, weights=weights, references=references, grown=grown,
            flags=flags, votes=votes, factors=factors, row_numbers=row_numbers, scale=cache_scale,
            scale_ptr=k_scale_ptr, ready=ready, taken=taken, summed=summed, loaded=loaded,
            TERMS=TERMS,
        )  # fmt: skip
    else:
        m_second = gl.allocate_shared_memory(gl.float32, [64], FLAT)
        sums = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
        room = WideRoom(
            q_boxes=q_boxes, q_rope=q_rope, weights=weights, m_first=references, m_second=m_second,
            sums=sums, ready=ready, loaded=loaded,
        )  # fmt: skip
    # TMA sees memory through another proxy than threads do: make the barriers visible to it.
    fence_async_shared()
    wait_for_kernels_before()
    # Programs of the fold may start where multiprocessors are free. They load the plan before they
    # wait for this kernel, so this comes after the wait for the kernel that wrote it.
    let_kernels_behind_start()
    if E4M3:
        SCORER_NEEDS_FEWER: gl.constexpr = TERMS == 1 or KEEPS_PLACE or LOOPS
        gl.warp_specialize(
            [
                (add_latents, (0, query, ring, e4m3_room, plan, out, tile)),
                (add_latents, (1, query, ring, e4m3_room, plan, out, tile)),
                (weigh_latents, (ring, e4m3_room, plan, tile)),
                (produce_latents, (num_rows, cache, ring, e4m3_room, plan, out, GROUP)),
            ],
            [4, 4, 1],
            [
                _MORE_COLUMNS if SCORER_NEEDS_FEWER else _COLUMNS,
                _FEWER_SCORER if SCORER_NEEDS_FEWER else _SCORER,
                _PRODUCER_OF_E4M3,
            ],
        )
    else:
        gl.warp_specialize(
            [
                (consume_latents, (0, query, ring, room, plan, out, tile)),
                (consume_latents, (1, query, ring, room, plan, out, tile)),
                (produce_latents, (num_rows, cache, ring, room, plan, out, GROUP)),
            ],
            [4, 1],
            [_SECOND, _PRODUCER],
        )
