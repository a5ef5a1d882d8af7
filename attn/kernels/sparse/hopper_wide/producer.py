"""The producer of the wide Hopper sparse kernel: a warp group that gathers queries and listed rows.

Rows of 16 bits are copied unchanged, 16 bytes by each thread, and the copies themselves arrive at
barriers. Rows of e4m3 are converted by :mod:`attn.kernels.sparse.hopper_wide.dequantise`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import arrive_behind_gathers, async_gather, reinterpret
from attn.kernels.sparse.hopper_wide.dequantise import begin_rows, dequantise_rows
from attn.kernels.sparse.hopper_wide.parts import (
    BLOCK,
    HALF,
    UNIT,
    listed,
    units_at,
    work_at,
    works_of,
)
from attn.kernels.sparse.listed_rows import row_offsets


@gluon.jit
def _gather_queries(
    query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, query_token, query_head,
    rotary_token, rotary_head, HEADS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy the queries of a tile of heads to shared memory; zeros past the last head."""
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
def _gather_block(
    at, there, turn, full, empty, columns, BLOCK_OF: gl.constexpr, EMPTY: gl.constexpr,
    FULL: gl.constexpr,
):  # fmt: skip
    """Copy some columns of a block of keys, from pointers ``at``, once their buffer is free."""
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(EMPTY), (turn & 1) ^ 1)
    async_gather(columns.index(BLOCK_OF), at, mask=there)
    arrive_behind_gathers(full.index(FULL), increment_count=False)


@gluon.jit
def _gather_rope(
    ids, rows, turn, gaps, full, empty, rope, ROPE_AT: gl.constexpr, BLOCK_OF: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy a block's rotary part and store its gaps, whose buffer is free when the rope's is."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = rows[:, None] + column[None, :] + ROPE_AT // 2
    there = (ids >= 0)[:, None] & (column >= 0)[None, :]
    _gather_block(at, there, turn, full, empty, rope, BLOCK_OF, BLOCK_OF, BLOCK_OF)
    gaps.index(BLOCK_OF).store(gl.where(ids >= 0, 0.0, float("-inf")))
    mbarrier.arrive(full.index(BLOCK_OF), count=1)


@gluon.jit
def _copy_rows(
    mine, latent_ptr, low, high, length, turn, left_boxes, right_boxes, rope, gaps, full, empty,
    BLOCK_SIZE: gl.constexpr, BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr,
    ROPE_AT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy listed rows of 16 bits, block after block.

    The halves of a block come in the order in which their buffers become free.
    """
    KEYS: gl.constexpr = rope.shape[1]
    SHAPE: gl.constexpr = [2, KEYS, HALF]
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = reinterpret(left_boxes, left_boxes.dtype, SHAPE, SHARED)
    right = reinterpret(right_boxes, right_boxes.dtype, SHAPE, SHARED)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    ahead = listed(mine, low * (2 * KEYS), length, KEYS, gl.SliceLayout(1, LAYOUT))
    for tile in range(low, high):
        for b in gl.static_range(2):
            ids = ahead
            offset = row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
            rows = latent_ptr + offset * (UNIT // 2)
            _gather_rope(ids, rows, turn, gaps, full, empty, rope, ROPE_AT, b, LAYOUT)
            # The next entries are loaded after a wait and before most copies: a use of loaded
            # entries waits for all loads before it, and loads queue behind copies. Entries past
            # the end of the part are not used.
            after = tile * (2 * KEYS) + (b + 1) * KEYS
            ahead = listed(mine, after, length, KEYS, gl.SliceLayout(1, LAYOUT))
            # Fields are addressed by offset in a row, which keeps fewer pointers in registers.
            at = rows[:, None] + column[None, :]
            there = (ids >= 0)[:, None] & (column >= 0)[None, :]
            if b == 0:
                _gather_block(at, there, turn, full, empty, left, 0, 2, 2)
                _gather_block(at + HALF, there, turn, full, empty, right, 0, 4, 4)
            else:
                _gather_block(at + HALF, there, turn, full, empty, right, 1, 5, 3)
                _gather_block(at, there, turn, full, empty, left, 1, 3, 5)
        turn += 1
    return turn


@gluon.jit
def produce_listed(
    query_ptr, rotary_ptr, latent_ptr, ids_ptr, lens_ptr, q_boxes, q_rope, left_boxes, right_boxes,
    rope_boxes, stored, gaps, full, empty, q_full, q_empty, ids_row, topk, total, query_token,
    query_head, rotary_token, rotary_head, HEADS: gl.constexpr, HEAD_TILES: gl.constexpr,
    SEGMENT: gl.constexpr, PARTS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr, ROPE_AT: gl.constexpr,
    SCALES_AT: gl.constexpr, HAS_LENS: gl.constexpr, BALANCED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Bring queries and listed rows of the program's pieces of work, tile after tile.

    The rope and the halves of a tile's two blocks come in the order in which consumers need them.
    """
    KEYS: gl.constexpr = rope_boxes.shape[1]
    # Eight threads copy 128 bytes of a row, which are one row of a box.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    turn = 0
    count = 0
    walks = 0
    first, last, step = works_of(total, topk, KEYS, HEAD_TILES, BALANCED)
    for work in range(first, last, step):
        token, head_tile, _, length, low, high, _ = work_at(
            work, total, lens_ptr, topk, KEYS, HEAD_TILES, SEGMENT, PARTS, BALANCED, HAS_LENS
        )
        if high > low:
            mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
            if SCALED:
                end = gl.minimum(length, high * (2 * KEYS))
                ids0, ids1, ids2, ids3, ids4 = begin_rows(
                    mine, latent_ptr, low * (2 * KEYS), end, count, stored, KEYS, BLOCK_SIZE,
                    BLOCK_UNITS, ROW_UNITS, ROPE_AT, SCALES_AT,
                )  # fmt: skip
            mbarrier.wait(q_empty, (walks & 1) ^ 1)
            _gather_queries(
                query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, query_token,
                query_head, rotary_token, rotary_head, HEADS, LAYOUT,
            )  # fmt: skip
            walks += 1
            if SCALED:
                turn, count = dequantise_rows(
                    ids0, ids1, ids2, ids3, ids4, mine, latent_ptr, low, high, end, turn, count,
                    left_boxes, right_boxes, rope_boxes, stored, gaps, full, empty, BLOCK_SIZE,
                    BLOCK_UNITS, ROW_UNITS, ROPE_AT, SCALES_AT,
                )  # fmt: skip
            else:
                turn = _copy_rows(
                    mine, latent_ptr, low, high, length, turn, left_boxes, right_boxes, rope_boxes,
                    gaps, full, empty, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, ROPE_AT, LAYOUT,
                )  # fmt: skip
