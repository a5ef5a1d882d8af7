"""States of parts of work items: how they are stored, folded by the last to arrive, and written."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.query_rows import write_rows
from attn.kernels.dense.tile import fold
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.structures import Cells, Out, State

_SMALL = tl.constexpr(256)
"""Most columns of a state of 16 rows that counts as small."""


@gluon.jit
def fold_states(before, behind):
    """Fold the states of two runs of keys that follow each other into one state."""
    m, l, acc = fold(before.m, before.l, before.acc, behind.m, behind.l, behind.acc)
    return State(m=m, l=l, acc=acc)


@gluon.jit
def store_state(plan, slot, state, tile, zero):
    """Store the state of one segment in its slot of the scratch, which holds USED rows.

    The layout is that of :func:`attn.kernels.dense.tile.store_state`. ``zero`` is 0. With a zero
    that the compiler does not know, it computes the addresses here; otherwise it would keep them in
    registers from the start of the kernel.
    """
    STATE: gl.constexpr = state.acc.type.layout
    SUMS: gl.constexpr = gl.SliceLayout(1, STATE)
    row = gl.arange(0, state.acc.shape[0], layout=SUMS) + zero
    column = gl.arange(0, tile.WIDTH, layout=gl.SliceLayout(0, STATE))
    mine = row < tile.USED
    slot = slot.to(gl.int64)
    sums = plan.sums_ptr + slot * (2 * tile.USED)
    # Keep small states in L2 until they are read: otherwise keys that stream through L2 push them
    # out to memory, between the reads of keys. Large states gained nothing from being kept.
    IS_SMALL: gl.constexpr = state.acc.shape[0] == 16 and tile.WIDTH <= _SMALL
    KEEP: gl.constexpr = "evict_last" if IS_SMALL else ""
    gl.store(sums + row, state.m, mask=mine, eviction_policy=KEEP)
    gl.store(sums + tile.USED + row, state.l, mask=mine, eviction_policy=KEEP)
    cells = row[:, None] * tile.WIDTH + column[None, :]
    places = plan.states_ptr + slot * (tile.USED * tile.WIDTH) + cells
    gl.store(places, state.acc, mask=mine[:, None], eviction_policy=KEEP)


@gluon.jit
def _load_state(plan, slot, cells, is_there, tile):
    """Load a stored state; unless ``is_there``, the empty state, which changes no fold.

    The loads skip the L1 cache, because other multiprocessors stored the states.
    """
    mine = cells.mine & is_there
    slot = slot.to(gl.int64)
    sums = plan.sums_ptr + slot * (2 * tile.USED)
    m = gl.load(sums + cells.row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + tile.USED + cells.row, mask=mine, other=0.0, cache_modifier=".cg")
    at = plan.states_ptr + slot * (tile.USED * tile.WIDTH) + cells.cell
    acc = gl.load(at, mask=cells.mask & is_there, other=0.0, cache_modifier=".cg")
    return State(m=m, l=l, acc=acc)


@gluon.jit
def _load_parts(plan, slot, part, parts, cells, tile):
    """Load the states of parts ``part`` to ``part + 3``; a part from ``parts`` on is empty."""
    return (
        _load_state(plan, slot + part, cells, part < parts, tile),
        _load_state(plan, slot + part + 1, cells, part + 1 < parts, tile),
        _load_state(plan, slot + part + 2, cells, part + 2 < parts, tile),
        _load_state(plan, slot + part + 3, cells, part + 3 < parts, tile),
    )


@gluon.jit
def _fold_many(state, plan, slot, part, parts, cells, tile, AT_ONCE: gl.constexpr):
    """Fold the next AT_ONCE parts (12 or 16) onto a state, loading all of them at once.

    The program has nothing else to do while it waits for them, and mostly there are no more parts.
    """
    s0, s1, s2, s3 = _load_parts(plan, slot, part, parts, cells, tile)
    s4, s5, s6, s7 = _load_parts(plan, slot, part + 4, parts, cells, tile)
    s8, s9, s10, s11 = _load_parts(plan, slot, part + 8, parts, cells, tile)
    if AT_ONCE == 16:
        s12, s13, s14, s15 = _load_parts(plan, slot, part + 12, parts, cells, tile)
    state = _fold_four(state, s0, s1, s2, s3)
    # The exponentials of all folds are independent of the sums. Without branches between the folds
    # ptxas sees that, and computes them early. A thread that holds more of a state has no registers
    # for this.
    ALL: gl.constexpr = AT_ONCE == 16 and tile.WIDTH <= 128
    if ALL or part + 4 < parts:
        state = _fold_four(state, s4, s5, s6, s7)
    if ALL or part + 8 < parts:
        state = _fold_four(state, s8, s9, s10, s11)
    if AT_ONCE == 16:
        if ALL or part + 12 < parts:
            state = _fold_four(state, s12, s13, s14, s15)
    return state


@gluon.jit
def _fold_four(state, s0, s1, s2, s3):
    """Fold four states onto the state before them, in their order."""
    state = fold_states(fold_states(state, s0), s1)
    return fold_states(fold_states(state, s2), s3)


@gluon.jit
def with_wide_strides(out):
    """Copy the structure ``out``, with the strides from token to token as int64."""
    return Out(
        out_ptr=out.out_ptr, lse_ptr=out.lse_ptr, sinks_ptr=out.sinks_ptr,
        output_scale_ptr=out.output_scale_ptr, out_token=wide(out.out_token), out_head=out.out_head,
        lse_token=wide(out.lse_token), SINKS=out.SINKS, FP8_OUT=out.FP8_OUT, LSE=out.LSE,
    )  # fmt: skip


@gluon.jit
def write_state(state, at, heads, wanted, columns, v_factor, out, SIZE: gl.constexpr = 1 << 30):
    """Normalise a state and write its output ``[M, columns]`` and LSE ``[M]``.

    The rows belong to the tokens ``at [M]`` and the query heads ``heads [M]``; rows where
    ``wanted [M]`` is False are not written, nor columns from SIZE on.
    """
    write_rows(
        state.m, state.l, state.acc, at, heads, wanted, columns, columns < SIZE, out, v_factor,
        out.LSE, True,
    )  # fmt: skip


@gluon.jit
def _fold_parts(
    token, count, head, plan, out, tile, slot, first, parts, target, stores, zero,
    WARPS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Fold the stored states of a work item in their order, and write the result.

    The order is that of :func:`attn.kernels.dense.query_rows.fold_parts`. Slot ``slot`` holds the
    state of all parts below ``first``; the slots from ``slot + first`` to ``slot + parts`` hold one
    part each. If ``stores``, the folded state goes to slot ``target``, else the output is written.
    AT_ONCE states are being loaded at a time: 4, 8, 12 or 16.
    """
    # The warps cover as many rows at once as leave at least 8 lanes (128 bytes) to each row, so
    # that a thread has few maxima and sums.
    MOST: gl.constexpr = min(tile.FINISH_WIDTH // 4, 32)
    LANES: gl.constexpr = min(max(32 * WARPS // tile.FINISH_ROWS, 8), MOST)
    CELLS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    row = gl.arange(0, tile.FINISH_ROWS, layout=gl.SliceLayout(1, CELLS)) + zero
    mine = row < tile.USED
    LIVE: gl.constexpr = tile.SIZE if tile.SIZE < tile.WIDTH else 1 << 30
    for c0 in range(0, tile.WIDTH, tile.FINISH_WIDTH):
        column = c0 + gl.arange(0, tile.FINISH_WIDTH, layout=gl.SliceLayout(0, CELLS))
        cells = Cells(
            row=row,
            cell=row[:, None] * tile.WIDTH + column[None, :],
            mine=mine,
            mask=mine[:, None] & (column >= 0)[None, :],
        )
        state = _load_state(plan, slot, cells, True, tile)
        if AT_ONCE > 8:
            for part in range(first, parts, AT_ONCE):
                state = _fold_many(state, plan, slot, part, parts, cells, tile, AT_ONCE)
        elif AT_ONCE == 4:
            for part in range(first, parts, 4):
                s0, s1, s2, s3 = _load_parts(plan, slot, part, parts, cells, tile)
                state = _fold_four(state, s0, s1, s2, s3)
        else:
            s0, s1, s2, s3 = _load_parts(plan, slot, first, parts, cells, tile)
            for part in range(first, parts, 4):
                # Load the next four before folding these, so that only the first fold waits.
                n0, n1, n2, n3 = _load_parts(plan, slot, part + 4, parts, cells, tile)
                state = _fold_four(state, s0, s1, s2, s3)
                s0, s1, s2, s3 = n0, n1, n2, n3
        if stores:
            sums = plan.sums_ptr + target.to(gl.int64) * (2 * tile.USED)
            gl.store(sums + row, state.m, mask=mine)
            gl.store(sums + tile.USED + row, state.l, mask=mine)
            places = plan.states_ptr + target.to(gl.int64) * (tile.USED * tile.WIDTH) + cells.cell
            gl.store(places, state.acc, mask=cells.mask)
        else:
            heads = head.kv_head * tile.GROUP + head.in_group + row % tile.TILE_HEADS
            in_tile = head.in_group + row % tile.TILE_HEADS
            wanted = (row < count * tile.TILE_HEADS) & (in_tile < tile.GROUP)
            at = token + row // tile.TILE_HEADS
            write_state(state, at, heads, wanted, column, head.v_factor, out, LIVE)


@gluon.jit
def lending_group_of(place, plan):
    """The first group of programs that starts behind a place among the step's KV tiles.

    It is the lending group of the keys that begin at that place. A group starts inside one work
    item only, so no other work item needs its state slots.
    """
    total = gl.load(plan.total_ptr + 1)
    return (place.to(gl.int64) * wide(plan.groups) // total).to(gl.int32) + 1


@gluon.jit
def place_of(fields, loop, end):
    """The place of a work item's first KV tile among all KV tiles of the step.

    With ``end`` 1, the place behind its last KV tile.
    """
    return gl.load(fields + 7) + (loop + end) * gl.load(fields + 6)


@gluon.jit
def slots_of(work, lending_group, plan):
    """The first state slot for the part's segments, which the group ``lending_group`` lends."""
    return (lending_group * plan.HEADS + work.lane) * plan.AREA


@gluon.jit
def group_slots(work, lending_group, segment_group, segment_groups, slots, plan):
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
def arrive_and_fold(
    work, head, state, lending_group, plan, out, tile, zero, WARPS: gl.constexpr = 4,
    AT_ONCE: gl.constexpr = 8,
):  # fmt: skip
    """Store the state of a part that lacks some keys of its queries; the last to arrive folds.

    The slots and counters are those of :func:`attn.kernels.dense.decode.decode_kernel`.
    """
    parts = gl.load(work.fields + 9)
    segment_group = gl.load(work.fields + 10)
    segment_groups = gl.load(work.fields + 11)
    loop = work.number % plan.HEAD_LOOPS
    is_whole = (work.begin == 0) & (work.end == parts)
    slots = slots_of(work, lending_group, plan)
    after_prefix = 1
    if not is_whole:
        # Only the last program to arrive needs this number, and then without delay.
        after_prefix = gl.load(plan.starts_ptr + 2 * lending_group + 1)
    mine_too, owner, spans = group_slots(
        work, lending_group, segment_group, segment_groups, slots, plan
    )
    if work.begin == 0:
        slot = gl.where(is_whole, mine_too + segment_group, slots)
        store_state(plan, slot, state, tile, zero)
    # All threads must have stored their states before the counter says so.
    thread_barrier()
    ready = is_whole
    if not is_whole:
        counter = plan.counters_ptr + lending_group * plan.HEADS + work.lane
        arrived = gl.atomic_add(counter, work.end - work.begin, sem="acq_rel", scope="gpu")
        ready = arrived + work.end - work.begin == parts
        if ready:
            gl.store(counter, 0)
    if ready:
        # Level 0 folds the segments of this segment group, where several programs have them. Level
        # 1 folds the segment groups.
        for level in range(is_whole.to(gl.int32), gl.where(segment_groups > 1, 2, 1)):
            slot = slots
            after = after_prefix
            count_of = parts
            goes_on = ready
            if level == 1:
                slot = mine_too
                after = 1
                count_of = segment_groups
                goes_on = segment_group + 1 == segment_groups
                thread_barrier()
                if spans:
                    counter = plan.counters_ptr + plan.groups * plan.HEADS
                    counter += (owner * plan.HEADS + work.lane) * plan.HEAD_LOOPS + loop
                    arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                    goes_on = arrived + 1 == segment_groups
                    if goes_on:
                        gl.store(counter, 0)
            if goes_on:
                _fold_parts(
                    gl.load(work.fields + 1), gl.load(work.fields + 2), head, plan, out, tile, slot,
                    after, count_of, mine_too + segment_group, (level == 0) & (segment_groups > 1),
                    zero, WARPS, AT_ONCE,
                )  # fmt: skip
