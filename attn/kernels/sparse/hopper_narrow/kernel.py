"""The narrow Hopper kernel of sparse latent attention: tiles of eight or 16 heads over listed rows.

The rate at which rows arrive is the limit. A producer warp group copies rows some tiles ahead, 16
bytes by a thread at a time, and shared memory holds them only in stored form. Two consumer warp
groups take every other tile, so that one multiplies while the other waits. They build operands in
registers and combine their sums at the end: :mod:`attn.kernels.sparse.hopper_narrow.consumer`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import (
    arrive_behind_gathers,
    async_gather,
    let_kernels_behind_start,
    wait_for_kernels_before,
)
from attn.kernels.sparse.hopper_narrow.consumer import (
    NATIVE,
    RAW,
    SCALED,
    consume_narrow,
    entries,
)
from attn.kernels.sparse.hopper_narrow.operands import scores_memory, swizzled
from attn.kernels.sparse.hopper_wide.parts import THREADS, UNIT
from attn.kernels.sparse.listed_rows import row_offsets


@gluon.jit
def _copy_rows(
    latent_ptr, ids_ptr, lens_ptr, nope, tail, full, empty, ids_row, topk,
    HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, HAS_LENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr,
    SKIP: gl.constexpr,
):  # fmt: skip
    """Copy listed rows tile after tile; the producer warp group runs this.

    Entries of -1 give zeros. A tile has two parts: the latents of its rows, and their tails, which
    are all that follows the latents. The first SKIP words of a tail's room are not copied.
    """
    STAGES: gl.constexpr = nope.shape[0]
    TILE: gl.constexpr = nope.shape[1]
    WORDS: gl.constexpr = nope.shape[2]
    TAIL: gl.constexpr = tail.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    TAIL_COPY: gl.constexpr = gl.BlockedLayout([1, 4], [128 // TAIL, TAIL // 4], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    TAIL_ROW: gl.constexpr = gl.SliceLayout(1, TAIL_COPY)
    work = gl.program_id(0)
    token = work // (HEAD_TILES * PARTS)
    low = work // HEAD_TILES % PARTS * SEGMENT
    mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
    # The first entries are loaded up to the list's end, before the number that counts is known.
    end = gl.minimum(topk, low + SEGMENT)
    ids = entries(mine, low, end, TILE, ROW)
    tail_ids = entries(mine, low, end, TILE, TAIL_ROW)
    high = end
    if HAS_LENS:
        high = gl.minimum(end, gl.load(lens_ptr + token))
        row = low + gl.arange(0, TILE, layout=ROW)
        tail_row = low + gl.arange(0, TILE, layout=TAIL_ROW)
        ids = gl.where(row < high, ids, -1)
        tail_ids = gl.where(tail_row < high, tail_ids, -1)
    ahead = entries(mine, low + TILE, high, TILE, ROW)
    tail_ahead = entries(mine, low + TILE, high, TILE, TAIL_ROW)
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPY))
    tail_column = gl.arange(0, TAIL, layout=gl.SliceLayout(0, TAIL_COPY))
    for first in range(low, high, TILE):
        turn = (first - low) // TILE
        stage = turn % STAGES
        # Entries are loaded two tiles ahead: loads queue behind copies.
        next_ids = entries(mine, first + 2 * TILE, high, TILE, ROW)
        next_tail = entries(mine, first + 2 * TILE, high, TILE, TAIL_ROW)
        offset = row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE) * (UNIT // 4)
        at = latent_ptr + offset[:, None] + column[None, :]
        there = (ids >= 0)[:, None] & (column >= 0)[None, :]
        offset = row_offsets(tail_ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE) * (UNIT // 4)
        tail_at = latent_ptr + (offset + (WORDS - SKIP))[:, None] + tail_column[None, :]
        tail_there = (tail_ids >= 0)[:, None] & (tail_column >= SKIP)[None, :]
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        async_gather(nope.index(stage), at, mask=there)
        async_gather(tail.index(stage), tail_at, mask=tail_there)
        arrive_behind_gathers(full.index(stage), increment_count=False)
        ids = ahead
        tail_ids = tail_ahead
        ahead = next_ids
        tail_ahead = next_tail


@gluon.jit(
    do_not_specialize=[
        *("ids_row", "topk"),
        *("query_token", "query_head", "rotary_token", "rotary_head"),
    ],
    do_not_specialize_on_alignment=["ids_ptr", "lens_ptr", "lse_ptr", "sinks_ptr", "factor_ptr"],
)
def hopper_narrow_sparse_kernel(
    query_ptr,
    rotary_ptr,
    latent_ptr,
    factor_ptr,
    sinks_ptr,
    ids_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    states_ptr,
    sums_ptr,
    ids_row,
    topk,
    scale,
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    SEGMENT: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr,
    ROW_UNITS: gl.constexpr,
    OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr,
    LSE_TOKEN: gl.constexpr,
    HAS_LENS: gl.constexpr,
    KIND: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    SECOND: gl.constexpr,
    PRODUCER: gl.constexpr,
):
    """Attention over listed rows; grid ``(T * PARTS * HEAD_TILES,)``.

    Arguments are those of :func:`attn.kernels.sparse.hopper_wide.kernel.hopper_sparse_kernel`, with
    these differences. The cache is in int32 words, and KIND tells how its rows are stored.
    ``factor_ptr`` is the scale that all rows of KIND RAW share. TILE is the number of keys in a
    tile, STAGES the number of tiles that shared memory holds.
    """
    WORDS: gl.constexpr = 256 if KIND == NATIVE else 128
    TAIL: gl.constexpr = 64 if KIND == SCALED else 32 if KIND == NATIVE else 16
    # A row of 656 bytes has a tail of 144 bytes: scales, then rope. They are 36 words, at the end
    # of 64.
    SKIP: gl.constexpr = 28 if KIND == SCALED else 0
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    QUERY: gl.constexpr = (
        gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        if KIND == NATIVE
        else gl.NVMMASharedLayout(128, 16, 2)
    )
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    # Heads of a program. With 16-bit rows heads are the rows of score products, which have 16.
    ROWS: gl.constexpr = 8 if HEADS <= 8 and KIND != NATIVE else 16
    nope = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], swizzled(TILE, WORDS))
    tail = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, TAIL], swizzled(TILE, TAIL))
    q = gl.allocate_shared_memory(DTYPE if KIND == NATIVE else gl.float16, [4, ROWS, 128], QUERY)
    q_rope = gl.allocate_shared_memory(gl.float16 if KIND == RAW else DTYPE, [1, ROWS, 64], QUERY)
    undo = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    ends = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    SCORES: gl.constexpr = scores_memory(TILE, ROWS)
    LOGS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    KEYS: gl.constexpr = TILE if KIND == SCALED else 1
    scores = gl.allocate_shared_memory(gl.float32, [2, TILE, ROWS], SCORES)
    logs = gl.allocate_shared_memory(gl.float32, [2, 4, KEYS], LOGS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # 0: the queries are in shared memory. 1: the second warp group has stored its sums.
    once = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=THREADS)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(once.index(i), count=1)
    wait_for_kernels_before()
    # After the wait: a kernel started now finds what kernels before this one wrote, whether it
    # waits itself or not.
    let_kernels_behind_start()
    gl.warp_specialize(
        [
            (consume_narrow, (query_ptr, rotary_ptr, ids_ptr, lens_ptr, factor_ptr, sinks_ptr,
                out_ptr, lse_ptr, states_ptr, sums_ptr, nope, tail, q, q_rope, undo,
                scores.index(0), logs.index(0), ends, full, empty, once.index(0),
                once.index(1), ids_row, topk, scale, query_token, query_head, rotary_token,
                rotary_head, 0, HEADS, HEAD_TILES, SEGMENT, PARTS, OUT_TOKEN, OUT_HEAD,
                LSE_TOKEN, HAS_LENS, KIND, SINKS, LSE)),
            (consume_narrow, (query_ptr, rotary_ptr, ids_ptr, lens_ptr, factor_ptr, sinks_ptr,
                out_ptr, lse_ptr, states_ptr, sums_ptr, nope, tail, q, q_rope, undo,
                scores.index(1), logs.index(1), ends, full, empty, once.index(0),
                once.index(1), ids_row, topk, scale, query_token, query_head, rotary_token,
                rotary_head, 1, HEADS, HEAD_TILES, SEGMENT, PARTS, OUT_TOKEN, OUT_HEAD,
                LSE_TOKEN, HAS_LENS, KIND, SINKS, LSE)),
            (_copy_rows, (latent_ptr, ids_ptr, lens_ptr, nope, tail, full, empty, ids_row, topk,
                HEAD_TILES, SEGMENT, PARTS, HAS_LENS, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, SKIP)),
        ],
        [4, 4],
        [SECOND, PRODUCER],
    )  # fmt: skip
