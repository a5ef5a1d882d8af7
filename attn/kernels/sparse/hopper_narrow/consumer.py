"""The consumers of the narrow Hopper sparse kernel: two warp groups that take every other tile.

**Scores.** A warp has some keys with all their columns. Since scores sum over all columns, it takes
columns in the order in which it loads them. With e4m3 rows, scores are products of warp groups:
:mod:`attn.kernels.sparse.hopper_narrow.scores`.

**Values.** A warp has a block of columns of all keys. Products want pairs of keys, so the words of
a key and of the next key are interleaved. Columns are the rows of these products and heads their
columns, since a product may have as few as eight columns.

**e4m3.** Elements become fp16, which represents all of them; one instruction converts two. The
scale of a block multiplies the block's scores. For values it goes into the exponent: the weight of
a key in a block is 2 to the power of score + log2(scale) - maximum, with a maximum for each block.
So nothing leaves fp16's range, whatever the scales are.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.query_rows import write_rows
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import Out
from attn.kernels.lang.wgmma import base_of
from attn.kernels.sparse.hopper_narrow.operands import (
    key_operand,
    key_words,
    natural_order,
    quarters,
    query_order,
    value_operand,
    value_words,
    weights_layout,
)
from attn.kernels.sparse.hopper_narrow.scores import count_keys, group_scores
from attn.kernels.sparse.hopper_narrow.shrink import shrunk
from attn.kernels.sparse.hopper_wide.parts import exp2, units_at

STATE_ROWS = tl.constexpr(16)
"""Heads in a stored state; fewer leave the rest of it unused."""
NATIVE, RAW, SCALED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Row formats: 16-bit elements; e4m3 with one scale for all rows; e4m3 with scales in each row."""
_SLACK = tl.constexpr(8.0)
"""Maxima (log 2) are raised only when they grow by more: weights up to 2^8 are within fp16."""


@gluon.jit
def entries(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on; -1 from ``length`` on.

    :func:`attn.kernels.sparse.hopper_wide.parts.listed` does the same, but hides the addresses from
    the compiler. Here they may stay in registers: nothing is spilled for them.
    """
    at = first + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def _load_queries(ptr, token, head_tile, per_token, per_head, HEADS: gl.constexpr,
                  ROWS: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """Load queries of a tile of heads, ``[ROWS, WIDTH]``; zeros past the last head."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [ROWS // 4, 128 // ROWS], [4, 1], [1, 0])
    head = head_tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = ptr + units_at(token, head, per_token, per_head)[:, None] + column[None, :]
    return gl.load(at, mask=(head < HEADS)[:, None] & (column >= 0)[None, :], other=0.0)


@gluon.constexpr_function
def by_key_layout(rows: int) -> gl.DistributedLinearLayout:
    """The layout of ``[32, heads]``: scores of 64 keys, two of a thread folded into one."""
    return gl.DistributedLinearLayout(
        [[0, 1], *([[0, 8]] if rows > 8 else [])],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, rows],
    )


@gluon.jit
def _within_fp16(q):
    """Queries as fp16, multiplied by a power of two for each head, and the factors that undo it.

    The largest element of a head becomes 2^14 or more. Elements smaller than that by 2^38 become
    zero; for comparison, a sum in fp32 loses terms smaller by 2^24.
    """
    largest = gl.max(gl.abs(q.to(gl.float32)), 1)
    # The exponent counts as that of 2^-87 at least, so that both factors are normal numbers.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 40)
    by = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    undo = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    return (q.to(gl.float32) * by[:, None]).to(gl.float16), undo


@gluon.jit
def _store_queries(x, r, q, q_rope, undo, KIND: gl.constexpr):
    """Store queries of a tile of heads in shared memory, and factors that undo fp16's scaling."""
    if KIND != NATIVE:
        x, by = _within_fp16(x)
        undo.index(0).store(by)
    if KIND == RAW:
        r, by = _within_fp16(r)
        undo.index(1).store(by)
    q_rope.store(query_order(r, KIND == RAW))
    x0, x1, x2, x3 = quarters(query_order(x, KIND != NATIVE))
    q.index(0).store(x0)
    q.index(1).store(x1)
    q.index(2).store(x2)
    q.index(3).store(x3)


@gluon.jit
def _scores(
    z, q0, q1, q, q_rope, nope, tail, there, factor, DTYPE: gl.constexpr, PRODUCT: gl.constexpr
):  # fmt: skip
    """Scores ``[16, keys]`` of a tile of 16-bit rows, in units of log 2.

    A warp has eight keys at a time. Entries that list no row get -inf.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    TILE: gl.constexpr = nope.shape[0]
    zero = gl.zeros([16, TILE], gl.float32, PRODUCT)
    k0, k1, k2, k3 = quarters(nope.load(key_words(TILE, nope.shape[1])))
    s0 = mma_v2(q0, key_operand(k0, DTYPE, OPERAND), zero)
    # Half of the queries is loaded again for each tile: there are no registers to keep it.
    q2 = q.index(z + 2).load(QUERY)
    s1 = mma_v2(q1, key_operand(k1, DTYPE, OPERAND), zero)
    s2 = mma_v2(q2, key_operand(k2, DTYPE, OPERAND), zero)
    s3 = mma_v2(q.index(z + 3).load(QUERY), key_operand(k3, DTYPE, OPERAND), zero)
    words = tail.load(key_words(TILE, tail.shape[1]))
    s = mma_v2(q_rope.index(z).load(QUERY), key_operand(words, DTYPE, OPERAND), zero)
    s = ((s0 + s1) + (s2 + s3) + s) * factor
    return gl.where(there[None, :], s, float("-inf"))


@gluon.jit
def _of_thread(x):
    """Maximum over each thread's elements of a row of scores: ``[16, 16]``."""
    x = gl.reshape(x, [16, x.shape[1] // 32, 16, 2])
    return gl.max(gl.max(x, 3), 1)


@gluon.jit
def _count(s, m, l):
    """Fold a tile's scores into maxima and sums of weights that each thread keeps for itself."""
    TILE: gl.constexpr = s.shape[1]
    new = gl.maximum(m, gl.convert_layout(_of_thread(s), m.type.layout))
    base = base_of(new)
    x = gl.reshape(s, [16, TILE // 32, 16, 2])
    over = gl.convert_layout(base, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)))
    weights = exp2(x - over[:, None, :][:, :, :, None])
    return new, gl.fma(l, exp2(m - base), gl.convert_layout(
        gl.sum(gl.sum(weights, 3), 1), m.type.layout))  # fmt: skip


@gluon.jit
def _attend(s, top, o, nope, scores, logs, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Fold a tile into the output ``o`` and its maxima ``top`` ``[4, heads]`` of score plus log2 of
    the scale.

    With e4m3 rows weights are fp16. A maximum is then raised only when it would grow by much, so
    most tiles need no rescaling of ``o``. With bf16 weights that would cost accuracy, since the
    largest weight would not be 1.
    """
    E4M3: gl.constexpr = KIND != NATIVE
    TILE: gl.constexpr = s.shape[0]
    ROWS: gl.constexpr = s.shape[1]
    WEIGHTS: gl.constexpr = weights_layout(TILE, ROWS)
    SUMS: gl.constexpr = o.type.layout
    scores.store(s)
    thread_barrier()
    seen = scores.load(gl.SliceLayout(0, WEIGHTS))[None, :, :]
    if KIND == SCALED:
        seen = seen + logs.load(gl.SliceLayout(2, WEIGHTS))[:, :, None]
    else:
        seen = seen + gl.zeros([4, TILE, ROWS], gl.float32, WEIGHTS)
    new = gl.max(seen, 1)
    if E4M3:
        new = gl.where(new > top + _SLACK, new, top)
    else:
        new = gl.maximum(top, new)
    base = base_of(new)
    o = shrunk(o, exp2(top - base))
    weights = exp2(seen - base[:, None, :])
    NARROW: gl.constexpr = gl.float16 if E4M3 else DTYPE
    p = gl.convert_layout(weights.to(NARROW), gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)
    words = nope.load(value_words(TILE, nope.shape[1]))
    v = value_operand(words, E4M3, DTYPE, gl.DotOperandLayout(0, SUMS, 2))
    return new, mma_v2(v, p, o)


@gluon.jit
def consume_narrow(
    query_ptr, rotary_ptr, ids_ptr, lens_ptr, factor_ptr, sinks_ptr, out_ptr, lse_ptr, states_ptr,
    sums_ptr, nope, tail, q, q_rope, undo, scores, logs, ends, full, empty, q_full, done, ids_row,
    topk, scale, query_token, query_head, rotary_token, rotary_head, W: gl.constexpr,
    HEADS: gl.constexpr, HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr,
    HAS_LENS: gl.constexpr, KIND: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Process every other tile, from tile W on, in warp group W; group 0 writes the result of both.

    The number of stages is even, so a stage always belongs to the same warp group. Otherwise, where
    copies overtake each other, a group could be a tile ahead of the other that has not arrived, and
    mistake the parity of an earlier tile for its own.
    """
    E4M3: gl.constexpr = KIND != NATIVE
    ROWS: gl.constexpr = q.shape[1]
    PRODUCT: gl.constexpr = (
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
        if E4M3
        else gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    )
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    STAGES: gl.constexpr = nope.shape[0]
    gl.static_assert(STAGES % 2 == 0)
    TILE: gl.constexpr = nope.shape[1]
    WEIGHTS: gl.constexpr = weights_layout(TILE, ROWS)
    work = gl.program_id(0)
    token = work // (HEAD_TILES * PARTS)
    head_tile = work % HEAD_TILES
    part = work // HEAD_TILES % PARTS
    if W == 0:
        # Queries are loaded before rows are copied: behind the copies they would come last.
        x = _load_queries(query_ptr, token, head_tile, query_token, query_head, HEADS, ROWS, 512)
        r = _load_queries(rotary_ptr, token, head_tile, rotary_token, rotary_head, HEADS, ROWS, 64)
    low = part * SEGMENT
    high = gl.minimum(topk, low + SEGMENT)
    if HAS_LENS:
        high = gl.minimum(high, gl.load(lens_ptr + token))
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    COUNTS: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[0, 4], [0, 8]], [], [16, 16]
    )
    m = gl.full([16, 16], float("-inf"), gl.float32, COUNTS)
    l = gl.zeros([16, 16], gl.float32, COUNTS)
    if E4M3:
        BY_KEY: gl.constexpr = by_key_layout(ROWS)
        m = gl.full([32, ROWS], float("-inf"), gl.float32, BY_KEY)
        l = gl.zeros([32, ROWS], gl.float32, BY_KEY)
    top = gl.full([4, ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, WEIGHTS))
    o = gl.zeros([4, 128, ROWS], gl.float32, SUMS)
    factor = 1.0
    if KIND == RAW:
        factor = gl.load(factor_ptr)
    if high > low:
        if W == 0:
            _store_queries(x, r, q, q_rope.index(0), undo, KIND)
            if E4M3:
                fence_async_shared()
            thread_barrier()
            mbarrier.arrive(q_full, count=1)
        KEY: gl.constexpr = gl.SliceLayout(1 if E4M3 else 0, PRODUCT)
        mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
        present = entries(mine, low + W * TILE, high, TILE, KEY)
        logits_scale = scale * factor * LOG2E
        mbarrier.wait(q_full, 0)
        if not E4M3:
            q0 = q.index(0).load(gl.DotOperandLayout(0, PRODUCT, 2))
            q1 = q.index(1).load(gl.DotOperandLayout(0, PRODUCT, 2))
        turn = W
        for first in range(low + W * TILE, high, 2 * TILE):
            there = present >= 0
            present = entries(mine, first + 2 * TILE, high, TILE, KEY)
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            if E4M3:
                s = group_scores(
                    opaque_zero(), q, q_rope, undo, nope.index(stage), tail.index(stage), there,
                    logs, logits_scale, KIND == SCALED, DTYPE, PRODUCT,
                )  # fmt: skip
                m, l = count_keys(s, m, l)
            else:
                s = _scores(
                    opaque_zero(), q0, q1, q, q_rope, nope.index(stage), tail.index(stage), there,
                    logits_scale, DTYPE, PRODUCT,
                )  # fmt: skip
                m, l = _count(s, m, l)
                s = gl.permute(s, (1, 0))
            top, o = _attend(s, top, o, nope.index(stage), scores, logs, KIND, DTYPE)
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            turn += 2
    if E4M3:
        m = gl.permute(m, (1, 0))
        l = gl.permute(l, (1, 0))
    # Combine the maxima and sums of a row's threads, and rescale the output to that maximum.
    most = gl.max(m, 1)
    sums = gl.sum(l * exp2(m - base_of(most)[:, None]), 1)
    grow = exp2(top - _to(base_of(most), gl.SliceLayout(0, gl.SliceLayout(1, WEIGHTS)))[None, :])
    o = o * _to(grow, gl.SliceLayout(1, SUMS))[:, None, :]
    if high > low:
        # Group 1 hands its output over in the buffer of its own last tile, or of a tile never used.
        tiles = (high - low + (TILE - 1)) // TILE
        spare = reinterpret(
            nope.index(gl.maximum(tiles // 2 * 2 - 1, 1) % STAGES), gl.float32,
            [16 // ROWS, 4, 128, ROWS], gl.SwizzledSharedLayout(8, 2, ROWS // 8, [2, 1, 0]),
        ).index(0)  # fmt: skip
        if W == 1:
            spare.store(o)
            ends.index(0).store(most)
            ends.index(1).store(sums)
            thread_barrier()
            mbarrier.arrive(done, count=1)
        else:
            mbarrier.wait(done, 0)
            other = ends.index(0).load(most.type.layout)
            both = gl.maximum(most, other)
            shrink = exp2(most - base_of(both))
            by = exp2(other - base_of(both))
            sums = gl.fma(sums, shrink, ends.index(1).load(most.type.layout) * by)
            most = both
            ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SUMS))
            o = o * _to(shrink, ROW)[None, :][:, None, :]
            o = o + spare.load(SUMS) * _to(by, ROW)[None, :][:, None, :]
    if W == 0:
        _finish(
            most, sums, natural_order(o, KIND != NATIVE), token, head_tile, part, high > low,
            factor, out_ptr, lse_ptr, sinks_ptr, states_ptr, sums_ptr, HEADS, HEAD_TILES, PARTS,
            OUT_TOKEN, OUT_HEAD, LSE_TOKEN, SINKS, LSE,
        )  # fmt: skip


@gluon.jit
def _to(x, LAYOUT: gl.constexpr):
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def _finish(
    m, l, o, token, head_tile, part, some, factor, out_ptr, lse_ptr, sinks_ptr, states_ptr,
    sums_ptr, HEADS: gl.constexpr, HEAD_TILES: gl.constexpr, PARTS: gl.constexpr,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, SINKS: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """Write output and LSE of a tile of heads; with several parts, store the state of this part."""
    OUT: gl.constexpr = o.type.layout
    ROWS: gl.constexpr = o.shape[0]
    l = _to(l, gl.SliceLayout(1, OUT))
    m = _to(m, gl.SliceLayout(1, OUT))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, OUT))
    if PARTS == 1:
        head = head_tile * ROWS + row
        write_rows(
            m, l, o, token + row * 0, head, head < HEADS, column, column >= 0,
            Out(
                out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
                out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=SINKS,
                FP8_OUT=False, LSE=LSE,
            ),
            factor, LSE, True,
        )  # fmt: skip
    elif some:
        slot = wide((token * HEAD_TILES + head_tile) * PARTS + part)
        gl.store(sums_ptr + slot * (2 * STATE_ROWS) + row, m)
        gl.store(sums_ptr + slot * (2 * STATE_ROWS) + STATE_ROWS + row, l)
        cells = row[:, None] * 512 + column[None, :]
        gl.store(states_ptr + slot * (STATE_ROWS * 512) + cells, o)
