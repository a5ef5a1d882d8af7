"""The consumers of the wide Hopper latent kernel: two warp groups, each with half of the columns.

A tile is two blocks of 64 keys. Warp group 0 computes the scores of block 0, warp group 1 the
scores of block 1. Each then multiplies the weights of both blocks with its half of the output's
columns, so the groups exchange weights P and running maximum m through shared memory: from 0 to 1,
and back from 1 to 0. The two halves of the output thus always refer to the same maximum. Since the
groups take turns, one buffer holds the weights of either block.

    0:  output += P1 V1 (of the tile before); scores of block 0; softmax; P0, m; output += P0 V0
    1:  scores of block 1; takes P0, m; output += P0 V0, softmax under it; P1, m; output += P1 V1
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_decode.parts import FIELDS, share_at
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.hopper_prefill.vector_store import side_by_side, store_side_by_side
from attn.kernels.dense.query_rows import write_lse
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.wgmma import base_of, scaled_rows
from attn.kernels.latent.hopper_wide.parts import BLOCK, HALF, cut_at, store_part

_TILE = tl.constexpr(128)


@gluon.jit
def _clear_tail(rows, z, live, W: gl.constexpr, RUN: gl.constexpr):
    """Zero a block's values from key ``live`` to the end of its run of RUN keys.

    No request wrote those slots, so they may hold NaN, and zero times NaN is NaN. Pages without
    live slots are zeros already. ``rows`` is the warp group's half of the values, seen as rows of
    boxes; the swizzle of a row's columns does not matter to zeros.
    """
    if (live > 0) & (live < BLOCK) & (live % RUN != 0):
        zeros = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        for row in range(live, (live // RUN + 1) * RUN):
            for i in gl.static_range(4):
                rows.index(z + (4 * W + i) * BLOCK + row).store(zeros)
        # The zeros must be visible before products read them and before TMA overwrites them.
        fence_async_shared()
        thread_barrier()


@gluon.jit
def _scores(
    z, phase, q, q_rope, left, right, rope, full, W: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """Start the block's score products over the columns that arrive first: rope and left half."""
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(full.index(W), phase)
    keys = rope.index(z + W).permute((1, 0))
    s = warpgroup_mma(q_rope.index(z), keys, zero, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 + W), phase)
    return warpgroup_mma(q.index(z), left.index(z + W).permute((1, 0)), s, is_async=True)


@gluon.jit
def _all_scores(
    s, z, phase, tile, q, right, full, limit, all_high, W: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """Complete the scores with the right half of keys; -inf where a row does not see the key."""
    mbarrier.wait(full.index(4 + W), phase)
    s = warpgroup_mma(q.index(z + 1), right.index(z + W).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if tile * _TILE + (W + 1) * BLOCK > all_high:
        key = tile * _TILE + W * BLOCK + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        s = gl.where(key[None, :] <= limit[:, None], s, float("-inf"))
    return s


@gluon.jit
def _publish(weights, m, p, m_of, ready, empty, W: gl.constexpr):
    """Hand weights and maximum to the other warp group, and free the rope part of the keys."""
    p.store(weights)
    m_of.store(m)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(ready.index(W), count=1)
    mbarrier.arrive(empty.index(W), count=1)


@gluon.jit
def _take_second(
    z, turn, tile, m, l, o, p, m_second, left, left_rows, ready, kv_len, RUN: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Warp group 0 takes block 1's maximum and weights, and starts their product with values."""
    mbarrier.wait(ready.index(1), turn & 1)
    top = m_second.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(m - base_of(top))
    o = scaled_rows(o, shrink)
    _clear_tail(left_rows, z, kv_len - tile * _TILE - BLOCK, 1, RUN)
    return top, l * shrink, warpgroup_mma(p.index(z), left.index(z + 1), o, is_async=True)


@gluon.jit
def _first_block(
    turn, tile, m, l, o, q, q_rope, left, right, rope, left_rows, p, m_first, m_second, full,
    empty, ready, factor, limit, all_high, kv_len, IS_FIRST: gl.constexpr, RUN: gl.constexpr,
    DTYPE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Process one tile in warp group 0, which has the scores of the first block."""
    OUTPUT: gl.constexpr = o.type.layout
    z = opaque_zero()
    phase = turn & 1
    if not IS_FIRST:
        m, l, o = _take_second(
            z, turn - 1, tile - 1, m, l, o, p, m_second, left, left_rows, ready, kv_len, RUN, SCORES
        )
    s = _scores(z, phase, q, q_rope, left, right, rope, full, 0, SCORES)
    if not IS_FIRST:
        # Wait for all products but the two of scores that were started since.
        o = warpgroup_mma_wait(2, deps=[o])
        thread_barrier()
        mbarrier.arrive(empty.index(3), count=1)
    s = _all_scores(s, z, phase, tile, q, right, full, limit, all_high, 0, SCORES)
    # Maxima are in units of log 2 and rounded once, so that differences of two are nearly exact.
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = base_of(top)
    weights = gl.exp2(s * factor - base[:, None])
    narrow = weights.to(DTYPE)
    _publish(narrow, top, p.index(0), m_first, ready, empty, 0)
    shrink = gl.exp2(m - base)
    o = scaled_rows(o, shrink)
    l = l * shrink + gl.sum(weights, 1)
    _clear_tail(left_rows, z, kv_len - tile * _TILE, 0, RUN)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, OUTPUT, 2))
    o = warpgroup_mma(operand, left.index(z), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(empty.index(2), count=1)
    return top, l, o


@gluon.jit
def _take_first(
    z, turn, tile, m, o, p, m_first, right, right_rows, ready, kv_len, RUN: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Warp group 1 takes block 0's maximum and weights, and starts their product with values."""
    mbarrier.wait(ready.index(0), turn & 1)
    top = m_first.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(m - base_of(top))
    o = scaled_rows(o, shrink)
    _clear_tail(right_rows, z, kv_len - tile * _TILE, 0, RUN)
    return top, shrink, warpgroup_mma(p.index(z), right.index(z), o, is_async=True)


@gluon.jit
def _second_block(
    turn, tile, m, l, o, q, q_rope, left, right, rope, right_rows, p, m_first, m_second, full,
    empty, ready, factor, limit, all_high, kv_len, EARLY: gl.constexpr, RUN: gl.constexpr,
    DTYPE: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Process one tile in warp group 1, which has the scores of the second block.

    EARLY frees half of the first block while the second block is still arriving. That is better
    where memory is the limit, and worse where products are.
    """
    OUTPUT: gl.constexpr = o.type.layout
    z = opaque_zero()
    phase = turn & 1
    if EARLY:
        first, shrink, o = _take_first(
            z, turn, tile, m, o, p, m_first, right, right_rows, ready, kv_len, RUN, SCORES
        )
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(empty.index(4), count=1)
    s = _scores(z, phase, q, q_rope, left, right, rope, full, 1, SCORES)
    s = _all_scores(s, z, phase, tile, q, right, full, limit, all_high, 1, SCORES)
    own = gl.max(s, 1) * factor
    if not EARLY:
        first, shrink, o = _take_first(
            z, turn, tile, m, o, p, m_first, right, right_rows, ready, kv_len, RUN, SCORES
        )
    top = gl.maximum(first, own)
    base = base_of(top)
    # Unless EARLY, this runs while the product with the first block does.
    weights = gl.exp2(s * factor - base[:, None])
    again = gl.exp2(first - base)
    l = l * (shrink * again) + gl.sum(weights, 1)
    narrow = weights.to(DTYPE)
    if not EARLY:
        # The product with the first block reads the weights' buffer, which is free only now.
        o = warpgroup_mma_wait(0, deps=[o])
    _publish(narrow, top, p.index(0), m_second, ready, empty, 1)
    if not EARLY:
        mbarrier.arrive(empty.index(4), count=1)
    o = scaled_rows(o, again)
    _clear_tail(right_rows, z, kv_len - tile * _TILE - BLOCK, 1, RUN)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, OUTPUT, 2))
    o = warpgroup_mma(operand, right.index(z + 1), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(empty.index(5), count=1)
    return top, l, o


@gluon.jit
def _load_queries(
    query_ptr, token, count, in_group, q_boxes, q_rope, loaded, phase, W: gl.constexpr,
    GROUP: gl.constexpr, TILE_HEADS: gl.constexpr, QUERY_TOKEN: gl.constexpr,
    QUERY_HEAD: gl.constexpr,
):  # fmt: skip
    """Copy the queries of a work item to shared memory; each warp group copies its half.

    No product still reads the previous item's queries: the groups met after its last product, when
    they exchanged their sums.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    head = in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (head < GROUP)
    offset = (token + row // TILE_HEADS).to(gl.int64) * QUERY_TOKEN + head * QUERY_HEAD
    at = query_ptr + offset[:, None] + column[None, :]
    for i in gl.static_range(4):
        part = gl.load(at + (W * HALF + i * 64), mask=wanted[:, None], other=0.0)
        q_boxes.index(W * 4 + i).store(part)
    if W == 0:
        q_rope.index(0).store(gl.load(at + 2 * HALF, mask=wanted[:, None], other=0.0))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(loaded, count=1)
    mbarrier.wait(loaded, phase)


@gluon.jit
def consume_latents(
    query_ptr, q_boxes, q_rope, left_boxes, right_boxes, rope_boxes, p, m_first, m_second, sums_of,
    full, empty, ready, loaded, out_ptr, lse_ptr, rows_ptr, shares_ptr, states_ptr, sums_ptr,
    factor, W: gl.constexpr, HEADS: gl.constexpr, HEAD_LOOPS: gl.constexpr, GROUP: gl.constexpr,
    TILE_HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr, DTYPE: gl.constexpr, RUN: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, QUERY_HEAD: gl.constexpr, OUT_TOKEN: gl.constexpr,
    OUT_HEAD: gl.constexpr, LSE_TOKEN: gl.constexpr, EARLY: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Process the program's share of the plan in warp group W's half of the output's columns."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    USED: gl.constexpr = TILE_HEADS * QUERY_TOKENS
    WRITES_LSE: gl.constexpr = LSE and W == 0
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Views of the boxes: as tiles that products read, and as rows, to clear a tail.
    q = reinterpret(q_boxes, DTYPE, [2, 64, 256], LAYOUT)
    left = reinterpret(left_boxes, DTYPE, [2, 64, 256], LAYOUT)
    right = reinterpret(right_boxes, DTYPE, [2, 64, 256], LAYOUT)
    rope = reinterpret(rope_boxes, DTYPE, [2, 64, 64], LAYOUT)
    if W == 0:
        own_rows = reinterpret(left_boxes, gl.int32, [8 * BLOCK, 32], FLAT)
    else:
        own_rows = reinterpret(right_boxes, gl.int32, [8 * BLOCK, 32], FLAT)
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    turn = 0
    walks = 0
    for r in range(first_row, past_row):
        end, _, kv_len, first, high = cut_at(r, mine, fields, begin)
        in_group = ((r % HEAD_LOOPS) * HEADS + gl.program_id(0) % HEADS) * TILE_HEADS
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        # Last visible key, not the key after it: LLVM would add that 1 in pairs of 16 bits, which
        # ptxas 12.8 gets wrong.
        limit = gl.minimum(first + row // TILE_HEADS, kv_len - 1)
        all_high = gl.minimum(first + 1, kv_len)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        o = gl.zeros([64, HALF], gl.float32, OUTPUT)
        if high > begin:
            _load_queries(
                query_ptr, gl.load(fields + 1), gl.load(fields + 2), in_group, q_boxes, q_rope,
                loaded, walks & 1, W, GROUP, TILE_HEADS, QUERY_TOKEN, QUERY_HEAD,
            )  # fmt: skip
            if W == 0:
                m, l, o = _first_block(
                    turn, begin, m, l, o, q, q_rope, left, right, rope, own_rows, p, m_first,
                    m_second, full, empty, ready, factor, limit, all_high, kv_len, True, RUN, DTYPE,
                    SCORES,
                )  # fmt: skip
                turn += 1
                for tile in range(begin + 1, high):
                    m, l, o = _first_block(
                        turn, tile, m, l, o, q, q_rope, left, right, rope, own_rows, p, m_first,
                        m_second, full, empty, ready, factor, limit, all_high, kv_len, False, RUN,
                        DTYPE, SCORES,
                    )  # fmt: skip
                    turn += 1
                m, l, o = _take_second(
                    opaque_zero(), turn - 1, high - 1, m, l, o, p, m_second, left, own_rows, ready,
                    kv_len, RUN, SCORES,
                )  # fmt: skip
                o = warpgroup_mma_wait(0, deps=[o])
                thread_barrier()
                mbarrier.arrive(empty.index(3), count=1)
            else:
                for tile in range(begin, high):
                    m, l, o = _second_block(
                        turn, tile, m, l, o, q, q_rope, left, right, rope, own_rows, p, m_first,
                        m_second, full, empty, ready, factor, limit, all_high, kv_len, EARLY, RUN,
                        DTYPE, SCORES,
                    )  # fmt: skip
                    turn += 1
            # Each warp group has the sum over its own blocks; both refer to the same maximum.
            sums_of.index(W).store(l)
            thread_barrier()
            mbarrier.arrive(ready.index(2 + W), count=1)
            mbarrier.wait(ready.index(3 - W), walks & 1)
            walks += 1
            l += sums_of.index(1 - W).load(gl.SliceLayout(1, SCORES))
        most = gl.convert_layout(m, gl.SliceLayout(1, OUTPUT))
        sums = gl.convert_layout(l, gl.SliceLayout(1, OUTPUT))
        if (begin == 0) & (end == gl.load(fields + 6)):
            # These are loaded once more instead of being kept in registers during the loop.
            count = gl.load(fields + 2)
            token = gl.load(fields + 1)
            # This runs once for a work item and waits for its instructions to be fetched, so the
            # code is kept short.
            some = most > float("-inf")
            if WRITES_LSE:
                place = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
                head = in_group + place % TILE_HEADS
                wanted = (place < count * TILE_HEADS) & (head < GROUP)
                at = token + place // TILE_HEADS
                write_lse(some, most, sums, at, head, wanted, lse_ptr, LSE_TOKEN)
            by = 1.0 / gl.where(some, sums, 1.0)
            out = side_by_side((o * by[:, None]).to(out_ptr.dtype.element_ty))
            ROWS: gl.constexpr = out.type.layout
            place = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)) + opaque_zero()
            head = in_group + place % TILE_HEADS
            wanted = (place < count * TILE_HEADS) & (head < GROUP)
            at = (token + place // TILE_HEADS).to(gl.int64) * OUT_TOKEN + head * OUT_HEAD
            store_side_by_side(out, at, wanted, W * HALF, out_ptr)
        else:
            # A program has two slots: the first for an item that another program began, the second
            # for an item that goes on in another program.
            slot = 2 * gl.program_id(0) + (begin == 0).to(gl.int32)
            store_part(states_ptr, sums_ptr, slot, most, sums, o, opaque_zero(), W, USED)
        begin = 0
        fields = rows_ptr + wide(((r + 1) // HEAD_LOOPS) * FIELDS)
