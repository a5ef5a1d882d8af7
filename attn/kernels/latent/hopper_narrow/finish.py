"""States of parts of the narrow kernel's work items: the last program to arrive folds them.

**Blocks.** The segments of a segment group are folded in two steps: BLOCK segments of an aligned
block into one state, in their order, and then the blocks, in theirs. So a program that has all
segments of a block stores one state for it, and whoever folds reads a quarter of the states that it
would read of segments. The steps follow from positions alone, so bits do not depend on the batch.

**Bundles.** The states of segment groups are folded in two steps too where there are more than
BUNDLE: those of a bundle by its last program, side by side with other bundles', then the bundles'.
One program that folds 40 states of 32 KiB needs 20 us for it.

The state of a block lies in the slot of the block's first segment. A program that begins within a
block stores its segments of that block one by one, since the block's fold begins before it. The
program that has the first segment keeps the fold of its whole blocks, and stores it in slot 0.
Every program says with its arrival which slots it has filled.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_decode.finish import (
    fold_states,
    lending_group_of,
    place_of,
    slots_of,
    store_state,
    write_state,
)
from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import Cells, State

BLOCK = tl.constexpr(4)
"""Segments of a block."""
_HEADS = tl.constexpr(0x1111)
"""Bits of the slots of the first segments of blocks, of a segment group of 16 segments."""
_COUNT_BITS = tl.constexpr(8)
"""Low bits of a counter that count segments; the bits above say which slots are filled."""
_BUNDLE = tl.constexpr(8)
"""Fewest segment groups of a bundle."""
_MOST_BUNDLES = tl.constexpr(7)
"""Most bundles. A counter has four bits for each, and four for the bundles that have arrived."""
_WARPS = tl.constexpr(8)
_WIDE = tl.constexpr(256)
"""Columns that are folded at a time where four states are under way."""
_NARROW = tl.constexpr(128)
"""Columns that are folded at a time where twelve states are under way."""


@gluon.jit
def _load_state(plan, slot, cells, is_there, tile):
    """Load a stored state; unless ``is_there``, the empty state, which changes no fold."""
    mine = cells.mine & is_there
    slot = slot.to(gl.int64)
    sums = plan.sums_ptr + slot * (2 * tile.USED)
    m = gl.load(sums + cells.row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + tile.USED + cells.row, mask=mine, other=0.0, cache_modifier=".cg")
    at = plan.states_ptr + slot * (tile.USED * tile.SIZE) + cells.cell
    acc = gl.load(at, mask=cells.mask & is_there, other=0.0, cache_modifier=".cg")
    return State(m=m, l=l, acc=acc)


@gluon.jit
def _cells(first, tile, WIDTH: gl.constexpr):
    """The cells of WIDTH columns of a state, from column ``first`` on, and these columns."""
    LANES: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [_WARPS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    mine = row < tile.USED
    cells = Cells(
        row=row,
        cell=row[:, None] * tile.SIZE + column[None, :],
        mine=mine,
        mask=mine[:, None] & (column >= 0)[None, :],
    )
    return cells, column


@gluon.jit
def _store_or_write(
    state, cells, column, target, stores, is_last, work, head, plan, out, tile
):  # fmt: skip
    """Store a folded state in slot ``target`` if ``stores``, else write it as output.

    The slot may be one of those that are folded. So its sums are stored last, when all threads have
    read them for all columns.
    """
    if stores:
        if is_last:
            thread_barrier()
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

    Of the first four, those are folded whose bit is set in ``there``; the first always is.
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
        is_last = first + WIDTH == tile.SIZE
        _store_or_write(
            state, cells, column, target, stores, is_last, work, head, plan, out, tile
        )  # fmt: skip


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
    """Fold the states of a segment group, some of which are of single segments.

    All are loaded at once: the program has nothing else to do while it waits for them.
    """
    for first in range(0, tile.SIZE, WIDTH):
        cells, column = _cells(first, tile, WIDTH)
        a0, a1, a2, a3 = _load_block(plan, slot, there, cells, 0, tile)
        b0, b1, b2, b3 = _load_block(plan, slot, there, cells, 1, tile)
        c0, c1, c2, c3 = _load_block(plan, slot, there, cells, 2, tile)
        state = _fold_block(a0, a1, a2, a3)
        d0, d1, d2, d3 = _load_block(plan, slot, there, cells, 3, tile)
        if there >> 4 > 0:
            state = fold_states(state, _fold_block(b0, b1, b2, b3))
        if there >> 8 > 0:
            state = fold_states(state, _fold_block(c0, c1, c2, c3))
        if there >> 12 > 0:
            state = fold_states(state, _fold_block(d0, d1, d2, d3))
        is_last = first + WIDTH == tile.SIZE
        _store_or_write(
            state, cells, column, target, stores, is_last, work, head, plan, out, tile
        )  # fmt: skip


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


@gluon.constexpr_function
def _bundle_of(segment_groups: int) -> int:
    """Segment groups of a bundle, where a request has up to ``segment_groups``."""
    return max(_BUNDLE.value, -(-segment_groups // _MOST_BUNDLES.value))


@gluon.jit
def _group_slots(work, lending_group, segment_group, segment_groups, slots, plan):
    """Say where the states of a query's segment groups go.

    The first group of programs that starts in the middle of their keys lends the slots. Where no
    group starts there, one program has all segment groups and uses its own slots.

    Returns:
        The first slot, the owning group, and whether more than one group of programs arrives.
    """
    loop = work.number % plan.HEAD_LOOPS
    spans = segment_groups > 1
    mine_too = slots
    owner = lending_group
    if segment_groups > 1:
        which = work.number // plan.HEAD_LOOPS - segment_group
        owner = lending_group_of(place_of(plan.rows_ptr + which * FIELDS, loop, 0), plan)
        place = place_of(plan.rows_ptr + (which + segment_groups - 1) * FIELDS, loop, 1) - 1
        spans = lending_group_of(place, plan) > owner
        lends = gl.where(spans, owner, owner - 1)
        mine_too = (lends * plan.HEADS + work.lane) * plan.AREA + plan.SLOTS
        mine_too += (gl.where(spans, 0, plan.HEAD_LOOPS) + loop) * plan.SEGMENT_GROUPS
    return mine_too, owner, spans


@gluon.jit
def arrive_and_fold(work, head, state, lending_group, plan, out, tile):
    """Store the state of a part that lacks some keys of its queries; the last to arrive folds."""
    parts = gl.load(work.fields + 9)
    segment_group = gl.load(work.fields + 10)
    segment_groups = gl.load(work.fields + 11)
    loop = work.number % plan.HEAD_LOOPS
    is_whole = (work.begin == 0) & (work.end == parts)
    slots = slots_of(work, lending_group, plan)
    mine_too, owner, spans = _group_slots(
        work, lending_group, segment_group, segment_groups, slots, plan
    )
    if work.begin == 0:
        slot = gl.where(is_whole, mine_too + segment_group, slots)
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
        BUNDLE: gl.constexpr = _bundle_of(plan.SEGMENT_GROUPS)
        bundle = segment_group // BUNDLE
        bundles = (segment_groups + BUNDLE - 1) // BUNDLE
        in_bundle = gl.minimum(segment_groups - bundle * BUNDLE, BUNDLE)
        # Level 0 folds the segments of this segment group, where several programs have them. Level
        # 1 folds the segment groups of a bundle, level 2 the bundles.
        levels = gl.where(segment_groups > 1, gl.where(bundles > 1, 3, 2), 1)
        goes_on = ready
        for level in range(is_whole.to(gl.int32), levels):
            if level > 0:
                thread_barrier()
                is_end = segment_group + 1 == segment_groups
                if spans:
                    if goes_on:
                        counter = plan.counters_ptr + plan.groups * plan.HEADS
                        counter += (owner * plan.HEADS + work.lane) * plan.HEAD_LOOPS + loop
                        shift = gl.where(level == 1, 4 * bundle, 4 * _MOST_BUNDLES)
                        wanted = gl.where(level == 1, in_bundle, bundles)
                        arrived = gl.atomic_add(counter, 1 << shift, sem="acq_rel", scope="gpu")
                        goes_on = ((arrived >> shift) & 15) + 1 == wanted
                        if goes_on & (level + 1 == levels):
                            gl.store(counter, 0)
                else:
                    is_bundle_end = (level == 1) & (segment_group + 1 == bundle * BUNDLE + BUNDLE)
                    goes_on = goes_on & (is_end | is_bundle_end)
            if goes_on:
                target = mine_too + gl.where(level == 0, segment_group, bundle * BUNDLE)
                stores = level + 1 < levels
                if (level > 0) | ((there & ~_HEADS) == 0):
                    first = slots
                    spacing = BLOCK + 0
                    count = BLOCK + 0
                    heads = (there & 1) | ((there >> 3) & 2) | ((there >> 6) & 4)
                    heads |= (there >> 9) & 8
                    if level > 0:
                        first = gl.where(level == 1, mine_too + bundle * BUNDLE, mine_too)
                        spacing = gl.where(level == 1, 1, BUNDLE)
                        count = gl.where(level == 1, in_bundle, bundles)
                        heads = _below(gl.minimum(count, 4))
                    _fold_spaced(
                        first, spacing, count, heads, target, stores, work, head, plan, out, tile,
                        _WIDE,
                    )  # fmt: skip
                else:
                    _fold_blocks(
                        slots, there, target, stores, work, head, plan, out, tile, _NARROW
                    )  # fmt: skip
