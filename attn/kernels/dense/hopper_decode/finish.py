"""States of parts of rows: stored, folded by whoever comes last, and written."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.query_rows import write_rows
from attn.kernels.dense.tile import fold
from attn.kernels.lang.compat import thread_barrier

_SMALL = tl.constexpr(256)
"""Columns of a small state of 16 rows."""


@gluon.jit
def store_state(
    states_ptr, sums_ptr, slot, m, l, acc, zero, USED: gl.constexpr, WIDTH: gl.constexpr
):
    """State of one segment into its slot of the scratch, as
    :func:`attn.kernels.dense.tile.store_state` does; only rows below USED exist there. ``zero`` is
    one that the compiler does not know, where places of cells shall not be kept in registers from
    the kernel's beginning on.
    """
    STATE: gl.constexpr = acc.type.layout
    SUMS: gl.constexpr = gl.SliceLayout(1, STATE)
    row = gl.arange(0, acc.shape[0], layout=SUMS) + zero
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STATE))
    mine = row < USED
    slot = slot.to(gl.int64)
    sums = sums_ptr + slot * (2 * USED)
    # Small ones stay in L2 until they are read: keys that stream past would have them written back
    # meanwhile, between their own reads. Large ones gained nothing by it.
    IS_SMALL: gl.constexpr = acc.shape[0] == 16 and WIDTH <= _SMALL
    KEEP: gl.constexpr = "evict_last" if IS_SMALL else ""
    gl.store(sums + row, m, mask=mine, eviction_policy=KEEP)
    gl.store(sums + USED + row, l, mask=mine, eviction_policy=KEEP)
    cells = row[:, None] * WIDTH + column[None, :]
    places = states_ptr + slot * (USED * WIDTH) + cells
    gl.store(places, acc, mask=mine[:, None], eviction_policy=KEEP)


@gluon.jit
def _load_state(
    states_ptr, sums_ptr, slot, row, cells, mine, mask, USED: gl.constexpr, WIDTH: gl.constexpr
):
    """m, l and acc of one stored state; empty where masked. Other multiprocessors stored it."""
    slot = slot.to(gl.int64)
    sums = sums_ptr + slot * (2 * USED)
    m = gl.load(sums + row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + USED + row, mask=mine, other=0.0, cache_modifier=".cg")
    at = states_ptr + slot * (USED * WIDTH)
    return m, l, gl.load(at + cells, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _load_parts(
    states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """States of four segments; past the last one the empty state, which folds as the identity."""
    m0, l0, a0 = _load_state(
        states_ptr, sums_ptr, slot + part, row, cells, mine & (part < parts), mask & (part < parts),
        USED, WIDTH,
    )  # fmt: skip
    m1, l1, a1 = _load_state(
        states_ptr, sums_ptr, slot + part + 1, row, cells, mine & (part + 1 < parts),
        mask & (part + 1 < parts), USED, WIDTH,
    )  # fmt: skip
    m2, l2, a2 = _load_state(
        states_ptr, sums_ptr, slot + part + 2, row, cells, mine & (part + 2 < parts),
        mask & (part + 2 < parts), USED, WIDTH,
    )  # fmt: skip
    m3, l3, a3 = _load_state(
        states_ptr, sums_ptr, slot + part + 3, row, cells, mine & (part + 3 < parts),
        mask & (part + 3 < parts), USED, WIDTH,
    )  # fmt: skip
    return m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3


@gluon.jit
def _fold_many(
    m, l, acc, states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED: gl.constexpr,
    WIDTH: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """A state and those of the next 12 or 16 segments, all asked for at once: whoever waits for
    them has nothing else to do, and mostly there are no more of them.
    """
    m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = _load_parts(
        states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED, WIDTH
    )
    m4, l4, a4, m5, l5, a5, m6, l6, a6, m7, l7, a7 = _load_parts(
        states_ptr, sums_ptr, slot, part + 4, parts, row, cells, mine, mask, USED, WIDTH
    )
    m8, l8, a8, m9, l9, a9, n0, k0, b0, n1, k1, b1 = _load_parts(
        states_ptr, sums_ptr, slot, part + 8, parts, row, cells, mine, mask, USED, WIDTH
    )
    if AT_ONCE == 16:
        n2, k2, b2, n3, k3, b3, n4, k4, b4, n5, k5, b5 = _load_parts(
            states_ptr, sums_ptr, slot, part + 12, parts, row, cells, mine, mask, USED, WIDTH
        )
    m, l, acc = _fold_four(m, l, acc, m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3)
    # Exponentials wait for no sum, which without a branch between them is known to ptxas; where a
    # thread has more of a state, it has no registers for that.
    ALL: gl.constexpr = AT_ONCE == 16 and WIDTH <= 128
    if ALL or part + 4 < parts:
        m, l, acc = _fold_four(m, l, acc, m4, l4, a4, m5, l5, a5, m6, l6, a6, m7, l7, a7)
    if ALL or part + 8 < parts:
        m, l, acc = _fold_four(m, l, acc, m8, l8, a8, m9, l9, a9, n0, k0, b0, n1, k1, b1)
    if AT_ONCE == 16:
        if ALL or part + 12 < parts:
            m, l, acc = _fold_four(m, l, acc, n2, k2, b2, n3, k3, b3, n4, k4, b4, n5, k5, b5)
    return m, l, acc


@gluon.jit
def _fold_four(m, l, acc, m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3):
    """A state and four that follow it."""
    m, l, acc = fold(m, l, acc, m0, l0, a0)
    m, l, acc = fold(m, l, acc, m1, l1, a1)
    m, l, acc = fold(m, l, acc, m2, l2, a2)
    return fold(m, l, acc, m3, l3, a3)


@gluon.jit
def _fold_parts(
    kv_head, in_group, token, count, slot, first, parts, target, stores, states_ptr, sums_ptr,
    out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head, lse_token, zero,
    GROUP: gl.constexpr, TILE_HEADS: gl.constexpr, USED: gl.constexpr, WIDTH: gl.constexpr,
    FINISH_ROWS: gl.constexpr, FINISH_WIDTH: gl.constexpr, SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr, LSE: gl.constexpr, WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Fold a row's stored states in the order of :func:`attn.kernels.dense.query_rows.fold_parts`:
    the prefix in slot ``slot``, then ``slot + first`` on; write the row, or its state to
    ``target``. AT_ONCE of them are under way, 4, 8, 12 or 16.
    """
    # Of as many rows as there are, at 128 bytes of each: a thread has few maxima and sums then.
    MOST: gl.constexpr = min(FINISH_WIDTH // 4, 32)
    LANES: gl.constexpr = min(max(32 * WARPS // FINISH_ROWS, 8), MOST)
    CELLS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    row = gl.arange(0, FINISH_ROWS, layout=gl.SliceLayout(1, CELLS)) + zero
    mine = row < USED
    for c0 in range(0, WIDTH, FINISH_WIDTH):
        column = c0 + gl.arange(0, FINISH_WIDTH, layout=gl.SliceLayout(0, CELLS))
        cells = row[:, None] * WIDTH + column[None, :]
        mask = mine[:, None] & (column >= 0)[None, :]
        m, l, acc = _load_state(states_ptr, sums_ptr, slot, row, cells, mine, mask, USED, WIDTH)
        if AT_ONCE > 8:
            for part in range(first, parts, AT_ONCE):
                m, l, acc = _fold_many(
                    m, l, acc, states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask,
                    USED, WIDTH, AT_ONCE,
                )  # fmt: skip
        elif AT_ONCE == 4:
            for part in range(first, parts, 4):
                m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = _load_parts(
                    states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED, WIDTH
                )
                m, l, acc = _fold_four(m, l, acc, m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3)
        else:
            m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = _load_parts(
                states_ptr, sums_ptr, slot, first, parts, row, cells, mine, mask, USED, WIDTH
            )
            for part in range(first, parts, 4):
                # The next four are asked for before these are folded: a fold waits for its own.
                n0, k0, b0, n1, k1, b1, n2, k2, b2, n3, k3, b3 = _load_parts(
                    states_ptr, sums_ptr, slot, part + 4, parts, row, cells, mine, mask, USED, WIDTH
                )
                m, l, acc = _fold_four(m, l, acc, m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3)
                m0, l0, a0, m1, l1, a1 = n0, k0, b0, n1, k1, b1
                m2, l2, a2, m3, l3, a3 = n2, k2, b2, n3, k3, b3
        if stores:
            sums = sums_ptr + target.to(gl.int64) * (2 * USED)
            gl.store(sums + row, m, mask=mine)
            gl.store(sums + USED + row, l, mask=mine)
            gl.store(states_ptr + target.to(gl.int64) * (USED * WIDTH) + cells, acc, mask=mask)
        else:
            head = kv_head * GROUP + in_group + row % TILE_HEADS
            wanted = (row < count * TILE_HEADS) & (in_group + row % TILE_HEADS < GROUP)
            at = token + row // TILE_HEADS
            write_rows(
                m, l, acc, at, head, wanted, column, column >= 0, out_ptr, lse_ptr, sinks_ptr,
                v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT, LSE,
                True,
            )  # fmt: skip


@gluon.jit
def lender_of(place, groups, total_ptr):
    """The first group that starts inside the keys that begin at a place among the step's tiles: it
    lends them its slots, since no other row can need them.
    """
    total = gl.load(total_ptr + 1)
    return (place.to(gl.int64) * wide(groups) // total).to(gl.int32) + 1


@gluon.jit
def _place_of(fields, loop, end):
    """Place of a row's first tile among all tiles of the step, or (end 1) past its last."""
    return gl.load(fields + 7) + (loop + end) * gl.load(fields + 6)


@gluon.jit
def finish_part(
    r, fields, lane, begin, end, lender, m, l, acc, kv_head, in_group, rows_ptr, total_ptr,
    starts_ptr, counters_ptr, states_ptr, sums_ptr, out_ptr, lse_ptr, sinks_ptr, v_factor,
    output_scale_ptr, groups, out_token, out_head, lse_token, zero, HEADS: gl.constexpr,
    HEAD_LOOPS: gl.constexpr, GROUP: gl.constexpr, TILE_HEADS: gl.constexpr, USED: gl.constexpr,
    SLOTS: gl.constexpr, BUNDLES: gl.constexpr, AREA: gl.constexpr, WIDTH: gl.constexpr,
    FINISH_ROWS: gl.constexpr, FINISH_WIDTH: gl.constexpr, SINKS: gl.constexpr,
    FP8_OUT: gl.constexpr, LSE: gl.constexpr, WARPS: gl.constexpr = 4,
    AT_ONCE: gl.constexpr = 8,
):  # fmt: skip
    """A part that is not all of its queries' keys: its state is stored, and who has the last folds.

    As at the end of :func:`attn.kernels.dense.decode.decode_kernel`, whose slots and counters it
    uses.
    """
    parts = gl.load(fields + 9)
    bundle = gl.load(fields + 10)
    bundles = gl.load(fields + 11)
    loop = r % HEAD_LOOPS
    is_whole = (begin == 0) & (end == parts)
    slots = (lender * HEADS + lane) * AREA
    after_prefix = 1
    if not is_whole:
        # Only the last to arrive needs it, and then at once.
        after_prefix = gl.load(starts_ptr + 2 * lender + 1)
    spans = bundles > 1
    mine_too = slots
    owner = lender
    if bundles > 1:
        # Where states of the tokens' bundles go: lent by the first group that starts in the middle
        # of their keys, or the program's own when there is none.
        which = r // HEAD_LOOPS - bundle
        owner = lender_of(_place_of(rows_ptr + which * FIELDS, loop, 0), groups, total_ptr)
        place = _place_of(rows_ptr + (which + bundles - 1) * FIELDS, loop, 1) - 1
        spans = lender_of(place, groups, total_ptr) > owner
        lends = gl.where(spans, owner, owner - 1)
        mine_too = (lends * HEADS + lane) * AREA + SLOTS
        mine_too += (gl.where(spans, 0, HEAD_LOOPS) + loop) * BUNDLES
    if begin == 0:
        slot = gl.where(is_whole, mine_too + bundle, slots)
        store_state(states_ptr, sums_ptr, slot, m, l, acc, zero, USED, WIDTH)
    # All threads have stored before one of them says so.
    thread_barrier()
    ready = is_whole
    if not is_whole:
        counter = counters_ptr + lender * HEADS + lane
        arrived = gl.atomic_add(counter, end - begin, sem="acq_rel", scope="gpu")
        ready = arrived + end - begin == parts
        if ready:
            gl.store(counter, 0)
    if ready:
        # First the bundle's segments, if they are in parts, then the bundles.
        for level in range(is_whole.to(gl.int32), gl.where(bundles > 1, 2, 1)):
            slot = slots
            after = after_prefix
            count_of = parts
            goes_on = ready
            if level == 1:
                slot = mine_too
                after = 1
                count_of = bundles
                goes_on = bundle + 1 == bundles
                thread_barrier()
                if spans:
                    counter = counters_ptr + groups * HEADS
                    counter += (owner * HEADS + lane) * HEAD_LOOPS + loop
                    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    goes_on = arrived + 1 == bundles
                    if goes_on:
                        gl.store(counter, 0)
            if goes_on:
                _fold_parts(
                    kv_head, in_group, gl.load(fields + 1), gl.load(fields + 2), slot, after,
                    count_of, mine_too + bundle, (level == 0) & (bundles > 1), states_ptr, sums_ptr,
                    out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head,
                    lse_token, zero, GROUP, TILE_HEADS, USED, WIDTH, FINISH_ROWS, FINISH_WIDTH,
                    SINKS, FP8_OUT, LSE, WARPS, AT_ONCE,
                )  # fmt: skip
