"""Operands of the narrow Hopper sparse kernel, made of rows in stored form.

The layouts decide which words a thread loads; the functions turn words into a product's operand in
the same registers. No conversion of layouts here moves data, and ``assert_trivial`` checks that.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.packed import SPLIT_HALVES, woven_e4m3

_WOVEN_PAIRS = tl.constexpr(
    "{ .reg .b32 p, q; prmt.b32 p, $4, $5, 0x5410; prmt.b32 q, $4, $5, 0x7632;"
    " mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; }"
)


@gluon.constexpr_function
def swizzled(rows: int, words: int) -> gl.SharedLinearLayout:
    """The layout of rows of words in shared memory.

    Words that are read together lie in different banks: for scores, halves of 128 bytes of two
    keys; for values, four keys at distance two.
    """
    columns = [[0, 1 << k] for k in range(words.bit_length() - 1)]
    down = [[1, 16], [2, 8], [4, 16]] if words >= 32 else [[1, 0], [2, 0], [4, 0]]
    down += [[1 << k, 0] for k in range(3, rows.bit_length() - 1)]
    return gl.SharedLinearLayout(columns + down)


@gluon.constexpr_function
def scores_memory(tile: int, rows: int) -> gl.SharedLinearLayout:
    """The layout of scores ``[keys, heads]`` in shared memory.

    The pairs of heads that four threads store lie in different banks, and so do eight keys of every
    other head.
    """
    keys = [[1 << k, 0] for k in range(tile.bit_length() - 1)]
    return gl.SharedLinearLayout([*keys, [8, 1], [16, 2], [8, 4], *([[0, 8]] if rows > 8 else [])])


@gluon.constexpr_function
def key_words(tile: int, words: int) -> gl.DistributedLinearLayout:
    """The layout of key words: a warp has eight keys at a time, four threads 64 bytes of each."""
    more = [[0, 16 << k] for k in range((words // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *more, *([[32, 0]] if tile > 32 else [])],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[tile, words],
    )


@gluon.constexpr_function
def row_words(words: int) -> gl.DistributedLinearLayout:
    """The layout of ``[64, words]`` where keys are the rows of a warp group's product.

    A warp has sixteen neighbouring keys, and four threads have 64 bytes of each at a time.
    """
    more = [[0, 16 << k] for k in range((words // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *more, [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, words],
    )


@gluon.constexpr_function
def row_factors() -> gl.DistributedLinearLayout:
    """The layout of scales ``[64, 4]`` that lies like the keys of :func:`row_words`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 1], [0, 2]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def value_words(tile: int, words: int) -> gl.DistributedLinearLayout:
    """The layout of value words ``[keys, words]``: a warp has a block of columns of all keys.

    A thread has 16 bytes of the block, and with 16-bit elements the 16 bytes that lie 128 further
    on. It has four of every 16 keys.
    """
    wide, block = words > 128, words // 4
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1],
            [0, 2],
            *([[0, 32]] if wide else []),
            *([1, 0], [8, 0], [16, 0]),
            *([[32, 0]] if tile > 32 else []),
        ],
        lane_bases=[[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, block], [0, 2 * block]],
        block_bases=[],
        shape=[tile, words],
    )


@gluon.constexpr_function
def weights_layout(tile: int, rows: int) -> gl.DistributedLinearLayout:
    """The layout of weights ``[4, keys, heads]``, the second operand of the value products.

    A warp has one of the four blocks of columns.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[
            [0, 1, 0],
            [0, 8, 0],
            [0, 16, 0],
            *([[0, 32, 0]] if tile > 32 else []),
            *([[0, 0, 8]] if rows > 8 else []),
        ],
        lane_bases=[[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, tile, rows],
    )


@gluon.constexpr_function
def result_layout(e4m3: bool, rows: int) -> gl.DistributedLinearLayout:
    """The layout of the output ``[heads, 512]``, in the registers where the products left it.

    Neighbouring columns come first, since they are written together.
    """
    more, lanes = ([0, 8], (16, 32, 64)) if e4m3 else ([0, 64], (8, 16, 32))
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], more, [1, 0], *([[8, 0]] if rows > 8 else [])],
        lane_bases=[[2, 0], [4, 0], *([0, at] for at in lanes)],
        warp_bases=[[0, 128], [0, 256]],
        block_bases=[],
        shape=[rows, 512],
    )


@gluon.jit
def key_operand(words, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Words of 16-bit keys ``[keys, N]`` as the second operand ``[columns, keys]``.

    Word 16 a + 4 c + j belongs to thread c of the four that share a key.
    """
    KEYS: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    f0, f1 = gl.inline_asm_elementwise(
        SPLIT_HALVES, "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.join(f0, f1).to(DTYPE, bitcast=True)
    x = gl.permute(gl.reshape(x, [KEYS, N // 16, 4, 2, 2, 2]), (1, 3, 4, 2, 5, 0))
    x = gl.reshape(x, [N * 2, KEYS])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def query_order(x, E4M3: gl.constexpr):
    """Queries ``[heads, columns]``, with columns in the order of the keys' operands."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    if E4M3:
        x = gl.permute(gl.reshape(x, [ROWS, COLUMNS // 64, 4, 4, 2, 2]), (0, 1, 3, 4, 2, 5))
    else:
        x = gl.permute(gl.reshape(x, [ROWS, COLUMNS // 32, 4, 2, 2, 2]), (0, 1, 3, 4, 2, 5))
    return gl.reshape(x, [ROWS, COLUMNS])


@gluon.jit
def value_operand(words, E4M3: gl.constexpr, DTYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Words of values ``[keys, N]`` as the first operand ``[4, 128, keys]``, in blocks of columns.

    :func:`natural_order` undoes the order of columns in a block.
    """
    KEYS: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    x = gl.permute(gl.reshape(words, [KEYS // 8, 4, 2, N]), (0, 1, 3, 2))
    first, second = gl.split(x)
    if E4M3:
        # Dimensions: eights of keys; thread of four; block; thread of eight; word; key of the pair;
        # high and low bit of the column.
        x = gl.reshape(woven_e4m3(first, second), [KEYS // 8, 4, 4, 8, 4, 2, 2, 2])
        x = gl.permute(x, (2, 4, 6, 7, 3, 0, 1, 5))
    else:
        a0, b0, a1, b1 = gl.inline_asm_elementwise(
            _WOVEN_PAIRS, "=h,=h,=h,=h,r,r", [first, second],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        x = gl.join(gl.join(a0, b0), gl.join(a1, b1)).to(DTYPE, bitcast=True)
        # The second 16 bytes of each thread come after the first 16 bytes of all threads.
        x = gl.reshape(x, [KEYS // 8, 4, 4, 2, 8, 4, 2, 2])
        x = gl.permute(x, (2, 3, 5, 7, 4, 0, 1, 6))
    x = gl.reshape(x, [4, 128, KEYS])
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def natural_order(o, E4M3: gl.constexpr):
    """The output ``[4, 128, heads]`` as ``[heads, 512]``, with columns in natural order.

    Each of eight threads has 16 columns of a block; with 16-bit rows these are twice eight.
    """
    ROWS: gl.constexpr = o.shape[2]
    if E4M3:
        x = gl.permute(gl.reshape(o, [4, 16, 8, ROWS]), (3, 0, 2, 1))
    else:
        x = gl.permute(gl.reshape(o, [4, 2, 8, 8, ROWS]), (4, 0, 1, 3, 2))
    LAYOUT: gl.constexpr = result_layout(E4M3, ROWS)
    return gl.convert_layout(gl.reshape(x, [ROWS, 512]), LAYOUT, assert_trivial=True)


@gluon.jit
def quarters(x):
    """Split ``[K, 4 N]`` into four ``[K, N]``; every element stays in its thread."""
    N: gl.constexpr = x.shape[1] // 4
    x = gl.permute(gl.reshape(x, [x.shape[0], 2, 2, N]), (0, 3, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3
