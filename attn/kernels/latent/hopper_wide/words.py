"""The consumers of the wide Hopper latent kernel over e4m3: products that are turned around.

Products read shared memory most of the time. Rows that are converted on their way into it cost more
time than their bytes save (``docs/notebook/latent.md``), so bytes are converted in registers, from
which a product can take its first operand. Hence keys, and columns of the output, are the rows of
products, and query rows are their columns:

    scores [keys, rows] = keys [keys, 576] x queries [576, rows]
    output [columns, rows] += values [columns, keys] x weights [keys, rows]

As over 16 bits, warp group 0 has the scores of block 0 of a tile and the left half of the output's
columns, warp group 1 those of block 1 and the right half. A group computes scores before it needs
anything of the other group. Then blocks take turns, since a block's weights have the references
that the block before left. A group multiplies both blocks' values while the other group computes.

    0:  scores of block 0; P0; output += P1 V1 (of the tile before); output += P0 V0
    1:  scores of block 1; P1; output += P0 V0; output += P1 V1

Weights have two buffers for each block: a group may be a block ahead of the other's products.

**References.** Weights are relative to a score of their row, its reference. Rows lie across the
threads of a warp group and keys across its warps, so that a row's maximum takes much longer than
over 16 bits. Weights are fp16, which has numbers up to 2^16. So the reference stays, and another is
found only if a weight would be larger than 2^14. At first a row's largest weight is 2^6; weights
down to 2^-30 of that count.
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

from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_int, opaque_zero
from attn.kernels.lang.wgmma import base_of
from attn.kernels.latent.hopper_wide.operands import (
    KEY_STEP,
    VALUE_STEP,
    key_of,
    key_operand,
    key_words,
    natural_keys,
    value_operand,
    value_words,
)
from attn.kernels.latent.hopper_wide.parts import BLOCK, HALF, clear_tail
from attn.kernels.latent.structures import WordOperands

_LARGEST = tl.constexpr(9.0)
"""The largest exponent of a weight that is left as it is when others of its block are too large."""
_FIRST = tl.constexpr(6.0)
"""The exponent of a row's largest weight when the row gets a new reference."""
BY_ROW = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
"""The layout of which a slice has a query row for each thread."""
VOTE = tl.constexpr(
    "{ .reg .pred p; setp.gt.f32 p, $1, 0f46800000; vote.sync.any.pred p, p, 0xFFFFFFFF;"
    " selp.b32 $0, 1, 0, p; }"
)
"""Whether a number in some thread of the warp is above 2^14; fp16 has numbers below 2^16."""


@gluon.jit
def word_operands(W: gl.constexpr, ring, room):
    """View shared memory as warp group W reads it."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    left = reinterpret(ring.left_boxes, gl.int32, [ring.LEFT, BLOCK, HALF // 4], WORDS)
    right = reinterpret(ring.right_boxes, gl.int32, [ring.RIGHT, BLOCK, HALF // 4], WORDS)
    rope = reinterpret(ring.rope_boxes, gl.int32, [2, BLOCK, 16], gl.NVMMASharedLayout(64, 32, 2))
    if W == 0:
        mine = left
        rows = reinterpret(ring.left_boxes, gl.int32, [2 * ring.LEFT * BLOCK, 32], FLAT)
    else:
        mine = right
        rows = reinterpret(ring.right_boxes, gl.int32, [2 * ring.RIGHT * BLOCK, 32], FLAT)
    steps = reinterpret(
        room.weights, gl.float16, [4 * BLOCK // VALUE_STEP, VALUE_STEP, 64],
        gl.NVMMASharedLayout(128, 16, 2),
    )  # fmt: skip
    maxima = reinterpret(
        room.weights, gl.float32, [4, 32, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    sums = reinterpret(
        room.q_rope, gl.float32, [4, 8, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    return WordOperands(
        left=left, right=right, rope=rope, values=mine, rows=rows, weights=steps,
        maxima=maxima, sums=sums,
    )  # fmt: skip


@gluon.jit
def _columns(s, words, queries, AT: gl.constexpr, z, tile):
    """Add the products with some columns of keys, ``words`` ``[64, 16 n]``, to scores ``s``.

    ``queries`` ``[8, 64, 64]`` are in boxes of 64 columns, of which AT is the first.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, tile.SCORES, 2)
    STEPS: gl.constexpr = words.shape[1] // KEY_STEP
    some = words.slice(0, KEY_STEP, dim=1).load(key_words())
    for i in gl.static_range(STEPS):
        keys = key_operand(some, OPERAND)
        if i + 1 < STEPS:
            some = words.slice((i + 1) * KEY_STEP, KEY_STEP, dim=1).load(key_words())
        s = warpgroup_mma(keys, queries.index(z + AT + i).permute((1, 0)), s, is_async=True)
        # At most two products run: each holds the registers of its operand.
        s = warpgroup_mma_wait(1, deps=[s])
    return s


@gluon.jit
def _buffer(turn, B: gl.constexpr):
    """The buffer of block B's weights: a block alternates between two."""
    return 2 * (turn % 2) + B


@gluon.jit
def _stage(turn, ring, W: gl.constexpr, B: gl.constexpr):
    """The stage of warp group W's half of the values of block B."""
    return (2 * turn + B) % (ring.LEFT if W == 0 else ring.RIGHT)


@gluon.jit
def _place(stage, ring, W: gl.constexpr):
    """The number of that stage's barrier."""
    return stage + (2 if W == 0 else 2 + ring.LEFT)


@gluon.jit
def _scores(turn, operands, ring, room, W: gl.constexpr, tile):
    """Scores of block W of the tile with number ``turn``, ``[64 keys, 64 rows]`` fp32.

    Keys are in the order of products.
    """
    z = opaque_zero()
    number = 2 * (turn + z) + W
    left = number % ring.LEFT
    right = number % ring.RIGHT
    s = gl.zeros([BLOCK, 64], gl.float32, tile.SCORES)
    mbarrier.wait(ring.full.index(W), turn & 1)
    s = _columns(s, operands.rope.index(z + W), room.q_rope, 0, z, tile)
    mbarrier.wait(ring.full.index(2 + left), (number // ring.LEFT) & 1)
    s = _columns(s, operands.left.index(left), room.q_boxes, 0, z, tile)
    mbarrier.wait(ring.full.index(2 + ring.LEFT + right), (number // ring.RIGHT) & 1)
    s = _columns(s, operands.right.index(right), room.q_boxes, 4, z, tile)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _seen(s, key_tile, cut, W: gl.constexpr, tile):
    """Scores of a block; -inf where a row does not see the key."""
    z = opaque_zero()
    first_key = key_tile * (2 * BLOCK) + W * BLOCK
    if first_key + BLOCK > gl.minimum(cut.first + 1, cut.kv_len):
        slot = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, tile.SCORES)) + z
        row = gl.arange(0, 64, layout=gl.SliceLayout(0, tile.SCORES)) + z
        # The limit is the last visible key, not the key after it: LLVM would add that 1 in pairs
        # of 16 bits, which ptxas 12.8 gets wrong.
        limit = gl.minimum(cut.first + row // tile.TILE_HEADS, cut.kv_len - 1)
        seen = (first_key + key_of(slot))[:, None] <= limit[None, :]
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _row_maximum(x, memory):
    """The maximum of each column of ``x [64, 64]``, whose keys lie in four warps, by ``memory``."""
    ROWS: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 64],
    )  # fmt: skip
    memory.store(gl.max(gl.reshape(x, [4, 16, 64]), 1))
    thread_barrier()
    most = gl.convert_layout(gl.max(memory.load(EVERYWHERE), 0), ROWS, assert_trivial=True)
    # The weights come where the maxima are.
    thread_barrier()
    return most


@gluon.jit
def _flag(flags):
    """Whether a flag in shared memory, ``[1]`` int32, is set."""
    return gl.max(flags.load(gl.BlockedLayout([1], [32], [4], [0])), 0) != 0


@gluon.constexpr_function
def _sums_layout():
    """The layout of weights that are summed, ``[4, 16, 64]``: a thread has 16 keys of two rows."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, 64],
    )  # fmt: skip


@gluon.jit
def _sums_of(weights):
    """Sums of a block's weights in shared memory, ``[64 keys, 64 rows]``: ``[4, 64]``, by warp."""
    KEYS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], [[16, 0], [32, 0]], [], [64, 64],
    )  # fmt: skip
    found = gl.reshape(weights.load(KEYS).to(gl.float32), [4, 16, 64])
    return gl.sum(gl.convert_layout(found, _sums_layout(), assert_trivial=True), 1)


@gluon.jit
def _refer(s, turn, is_first, operands, room, W: gl.constexpr, tile):
    """Give new references to rows that need some for block W, whose scores are ``s``."""
    ROWS: gl.constexpr = gl.SliceLayout(0, tile.SCORES)
    z = opaque_zero()
    s = s * room.factors.index(z).load(ROWS)[None, :]
    before = gl.where(is_first, float("-inf"), room.references.load(ROWS))
    maxima = operands.maxima.index(z + _buffer(turn, W)).slice(0, 4, dim=0)
    top = _row_maximum(s, maxima)
    after = gl.where(top > before + _LARGEST, top - _FIRST, before)
    room.grown.index(z + _buffer(turn, W)).store(gl.exp2(base_of(before) - base_of(after)))
    room.references.store(after)
    thread_barrier()


@gluon.jit
def _store_weights(s, turn, is_new, room, W: gl.constexpr, tile):
    """Store block W's weights where products read them, and whether rows have new references.

    Returns whether some weight may be too large: each warp votes for itself, and all see the votes
    behind the barrier that the other warp group's reading needs anyway.
    """
    ROWS: gl.constexpr = gl.SliceLayout(0, tile.SCORES)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WARPS: gl.constexpr = gl.DistributedLinearLayout([[1], [2]], [[0]] * 5, [[0], [0]], [], [4])
    z = opaque_zero()
    base = base_of(room.references.load(ROWS))
    weights = gl.exp2(s * room.factors.index(z).load(ROWS)[None, :] - base[None, :])
    room.weights.index(z + _buffer(turn, W)).store(natural_keys(weights.to(gl.float16)))
    room.flags.index(opaque_zero() + _buffer(turn, W)).store(
        gl.full([1], is_new.to(gl.int32), gl.int32, FLAG)
    )
    # The largest weight of each thread.
    most = gl.reshape(weights, [4, 2, 8, 8, 4, 2])
    most = gl.max(gl.max(gl.max(most, 5), 3), 1)
    votes = gl.inline_asm_elementwise(VOTE, "=r,f", [most], dtype=gl.int32, is_pure=False, pack=1)
    votes = gl.reshape(gl.permute(votes, (1, 2, 0)), [128])
    room.votes.index(opaque_zero() + W).store(votes.to(gl.uint8))
    fence_async_shared()
    thread_barrier()
    votes = room.votes.index(opaque_zero() + W).slice(0, 4, dim=0).load(WARPS)
    return gl.max(votes.to(gl.int32), 0) != 0


@gluon.jit
def _weigh(key_tile, turn, cut, operands, ring, room, W: gl.constexpr, tile):
    """Compute block W's scores and hand over their weights.

    Weights are computed and stored before it is known whether they fit. If one does not, all is
    done once more, with new references.

    Returns:
        Whether the other block's weights, and whether this block's, have new references, to which
        sums and output do not yet refer.
    """
    # In the first tile of a part there is nothing to rescale yet.
    goes_on = key_tile > cut.begin
    is_first = (key_tile == cut.begin) & (W == 0)
    is_new = is_first
    tries = True
    while tries:
        s = _seen(_scores(turn, operands, ring, room, W, tile), key_tile, cut, W, tile)
        if W == 0:
            mbarrier.wait(room.ready.index(1), (turn - 1) & 1, pred=goes_on)
        else:
            mbarrier.wait(room.ready.index(0), turn & 1)
        # The other warp group has multiplied the weights that were there before.
        mbarrier.wait(room.taken.index(_buffer(turn, W)), ((turn // 2) & 1) ^ 1)
        if is_new:
            _refer(s, turn, is_first, operands, room, W, tile)
        is_large = _store_weights(s, turn, is_new, room, W, tile)
        tries = is_large & (not is_new)
        is_new = is_new | tries
    mbarrier.arrive(room.ready.index(W), count=1)
    mbarrier.arrive(ring.empty.index(W), count=1)
    took = _flag(room.flags.index(opaque_zero() + _buffer(turn - (1 - W), 1 - W))) & goes_on
    return took, is_new & (not is_first)


@gluon.jit
def _add_values(o, turn, operands, ring, W: gl.constexpr, B: gl.constexpr, tile):
    """Add the values of block B of tile ``turn``, times its weights, to warp group W's output.

    Of the products one may still run when this returns.
    """
    z = opaque_zero()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, tile.OUTPUT, 2)
    STEPS: gl.constexpr = BLOCK // VALUE_STEP
    values = operands.values.index(_stage(turn + z, ring, W, B))
    first = z + _buffer(turn, B) * STEPS
    some = values.slice(0, VALUE_STEP, dim=0).load(value_words())
    for i in gl.static_range(STEPS):
        left = value_operand(some, OPERAND)
        if i + 1 < STEPS:
            some = values.slice((i + 1) * VALUE_STEP, VALUE_STEP, dim=0).load(value_words())
        o = warpgroup_mma(left, operands.weights.index(first + i), o, is_async=True)
        # At most two products run: each holds the registers of its operand.
        o = warpgroup_mma_wait(1, deps=[o])
    return o


@gluon.jit
def _release(turn, ring, room, W: gl.constexpr, B: gl.constexpr):
    """Free warp group W's half of block B of tile ``turn``, and the block's weights."""
    thread_barrier()
    mbarrier.arrive(ring.empty.index(_place(_stage(turn, ring, W, B), ring, W)), count=1)
    if B != W:
        mbarrier.arrive(room.taken.index(_buffer(turn, B)), count=1)


@gluon.jit
def _rescaled(l, o, turn, room, B: gl.constexpr, tile):
    """Sums and output times the factors of rows whose references block B of a tile raised."""
    factors = room.grown.index(opaque_zero() + _buffer(turn, B))
    l = l * factors.load(gl.SliceLayout(0, l.type.layout))[None, :]
    return l, o * factors.load(gl.SliceLayout(0, tile.OUTPUT))[None, :]


@gluon.jit
def _add_other(l, o, grows, turn, operands, ring, room, W: gl.constexpr, tile):
    """Add the other warp group's block of tile ``turn`` to warp group W's output, and free it.

    ``grows`` says whether its weights have new references, to which ``l`` and ``o`` do not yet
    refer. Returns sums and output.
    """
    if grows:
        l, o = _rescaled(l, o, turn, room, 1 - W, tile)
    o = _add_values(o, turn, operands, ring, W, 1 - W, tile)
    o = warpgroup_mma_wait(0, deps=[o])
    _release(turn, ring, room, W, 1 - W)
    return l, o


@gluon.jit
def _add_own(l, o, grows, turn, operands, ring, room, W: gl.constexpr, tile):
    """Add warp group W's block of tile ``turn`` to its output, and free it; as :func:`_add_other`.

    Its weights are added up while products run.
    """
    if grows:
        l, o = _rescaled(l, o, turn, room, W, tile)
    o = _add_values(o, turn, operands, ring, W, W, tile)
    l += _sums_of(room.weights.index(opaque_zero() + _buffer(turn, W)))
    o = warpgroup_mma_wait(0, deps=[o])
    _release(turn, ring, room, W, W)
    return l, o


@gluon.jit
def _all_sums(W: gl.constexpr, l, walks, operands, room):
    """Sums ``[64]`` of all blocks' weights; ``l [4, 64]`` are those of warp group W's warps.

    Warps exchange theirs where the rotary parts of queries were, which no product reads any more.
    ``walks`` is how often they did so before.
    """
    sums = operands.sums.index(opaque_zero())
    sums.slice(4 * W, 4, dim=0).store(l)
    thread_barrier()
    mbarrier.arrive(room.ready.index(2 + W), count=1)
    mbarrier.wait(room.ready.index(3 - W), walks & 1)
    rows = reinterpret(room.q_rope, gl.float32, [32, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, BY_ROW))
    for i in gl.static_range(8):
        total += rows.index(opaque_zero() + i).load(gl.SliceLayout(1, BY_ROW))
    return total


@gluon.jit
def attend_to_words(W: gl.constexpr, cut, o, turn, walks, operands, ring, room, tile):
    """Attend to the tiles of a part, which has at least one.

    ``turn`` is the number of tiles that the program walked before, and ``walks`` how often the warp
    groups exchanged sums. Returns the sums of weights ``[64]``, the output ``[HALF, 64]`` that
    follows ``o``, and the number of tiles walked so far.
    """
    TILE: gl.constexpr = 2 * BLOCK
    l = gl.zeros([4, 64], gl.float32, gl.SliceLayout(1, _sums_layout()))
    for key_tile in range(cut.begin, cut.high):
        took, is_new = _weigh(key_tile, turn, cut, operands, ring, room, W, tile)
        # Otherwise the address of the first slot without a key would be kept for all tiles.
        live = opaque_int(cut.kv_len - key_tile * TILE)
        clear_tail(operands.rows, 2 * _stage(turn, ring, W, 0), live, ring, 2)
        if W == 1:
            clear_tail(operands.rows, 2 * _stage(turn, ring, W, 1), live - BLOCK, ring, 2)
            l, o = _add_other(l, o, took, turn, operands, ring, room, W, tile)
        elif key_tile > cut.begin:
            # Warp group 0 is one tile behind with the other's blocks.
            l, o = _add_other(l, o, took, turn - 1, operands, ring, room, W, tile)
        l, o = _add_own(l, o, is_new, turn, operands, ring, room, W, tile)
        turn += 1
    if W == 0:
        mbarrier.wait(room.ready.index(1), (turn - 1) & 1)
        took = _flag(room.flags.index(opaque_zero() + _buffer(turn - 1, 1)))
        live = cut.kv_len - (cut.high - 1) * TILE - BLOCK
        clear_tail(operands.rows, 2 * _stage(turn - 1, ring, 0, 1), live, ring, 2)
        l, o = _add_other(l, o, took, turn - 1, operands, ring, room, W, tile)
    return _all_sums(W, l, walks, operands, room), o, turn
