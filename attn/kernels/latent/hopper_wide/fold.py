"""The kernel that folds the states of work items which the wide Hopper latent kernel cut.

It runs after that kernel. A work item may be cut into as many parts as there are programs, and each
part has a state of up to 128 KiB. If the last program to arrive folded them, one multiprocessor
would read all of them in turn. Here every program folds a few query rows, so that the states of all
cut items are read at once, by all multiprocessors.
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
_UNDER_WAY = tl.constexpr(4)
"""Parts whose states are loaded before the first of them is folded."""


@triton.jit
def _load_part(states_ptr, part, parts, slot, at, mine, sums_ptr, USED: tl.constexpr):
    """Maxima and outputs of a part's query rows; -inf and zeros past the last part."""
    column = tl.arange(0, _WIDTH)
    wanted = mine & (part < parts)
    slot = slot.to(tl.int64)
    m = tl.load(
        sums_ptr + slot * (2 * USED) + at, mask=wanted, other=float("-inf"), cache_modifier=".cg"
    )
    cells = states_ptr + slot * (USED * _WIDTH) + at[:, None] * _WIDTH + column[None, :]
    return m, tl.load(cells, mask=wanted[:, None], other=0.0, cache_modifier=".cg")


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

    A slice is SLICE query rows. Program share ``c`` acts if it has the first cut of an item, at its
    end. It folds, in this order, the last state of share ``c`` and the first state of every later
    share that begins within the item.

    :func:`attn.kernels.latent.hopper_wide.kernel.hopper_mla_kernel` wrote the states and sums, by
    the same plan. GROUPS is a power of two, at least ``groups``.
    """
    if WAITS:
        gdc_wait()
    USED: tl.constexpr = TILE_HEADS * QUERY_TOKENS
    SLICES: tl.constexpr = (USED + SLICE - 1) // SLICE
    place = tl.program_id(0)
    lane = place // SLICES % HEADS
    c = place // (SLICES * HEADS)
    begins_at = tl.load(starts_ptr + 2 * c)
    begins_with = tl.load(starts_ptr + 2 * c + 1)
    r = tl.load(starts_ptr + 2 * c + 2)
    cut = tl.load(starts_ptr + 2 * c + 3)
    if (cut > 0) & ((begins_at < r) | (begins_with == 0)):
        i = tl.arange(0, GROUPS)
        after = starts_ptr + 2 * (c + 1 + i)
        real = c + 1 + i < groups
        same = tl.load(after, mask=real, other=-1) == r
        goes_on = same & (tl.load(after + 1, mask=real, other=0) > 0)
        parts = 1 + tl.sum(goes_on.to(tl.int32), 0)

        at = place % SLICES * SLICE + tl.arange(0, SLICE)
        mine = at < USED
        slots = ((c + i) * HEADS + lane) * 2 + (i == 0).to(tl.int32)
        sums = sums_ptr + slots.to(tl.int64)[None, :] * (2 * USED) + at[:, None]
        wanted = mine[:, None] & (i < parts)[None, :]
        maxima = tl.load(sums, mask=wanted, other=float("-inf"), cache_modifier=".cg")
        parts_of_l = tl.load(sums + USED, mask=wanted, other=0.0, cache_modifier=".cg")
        m = tl.max(maxima, 1)
        base = tl.where(m == float("-inf"), 0.0, m)
        l = tl.sum(parts_of_l * tl.exp2(maxima - base[:, None]), 1)

        acc = tl.zeros([SLICE, _WIDTH], tl.float32)
        first = (c * HEADS + lane) * 2
        for part in range(0, parts, _UNDER_WAY):
            slot = first + part * (2 * HEADS)
            m0, a0 = _load_part(
                states_ptr, part, parts, slot + (part == 0), at, mine, sums_ptr, USED
            )
            slot += 2 * HEADS
            m1, a1 = _load_part(states_ptr, part + 1, parts, slot, at, mine, sums_ptr, USED)
            slot += 2 * HEADS
            m2, a2 = _load_part(states_ptr, part + 2, parts, slot, at, mine, sums_ptr, USED)
            slot += 2 * HEADS
            m3, a3 = _load_part(states_ptr, part + 3, parts, slot, at, mine, sums_ptr, USED)
            acc = tl.fma(a0, tl.exp2(m0 - base)[:, None].broadcast_to(acc.shape), acc)
            acc = tl.fma(a1, tl.exp2(m1 - base)[:, None].broadcast_to(acc.shape), acc)
            acc = tl.fma(a2, tl.exp2(m2 - base)[:, None].broadcast_to(acc.shape), acc)
            acc = tl.fma(a3, tl.exp2(m3 - base)[:, None].broadcast_to(acc.shape), acc)

        fields = rows_ptr + r // HEAD_LOOPS * _FIELDS
        in_group = (r % HEAD_LOOPS * HEADS + lane) * TILE_HEADS
        head = in_group + at % TILE_HEADS
        count = tl.load(fields + 2)
        column = tl.arange(0, _WIDTH)
        write_rows(
            m, l, acc, tl.load(fields + 1) + at // TILE_HEADS, head,
            (at < count * TILE_HEADS) & (head < GROUP), column, column >= 0,
            Out(
                out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=None, output_scale_ptr=None,
                out_token=OUT_TOKEN, out_head=OUT_HEAD, lse_token=LSE_TOKEN, SINKS=False,
                FP8_OUT=False, LSE=LSE,
            ),
            1.0, LSE, True,
        )  # fmt: skip
