"""States of parts of the narrow kernel's work items: the last program to arrive folds them.

**Blocks.** The segments of a segment group are folded in two steps: BLOCK segments of an aligned
block into one state, in their order, and then the blocks, in theirs. So a program that has all
segments of a block stores one state for it, and whoever folds reads a quarter of the states that it
would read of segments. The steps follow from positions alone, so bits do not depend on the batch.

The state of a block lies in the slot of the block's first segment. A program that begins within a
block stores its segments of that block one by one, since the block's fold begins before it. The
program that has the first segment keeps the fold of its whole blocks, and stores it in slot 0.
Every program says with its arrival which slots it has filled. A program that finds all others
arrived takes a short way: :func:`fold_if_last`.

**Pieces.** A program took 26 us to fold the states of a million keys' segment groups alone
(``docs/notebook/latent.md``). So several programs fold the states of more than _FEW segment groups,
and each takes pieces of their columns: see :func:`_fold_in_pieces`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_decode.finish import (
    fold_states,
    group_slots,
    slots_of,
    store_state,
    write_state,
)
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import Cells, State

BLOCK = tl.constexpr(4)
"""Segments of a block."""
_HEADS = tl.constexpr(0x1111)
"""Bits of the slots of the first segments of blocks, of a segment group of 16 segments."""
_COUNT_BITS = tl.constexpr(8)
"""Low bits of a counter that count segments; the bits above say which slots are filled."""
_FEW = tl.constexpr(16)
"""Most segment groups that one program folds alone: 128k keys."""
_PIECE = tl.constexpr(64)
"""Columns of a piece."""
_LOOKS = tl.constexpr(256)
"""How often a program looks, at most, whether all segment groups have arrived."""
_CLAIM = tl.constexpr(1 << 10)
"""The number that the claim of a piece adds to the counter of segment groups. Lower bits count
arrivals: a request of 128M keys has 96 segment groups."""
_LEAVE = tl.constexpr(1 << 21)
"""The number that a program adds to that counter if it leaves before all have arrived."""
_WARPS = tl.constexpr(8)
_WIDE = tl.constexpr(256)
"""Columns that are folded at a time."""


@gluon.jit
def _load_state(plan, slot, cells, is_there, tile, other=0.0):
    """Load a stored state; unless ``is_there``, the empty state, which changes no fold.

    An empty state's sum is 0, so its output may be any numbers: ``other``.
    """
    mine = cells.mine & is_there
    slot = slot.to(gl.int64)
    sums = plan.sums_ptr + slot * (2 * tile.USED)
    m = gl.load(sums + cells.row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + tile.USED + cells.row, mask=mine, other=0.0, cache_modifier=".cg")
    at = plan.states_ptr + slot * (tile.USED * tile.SIZE) + cells.cell
    acc = gl.load(at, mask=cells.mask & is_there, other=other, cache_modifier=".cg")
    return State(m=m, l=l, acc=acc)


@gluon.jit
def _cells_of(row, column, tile):
    """The cells of a state in some rows ``[16]`` and columns."""
    mine = row < tile.USED
    return Cells(
        row=row,
        cell=row[:, None] * tile.SIZE + column[None, :],
        mine=mine,
        mask=mine[:, None] & (column >= 0)[None, :],
    )


@gluon.jit
def _cells(first, tile, WIDTH: gl.constexpr, zero=0):
    """The cells of WIDTH columns of a state, from column ``first`` on, and these columns.

    ``zero`` is added to rows: 0, or an :func:`opaque_zero`, whose value the compiler does not know.
    """
    LANES: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [_WARPS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT)) + zero
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return _cells_of(row, column, tile), column


@gluon.jit
def _store_or_write(state, cells, column, target, stores, work, head, plan, out, tile):
    """Store a folded state in slot ``target`` if ``stores``, else write it as output."""
    if stores:
        sums = plan.sums_ptr + target.to(gl.int64) * (2 * tile.USED)
        gl.store(sums + cells.row, state.m, mask=cells.mine)
        gl.store(sums + tile.USED + cells.row, state.l, mask=cells.mine)
        places = plan.states_ptr + target.to(gl.int64) * (tile.USED * tile.SIZE) + cells.cell
        gl.store(places, state.acc, mask=cells.mask)
    else:
        token = gl.load(work.fields + 1)
        count = gl.load(work.fields + 2)
        row = cells.row + opaque_zero()
        in_tile = head.in_group + row % tile.TILE_HEADS
        wanted = (row < count * tile.TILE_HEADS) & (in_tile < tile.GROUP)
        at = token + row // tile.TILE_HEADS
        write_state(state, at, in_tile, wanted, column, head.v_factor, out)


@gluon.jit
def _fold_spaced(
    slot, spacing, count, there, target, stores, work, head, plan, out, tile, WIDTH: gl.constexpr
):  # fmt: skip
    """Fold ``count`` states that lie ``spacing`` slots apart, four under way at a time.

    Bit i of ``there`` says whether state i of the first four is folded; bit 0 is always set.
    """
    for first in range(0, tile.SIZE, WIDTH):
        cells, column = _cells(first, tile, WIDTH)
        s0 = _load_state(plan, slot, cells, True, tile)
        s1 = _load_state(plan, slot + spacing, cells, (there & 2) != 0, tile)
        s2 = _load_state(plan, slot + 2 * spacing, cells, (there & 4) != 0, tile)
        s3 = _load_state(plan, slot + 3 * spacing, cells, (there & 8) != 0, tile)
        state = fold_states(fold_states(fold_states(s0, s1), s2), s3)
        for part in range(4, count, 4):
            at = slot + part * spacing
            s0 = _load_state(plan, at, cells, True, tile)
            s1 = _load_state(plan, at + spacing, cells, part + 1 < count, tile)
            s2 = _load_state(plan, at + 2 * spacing, cells, part + 2 < count, tile)
            s3 = _load_state(plan, at + 3 * spacing, cells, part + 3 < count, tile)
            state = fold_states(fold_states(state, s0), s1)
            state = fold_states(fold_states(state, s2), s3)
        _store_or_write(state, cells, column, target, stores, work, head, plan, out, tile)


@gluon.jit
def _empty_state(cells):
    """The state of no keys, which changes no fold."""
    SUMS: gl.constexpr = cells.row.type.layout
    CELLS: gl.constexpr = cells.cell.type.layout
    return State(
        m=gl.full([16], float("-inf"), gl.float32, SUMS),
        l=gl.zeros([16], gl.float32, SUMS),
        acc=gl.zeros(cells.cell.shape, gl.float32, CELLS),
    )


@gluon.jit
def _load_block(plan, slot, there, cells, B: gl.constexpr, tile):
    """Load the states of the segments of block B whose bits are set in ``there``."""
    first: gl.constexpr = B * BLOCK
    return (
        _load_state(plan, slot + first, cells, ((there >> first) & 1) != 0, tile),
        _load_state(plan, slot + first + 1, cells, ((there >> (first + 1)) & 1) != 0, tile),
        _load_state(plan, slot + first + 2, cells, ((there >> (first + 2)) & 1) != 0, tile),
        _load_state(plan, slot + first + 3, cells, ((there >> (first + 3)) & 1) != 0, tile),
    )


@gluon.jit
def _fold_block(s0, s1, s2, s3):
    """Fold the states of a block's segments in their order."""
    return fold_states(fold_states(fold_states(s0, s1), s2), s3)


@gluon.jit
def _fold_blocks(
    slot, there, target, stores, work, head, plan, out, tile, WIDTH: gl.constexpr
):  # fmt: skip
    """Fold the states of a segment group, some of which are of single segments, block by block."""
    for first in range(0, tile.SIZE, WIDTH):
        cells, column = _cells(first, tile, WIDTH)
        s0, s1, s2, s3 = _load_block(plan, slot, there, cells, 0, tile)
        state = _empty_state(cells)
        at = slot
        rest = there
        while rest > 0:
            at = at + BLOCK
            rest = rest >> BLOCK
            # Load the next block before folding this one, so that only the first fold waits.
            n0, n1, n2, n3 = _load_block(plan, at, rest, cells, 0, tile)
            state = fold_states(state, _fold_block(s0, s1, s2, s3))
            s0, s1, s2, s3 = n0, n1, n2, n3
        _store_or_write(state, cells, column, target, stores, work, head, plan, out, tile)


@gluon.jit
def _below(slot):
    """Bits of all slots below ``slot``."""
    return (1 << slot) - 1


@gluon.jit
def _filled(begin, end, parts):
    """Bits of the slots that the segments from ``begin`` to ``end`` of ``parts`` have filled."""
    # Single segments up to the first block that begins within the part, and then blocks.
    block = (begin + BLOCK - 1) // BLOCK * BLOCK
    found = _below(gl.minimum(block, end)) & ~_below(begin)
    found |= _HEADS & _below(end) & ~_below(block)
    if begin == 0:
        # Whole blocks are in slot 0. A block that goes on in another program has its own.
        last = gl.where(end < parts, end // BLOCK * BLOCK, 0)
        found = 1 | (_HEADS & _below(end) & ~_below(last))
        found = gl.where(last > 0, found, 1)
    return found


@gluon.jit
def slot_of_last(work):
    """The slot, among those of its segment group, of the state that a part folds last."""
    block = (work.end - 1) // BLOCK * BLOCK
    slot = gl.where(block >= work.begin, block, work.end - 1)
    return gl.where(work.begin == 0, 0, slot)


@gluon.jit
def _load_unless_own(plan, slot, own, is_own, is_there, cells, tile):
    """The state in ``slot``, or the state ``own`` from registers; empty unless ``is_there``."""
    found = _load_state(plan, slot, cells, is_there & (is_own == 0), tile, own.acc)
    return State(
        m=gl.where(is_own, own.m, found.m), l=gl.where(is_own, own.l, found.l), acc=found.acc
    )


@gluon.jit
def fold_if_last(work, state, lending_group, plan, tile):
    """Fold the states of a request's only segment group, if all others are there and are blocks.

    The state of this part is still in registers and need not be stored, nor does the program have
    to arrive: nobody waits for it.

    Returns:
        The folded state and True; or ``state`` and False.
    """
    is_last = gl.load(work.fields + 11) == 1
    there = 0
    counter = plan.counters_ptr + lending_group * plan.HEADS + work.lane
    if is_last:
        parts = gl.load(work.fields + 9)
        there = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        there += work.end - work.begin + (_filled(work.begin, work.end, parts) << _COUNT_BITS)
        is_last = (there & ((1 << _COUNT_BITS) - 1)) == parts
        there = there >> _COUNT_BITS
        is_last = is_last & ((there & ~_HEADS) == 0)
    if is_last:
        # Earlier states of this part were stored by other threads.
        thread_barrier()
        gl.store(counter, 0)
        STATE: gl.constexpr = state.acc.type.layout
        row = gl.arange(0, 16, layout=gl.SliceLayout(1, STATE)) + opaque_zero()
        column = gl.arange(0, tile.SIZE, layout=gl.SliceLayout(0, STATE))
        cells = _cells_of(row, column, tile)
        slots = slots_of(work, lending_group, plan)
        own = slot_of_last(work)
        is_1 = ((there >> BLOCK) & 1) != 0
        is_2 = ((there >> (2 * BLOCK)) & 1) != 0
        is_3 = ((there >> (3 * BLOCK)) & 1) != 0
        s0 = _load_unless_own(plan, slots, state, own == 0, is_last, cells, tile)
        s1 = _load_unless_own(plan, slots + BLOCK, state, own == BLOCK, is_1, cells, tile)
        s2 = _load_unless_own(plan, slots + 2 * BLOCK, state, own == 2 * BLOCK, is_2, cells, tile)
        s3 = _load_unless_own(plan, slots + 3 * BLOCK, state, own == 3 * BLOCK, is_3, cells, tile)
        state = _fold_block(s0, s1, s2, s3)
    return state, is_last


@gluon.jit
def _fold_piece(piece, slot, count, work, head, plan, out, tile):
    """Fold a piece of the columns of ``count`` states in neighbouring slots, and write it."""
    # With a constant zero Triton 3.9 spills the thread's number, and others.
    cells, column = _cells(piece * _PIECE, tile, _PIECE, opaque_zero())
    state = _empty_state(cells)
    for part in range(0, count, 16):
        at = slot + part
        there = _below(gl.minimum(count - part, 16))
        a0, a1, a2, a3 = _load_block(plan, at, there, cells, 0, tile)
        b0, b1, b2, b3 = _load_block(plan, at, there, cells, 1, tile)
        c0, c1, c2, c3 = _load_block(plan, at, there, cells, 2, tile)
        d0, d1, d2, d3 = _load_block(plan, at, there, cells, 3, tile)
        state = fold_states(fold_states(state, a0), a1)
        state = fold_states(fold_states(state, a2), a3)
        state = fold_states(fold_states(state, b0), b1)
        state = fold_states(fold_states(state, b2), b3)
        state = fold_states(fold_states(state, c0), c1)
        state = fold_states(fold_states(state, c2), c3)
        state = fold_states(fold_states(state, d0), d1)
        state = fold_states(fold_states(state, d2), d3)
    _store_or_write(state, cells, column, slot, False, work, head, plan, out, tile)


@gluon.jit
def _fold_in_pieces(counter, slot, count, waits, work, head, plan, out, tile):
    """Fold the states of ``count`` segment groups and write the output, by several programs.

    A program comes here with every segment group that it completes. The last to come finds all
    states there, and folds piece by piece. Programs with nothing else to do (``waits``) look for a
    while whether the last has come, and then take pieces too. The result does not depend on who
    folds a piece, nor on whether anybody waits. The last to leave clears the counter.
    """
    PIECES: gl.constexpr = tile.SIZE // _PIECE
    seen = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    is_last = seen % _CLAIM == count
    is_complete = is_last
    looks = gl.where(waits, _LOOKS + 0, 0)
    while (looks > 0) & (is_complete == 0):
        is_complete = gl.atomic_add(counter, 0, sem="acquire", scope="gpu") % _CLAIM == count
        looks -= 1
    if is_complete:
        # Piece 0 is for the last to come, who does not have to claim it.
        piece = 0
        if not is_last:
            seen = _added(counter, _CLAIM)
            piece = _claims(seen)
        while piece < PIECES:
            _fold_piece(piece, slot, count, work, head, plan, out, tile)
            seen = _added(counter, _CLAIM)
            piece = _claims(seen)
    else:
        seen = _added(counter, _LEAVE)
    # A program leaves with a claim past the last piece, or else with _LEAVE.
    if _claims(seen) - (PIECES - 1) + seen // _LEAVE == count:
        gl.store(counter, 0)


@gluon.jit
def _added(counter, number):
    """Add to a counter that orders no other memory; returns the sum."""
    return gl.atomic_add(counter, number + 0, sem="relaxed", scope="gpu") + number


@gluon.jit
def _claims(seen):
    """How many pieces have been claimed, which is also the number of the last of them."""
    return seen % _LEAVE // _CLAIM


@gluon.jit
def arrive_and_fold(work, head, state, lending_group, is_end, plan, out, tile):
    """Store the state of a part that lacks some keys of its queries; the last to arrive folds.

    ``is_end`` says that the program has no other part behind this one.
    """
    parts = gl.load(work.fields + 9)
    segment_group = gl.load(work.fields + 10)
    segment_groups = gl.load(work.fields + 11)
    loop = work.number % plan.HEAD_LOOPS
    is_whole = (work.begin == 0) & (work.end == parts)
    slots = slots_of(work, lending_group, plan)
    mine_too, owner, spans = group_slots(
        work, lending_group, segment_group, segment_groups, slots, plan
    )
    slot = gl.where(is_whole, mine_too + segment_group, slots + slot_of_last(work))
    store_state(plan, slot, state, tile, 0)
    # All threads must have stored their states before the counter says so.
    thread_barrier()
    ready = is_whole
    there = 0
    if not is_whole:
        counter = plan.counters_ptr + lending_group * plan.HEADS + work.lane
        own = work.end - work.begin + (_filled(work.begin, work.end, parts) << _COUNT_BITS)
        there = gl.atomic_add(counter, own, sem="acq_rel", scope="gpu") + own
        ready = (there & ((1 << _COUNT_BITS) - 1)) == parts
        there = there >> _COUNT_BITS
        if ready:
            gl.store(counter, 0)
    if ready:
        # Level 0 folds the segments of this segment group, where several programs have them. Level
        # 1 folds the segment groups.
        for level in range(is_whole.to(gl.int32), gl.where(segment_groups > 1, 2, 1)):
            goes_on = ready
            if level == 1:
                goes_on = segment_group + 1 == segment_groups
                thread_barrier()
                counter = plan.counters_ptr + plan.groups * plan.HEADS
                counter += (owner * plan.HEADS + work.lane) * plan.HEAD_LOOPS + loop
                counts = spans
                if plan.SEGMENT_GROUPS > _FEW:
                    counts = spans & (segment_groups <= _FEW)
                    if spans & (segment_groups > _FEW):
                        goes_on = segment_groups == 0
                        _fold_in_pieces(
                            counter, mine_too, segment_groups, is_end, work, head, plan, out, tile
                        )  # fmt: skip
                if counts:
                    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    goes_on = arrived + 1 == segment_groups
                    if goes_on:
                        gl.store(counter, 0)
            if goes_on:
                target = mine_too + segment_group
                stores = (level == 0) & (segment_groups > 1)
                if (level == 1) | ((there & ~_HEADS) == 0):
                    first = slots
                    spacing = BLOCK + 0
                    count = BLOCK + 0
                    heads = (there & 1) | ((there >> 3) & 2) | ((there >> 6) & 4)
                    heads |= (there >> 9) & 8
                    if level == 1:
                        first = mine_too
                        spacing = 1
                        count = segment_groups
                        heads = _below(gl.minimum(count, 4))
                    _fold_spaced(
                        first, spacing, count, heads, target, stores, work, head, plan, out, tile,
                        _WIDE,
                    )  # fmt: skip
                else:
                    _fold_blocks(
                        slots, there, target, stores, work, head, plan, out, tile, _WIDE
                    )  # fmt: skip
