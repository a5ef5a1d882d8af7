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
from attn.kernels.lang.compat import reinterpret, wait_for_kernels_before
from attn.kernels.lang.constants import LOG2E

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
]


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def hopper_prefill_kernel(
    q_desc,
    k_desc,
    v_desc,
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
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    RANGES: gl.constexpr,
    CLAMP: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr,
    LSE: gl.constexpr,
):
    """Attention of requests with many new tokens; grid ``(programs,)``, any number of them.

    Descriptors: query ``[T, H, SIZE]`` in boxes of 64 rows and 64 columns; key and value
    ``[N, BLOCK_SIZE, Hk, SIZE]`` in boxes of RUN tokens and 64 columns, or, of 8 bits, key_ptr and
    value_ptr with their strides, in words of four bytes. Queries and keys have WIDTH and EXTRA
    columns. With BLOCK_SIZE 0 keys lie as queries do, ``[1, T, Hk, SIZE]``. Out ``[T, H, SIZE]``,
    LSE ``[T, H]``, counter ``[1]``, which is 0 before and after, the rest as in
    :func:`attn.kernels.dense.prefill.prefill_kernel`. FP16_VALUES: values, and the weights they are
    multiplied by, are fp16 and not of the query's type. HEADS is the number of tiles of PACKED
    query heads; REGISTERS those of a consumer's thread.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    HALVES: gl.constexpr = WIDTH // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VALUE: gl.constexpr = gl.float16 if FP16_VALUES else DTYPE
    # Who waits for a tile of queries to be there.
    READERS: gl.constexpr = WARP_GROUPS + 1 if KIND > 0 and WIDTH <= 128 else WARP_GROUPS
    BOXES: gl.constexpr = STAGES * HALVES * (KV_TILE // RUN)
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
    if EXTRA > 0:
        q_more = gl.allocate_shared_memory(
            DTYPE,
            [Q_STAGES * WARP_GROUPS, 64 // PACKED, PACKED, 64],
            gl.NVMMASharedLayout(128, 16, 3),
        )
        k_more = gl.allocate_shared_memory(
            DTYPE, [STAGES * (KV_TILE // RUN), 1, RUN, 1, 64], gl.NVMMASharedLayout(128, 16, 4)
        )
        q_extra = reinterpret(q_more, DTYPE, [Q_STAGES * WARP_GROUPS, 64, 64], LAYOUT)
        k_extra = reinterpret(k_more, DTYPE, [STAGES, KV_TILE, 64], LAYOUT)
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
        # Of 8 bits nobody clears: see
        # :func:`attn.kernels.dense.hopper_decode.kernel.hopper_decode_kernel`.
        mbarrier.init(cleared, count=WARP_GROUPS)
    for s in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(q_empty.index(s), count=READERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=WARP_GROUPS)
        if not is_joint(WIDTH, KIND):
            mbarrier.init(v_empty.index(s), count=WARP_GROUPS)
    if KIND > 0:
        WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        k_words = reinterpret(k_boxes, gl.int32, [STAGES, KV_TILE, WIDTH // 2], WORDS)
        v_words = reinterpret(v_boxes, gl.int32, [STAGES, KV_TILE, WIDTH // 2], WORDS)
    wait_for_kernels_before()
    # Tuples must be literals here: held in a variable, their constexprs become tensors.
    if KIND > 0 and WIDTH <= 128:
        gl.warp_specialize(
            [
                (consume, (0, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (consume, (1, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (convert, (False, q_desc, key_ptr, value_ptr, q_boxes, k_words, v_words, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr, tile_starts_ptr,
                    num_tiles_ptr, counter_ptr, query_start_ptr, seq_lens_ptr, causal_ptr,
                    ranges_ptr, num_reqs, programs, num_ranges, table_row, window, chunk, lookback,
                    k_block, k_token, k_head, v_block, v_token, v_head, HEADS, GROUP, PACKED,
                    WARP_GROUPS, KIND, DTYPE, VALUE, KV_TILE, HALVES, WIDTH, SIZE, BLOCK_SIZE,
                    Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP)),
                (convert_values, (value_ptr, v_words, records, q_full, q_empty, v_full, v_empty,
                    table_ptr, table_row, v_block, v_token, v_head, GROUP, PACKED, KIND, VALUE,
                    KV_TILE, WIDTH, SIZE, BLOCK_SIZE, Q_STAGES, STAGES)),
            ],
            [4, 4, 4],
            [REGISTERS, 256 - REGISTERS, 256 - REGISTERS],
        )  # fmt: skip
    elif KIND > 0:
        # Of four warp groups ptxas leaves no product more than 128 registers.
        gl.warp_specialize(
            [
                (consume, (0, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (consume, (1, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (convert, (True, q_desc, key_ptr, value_ptr, q_boxes, k_words, v_words, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr, tile_starts_ptr,
                    num_tiles_ptr, counter_ptr, query_start_ptr, seq_lens_ptr, causal_ptr,
                    ranges_ptr, num_reqs, programs, num_ranges, table_row, window, chunk, lookback,
                    k_block, k_token, k_head, v_block, v_token, v_head, HEADS, GROUP, PACKED,
                    WARP_GROUPS, KIND, DTYPE, VALUE, KV_TILE, HALVES, WIDTH, SIZE, BLOCK_SIZE,
                    Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP)),
            ],
            [4, 4],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    elif WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (0, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (consume, (1, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (produce, (q_desc, k_desc, v_desc, q_boxes, q_more, k_boxes, k_more, v_boxes,
                    records, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
                    tile_starts_ptr, num_tiles_ptr, counter_ptr, query_start_ptr, seq_lens_ptr,
                    causal_ptr, ranges_ptr, num_reqs, programs, num_ranges, table_row, window,
                    chunk, lookback, HEADS, GROUP, PACKED, WARP_GROUPS, KV_TILE, HALVES, EXTRA,
                    BLOCK_SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP)),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (consume, (1, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (consume, (2, q_tiles, q_extra, k_tiles, k_extra, v_tiles, v_runs, records,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleared, out_ptr, lse_ptr,
                    output_scale_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, ranges_ptr, num_ranges,
                    factor, soft_cap, window, chunk, lookback, scale_head, out_token, out_head,
                    lse_token, GROUP, PACKED, WARP_GROUPS, KIND, VALUE, KV_TILE, HALVES, WIDTH,
                    EXTRA, SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
                    SOFT_CAP, SINKS, FP8_OUT, LSE)),
                (produce, (q_desc, k_desc, v_desc, q_boxes, q_more, k_boxes, k_more, v_boxes,
                    records, q_full, q_empty, k_full, k_empty, v_full, v_empty, table_ptr,
                    tile_starts_ptr, num_tiles_ptr, counter_ptr, query_start_ptr, seq_lens_ptr,
                    causal_ptr, ranges_ptr, num_reqs, programs, num_ranges, table_row, window,
                    chunk, lookback, HEADS, GROUP, PACKED, WARP_GROUPS, KV_TILE, HALVES, EXTRA,
                    BLOCK_SIZE, RUN, Q_STAGES, STAGES, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 32],
        )  # fmt: skip
