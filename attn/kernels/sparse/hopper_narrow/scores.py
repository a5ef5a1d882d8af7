"""Scores of the narrow Hopper sparse kernel for e4m3 rows, as products of warp groups.

Keys are the rows of products, and heads their columns. Keys come from registers, where they are
converted. Queries come from shared memory, where the four warps read them once; with products of
single warps, every warp would read all queries for its 16 keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from attn.kernels.lang.packed import SPLIT_E4M3, SPLIT_HALVES
from attn.kernels.lang.wgmma import base_of
from attn.kernels.sparse.hopper_narrow.operands import row_factors, row_words
from attn.kernels.sparse.hopper_wide.parts import exp2, log2


@gluon.jit
def _row_operand(words, E4M3: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Convert words of keys ``[64, N]`` to the first operand ``[64, columns]`` of a product.

    Columns are in the order of :func:`attn.kernels.sparse.hopper_narrow.operands.query_order`.
    """
    KEYS: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    if E4M3:
        f0, f1, f2, f3 = gl.inline_asm_elementwise(
            SPLIT_E4M3, "=h,=h,=h,=h,r", [words],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
        )  # fmt: skip
        x = gl.join(gl.join(f0, f1), gl.join(f2, f3))
        x = gl.permute(gl.reshape(x, [KEYS, N // 16, 4, 4, 2, 2]), (0, 1, 3, 5, 2, 4))
        x = gl.reshape(x, [KEYS, N * 4])
    else:
        f0, f1 = gl.inline_asm_elementwise(
            SPLIT_HALVES, "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        x = gl.join(f0, f1).to(DTYPE, bitcast=True)
        x = gl.permute(gl.reshape(x, [KEYS, N // 16, 4, 2, 2, 2]), (0, 1, 3, 4, 2, 5))
        x = gl.reshape(x, [KEYS, N * 2])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _block(z, queries, latents, words, before, BLOCK: gl.constexpr, tile):
    """Start a block's score products, half by half: registers hold the keys of two halves.

    Args:
        z: a zero hidden from the compiler.
        queries: ``[4, ROWS, 128]`` in shared memory, the latent parts of queries.
        latents: ``[64, 128]`` int32 in shared memory, the latents of the tile's keys.
        words: ``[64, 16]`` int32, the first half of the block's keys.
        before: ``[64, ROWS]`` fp32, the scores of the block before, still in flight.
        BLOCK: number of the block of 128 columns.
        tile: the kernel's :class:`attn.kernels.sparse.structures.NarrowTile`.

    Returns:
        The first words of the next block; the finished scores ``before``; and the block's scores,
        still in flight.
    """
    DTYPE: gl.constexpr = tile.DTYPE
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, tile.PRODUCT, 2)
    zero = gl.zeros([64, tile.ROWS], gl.float32, tile.PRODUCT)
    # ``z`` is a zero hidden from the compiler, which would otherwise compute the addresses of all
    # queries early and spill them.
    queries = queries.index(z + BLOCK)
    more = latents.slice(32 * BLOCK + 16, 16, dim=1).load(row_words(16))
    keys = _row_operand(words, True, DTYPE, OPERAND)
    part = queries.slice(0, 64, dim=1).permute((1, 0))
    s = warpgroup_mma(keys, part, zero, use_acc=False, is_async=True)
    if BLOCK > 0:
        before = warpgroup_mma_wait(1, deps=[before])
    if BLOCK < 3:
        words = latents.slice(32 * BLOCK + 32, 16, dim=1).load(row_words(16))
    keys = _row_operand(more, True, DTYPE, OPERAND)
    part = queries.slice(64, 64, dim=1).permute((1, 0))
    s = warpgroup_mma(keys, part, s, is_async=True)
    return words, before, warpgroup_mma_wait(1, deps=[s])


@gluon.jit
def group_scores(z, queries, latents, tails, there, logs, factor, SCALED: gl.constexpr, tile):
    """Scores ``[64, ROWS]`` of a tile in units of log 2; -inf where an entry lists no row.

    While half a block is multiplied, the next half is converted.

    Args:
        z: a zero hidden from the compiler.
        queries: the tile of heads' :class:`attn.kernels.sparse.structures.NarrowQueries`.
        latents: ``[64, 128]`` int32 in shared memory, the latents of the tile's keys.
        tails: ``[64, words]`` int32 in shared memory, what follows the latents.
        there: ``[64]`` bool, whether the entries list rows.
        logs: ``[4, 64]`` fp32 in shared memory; with SCALED, logarithms of scales are stored there.
        factor: fp32, the factor of products.
        SCALED: whether each row has scales of its own.
        tile: the kernel's :class:`attn.kernels.sparse.structures.NarrowTile`.
    """
    DTYPE: gl.constexpr = tile.DTYPE
    PRODUCT: gl.constexpr = tile.PRODUCT
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    zero = gl.zeros([64, tile.ROWS], gl.float32, PRODUCT)
    words = latents.slice(0, 16, dim=1).load(row_words(16))
    words, _, s0 = _block(z, queries.latent, latents, words, zero, 0, tile)
    words, s0, s1 = _block(z, queries.latent, latents, words, s0, 1, tile)
    words, s1, s2 = _block(z, queries.latent, latents, words, s1, 2, tile)
    rope = tails
    if SCALED:
        rope = tails.slice(32, 32, dim=1)
    _, s2, s3 = _block(z, queries.latent, latents, words, s2, 3, tile)
    words = rope.load(row_words(rope.shape[1]))
    keys = _row_operand(words, not SCALED, DTYPE, OPERAND)
    rotary = queries.rotary.index(z).permute((1, 0))
    s = warpgroup_mma(keys, rotary, zero, use_acc=False, is_async=True)
    if SCALED:
        KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
        EACH: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [2, 2], [1, 0])
        each = tails.slice(28, 4, dim=1).load(EACH).to(gl.float32, bitcast=True)
        logs.permute((1, 0)).store(log2(each))
        scales = tails.slice(28, 4, dim=1).load(row_factors()).to(gl.float32, bitcast=True)
        even, odd = gl.split(gl.reshape(scales, [64, 2, 2]))
        f0, f2 = gl.split(even)
        f1, f3 = gl.split(odd)
        s0 *= gl.convert_layout(f0, KEY, assert_trivial=True)[:, None]
        s1 *= gl.convert_layout(f1, KEY, assert_trivial=True)[:, None]
        s2 *= gl.convert_layout(f2, KEY, assert_trivial=True)[:, None]
        s3, s = warpgroup_mma_wait(0, deps=[s3, s])
        s3 *= gl.convert_layout(f3, KEY, assert_trivial=True)[:, None]
    else:
        s3, s = warpgroup_mma_wait(0, deps=[s3, s])
    latent = (s0 + s1) + (s2 + s3)
    by = queries.undo.index(0).load(COLUMN) * factor
    rope_by = factor
    if not SCALED:
        rope_by = (queries.undo.index(1).load(COLUMN) * factor)[None, :]
    s = gl.fma(latent, by[None, :] + zero, s * rope_by)
    return gl.where(there[:, None], s, float("-inf"))


@gluon.jit
def count_keys(s, m, l):
    """Fold a tile's scores ``[64, heads]`` into maxima and sums of weights ``[32, heads]``.

    Each thread keeps its own.
    """
    ROWS: gl.constexpr = s.shape[1]
    x = gl.reshape(s, [4, 2, 8, ROWS])
    own = gl.reshape(gl.max(x, 1), [32, ROWS])
    own = gl.convert_layout(own, m.type.layout, assert_trivial=True)
    new = gl.maximum(m, own)
    base = base_of(new)
    over = gl.convert_layout(
        gl.reshape(base, [4, 8, ROWS]), gl.SliceLayout(1, x.type.layout), assert_trivial=True
    )
    weights = gl.reshape(gl.sum(exp2(x - over[:, None, :, :]), 1), [32, ROWS])
    weights = gl.convert_layout(weights, m.type.layout, assert_trivial=True)
    return new, gl.fma(l, exp2(m - base), weights)
