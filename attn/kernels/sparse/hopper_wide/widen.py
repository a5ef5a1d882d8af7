"""Rows of e4m3 for products of bf16: the part of the producers that widens them.

They are copied some blocks ahead, as they are stored, and become bf16 times the scales of their
blocks when there is a place for that. Loads into registers would be waited for: a row is somewhere
in memory, and a warp group has too few registers for as many bytes as are under way.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.lang.compat import async_copy, async_gather, reinterpret, thread_barrier
from attn.kernels.sparse.hopper_wide.parts import HALF, UNIT, listed
from attn.kernels.sparse.listed_rows import E4M3_TO_BF16, row_offsets

STORED_BLOCKS = tl.constexpr(3)
"""Blocks that are held as they are stored: one that is widened, two that are under way."""
_AHEAD = tl.constexpr(STORED_BLOCKS.value - 1)
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_COPIED = gl.constexpr(gl.SliceLayout(1, _COPY.value))
# Two factors of four elements of one block are the same.
_SCALED = tl.constexpr(E4M3_TO_BF16.value.replace("$4", "$3"))
_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@gluon.jit
def widen_scaled(words, factors):
    """Words of four e4m3 ``[KV, N]`` times a factor for each row, as words of two bf16
    ``[KV, 2 N]``.
    """
    pair = gl.inline_asm_elementwise(_PAIR, "=r,f", [factors], dtype=gl.int32, is_pure=True, pack=1)
    _, pairs = gl.broadcast(words, pair[:, None])
    low, high = gl.inline_asm_elementwise(
        _SCALED, "=r,=r,r,r", [words, pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.jit
def _copy_words(ids, rows, place, AT: gl.constexpr, LAYOUT: gl.constexpr):
    """Ask for words of rows from a byte of them on, as many as the place has, which is free."""
    column = gl.arange(0, place.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    # The field's place last: fields share addresses, whose registers copies under way still read.
    at = rows[:, None] + column[None, :] + AT // 4
    async_gather(place, at, mask=(ids >= 0)[:, None] & (column >= 0)[None, :])


@gluon.jit
def _copy_rest(
    ids, rows, stored, place, ROPE_AT: gl.constexpr, SCALES_AT: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Ask for what a block has besides the left half of its latents; with that it is complete."""
    _copy_words(ids, rows, stored[1].index(place), HALF, LAYOUT)
    _copy_words(ids, rows, stored[2].index(place), ROPE_AT, LAYOUT)
    _copy_words(ids, rows, stored[3].index(place), SCALES_AT, LAYOUT)
    async_copy.commit_group()


@gluon.jit
def _load_half(memory, LAYOUT: gl.constexpr):
    """Half of a block's words as they are stored, 128 columns each."""
    return memory.slice(0, 32, dim=1).load(LAYOUT), memory.slice(32, 32, dim=1).load(LAYOUT)


@gluon.jit
def _widened(words, by, by_second):
    """Half of a block's latents as words of two bf16 times their scales."""
    KEYS: gl.constexpr = words[0].shape[0]
    both = gl.join(widen_scaled(words[0], by), widen_scaled(words[1], by_second))
    return gl.reshape(gl.permute(both, (0, 2, 1)), [KEYS, 128])


@gluon.constexpr_function
def _words_of(keys: int) -> gl.DistributedLinearLayout:
    """``[keys, 32]`` words of a box: a thread has 16 bytes, and another 16 behind 64, of a row.

    Eight neighbouring threads have eight rows' same columns, which lie at banks of their own where
    rows are stored and where they are widened to.
    """
    more = [[32 << k, 0] for k in range(keys.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], *more],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[keys, 32],
    )


@gluon.constexpr_function
def _scales_of(keys: int) -> gl.DistributedLinearLayout:
    """``[keys, 4]``, by threads as in :func:`_words_of`."""
    more = [[32 << k, 0] for k in range(keys.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *more],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 0], [0, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[keys, 4],
    )


@gluon.jit
def _load_scales(memory, LAYOUT: gl.constexpr):
    """``[KEYS, 4]`` words as four ``[KEYS]`` scales."""
    KEYS: gl.constexpr = memory.shape[0]
    scales = memory.load(_scales_of(KEYS)).to(gl.float32, bitcast=True)
    even, odd = gl.split(gl.reshape(scales, [KEYS, 2, 2]))
    f0, f2 = gl.split(even)
    f1, f3 = gl.split(odd)
    f0 = gl.convert_layout(f0, LAYOUT, assert_trivial=True)
    f1 = gl.convert_layout(f1, LAYOUT, assert_trivial=True)
    f2 = gl.convert_layout(f2, LAYOUT, assert_trivial=True)
    f3 = gl.convert_layout(f3, LAYOUT, assert_trivial=True)
    return f0, f1, f2, f3


@gluon.jit
def begin_rows(
    mine, latent_ptr, first, end, count, stored, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr, ROPE_AT: gl.constexpr,
    SCALES_AT: gl.constexpr,
):  # fmt: skip
    """Ask for the first two blocks of a list from an entry on: before its queries are asked for,
    which wait for the ones before. Returns entries of five blocks.
    """
    # Lists are asked for two blocks before they are needed: loads stand in line behind copies.
    ids0 = listed(mine, first, end, KEYS, _COPIED)
    ids1 = listed(mine, first + KEYS, end, KEYS, _COPIED)
    ids2 = listed(mine, first + 2 * KEYS, end, KEYS, _COPIED)
    ids3 = listed(mine, first + 3 * KEYS, end, KEYS, _COPIED)
    ids4 = listed(mine, first + 4 * KEYS, end, KEYS, _COPIED)
    words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    # Who widened the rows before has read them all.
    thread_barrier()
    for i in gl.static_range(_AHEAD):
        place = (count + i) % STORED_BLOCKS
        ids = (ids0, ids1)[i]
        rows = words_ptr + row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE) * (UNIT // 4)
        _copy_words(ids, rows, stored[0].index(place), 0, _COPY)
        _copy_rest(ids, rows, stored, place, ROPE_AT, SCALES_AT, _COPY)
    return ids0, ids1, ids2, ids3, ids4


@gluon.jit
def widen_rows(
    ids0, ids1, ids2, ids3, ids4, mine, latent_ptr, low, high, end, turn, count, left_boxes,
    right_boxes, rope_boxes, stored, gaps, full, empty, BLOCK_SIZE: gl.constexpr,
    BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr, ROPE_AT: gl.constexpr,
    SCALES_AT: gl.constexpr,
):  # fmt: skip
    """Listed rows of e4m3, block after block, behind :func:`begin_rows`; those of two blocks are
    under way. Words are in registers half a block before they are widened.
    """
    KEYS: gl.constexpr = rope_boxes.shape[1]
    WORDS: gl.constexpr = _words_of(KEYS)
    SHAPE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    left = reinterpret(left_boxes, gl.int32, [2, KEYS, 128], SHAPE)
    right = reinterpret(right_boxes, gl.int32, [2, KEYS, 128], SHAPE)
    rope = reinterpret(rope_boxes, gl.int32, [2, KEYS, 32], SHAPE)
    words_ptr = latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    async_copy.wait_group(_AHEAD - 1)
    thread_barrier()
    words = _load_half(stored[0].index(count % STORED_BLOCKS), WORDS)
    for tile in range(low, high):
        for b in gl.static_range(2):
            first = tile * (2 * KEYS) + b * KEYS
            place = (count + _AHEAD) % STORED_BLOCKS
            rows = words_ptr + row_offsets(ids2, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE) * (UNIT // 4)
            _copy_words(ids2, rows, stored[0].index(place), 0, _COPY)
            f0, f1, f2, f3 = _load_scales(
                stored[3].index(count % STORED_BLOCKS), gl.SliceLayout(1, WORDS)
            )
            wide_left = _widened(words, f0, f1)
            # A fresh barrier lets parity 1 pass at once. Loads stay behind it: the compiler waits
            # for them before it.
            mbarrier.wait(empty.index(2 + b), (turn & 1) ^ 1)
            second = _load_half(stored[1].index(count % STORED_BLOCKS), WORDS)
            # At once: between two stores threads would wait for each other.
            left.index(b).store(wide_left)
            _copy_rest(ids2, rows, stored, place, ROPE_AT, SCALES_AT, _COPY)
            async_copy.wait_group(_AHEAD - 1)
            thread_barrier()
            wide_right = _widened(second, f2, f3)
            # Behind it the rope and what says which keys are none are free, too.
            mbarrier.wait(empty.index(4 + b), (turn & 1) ^ 1)
            rotary = stored[2].index(count % STORED_BLOCKS).load(WORDS)
            count += 1
            right.index(b).store(wide_right)
            words = _load_half(stored[0].index(count % STORED_BLOCKS), WORDS)
            rope.index(b).store(rotary)
            gaps.index(b).store(gl.where(ids0 >= 0, 0.0, float("-inf")))
            ids0 = ids1
            ids1 = ids2
            ids2 = ids3
            ids3 = ids4
            ids4 = listed(mine, first + 5 * KEYS, end, KEYS, _COPIED)
            # Generic stores before products read them.
            fence_async_shared()
            mbarrier.arrive(full.index(b), count=1)
        turn += 1
    # Zeros behind the end: they must not overtake what is copied to their places next.
    async_copy.wait_group(0)
    return turn, count
