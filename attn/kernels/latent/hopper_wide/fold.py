"""The kernel that folds the states of work items which the wide Hopper latent kernel cut.

It runs after that kernel. A work item may be cut into as many parts as there are programs, and each
part has a state of up to 128 KiB. If the last program to arrive folded them, one multiprocessor
would read all of them in turn. Here as many programs fold an item as its states need to be read at
once: of two parts a program has some query rows, of many parts some columns of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn.kernels.dense.query_rows import write_rows
from attn.kernels.lang.groups import Out
from builders.splitkv.record import (
    ROW_FIELDS,
)

_FIELDS = tl.constexpr(ROW_FIELDS)
_WIDTH = tl.constexpr(512)
_MOST_AT_ONCE = tl.constexpr(32)
"""Parts of an item that a program has in registers at a time, at most."""


@triton.jit
def _place_of(
    at, r, lane, fields, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):  # fmt: skip
    """Token and head of query rows ``at`` of an item, and which of them are real."""
    token = tl.load(fields + 1)
    count = tl.load(fields + 2)
    head = (r % HEAD_LOOPS * HEADS + lane) * TILE_HEADS + at % TILE_HEADS
    return token + at // TILE_HEADS, head, (at < count * TILE_HEADS) & (head < GROUP)


@triton.jit
def _load_sums(sums_ptr, slot, at, mine, USED: tl.constexpr):
    """Maxima and sums of query rows of a part.

    The scratch of all programs has fewer elements than 32 bits can count, since each has two slots.
    """
    sums = sums_ptr + slot * (2 * USED) + at
    m = tl.load(sums, mask=mine, other=float("-inf"), cache_modifier=".cg")
    return m, tl.load(sums + USED, mask=mine, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_rows(states_ptr, slot, at, mine, USED: tl.constexpr):
    """Outputs of query rows of a part."""
    column = tl.arange(0, _WIDTH)
    cells = states_ptr + slot * (USED * _WIDTH)
    cells += at[:, None] * _WIDTH + column[None, :]
    return tl.load(cells, mask=mine[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _fold_few(
    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold and write ROWS query rows of an item with at most PARTS parts, which is 2 or 4.

    ``unit`` counts runs of ROWS rows. The first part's state is in slot ``first_slot + 1``, those
    of the others are in the first slots of the programs that follow.
    """
    at = unit * ROWS + tl.arange(0, ROWS)
    mine = at < USED
    slot0 = first_slot + 1
    slot1 = first_slot + 2 * HEADS
    a0 = _load_rows(states_ptr, slot0, at, mine, USED)
    a1 = _load_rows(states_ptr, slot1, at, mine, USED)
    m0, l0 = _load_sums(sums_ptr, slot0, at, mine, USED)
    m1, l1 = _load_sums(sums_ptr, slot1, at, mine, USED)
    m = tl.maximum(m0, m1)
    if PARTS == 4:
        slot2 = first_slot + 4 * HEADS
        slot3 = first_slot + 6 * HEADS
        is_fourth = mine & (parts == 4)
        a2 = _load_rows(states_ptr, slot2, at, mine, USED)
        a3 = _load_rows(states_ptr, slot3, at, is_fourth, USED)
        m2, l2 = _load_sums(sums_ptr, slot2, at, mine, USED)
        m3, l3 = _load_sums(sums_ptr, slot3, at, is_fourth, USED)
        m = tl.maximum(m, tl.maximum(m2, m3))
    token, head, wanted = _place_of(at, r, lane, fields, HEADS, HEAD_LOOPS, GROUP, TILE_HEADS)
    base = tl.where(m == float("-inf"), 0.0, m)
    w0 = tl.exp2(m0 - base)
    w1 = tl.exp2(m1 - base)
    l = tl.fma(l1, w1, l0 * w0)
    acc = tl.fma(a1, w1[:, None].broadcast_to(a1.shape), a0 * w0[:, None])
    if PARTS == 4:
        w2 = tl.exp2(m2 - base)
        w3 = tl.exp2(m3 - base)
        l = tl.fma(l3, w3, tl.fma(l2, w2, l))
        acc = tl.fma(a2, w2[:, None].broadcast_to(acc.shape), acc)
        acc = tl.fma(a3, w3[:, None].broadcast_to(acc.shape), acc)
    column = tl.arange(0, _WIDTH)
    write_rows(m, l, acc, token, head, wanted, column, column >= 0, out, 1.0, out.LSE, True)


@triton.jit
def _fold_many(
    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr,
    GROUPS: tl.constexpr, AT_ONCE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fold and write COLUMNS columns of one query row of an item with at most AT_ONCE parts, or
    with any number of parts if AT_ONCE is :data:`_MOST_AT_ONCE`.

    ``unit`` counts runs of COLUMNS columns of the item's rows. The first part's state is in slot
    ``first_slot + 1``, those of the others are in the first slots of the programs that follow.
    """
    RUNS: tl.constexpr = _WIDTH // COLUMNS
    LOOPS: tl.constexpr = AT_ONCE == _MOST_AT_ONCE
    at = unit // RUNS
    column = unit % RUNS * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, AT_ONCE)
    slot = first_slot + part * (2 * HEADS) + (part == 0)
    cells = states_ptr + slot * (USED * _WIDTH) + at * _WIDTH
    states = tl.load(
        cells[:, None] + column[None, :], mask=(part < parts)[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    top, sums = _load_sums(sums_ptr, slot, at, part < parts, USED)
    maxima = top
    if LOOPS:
        i = tl.arange(0, GROUPS)
        each = first_slot + i * (2 * HEADS) + (i == 0)
        maxima, sums = _load_sums(sums_ptr, each, at, i < parts, USED)
    one = tl.arange(0, 1)
    token, head, wanted = _place_of(at + one, r, lane, fields, HEADS, HEAD_LOOPS, GROUP, TILE_HEADS)
    m = tl.max(maxima, 0)
    base = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(sums * tl.exp2(maxima - base), 0)
    acc = tl.sum(states * tl.exp2(top - base)[:, None], 0)
    if LOOPS:
        for first in range(AT_ONCE, parts, AT_ONCE):
            later = first_slot + (first + part) * (2 * HEADS)
            cells = states_ptr + later * (USED * _WIDTH) + at * _WIDTH
            there = first + part < parts
            states = tl.load(
                cells[:, None] + column[None, :], mask=there[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            top, _ = _load_sums(sums_ptr, later, at, there, USED)
            acc += tl.sum(states * tl.exp2(top - base)[:, None], 0)
    write_rows(
        m + one, l + one, acc[None, :], token, head, wanted, column, column >= 0, out, 1.0,
        out.LSE, True,
    )  # fmt: skip


@triton.jit
def _fold_share(
    place, rows_ptr, starts_ptr, states_ptr, sums_ptr, groups, out, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr,
    GROUPS: tl.constexpr, SLICE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Fold a program's part of the item in whose middle its share begins, if there is one.

    The plan is loaded before the wait for the kernel that attends: that kernel started this one
    only when the plan was there.
    """
    SLICES: tl.constexpr = (USED + SLICE - 1) // SLICE
    lane = place // SLICES % HEADS
    c = place // (SLICES * HEADS)
    here = starts_ptr + 2 * c
    before = starts_ptr + 2 * tl.maximum(c - 1, 0)
    r = tl.load(here)
    is_within = tl.load(here + 1) > 0
    others = ((tl.load(before) == r) & (tl.load(before + 1) > 0)).to(tl.int32)
    others += ((tl.load(here + 2) == r) & (tl.load(here + 3) > 0)).to(tl.int32)
    fields = rows_ptr + r // HEAD_LOOPS * _FIELDS
    parts = others + 2
    first = c
    if is_within & (others > 0):
        # The item has one share that begins within it less than it has parts.
        i = tl.arange(0, GROUPS)
        items = tl.load(starts_ptr + 2 * i, mask=i < groups, other=-1)
        tiles = tl.load(starts_ptr + 2 * i + 1, mask=i < groups, other=0)
        within = ((items == r) & (tiles > 0)).to(tl.int32)
        parts = 1 + tl.sum(within, 0)
        first = tl.min(tl.where(within > 0, i, GROUPS), 0)
    if WAITS:
        gdc_wait()
    if is_within:
        # Items of more parts have more programs: in each case there is one for every unit.
        # More columns at once would take so many registers that fewer programs run side by side.
        unit = (c - first) * SLICES + place % SLICES
        first_slot = ((first - 1) * HEADS + lane) * 2
        if parts == 2:
            if unit * SLICE < USED:
                _fold_few(
                    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 2, SLICE,
                )  # fmt: skip
        elif parts <= 4:
            if unit * (SLICE // 2) < USED:
                _fold_few(
                    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 4, SLICE // 2,
                )  # fmt: skip
        elif parts <= 8:
            if unit < USED:
                _fold_many(
                    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, GROUPS, 8, _WIDTH,
                )  # fmt: skip
        elif parts <= 16:
            if unit < 2 * USED:
                _fold_many(
                    unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, GROUPS, 16, _WIDTH // 2,
                )  # fmt: skip
        elif unit < 4 * USED:
            _fold_many(
                unit, first_slot, parts, r, lane, fields, out, states_ptr, sums_ptr,
                HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, GROUPS, 32, _WIDTH // 4,
            )  # fmt: skip


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["lse_ptr"])
def fold_cuts_kernel(
    out_ptr,
    lse_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    groups,
    HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLICE: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    LSE_TOKEN: tl.constexpr,
    LSE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Write output and LSE of work items that are cut; grid ``(groups * HEADS * slices,)``.

    A slice is SLICE query rows, 2 or 4. The programs of share ``c`` act if it
    begins within an item: then they and those of the item's other such shares fold, in this order,
    the last state of the share that has the item's beginning and the first state of every share
    that begins within it.

    :func:`attn.kernels.latent.hopper_wide.kernel.hopper_mla_kernel` wrote the states and sums, by
    the same plan. GROUPS is a power of two, at least ``groups``.
    """
    _fold_share(
        tl.program_id(0), rows_ptr, starts_ptr, states_ptr, sums_ptr, groups,
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
            out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False,
            FP8_OUT=False, LSE=LSE,
        ),
        HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, TILE_HEADS * QUERY_TOKENS, GROUPS, SLICE, WAITS,
    )  # fmt: skip
