"""Which listed keys a piece of work of sparse latent attention is of, as all its warps see them."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = tl.constexpr(64)
"""Keys of a block, two of which are a tile; heads of a tile of heads too."""
TILE = tl.constexpr(128)
HALF = tl.constexpr(256)
"""Columns of the latent that a warp group multiplies values of."""


@gluon.jit
def work_at(
    work, lens_ptr, topk, HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr,
    HAS_LENS: gl.constexpr,
):  # fmt: skip
    """A piece of work: token, its tile of heads, its part of the list, entries of the list that
    count, and tiles of keys ``[low, high)``, none if ``high <= low``.

    Tiles of a token's heads are neighbours, so that they find its rows in the L2 cache.
    """
    token = work // (HEAD_TILES * PARTS)
    head_tile = work % HEAD_TILES
    part = (work // HEAD_TILES) % PARTS
    length = topk
    if HAS_LENS:
        length = gl.minimum(gl.load(lens_ptr + token), topk)
    low = part * (SEGMENT // TILE)
    high = gl.minimum(low + SEGMENT // TILE, (length + (TILE - 1)) // TILE)
    return token, head_tile, part, length, low, high
