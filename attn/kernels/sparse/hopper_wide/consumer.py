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

from attn.kernels.dense.hopper_prefill.scheduler import sum_of_own, wide
from attn.kernels.dense.hopper_prefill.vector_store import side_by_side, store_side_by_side
from attn.kernels.dense.query_rows import with_sinks, write_lse
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import State
from attn.kernels.lang.wgmma import base_of, scaled_rows
from attn.kernels.sparse.finish import finish_shared
from attn.kernels.sparse.hopper_wide.parts import BLOCK, HALF
from attn.kernels.sparse.pieces import work_at, works_of


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
def _scores(z, phase, queries, keys, ring, W: gl.constexpr, FIRST: gl.constexpr, tile):
    """Start block W's score products over the columns that arrive first: rope and half FIRST.

    With WHOLE all columns of a block arrive at once.

    Args:
        z: a zero hidden from the compiler.
        phase: int32, parity of the tile's number.
        queries: the :class:`attn.kernels.sparse.structures.WideQueries`.
        keys: ``[2, KEYS, 256]`` in shared memory, half FIRST of the blocks' latents.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        W: number of the warp group and of its block.
        FIRST: number of the half.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.

    Returns:
        The scores ``[64, KEYS]``, still in flight, and the gaps ``[KEYS]`` in them.
    """
    zero = gl.zeros([64, tile.KEYS], gl.float32, tile.SCORES)
    if tile.WHOLE:
        # The producer made its stores visible to products before it arrived.
        mbarrier.wait(ring.full.index(W), phase)
    else:
        _wait_for_keys(ring.full.index(W), phase)
    rotary = ring.rope.index(z + W).permute((1, 0))
    s = warpgroup_mma(queries.rotary.index(z), rotary, zero, use_acc=False, is_async=True)
    gap = ring.gaps.index(W).load(gl.SliceLayout(0, tile.SCORES))
    if not tile.WHOLE:
        _wait_for_keys(ring.full.index(2 + W), phase)
    half = keys.index(z + W).permute((1, 0))
    return warpgroup_mma(queries.latent.index(z + FIRST), half, s, is_async=True), gap


@gluon.jit
def _all_scores(
    s, gap, z, phase, queries, keys, ring, W: gl.constexpr, LAST: gl.constexpr, tile
):  # fmt: skip
    """Complete the scores ``s`` with half LAST of the keys, and set those of gaps ``gap`` to -inf.

    ``keys`` ``[2, KEYS, 256]`` is that half of the blocks' latents in shared memory; the other
    arguments and ``s`` and ``gap`` are those of :func:`_scores`.
    """
    if not tile.WHOLE:
        _wait_for_keys(ring.full.index(4 + W), phase)
    q = queries.latent.index(z + LAST)
    s = warpgroup_mma(q, keys.index(z + W).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if tile.TOKENS > 1:
        # Bit i of a key's gap is set where token i lists it. Gaps are loaded anew, since registers
        # would hold the terms of all rows while the products run.
        gap = ring.gaps.index(z + W).load(gl.SliceLayout(0, tile.SCORES))
        token = gl.arange(0, 64, layout=gl.SliceLayout(1, tile.SCORES)) // (64 // tile.TOKENS)
        s = gl.where(((gap[None, :] >> token[:, None]) & 1) != 0, s, float("-inf"))
    else:
        s = s + gap[None, :]
    return s


@gluon.jit
def _publish(weights, m, is_last, queries, ring, room, W: gl.constexpr):
    """Hand weights ``[64, KEYS]`` and maxima ``[64]`` to the other warp group; free the rope.

    After the last tile the queries are freed too.
    """
    room.weights.index(0).store(weights)
    if W == 0:
        room.first_top.store(m)
    else:
        room.second_top.store(m)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(room.ready.index(W), count=1)
    mbarrier.arrive(ring.empty.index(W), count=1)
    mbarrier.arrive(queries.empty, count=1, pred=is_last)


@gluon.jit
def _take_second(z, turn, state, ring, room, tile):
    """Warp group 0 takes block 1's maxima and weights, and starts their product with values.

    Returns:
        Maxima ``[64]``, sums ``[64, 4]`` and the output ``[64, 256]``, whose product is in flight.
    """
    mbarrier.wait(room.ready.index(1), turn & 1)
    top = room.second_top.load(gl.SliceLayout(1, tile.SCORES))
    shrink = gl.exp2(state.m - base_of(top))
    o = scaled_rows(state.acc, shrink)
    l = _times(state.l, shrink)
    return top, l, warpgroup_mma(room.weights.index(z), ring.left.index(z + 1), o, is_async=True)


@gluon.jit
def _first_block(
    turn, is_last, state, scale, queries, ring, room, IS_FIRST: gl.constexpr, tile
):  # fmt: skip
    """Process one tile in warp group 0, which has the scores of the first block.

    EARLY frees half of the second block before the group waits for more keys.

    Args:
        turn: int32, number of the tile among all of the program's.
        is_last: bool, whether it is the last tile of the piece of work.
        state: the state of the tiles before; the second block of the tile before is missing.
        scale: fp32, the factor of products.
        queries: the :class:`attn.kernels.sparse.structures.WideQueries`.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        room: the :class:`attn.kernels.sparse.structures.WideRoom`.
        IS_FIRST: whether it is the first tile of the piece of work.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.

    Returns:
        The state with the first block of this tile.
    """
    z = opaque_zero()
    phase = turn & 1
    m, l, o = state.m, state.l, state.acc
    if not IS_FIRST:
        m, l, o = _take_second(z, turn - 1, state, ring, room, tile)
        if tile.EARLY:
            o = warpgroup_mma_wait(0, deps=[o])
            thread_barrier()
            mbarrier.arrive(ring.empty.index(3), count=1)
    s, gap = _scores(z, phase, queries, ring.left, ring, 0, 0, tile)
    if not IS_FIRST and not tile.EARLY:
        # Wait for all products but the two of scores that were started since.
        o = warpgroup_mma_wait(2, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(3), count=1)
    s = _all_scores(s, gap, z, phase, queries, ring.right, ring, 0, 1, tile)
    # Maxima are in units of log 2 and rounded once, so that differences of two are nearly exact.
    top = gl.maximum(m, gl.max(s, 1) * scale)
    base = base_of(top)
    weights = gl.exp2(s * scale - base[:, None])
    narrow = weights.to(tile.DTYPE)
    _publish(narrow, top, is_last, queries, ring, room, 0)
    shrink = gl.exp2(m - base)
    o = scaled_rows(o, shrink)
    l = _times(l, shrink) + sum_of_own(weights)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, tile.OUTPUT, 2))
    o = warpgroup_mma(operand, ring.left.index(z), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(ring.empty.index(2), count=1)
    return State(m=top, l=l, acc=o)


@gluon.jit
def _take_first(z, turn, state, ring, room, tile):
    """Warp group 1 takes block 0's maxima and weights, and starts their product with values.

    Returns:
        The maxima ``[64]``; the factor ``[64]`` that sums need with them; and the output
        ``[64, 256]``, whose product is in flight.
    """
    mbarrier.wait(room.ready.index(0), turn & 1)
    top = room.first_top.load(gl.SliceLayout(1, tile.SCORES))
    shrink = gl.exp2(state.m - base_of(top))
    o = scaled_rows(state.acc, shrink)
    o = warpgroup_mma(room.weights.index(z), ring.right.index(z), o, is_async=True)
    return top, shrink, o


@gluon.jit
def _second_block(turn, is_last, state, scale, queries, ring, room, tile):
    """Process one tile in warp group 1, which has the scores of the second block.

    EARLY frees half of the first block while the second block is still arriving.

    The arguments are those of :func:`_first_block`; the state is that of all tiles before.

    Returns:
        The state with this tile.
    """
    z = opaque_zero()
    phase = turn & 1
    if tile.EARLY:
        first, shrink, o = _take_first(z, turn, state, ring, room, tile)
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(4), count=1)
    if tile.WHOLE:
        s, gap = _scores(z, phase, queries, ring.left, ring, 1, 0, tile)
        s = _all_scores(s, gap, z, phase, queries, ring.right, ring, 1, 1, tile)
    else:
        # The halves arrive in the order in which their buffers became free.
        s, gap = _scores(z, phase, queries, ring.right, ring, 1, 1, tile)
        s = _all_scores(s, gap, z, phase, queries, ring.left, ring, 1, 0, tile)
    own = gl.max(s, 1) * scale
    if not tile.EARLY:
        first, shrink, o = _take_first(z, turn, state, ring, room, tile)
    top = gl.maximum(first, own)
    base = base_of(top)
    # Unless EARLY, this runs while the product with the first block does.
    weights = gl.exp2(s * scale - base[:, None])
    again = gl.exp2(first - base)
    l = _times(state.l, shrink * again) + sum_of_own(weights)
    narrow = weights.to(tile.DTYPE)
    if not tile.EARLY:
        # The product with the first block reads the weights' buffer, which is free only now.
        o = warpgroup_mma_wait(0, deps=[o])
    _publish(narrow, top, is_last, queries, ring, room, 1)
    if not tile.EARLY:
        mbarrier.arrive(ring.empty.index(4), count=1)
    o = scaled_rows(o, again)
    operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, tile.OUTPUT, 2))
    o = warpgroup_mma(operand, ring.right.index(z + 1), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])
    thread_barrier()
    mbarrier.arrive(ring.empty.index(5), count=1)
    return State(m=top, l=l, acc=o)


@gluon.jit
def _empty_state(tile):
    """The state of no keys; its sums are ``[64, 4]``, kept by thread."""
    return State(
        m=gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, tile.SCORES)),
        l=sum_of_own(gl.zeros([64, tile.KEYS], gl.float32, tile.SCORES)),
        acc=gl.zeros([64, HALF], gl.float32, tile.OUTPUT),
    )


@gluon.jit
def _attend(W: gl.constexpr, turn, piece, state, scale, queries, ring, room, tile):
    """Fold the tiles of keys of a piece of work into ``state``, which is the state of no keys.

    Args:
        W: number of the warp group.
        turn: int32, tiles that the program has processed before.
        piece: the piece of work; it has at least one tile.
        state: the state of no keys.
        scale: fp32, the factor of products.
        queries: the :class:`attn.kernels.sparse.structures.WideQueries`.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        room: the :class:`attn.kernels.sparse.structures.WideRoom`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.

    Returns:
        The tiles that the program has processed now, and the state.
    """
    if W == 0:
        is_last = piece.low + 1 == piece.high
        state = _first_block(turn, is_last, state, scale, queries, ring, room, True, tile)
        turn += 1
        for i in range(piece.low + 1, piece.high):
            is_last = i + 1 == piece.high
            state = _first_block(turn, is_last, state, scale, queries, ring, room, False, tile)
            turn += 1
        m, l, o = _take_second(opaque_zero(), turn - 1, state, ring, room, tile)
        o = warpgroup_mma_wait(0, deps=[o])
        thread_barrier()
        mbarrier.arrive(ring.empty.index(3), count=1)
        state = State(m=m, l=l, acc=o)
    else:
        for i in range(piece.low, piece.high):
            is_last = i + 1 == piece.high
            state = _second_block(turn, is_last, state, scale, queries, ring, room, tile)
            turn += 1
    return turn, state


@gluon.jit
def _sums_of_both(W: gl.constexpr, l, walks, room, tile):
    """Exchange sums between the warp groups, each of which has the sums over its own blocks.

    Both sums refer to the same maxima. ``l`` ``[64, 4]`` are the group's sums, kept by thread, and
    ``walks`` is the number of pieces of work that had keys before.

    Returns:
        The sums ``[64]`` over all keys, and the number of such pieces with this one.
    """
    SUMS: gl.constexpr = gl.SliceLayout(1, tile.SCORES)
    own = gl.convert_layout(gl.sum(l, 1), SUMS)
    room.sums.index(W).store(own)
    thread_barrier()
    mbarrier.arrive(room.ready.index(2 + W), count=1)
    mbarrier.wait(room.ready.index(3 - W), walks & 1)
    walks += 1
    return own + room.sums.index(1 - W).load(SUMS), walks


@gluon.jit
def _store_part(slot, state, scratch, W: gl.constexpr):
    """Store the state of a part of a list in slot ``slot``.

    :func:`attn.kernels.sparse.attend.fold_states_kernel` folds the parts. States are fp32
    ``[slots, 64, 512]``, of which each warp group stores its columns. Sums are fp32
    ``[slots, 2, 64]``: maxima and sums, which group 0 stores.
    """
    OUTPUT: gl.constexpr = state.acc.type.layout
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    mine = row < BLOCK
    if W == 0:
        sums = scratch.sums_ptr + wide(slot) * (2 * BLOCK)
        gl.store(sums + row, state.m, mask=mine)
        gl.store(sums + BLOCK + row, state.l, mask=mine)
    cells = row[:, None] * (2 * HALF) + (W * HALF + column)[None, :]
    cells = scratch.states_ptr + wide(slot) * (2 * BLOCK * HALF) + cells
    gl.store(cells, state.acc, mask=mine[:, None])


@gluon.jit
def _write(W: gl.constexpr, state, piece, out, division, tile):
    """Write the LSE and the warp group's columns of the output of a tile of heads.

    ``state`` has maxima ``[64]``, sums ``[64]`` and these columns ``[64, 256]``.
    """
    OUTPUT: gl.constexpr = state.acc.type.layout
    WRITES_LSE: gl.constexpr = out.LSE and W == 0
    most, sums = state.m, state.l
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
    token, head, wanted = division.row_of(place, piece.token, piece.head_tile)
    # This runs once for a list and waits for its instructions to be fetched, so the code is kept
    # short.
    some = most > float("-inf")
    by = gl.full([64], 1.0, gl.float32, sums.type.layout)
    if out.SINKS:
        most, sums, by = with_sinks(some, most, sums, head, wanted, out.sinks_ptr)
    if WRITES_LSE:
        write_lse(some, most, sums, token, head, wanted, out.lse_ptr, out.lse_token)
    by /= gl.where(some, sums, 1.0)
    columns = side_by_side((state.acc * by[:, None]).to(tile.DTYPE))
    ROWS: gl.constexpr = columns.type.layout
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS)) + opaque_zero()
    token, head, wanted = division.row_of(place, piece.token, piece.head_tile)
    at = token.to(gl.int64) * out.out_token + head * out.out_head
    store_side_by_side(columns, at, wanted, W * HALF, out.out_ptr)


@gluon.jit
def consume_listed(
    W: gl.constexpr, scale, lists, queries, ring, room, out, scratch, division, tile
):  # fmt: skip
    """Process the program's pieces of work in warp group W's half of the output's columns."""
    OUTPUT: gl.constexpr = gl.SliceLayout(1, tile.OUTPUT)
    queries = queries.in_halves()
    ring = ring.in_halves()
    turn = 0
    walks = 0
    first, last, step = works_of(lists.topk, division, tile.KEYS)
    for work in range(first, last, step):
        piece = work_at(work, lists, division, tile.KEYS)
        state = _empty_state(tile)
        sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, tile.SCORES))
        if piece.high > piece.low:
            mbarrier.wait(queries.full, walks & 1)
            # Threads copied the queries: make them visible to products.
            fence_async_shared()
            turn, state = _attend(W, turn, piece, state, scale, queries, ring, room, tile)
            sums, walks = _sums_of_both(W, state.l, walks, room, tile)
        m = gl.convert_layout(state.m, OUTPUT)
        state = State(m=m, l=gl.convert_layout(sums, OUTPUT), acc=state.acc)
        writes = piece.low == 0
        if division.BALANCED:
            if piece.meets > 0:
                slot = piece.meets * division.HEAD_TILES + piece.head_tile
                writes, state = finish_shared(slot, piece.low > 0, state, scratch, W)
        if division.PARTS > 1:
            if piece.high > piece.low:
                slot = piece.token * division.HEAD_TILES + piece.head_tile
                slot = slot * division.PARTS + piece.part
                _store_part(slot, state, scratch, W)
        elif writes:
            _write(W, state, piece, out, division, tile)
