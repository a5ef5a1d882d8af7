"""The columns of the wide Hopper latent kernel's output over e4m3: two warp groups, each a half.

    output [256 columns, 64 rows] += values [256 columns, 64 keys] x weights [64 keys, 64 rows]

A product can take its first operand from registers, and only its second has to be in shared memory.
So columns are the rows of products: values are converted in registers. Rows that are converted on
their way into shared memory cost more time than their bytes save (``docs/notebook/latent.md``).

The weights are those of :mod:`attn.kernels.latent.hopper_wide.scorer`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_int, opaque_zero
from attn.kernels.latent.hopper_wide.operands import (
    VALUE_STEP,
    natural_columns,
    value_operand,
    value_words,
)
from attn.kernels.latent.hopper_wide.output import write_part
from attn.kernels.latent.hopper_wide.parts import BLOCK, BUFFERS, HALF, cut_at, share_with_item_at
from attn.kernels.latent.hopper_wide.queries import cache_scale, load_queries, store_scale
from attn.kernels.latent.structures import ValueOperands

_BY_ROW = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))
"""The layout of which a slice has a query row for each thread."""


@gluon.jit
def _operands_of(W: gl.constexpr, ring, room):
    """View shared memory as warp group W reads it."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGES: gl.constexpr = ring.LEFT if W == 0 else ring.RIGHT
    STEPS: gl.constexpr = BUFFERS * BLOCK // VALUE_STEP
    boxes = ring.left_boxes if W == 0 else ring.right_boxes
    return ValueOperands(
        words=reinterpret(boxes, gl.int32, [STAGES, BLOCK, HALF // 4], WORDS),
        weights=reinterpret(room.weights, gl.float16, [STEPS, VALUE_STEP, 64], WEIGHTS),
        sums=reinterpret(room.weights, gl.float32, [BUFFERS * 32, 64], FLAT),
    )


@gluon.jit
def _add_values(o, stage, buffer, operands, tile):
    """Add the values of a block, times its weights, to the output."""
    z = opaque_zero()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, tile.OUTPUT, 2)
    STEPS: gl.constexpr = BLOCK // VALUE_STEP
    values = operands.words.index(stage + z)
    first = z + buffer * STEPS
    some = values.slice(0, VALUE_STEP, dim=0).load(value_words())
    for i in gl.static_range(STEPS):
        left = value_operand(some, OPERAND)
        if i + 1 < STEPS:
            some = values.slice((i + 1) * VALUE_STEP, VALUE_STEP, dim=0).load(value_words())
        o = warpgroup_mma(left, operands.weights.index(first + i), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
    return o


@gluon.jit
def _rescaled(o, buffer, room, tile):
    """The output, with rows whose references a block raised referring to them."""
    factors = room.grown.index(buffer).load(gl.SliceLayout(0, tile.OUTPUT))
    return o * factors[None, :]


@gluon.jit
def _attend(W: gl.constexpr, cut, o, number, operands, ring, room, tile):
    """Add the values of a part's blocks to ``o``; ``number`` is that of the first block."""
    STAGES: gl.constexpr = ring.LEFT if W == 0 else ring.RIGHT
    FIRST: gl.constexpr = 2 if W == 0 else 2 + ring.LEFT
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for _ in range(2 * cut.begin, 2 * cut.high):
        buffer = number & (BUFFERS - 1)
        stage = number % STAGES
        mbarrier.wait(room.ready.index(buffer), (number // BUFFERS) & 1)
        if gl.max(room.flags.index(buffer).load(FLAG), 0) != 0:
            o = _rescaled(o, buffer, room, tile)
        o = _add_values(o, stage, buffer, operands, tile)
        thread_barrier()
        mbarrier.arrive(ring.empty.index(FIRST + stage), count=1)
        mbarrier.arrive(room.taken.index(buffer), count=1)
        number += 1
    return o, number


@gluon.jit
def _numbers_of(some, walks, number, operands, room, ROWS: gl.constexpr):
    """References and sums of a part's rows, ``[64]`` fp32 each, behind its last block."""
    z = opaque_zero()
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([64], gl.float32, ROWS)
    if some:
        mbarrier.wait(room.summed, walks & 1)
        m = room.references.load(ROWS)
        for i in gl.static_range(4):
            l += operands.sums.index(32 * (number & (BUFFERS - 1)) + z + i).load(ROWS)
    return m, l


@gluon.jit
def _first_head(r, plan, tile):
    """The first query head of the program's rows of work item ``r``, among those of the KV head."""
    lane = gl.program_id(0) % plan.HEADS
    return ((r % plan.HEAD_LOOPS) * plan.HEADS + lane) * tile.TILE_HEADS


@gluon.jit
def add_latents(W: gl.constexpr, query, ring, room, plan, out, tile):
    """Compute warp group W's half of the output's columns, for all parts of the program."""
    ROWS: gl.constexpr = gl.SliceLayout(1, _BY_ROW)
    operands = _operands_of(W, ring, room)
    scale = gl.load(room.scale_ptr)
    first_row, begin, past_row, mine, fields = share_with_item_at(plan.shares_ptr, plan.HEADS)
    # Both groups store it. Were it used with the queries only, ptxas would load it behind them.
    store_scale(scale, room)
    number = 0
    walks = 0
    for r in range(first_row, past_row):
        cut = cut_at(r, mine, fields, begin)
        some = cut.high > cut.begin
        o = gl.zeros([HALF, 64], gl.float32, tile.OUTPUT)
        if some:
            token = gl.load(fields + 1)
            count = gl.load(fields + 2)
            load_queries(token, count, _first_head(r, plan, tile), walks, query, room, tile, W)
            o, number = _attend(W, cut, o, number, operands, ring, room, tile)
        m, l = _numbers_of(some, walks, number, operands, room, ROWS)
        if some:
            walks += 1
        by = room.row_numbers.index(opaque_zero() + W)
        # Where no query was loaded there is no scale yet.
        by.store(gl.where(m > float("-inf"), cache_scale(room) / l, 0.0))
        thread_barrier()
        o = o * by.load(gl.SliceLayout(0, tile.OUTPUT))[None, :]
        # The queries' shared memory is free: the scorer has its last product.
        written = natural_columns(o.to(out.out_ptr.dtype.element_ty))
        # This is computed once more instead of being kept in a register during the blocks.
        in_group = _first_head(opaque_int(r), plan, tile)
        write_part(W, cut, in_group, m, l, written, room, plan, out, tile, _BY_ROW)
        begin = 0
        fields = plan.rows_ptr + wide(((r + 1) // plan.HEAD_LOOPS) * FIELDS)
