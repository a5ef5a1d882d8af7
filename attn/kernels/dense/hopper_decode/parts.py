"""The parts of work items that a program takes, computed alike by its producer and consumers."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.opaque import program_number
from attn.kernels.lang.structures import Work
from builders.splitkv.device.segments import segment_start
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
)

FIELDS = tl.constexpr(ROW_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


@gluon.jit
def share_at(shares_ptr, HEADS: gl.constexpr):
    """Load the program's share of the plan.

    Returns:
        The first work item; the segment in it where the share starts; the work item behind the
        share's last; a pointer to the share; and a pointer to the first work item's numbers.
    """
    mine = shares_ptr + (program_number() // HEADS) * _SHARE_FIELDS
    first_row = gl.load(mine)
    begin = gl.load(mine + 1)
    next_row = gl.load(mine + 2)
    next_segment = gl.load(mine + 3)
    past_row = next_row + (next_segment > 0).to(gl.int32)
    # The share holds a copy of the first work item's numbers, so that a program does not have to
    # wait for the share before it can load them.
    return first_row, begin, past_row, mine, mine + (_SHARE_FIELDS - FIELDS)


@gluon.jit
def load_work_item(
    r, lane, mine, fields, begin, mask, KV_TILE: gl.constexpr, SEGMENT_UNIT: gl.constexpr
):
    """Load the program's part of work item ``r``; the part begins with segment ``begin`` of it."""
    req, count, kv_len, first, first_part, parts, segment_group = walked_fields(fields, True)
    end = gl.where(r == gl.load(mine + 2), gl.load(mine + 3), parts)
    last, causal, start, low, high = tiles_of(
        begin,
        end,
        req,
        count,
        kv_len,
        first,
        first_part,
        segment_group,
        mask,
        KV_TILE,
        SEGMENT_UNIT,
    )
    return Work(
        number=r, lane=lane, fields=fields, begin=begin, end=end, req=req, kv_len=kv_len,
        first=first, last=last, causal=causal, start=start, low=low, high=high,
    )  # fmt: skip


@gluon.jit
def walked_fields(fields, there_is):
    """Load the numbers of a work item that say which keys are walked; zeros unless ``there_is``.

    The program waits for a number where it uses it, not here.

    Returns:
        Request, tokens, KV length, first position, first segment, segments, and the number of the
        segment group.
    """
    req = gl.load(fields, mask=there_is, other=0)
    count = gl.load(fields + 2, mask=there_is, other=0)
    kv_len = gl.load(fields + 3, mask=there_is, other=0)
    first = gl.load(fields + 4, mask=there_is, other=0)
    first_part = gl.load(fields + 8, mask=there_is, other=0)
    parts = gl.load(fields + 9, mask=there_is, other=0)
    segment_group = gl.load(fields + 10, mask=there_is, other=0)
    return req, count, kv_len, first, first_part, parts, segment_group


@gluon.jit
def tiles_of(
    begin, end, req, count, kv_len, first, first_part, segment_group, mask, KV_TILE: gl.constexpr,
    SEGMENT_UNIT: gl.constexpr,
):  # fmt: skip
    """Say which tiles of keys are walked for the segments ``[begin, end)`` of a work item.

    Returns:
        The last position of the queries; the causal flag; the first key that a query sees; and the
        tiles of keys ``[low, high)``.
    """
    last = first + count - 1
    causal, start, stop = mask.keys_seen(req, first, last, kv_len)
    low = gl.maximum(segment_start(first_part + begin) // SEGMENT_UNIT, start // KV_TILE)
    # A layer whose window is longer than the plan's starts before the plan's first segment.
    is_first = (begin == 0) & (segment_group == 0)
    low = gl.where(is_first, start // KV_TILE, low)
    high = gl.minimum(
        segment_start(first_part + end) // SEGMENT_UNIT, (stop + KV_TILE - 1) // KV_TILE
    )
    return last, causal, start, low, gl.where(end > begin, high, low)
