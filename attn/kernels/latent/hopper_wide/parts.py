"""The parts of rows that a program of latent attention takes."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = tl.constexpr(64)
"""Keys of a block, two of which are a tile; rows of a tile too."""


@gluon.jit
def cut_at(r, mine, fields, begin):
    """A row's tiles ``[begin, end)``: cut anywhere, and counted from its first key.

    Returns ``end``; request, KV length, position of the first query; and the end of the tiles of
    which a query sees a key, at ``begin`` or before if there are none.
    """
    kv_len = gl.load(fields + 3)
    first = gl.load(fields + 4)
    end = gl.where(r == gl.load(mine + 2), gl.load(mine + 3), gl.load(fields + 6))
    seen = gl.minimum(first + gl.load(fields + 2), kv_len)
    high = gl.minimum(end, (seen + 2 * BLOCK - 1) // (2 * BLOCK))
    return end, gl.load(fields), kv_len, first, high
