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
from attn.kernels.dense.tile import recomputed, store_state
from attn.kernels.lang.groups import Block, Out, Scratch
from attn.kernels.lang.stored import plane_columns
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


@triton.jit
def fields_of(r, mine, rows_ptr, HEAD_LOOPS: tl.constexpr):
    """Pointer to a work item's numbers.

    The first item of a program share has a copy in the share, so that a program starts with one
    load instead of two in turn.
    """
    copy = mine + (_SHARE_FIELDS - _FIELDS)
    return tl.where(r == tl.load(mine), copy, rows_ptr + (r // HEAD_LOOPS) * _FIELDS)


@triton.jit
def _place_of(fields, loop, end):
    """Place of an item's first tile among all tiles of the step; with ``end`` 1, past its last."""
    return tl.load(fields + 7) + (loop + end) * tl.load(fields + 6)


@triton.jit
def share_of(
    r, fields, mine, total_ptr, groups, lane, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr,
    AREA: tl.constexpr,
):  # fmt: skip
    """The program's part of a work item.

    Returns the program's segments ``[begin, end)``, counted within the item; the item's first
    segment; its number of segments; and the first of the state slots that are lent to it. Callers
    read this again wherever they need it, because the loop over tiles needs the registers.
    """
    parts = tl.load(fields + 9)
    begin = tl.where(r == tl.load(mine), tl.load(mine + 1), 0)
    end = tl.where(r == tl.load(mine + 2), tl.load(mine + 3), parts)
    place = _place_of(fields, r % HEAD_LOOPS, 0)
    owner = (place.to(tl.int64) * groups // tl.load(total_ptr + 1)).to(tl.int32)
    # The first group of programs that starts inside the item lends its slots to it. No other item
    # can use them, since a group starts inside one item at most.
    slots = ((owner + 1) * HEADS + lane) * AREA
    return begin, end, tl.load(fields + 8), parts, slots


@triton.jit
def _segment_groups_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, SEGMENT_GROUPS: tl.constexpr,
):  # fmt: skip
    """Where the states of the segment groups of a work item's tokens go.

    Returns the first slot; the group of programs that has the first tile of these keys; and
    whether other groups have tiles of them too. If they do, the slots follow one another in the
    scratch of the first group that starts in the middle of the keys, which lends them. If not, the
    slot is among the program's ``own`` ones, and states are folded there as they come.
    """
    segment_group = tl.load(fields + 10)
    segment_groups = tl.load(fields + 11)
    total = tl.load(total_ptr + 1)
    loop = r % HEAD_LOOPS
    which = r // HEAD_LOOPS - segment_group
    place = _place_of(rows_ptr + which * _FIELDS, loop, 0)
    owner = (place.to(tl.int64) * groups // total).to(tl.int32)
    place = _place_of(rows_ptr + (which + segment_groups - 1) * _FIELDS, loop, 1) - 1
    spans = (place.to(tl.int64) * groups // total).to(tl.int32) > owner
    spans = spans & (segment_groups > 1)
    lent = ((owner + 1) * HEADS + lane) * AREA + SLOTS + loop * SEGMENT_GROUPS
    return tl.where(spans, lent, own + loop), owner, spans


@triton.jit
def prefix_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, SEGMENT_GROUPS: tl.constexpr,
):  # fmt: skip
    """Slot for the state of a segment group of which the program has every segment."""
    segment_group = tl.load(fields + 10)
    place, _, spans = _segment_groups_at(
        r,
        fields,
        rows_ptr,
        total_ptr,
        groups,
        lane,
        own,
        HEADS,
        HEAD_LOOPS,
        AREA,
        SLOTS,
        SEGMENT_GROUPS,
    )
    return tl.where(spans | (segment_group == 0), place + segment_group, spare)


@triton.jit
def write_row(
    m, l, acc0, acc1, token, count, in_group, out_ptr, lse_ptr, factor, out_token, out_head,
    lse_token, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, CELLS: tl.constexpr,
    WIDTH: tl.constexpr, USED: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    PLANES: tl.constexpr, DECODE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write output and LSE of a work item whose keys are all folded."""
    ROWS: tl.constexpr = m.shape[0]
    # Recomputed in a way that hides from the compiler that the query's load knew these numbers: the
    # loop in between has no registers to keep them in.
    row = tl.arange(ROWS, 2 * ROWS) - recomputed(count * 0 + ROWS, DECODE)
    at = token + row // TILE_HEADS
    head = in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (row < CELLS) & (head < NUM_HEADS)
    index = tl.arange(0, WIDTH)
    valid = index < USED
    columns = plane_columns(index, 0, SIZE, KIND)
    write_rows(
        m, l, acc0, at, head, wanted, columns, valid,
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
            out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=False,
            FP8_OUT=False, LSE=LSE,
        ),
        factor, LSE, False,
    )  # fmt: skip
    if PLANES > 1:
        columns = plane_columns(index, 1, SIZE, KIND)
        write_rows(
            m, l, acc1, at, head, wanted, columns, valid,
            Out(
                out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
                out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=False,
                FP8_OUT=False, LSE=LSE,
            ),
            factor, False, False,
        )  # fmt: skip


@triton.jit
def own_states(pid, groups, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr,
                SEGMENT_GROUPS: tl.constexpr, SPARE: tl.constexpr):  # fmt: skip
    """First slot of the states that a program lends to nobody, and first of its spare ones."""
    OWN: tl.constexpr = HEAD_LOOPS if SEGMENT_GROUPS > 1 else 0
    own = groups * HEADS * AREA + pid * (OWN + SPARE)
    return own, own + OWN


@triton.jit
def close_segment(
    m, l, acc0, acc1, r, part, is_last, mine, pid, lane, groups, factor, rows_ptr,
    total_ptr, states_ptr, sums_ptr, out_ptr, lse_ptr, out_token, out_head, lse_token,
    HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
    SIZE: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, DECODE: tl.constexpr,
    LSE: tl.constexpr, SLOTS: tl.constexpr, SEGMENT_GROUPS: tl.constexpr, AREA: tl.constexpr,
    SPARE: tl.constexpr, FINISH_ROWS: tl.constexpr, FINISH_WIDTH: tl.constexpr,
):  # fmt: skip
    """Finish one segment of a work item of 64 query rows.

    If the segment is all there is of the item, write its state as the result. Else store the state
    in memory, and fold the stored states when the spare slots are full or the segment is the last.

    ``is_last`` says that the program has no later segment of the item.
    """
    fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
    begin, end, first_part, parts, slots = share_of(
        r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
    )
    own, spare = own_states(pid, groups, HEADS, HEAD_LOOPS, AREA, SEGMENT_GROUPS, SPARE)
    token = tl.load(fields + 1)
    count = tl.load(fields + 2)
    is_whole = (begin == 0) & (end == parts)
    writes = is_whole & (tl.load(fields + 11) == 1)
    in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
    prefix = slots
    if is_whole & is_last:
        prefix = prefix_at(
            r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS, HEAD_LOOPS, AREA,
            SLOTS, SEGMENT_GROUPS,
        )  # fmt: skip
    # Number of states that wait to be folded with this one: a fold leaves one behind.
    before = part - first_part
    held = tl.where(before > 0, 1 + (before - 1) % (SPARE - 1), 0)
    alone = (begin == 0) & is_last & (held == 0)
    if alone & writes:
        write_row(
            m, l, acc0, acc1, token, count, in_group, out_ptr, lse_ptr, factor, out_token,
            out_head, lse_token, NUM_HEADS, TILE_HEADS, CELLS, WIDTH, USED, SIZE, KIND, PLANES,
            DECODE, LSE,
        )  # fmt: skip
    else:
        slot = tl.where(alone, prefix, spare + held)
        slot = tl.where(begin > 0, slots + part - first_part, slot)
        store_state(states_ptr, sums_ptr, slot, m, l, acc0, acc1, acc0, acc1, CELLS, WIDTH, PLANES)
        held += 1
        if (begin == 0) & (alone == 0) & (is_last | (held == SPARE)):
            # The fold reads states that other threads of the program have stored.
            tl.debug_barrier()
            target = tl.where(is_last, prefix, spare)
            fold_parts(
                Block(token=token, tokens=count, kv_head=0, in_group=in_group), spare, 1, held,
                target, (is_last & writes) == 0,
                Scratch(
                    states_ptr=states_ptr, sums_ptr=sums_ptr, USED=CELLS, WIDTH=WIDTH,
                    PLANES=PLANES, FINISH_ROWS=FINISH_ROWS, FINISH_WIDTH=FINISH_WIDTH,
                ),
                Out(
                    out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
                    out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=False,
                    FP8_OUT=False, LSE=LSE, COLUMNS=USED, SIZE=SIZE, KIND=KIND,
                ),
                factor, NUM_HEADS, TILE_HEADS,
            )  # fmt: skip
            tl.debug_barrier()


@triton.jit
def finish_row(
    r, mine, pid, lane, groups, factor, rows_ptr, total_ptr, starts_ptr, counters_ptr, states_ptr,
    sums_ptr, out_ptr, lse_ptr, out_token, out_head, lse_token, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    CELLS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, PLANES: tl.constexpr, LSE: tl.constexpr, SLOTS: tl.constexpr,
    SEGMENT_GROUPS: tl.constexpr, AREA: tl.constexpr, SPARE: tl.constexpr,
    FINISH_ROWS: tl.constexpr, FINISH_WIDTH: tl.constexpr,
):  # fmt: skip
    """Announce a program's segments of a work item, and fold the item if it is complete."""
    fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
    begin, end, _, parts, slots = share_of(
        r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
    )
    is_whole = (begin == 0) & (end == parts)
    segment_groups = tl.load(fields + 11)
    if (is_whole == 0) | (segment_groups > 1):
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        segment_group = tl.load(fields + 10)
        in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
        loop = r % HEAD_LOOPS
        own, spare = own_states(pid, groups, HEADS, HEAD_LOOPS, AREA, SEGMENT_GROUPS, SPARE)
        mine_too, row_owner, spans = _segment_groups_at(
            r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS, HEAD_LOOPS, AREA,
            SLOTS, SEGMENT_GROUPS,
        )  # fmt: skip
        in_parts = (begin > 0) | (end < parts)
        # Only the last program to arrive needs this number, and needs it at once: load it now.
        lending_group = slots // AREA // HEADS
        after_prefix = tl.load(starts_ptr + 2 * lending_group + 1, mask=in_parts, other=1)
        counter = counters_ptr + slots // AREA
        # All threads must have stored before one of them announces it.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, end - begin, mask=in_parts, sem="acq_rel", scope="gpu")
        ready = is_whole | (arrived + end - begin == parts)
        tl.store(counter, 0, mask=ready & in_parts)
        if ready:
            # Level 0 folds a segment group that programs share, level 1 the groups.
            for level in range(is_whole.to(tl.int32), tl.where(segment_groups > 1, 2, 1)):
                slot = slots
                after = after_prefix
                count_of = parts
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
                        counter = counters_ptr + groups * HEADS
                        counter += ((row_owner + 1) * HEADS + lane) * HEAD_LOOPS + loop
                        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                        goes_on = arrived + 1 == segment_groups
                        if goes_on:
                            tl.store(counter, 0)
                if goes_on:
                    fold_parts(
                        Block(token=token, tokens=count, kv_head=0, in_group=in_group), slot,
                        after, count_of, target, stores,
                        Scratch(
                            states_ptr=states_ptr, sums_ptr=sums_ptr, USED=CELLS, WIDTH=WIDTH,
                            PLANES=PLANES, FINISH_ROWS=FINISH_ROWS, FINISH_WIDTH=FINISH_WIDTH,
                        ),
                        Out(
                            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
                            out_token=out_token, out_head=out_head, lse_token=lse_token,
                            SINKS=False, FP8_OUT=False, LSE=LSE, COLUMNS=USED, SIZE=SIZE,
                            KIND=KIND,
                        ),
                        factor, NUM_HEADS, TILE_HEADS,
                    )  # fmt: skip
                    # The next group's state is stored where this group's was read.
                    tl.debug_barrier()
