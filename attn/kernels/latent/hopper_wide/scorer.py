"""The scorer of the wide Hopper latent kernel over e4m3: a warp group that computes all weights.

**Scores** are products of e4m3: keys ``[64 keys, 576]`` by queries ``[576, 64 rows]``, which are
sums of two terms (:mod:`attn.kernels.latent.hopper_wide.queries`). Tensor cores read both operands
from shared memory, so no key is converted. But they add such products with 14 bits, which would
cost a score of 27 up to 0.07. So they add those of 128 columns (first of 192), and these sums are
added in fp32; then it is 0.008 (``docs/notebook/latent.md``). Queries that are rounded to one term
cost a score more than that, so tensor cores add all of their products.

**References.** Weights are relative to a score of their row, its reference. Rows lie across the
threads of a warp group and keys across its warps, so that a row's maximum takes much longer than
over 16 bits. Weights are fp16, which has numbers up to 2^16. So the reference stays, and another is
found only if a weight would be larger than 2^14. At first a row's largest weight is 2^6; weights
down to 2^-30 of that count.

**Order.** Weights of a block go to one of four buffers, so that the scorer may be four blocks ahead
of the groups of columns (:mod:`attn.kernels.latent.hopper_wide.columns`). It takes longer for a
block than they do: they wait for it.
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
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_int, opaque_zero
from attn.kernels.lang.wgmma import base_of
from attn.kernels.latent.hopper_wide.parts import BLOCK, BUFFERS, cut_at
from attn.kernels.latent.structures import ScoreOperands
from builders.launch.call import is_by_ptxas_13, triton_release

_LARGEST = tl.constexpr(9.0)
"""The largest exponent of a weight that is left as it is when others of its block are too large."""
_FIRST = tl.constexpr(6.0)
"""The exponent of a row's largest weight when the row gets a new reference."""
KEEPS_PLACE = gl.constexpr(triton_release() == (3, 8))
"""Whether the sums of all runs of products are in the same registers. Otherwise Triton 3.8 has too
few, and runs the products one after the other. Triton 3.6 takes a tenth longer with it."""
AS_LOADED = gl.constexpr(triton_release() == (3, 7))
"""Whether a thread stores the limits of the rows whose limits it loads. Otherwise Triton 3.7 spills
two addresses; with it Triton 3.6 does."""
LOOPS = gl.constexpr(is_by_ptxas_13())
"""Whether the last two runs of products are a loop, and the buffer and the first key of a block are
computed behind them. Otherwise ptxas 13 spills addresses."""
VOTE = tl.constexpr(
    "{ .reg .pred p; setp.gt.f32 p, $1, 0f46800000; vote.sync.any.pred p, p, 0xFFFFFFFF;"
    " selp.b32 $0, 1, 0, p; }"
)
"""Whether a number in some thread of the warp is above 2^14; fp16 has numbers below 2^16."""


@gluon.jit
def _operands_of(ring, room):
    """View shared memory as the scorer's products read it."""
    BYTES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ROPES: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    return ScoreOperands(
        q=reinterpret(room.q_boxes, gl.float8e4nv, [8, 64, 128], BYTES),
        q_rope=reinterpret(room.q_rope, gl.float8e4nv, [2, 64, 64], ROPES),
        left=reinterpret(ring.left_boxes, gl.float8e4nv, [2 * ring.LEFT, BLOCK, 128], BYTES),
        right=reinterpret(ring.right_boxes, gl.float8e4nv, [2 * ring.RIGHT, BLOCK, 128], BYTES),
        rope=reinterpret(ring.rope_boxes, gl.float8e4nv, [2, BLOCK, 64], ROPES),
    )


@gluon.jit
def _products(keys, queries, at, before, goes_on, TERMS: gl.constexpr):
    """Start the products of keys and a run of queries' columns: ``[64 keys, 64 rows]`` fp32.

    The first half of ``queries`` has the large terms of all runs, the second half their small
    terms; ``at`` is the run. If it ``goes_on``, the products are added to ``before``.
    """
    large = queries.index(at).permute((1, 0))
    if TERMS == 2:
        small = queries.index(at + queries.shape[0] // 2).permute((1, 0))
        s = warpgroup_mma(keys, small, before, use_acc=goes_on, is_async=True)
        s = warpgroup_mma(keys, large, s, is_async=True)
    else:
        s = warpgroup_mma(keys, large, before, use_acc=goes_on, is_async=True)
    return s


@gluon.jit
def _next_sums(keys, queries, at, before, zero):
    """Sums of the next run of columns, which start from zero; ``before`` are those of the last."""
    if KEEPS_PLACE:
        # As far as the compiler knows, these may go on from the last run's.
        s = _products(keys, queries, at, before, opaque_zero() != 0, 2)
    else:
        s = _products(keys, queries, at, zero, False, 2)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _scores(number, operands, ring, tile, TERMS: gl.constexpr):
    """Scores of the block with this number in the program, ``[64 keys, 64 rows]`` fp32."""
    # Otherwise descriptors of all operands would be computed first, and spilled.
    number = opaque_int(number)
    z = number >> 30
    left = number % ring.LEFT
    right = number % ring.RIGHT
    lefts, rights = operands.left, operands.right
    q = operands.q
    zero = gl.zeros([BLOCK, 64], gl.float32, tile.SCORES)
    # No barrier is waited for while products run, since Triton 3.8 copied their sums there.
    mbarrier.wait(ring.full.index(number & 1), (number >> 1) & 1)
    mbarrier.wait(ring.full.index(2 + left), (number // ring.LEFT) & 1)
    if TERMS == 1:
        mbarrier.wait(ring.full.index(2 + ring.LEFT + right), (number // ring.RIGHT) & 1)
    s = _products(operands.rope.index(number & 1), operands.q_rope, z, zero, False, TERMS)
    s = _products(lefts.index(2 * left), q, z, s, True, TERMS)
    if TERMS == 1:
        s = _products(lefts.index(2 * left + 1), q, z + 1, s, True, TERMS)
        for i in gl.static_range(2):
            s = _products(rights.index(2 * right + i), q, z + 2 + i, s, True, TERMS)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        more = warpgroup_mma_wait(0, deps=[s])
        s = more
        if KEEPS_PLACE:
            # A copy: the next run's sums come where these are.
            s = more + 0.0
        more = _next_sums(lefts.index(2 * left + 1), q, z + 1, more, zero)
        s += more
        mbarrier.wait(ring.full.index(2 + ring.LEFT + right), (number // ring.RIGHT) & 1)
        if LOOPS:
            for i in range(2):
                more = _next_sums(rights.index(2 * right + i), q, z + 2 + i, more, zero)
                s += more
        else:
            for i in gl.static_range(2):
                more = _next_sums(rights.index(2 * right + i), q, z + 2 + i, more, zero)
                s += more
    return s


@gluon.jit
def _limits_of(room):
    """View the memory for the last key that each row sees, ``[64]`` int32, while a part is weighed.

    Otherwise ptxas 13 would keep the numbers of a thread's 16 rows.
    """
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(room.row_numbers, gl.int32, [2, 64], ROWS).index(opaque_zero())


@gluon.jit
def _store_limits(cut, room, tile):
    """Store the last key that each query row of the part sees."""
    ONCE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ROWS: gl.constexpr = gl.SliceLayout(0, tile.SCORES) if AS_LOADED else ONCE
    row = gl.arange(0, 64, layout=ROWS)
    _limits_of(room).store(gl.minimum(cut.first + row // tile.TILE_HEADS, cut.kv_len - 1))
    thread_barrier()


@gluon.jit
def _seen(s, first_key, cut, room, tile):
    """Scores of a block from key ``first_key`` on; -inf where a row does not see the key."""
    if first_key + BLOCK > gl.minimum(cut.first + 1, cut.kv_len):
        if LOOPS:
            first_key = opaque_int(first_key)
        slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, tile.SCORES)) + opaque_zero()
        limit = _limits_of(room).load(gl.SliceLayout(0, tile.SCORES))
        s = gl.where((first_key + slot)[:, None] <= limit[None, :], s, float("-inf"))
    return s


@gluon.jit
def _by_thread(x):
    """The sums of a thread's keys, ``[4, 8, 64]``, of ``x [64 keys, 64 rows]``."""
    return gl.sum(gl.reshape(x, [4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def _row_maxima(s, room, buffer):
    """The maximum of each column of ``s [64 keys, 64 rows]``, by the memory of a block's weights.

    The maxima of threads are stored there, ``[32, 64]``, and a thread loads half of those of a row.
    """
    SPREAD: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    ONE_ROW: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [8, 0], [16, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0]],
        [[0, 16], [0, 32]], [], [32, 64],
    )  # fmt: skip
    memory = reinterpret(room.weights, gl.float32, [BUFFERS, 32, 64], SPREAD).index(buffer)
    memory.store(gl.reshape(gl.max(gl.reshape(s, [4, 2, 8, 64]), 1), [32, 64]))
    thread_barrier()
    most = gl.max(gl.reshape(memory.load(ONE_ROW), [4, 8, 64]), 0)
    return gl.convert_layout(gl.max(most, 0), gl.SliceLayout(0, ONE_ROW), assert_trivial=True)


@gluon.jit
def _row_maxima_by_shuffles(s, room, buffer):
    """The maximum of each column of ``s [64 keys, 64 rows]``, by shuffles within each warp.

    It is for scorers with too few registers for the addresses of :func:`_row_maxima`, and for ptxas
    13, which spills these.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 64],
    )  # fmt: skip
    memory = _numbers(room).index(buffer).slice(0, 4, dim=0)
    memory.store(gl.max(gl.reshape(s, [4, 16, 64]), 1))
    thread_barrier()
    return gl.convert_layout(gl.max(memory.load(EVERYWHERE), 0), ROWS, assert_trivial=True)


@gluon.jit
def _refer(s, l, buffer, is_first, room, tile):
    """Give new references to rows that need some for scores ``s``; returns sums that refer to them.

    The factors of these rows are left for the output, too.
    """
    BY_MEMORY: gl.constexpr = room.TERMS == 1 and not LOOPS
    if BY_MEMORY:
        top = _row_maxima(s, room, buffer)
        top *= room.factors.load(top.type.layout)
    else:
        # Scaled ahead of the maxima: in the other order Triton 3.8 spills.
        s = s * room.factors.load(gl.SliceLayout(0, tile.SCORES))[None, :]
        top = _row_maxima_by_shuffles(s, room, buffer)
    ROWS: gl.constexpr = top.type.layout
    before = gl.where(is_first, float("-inf"), room.references.load(ROWS))
    after = gl.where(top > before + _LARGEST, top - _FIRST, before)
    grown = room.grown.index(buffer)
    # Before the first block there is nothing to rescale.
    factors = gl.where(is_first, 1.0, gl.exp2(base_of(before) - base_of(after)))
    grown.store(factors)
    room.references.store(after)
    # The weights come where the maxima are.
    thread_barrier()
    EVERY: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    if BY_MEMORY:
        factors = grown.load(EVERY)
    else:
        factors = gl.convert_layout(factors, EVERY, assert_trivial=True)
    return l * factors[None, None, :]


@gluon.jit
def _numbers(room):
    """View the buffers of weights as rows of fp32, before weights are there."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(room.weights, gl.float32, [BUFFERS, 32, 64], FLAT)


@gluon.jit
def _store_weights(s, buffer, grows, room, tile):
    """Store a block's weights where products read them, and whether rows have new references.

    Returns whether some weight may be too large: each warp votes for itself, and all see the votes
    behind the barrier that stored weights need anyway. And returns sums of weights.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, tile.SCORES)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WARPS: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0], [0]], [], [4])
    base = base_of(room.references.load(ROWS))
    weights = gl.exp2(s * room.factors.load(ROWS)[None, :] - base[None, :])
    room.weights.index(buffer).store(weights.to(gl.float16))
    room.flags.index(buffer).store(gl.full([1], grows.to(gl.int32), gl.int32, FLAG))
    # The largest weight of each thread.
    most = gl.reshape(weights, [4, 2, 8, 8, 4, 2])
    most = gl.max(gl.max(gl.max(most, 5), 3), 1)
    votes = gl.inline_asm_elementwise(VOTE, "=r,f", [most], dtype=gl.int32, is_pure=False, pack=1)
    votes = gl.reshape(gl.permute(votes, (1, 2, 0)), [128])
    room.votes.store(votes.to(gl.uint8))
    fence_async_shared()
    thread_barrier()
    votes = room.votes.slice(0, 4, dim=0).load(WARPS)
    return gl.max(votes.to(gl.int32), 0) != 0, _by_thread(weights)


@gluon.jit
def _weigh(number, l, first_key, is_first, cut, operands, ring, room, tile):
    """Hand over the weights of the block from key ``first_key`` on, and add them to sums ``l``.

    Weights are computed and stored before it is known whether they fit. If one does not, all is
    done once more, with new references.
    """
    buffer = number & (BUFFERS - 1)
    is_new = is_first
    more = gl.zeros_like(l)
    tries = True
    while tries:
        s = _scores(number, operands, ring, tile, room.TERMS)
        s = _seen(s, first_key, cut, room, tile)
        if LOOPS:
            buffer = opaque_int(number) & (BUFFERS - 1)
        # Both groups have multiplied the weights that were there before.
        mbarrier.wait(room.taken.index(buffer), ((number // BUFFERS) & 1) ^ 1)
        if is_new:
            l = _refer(s, l, buffer, is_first, room, tile)
        is_large, more = _store_weights(s, buffer, is_new & (not is_first), room, tile)
        tries = is_large & (not is_new)
        is_new = is_new | tries
    mbarrier.arrive(room.ready.index(buffer), count=1)
    mbarrier.arrive(ring.empty.index(number & 1), count=1)
    return l + more


@gluon.jit
def weigh_latents(ring, room, plan, tile):
    """Weigh the keys of all parts that the program takes."""
    operands = _operands_of(ring, room)
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    number = 0
    walks = 0
    for r in range(first_row, past_row):
        cut = cut_at(r, mine, fields, begin)
        if cut.high > cut.begin:
            mbarrier.wait(room.loaded.index(0), walks & 1)
            walks += 1
            _store_limits(cut, room, tile)
            l = _by_thread(gl.zeros([BLOCK, 64], gl.float32, tile.SCORES))
            for block in range(2 * cut.begin, 2 * cut.high):
                is_first = block == 2 * cut.begin
                first_key = block * BLOCK
                l = _weigh(number, l, first_key, is_first, cut, operands, ring, room, tile)
                number += 1
            # The sums come where the weights of the next block would.
            buffer = number & (BUFFERS - 1)
            mbarrier.wait(room.taken.index(buffer), ((number // BUFFERS) & 1) ^ 1)
            _numbers(room).index(buffer).slice(0, 4, dim=0).store(gl.sum(l, 1))
            thread_barrier()
            mbarrier.arrive(room.summed, count=1)
        begin = 0
        fields = plan.rows_ptr + wide(((r + 1) // plan.HEAD_LOOPS) * FIELDS)
