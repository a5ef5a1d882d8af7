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
from attn.kernels.lang.opaque import opaque_int, opaque_zero
from attn.kernels.lang.structures import State
from attn.kernels.lang.wgmma import base_of
from attn.kernels.sparse.hopper_narrow.operands import (
    key_operand,
    key_words,
    natural_order,
    quarters,
    query_order,
    value_operand,
    value_words,
)
from attn.kernels.sparse.hopper_narrow.scores import count_keys, group_scores
from attn.kernels.sparse.hopper_narrow.shrink import shrunk
from attn.kernels.sparse.hopper_wide.parts import entries_at, exp2, units_at
from attn.kernels.sparse.structures import NarrowState

STATE_ROWS = tl.constexpr(16)
"""Heads in a stored state; fewer leave the rest of it unused."""
NATIVE, RAW, SCALED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Row formats: 16-bit elements; e4m3 with one scale for all rows; e4m3 with scales in each row."""
_SLACK = tl.constexpr(8.0)
"""Maxima (log 2) are raised only when they grow by more: weights up to 2^8 are within fp16."""


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
def _store_queries(x, r, queries, KIND: gl.constexpr):
    """Store queries of a tile of heads in shared memory, and factors that undo fp16's scaling.

    ``x`` ``[ROWS, 512]`` are the latent parts of queries and ``r`` ``[ROWS, 64]`` the rotary parts.
    """
    if KIND != NATIVE:
        x, by = _within_fp16(x)
        queries.undo.index(0).store(by)
    if KIND == RAW:
        r, by = _within_fp16(r)
        queries.undo.index(1).store(by)
    queries.rotary.index(0).store(query_order(r, KIND == RAW))
    x0, x1, x2, x3 = quarters(query_order(x, KIND != NATIVE))
    queries.latent.index(0).store(x0)
    queries.latent.index(1).store(x1)
    queries.latent.index(2).store(x2)
    queries.latent.index(3).store(x3)


@gluon.jit
def _scores(z, q0, q1, queries, latents, tails, there, factor, tile):
    """Scores ``[16, KEYS]`` of a tile of 16-bit rows, in units of log 2.

    A warp has eight keys at a time. Entries that list no row get -inf.

    Args:
        z: a zero hidden from the compiler.
        q0, q1: ``[16, 128]``, the first two blocks of the queries' latent parts, in registers.
        queries: the tile of heads' :class:`attn.kernels.sparse.structures.NarrowQueries`.
        latents: ``[KEYS, 256]`` int32 in shared memory, the latents of the tile's keys.
        tails: ``[KEYS, 32]`` int32 in shared memory, the rotary parts of the tile's keys.
        there: ``[KEYS]`` bool, whether the entries list rows.
        factor: fp32, the factor of products.
        tile: the kernel's :class:`attn.kernels.sparse.structures.NarrowTile`.
    """
    DTYPE: gl.constexpr = tile.DTYPE
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, tile.PRODUCT, 2)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, tile.PRODUCT, 2)
    zero = gl.zeros([16, tile.KEYS], gl.float32, tile.PRODUCT)
    k0, k1, k2, k3 = quarters(latents.load(key_words(tile.KEYS, latents.shape[1])))
    s0 = mma_v2(q0, key_operand(k0, DTYPE, OPERAND), zero)
    # Half of the queries is loaded again for each tile: there are no registers to keep it.
    q2 = queries.latent.index(z + 2).load(QUERY)
    s1 = mma_v2(q1, key_operand(k1, DTYPE, OPERAND), zero)
    s2 = mma_v2(q2, key_operand(k2, DTYPE, OPERAND), zero)
    s3 = mma_v2(queries.latent.index(z + 3).load(QUERY), key_operand(k3, DTYPE, OPERAND), zero)
    words = tails.load(key_words(tile.KEYS, tails.shape[1]))
    rotary = queries.rotary.index(z).load(QUERY)
    s = mma_v2(rotary, key_operand(words, DTYPE, OPERAND), zero)
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
def _fold_values(s, state, latents, room, tile):
    """Fold a tile's values into the output, with the weights of its scores ``s`` ``[KEYS, ROWS]``.

    With e4m3 rows weights are fp16. A maximum is then raised only when it would grow by much, so
    most tiles need no rescaling of the output. With bf16 weights that would cost accuracy, since
    the largest weight would not be 1.

    Returns:
        The state's new ``top`` and ``acc``.
    """
    E4M3: gl.constexpr = tile.KIND != NATIVE
    room.scores.store(s)
    thread_barrier()
    seen = room.scores.load(gl.SliceLayout(0, tile.WEIGHTS))[None, :, :]
    if tile.KIND == SCALED:
        seen = seen + room.logs.load(gl.SliceLayout(2, tile.WEIGHTS))[:, :, None]
    else:
        seen = seen + gl.zeros([4, tile.KEYS, tile.ROWS], gl.float32, tile.WEIGHTS)
    new = gl.max(seen, 1)
    if E4M3:
        new = gl.where(new > state.top + _SLACK, new, state.top)
    else:
        new = gl.maximum(state.top, new)
    base = base_of(new)
    acc = shrunk(state.acc, exp2(state.top - base))
    weights = exp2(seen - base[:, None, :])
    NARROW: gl.constexpr = gl.float16 if E4M3 else tile.DTYPE
    WEIGHT: gl.constexpr = gl.DotOperandLayout(1, tile.SUMS, 2)
    p = gl.convert_layout(weights.to(NARROW), WEIGHT, assert_trivial=True)
    words = latents.load(value_words(tile.KEYS, latents.shape[1]))
    v = value_operand(words, E4M3, tile.DTYPE, gl.DotOperandLayout(0, tile.SUMS, 2))
    return new, mma_v2(v, p, acc)


@gluon.jit
def _empty_state(tile):
    """The state of no keys."""
    if tile.KIND == NATIVE:
        COUNTS: gl.constexpr = gl.DistributedLinearLayout(
            [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[0, 4], [0, 8]], [], [16, 16]
        )
        m = gl.full([16, 16], float("-inf"), gl.float32, COUNTS)
        l = gl.zeros([16, 16], gl.float32, COUNTS)
    else:
        BY_KEY: gl.constexpr = by_key_layout(tile.ROWS)
        m = gl.full([32, tile.ROWS], float("-inf"), gl.float32, BY_KEY)
        l = gl.zeros([32, tile.ROWS], gl.float32, BY_KEY)
    top = gl.full([4, tile.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, tile.WEIGHTS))
    return NarrowState(m=m, l=l, top=top, acc=gl.zeros([4, 128, tile.ROWS], gl.float32, tile.SUMS))


@gluon.jit
def _attend(
    W: gl.constexpr, mine, low, high, state, scale, rows_scale, queries, ring, room, tile
):  # fmt: skip
    """Fold every other tile, from tile W on, of the entries ``[low, high)`` of a list.

    Args:
        W: number of the warp group.
        mine: pointer to the list.
        low, high: int32, the entries.
        state: the state of no keys.
        scale: fp32, the layer's scale.
        rows_scale: fp32, the scale that all rows share.
        queries: the tile of heads' :class:`attn.kernels.sparse.structures.NarrowQueries`.
        ring: the :class:`attn.kernels.sparse.structures.NarrowRing` of tiles of rows.
        room: the warp group's :class:`attn.kernels.sparse.structures.NarrowRoom`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.NarrowTile`.

    Returns:
        The state of the tiles.
    """
    E4M3: gl.constexpr = tile.KIND != NATIVE
    TILE: gl.constexpr = tile.KEYS
    KEY: gl.constexpr = gl.SliceLayout(1 if E4M3 else 0, tile.PRODUCT)
    present = entries_at(mine, low + W * TILE, high, TILE, KEY)
    factor = scale * rows_scale * LOG2E
    mbarrier.wait(queries.full, 0)
    if not E4M3:
        q0 = queries.latent.index(0).load(gl.DotOperandLayout(0, tile.PRODUCT, 2))
        q1 = queries.latent.index(1).load(gl.DotOperandLayout(0, tile.PRODUCT, 2))
    turn = W
    for first in range(low + W * TILE, high, 2 * TILE):
        there = present >= 0
        present = entries_at(mine, opaque_int(first + 2 * TILE), high, TILE, KEY)
        stage = turn % ring.STAGES
        mbarrier.wait(ring.full.index(stage), (turn // ring.STAGES) & 1)
        z = opaque_zero()
        latents = ring.latents.index(stage)
        tails = ring.tails.index(stage)
        if E4M3:
            s = group_scores(
                z, queries, latents, tails, there, room.logs, factor, tile.KIND == SCALED, tile
            )
            m, l = count_keys(s, state.m, state.l)
        else:
            s = _scores(z, q0, q1, queries, latents, tails, there, factor, tile)
            m, l = _count(s, state.m, state.l)
            s = gl.permute(s, (1, 0))
        top, acc = _fold_values(s, state, latents, room, tile)
        state = NarrowState(m=m, l=l, top=top, acc=acc)
        thread_barrier()
        mbarrier.arrive(ring.empty.index(stage), count=1)
        turn += 2
    return state


@gluon.jit
def _with_one_maximum(state, tile):
    """Combine the maxima and sums of a row's threads, and rescale the output to that maximum.

    Returns:
        The output ``[4, 128, ROWS]``, maxima ``[ROWS]`` and sums ``[ROWS]``.
    """
    m, l = state.m, state.l
    if tile.KIND != NATIVE:
        m = gl.permute(m, (1, 0))
        l = gl.permute(l, (1, 0))
    else:
        # Each row moves to one warp. To reduce over warps, Triton loads from shared memory in some
        # threads only, and the others would keep a register of no value through the loop before.
        BY_ROW: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
        m = gl.convert_layout(m, BY_ROW)
        l = gl.convert_layout(l, BY_ROW)
    most = gl.max(m, 1)
    sums = gl.sum(l * exp2(m - base_of(most)[:, None]), 1)
    by_block = _to(base_of(most), gl.SliceLayout(0, gl.SliceLayout(1, tile.WEIGHTS)))
    grow = exp2(state.top - by_block[None, :])
    acc = state.acc * _to(grow, gl.SliceLayout(1, tile.SUMS))[:, None, :]
    return acc, most, sums


@gluon.jit
def _with_other_half(W: gl.constexpr, entries_seen, acc, most, sums, ring, room, tile):
    """Bring the states of both warp groups together: group 1 hands its state to group 0.

    Group 1 hands its output over in the buffer of its own last tile, or of a tile never used.

    Args:
        W: number of the warp group.
        entries_seen: int32, entries of the list that both groups have gone through.
        acc, most, sums: output ``[4, 128, ROWS]``, maxima ``[ROWS]`` and sums ``[ROWS]`` of the
            group.
        ring: the :class:`attn.kernels.sparse.structures.NarrowRing` of tiles of rows.
        room: the warp group's :class:`attn.kernels.sparse.structures.NarrowRoom`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.NarrowTile`.

    Returns:
        Output, maxima and sums of both groups in group 0; in group 1 its own.
    """
    tiles = (entries_seen + (tile.KEYS - 1)) // tile.KEYS
    spare = reinterpret(
        ring.latents.index(gl.maximum(tiles // 2 * 2 - 1, 1) % ring.STAGES), gl.float32,
        [16 // tile.ROWS, 4, 128, tile.ROWS],
        gl.SwizzledSharedLayout(8, 2, tile.ROWS // 8, [2, 1, 0]),
    ).index(0)  # fmt: skip
    if W == 1:
        spare.store(acc)
        room.ends.index(0).store(most)
        room.ends.index(1).store(sums)
        thread_barrier()
        mbarrier.arrive(room.done, count=1)
    else:
        mbarrier.wait(room.done, 0)
        VECTOR: gl.constexpr = most.type.layout
        other = room.ends.index(0).load(VECTOR)
        both = gl.maximum(most, other)
        shrink = exp2(most - base_of(both))
        by = exp2(other - base_of(both))
        sums = gl.fma(sums, shrink, room.ends.index(1).load(VECTOR) * by)
        most = both
        ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, tile.SUMS))
        acc = acc * _to(shrink, ROW)[None, :][:, None, :]
        acc = acc + spare.load(tile.SUMS) * _to(by, ROW)[None, :][:, None, :]
    return acc, most, sums


@gluon.jit
def consume_narrow(
    W: gl.constexpr, query, lists, rows, queries, ring, room, out, scratch, division, tile
):
    """Process every other tile, from tile W on, in warp group W; group 0 writes the result of both.

    The number of stages is even, so a stage always belongs to the same warp group. Otherwise, where
    copies overtake each other, a group could be a tile ahead of the other that has not arrived, and
    mistake the parity of an earlier tile for its own.
    """
    gl.static_assert(ring.STAGES % 2 == 0)
    room = room.of(W)
    work = gl.program_id(0)
    token = work // (division.HEAD_TILES * division.PARTS)
    head_tile = work % division.HEAD_TILES
    part = work // division.HEAD_TILES % division.PARTS
    if W == 0:
        # Queries are loaded before rows are copied: behind the copies they would come last.
        x = _load_queries(
            query.query_ptr, token, head_tile, query.query_token, query.query_head, division.HEADS,
            tile.ROWS, 512,
        )  # fmt: skip
        r = _load_queries(
            query.rotary_ptr, token, head_tile, query.rotary_token, query.rotary_head,
            division.HEADS, tile.ROWS, 64,
        )  # fmt: skip
    low = part * division.SEGMENT
    high = gl.minimum(lists.topk, low + division.SEGMENT)
    if lists.HAS_LENS:
        high = gl.minimum(high, gl.load(lists.lens_ptr + token))
    state = _empty_state(tile)
    rows_scale = 1.0
    if tile.KIND == RAW:
        rows_scale = gl.load(rows.scale_ptr)
    if high > low:
        if W == 0:
            _store_queries(x, r, queries, tile.KIND)
            if tile.KIND != NATIVE:
                fence_async_shared()
            thread_barrier()
            mbarrier.arrive(queries.full, count=1)
        state = _attend(
            W, lists.of(token), low, high, state, query.scale, rows_scale, queries, ring, room,
            tile,
        )  # fmt: skip
    # From here the state is three values, not a structure. A branch returns values in the order in
    # which they are first named, and another order would give other PTX.
    acc, most, sums = _with_one_maximum(state, tile)
    if high > low:
        acc, most, sums = _with_other_half(W, high - low, acc, most, sums, ring, room, tile)
    if W == 0:
        acc = natural_order(acc, tile.KIND != NATIVE)
        _write_or_store(
            State(m=most, l=sums, acc=acc), token, head_tile, part, high > low, rows_scale, out,
            scratch, division,
        )  # fmt: skip


@gluon.jit
def _to(x, LAYOUT: gl.constexpr):
    """The tensor ``x`` in another layout."""
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def _write_or_store(state, token, head_tile, part, some, rows_scale, out, scratch, division):
    """Write output and LSE of a tile of heads; with several parts, store the state of this part.

    Args:
        state: maxima ``[ROWS]``, sums ``[ROWS]`` and the output ``[ROWS, 512]``.
        token, head_tile, part: int32, the piece of work.
        some: whether the part has entries; a state without entries is not stored.
        rows_scale: fp32, the scale that all rows share.
        out: the kernel's :class:`attn.kernels.lang.structures.Out`.
        scratch: the kernel's :class:`attn.kernels.sparse.structures.Scratch`.
        division: the kernel's :class:`attn.kernels.sparse.structures.Division`.
    """
    OUT: gl.constexpr = state.acc.type.layout
    ROWS: gl.constexpr = state.acc.shape[0]
    l = _to(state.l, gl.SliceLayout(1, OUT))
    m = _to(state.m, gl.SliceLayout(1, OUT))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, OUT))
    if division.PARTS == 1:
        head = head_tile * ROWS + row
        write_rows(
            m, l, state.acc, token + row * 0, head, head < division.HEADS, column, column >= 0,
            out, rows_scale, out.LSE, True,
        )  # fmt: skip
    elif some:
        slot = wide((token * division.HEAD_TILES + head_tile) * division.PARTS + part)
        gl.store(scratch.sums_ptr + slot * (2 * STATE_ROWS) + row, m)
        gl.store(scratch.sums_ptr + slot * (2 * STATE_ROWS) + STATE_ROWS + row, l)
        cells = row[:, None] * 512 + column[None, :]
        gl.store(scratch.states_ptr + slot * (STATE_ROWS * 512) + cells, state.acc)
