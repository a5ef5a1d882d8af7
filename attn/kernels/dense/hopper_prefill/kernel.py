"""Prefill and extend on Hopper: paged keys through TMA, products by warp group, in Gluon.

A program stays on its multiprocessor and takes one tile after another, each time the next that
nobody took: ``64 * WARP_GROUPS`` query rows, tokens times PACKED query heads of one KV head, of one
request. One warp is the producer: it tells the others which tile it is, walks the block table and
asks for keys and values, a run of a page and 64 columns at a time; runs land side by side, so that
a tile of keys is one operand of a product. Each warp group of consumers owns 64 rows: it issues the
scores of one tile of keys and the output of the tile before it back to back, and computes the
softmax of the former under the latter. Keys are walked from the last visible one down.

No page is read of which no row of the tile sees a key: its place in the operand is filled with
zeros by a box outside the cache. Slots past the end of the request share a page with live ones and
may hold anything; the values there are overwritten with zeros, since zero times NaN is NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_prefill.consumer import consume
from attn.kernels.dense.hopper_prefill.converter import convert, convert_values
from attn.kernels.dense.hopper_prefill.producer import produce
from attn.kernels.dense.hopper_prefill.scheduler import RECORD, is_joint
from attn.kernels.dense.hopper_prefill.segmented import consume_segments
from attn.kernels.lang.compat import reinterpret, wait_for_kernels_before
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.structures import (
    Cache,
    Mask,
    Out,
    QueryRing,
    Rings,
    Scaling,
    Schedule,
    Segments,
    Shape,
    StoredRows,
    TileRing,
)

_VARYING = [
    "num_reqs",
    "programs",
    "num_ranges",
    "window",
    "chunk",
    "lookback",
    "table_row",
    "lse_token",
]
_ANYWHERE = [
    "table_ptr",
    "tile_starts_ptr",
    "num_tiles_ptr",
    "counter_ptr",
    "query_start_ptr",
    "seq_lens_ptr",
    "lse_ptr",
    "causal_ptr",
    "ranges_ptr",
    "output_scale_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "sinks_ptr",
    "states_ptr",
    "sums_ptr",
]


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
    q_extra_desc,
    k_extra_desc,
    v_extra_desc,
    key_ptr,
    value_ptr,
    out_ptr,
    lse_ptr,
    output_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    counter_ptr,
    query_start_ptr,
    seq_lens_ptr,
    causal_ptr,
    ranges_ptr,
    sinks_ptr,
    states_ptr,
    sums_ptr,
    out_token,
    out_head,
    lse_token,
    table_row,
    scale,
    soft_cap,
    num_reqs,
    programs,
    num_ranges,
    window,
    chunk,
    lookback,
    scale_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACKED: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    KV_TILE: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    EXTRA: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    FP16_VALUES: gl.constexpr,
    REGISTERS: gl.constexpr,
    HELD: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    RANGES: gl.constexpr,
    CLAMP: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr,
    LSE: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr,
    SEGMENTS_PER_GROUP: gl.constexpr,
    SUMS: gl.constexpr,
    TOTALS_STORED: gl.constexpr,
):
    """Attention of requests with many new tokens; grid ``(programs,)``, any number of them.

    Descriptors: query ``[T, H, SIZE]`` in boxes of 64 rows and 64 columns; key and value
    ``[N, BLOCK_SIZE, Hk, SIZE]`` in boxes of RUN tokens and 64 columns, or, of 8 bits, key_ptr and
    value_ptr with their strides, in words of four bytes. Queries and keys have WIDTH and EXTRA
    columns, and so have values where SIZE is more than WIDTH. The extra descriptors are of boxes of
    EXTRA columns, and None where these are 0 or 64. With BLOCK_SIZE 0 keys lie as queries do,
    ``[1, T, Hk, SIZE]``. Out ``[T, H, SIZE]``, LSE ``[T, H]``, counter ``[1]``, which is 0 before
    and after, the rest as in :func:`attn.kernels.dense.prefill.prefill_kernel`. FP16_VALUES:
    values, and the weights they are multiplied by, are fp16 and not of the query's type. HEADS is
    the number of tiles of PACKED query heads; REGISTERS those of a consumer's thread. HELD: the
    softmax is computed under the output's product.
    """
    mask = Mask(
        causal_ptr=causal_ptr, ranges_ptr=ranges_ptr, num_ranges=num_ranges, window=window,
        chunk=chunk, lookback=lookback, CAUSAL=CAUSAL, WINDOW=WINDOW, CHUNK=CHUNK, RANGES=RANGES,
        CLAMP=CLAMP,
    )  # fmt: skip
    schedule = Schedule(
        tile_starts_ptr=tile_starts_ptr, num_tiles_ptr=num_tiles_ptr, counter_ptr=counter_ptr,
        query_start_ptr=query_start_ptr, seq_lens_ptr=seq_lens_ptr, num_reqs=num_reqs,
        programs=programs, HEADS=HEADS,
    )  # fmt: skip
    out = Out(
        out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=output_scale_ptr,
        out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS, FP8_OUT=FP8_OUT,
        LSE=LSE,
    )  # fmt: skip
    cache = Cache(
        k_desc=k_desc, v_desc=v_desc, table_ptr=table_ptr, table_row=table_row,
        k_scale_ptr=k_scale_ptr, v_scale_ptr=v_scale_ptr, scale_head=scale_head,
        BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    stored_keys = StoredRows(
        rows_ptr=key_ptr, per_block=k_block, per_token=k_token, per_head=k_head
    )
    stored_values = StoredRows(
        rows_ptr=value_ptr, per_block=v_block, per_token=v_token, per_head=v_head
    )
    DTYPE: gl.constexpr = q_desc.dtype
    HALVES: gl.constexpr = WIDTH // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    JOINT: gl.constexpr = is_joint(WIDTH + EXTRA, KIND, SEGMENT_UNIT > 0 and not TOTALS_STORED)
    # Columns of values beyond WIDTH.
    VALUE_EXTRA: gl.constexpr = EXTRA if SIZE > WIDTH else 0
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VALUE: gl.constexpr = gl.float16 if FP16_VALUES else DTYPE
    # Who waits for a tile of queries to be there.
    READERS: gl.constexpr = WARP_GROUPS + 1 if KIND > 0 and WIDTH <= 128 else WARP_GROUPS
    # How many threads say that a tile of keys or values has been read.
    BY_THREAD: gl.constexpr = SEGMENT_UNIT > 0
    READ: gl.constexpr = WARP_GROUPS * 128 if BY_THREAD else WARP_GROUPS
    RUNS: gl.constexpr = KV_TILE // RUN
    BOXES: gl.constexpr = STAGES * HALVES * RUNS
    MORE: gl.constexpr = gl.NVMMASharedLayout(2 * max(EXTRA, 16), 16, 2)
    MORE_BOX: gl.constexpr = gl.NVMMASharedLayout(2 * max(EXTRA, 16), 16, 4)
    factor = scale
    if not SOFT_CAP:
        factor = scale * LOG2E
    # What TMA writes, boxes, and what products read: the same bytes as tiles.
    q_boxes = gl.allocate_shared_memory(
        DTYPE,
        [Q_STAGES * WARP_GROUPS * HALVES, 64 // PACKED, PACKED, 64],
        gl.NVMMASharedLayout(128, 16, 3),
    )
    k_boxes = gl.allocate_shared_memory(
        DTYPE, [BOXES, 1, RUN, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    v_boxes = gl.allocate_shared_memory(
        VALUE, [BOXES, 1, RUN, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
    )
    q_tiles = reinterpret(q_boxes, DTYPE, [Q_STAGES * WARP_GROUPS, 64, WIDTH], LAYOUT)
    k_tiles = reinterpret(k_boxes, DTYPE, [STAGES, KV_TILE, WIDTH], LAYOUT)
    v_tiles = reinterpret(v_boxes, VALUE, [STAGES, KV_TILE, WIDTH], LAYOUT)
    v_runs = reinterpret(v_boxes, VALUE, [BOXES, RUN, 64], LAYOUT)
    q_more, k_more, q_extra, k_extra = q_boxes, k_boxes, q_tiles, k_tiles
    v_more, v_extra, v_more_runs = v_boxes, v_tiles, v_runs
    if EXTRA > 0:
        q_more = gl.allocate_shared_memory(
            DTYPE,
            [Q_STAGES * WARP_GROUPS, 64 // PACKED, PACKED, EXTRA],
            gl.NVMMASharedLayout(2 * EXTRA, 16, 3),
        )
        k_more = gl.allocate_shared_memory(DTYPE, [STAGES * RUNS, 1, RUN, 1, EXTRA], MORE_BOX)
        q_extra = reinterpret(q_more, DTYPE, [Q_STAGES * WARP_GROUPS, 64, EXTRA], MORE)
        k_extra = reinterpret(k_more, DTYPE, [STAGES, KV_TILE, EXTRA], MORE)
    if VALUE_EXTRA > 0:
        v_more = gl.allocate_shared_memory(VALUE, [STAGES * RUNS, 1, RUN, 1, EXTRA], MORE_BOX)
        v_extra = reinterpret(v_more, VALUE, [STAGES, KV_TILE, EXTRA], MORE)
        v_more_runs = reinterpret(v_more, VALUE, [STAGES * RUNS, RUN, EXTRA], MORE)
    # Boxes of 64 columns are described once.
    if EXTRA == 64:
        q_extra_desc, k_extra_desc, v_extra_desc = q_desc, k_desc, v_desc
    records = gl.allocate_shared_memory(
        gl.int32, [Q_STAGES * RECORD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    if KIND <= 0:
        # Nobody waits for this barrier over an 8-bit cache. An unused barrier is not made: see
        # :func:`attn.kernels.dense.hopper_decode.kernel.hopper_decode_kernel`.
        mbarrier.init(cleared, count=WARP_GROUPS)
    for s in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=READERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=READ)
        if not JOINT:
            mbarrier.init(v_empty.index(s), count=READ)
    k_words, v_words = k_tiles, v_tiles
    if KIND > 0:
        WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        k_words = reinterpret(k_boxes, gl.int32, [STAGES, KV_TILE, WIDTH // 2], WORDS)
        v_words = reinterpret(v_boxes, gl.int32, [STAGES, KV_TILE, WIDTH // 2], WORDS)
    wait_for_kernels_before()
    shape = Shape(
        GROUP=GROUP, PACKED=PACKED, WARP_GROUPS=WARP_GROUPS, KV_TILE=KV_TILE, WIDTH=WIDTH,
        EXTRA=EXTRA, SIZE=SIZE, KIND=KIND, DTYPE=DTYPE, VALUE=VALUE,
        SCORES=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16]),
        OUTPUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]),
        HELD=HELD,
        REFERRED=SIZE > 128 or SEGMENT_UNIT > 0,
        EXTRA_OUTPUT=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(EXTRA, 16), 16]),
        ASCENDING=SEGMENT_UNIT > 0,
    )  # fmt: skip
    scaling = Scaling(factor=factor, soft_cap=soft_cap, SOFT_CAP=SOFT_CAP)
    queries = QueryRing(
        desc=q_desc, extra_desc=q_extra_desc, boxes=q_boxes, extra_boxes=q_more, tiles=q_tiles,
        extra_tiles=q_extra, records=records, full=q_full, empty=q_empty, STAGES=Q_STAGES,
    )  # fmt: skip
    keys = TileRing(
        extra_desc=k_extra_desc, boxes=k_boxes, extra_boxes=k_more, tiles=k_tiles,
        extra_tiles=k_extra, runs=k_boxes, extra_runs=k_boxes, words=k_words, full=k_full,
        empty=k_empty, STAGES=STAGES, HALVES=HALVES, EXTRA=EXTRA, KV_TILE=KV_TILE, RUN=RUN,
        BY_THREAD=BY_THREAD,
    )  # fmt: skip
    values = TileRing(
        extra_desc=v_extra_desc, boxes=v_boxes, extra_boxes=v_more, tiles=v_tiles,
        extra_tiles=v_extra, runs=v_runs, extra_runs=v_more_runs, words=v_words, full=v_full,
        empty=k_empty if JOINT else v_empty, STAGES=STAGES, HALVES=HALVES, EXTRA=VALUE_EXTRA,
        KV_TILE=KV_TILE, RUN=RUN, BY_THREAD=BY_THREAD,
    )  # fmt: skip
    rings = Rings(keys=keys, values=values, cleared=cleared, JOINT=JOINT)
    segments = Segments(
        states_ptr=states_ptr, sums_ptr=sums_ptr, UNIT=SEGMENT_UNIT, PER_GROUP=SEGMENTS_PER_GROUP,
        SUMS=SUMS, STORED=TOTALS_STORED,
    )  # fmt: skip
    # Tuples must be literals here: held in a variable, their constexprs become tensors.
    if KIND > 0 and WIDTH <= 128:
        gl.warp_specialize(
            [
                (consume, (0, queries, rings, cache, scaling, mask, out, shape)),
                (consume, (1, queries, rings, cache, scaling, mask, out, shape)),
                (convert, (False, queries, rings, stored_keys, stored_values, cache, schedule,
                    mask, shape)),
                (convert_values, (queries, values, stored_values, cache, shape)),
            ],
            [4, 4, 4],
            [REGISTERS, 256 - REGISTERS, 256 - REGISTERS],
        )  # fmt: skip
    elif KIND > 0:
        # With four warp groups, ptxas leaves no product more than 128 registers.
        gl.warp_specialize(
            [
                (consume, (0, queries, rings, cache, scaling, mask, out, shape)),
                (consume, (1, queries, rings, cache, scaling, mask, out, shape)),
                (convert, (True, queries, rings, stored_keys, stored_values, cache, schedule,
                    mask, shape)),
            ],
            [4, 4],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    elif SEGMENT_UNIT > 0:
        gl.warp_specialize(
            [
                (consume_segments, (0, queries, rings, cache, scaling, mask, out, segments, shape)),
                (consume_segments, (1, queries, rings, cache, scaling, mask, out, segments, shape)),
                (produce, (queries, rings, cache, schedule, mask, shape)),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    elif WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, queries, rings, cache, scaling, mask, out, shape)),
                (consume, (1, queries, rings, cache, scaling, mask, out, shape)),
                (produce, (queries, rings, cache, schedule, mask, shape)),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, queries, rings, cache, scaling, mask, out, shape)),
                (consume, (1, queries, rings, cache, scaling, mask, out, shape)),
                (consume, (2, queries, rings, cache, scaling, mask, out, shape)),
                (produce, (queries, rings, cache, schedule, mask, shape)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )
