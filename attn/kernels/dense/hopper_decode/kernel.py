"""The Hopper split-KV kernel: decode, verify and short extends with keys through TMA, in Gluon.

This kernel and the portable one (:mod:`attn.kernels.dense.decode`) share the plan, the places where
work is cut, the layout of stored states and the order in which states are folded. The promises are
therefore the same: the bits of a result depend on its request alone, and no program waits for
another.

The two kernels differ in how keys arrive. One warp of a program is the producer. It walks the block
table and asks TMA for keys and values, into a ring of stages. A TMA box is a run of tokens of one
page by 64 columns. The producer runs ahead by as many tiles as the ring holds, across segments and
work items.

With two consumers, one multiplies while the other computes its softmax. Each consumer takes every
other tile of keys, by the number of the tile in the request, and has a state of its own. At the end
of a segment the second consumer sends its state to the first, which folds both and does everything
else. Bits therefore follow from positions here too.

With batch invariance, rows of a request have the same bits in this kernel, in the portable one and
in both prefill kernels. Tiles of keys, weights and sums are then the portable kernel's, and there
is one consumer. Two programs share a multiprocessor where registers allow it, so that one
multiplies while the other waits.

A page is not read if no query of the tile sees a key in it: a box outside the cache fills its place
with zeros. Slots behind the request's last key are read with the page that they share with live
slots, and may hold anything. Their values are overwritten with zeros, since zero times NaN is NaN.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_decode.consumer import consume
from attn.kernels.dense.hopper_decode.producer import produce
from attn.kernels.lang.compat import reinterpret, wait_for_kernels_before
from attn.kernels.lang.structures import (
    Cache,
    Mailbox,
    Mask,
    Out,
    Plan,
    Query,
    Ring,
    Room,
    SumsApart,
    Tile,
)

_REGISTERS = tl.constexpr((96, 48))
"""Registers of a producer's thread beside one consumer, with one program on a multiprocessor and
with two.

Alone on a multiprocessor, the consumer's threads can have the most registers that a thread can have
in any case."""
_OF_THREE = tl.constexpr(((224, 56), (232, 40)))
"""Registers of a second consumer's thread and of a producer's thread, for tiles of 16 and 64 rows.

One thread of each consumer and one of the producer have 504 registers together. A consumer of 64
rows needs more of them, since it holds two states."""

_VARYING = [
    "groups",
    "window",
    "chunk",
    "lookback",
    "num_ranges",
    "table_row",
    "lse_token",
]
_ANYWHERE = [
    "table_ptr",
    "lse_ptr",
    "causal_ptr",
    "ranges_ptr",
    "output_scale_ptr",
    "sinks_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
]


@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def hopper_decode_kernel(
    query_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    output_scale_ptr,
    table_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    causal_ptr,
    ranges_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    query_token,
    query_head,
    out_token,
    out_head,
    lse_token,
    table_row,
    scale,
    soft_cap,
    scale_head,
    groups,
    window,
    chunk,
    lookback,
    num_ranges,
    HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr,
    HEAD_TILES: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr,
    QUERY_TOKENS: gl.constexpr,
    ROWS: gl.constexpr,
    SLOTS: gl.constexpr,
    SEGMENT_GROUPS: gl.constexpr,
    AREA: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr,
    KV_TILE: gl.constexpr,
    SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    RUN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SUMS: gl.constexpr,
    FINISH_ROWS: gl.constexpr,
    FINISH_WIDTH: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    RANGES: gl.constexpr,
    CLAMP: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr,
    LSE: gl.constexpr,
    E4M3: gl.constexpr,
):
    """Attention of the plan's work items; grid ``(groups * HEADS,)``.

    Shapes: query and out are ``[T, H, SIZE]``, LSE is ``[T, H]`` fp32. The descriptors are of key
    and value ``[N, BLOCK_SIZE, Hk, SIZE]``, in boxes of RUN tokens and 64 columns. With E4M3 they
    have SIZE / 2 columns of int16 words, each of two elements. WIDTH is SIZE rounded up to a power
    of two. The plan's tensors are described in :class:`builders.splitkv.record.SplitPlan`.

    SUMS are the columns whose sums of weights are kept apart with batch invariance, else 0.
    PROGRAMS share a multiprocessor.
    """
    mask = Mask(
        causal_ptr=causal_ptr, ranges_ptr=ranges_ptr, num_ranges=num_ranges, window=window,
        chunk=chunk, lookback=lookback, CAUSAL=CAUSAL, WINDOW=WINDOW, CHUNK=CHUNK, RANGES=RANGES,
        CLAMP=CLAMP,
    )  # fmt: skip
    plan = Plan(
        rows_ptr=rows_ptr, total_ptr=total_ptr, starts_ptr=starts_ptr, shares_ptr=shares_ptr,
        counters_ptr=counters_ptr, states_ptr=states_ptr, sums_ptr=sums_ptr, groups=groups,
        HEADS=HEADS, HEAD_LOOPS=HEAD_LOOPS, HEAD_TILES=HEAD_TILES, SLOTS=SLOTS,
        SEGMENT_GROUPS=SEGMENT_GROUPS, AREA=AREA, SEGMENT_UNIT=SEGMENT_UNIT,
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
    # An e4m3 cache is read as words of two elements: words can be loaded transposed, bytes cannot.
    STORED: gl.constexpr = k_desc.dtype
    DTYPE: gl.constexpr = gl.float16 if E4M3 else STORED
    # A box may lie behind a row's last column: TMA fills what is not there with zeros, and reads
    # nothing for it.
    WORDS: gl.constexpr = WIDTH // 2 if E4M3 else WIDTH
    HALVES: gl.constexpr = WORDS // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BOXES: gl.constexpr = STAGES * HALVES * (KV_TILE // RUN)
    # TMA writes boxes, and products read tiles: two views of the same bytes.
    k_boxes = gl.allocate_shared_memory(STORED, [BOXES, 1, RUN, 1, 64], BOX)
    v_boxes = gl.allocate_shared_memory(STORED, [BOXES, 1, RUN, 1, 64], BOX)
    BYTES: gl.constexpr = E4M3 and SUMS == 0
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8 if BYTES else 16, 2)
    k_tiles = reinterpret(
        k_boxes,
        gl.float8e4nv if BYTES else STORED,
        [STAGES, KV_TILE, WIDTH if BYTES else WORDS],
        KEYS,
    )
    v_tiles = reinterpret(v_boxes, STORED, [STAGES, KV_TILE, WORDS], LAYOUT)
    v_runs = reinterpret(v_boxes, STORED, [BOXES, RUN, 64], LAYOUT)
    # The queries of each consumer. Only tiles of 64 rows use this room: wgmma reads them here.
    queries = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS if ROWS > 16 else 8, WIDTH], LAYOUT)
    # Warps of a consumer exchange the maxima of rows, and weights that become an operand, here.
    exchange = gl.allocate_shared_memory(
        gl.float32, [CONSUMERS, 16, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    turned = gl.allocate_shared_memory(
        DTYPE,
        [CONSUMERS, 16, KV_TILE if ROWS == 16 else 16],
        gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
    )
    # The mailbox: the second consumer's state (output, maxima, sums) on its way to the first.
    MAILBOX: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    mailbox_acc = gl.allocate_shared_memory(
        gl.float32, [1, ROWS if CONSUMERS > 1 else 8, WIDTH if CONSUMERS > 1 else 32], MAILBOX
    )
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mailbox_top = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    mailbox_sums = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    sent = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    if CONSUMERS > 1:
        # With one consumer these two barriers are unused and must not be initialised: the compiler
        # would reuse their shared memory for data. When another process has had the GPU meanwhile,
        # the program finds a barrier there again in place of its data.
        mbarrier.init(sent, count=1)
        mbarrier.init(taken, count=1)
    # TMA sees shared memory through the asynchronous proxy: the fence shows it the barriers.
    fence_async_shared()
    wait_for_kernels_before()
    # With 16 rows, the warps share out the keys for scores and the columns for output, so that no
    # key is read twice. With 64 rows, each warp has 16 rows.
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    BY_KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    BY_COLUMN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BY_SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    tile = Tile(
        GROUP=GROUP, TILE_HEADS=TILE_HEADS, USED=TILE_HEADS * QUERY_TOKENS, ROWS=ROWS, SIZE=SIZE,
        WIDTH=WIDTH, DTYPE=DTYPE, E4M3=E4M3, SCORES=NARROW if ROWS == 16 else BY_KEY,
        OUTPUT=NARROW if ROWS == 16 else BY_COLUMN, CONSUMERS=CONSUMERS, FINISH_ROWS=FINISH_ROWS,
        FINISH_WIDTH=FINISH_WIDTH,
    )  # fmt: skip
    apart = SumsApart(COLUMNS=SUMS, LAYOUT=NARROW if ROWS == 16 else BY_SUM)
    query = Query(
        query_ptr=query_ptr, query_token=query_token, query_head=query_head, scale=scale,
        soft_cap=soft_cap, SOFT_CAP=SOFT_CAP,
    )  # fmt: skip
    ring = Ring(
        k_boxes=k_boxes, v_boxes=v_boxes, k_tiles=k_tiles, v_tiles=v_tiles, v_runs=v_runs,
        k_full=k_full, v_full=v_full, empty=empty, STAGES=STAGES, HALVES=HALVES, KV_TILE=KV_TILE,
        RUN=RUN,
    )  # fmt: skip
    mailbox = Mailbox(acc=mailbox_acc, top=mailbox_top, sums=mailbox_sums, sent=sent, taken=taken)
    room = Room(exchange=exchange, turned=turned, queries=queries, mailbox=mailbox)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (0, query, cache, ring, room, plan, mask, out, apart, tile)),
                (produce, (cache, ring, plan, mask)),
            ],
            [1],
            [_REGISTERS[PROGRAMS - 1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, query, cache, ring, room, plan, mask, out, apart, tile)),
                (consume, (1, query, cache, ring, room, plan, mask, out, apart, tile)),
                (produce, (cache, ring, plan, mask)),
            ],
            [4, 1],
            [_OF_THREE[ROWS // 64][0], _OF_THREE[ROWS // 64][1]],
        )
