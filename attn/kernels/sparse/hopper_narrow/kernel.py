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

from attn.kernels.lang.compat import (
    arrive_behind_gathers,
    async_gather,
    let_kernels_behind_start,
    wait_for_kernels_before,
)
from attn.kernels.lang.opaque import opaque_int
from attn.kernels.lang.structures import Out
from attn.kernels.sparse.hopper_narrow.consumer import NATIVE, RAW, SCALED, consume_narrow
from attn.kernels.sparse.hopper_narrow.operands import scores_memory, swizzled, weights_layout
from attn.kernels.sparse.hopper_wide.parts import THREADS, UNIT, entries_at
from attn.kernels.sparse.structures import (
    Division,
    LatentRows,
    Lists,
    NarrowQueries,
    NarrowRing,
    NarrowRoom,
    NarrowTile,
    Scratch,
    SparseQuery,
)


@gluon.jit
def _place(entry, HIDDEN: gl.constexpr):
    """The number of an entry of a list, hidden from the compiler if HIDDEN."""
    if HIDDEN:
        entry = opaque_int(entry)
    return entry


@gluon.jit
def _copy_rows(lists, rows, ring, division, SKIP: gl.constexpr, HIDDEN: gl.constexpr):
    """Copy listed rows tile after tile; the producer warp group runs this.

    Entries of -1 give zeros. A tile has two parts: the latents of its rows, and their tails, which
    are all that follows the latents. The first SKIP words of a tail's room are not copied. With
    HIDDEN a thread's place in the list is computed anew for every tile, which saves registers.
    """
    TILE: gl.constexpr = ring.latents.shape[1]
    WORDS: gl.constexpr = ring.latents.shape[2]
    TAIL: gl.constexpr = ring.tails.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    TAIL_COPY: gl.constexpr = gl.BlockedLayout([1, 4], [128 // TAIL, TAIL // 4], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    TAIL_ROW: gl.constexpr = gl.SliceLayout(1, TAIL_COPY)
    work = gl.program_id(0)
    token = work // (division.HEAD_TILES * division.PARTS)
    low = work // division.HEAD_TILES % division.PARTS * division.SEGMENT
    mine = lists.of(token)
    # The first entries are loaded up to the list's end, before the number that counts is known.
    end = gl.minimum(lists.topk, low + division.SEGMENT)
    start = _place(low, HIDDEN)
    ids = entries_at(mine, start, end, TILE, ROW)
    tail_ids = entries_at(mine, start, end, TILE, TAIL_ROW)
    high = end
    if lists.HAS_LENS:
        high = gl.minimum(end, gl.load(lists.lens_ptr + token))
        row = start + gl.arange(0, TILE, layout=ROW)
        tail_row = start + gl.arange(0, TILE, layout=TAIL_ROW)
        ids = gl.where(row < high, ids, -1)
        tail_ids = gl.where(tail_row < high, tail_ids, -1)
    ahead = entries_at(mine, start + TILE, high, TILE, ROW)
    tail_ahead = entries_at(mine, start + TILE, high, TILE, TAIL_ROW)
    column = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPY))
    tail_column = gl.arange(0, TAIL, layout=gl.SliceLayout(0, TAIL_COPY))
    for first in range(low, high, TILE):
        turn = (first - low) // TILE
        stage = turn % ring.STAGES
        # Entries are loaded two tiles ahead: loads queue behind copies. With rows of 16 bits both
        # layouts are the same, and of two loads from one hidden place the compiler makes one.
        start = _place(first + 2 * TILE, HIDDEN)
        next_ids = entries_at(mine, start, high, TILE, ROW)
        next_tail = entries_at(mine, start, high, TILE, TAIL_ROW)
        offset = rows.offsets(ids) * (UNIT // 4)
        at = rows.latent_ptr + offset[:, None] + column[None, :]
        there = (ids >= 0)[:, None] & (column >= 0)[None, :]
        offset = rows.offsets(tail_ids) * (UNIT // 4)
        tail_at = rows.latent_ptr + (offset + (WORDS - SKIP))[:, None] + tail_column[None, :]
        tail_there = (tail_ids >= 0)[:, None] & (tail_column >= SKIP)[None, :]
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(ring.empty.index(stage), ((turn // ring.STAGES) & 1) ^ 1)
        async_gather(ring.latents.index(stage), at, mask=there)
        async_gather(ring.tails.index(stage), tail_at, mask=tail_there)
        arrive_behind_gathers(ring.full.index(stage), increment_count=False)
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
    query = SparseQuery(
        query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token, query_head=query_head,
        rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
    )  # fmt: skip
    lists = Lists(ids_ptr=ids_ptr, lens_ptr=lens_ptr, ids_row=ids_row, topk=topk, HAS_LENS=HAS_LENS)
    rows = LatentRows(
        latent_ptr=latent_ptr, scale_ptr=factor_ptr, BLOCK_SIZE=BLOCK_SIZE, BLOCK_UNITS=BLOCK_UNITS,
        ROW_UNITS=ROW_UNITS, ROPE_AT=None, SCALES_AT=None,
    )  # fmt: skip
    division = Division(
        tokens=None, TOKENS=1, HEADS=HEADS, HEAD_TILES=HEAD_TILES, SEGMENT=SEGMENT, PARTS=PARTS,
        BALANCED=False,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
        out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=SINKS, FP8_OUT=False,
        LSE=LSE,
    )  # fmt: skip
    scratch = Scratch(states_ptr=states_ptr, sums_ptr=sums_ptr, counters_ptr=None)
    latents = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, WORDS], swizzled(TILE, WORDS))
    tails = gl.allocate_shared_memory(gl.int32, [STAGES, TILE, TAIL], swizzled(TILE, TAIL))
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
    # The rows of score products are keys with e4m3 rows, and heads with 16-bit rows.
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    BY_HEAD: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    tile = NarrowTile(
        KIND=KIND, ROWS=ROWS, KEYS=TILE, DTYPE=DTYPE, PRODUCT=BY_HEAD if KIND == NATIVE else BY_KEY,
        WEIGHTS=weights_layout(TILE, ROWS),
        SUMS=gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]),
    )  # fmt: skip
    queries = NarrowQueries(latent=q, rotary=q_rope, undo=undo, full=once.index(0))
    ring = NarrowRing(latents=latents, tails=tails, full=full, empty=empty, STAGES=STAGES)
    room = NarrowRoom(scores=scores, logs=logs, ends=ends, done=once.index(1))
    gl.warp_specialize(
        [
            (consume_narrow, (
                0, query, lists, rows, queries, ring, room, out, scratch, division, tile)),
            (consume_narrow, (
                1, query, lists, rows, queries, ring, room, out, scratch, division, tile)),
            # Prompts over e4m3 rows would take 1 % more time; their producer has registers left.
            (_copy_rows, (lists, rows, ring, division, SKIP, KIND == NATIVE)),
        ],
        [4, 4],
        [SECOND, PRODUCER],
    )  # fmt: skip
