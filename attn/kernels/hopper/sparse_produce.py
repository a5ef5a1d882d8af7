"""The producers of sparse latent attention: a warp group that gathers queries and listed rows.

Rows of 16 bits are copied as they are, 16 bytes by each thread, and the copies themselves arrive at
barriers. Rows of e4m3 go by way of registers, where they become bf16 times the scales of their
blocks; loads of a half of a block are under way while the warp group waits for its place.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.hopper.compat import arrive_behind_gathers, async_gather, reinterpret
from attn.kernels.hopper.convert import _layout
from attn.kernels.hopper.decode_parts import opaque_zero
from attn.kernels.hopper.sparse_parts import BLOCK, HALF, TILE, work_at
from attn.kernels.hopper.tiles import wide
from attn.kernels.sparse_mla import _TO_BF16, _row_offsets

THREADS = tl.constexpr(128)
"""Of the producer's warps, each of which arrives by itself."""
UNIT = tl.constexpr(16)
"""Bytes that a thread copies at a time, and that offsets of rows are in."""
# Two factors of four elements of one block are the same.
_SCALED = tl.constexpr(_TO_BF16.value.replace("$4", "$3"))


@gluon.jit
def widen_scaled(words, factors):
    """Words of four e4m3 ``[KV, N]`` times a factor for each row, as words of two bf16
    ``[KV, 2 N]``.
    """
    pair = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [factors], dtype=gl.int32, is_pure=True, pack=1
    )
    _, pairs = gl.broadcast(words, pair[:, None])
    low, high = gl.inline_asm_elementwise(
        _SCALED, "=r,=r,r,r", [words, pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.jit
def prefetch_rows(ptrs, ids, nbytes):
    """Ask for so many bytes at each pointer into the L2 cache, where ids are not negative."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $2, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }",
        "=r,l,r,r", [ptrs, ids, ids * 0 + nbytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ids(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Entries of a list, -1 from its end on."""
    # Else each thread's place in a list is added once, and spilled until now.
    at = first + opaque_zero() + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def _gather_queries(
    query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, HEADS: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, QUERY_HEAD: gl.constexpr, ROTARY_TOKEN: gl.constexpr,
    ROTARY_HEAD: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Queries of a tile of heads; zeros where there is no head."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    head = head_tile * BLOCK + row
    wanted = (head < HEADS)[:, None] & (column >= 0)[None, :]
    at = query_ptr + token.to(gl.int64) * QUERY_TOKEN
    at = at + (head * QUERY_HEAD)[:, None] + column[None, :]
    for i in gl.static_range(8):
        async_gather(q_boxes.index(i), at + i * 64, mask=wanted)
    at = rotary_ptr + token.to(gl.int64) * ROTARY_TOKEN
    at = at + (head * ROTARY_HEAD)[:, None] + column[None, :]
    async_gather(q_rope.index(0), at, mask=wanted)
    arrive_behind_gathers(q_full, increment_count=False)


@gluon.jit
def _gather_half(
    at, there, turn, full, empty, boxes, FIRST: gl.constexpr, PARTS: gl.constexpr,
    PLACE: gl.constexpr,
):  # fmt: skip
    """Some columns of a block: PARTS times 64 from pointers on."""
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(PLACE), (turn & 1) ^ 1)
    for i in gl.static_range(PARTS):
        async_gather(boxes.index(FIRST + i), at + i * 64, mask=there)
    arrive_behind_gathers(full.index(PLACE), increment_count=False)


@gluon.jit
def _gather_rope(
    ids, offset, rope_ptr, turn, gaps, full, empty, rope_boxes, BLOCK_OF: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """A block's rotary part, and which of its keys are none; that is free with it."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = rope_ptr + (offset * (UNIT // 2))[:, None] + column[None, :]
    there = (ids >= 0)[:, None] & (column >= 0)[None, :]
    _gather_half(at, there, turn, full, empty, rope_boxes, BLOCK_OF, 1, BLOCK_OF)
    gaps.index(BLOCK_OF).store(gl.where(ids >= 0, 0.0, float("-inf")))
    mbarrier.arrive(full.index(BLOCK_OF), count=1)


@gluon.jit
def _convert_half(
    offset, there, words_ptr, scales_ptr, turn, full, empty, tiles, COLUMN: gl.constexpr,
    BLOCK_OF: gl.constexpr, PLACE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Half of a block's latents, from COLUMN on, as bf16 times their scales."""
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    at = words_ptr + (offset * (UNIT // 4))[:, None] + column[None, :]
    mask = there[:, None] & (column >= 0)[None, :]
    first = gl.load(at + COLUMN // 4, mask=mask, other=0)
    second = gl.load(at + (COLUMN // 4 + 32), mask=mask, other=0)
    scales = scales_ptr + offset * (UNIT // 4)
    by = gl.load(scales + COLUMN // 128, mask=there, other=0.0)
    by_second = gl.load(scales + (COLUMN // 128 + 1), mask=there, other=0.0)
    mbarrier.wait(empty.index(PLACE), (turn & 1) ^ 1)
    tiles.index(2 * BLOCK_OF).store(widen_scaled(first, by))
    tiles.index(2 * BLOCK_OF + 1).store(widen_scaled(second, by_second))
    # Generic stores before products read them.
    fence_async_shared()
    mbarrier.arrive(full.index(PLACE), count=1)


@gluon.jit
def produce_listed(
    query_ptr, rotary_ptr, latent_ptr, ids_ptr, lens_ptr, q_boxes, q_rope, left_boxes, right_boxes,
    rope_boxes, gaps, full, empty, q_full, q_empty, ids_row, topk, total, HEADS: gl.constexpr,
    HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr,
    ROW_BYTES: gl.constexpr, ROPE_AT: gl.constexpr, SCALES_AT: gl.constexpr,
    QUERY_TOKEN: gl.constexpr, QUERY_HEAD: gl.constexpr,
    ROTARY_TOKEN: gl.constexpr, ROTARY_HEAD: gl.constexpr, HAS_LENS: gl.constexpr,
    SCALED: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Queries and listed rows of all work that the program takes, tile after tile: of each of its
    two blocks the rope, the left and the right half, as they are wanted.
    """
    # Eight threads have 128 bytes of a row, which is a row of a box.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WORDS: gl.constexpr = _layout(64, 128)
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    DTYPE: gl.constexpr = query_ptr.dtype.element_ty
    # Fields by their place in a row: fewer pointers are kept in registers.
    rope_ptr = latent_ptr.to(gl.pointer_type(DTYPE), bitcast=True) + ROPE_AT // 2
    if SCALED:
        scales_ptr = latent_ptr.to(gl.pointer_type(gl.float32), bitcast=True) + SCALES_AT // 4
        words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        SHAPE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        left_words = reinterpret(left_boxes, gl.int32, [4, 64, 64], SHAPE)
        right_words = reinterpret(right_boxes, gl.int32, [4, 64, 64], SHAPE)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    turn = 0
    walks = 0
    for work in range(gl.program_id(0), total, gl.num_programs(0)):
        token, head_tile, _, length, low, high = work_at(
            work, lens_ptr, topk, HEAD_TILES, SEGMENT, PARTS, HAS_LENS
        )
        if high > low:
            mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
            mbarrier.wait(q_empty, (walks & 1) ^ 1)
            _gather_queries(
                query_ptr, rotary_ptr, token, head_tile, q_boxes, q_rope, q_full, HEADS,
                QUERY_TOKEN, QUERY_HEAD, ROTARY_TOKEN, ROTARY_HEAD, LAYOUT,
            )  # fmt: skip
            walks += 1
            # The row that a thread widens words of is known a block ahead. Rows of copies, four to
            # a thread, would be spilled meanwhile.
            AHEAD: gl.constexpr = gl.SliceLayout(1, WORDS) if SCALED else ROWS
            ahead = _ids(mine, low * TILE, length, 64, AHEAD)
            for tile in range(low, high):
                if PREFETCH:
                    coming = _ids(mine, (tile + 1) * TILE, length, TILE, EACH)
                    units = _row_offsets(coming, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
                    start = latent_ptr.to(gl.int64, bitcast=True)
                    prefetch_rows(start + units * UNIT, coming, ROW_BYTES)
                for b in gl.static_range(2):
                    first = tile * TILE + b * BLOCK
                    ids = ahead
                    # What is past the end of the part is not used.
                    ahead = _ids(mine, first + BLOCK, length, 64, AHEAD)
                    offset = _row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
                    if SCALED:
                        copied = _ids(mine, first, length, 64, ROWS)
                        _gather_rope(
                            copied, _row_offsets(copied, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE),
                            rope_ptr, turn, gaps, full, empty, rope_boxes, b, LAYOUT,
                        )  # fmt: skip
                        _convert_half(
                            offset, ids >= 0, words_ptr, scales_ptr, turn, full, empty, left_words,
                            0, b, 2 + b, WORDS,
                        )  # fmt: skip
                        _convert_half(
                            offset, ids >= 0, words_ptr, scales_ptr, turn, full, empty, right_words,
                            HALF, b, 4 + b, WORDS,
                        )  # fmt: skip
                    else:
                        _gather_rope(
                            ids, offset, rope_ptr, turn, gaps, full, empty,
                            rope_boxes, b, LAYOUT,
                        )  # fmt: skip
                        at = latent_ptr + (offset * (UNIT // 2))[:, None] + column[None, :]
                        there = (ids >= 0)[:, None] & (column >= 0)[None, :]
                        _gather_half(at, there, turn, full, empty, left_boxes, b * 4, 4, 2 + b)
                        _gather_half(
                            at + HALF, there, turn, full, empty, right_boxes, b * 4, 4, 4 + b
                        )
                turn += 1
