"""The consumers of the wide Hopper latent kernel: two warp groups, each with half of the columns.

A tile is two blocks of 64 keys. Warp group 0 computes the scores of block 0, warp group 1 the
scores of block 1. Each then multiplies the weights of both blocks with its half of the output's
columns, so the groups exchange weights P and running maximum m through shared memory: from 0 to 1,
and back from 1 to 0. The two halves of the output thus always refer to the same maximum. Since the
groups take turns, one buffer holds the weights of either block.

    0:  output += P1 V1 (of the tile before); scores of block 0; softmax; P0, m; output += P0 V0
    1:  scores of block 1; takes P0, m; output += P0 V0, softmax under it; P1, m; output += P1 V1

Over e4m3 others do this: :mod:`attn.kernels.latent.hopper_wide.scorer` and
:mod:`attn.kernels.latent.hopper_wide.columns`.
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

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.opaque import opaque, opaque_zero
from attn.kernels.lang.structures import State
from attn.kernels.lang.wgmma import base_of, scaled_rows
from attn.kernels.latent.hopper_wide.output import write_part
from attn.kernels.latent.hopper_wide.parts import (
    BLOCK,
    HALF,
    clear_tail,
    cut_at,
    share_with_item_at,
)
from attn.kernels.latent.hopper_wide.queries import load_queries
from attn.kernels.latent.structures import Operands, causal_bounds

_TILE = tl.constexpr(128)


@gluon.jit
def _scores(z, phase, operands, ring, W: gl.constexpr, SCORES: gl.constexpr):
    """Start block W's score products over the columns that arrive first: rope and left half.

    The scores are ``[64, 64]`` fp32; the products still run when this returns.
    """
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    mbarrier.wait(ring.full.index(W), phase)
    keys = operands.rope.index(z + W).permute((1, 0))
    s = warpgroup_mma(operands.q_rope.index(z), keys, zero, use_acc=False, is_async=True)
    mbarrier.wait(ring.full.index(2 + W), phase)
    q = operands.q.index(z)
    return warpgroup_mma(q, operands.left.index(z + W).permute((1, 0)), s, is_async=True)


@gluon.jit
def _all_scores(s, z, phase, key_tile, operands, ring, bounds, W: gl.constexpr):
    """Complete the scores with the right half of keys; -inf where a row does not see the key."""
    mbarrier.wait(ring.full.index(4 + W), phase)
    q = operands.q.index(z + 1)
    s = warpgroup_mma(q, operands.right.index(z + W).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if key_tile * _TILE + (W + 1) * BLOCK > bounds.all_high:
        KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
        # Without ``z`` warp group 1 would keep its 16 columns in registers during the loop.
        column = gl.arange(0, 64, layout=KEYS) + z
        key = key_tile * _TILE + W * BLOCK + column
        s = gl.where(key[None, :] <= bounds.limit[:, None], s, float("-inf"))
    return s


@gluon.jit
def _factor(query):
    """The factor of products: the layer's scale in units of log 2.

    It is computed for each tile. A product that the compiler knows would be computed at the start
    of the kernel and occupy a register in all warp groups, and Triton 3.9 spills.
    """
    return opaque(query.scale) * LOG2E


@gluon.jit
def _publish(weights, m, m_of, ring, room, W: gl.constexpr):
    """Hand weights and maximum to the other warp group, and free the rope part of the keys.

    ``weights`` ``[64, 64]`` and ``m`` ``[64]`` are of block W; ``m_of`` is the shared memory for
    its maxima.
    """
    room.weights.index(0).store(weights)
    m_of.store(m)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(room.ready.index(W), count=1)
    mbarrier.arrive(ring.empty.index(W), count=1)


@gluon.jit
def _take_second(z, turn, key_tile, state, operands, ring, room, kv_len, SCORES: gl.constexpr):
    """Warp group 0 takes block 1's maximum and weights, and starts their product with values.

    Returns maximum, sum and output of the state that follows; the product still runs.
    """
    mbarrier.wait(room.ready.index(1), turn & 1)
    top = room.m_second.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(state.m - base_of(top))
    o = scaled_rows(state.acc, shrink)
    clear_tail(operands.rows, z + 4, kv_len - key_tile * _TILE - BLOCK, ring, 4)
    l = state.l * shrink
    o = warpgroup_mma(room.weights.index(z), operands.left.index(z + 1), o, is_async=True)
    return top, l, o


@gluon.jit
def _first_block(
    turn, key_tile, state, operands, query, bounds, ring, room, tile, IS_FIRST: gl.constexpr
):
    """Process one tile in warp group 0, which has the scores of the first block.

    The state's output has the left half of the columns, ``[64, 256]``. Returns the state that
    follows.
    """
    z = opaque_zero()
    phase = turn & 1
    if IS_FIRST:
        m, l, o = state.m, state.l, state.acc
    else:
        m, l, o = _take_second(
            z, turn - 1, key_tile - 1, state, operands, ring, room, bounds.kv_len, tile.SCORES
        )
    s = _scores(z, phase, operands, ring, 0, tile.SCORES)
    if not IS_FIRST:
        # Wait for all products but the two of scores that were started since.
        o = warpgroup_mma_wait(2, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(3), count=1)
    s = _all_scores(s, z, phase, key_tile, operands, ring, bounds, 0)
    factor = _factor(query)
    # Maxima are in units of log 2 and rounded once, so that differences of two are nearly exact.
    top = gl.maximum(m, gl.max(s, 1) * factor)
    base = base_of(top)
    weights = gl.exp2(s * factor - base[:, None])
    narrow = weights.to(tile.DTYPE)
    _publish(narrow, top, room.m_first, ring, room, 0)
    shrink = gl.exp2(m - base)
    o = scaled_rows(o, shrink)
    l = l * shrink + gl.sum(weights, 1)
    clear_tail(operands.rows, z, bounds.kv_len - key_tile * _TILE, ring, 4)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, tile.OUTPUT, 2))
    o = warpgroup_mma(operand, operands.left.index(z), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(ring.empty.index(2), count=1)
    return State(m=top, l=l, acc=o)


@gluon.jit
def _take_first(z, turn, key_tile, state, operands, ring, room, kv_len, SCORES: gl.constexpr):
    """Warp group 1 takes block 0's maximum and weights, and starts their product with values.

    Returns block 0's maximum, the factor of earlier sums, and the output; the product still runs.
    """
    mbarrier.wait(room.ready.index(0), turn & 1)
    top = room.m_first.load(gl.SliceLayout(1, SCORES))
    shrink = gl.exp2(state.m - base_of(top))
    o = scaled_rows(state.acc, shrink)
    clear_tail(operands.rows, z, kv_len - key_tile * _TILE, ring, 4)
    o = warpgroup_mma(room.weights.index(z), operands.right.index(z), o, is_async=True)
    return top, shrink, o


@gluon.jit
def _second_block(turn, key_tile, state, operands, query, bounds, ring, room, tile):
    """Process one tile in warp group 1, which has the scores of the second block.

    The state's output has the right half of the columns, ``[64, 256]``. Returns the state that
    follows. EARLY frees half of the first block while the second block is still arriving. That is
    better where memory is the limit, and worse where products are.
    """
    EARLY: gl.constexpr = ring.EARLY
    SCORES: gl.constexpr = tile.SCORES
    z = opaque_zero()
    phase = turn & 1
    if EARLY:
        first, shrink, o = _take_first(
            z, turn, key_tile, state, operands, ring, room, bounds.kv_len, SCORES
        )
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(4), count=1)
    s = _scores(z, phase, operands, ring, 1, SCORES)
    s = _all_scores(s, z, phase, key_tile, operands, ring, bounds, 1)
    factor = _factor(query)
    own = gl.max(s, 1) * factor
    if not EARLY:
        first, shrink, o = _take_first(
            z, turn, key_tile, state, operands, ring, room, bounds.kv_len, SCORES
        )
    top = gl.maximum(first, own)
    base = base_of(top)
    # Unless EARLY, this runs while the product with the first block does.
    weights = gl.exp2(s * factor - base[:, None])
    again = gl.exp2(first - base)
    l = state.l * (shrink * again) + gl.sum(weights, 1)
    narrow = weights.to(tile.DTYPE)
    if not EARLY:
        # The product with the first block reads the weights' buffer, which is free only now.
        o = warpgroup_mma_wait(0, deps=[o])
    _publish(narrow, top, room.m_second, ring, room, 1)
    if not EARLY:
        mbarrier.arrive(ring.empty.index(4), count=1)
    o = scaled_rows(o, again)
    clear_tail(operands.rows, z + 4, bounds.kv_len - key_tile * _TILE - BLOCK, ring, 4)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, tile.OUTPUT, 2))
    o = warpgroup_mma(operand, operands.right.index(z + 1), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(ring.empty.index(5), count=1)
    return State(m=top, l=l, acc=o)


@gluon.jit
def _operands_of(W: gl.constexpr, ring, room, tile):
    """View the boxes as tiles that warp group W's products read, and as rows, to clear a tail."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = reinterpret(room.q_boxes, tile.DTYPE, [2, 64, 256], LAYOUT)
    left = reinterpret(ring.left_boxes, tile.DTYPE, [2, 64, 256], LAYOUT)
    right = reinterpret(ring.right_boxes, tile.DTYPE, [2, 64, 256], LAYOUT)
    rope = reinterpret(ring.rope_boxes, tile.DTYPE, [2, 64, 64], LAYOUT)
    if W == 0:
        rows = reinterpret(ring.left_boxes, gl.int32, [8 * BLOCK, 32], FLAT)
    else:
        rows = reinterpret(ring.right_boxes, gl.int32, [8 * BLOCK, 32], FLAT)
    return Operands(q=q, q_rope=room.q_rope, left=left, right=right, rope=rope, rows=rows)


@gluon.jit
def _attend(W: gl.constexpr, cut, state, turn, operands, query, bounds, ring, room, tile):
    """Attend to the tiles of a part, which has at least one.

    ``turn`` is the number of tiles that the program walked before. Returns the state that follows
    ``state``, and the number of tiles walked so far. The state's sums are over the blocks whose
    scores warp group W has.
    """
    if W == 0:
        state = _first_block(
            turn, cut.begin, state, operands, query, bounds, ring, room, tile, True
        )
        turn += 1
        for key_tile in range(cut.begin + 1, cut.high):
            state = _first_block(
                turn, key_tile, state, operands, query, bounds, ring, room, tile, False
            )
            turn += 1
        m, l, o = _take_second(
            opaque_zero(), turn - 1, cut.high - 1, state, operands, ring, room, cut.kv_len,
            tile.SCORES,
        )  # fmt: skip
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(3), count=1)
        state = State(m=m, l=l, acc=o)
    else:
        for key_tile in range(cut.begin, cut.high):
            state = _second_block(turn, key_tile, state, operands, query, bounds, ring, room, tile)
            turn += 1
    return state, turn


@gluon.jit
def _with_all_sums(W: gl.constexpr, state, walks, room):
    """Add the other warp group's sums to the state's; both refer to the same maximum.

    ``walks`` is how often the groups exchanged sums before. Returns the state, and how often they
    have done so now.
    """
    room.sums.index(W).store(state.l)
    thread_barrier()
    mbarrier.arrive(room.ready.index(2 + W), count=1)
    mbarrier.wait(room.ready.index(3 - W), walks & 1)
    walks += 1
    l = state.l + room.sums.index(1 - W).load(state.l.type.layout)
    return State(m=state.m, l=l, acc=state.acc), walks


@gluon.jit
def consume_latents(W: gl.constexpr, query, ring, room, plan, out, tile):
    """Attend to all parts that the program takes; warp group W has half of the output's columns."""
    SUMS: gl.constexpr = gl.SliceLayout(1, tile.SCORES)
    ROWS: gl.constexpr = gl.SliceLayout(1, tile.OUTPUT)
    operands = _operands_of(W, ring, room, tile)
    first_row, begin, past_row, mine, fields = share_with_item_at(plan.shares_ptr, plan.HEADS)
    turn = 0
    walks = 0
    for r in range(first_row, past_row):
        cut = cut_at(r, mine, fields, begin)
        lane = gl.program_id(0) % plan.HEADS
        in_group = ((r % plan.HEAD_LOOPS) * plan.HEADS + lane) * tile.TILE_HEADS
        some = cut.high > cut.begin
        if some:
            token = gl.load(fields + 1)
            count = gl.load(fields + 2)
            load_queries(token, count, in_group, walks, query, room, tile, W)
            mbarrier.wait(room.loaded.index(0), walks & 1)
        state = State(
            m=gl.full([64], float("-inf"), gl.float32, SUMS),
            l=gl.zeros([64], gl.float32, SUMS),
            acc=gl.zeros([64, HALF], gl.float32, tile.OUTPUT),
        )
        if some:
            bounds = causal_bounds(cut.first, cut.kv_len, tile)
            state, turn = _attend(W, cut, state, turn, operands, query, bounds, ring, room, tile)
            state, walks = _with_all_sums(W, state, walks, room)
        m = gl.convert_layout(state.m, ROWS)
        l = gl.convert_layout(state.l, ROWS)
        by = 1.0 / gl.where(m > float("-inf"), l, 1.0)
        written = (state.acc * by[:, None]).to(out.out_ptr.dtype.element_ty)
        write_part(W, cut, in_group, m, l, written, room, plan, out, tile, tile.OUTPUT)
        begin = 0
        fields = plan.rows_ptr + wide(((r + 1) // plan.HEAD_LOOPS) * FIELDS)
