"""States of latent (MLA) decode: where a program's segments of a row are, and what is done with
the states of those: written as a result, stored, folded, by the program or by the last to arrive.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.query_rows import fold_parts, write_rows
from attn.kernels.dense.tile import recomputed, store_state
from attn.kernels.lang.stored import plane_columns
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


@triton.jit
def fields_of(r, mine, rows_ptr, HEAD_LOOPS: tl.constexpr):
    """Where a row's numbers are: a group's first row has a copy beside the group's start."""
    copy = mine + (_SHARE_FIELDS - _FIELDS)
    return tl.where(r == tl.load(mine), copy, rows_ptr + (r // HEAD_LOOPS) * _FIELDS)


@triton.jit
def _place_of(fields, loop, end):
    """Place of a row's first tile among all tiles of the step, or (end 1) past its last."""
    return tl.load(fields + 7) + (loop + end) * tl.load(fields + 6)


@triton.jit
def share_of(
    r, fields, mine, total_ptr, groups, lane, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr,
    AREA: tl.constexpr,
):  # fmt: skip
    """Segments ``[begin, end)`` of a row that are the program's, its first and their number; and
    its slots. Read again where needed: registers are for the loop over tiles.
    """
    parts = tl.load(fields + 9)
    begin = tl.where(r == tl.load(mine), tl.load(mine + 1), 0)
    end = tl.where(r == tl.load(mine + 2), tl.load(mine + 3), parts)
    place = _place_of(fields, r % HEAD_LOOPS, 0)
    owner = (place.to(tl.int64) * groups // tl.load(total_ptr + 1)).to(tl.int32)
    # The first group that starts inside the row lends it its slots: no other row can.
    slots = ((owner + 1) * HEADS + lane) * AREA
    return begin, end, tl.load(fields + 8), parts, slots


@triton.jit
def _bundles_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, BUNDLES: tl.constexpr,
):  # fmt: skip
    """Where states of the bundles of a row's tokens go: one after another into what is lent by the
    first group that starts in the middle of their keys, or the program's ``own`` when there is
    none, where they are folded as they come. Then the group that has the first of their tiles, and
    whether others have some too.
    """
    bundle = tl.load(fields + 10)
    bundles = tl.load(fields + 11)
    total = tl.load(total_ptr + 1)
    loop = r % HEAD_LOOPS
    which = r // HEAD_LOOPS - bundle
    place = _place_of(rows_ptr + which * _FIELDS, loop, 0)
    owner = (place.to(tl.int64) * groups // total).to(tl.int32)
    place = _place_of(rows_ptr + (which + bundles - 1) * _FIELDS, loop, 1) - 1
    spans = (place.to(tl.int64) * groups // total).to(tl.int32) > owner
    spans = spans & (bundles > 1)
    lent = ((owner + 1) * HEADS + lane) * AREA + SLOTS + loop * BUNDLES
    return tl.where(spans, lent, own + loop), owner, spans


@triton.jit
def prefix_at(
    r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr, SLOTS: tl.constexpr, BUNDLES: tl.constexpr,
):  # fmt: skip
    """Where the state of a bundle that is all the program's goes."""
    bundle = tl.load(fields + 10)
    place, _, spans = _bundles_at(
        r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS, HEAD_LOOPS, AREA, SLOTS, BUNDLES
    )
    return tl.where(spans | (bundle == 0), place + bundle, spare)


@triton.jit
def write_row(
    m, l, acc0, acc1, token, count, in_group, out_ptr, lse_ptr, factor, out_token, out_head,
    lse_token, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, CELLS: tl.constexpr,
    WIDTH: tl.constexpr, USED: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr,
    PLANES: tl.constexpr, DECODE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Output and LSE of a row whose keys are all folded."""
    ROWS: tl.constexpr = m.shape[0]
    # Not numbers that are known from the query's load: the loop in between has no registers for
    # them.
    row = tl.arange(ROWS, 2 * ROWS) - recomputed(count * 0 + ROWS, DECODE)
    at = token + row // TILE_HEADS
    head = in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (row < CELLS) & (head < NUM_HEADS)
    index = tl.arange(0, WIDTH)
    valid = index < USED
    columns = plane_columns(index, 0, SIZE, KIND)
    write_rows(
        m, l, acc0, at, head, wanted, columns, valid, out_ptr, lse_ptr, None, factor, None,
        out_token, out_head, lse_token, False, False, LSE, False,
    )  # fmt: skip
    if PLANES > 1:
        columns = plane_columns(index, 1, SIZE, KIND)
        write_rows(
            m, l, acc1, at, head, wanted, columns, valid, out_ptr, lse_ptr, None, factor, None,
            out_token, out_head, lse_token, False, False, False, False,
        )  # fmt: skip


@triton.jit
def own_states(pid, groups, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, AREA: tl.constexpr,
                BUNDLES: tl.constexpr, SPARE: tl.constexpr):  # fmt: skip
    """Where the states that a program lends to nobody begin, and the spare ones of them."""
    OWN: tl.constexpr = HEAD_LOOPS if BUNDLES > 1 else 0
    own = groups * HEADS * AREA + pid * (OWN + SPARE)
    return own, own + OWN


@triton.jit
def close_segment(
    m, l, acc0, acc1, r, part, is_last, mine, pid, lane, groups, factor, rows_ptr,
    total_ptr, states_ptr, sums_ptr, out_ptr, lse_ptr, out_token, out_head, lse_token,
    HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr,
    SIZE: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, DECODE: tl.constexpr,
    LSE: tl.constexpr, SLOTS: tl.constexpr, BUNDLES: tl.constexpr, AREA: tl.constexpr,
    SPARE: tl.constexpr, FINISH_ROWS: tl.constexpr, FINISH_WIDTH: tl.constexpr,
):  # fmt: skip
    """State of a segment of 64 rows, ``is_last`` of those of the row that are the program's: the
    row's result if there are no others, else into memory; and what is there folded, if it is time.
    """
    fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
    begin, end, first_part, parts, slots = share_of(
        r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
    )
    own, spare = own_states(pid, groups, HEADS, HEAD_LOOPS, AREA, BUNDLES, SPARE)
    token = tl.load(fields + 1)
    count = tl.load(fields + 2)
    is_whole = (begin == 0) & (end == parts)
    writes = is_whole & (tl.load(fields + 11) == 1)
    in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
    prefix = slots
    if is_whole & is_last:
        prefix = prefix_at(
            r, fields, rows_ptr, total_ptr, groups, lane, own, spare, HEADS, HEAD_LOOPS, AREA,
            SLOTS, BUNDLES,
        )  # fmt: skip
    # How many states wait for it: after each fold there is one.
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
            # Other threads of the program stored what is read now.
            tl.debug_barrier()
            target = tl.where(is_last, prefix, spare)
            fold_parts(
                0, in_group, token, count, spare, 1, held, target, (is_last & writes) == 0,
                states_ptr, sums_ptr, out_ptr, lse_ptr, None, factor, None, out_token, out_head,
                lse_token, NUM_HEADS, TILE_HEADS, CELLS, WIDTH, PLANES, KIND, USED, SIZE,
                FINISH_ROWS, FINISH_WIDTH, False, False, LSE, False,
            )  # fmt: skip
            tl.debug_barrier()


@triton.jit
def finish_row(
    r, mine, pid, lane, groups, factor, rows_ptr, total_ptr, starts_ptr, counters_ptr, states_ptr,
    sums_ptr, out_ptr, lse_ptr, out_token, out_head, lse_token, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, NUM_HEADS: tl.constexpr, TILE_HEADS: tl.constexpr,
    CELLS: tl.constexpr, WIDTH: tl.constexpr, USED: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, PLANES: tl.constexpr, LSE: tl.constexpr, SLOTS: tl.constexpr,
    BUNDLES: tl.constexpr, AREA: tl.constexpr, SPARE: tl.constexpr, FINISH_ROWS: tl.constexpr,
    FINISH_WIDTH: tl.constexpr,
):  # fmt: skip
    """Say that a program's segments of a row are there; fold the row if no others are missing."""
    fields = fields_of(r, mine, rows_ptr, HEAD_LOOPS)
    begin, end, _, parts, slots = share_of(
        r, fields, mine, total_ptr, groups, lane, HEADS, HEAD_LOOPS, AREA
    )
    is_whole = (begin == 0) & (end == parts)
    bundles = tl.load(fields + 11)
    if (is_whole == 0) | (bundles > 1):
        token = tl.load(fields + 1)
        count = tl.load(fields + 2)
        bundle = tl.load(fields + 10)
        in_group = ((r % HEAD_LOOPS) * HEADS + lane) * TILE_HEADS
        loop = r % HEAD_LOOPS
        own, spare = own_states(pid, groups, HEADS, HEAD_LOOPS, AREA, BUNDLES, SPARE)
        mine_too, row_owner, spans = _bundles_at(
            r, fields, rows_ptr, total_ptr, groups, lane, own, HEADS, HEAD_LOOPS, AREA,
            SLOTS, BUNDLES,
        )  # fmt: skip
        in_parts = (begin > 0) | (end < parts)
        # Only the last to arrive needs it, and then at once.
        lender = slots // AREA // HEADS
        after_prefix = tl.load(starts_ptr + 2 * lender + 1, mask=in_parts, other=1)
        counter = counters_ptr + slots // AREA
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, end - begin, mask=in_parts, sem="acq_rel", scope="gpu")
        ready = is_whole | (arrived + end - begin == parts)
        tl.store(counter, 0, mask=ready & in_parts)
        if ready:
            # First the bundle's segments, if they are in parts, then the bundles.
            for level in range(is_whole.to(tl.int32), tl.where(bundles > 1, 2, 1)):
                slot = slots
                after = after_prefix
                count_of = parts
                target = mine_too + bundle
                stores = bundles > 1
                goes_on = ready
                if level == 1:
                    slot = mine_too
                    # Without others there are two: what is folded so far, and the last.
                    after = tl.where(spans, 1, spare - mine_too)
                    count_of = tl.where(spans, bundles, after + 1)
                    target = mine_too
                    stores = (spans == 0) & (bundle + 1 < bundles)
                    goes_on = bundle > 0
                    tl.debug_barrier()
                    if spans:
                        counter = counters_ptr + groups * HEADS
                        counter += ((row_owner + 1) * HEADS + lane) * HEAD_LOOPS + loop
                        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                        goes_on = arrived + 1 == bundles
                        if goes_on:
                            tl.store(counter, 0)
                if goes_on:
                    fold_parts(
                        0, in_group, token, count, slot, after, count_of,
                        target, stores, states_ptr, sums_ptr, out_ptr, lse_ptr, None,
                        factor, None, out_token, out_head, lse_token, NUM_HEADS, TILE_HEADS,
                        CELLS, WIDTH, PLANES, KIND, USED, SIZE, FINISH_ROWS, FINISH_WIDTH,
                        False, False, LSE, False,
                    )  # fmt: skip
                    # The next bundle's state comes to where this one's was read.
                    tl.debug_barrier()
