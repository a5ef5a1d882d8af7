"""The producers of sparse latent attention: a warp group that gathers queries and listed rows.

Rows of 16 bits are copied as they are, 16 bytes by each thread, and the copies themselves arrive at
barriers; for those of e4m3 see :mod:`attn.kernels.hopper.sparse_widen`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.hopper.compat import arrive_behind_gathers, async_gather, reinterpret
from attn.kernels.hopper.sparse_parts import BLOCK, HALF, UNIT, listed, units_at, work_at
from attn.kernels.hopper.sparse_widen import widen_rows
from attn.kernels.hopper.tiles import wide
from attn.kernels.sparse_mla import _row_offsets


@gluon.jit
def prefetch_rows(ptrs, ids, nbytes):
    """Ask for so many bytes at each pointer into the L2 cache, where ids are not negative."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,r", [ptrs, ids, ids * 0 + nbytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _gather_queries(
    query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, query_token, query_head,
    rotary_token, rotary_head, HEADS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Queries of a tile of heads; zeros where there is no head."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    head = head_tile * BLOCK + row
    wanted = (head < HEADS)[:, None] & (column >= 0)[None, :]
    at = query_ptr + units_at(token, head, query_token, query_head)[:, None] + column[None, :]
    for i in gl.static_range(8):
        async_gather(q_boxes.index(i), at + i * 64, mask=wanted)
    at = rotary_ptr + units_at(token, head, rotary_token, rotary_head)[:, None] + column[None, :]
    async_gather(q_rope.index(0), at, mask=wanted)
    arrive_behind_gathers(q_full, increment_count=False)


@gluon.jit
def _gather_half(
    at, there, turn, full, empty, boxes, FIRST: gl.constexpr, BOXES: gl.constexpr,
    PIECES: gl.constexpr, EMPTY: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Some columns of a block, from pointers on: BOXES boxes, whose pieces arrive one by one, every
    other barrier from FULL on.
    """
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(EMPTY), (turn & 1) ^ 1)
    WIDTH: gl.constexpr = boxes.shape[2]
    for i in gl.static_range(BOXES):
        async_gather(boxes.index(FIRST + i), at + i * WIDTH, mask=there)
        if (i + 1) % (BOXES // PIECES) == 0:
            place = FULL + i // (BOXES // PIECES) * 2
            arrive_behind_gathers(full.index(place), increment_count=False)


@gluon.jit
def _gather_rope(
    ids, rows, turn, gaps, full, empty, rope_boxes, ROPE_AT: gl.constexpr, BLOCK_OF: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block's rotary part, and which of its keys are none; that is free with it."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = rows[:, None] + column[None, :] + ROPE_AT // 2
    there = (ids >= 0)[:, None] & (column >= 0)[None, :]
    _gather_half(at, there, turn, full, empty, rope_boxes, BLOCK_OF, 1, 1, BLOCK_OF, BLOCK_OF)
    gaps.index(BLOCK_OF).store(gl.where(ids >= 0, 0.0, float("-inf")))
    mbarrier.arrive(full.index(BLOCK_OF), count=1)


@gluon.jit
def _copy_rows(
    mine, latent_ptr, low, high, length, turn, left_boxes, right_boxes, rope_boxes, gaps,
    full, empty, BLOCK_SIZE: gl.constexpr, BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr,
    ROW_BYTES: gl.constexpr, ROPE_AT: gl.constexpr, PREFETCH: gl.constexpr, SWAPS: gl.constexpr,
    PIECES: gl.constexpr, LATE_LISTS: gl.constexpr, WHOLE_COPIES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Listed rows of 16 bits, block after block."""
    KEYS: gl.constexpr = rope_boxes.shape[1]
    TILE: gl.constexpr = 2 * KEYS
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDTH: gl.constexpr = HALF // PIECES if WHOLE_COPIES else 64
    BOXES: gl.constexpr = HALF // WIDTH
    WIDE: gl.constexpr = [2 * BOXES, KEYS, WIDTH]
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = reinterpret(left_boxes, left_boxes.dtype, WIDE, SHARED)
    right = reinterpret(right_boxes, right_boxes.dtype, WIDE, SHARED)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    ahead = listed(mine, low * TILE, length, KEYS, ROWS)
    if PREFETCH:
        coming = listed(mine, (low + 1) * TILE, length, TILE, EACH)
    for tile in range(low, high):
        if PREFETCH:
            units = _row_offsets(coming, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
            start = latent_ptr.to(gl.int64, bitcast=True)
            prefetch_rows(start + units * UNIT, coming, ROW_BYTES)
        for b in gl.static_range(2):
            ids = ahead
            if not LATE_LISTS:
                # What is past the end of the part is not used.
                ahead = listed(mine, tile * TILE + (b + 1) * KEYS, length, KEYS, ROWS)
            offset = _row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
            # Fields by their place in a row: fewer pointers are kept in registers.
            rows = latent_ptr + offset * (UNIT // 2)
            _gather_rope(ids, rows, turn, gaps, full, empty, rope_boxes, ROPE_AT, b, LAYOUT)
            if LATE_LISTS:
                # Behind a wait, and ahead of most copies: a use of the list before stands behind
                # all loads that are asked for, and loads behind all copies.
                ahead = listed(mine, tile * TILE + (b + 1) * KEYS, length, KEYS, ROWS)
                if PREFETCH and b == 0:
                    coming = listed(mine, (tile + 2) * TILE, length, TILE, EACH)
            at = rows[:, None] + column[None, :]
            there = (ids >= 0)[:, None] & (column >= 0)[None, :]
            if SWAPS and b == 1:
                _gather_half(
                    at + HALF, there, turn, full, empty, right, b * BOXES, BOXES, 1, 4 + b, 2 + b
                )
                _gather_half(
                    at, there, turn, full, empty, left, b * BOXES, BOXES, PIECES, 2 + b, 4 + b
                )
            else:
                _gather_half(at, there, turn, full, empty, left, b * BOXES, BOXES, 1, 2 + b, 2 + b)
                _gather_half(
                    at + HALF, there, turn, full, empty, right, b * BOXES, BOXES, PIECES, 4 + b,
                    4 + b,
                )  # fmt: skip
            if PREFETCH and not LATE_LISTS and b == 1:
                coming = listed(mine, (tile + 2) * TILE, length, TILE, EACH)
        turn += 1
    return turn


@gluon.jit
def produce_listed(
    query_ptr, rotary_ptr, latent_ptr, ids_ptr, lens_ptr, q_boxes, q_rope, left_boxes, right_boxes,
    rope_boxes, stored, gaps, full, empty, q_full, q_empty, ids_row, topk, total, query_token,
    query_head, rotary_token, rotary_head, HEADS: gl.constexpr, HEAD_TILES: gl.constexpr,
    SEGMENT: gl.constexpr, PARTS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr, ROW_BYTES: gl.constexpr,
    ROPE_AT: gl.constexpr, SCALES_AT: gl.constexpr, HAS_LENS: gl.constexpr, SCALED: gl.constexpr,
    PREFETCH: gl.constexpr, SWAPS: gl.constexpr, PIECES: gl.constexpr, LATE_LISTS: gl.constexpr,
    WHOLE_COPIES: gl.constexpr, RAISES: gl.constexpr,
):  # fmt: skip
    """Queries and listed rows of all work that the program takes, tile after tile: of each of its
    two blocks the rope, the left and the right half, as they are wanted.
    """
    KEYS: gl.constexpr = rope_boxes.shape[1]
    # Eight threads have 128 bytes of a row, which is a row of a box.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    turn = 0
    count = 0
    walks = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        token, head_tile, _, length, low, high = work_at(
            work, lens_ptr, topk, KEYS, HEAD_TILES, SEGMENT, PARTS, HAS_LENS
        )
        if high > low:
            mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
            mbarrier.wait(q_empty, (walks & 1) ^ 1)
            _gather_queries(
                query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, query_token,
                query_head, rotary_token, rotary_head, HEADS, LAYOUT,
            )  # fmt: skip
            walks += 1
            if SCALED:
                turn, count = widen_rows(
                    mine, latent_ptr, low, high, gl.minimum(length, high * (2 * KEYS)), turn, count,
                    left_boxes, right_boxes, rope_boxes, stored, gaps, full, empty, BLOCK_SIZE,
                    BLOCK_UNITS, ROW_UNITS, ROPE_AT, SCALES_AT, RAISES,
                )  # fmt: skip
            else:
                turn = _copy_rows(
                    mine, latent_ptr, low, high, length, turn, left_boxes, right_boxes, rope_boxes,
                    gaps, full, empty, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, ROW_BYTES, ROPE_AT,
                    PREFETCH, SWAPS, PIECES, LATE_LISTS, WHOLE_COPIES, LAYOUT,
                )  # fmt: skip
