"""The consumers of the wide Hopper sparse kernel: two warp groups, each with half of the columns.

A tile is two blocks of keys. Each warp group computes the scores of one block and half of the
output's columns for both blocks; the groups exchange weights and maxima through shared memory.
:mod:`attn.kernels.latent.hopper_wide.consumer` draws the order of steps.

A list names existing keys only, so no key lies past the end of its request. An entry that lists no
row is a row of zeros, and -inf (its *gap*) is added to its scores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_prefill.scheduler import sum_of_own
from attn.kernels.dense.hopper_prefill.vector_store import side_by_side, store_side_by_side
from attn.kernels.dense.query_rows import with_sinks, write_lse
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.wgmma import base_of, scaled_rows
from attn.kernels.latent.hopper_wide.parts import store_part
from attn.kernels.sparse.hopper_wide.finish import finish_shared
from attn.kernels.sparse.hopper_wide.parts import BLOCK, HALF, work_at, works_of


@gluon.jit
def _times(l, shrink):
    """Multiply the sums ``[64, 4]``, kept by thread, by a factor for each row ``[64]``."""
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    return l * own[:, None].broadcast_to(64, 4)


@gluon.jit
def _wait_for_keys(full, phase):
    """Wait for keys that threads copied; products use another proxy, so make keys visible to it."""
    mbarrier.wait(full, phase)
    fence_async_shared()


@gluon.jit
def _scores(
    z, phase, q, q_rope, keys, rope, gaps, full, W: gl.constexpr, WHOLE: gl.constexpr,
    FIRST: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Start the block's score products over the columns that arrive first: rope and half FIRST.

    ``keys`` has the columns of that half. With WHOLE all columns of a block arrive at once. Returns
    the scores, still in flight, and the gaps to add to them.
    """
    KEYS: gl.constexpr = rope.shape[1]
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    if WHOLE:
        # The producer made its stores visible to products before it arrived.
        mbarrier.wait(full.index(W), phase)
    else:
        _wait_for_keys(full.index(W), phase)
    rotary = rope.index(z + W).permute((1, 0))
    s = warpgroup_mma(q_rope.index(z), rotary, zero, use_acc=False, is_async=True)
    gap = gaps.index(W).load(gl.SliceLayout(0, SCORES))
    if not WHOLE:
        _wait_for_keys(full.index(2 + W), phase)
    half = keys.index(z + W).permute((1, 0))
    return warpgroup_mma(q.index(z + FIRST), half, s, is_async=True), gap


@gluon.jit
def _all_scores(
    s, gap, z, phase, q, keys, full, W: gl.constexpr, WHOLE: gl.constexpr, LAST: gl.constexpr
):
    """Complete the scores with half LAST of the keys, and add the gaps."""
    if not WHOLE:
        _wait_for_keys(full.index(4 + W), phase)
    s = warpgroup_mma(q.index(z + LAST), keys.index(z + W).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    return s + gap[None, :]


@gluon.jit
def _publish(weights, m, is_last, p, m_of, ready, empty, q_empty, W: gl.constexpr):
    """Hand weights and maximum to the other warp group; free the rope part of the keys.

    After the last tile the queries are freed too.
    """
    p.store(weights)
    m_of.store(m)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready.index(W), count=1)
    mbarrier.arrive(empty.index(W), count=1)
    mbarrier.arrive(q_empty, count=1, pred=is_last)


@gluon.jit
def _take_second(
    z, turn, m, l, o, p, m_second, left, ready, SCORES: gl.constexpr
):  # fmt: skip
    """Warp group 0 takes block 1's maximum and weights, and starts their product with values."""
    mbarrier.wait(ready.index(1), turn & 1)
    top = m_second.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(m - base_of(top))
    o = scaled_rows(o, shrink)
    return top, _times(l, shrink), warpgroup_mma(p.index(z), left.index(z + 1), o, is_async=True)


@gluon.jit
def _first_block(
    turn, is_last, m, l, o, q, q_rope, left, right, rope, gaps, p, m_first, m_second, full, empty,
    ready, q_empty, factor, IS_FIRST: gl.constexpr, EARLY: gl.constexpr, WHOLE: gl.constexpr,
    DTYPE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Process one tile in warp group 0, which has the scores of the first block.

    EARLY frees half of the second block before the group waits for more keys.
    """
    OUTPUT: gl.constexpr = o.type.layout
    z = opaque_zero()
    phase = turn & 1
    if not IS_FIRST:
        m, l, o = _take_second(z, turn - 1, m, l, o, p, m_second, left, ready, SCORES)
        if EARLY:
            o = warpgroup_mma_wait(0, deps=[o])
            thread_barrier()
            mbarrier.arrive(empty.index(3), count=1)
    s, gap = _scores(z, phase, q, q_rope, left, rope, gaps, full, 0, WHOLE, 0, SCORES)
    if not IS_FIRST and not EARLY:
        # Wait for all products but the two of scores that were started since.
        o = warpgroup_mma_wait(2, deps=[o])
        thread_barrier()
        mbarrier.arrive(empty.index(3), count=1)
    s = _all_scores(s, gap, z, phase, q, right, full, 0, WHOLE, 1)
    # Maxima are in units of log 2 and rounded once, so that differences of two are nearly exact.
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = base_of(top)
    weights = gl.exp2(s * factor - base[:, None])
    narrow = weights.to(DTYPE)
    _publish(narrow, top, is_last, p.index(0), m_first, ready, empty, q_empty, 0)
    shrink = gl.exp2(m - base)
    o = scaled_rows(o, shrink)
    l = _times(l, shrink) + sum_of_own(weights)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, OUTPUT, 2))
    o = warpgroup_mma(operand, left.index(z), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(empty.index(2), count=1)
    return top, l, o


@gluon.jit
def _take_first(
    z, turn, m, o, p, m_first, right, ready, SCORES: gl.constexpr
):  # fmt: skip
    """Warp group 1 takes block 0's maximum and weights, and starts their product with values."""
    mbarrier.wait(ready.index(0), turn & 1)
    top = m_first.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(m - base_of(top))
    o = scaled_rows(o, shrink)
    return top, shrink, warpgroup_mma(p.index(z), right.index(z), o, is_async=True)


@gluon.jit
def _second_block(
    turn, is_last, m, l, o, q, q_rope, left, right, rope, gaps, p, m_first, m_second, full, empty,
    ready, q_empty, factor, EARLY: gl.constexpr, WHOLE: gl.constexpr,
    DTYPE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Process one tile in warp group 1, which has the scores of the second block.

    EARLY frees half of the first block while the second block is still arriving.
    """
    OUTPUT: gl.constexpr = o.type.layout
    z = opaque_zero()
    phase = turn & 1
    if EARLY:
        first, shrink, o = _take_first(z, turn, m, o, p, m_first, right, ready, SCORES)
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(empty.index(4), count=1)
    if WHOLE:
        s, gap = _scores(z, phase, q, q_rope, left, rope, gaps, full, 1, True, 0, SCORES)
        s = _all_scores(s, gap, z, phase, q, right, full, 1, True, 1)
    else:
        # The halves arrive in the order in which their buffers became free.
        s, gap = _scores(z, phase, q, q_rope, right, rope, gaps, full, 1, False, 1, SCORES)
        s = _all_scores(s, gap, z, phase, q, left, full, 1, False, 0)
    own = gl.max(s, 1) * factor
    if not EARLY:
        first, shrink, o = _take_first(z, turn, m, o, p, m_first, right, ready, SCORES)
    top = gl.maximum(first, own)
    base = base_of(top)
    # Unless EARLY, this runs while the product with the first block does.
    weights = gl.exp2(s * factor - base[:, None])
    again = gl.exp2(first - base)
    l = _times(l, shrink * again) + sum_of_own(weights)
    narrow = weights.to(DTYPE)
    if not EARLY:
        # The product with the first block reads the weights' buffer, which is free only now.
        o = warpgroup_mma_wait(0, deps=[o])
    _publish(narrow, top, is_last, p.index(0), m_second, ready, empty, q_empty, 1)
    if not EARLY:
        mbarrier.arrive(empty.index(4), count=1)
    o = scaled_rows(o, again)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, OUTPUT, 2))
    o = warpgroup_mma(operand, right.index(z + 1), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(empty.index(5), count=1)
    return top, l, o


@gluon.jit
def consume_listed(
    q_boxes, q_rope, left_boxes, right_boxes, rope_boxes, gaps, p, m_first, m_second, sums_of, full,
    empty, ready, q_full, q_empty, out_ptr, lse_ptr, sinks_ptr, lens_ptr, states_ptr,
    sums_ptr, counters_ptr, factor, topk, total, W: gl.constexpr, HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, DTYPE: gl.constexpr,
    OUT_TOKEN: gl.constexpr, OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr,
    HAS_LENS: gl.constexpr, BALANCED: gl.constexpr, EARLY: gl.constexpr, WHOLE: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Process the program's pieces of work in warp group W's half of the output's columns."""
    KEYS: gl.constexpr = rope_boxes.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WRITES_LSE: gl.constexpr = LSE and W == 0
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = reinterpret(q_boxes, DTYPE, [2, 64, 256], LAYOUT)
    left = reinterpret(left_boxes, DTYPE, [2, KEYS, 256], LAYOUT)
    right = reinterpret(right_boxes, DTYPE, [2, KEYS, 256], LAYOUT)
    rope = reinterpret(rope_boxes, DTYPE, [2, KEYS, 64], LAYOUT)
    turn = 0
    walks = 0
    first, last, step = works_of(total, topk, KEYS, HEAD_TILES, BALANCED)
    for work in range(first, last, step):
        token, head_tile, part, _, low, high, meets = work_at(
            work, total, lens_ptr, topk, KEYS, HEAD_TILES, SEGMENT, PARTS, BALANCED, HAS_LENS
        )
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = sum_of_own(gl.zeros([64, KEYS], gl.float32, SCORES))
        o = gl.zeros([64, HALF], gl.float32, OUTPUT)
        total_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        if high > low:
            mbarrier.wait(q_full, walks & 1)
            # Threads copied the queries: make them visible to products.
            fence_async_shared()
            if W == 0:
                m, l, o = _first_block(
                    turn, low + 1 == high, m, l, o, q, q_rope, left, right, rope, gaps, p, m_first,
                    m_second, full, empty, ready, q_empty, factor, True, EARLY, WHOLE, DTYPE,
                    SCORES,
                )  # fmt: skip
                turn += 1
                for tile in range(low + 1, high):
                    m, l, o = _first_block(
                        turn, tile + 1 == high, m, l, o, q, q_rope, left, right, rope, gaps, p,
                        m_first, m_second, full, empty, ready, q_empty, factor, False, EARLY, WHOLE,
                        DTYPE, SCORES,
                    )  # fmt: skip
                    turn += 1
                m, l, o = _take_second(
                    opaque_zero(), turn - 1, m, l, o, p, m_second, left, ready, SCORES
                )
                o = warpgroup_mma_wait(0, deps=[o])
                thread_barrier()
                mbarrier.arrive(empty.index(3), count=1)
            else:
                for tile in range(low, high):
                    m, l, o = _second_block(
                        turn, tile + 1 == high, m, l, o, q, q_rope, left, right, rope, gaps, p,
                        m_first, m_second, full, empty, ready, q_empty, factor, EARLY, WHOLE,
                        DTYPE, SCORES,
                    )  # fmt: skip
                    turn += 1
            # Each warp group has the sum over its own blocks; both refer to the same maximum.
            total_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, SCORES))
            sums_of.index(W).store(total_sum)
            thread_barrier()
            mbarrier.arrive(ready.index(2 + W), count=1)
            mbarrier.wait(ready.index(3 - W), walks & 1)
            walks += 1
            total_sum += sums_of.index(1 - W).load(gl.SliceLayout(1, SCORES))
        most = gl.convert_layout(m, gl.SliceLayout(1, OUTPUT))
        sums = gl.convert_layout(total_sum, gl.SliceLayout(1, OUTPUT))
        writes = low == 0
        if BALANCED:
            if meets > 0:
                writes, most, sums, o = finish_shared(
                    meets * HEAD_TILES + head_tile, low > 0, most, sums, o, states_ptr, sums_ptr,
                    counters_ptr, W,
                )  # fmt: skip
        if PARTS > 1:
            if high > low:
                slot = (token * HEAD_TILES + head_tile) * PARTS + part
                store_part(states_ptr, sums_ptr, slot, most, sums, o, opaque_zero(), W, BLOCK)
        elif writes:
            place = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
            head = head_tile * BLOCK + place
            wanted = head < HEADS
            # This runs once for a list and waits for its instructions to be fetched, so the code is
            # kept short.
            some = most > float("-inf")
            by = gl.full([64], 1.0, gl.float32, sums.type.layout)
            if SINKS:
                most, sums, by = with_sinks(some, most, sums, head, wanted, sinks_ptr)
            if WRITES_LSE:
                write_lse(some, most, sums, token + place * 0, head, wanted, lse_ptr, LSE_TOKEN)
            by /= gl.where(some, sums, 1.0)
            out = side_by_side((o * by[:, None]).to(DTYPE))
            ROWS: gl.constexpr = out.type.layout
            place = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)) + opaque_zero()
            head = head_tile * BLOCK + place
            at = token.to(gl.int64) * OUT_TOKEN + head * OUT_HEAD
            store_side_by_side(out, at, head < HEADS, W * HALF, out_ptr)
