"""Parts of a step that both kinds of consumers have: products, masks, queries and rows.

:mod:`attn.kernels.dense.hopper_prefill.consumer` and
:mod:`attn.kernels.dense.hopper_prefill.segmented` are the consumers.
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

from attn.kernels.dense.hopper_prefill.scheduler import told, wide
from attn.kernels.lang.masks import reach_of
from attn.kernels.lang.numerics import encode_e4m3
from attn.kernels.lang.opaque import opaque_zero, thread_number
from attn.kernels.lang.structures import QueryTile, Rows
from builders.launch.call import triton_release

_BY_TRITON_3_7 = gl.constexpr(triton_release() == (3, 7))
_OWN = gl.constexpr(55)
"""Bits of a row's number that say which thread has it in a product's result; that of 8 says which
of its registers."""


_REFERRED = gl.constexpr("""
{ .reg .pred p, q; .reg .f32 a, b, c, d;
  fma.rn.f32 a, $2, $6, 0f00000000; fma.rn.f32 b, $3, $7, 0f00000000;
  sub.rn.f32 c, a, $4; sub.rn.f32 d, b, $5;
  setp.gtu.f32 p, c, 0f41000000; setp.gtu.or.f32 p, d, 0f41000000, p;
  vote.sync.any.pred p, p, 0xffffffff;
  mov.b32 $0, $4; mov.b32 $1, $5;
  @!p bra.uni KEPT;
  shfl.sync.bfly.b32 c, a, 2, 31, 0xffffffff; shfl.sync.bfly.b32 d, b, 2, 31, 0xffffffff;
  max.f32 a, a, c; max.f32 b, b, d;
  shfl.sync.bfly.b32 c, a, 1, 31, 0xffffffff; shfl.sync.bfly.b32 d, b, 1, 31, 0xffffffff;
  max.f32 a, a, c; max.f32 b, b, d;
  sub.rn.f32 c, a, $0; sub.rn.f32 d, b, $1;
  setp.gtu.f32 p, c, 0f41000000; setp.gtu.f32 q, d, 0f41000000;
  selp.f32 $0, a, $0, p; selp.f32 $1, b, $1, q;
KEPT: }
""")
"""References of two rows, $0 and $1, from the largest scores that a thread has of them ($2, $3),
their references so far ($4, $5) and the factors of scores ($6, $7). The threads of a warp exchange
their largest scores only if one of them exceeds its reference by more than 8, the slack of
:mod:`attn.kernels.dense.tile`."""


@gluon.jit
def _up_to(scores, key, last):
    """Scores of keys up to the last, minus infinity for others.

    Of comparisons that it sees LLVM makes bits of a mask, and takes them apart again: five
    instructions for each score in place of two.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [scores, key, last], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _within(scores, key, query, window):
    """Scores of the last ``window`` keys up to the query's own, minus infinity for others."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; sub.s32 a, $3, $2; setp.lt.u32 p, a, $4;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r,r", [scores, key, query, window], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def masked_tile(scores, first_key, rows, kv_len, mask, HIDDEN: gl.constexpr = False):
    """A tile of scores, minus infinity where a row does not see the key; the first of the tile's
    keys is ``first_key``.

    HIDDEN: keys' numbers are computed here, from the thread's number, which is read again.
    """
    number = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
    if HIDDEN:
        number = (thread_number(number) & 3) * 2 + (number & ~6)
    # A column is the sum of a constant of its register and a number of its thread, which goes to
    # the other side: each score is compared by a constant, in one instruction. With fewer keys
    # heads are wide, and leave no register for that number.
    MANY: gl.constexpr = scores.shape[1] >= 128
    BACK: gl.constexpr = mask.CAUSAL == 1 and mask.WINDOW and not mask.CHUNK and not mask.RANGES
    known, others = number & ~6, number & 6
    if MANY and not (mask.WINDOW or mask.CHUNK or mask.RANGES):
        away = (rows.reach - first_key)[:, None] - others[None, :]
        scores = _up_to(scores, known[None, :], away)
    elif MANY and BACK:
        # Both edges in one comparison: a query is one of the keys that it sees, the last.
        away = (rows.query - first_key)[:, None] - others[None, :]
        scores = _within(scores, known[None, :], away, mask.window)
    else:
        key = first_key + number
        if BACK:
            away = rows.query[:, None] - key[None, :]
            seen = away.to(gl.uint32, bitcast=True) < mask.window.to(gl.uint32)
            scores = gl.where(seen, scores, float("-inf"))
        else:
            scores = mask.masked(
                scores, rows.query, key, rows.reach, kv_len, rows.range_first, rows.range_last
            )
    return scores


@gluon.jit
def computed(l):
    """Sums or weights, computed here: ptxas would move them, and with sums the whole softmax,
    behind the wait or the branch that follows.

    An event, which would be counted if one of them were negative, needs them. None is negative.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p;"
        " @p pmevent 1; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=f,=f,f,f", [l], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def computed_pairs(pairs):
    """:func:`computed` for pairs of weights, which :func:`pack` makes. Read as fp32, no pair is
    negative.
    """
    return computed(pairs.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)


@gluon.jit
def pack(weights, DTYPE: gl.constexpr, KV_TILE: gl.constexpr):
    """Weights as pairs of 16 bits, to be carried to the next iteration: as single 16-bit values
    they would be split and joined again, as fp32 they would hold twice the registers.
    """
    low, high = gl.split(gl.reshape(weights, [64, KV_TILE // 2, 2]))
    if DTYPE.is_bf16():
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        pairs = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return pairs


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr, KV_TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The left operand of the output's product; no instruction is left of it."""
    low = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, KV_TILE]), LAYOUT)


@gluon.jit
def scores_of(place, turn, queries, keys, shape):
    """Scores of a tile of keys, under way: of EXTRA columns in a product of their own.

    Queries are those of ``place`` in their ring, keys those of ``turn`` in theirs.
    """
    q = queries.tiles.index(place)
    stage = keys.stage(turn)
    scores = warpgroup_mma(
        q,
        keys.tiles.index(stage).permute((1, 0)),
        gl.zeros([64, shape.KV_TILE], gl.float32, shape.SCORES),
        use_acc=False,
        is_async=True,
    )
    if shape.EXTRA > 0:
        scores = warpgroup_mma(
            queries.extra_tiles.index(place),
            keys.extra_tiles.index(stage).permute((1, 0)),
            scores,
            is_async=True,
        )
    return scores


@gluon.jit
def output_of(left, turn, acc, rest, values, adds=True):
    """Output of a tile of values, under way: of EXTRA columns in a product of its own, ``rest``.

    Unless it ``adds`` to outputs, those are ignored.
    """
    stage = values.stage(turn)
    acc = warpgroup_mma(left, values.tiles.index(stage), acc, use_acc=adds, is_async=True)
    if values.EXTRA > 0:
        extra = values.extra_tiles.index(stage)
        rest = warpgroup_mma(left, extra, rest, use_acc=adds, is_async=True)
    return acc, rest


@gluon.jit
def awaited(acc, rest, values, LEFT: gl.constexpr):
    """Wait for an output, until LEFT younger products are under way."""
    if values.EXTRA > 0:
        acc, rest = warpgroup_mma_wait(LEFT, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(LEFT, deps=[acc])
    return acc, rest


@gluon.jit
def scaled(x, by):
    """Rows of an output, each multiplied by one factor."""
    return x * gl.convert_layout(by, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.constexpr_function
def _skipping(count: int) -> str:
    """Assembly: multiply ``count`` numbers by as many factors, unless all of the warp's are 1.

    A thread's numbers are of two rows; its first one is of the first row, its third of the second.
    """
    multiplied = " ".join(f"mul.rn.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        "{ .reg .pred p; "
        f"setp.neu.f32 p, ${2 * count}, 0f3F800000; "
        f"setp.neu.or.f32 p, ${2 * count + 2}, 0f3F800000, p; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEPT; {multiplied} KEPT: }}"
    )


@gluon.constexpr_function
def _skipping_constraints(count: int) -> str:
    """Its operands: results take the registers of the numbers, which are read and written."""
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(x, factors):
    """Rows of an output, each multiplied by one factor: hardly ever, since most are 1."""
    OWN: gl.constexpr = x.shape[0] * x.shape[1] // 128
    COUNT: gl.constexpr = OWN if OWN < 64 else 64
    TEXT: gl.constexpr = _skipping(COUNT)
    CONSTRAINTS: gl.constexpr = _skipping_constraints(COUNT)
    return gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [x, factors], dtype=gl.float32, is_pure=False, pack=COUNT
    )


@gluon.jit
def largest_of_own(x):
    """The largest of ``[64, columns]`` by thread: ``[64, 4]``, the four threads of a row."""
    return gl.max(gl.max(gl.reshape(x, [64, x.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def spread(x, like):
    """Numbers by thread, ``[64, 4]``, for all columns of ``like`` that the thread has."""
    PARTS: gl.constexpr = like.shape[1] // 8
    LAYOUT: gl.constexpr = gl.reshape(like, [64, PARTS, 4, 2]).type.layout
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)), assert_trivial=True)
    parts = x[:, None, :, None].broadcast_to(64, PARTS, 4, 2)
    columns = gl.reshape(parts, [64, like.shape[1]])
    return gl.convert_layout(columns, like.type.layout, assert_trivial=True)


@gluon.jit
def referred(most, m, factor):
    """Rows' new references by thread, ``[64, 4]``: see
    :func:`attn.kernels.dense.tile.referred_weights`.

    ``most`` is the largest score of each thread; ``factor`` turns it into units of log 2, those of
    the references so far, ``m``. Where no thread's largest score exceeds the reference by more than
    the slack, no row's does.
    """
    factors = gl.full(most.shape, factor, gl.float32, most.type.layout)
    m = gl.convert_layout(m, most.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        _REFERRED, "=&f,=&f,f,f,f,f,f,f", [most, m, factors], dtype=gl.float32, is_pure=False,
        pack=2,
    )  # fmt: skip


@gluon.jit
def referred_weights(scores, m, factor, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr):
    """:func:`attn.kernels.dense.tile.referred_weights`, bit for bit, with references and factors by
    thread, ``[64, 4]``: the four threads of a row have the same.

    With SOFT_CAP, ``factor`` has been applied. MASKED: a row may not see all of the tile's keys.
    """
    top, base = new_references(scores, m, factor, SOFT_CAP, MASKED)
    return weights_of(scores, base, factor, SOFT_CAP), gl.exp2(m - base), top


@gluon.jit
def new_references(scores, m, factor, SOFT_CAP: gl.constexpr, MASKED: gl.constexpr):
    """The first half of :func:`referred_weights`: rows' new references, and their bases.

    Weights, and the factor of a row's past, are relative to the base: the reference, or 0 for a row
    that has seen nothing.
    """
    scale = factor
    if SOFT_CAP:
        scale = 1.0
    top = referred(largest_of_own(scores), m, scale)
    base = top
    if MASKED:
        base = gl.where(top == float("-inf"), 0.0, top)
    return top, base


@gluon.jit
def weights_of(scores, base, factor, SOFT_CAP: gl.constexpr):
    """The second half of :func:`referred_weights`: weights of scores, relative to ``base``."""
    if SOFT_CAP:
        exponents = scores - spread(base, scores)
    else:
        scales = gl.full(scores.shape, factor, gl.float32, scores.type.layout)
        exponents = gl.fma(scores, scales, -spread(base, scores))
    return gl.exp2(exponents)


@gluon.jit
def unreferred(scores):
    """References of rows ``[64, keys]`` of which nothing has been seen, by thread."""
    LAYOUT: gl.constexpr = largest_of_own(scores).type.layout
    return gl.full([64, 4], float("-inf"), gl.float32, LAYOUT)


@gluon.jit
def by_row(m, shape):
    """References by row, ``[64]``, from references by thread, ``[64, 4]``."""
    return gl.convert_layout(gl.max(m, 1), gl.SliceLayout(1, shape.SCORES))


@gluon.jit
def _clear_rows(box, first, live, COLUMNS: gl.constexpr):
    """Zero the rows of a box from number ``live`` on; the box's first has number ``first``."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    row = first + gl.arange(0, box.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    rows = box.load(LAYOUT)
    box.store(gl.where((row < live)[:, None], rows, 0.0))


@gluon.jit
def _clear_tail(values, stage, live):
    """Zero the values of a stage from its token ``live`` to the end of that token's run."""
    RUNS: gl.constexpr = values.KV_TILE // values.RUN
    run = live // values.RUN
    first = run * values.RUN
    for half in gl.static_range(values.HALVES):
        box = values.runs.index((stage * values.HALVES + half) * RUNS + run)
        _clear_rows(box, first, live, 64)
    if values.EXTRA > 0:
        _clear_rows(values.extra_runs.index(stage * RUNS + run), first, live, values.EXTRA)
    # Generic stores before wgmma reads them, and before TMA overwrites them.
    fence_async_shared()


@gluon.jit
def _taken_apart(row, OWN: gl.constexpr, PACKED: gl.constexpr):
    """Token and query head, within its tile, of a row's number.

    OWN are the bits that say which thread has it: what comes of them is computed where it is used.
    The others say which of its registers, and become constants. Together they were a register for
    each row of a thread, from the kernel's beginning on.
    """
    own, rest = (row & OWN) + opaque_zero(), row & ~OWN
    return own // PACKED + rest // PACKED, own % PACKED + rest % PACKED


@gluon.jit
def store_rows(result, first, tile, left, out, shape):
    """Write columns from ``first`` on of the rows of a warp group's first ``left`` tokens."""
    PACKED: gl.constexpr = shape.PACKED
    WIDTH: gl.constexpr = result.shape[1]
    OUTPUT: gl.constexpr = result.type.layout
    out_ptr = out.out_ptr
    if out.FP8_OUT:
        narrow = encode_e4m3(result, True)
    else:
        narrow = result.to(out_ptr.dtype.element_ty)
    # By way of shared memory to rows of 16 bytes per thread, where there is room for it.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    IS_NARROW: gl.constexpr = WIDTH <= 128 and out_ptr.dtype.element_ty != gl.float32
    ROWS: gl.constexpr = WIDE if IS_NARROW else OUTPUT
    narrow = gl.convert_layout(narrow, ROWS)
    # With heads of up to 64 columns every bit of a row's number counts as the thread's: Triton 3.8
    # has no registers left to take the constants of registers apart. Nor has 3.7 with batch
    # invariance and a window.
    WHOLE: gl.constexpr = WIDTH <= 64 or (shape.ASCENDING and _BY_TRITON_3_7)
    OWN: gl.constexpr = (63 if WHOLE else 7) if IS_NARROW else _OWN
    token, lane = _taken_apart(gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)), OWN, PACKED)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ROWS)) + first
    offset = (tile.row + token).to(gl.int64) * wide(out.out_token)
    offset += (tile.head * PACKED + lane) * wide(out.out_head)
    mask = (token < left)[:, None] & (column < shape.SIZE)[None, :]
    if IS_NARROW:
        places = offset[:, None] + column[None, :]
    else:
        # The thread's bits first, so that the others become constants: a register for each of its
        # columns was kept otherwise. Columns lie in pairs.
        own = gl.max_constancy(gl.multiple_of(column & 6, 2), 2)
        rest = gl.max_contiguous(gl.multiple_of(column & ~6, 2), 2)
        places = (offset[:, None] + own[None, :]) + rest[None, :]
    gl.store(out_ptr + places, narrow, mask=mask)


@gluon.jit
def rows_of(tile, mask, shape):
    """A warp group's rows of a tile.

    Rows past the request's last are copies of it, and not written.
    """
    SPAN: gl.constexpr = 64 // shape.PACKED
    first = tile.position + gl.minimum(tile.left - 1, 0)
    last = tile.position + gl.minimum(tile.left, SPAN) - 1
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, shape.SCORES))
    if shape.WIDTH + shape.EXTRA > 64:
        # Not kept in registers from the kernel's beginning on, of which narrow heads spare none.
        row += opaque_zero()
    query = gl.minimum(tile.position + row // shape.PACKED, last)
    reach = reach_of(query, tile.kv_len, tile.causal, mask.CAUSAL)
    range_first, range_last = mask.own_range(query, tile.req)
    return Rows(
        first=first, last=last, query=query, reach=reach, range_first=range_first,
        range_last=range_last,
    )  # fmt: skip


@gluon.jit
def anew(place, ASM: gl.constexpr):
    """``place``, in a way that the compiler cannot see through, other than with another ASM.

    Loops that share an operand's address made ptxas compute part of it ahead of the first of them
    only, which need not run at all: see ``undefined_reads`` in ``tests/tools/sass.py``.
    """
    return gl.inline_asm_elementwise(ASM, "=r,r", [place], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def part_told(PART: gl.constexpr, stage, queries, shape):
    """The tile of a stage of queries, from the first token of a warp group's rows on."""
    SPAN: gl.constexpr = 64 // shape.PACKED
    tile = told(queries.records, stage)
    return QueryTile(
        head=tile.head, req=tile.req, row=tile.row + PART * SPAN, left=tile.left - PART * SPAN,
        position=tile.position + PART * SPAN, kv_len=tile.kv_len, causal=tile.causal,
        start=tile.start, low=tile.low, high=tile.high,
    )  # fmt: skip


@gluon.jit
def first_scores(place, now, tile, queries, keys, shape):
    """Scores of a tile's first keys, under way; without a tile, of whatever is there."""
    keys.wait_full(now, tile.high > 0)
    return scores_of(place, now, queries, keys, shape)


@gluon.jit
def clear_behind(PART: gl.constexpr, done, parity, tile, rings, shape):
    """Clear what nobody wrote of a tile's last values, once for all warp groups.

    ``done`` is the turn of those values. Returns the parity of the next phase of ``cleared``.
    """
    live = tile.kv_len - (tile.high - 1) * shape.KV_TILE
    has_tail = (shape.KIND <= 0) & (live < shape.KV_TILE) & (live % rings.values.RUN != 0)
    if has_tail:
        if PART == shape.WARP_GROUPS - 1:
            rings.values.wait_full(done)
            _clear_tail(rings.values, rings.values.stage(done), live)
        # Everybody arrives: of one that waits alone, the other could be two tails ahead,
        # and the phase that it waits for would look as if it were still to come.
        mbarrier.arrive(rings.cleared, count=1)
        mbarrier.wait(rings.cleared, parity)
    return parity ^ has_tail.to(gl.int32)
