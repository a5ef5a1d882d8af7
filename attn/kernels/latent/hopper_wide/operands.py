"""Operands of the wide Hopper latent kernel over e4m3: bytes become fp16 in registers.

A product takes its first operand from registers or from shared memory, and its second from shared
memory. So rows of the cache are first operands: as keys ``[keys, columns]``, as values
``[columns, keys]``. Threads load words of four bytes and convert them to the elements that the
product wants them to have. No conversion of layouts here moves data, and ``assert_trivial`` checks
that.

**Orders.** A product gives a thread pairs of elements where the cache has four bytes side by side.
Any order of columns serves a product over columns, if queries have it too
(:func:`query_column`). Keys have an order of their own,
too: in each eight of them bits 0 and 2 of the number are exchanged, so that words that are read
together lie in different banks (:func:`natural_keys`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.packed import SPLIT_E4M3, woven_e4m3
from attn.kernels.latent.hopper_wide.parts import BLOCK, HALF

KEY_STEP = gl.constexpr(16)
"""Words of a key that are converted at a time: 64 columns."""
VALUE_STEP = gl.constexpr(16)
"""Keys whose values are converted at a time."""


@gluon.constexpr_function
def key_words() -> gl.DistributedLinearLayout:
    """The layout of ``[BLOCK, KEY_STEP]`` words of keys: four threads have 64 bytes of a key.

    Eight threads read at a time: four of a key, and four of the key four rows further on, whose
    words TMA's swizzle put into other banks.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]],
        lane_bases=[[0, 4], [0, 8], [4, 0], [2, 0], [1, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[BLOCK.value, KEY_STEP.value],
    )


@gluon.constexpr_function
def value_words() -> gl.DistributedLinearLayout:
    """The layout of ``[VALUE_STEP, HALF / 4]`` words of values: a warp has 64 columns of all keys.

    A thread has eight columns of four keys. Sixteen threads read at a time, of every other key.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [8, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[VALUE_STEP.value, HALF.value // 4],
    )


@gluon.jit
def query_column(slot):
    """The columns, of 64, that stand at ``slot`` in the order of the keys' operands."""
    column = 16 * (slot % 8 // 2) + 4 * (slot // 16) + 2 * (slot // 8 % 2) + slot % 2
    # Two neighbouring columns remain neighbours, which are loaded together.
    return gl.multiple_of(gl.max_contiguous(column, 2), 2)


@gluon.jit
def natural_keys(x):
    """``[BLOCK, N]`` with keys in their order, of keys in the order of products; or the reverse."""
    N: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(x, [BLOCK // 8, 2, 2, 2, N]), (0, 3, 2, 1, 4))
    return gl.reshape(x, [BLOCK, N])


@gluon.jit
def key_of(slot):
    """The number in a block of the keys whose numbers in the order of products are ``slot``."""
    return (slot & 58) | ((slot & 1) << 2) | ((slot >> 2) & 1)


@gluon.jit
def key_operand(words, OPERAND: gl.constexpr):
    """Words of keys ``[BLOCK, N]`` as the first operand ``[BLOCK, 4 N]`` of a product, in fp16."""
    N: gl.constexpr = words.shape[1]
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        SPLIT_E4M3, "=h,=h,=h,=h,r", [natural_keys(words)],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.join(gl.join(f0, f1), gl.join(f2, f3))
    x = gl.permute(gl.reshape(x, [BLOCK, N // 16, 4, 4, 2, 2]), (0, 1, 3, 5, 2, 4))
    return gl.convert_layout(gl.reshape(x, [BLOCK, N * 4]), OPERAND, assert_trivial=True)


@gluon.jit
def value_operand(words, OPERAND: gl.constexpr):
    """Words of values ``[keys, HALF / 4]`` as the first operand ``[HALF, keys]``, in fp16.

    :func:`natural_columns` undoes the order of columns.
    """
    KEYS: gl.constexpr = words.shape[0]
    x = gl.permute(gl.reshape(words, [KEYS // 8, 4, 2, HALF // 4]), (0, 1, 3, 2))
    first, second = gl.split(x)
    # Dimensions: eights of keys; thread of four; warp; thread of eight; word; key of the pair; high
    # and low bit of the column in its word.
    x = gl.reshape(woven_e4m3(first, second), [KEYS // 8, 4, 4, 8, 2, 2, 2, 2])
    x = gl.permute(x, (6, 7, 2, 4, 3, 0, 1, 5))
    return gl.convert_layout(gl.reshape(x, [HALF, KEYS]), OPERAND, assert_trivial=True)


@gluon.jit
def natural_columns(o):
    """The output ``[HALF, rows]`` of products as ``[rows, HALF]``, with columns in their order."""
    ROWS: gl.constexpr = o.shape[1]
    x = gl.permute(gl.reshape(o, [4, 4, 2, 8, ROWS]), (4, 1, 3, 2, 0))
    return gl.reshape(x, [ROWS, HALF])
