"""The kernel that folds the parts of work items which the wide Hopper latent kernel cut.

It runs after that kernel, which leaves the output and the LSE that the keys of each part alone
would give. A work item may have as many parts as there are programs, of 64 KiB each. If the last
program to arrive folded them, one multiprocessor would read all of them in turn. Here many programs
fold an item: of two parts a program has some query rows, of many parts one row or half of it.

It runs for two microseconds, so latency counts. A program loads whole rows of all parts that it
folds at a time before it uses the first. Code is kept short, since each program waits for its
instructions to be fetched.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn.kernels.dense.query_rows import write_lse
from attn.kernels.lang.groups import Out
from builders.splitkv.record import ROW_FIELDS

_FIELDS = tl.constexpr(ROW_FIELDS)
_WIDTH = tl.constexpr(512)
ROWS_OF_TWO = 4
"""Query rows of a work item in two parts that one program folds."""
_ROWS_OF_TWO = tl.constexpr(ROWS_OF_TWO)


@triton.jit
def _place_of(
    at, r, lane, token, count, HEADS: tl.constexpr, HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):  # fmt: skip
    """Token and head of query rows ``at`` of an item, and which of them are real.

    The item has ``count`` tokens from ``token`` on.
    """
    head = (r % HEAD_LOOPS * HEADS + lane) * TILE_HEADS + at % TILE_HEADS
    return token + at // TILE_HEADS, head, (at < count * TILE_HEADS) & (head < GROUP)


@triton.jit
def _load_part(states_ptr, sums_ptr, place, skipped, column, is_there):
    """Some columns of the output of rows at ``place + skipped``, and their LSE in units of log 2.

    The loads skip the L1 cache, because other multiprocessors stored the numbers.
    """
    cells = states_ptr + place * _WIDTH + column + skipped * _WIDTH
    output = tl.load(cells, mask=is_there, other=0.0, cache_modifier=".cg")
    lse = sums_ptr + place + skipped
    return output, tl.load(lse, mask=is_there, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _fold(
    unit, first_slot, parts, r, lane, token, count, out, states_ptr, sums_ptr, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr,
    AT_ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fold and write COLUMNS columns of ROWS query rows of an item, AT_ONCE parts at a time.

    ``unit`` counts such pieces of an item: first along the columns, then along the rows. The first
    part is in the second slot of its program, ``first_slot + 1``; the other parts are in the first
    slots of the programs that follow. The scratch of all programs has fewer elements than 32 bits
    can count, since each has two slots.
    """
    STRIDE: tl.constexpr = 2 * HEADS * USED
    RUNS: tl.constexpr = _WIDTH // COLUMNS
    # One row's numbers are scalars, and so is its place; of several rows they are [ROWS, 1].
    at = unit // RUNS
    column = unit % RUNS * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    if ROWS > 1:
        at = at * ROWS + tl.arange(0, ROWS)[:, None]
        column = column[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    place = first_slot * USED + at
    m = tl.zeros_like(place).to(tl.float32) - float("inf")
    l = tl.zeros_like(m)
    for first in range(0, parts, AT_ONCE):
        found = ()
        most = m
        for i in tl.static_range(AT_ONCE):
            skipped = first * STRIDE + i * STRIDE
            if i == 0:
                skipped += tl.where(first == 0, USED, 0)
            is_there = (at < USED) & (first + i < parts)
            part = _load_part(states_ptr, sums_ptr, place, skipped, column, is_there)
            found += (part,)  # type: ignore[assignment]
            most = tl.maximum(most, part[1])
        base = tl.where(most == float("-inf"), 0.0, most)
        shrink = tl.exp2(m - base)
        l = l * shrink
        acc = acc * shrink
        for i in tl.static_range(AT_ONCE):
            weight = tl.exp2(found[i][1] - base)
            l += weight
            acc += found[i][0].to(tl.float32) * weight
        m = most
    acc = acc * (1.0 / tl.where(m == float("-inf"), 1.0, l))
    token, head, wanted = _place_of(at, r, lane, token, count, HEADS, HEAD_LOOPS, GROUP, TILE_HEADS)
    cells = out.out_ptr + (token.to(tl.int64) * out.out_token + head * out.out_head) + column
    tl.store(cells, acc.to(out.out_ptr.dtype.element_ty), mask=wanted)
    if out.LSE:
        some = m > float("-inf")
        write_lse(some, m, l, token, head, wanted, out.lse_ptr, out.lse_token)


@triton.jit
def _fold_share(
    place, rows_ptr, starts_ptr, states_ptr, sums_ptr, groups, out, HEADS: tl.constexpr,
    HEAD_LOOPS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr,
    GROUPS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Fold a program's piece of the item in whose middle its share begins, if there is one.

    The plan is loaded before the wait for the kernel that attends: that kernel started this one
    only when the plan was there.
    """
    SLICES: tl.constexpr = (USED + _ROWS_OF_TWO - 1) // _ROWS_OF_TWO
    lane = place // SLICES % HEADS
    c = place // (SLICES * HEADS)
    here = starts_ptr + 2 * c
    before = starts_ptr + 2 * tl.maximum(c - 1, 0)
    r = tl.load(here)
    is_within = tl.load(here + 1) > 0
    others = ((tl.load(before) == r) & (tl.load(before + 1) > 0)).to(tl.int32)
    others += ((tl.load(here + 2) == r) & (tl.load(here + 3) > 0)).to(tl.int32)
    fields = rows_ptr + r // HEAD_LOOPS * _FIELDS
    # Loaded at the end, where they are used, they would be one more trip to memory.
    token = tl.load(fields + 1, mask=is_within, other=0)
    count = tl.load(fields + 2, mask=is_within, other=0)
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
        # Programs with nothing to fold leave the multiprocessor to others. Program 0 always waits:
        # the next kernel relies on the end of the kernel before this one.
        if is_within | (place == 0):
            gdc_wait()
    if is_within:
        # Items of more parts have more programs, so that all have as many elements to fold and
        # there is one for every unit: with P parts, ``(P - 1) * SLICES`` programs.
        unit = (c - first) * SLICES + place % SLICES
        first_slot = ((first - 1) * HEADS + lane) * 2
        if parts == 2:
            if unit * _ROWS_OF_TWO < USED:
                _fold(
                    unit, first_slot, parts, r, lane, token, count, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 2, _ROWS_OF_TWO, _WIDTH,
                )  # fmt: skip
        elif parts <= 4:
            if unit * (_ROWS_OF_TWO // 2) < USED:
                _fold(
                    unit, first_slot, parts, r, lane, token, count, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 4, _ROWS_OF_TWO // 2,
                    _WIDTH,
                )  # fmt: skip
        elif parts <= 24:
            if unit < USED:
                _fold(
                    unit, first_slot, parts, r, lane, token, count, out, states_ptr, sums_ptr,
                    HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 16, 1, _WIDTH,
                )  # fmt: skip
        elif unit < 2 * USED:
            _fold(
                unit, first_slot, parts, r, lane, token, count, out, states_ptr, sums_ptr,
                HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, USED, 32, 1, _WIDTH // 2,
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
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    LSE_TOKEN: tl.constexpr,
    LSE: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Write output and LSE of work items that are cut; grid ``(groups * HEADS * slices,)``.

    A slice is ROWS_OF_TWO query rows. The programs of share ``c`` act if it begins within an item:
    then they and the programs of the item's other such shares fold, in this order, the last part of
    the share that has the item's beginning and the first part of every share that begins within it.

    :func:`attn.kernels.latent.hopper_wide.kernel.hopper_mla_kernel` wrote the parts' outputs and
    sums, by the same plan. GROUPS is a power of two, at least ``groups``.
    """
    _fold_share(
        tl.program_id(0), rows_ptr, starts_ptr, states_ptr.to(out_ptr.dtype, bitcast=True),
        sums_ptr, groups,
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
            out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False,
            FP8_OUT=False, LSE=LSE,
        ),
        HEADS, HEAD_LOOPS, GROUP, TILE_HEADS, TILE_HEADS * QUERY_TOKENS, GROUPS, WAITS,
    )  # fmt: skip
