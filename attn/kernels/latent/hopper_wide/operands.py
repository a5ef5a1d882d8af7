"""Values of the wide Hopper latent kernel over e4m3: bytes become fp16 in registers.

Values ``[columns, keys]`` are the first operand of products, which may come from registers. Threads
load words of four bytes and convert them to the elements that the product wants them to have. No
conversion of layouts here moves data, and ``assert_trivial`` checks that.

A product gives a thread pairs of elements where the cache has four bytes side by side. So columns
have an order of their own until the output is written (:func:`natural_columns`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.packed import WOVEN_NUMBERS, woven_e4m3
from attn.kernels.latent.hopper_wide.parts import HALF

VALUE_STEP = gl.constexpr(16)
"""Keys whose values are converted at a time."""


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
def value_operand(words, OPERAND: gl.constexpr):
    """Words of values ``[keys, HALF / 4]`` as the first operand ``[HALF, keys]``, in fp16.

    :func:`natural_columns` undoes the order of columns. NaN becomes a number: no request wrote the
    slots past its end, where weights are zero, and zero times NaN is NaN. A key that has NaN has
    NaN as its scores, so that NaN does not get lost.
    """
    KEYS: gl.constexpr = words.shape[0]
    x = gl.permute(gl.reshape(words, [KEYS // 8, 4, 2, HALF // 4]), (0, 1, 3, 2))
    first, second = gl.split(x)
    # Dimensions: eights of keys; thread of four; warp; thread of eight; word; key of the pair; high
    # and low bit of the column in its word.
    x = gl.reshape(woven_e4m3(first, second, WOVEN_NUMBERS), [KEYS // 8, 4, 4, 8, 2, 2, 2, 2])
    x = gl.permute(x, (6, 7, 2, 4, 3, 0, 1, 5))
    return gl.convert_layout(gl.reshape(x, [HALF, KEYS]), OPERAND, assert_trivial=True)


@gluon.jit
def natural_columns(o):
    """The output ``[HALF, rows]`` of products as ``[rows, HALF]``, with columns in their order."""
    ROWS: gl.constexpr = o.shape[1]
    x = gl.permute(gl.reshape(o, [4, 4, 2, 8, ROWS]), (4, 1, 3, 2, 0))
    return gl.reshape(x, [ROWS, HALF])
