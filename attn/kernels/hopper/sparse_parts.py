"""Which listed keys a piece of work of sparse latent attention is of, as its warps see them."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.hopper.decode_parts import opaque_zero
from attn.kernels.hopper.tiles import wide

THREADS = tl.constexpr(128)
"""Of the producer's warps, each of which arrives by itself."""
UNIT = tl.constexpr(16)
"""Bytes that a thread copies at a time, and that offsets of rows are in."""
BLOCK = tl.constexpr(64)
"""Heads of a tile of heads."""
HALF = tl.constexpr(256)
"""Columns of the latent that a warp group multiplies values of."""
_LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
# Without steps for results below 2^-126, which are zero here.
_EXP2 = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")


@gluon.jit
def log2(x):
    """To about 22 bits; -inf of zero."""
    return gl.inline_asm_elementwise(_LOG2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """Likewise; of 0 exactly 1."""
    return gl.inline_asm_elementwise(_EXP2, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def work_at(
    work, lens_ptr, topk, KEYS: gl.constexpr, HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr,
    PARTS: gl.constexpr, HAS_LENS: gl.constexpr,
):  # fmt: skip
    """A piece of work: token, its tile of heads, its part of the list, entries of the list that
    count, and tiles of keys ``[low, high)``, none if ``high <= low``. A tile is two blocks of KEYS.

    Tiles of a token's heads are neighbours, so that they find its rows in the L2 cache.
    """
    TILE: gl.constexpr = 2 * KEYS
    token = work // (HEAD_TILES * PARTS)
    head_tile = work % HEAD_TILES
    part = (work // HEAD_TILES) % PARTS
    length = topk
    if HAS_LENS:
        length = gl.minimum(gl.load(lens_ptr + token), topk)
    low = part * (SEGMENT // TILE)
    high = gl.minimum(low + SEGMENT // TILE, (length + (TILE - 1)) // TILE)
    return token, head_tile, part, length, low, high


@gluon.jit
def listed(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Entries of a list, -1 from its end on."""
    # Else each thread's place in a list is added once, and spilled until now.
    at = first + opaque_zero() + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def units_at(token, head, per_token, per_head):
    """Places of a token's heads, in elements of 16 bits, from distances in units of 16 bytes."""
    return (token.to(gl.int64) * wide(per_token) + head.to(gl.int64) * wide(per_head)) * (UNIT // 2)
