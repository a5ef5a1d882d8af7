"""The wide Hopper kernel of sparse latent attention: tiles of 64 heads over listed rows of a cache.

Two consumer warp groups multiply, each with half of the output's columns. A third warp group, the
producer, gathers the rows of a token's list. A listed row is read once: all of it is the key, and
its first 512 columns are the value. With more than 64 heads a token has several tiles of heads.
They are neighbours in the grid, so all but one of them find the token's rows in the L2 cache.

The kernel for attention to all keys, :mod:`attn.kernels.latent.hopper_wide.kernel`, divides work
between warp groups in the same way. The portable twin is :mod:`attn.kernels.sparse.attend`; its
kernel ``fold_states_kernel`` folds the states that this kernel stores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.lang.compat import wait_for_kernels_before
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.structures import Out
from attn.kernels.sparse.hopper_wide.consumer import consume_listed
from attn.kernels.sparse.hopper_wide.dequantise import STORED_BLOCKS
from attn.kernels.sparse.hopper_wide.parts import HALF, THREADS
from attn.kernels.sparse.hopper_wide.producer import produce_listed
from attn.kernels.sparse.structures import (
    Division,
    LatentRows,
    Lists,
    Scratch,
    SparseQuery,
    StoredBlocks,
    WideQueries,
    WideRing,
    WideRoom,
    WideTile,
)


@gluon.jit(
    do_not_specialize=[
        *("ids_row", "topk", "tokens"),
        *("query_token", "query_head", "rotary_token", "rotary_head"),
    ],
    do_not_specialize_on_alignment=["ids_ptr", "lens_ptr", "lse_ptr", "sinks_ptr", "counters_ptr"],
)
def hopper_sparse_kernel(
    query_ptr,
    rotary_ptr,
    latent_ptr,
    sinks_ptr,
    ids_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    states_ptr,
    sums_ptr,
    counters_ptr,
    ids_row,
    topk,
    tokens,
    scale,
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    SEGMENT: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr,
    ROW_UNITS: gl.constexpr,
    ROPE_AT: gl.constexpr,
    SCALES_AT: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    HAS_LENS: gl.constexpr,
    BALANCED: gl.constexpr,
    SCALED: gl.constexpr,
    KEYS: gl.constexpr,
    EARLY: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    SECOND: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """Attention over listed rows; grid ``(programs,)``.

    There are ``T * PARTS * HEAD_TILES`` pieces of work for ``tokens`` T, and a program takes every
    ``programs``-th of them. With TOKENS above 1 there is a piece for each TOKENS tokens instead:
    lists and their lengths are then those of joint lists, ``[cdiv(T, TOKENS), topk]``, while
    queries, output and LSE are of tokens. With BALANCED, every program instead takes the same
    number of tiles, and a list may lie in two programs, which combine their states in
    :mod:`attn.kernels.sparse.finish`.

    Arguments are those of :func:`attn.kernels.sparse.attend.sparse_mla_kernel`, with these
    differences. Strides of queries are arguments, since they may differ from batch to batch; they,
    BLOCK_UNITS and ROW_UNITS are in units of 16 bytes. ROPE_AT and SCALES_AT are byte offsets of
    fields in a row. A pointer that a flag says is unused may be any. A tile is two blocks of KEYS
    keys. SECOND and PRODUCER are registers per thread of warp group 1 and of the producer; warp
    group 0 has the rest.
    """
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    lists = Lists(ids_ptr=ids_ptr, lens_ptr=lens_ptr, ids_row=ids_row, topk=topk, HAS_LENS=HAS_LENS)
    rows = LatentRows(
        latent_ptr=latent_ptr, scale_ptr=None, BLOCK_SIZE=BLOCK_SIZE, BLOCK_UNITS=BLOCK_UNITS,
        ROW_UNITS=ROW_UNITS, ROPE_AT=ROPE_AT, SCALES_AT=SCALES_AT,
    )  # fmt: skip
    division = Division(
        tokens=tokens, TOKENS=TOKENS, HEADS=HEADS, HEAD_TILES=HEAD_TILES, SEGMENT=SEGMENT,
        PARTS=PARTS, BALANCED=BALANCED,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
        out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=SINKS, FP8_OUT=False,
        LSE=LSE,
    )  # fmt: skip
    scratch = Scratch(states_ptr=states_ptr, sums_ptr=sums_ptr, counters_ptr=counters_ptr)
    # Both blocks of a tile of keys: left half of the latents, right half, rope.
    left_boxes = gl.allocate_shared_memory(DTYPE, [8, KEYS, 64], LAYOUT)
    right_boxes = gl.allocate_shared_memory(DTYPE, [8, KEYS, 64], LAYOUT)
    rope = gl.allocate_shared_memory(DTYPE, [2, KEYS, 64], LAYOUT)
    q_boxes = gl.allocate_shared_memory(DTYPE, [8, 64, 64], LAYOUT)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUT)
    p = gl.allocate_shared_memory(DTYPE, [1, 64, KEYS], gl.NVMMASharedLayout(2 * KEYS, 16, 2))
    m_first = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m_second = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    sums_of = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    # Which entries of either block list rows, and with joint lists for which tokens.
    gaps = gl.allocate_shared_memory(gl.int32 if TOKENS > 1 else gl.float32, [2, KEYS], FLAT)
    stored = StoredBlocks(left=gaps, right=gaps, rope=gaps, scales=gaps)
    if SCALED:
        # Blocks as the cache stores them, before conversion: left half, right half, rope, scales.
        WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        SCALES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        stored = StoredBlocks(
            left=gl.allocate_shared_memory(gl.int32, [STORED_BLOCKS, KEYS, 64], WORDS),
            right=gl.allocate_shared_memory(gl.int32, [STORED_BLOCKS, KEYS, 64], WORDS),
            rope=gl.allocate_shared_memory(gl.int32, [STORED_BLOCKS, KEYS, 32], WORDS),
            scales=gl.allocate_shared_memory(gl.int32, [STORED_BLOCKS, KEYS, 4], SCALES),
        )
    # A barrier for each part of a block: 0 and 1 rope, 2 and 3 the half that comes first, 4 and 5
    # the other half. Converted blocks become full as a whole, so ``full`` has one for each.
    full = gl.allocate_shared_memory(gl.int64, [2 if SCALED else 6, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], BARRIER)
    # 0 and 1: weights of either block are stored. 2 and 3: sums of either warp group are.
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    if SCALED:
        for i in gl.static_range(2):
            mbarrier.init(full.index(i), count=1)
    else:
        # Every thread's copies arrive by themselves. The rope barrier has one arrival more: of the
        # store that says which entries list no row.
        for i in gl.static_range(2):
            mbarrier.init(full.index(i), count=THREADS + 1)
            mbarrier.init(full.index(2 + i), count=THREADS)
            mbarrier.init(full.index(4 + i), count=THREADS)
    for i in gl.static_range(6):
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(q_full.index(0), count=THREADS)
    mbarrier.init(q_empty.index(0), count=2)
    tile = WideTile(
        KEYS=KEYS, DTYPE=DTYPE, EARLY=EARLY, WHOLE=SCALED, TOKENS=TOKENS,
        SCORES=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]),
        OUTPUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16]),
    )  # fmt: skip
    queries = WideQueries(
        latent=q_boxes, rotary=q_rope, full=q_full.index(0), empty=q_empty.index(0)
    )
    ring = WideRing(
        left=left_boxes, right=right_boxes, rope=rope, gaps=gaps, full=full, empty=empty
    )
    room = WideRoom(weights=p, first_top=m_first, second_top=m_second, sums=sums_of, ready=ready)
    query = SparseQuery(
        query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token, query_head=query_head,
        rotary_token=rotary_token, rotary_head=rotary_head, scale=scale * LOG2E,
    )  # fmt: skip
    wait_for_kernels_before()
    gl.warp_specialize(
        [
            (consume_listed, (
                0, query.scale, lists, queries, ring, room, out, scratch, division, tile)),
            (consume_listed, (
                1, query.scale, lists, queries, ring, room, out, scratch, division, tile)),
            (produce_listed, (query, lists, rows, queries, ring, stored, division, tile)),
        ],
        [4, 4],
        [SECOND, PRODUCER],
    )  # fmt: skip
