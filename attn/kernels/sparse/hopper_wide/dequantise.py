"""The part of the producer that turns block-scaled e4m3 rows into bf16 (dequantises them).

Rows are copied to shared memory some blocks ahead, as the cache stores them. When a buffer for
converted rows is free, their elements become bf16 and are multiplied by the scales of their blocks.
Loading rows straight into registers would not do: rows lie anywhere in memory, so that the loads
take long, and a warp group has too few registers for all the bytes that must be in flight.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.lang.compat import async_copy, async_gather, reinterpret, thread_barrier
from attn.kernels.sparse.hopper_wide.parts import HALF, UNIT, gaps_of, ids_of, listed
from attn.kernels.sparse.listed_rows import E4M3_TO_BF16

STORED_BLOCKS = tl.constexpr(3)
"""Blocks held in stored form: one is being converted, and the copies of two are in flight."""
_AHEAD = tl.constexpr(STORED_BLOCKS.value - 1)
_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_COPIED = gl.constexpr(gl.SliceLayout(1, _COPY.value))
# All four elements belong to one block of scales, so both factors are the same register.
_SCALED = tl.constexpr(E4M3_TO_BF16.value.replace("$4", "$3"))
_PAIR = tl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")


@gluon.jit
def dequantise_scaled(words, factors):
    """Words of four e4m3 ``[KV, N]`` become words of two bf16 ``[KV, 2 N]``, multiplied by an fp32
    factor for each row ``[KV]``.
    """
    pair = gl.inline_asm_elementwise(_PAIR, "=r,f", [factors], dtype=gl.int32, is_pure=True, pack=1)
    _, pairs = gl.broadcast(words, pair[:, None])
    low, high = gl.inline_asm_elementwise(
        _SCALED, "=r,=r,r,r", [words, pairs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.jit
def _copy_words(ids, starts, place, AT: gl.constexpr, LAYOUT: gl.constexpr):
    """Start copying words of rows, from byte AT on; ``place`` is free and says how many.

    ``ids`` ``[KEYS]`` are the listed rows, and ``starts`` ``[KEYS]`` are pointers to their words.
    """
    column = gl.arange(0, place.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    # AT is added last, so that the fields of a row share the rest of the address: copies in flight
    # still read its registers.
    at = starts[:, None] + column[None, :] + AT // 4
    async_gather(place, at, mask=(ids >= 0)[:, None] & (column >= 0)[None, :])


@gluon.jit
def _copy_rest(ids, starts, place, rows, stored, LAYOUT: gl.constexpr):
    """Start copying right half, rope and scales of a block; its left half was started before.

    ``place`` is the number of the block's place in ``stored``.
    """
    _copy_words(ids, starts, stored.right.index(place), HALF, LAYOUT)
    _copy_words(ids, starts, stored.rope.index(place), rows.ROPE_AT, LAYOUT)
    _copy_words(ids, starts, stored.scales.index(place), rows.SCALES_AT, LAYOUT)
    async_copy.commit_group()


@gluon.jit
def _load_half(memory, LAYOUT: gl.constexpr):
    """Half of a block's stored words, as two tensors of 128 columns each."""
    return memory.slice(0, 32, dim=1).load(LAYOUT), memory.slice(32, 32, dim=1).load(LAYOUT)


@gluon.jit
def _dequantised(words, by, by_second):
    """Convert half of a block's latents to words of two bf16, multiplied by their scales."""
    KEYS: gl.constexpr = words[0].shape[0]
    both = gl.join(dequantise_scaled(words[0], by), dequantise_scaled(words[1], by_second))
    return gl.reshape(gl.permute(both, (0, 2, 1)), [KEYS, 128])


@gluon.constexpr_function
def _words_of(keys: int) -> gl.DistributedLinearLayout:
    """The layout of ``[keys, 32]`` words: a thread has 16 bytes of a row, and the 16 that lie 64
    bytes further on.

    Eight neighbouring threads have the same columns of eight rows. These lie in different banks of
    shared memory, both in the stored and in the converted block.
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
    """The layout of ``[keys, 4]`` scales: a thread has those of its rows in :func:`_words_of`."""
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
    """Load the scales of a block: four fp32 ``[KEYS]``, from ``[KEYS, 4]`` words."""
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
def begin_rows(mine, first, end, count, rows, stored, tile):
    """Start copying the first two blocks of a list.

    This comes before the queries of the list are loaded, since those wait until the consumers are
    done with the queries before.

    Args:
        mine: pointer to the list.
        first, end: int32, the entries.
        count: int32, blocks that the program has converted before.
        rows: the cache's :class:`attn.kernels.sparse.structures.LatentRows`.
        stored: the :class:`attn.kernels.sparse.structures.StoredBlocks`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.

    Returns:
        The entries of five blocks, each ``[KEYS]`` int32.
    """
    KEYS: gl.constexpr = tile.KEYS
    # Entries are loaded two blocks before they are needed: loads queue behind copies.
    ids0 = listed(mine, first, end, KEYS, _COPIED)
    ids1 = listed(mine, first + KEYS, end, KEYS, _COPIED)
    ids2 = listed(mine, first + 2 * KEYS, end, KEYS, _COPIED)
    ids3 = listed(mine, first + 3 * KEYS, end, KEYS, _COPIED)
    ids4 = listed(mine, first + 4 * KEYS, end, KEYS, _COPIED)
    words_ptr = rows.latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    # All threads must have read the previous list's stored blocks.
    thread_barrier()
    for i in gl.static_range(_AHEAD):
        place = (count + i) % STORED_BLOCKS
        ids = ids_of((ids0, ids1)[i], tile.TOKENS)
        starts = words_ptr + rows.offsets(ids) * (UNIT // 4)
        _copy_words(ids, starts, stored.left.index(place), 0, _COPY)
        _copy_rest(ids, starts, place, rows, stored, _COPY)
    return ids0, ids1, ids2, ids3, ids4


@gluon.jit
def dequantise_rows(entries, mine, end, piece, turn, count, rows, ring, stored, tile):
    """Convert listed rows of e4m3, block after block; :func:`begin_rows` comes first.

    The copies of two blocks are in flight all the time. Words are loaded into registers half a
    block before they are converted.

    Args:
        entries: the entries of the first five blocks, as :func:`begin_rows` returns them.
        mine: pointer to the list.
        end: int32, the entry of the list after the last.
        piece: the piece of work.
        turn: int32, tiles that the program has converted before.
        count: int32, blocks that the program has converted before.
        rows: the cache's :class:`attn.kernels.sparse.structures.LatentRows`.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        stored: the :class:`attn.kernels.sparse.structures.StoredBlocks`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.

    Returns:
        The tiles and the blocks that the program has converted now.
    """
    KEYS: gl.constexpr = tile.KEYS
    WORDS: gl.constexpr = _words_of(KEYS)
    SHAPE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    left = reinterpret(ring.left, gl.int32, [2, KEYS, 128], SHAPE)
    right = reinterpret(ring.right, gl.int32, [2, KEYS, 128], SHAPE)
    rope = reinterpret(ring.rope, gl.int32, [2, KEYS, 32], SHAPE)
    words_ptr = rows.latent_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    async_copy.wait_group(_AHEAD - 1)
    thread_barrier()
    words = _load_half(stored.left.index(count % STORED_BLOCKS), WORDS)
    for step in range(piece.low, piece.high):
        for b in gl.static_range(2):
            first = step * (2 * KEYS) + b * KEYS
            place = (count + _AHEAD) % STORED_BLOCKS
            ids = ids_of(entries[2], tile.TOKENS)
            starts = words_ptr + rows.offsets(ids) * (UNIT // 4)
            _copy_words(ids, starts, stored.left.index(place), 0, _COPY)
            f0, f1, f2, f3 = _load_scales(
                stored.scales.index(count % STORED_BLOCKS), gl.SliceLayout(1, WORDS)
            )
            wide_left = _dequantised(words, f0, f1)
            # A fresh barrier lets parity 1 pass at once. Loads come after the barrier, since the
            # compiler would wait for them before it.
            mbarrier.wait(ring.empty.index(2 + b), (turn & 1) ^ 1)
            second = _load_half(stored.right.index(count % STORED_BLOCKS), WORDS)
            # One store, since threads would wait for each other between two.
            left.index(b).store(wide_left)
            _copy_rest(ids, starts, place, rows, stored, _COPY)
            async_copy.wait_group(_AHEAD - 1)
            thread_barrier()
            wide_right = _dequantised(second, f2, f3)
            # When the right half is free, the rope and the gaps are free too.
            mbarrier.wait(ring.empty.index(4 + b), (turn & 1) ^ 1)
            rotary = stored.rope.index(count % STORED_BLOCKS).load(WORDS)
            count += 1
            right.index(b).store(wide_right)
            words = _load_half(stored.left.index(count % STORED_BLOCKS), WORDS)
            rope.index(b).store(rotary)
            ring.gaps.index(b).store(gaps_of(entries[0], tile.TOKENS))
            after = listed(mine, first + 5 * KEYS, end, KEYS, _COPIED)
            entries = (entries[1], entries[2], entries[3], entries[4], after)
            # Make the stores visible to the products, which read through another proxy.
            fence_async_shared()
            mbarrier.arrive(ring.full.index(b), count=1)
        turn += 1
    # Blocks past the end are copied as zeros, which must not overwrite what is copied next.
    async_copy.wait_group(0)
    return turn, count
