"""States of latent (MLA) decode: which segments of a work item a program has, and where their
states go.

A program writes a state as the result, stores it, or folds it with others. Where several programs
share a work item, the last of them to arrive folds the stored states.

A work item is called ``r`` here, counted with its head loops: item ``r // HEAD_LOOPS`` of the plan
in head loop ``r % HEAD_LOOPS``. A *segment_group* is a segment group: some consecutive segments of
the keys of the same query tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.query_rows import fold_parts, write_rows
from attn.kernels.dense.tile import recomputed, store_planes
from attn.kernels.lang.groups import Block
from attn.kernels.lang.stored import plane_columns
from attn.kernels.latent.groups import Segments
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


@triton.jit
def fields_of(r, program, plan):
    """Pointer to a work item's numbers.

    The first item of a program share has a copy in the share, so that a program starts with one
    load instead of two in turn.
    """
    copy = program.share + (_SHARE_FIELDS - _FIELDS)
    is_first = r == tl.load(program.share)
    return tl.where(is_first, copy, plan.rows_ptr + (r // plan.HEAD_LOOPS) * _FIELDS)


@triton.jit
def _place_of(fields, loop, end):
    """Place of an item's first tile among all tiles of the step; with ``end`` 1, past its last."""
    return tl.load(fields + 7) + (loop + end) * tl.load(fields + 6)


@triton.jit
def share_of(r, fields, program, plan):
    """The program's part of a work item, as :class:`attn.kernels.latent.groups.Segments`.

    ``fields`` points to the numbers of the work item. Callers read this again wherever they need
    it, because the loop over tiles needs the registers.
    """
    parts = tl.load(fields + 9)
    begin = tl.where(r == tl.load(program.share), tl.load(program.share + 1), 0)
    end = tl.where(r == tl.load(program.share + 2), tl.load(program.share + 3), parts)
    place = _place_of(fields, r % plan.HEAD_LOOPS, 0)
    owner = (place.to(tl.int64) * plan.groups // tl.load(plan.total_ptr + 1)).to(tl.int32)
    # The first group of programs that starts inside the item lends its slots to it. No other item
    # can use them, since a group starts inside one item at most.
    slots = ((owner + 1) * plan.HEADS + program.lane) * plan.AREA
    first = tl.load(fields + 8)
    return Segments(begin=begin, end=end, first=first, parts=parts, slots=slots)


@triton.jit
def _segment_groups_at(r, fields, program, plan, own):
    """Where the states of the segment groups of a work item's tokens go.

    Returns the first slot; the group of programs that has the first tile of these keys; and
    whether other groups have tiles of them too. If they do, the slots follow one another in the
    scratch of the first group that starts in the middle of the keys, which lends them. If not, the
    slot is among the program's ``own`` ones, and states are folded there as they come.
    """
    segment_group = tl.load(fields + 10)
    segment_groups = tl.load(fields + 11)
    total = tl.load(plan.total_ptr + 1)
    loop = r % plan.HEAD_LOOPS
    which = r // plan.HEAD_LOOPS - segment_group
    place = _place_of(plan.rows_ptr + which * _FIELDS, loop, 0)
    owner = (place.to(tl.int64) * plan.groups // total).to(tl.int32)
    place = _place_of(plan.rows_ptr + (which + segment_groups - 1) * _FIELDS, loop, 1) - 1
    spans = (place.to(tl.int64) * plan.groups // total).to(tl.int32) > owner
    spans = spans & (segment_groups > 1)
    lent = ((owner + 1) * plan.HEADS + program.lane) * plan.AREA + plan.SLOTS
    lent += loop * plan.SEGMENT_GROUPS
    return tl.where(spans, lent, own + loop), owner, spans


@triton.jit
def prefix_at(r, fields, program, plan, own, spare):
    """Slot for the state of a segment group of which the program has every segment.

    ``own`` and ``spare`` are the results of :func:`own_states`.
    """
    segment_group = tl.load(fields + 10)
    place, _, spans = _segment_groups_at(r, fields, program, plan, own)
    return tl.where(spans | (segment_group == 0), place + segment_group, spare)


@triton.jit
def write_row(state, block, factor, out, scratch, tile, DECODE: tl.constexpr):
    """Write output and LSE of a work item whose keys are all folded.

    ``state`` has the item's ``[ROWS]`` query rows, ``block`` says which they are, and ``factor``
    fp32 is the factor of the cache's elements.
    """
    ROWS: tl.constexpr = state.m.shape[0]
    # Recomputed in a way that hides from the compiler that the query's load knew these numbers: the
    # loop in between has no registers to keep them in.
    row = tl.arange(ROWS, 2 * ROWS) - recomputed(block.tokens * 0 + ROWS, DECODE)
    at = block.token + row // tile.TILE_HEADS
    head = block.in_group + row % tile.TILE_HEADS
    wanted = (row < block.tokens * tile.TILE_HEADS) & (row < tile.USED) & (head < tile.NUM_HEADS)
    index = tl.arange(0, scratch.WIDTH)
    valid = index < out.COLUMNS
    columns = plane_columns(index, 0, out.SIZE, out.KIND)
    write_rows(
        state.m, state.l, state.acc0, at, head, wanted, columns, valid, out, factor, out.LSE, False
    )
    if scratch.PLANES > 1:
        columns = plane_columns(index, 1, out.SIZE, out.KIND)
        write_rows(
            state.m, state.l, state.acc1, at, head, wanted, columns, valid, out, factor, False,
            False,
        )  # fmt: skip


@triton.jit
def own_states(program, plan, SPARE: tl.constexpr):
    """First slot of the states that a program lends to nobody, and first of its spare ones."""
    OWN: tl.constexpr = plan.HEAD_LOOPS if plan.SEGMENT_GROUPS > 1 else 0
    own = plan.groups * plan.HEADS * plan.AREA + program.pid * (OWN + SPARE)
    return own, own + OWN


@triton.jit
def close_segment(
    state, r, part, is_last, program, factor, plan, scratch, out, tile, DECODE: tl.constexpr
):  # fmt: skip
    """Finish segment ``part`` of a work item of 64 query rows.

    If the segment is all there is of the item, write its state as the result. Else store the state
    in memory, and fold the stored states when the spare slots are full or the segment is the last.

    ``is_last`` says that the program has no later segment of the item.
    """
    fields = fields_of(r, program, plan)
    segments = share_of(r, fields, program, plan)
    own, spare = own_states(program, plan, tile.SPARE)
    token = tl.load(fields + 1)
    count = tl.load(fields + 2)
    is_whole = (segments.begin == 0) & (segments.end == segments.parts)
    writes = is_whole & (tl.load(fields + 11) == 1)
    in_group = ((r % plan.HEAD_LOOPS) * plan.HEADS + program.lane) * tile.TILE_HEADS
    block = Block(token=token, tokens=count, kv_head=0, in_group=in_group)
    prefix = segments.slots
    if is_whole & is_last:
        prefix = prefix_at(r, fields, program, plan, own, spare)
    # Number of states that wait to be folded with this one: a fold leaves one behind.
    before = part - segments.first
    held = tl.where(before > 0, 1 + (before - 1) % (tile.SPARE - 1), 0)
    alone = (segments.begin == 0) & is_last & (held == 0)
    if alone & writes:
        write_row(state, block, factor, out, scratch, tile, DECODE)
    else:
        slot = tl.where(alone, prefix, spare + held)
        slot = tl.where(segments.begin > 0, segments.slots + part - segments.first, slot)
        store_planes(scratch, slot, state.m, state.l, state)
        held += 1
        if (segments.begin == 0) & (alone == 0) & (is_last | (held == tile.SPARE)):
            # The fold reads states that other threads of the program have stored.
            tl.debug_barrier()
            target = tl.where(is_last, prefix, spare)
            fold_parts(
                block, spare, 1, held, target, (is_last & writes) == 0, scratch, out, factor,
                tile.NUM_HEADS, tile.TILE_HEADS,
            )  # fmt: skip
            tl.debug_barrier()


@triton.jit
def finish_row(r, program, factor, plan, scratch, out, tile):
    """Announce a program's segments of a work item, and fold the item if it is complete."""
    fields = fields_of(r, program, plan)
    segments = share_of(r, fields, program, plan)
    is_whole = (segments.begin == 0) & (segments.end == segments.parts)
    segment_groups = tl.load(fields + 11)
    if (is_whole == 0) | (segment_groups > 1):
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        segment_group = tl.load(fields + 10)
        loop = r % plan.HEAD_LOOPS
        in_group = (loop * plan.HEADS + program.lane) * tile.TILE_HEADS
        block = Block(token=token, tokens=count, kv_head=0, in_group=in_group)
        own, spare = own_states(program, plan, tile.SPARE)
        mine_too, row_owner, spans = _segment_groups_at(r, fields, program, plan, own)
        in_parts = (segments.begin > 0) | (segments.end < segments.parts)
        # Only the last program to arrive needs this number, and needs it at once: load it now.
        lending_group = segments.slots // plan.AREA // plan.HEADS
        after_prefix = tl.load(plan.starts_ptr + 2 * lending_group + 1, mask=in_parts, other=1)
        counter = plan.counters_ptr + segments.slots // plan.AREA
        # All threads must have stored before one of them announces it.
        tl.debug_barrier()
        arrived = tl.atomic_add(
            counter, segments.end - segments.begin, mask=in_parts, sem="acq_rel", scope="gpu"
        )
        ready = is_whole | (arrived + segments.end - segments.begin == segments.parts)
        tl.store(counter, 0, mask=ready & in_parts)
        if ready:
            # Level 0 folds a segment group that programs share, level 1 the groups.
            for level in range(is_whole.to(tl.int32), tl.where(segment_groups > 1, 2, 1)):
                slot = segments.slots
                after = after_prefix
                count_of = segments.parts
                target = mine_too + segment_group
                stores = segment_groups > 1
                goes_on = ready
                if level == 1:
                    slot = mine_too
                    # Where no other program has a group, two states are folded: the fold so far
                    # and the last state.
                    after = tl.where(spans, 1, spare - mine_too)
                    count_of = tl.where(spans, segment_groups, after + 1)
                    target = mine_too
                    stores = (spans == 0) & (segment_group + 1 < segment_groups)
                    goes_on = segment_group > 0
                    tl.debug_barrier()
                    if spans:
                        counter = plan.counters_ptr + plan.groups * plan.HEADS
                        lender = (row_owner + 1) * plan.HEADS + program.lane
                        counter += lender * plan.HEAD_LOOPS + loop
                        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                        goes_on = arrived + 1 == segment_groups
                        if goes_on:
                            tl.store(counter, 0)
                if goes_on:
                    fold_parts(
                        block, slot, after, count_of, target, stores, scratch, out, factor,
                        tile.NUM_HEADS, tile.TILE_HEADS,
                    )  # fmt: skip
                    # The next group's state is stored where this group's was read.
                    tl.debug_barrier()
