"""What the parts of the wide Hopper sparse kernel share: sizes, list entries, small functions."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.opaque import opaque_zero

THREADS = tl.constexpr(128)
"""Threads of the producer; each arrives at barriers by itself."""
UNIT = tl.constexpr(16)
"""Bytes that a thread copies at a time; offsets of rows are in units of it."""
BLOCK = tl.constexpr(64)
"""Heads in a tile of heads."""
HALF = tl.constexpr(256)
"""Columns of the output that one consumer warp group computes."""
_LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
# ``ftz`` turns results below 2^-126 into zero and saves the steps that would keep them.
_EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")


@gluon.jit
def log2(x):
    """Logarithm to base 2, exact to about 22 bits; -inf for zero."""
    return gl.inline_asm_elementwise(_LOG2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2 to the power of ``x``, exact to about 22 bits; exactly 1 for 0."""
    return gl.inline_asm_elementwise(_EXP2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def listed(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on; -1 from ``length`` on."""
    # Hidden from the compiler, which would compute a thread's place in a list early and spill it.
    at = first + opaque_zero() + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def ids_of(entries, TOKENS: gl.constexpr):
    """The listed rows of entries of a list; -1 where an entry lists none.

    In an entry of a joint list of several TOKENS, the TOKENS highest bits say which of them list
    the row. They are never all set in an entry of -1, since no row has the number that is left.
    """
    ids = entries
    if TOKENS > 1:
        ids = gl.where(entries == -1, -1, entries & ((1 << (32 - TOKENS)) - 1))
    return ids


@gluon.jit
def lists_row(entries, TOKENS: gl.constexpr):
    """Whether entries of a list list a row."""
    if TOKENS > 1:
        there = entries != -1
    else:
        there = entries >= 0
    return there


@gluon.jit
def gaps_of(entries, TOKENS: gl.constexpr):
    """What consumers are told of entries, as :class:`attn.kernels.sparse.structures.WideRing`
    says.
    """
    if TOKENS > 1:
        members = gl.where(entries == -1, 0, entries >> (32 - TOKENS))
    else:
        members = gl.where(entries >= 0, 0.0, float("-inf"))
    return members


@gluon.jit
def units_at(token, head, per_token, per_head):
    """Offsets of a token's heads in 16-bit elements; strides are in units of 16 bytes."""
    return (token.to(gl.int64) * wide(per_token) + head.to(gl.int64) * wide(per_head)) * (UNIT // 2)
