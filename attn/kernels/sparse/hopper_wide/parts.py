"""Which listed keys a piece of work of sparse latent attention is of, as its warps see them."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.opaque import opaque_zero

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
def _share(total, topk, KEYS: gl.constexpr, HEAD_TILES: gl.constexpr):
    """The program's share where programs walk equally many tiles: its tiles ``[begin, end)`` of the
    tokens that are dealt by tiles, each of which counts as many as a full list has; how many tokens
    these are, the first ones; programs of each tile of heads, of which there are no more than
    tokens; and which of them this is.

    Of whole tokens each program has as many, but for those that are dealt by tiles: a token for
    each program, and those that are left over. So a list lies in two programs at most.
    """
    TILE: gl.constexpr = 2 * KEYS
    tokens = total // HEAD_TILES
    groups = gl.minimum(gl.num_programs(0) // HEAD_TILES, tokens)
    group = gl.program_id(0) // HEAD_TILES
    dealt = groups + tokens % groups
    tiles = dealt * ((topk + (TILE - 1)) // TILE)
    return group * tiles // groups, (group + 1) * tiles // groups, dealt, groups, group


@gluon.jit
def works_of(total, topk, KEYS: gl.constexpr, HEAD_TILES: gl.constexpr, BALANCED: gl.constexpr):
    """Numbers of the pieces of work that the program takes, for :func:`work_at`: first one, end,
    distance.
    """
    if BALANCED:
        TILE: gl.constexpr = 2 * KEYS
        begin, end, dealt, groups, group = _share(total, topk, KEYS, HEAD_TILES)
        each = (topk + (TILE - 1)) // TILE
        count = (end - 1) // each - begin // each + 1 + (total // HEAD_TILES - dealt) // groups
        first = 0
        last = gl.where(group < groups, count, 0)
        step = 1
    else:
        first = gl.program_id(0)
        last = total
        step = gl.num_programs(0)
    return first, last, step


@gluon.jit
def work_at(
    work, total, lens_ptr, topk, KEYS: gl.constexpr, HEAD_TILES: gl.constexpr,
    SEGMENT: gl.constexpr, PARTS: gl.constexpr, BALANCED: gl.constexpr, HAS_LENS: gl.constexpr,
):  # fmt: skip
    """A piece of work: token, its tile of heads, its part of the list, entries of the list that
    count, tiles of keys ``[low, high)``, none if ``high <= low``, and where another program has the
    rest of these: a number from 1 on of the place where both shares meet, 0 if none has. A tile is
    two blocks of KEYS. BALANCED: ``work`` counts the program's own pieces.

    Tiles of a token's heads are neighbours, so that they find its rows in the L2 cache.
    """
    TILE: gl.constexpr = 2 * KEYS
    if BALANCED:
        begin, end, dealt, groups, group = _share(total, topk, KEYS, HEAD_TILES)
        each = (topk + (TILE - 1)) // TILE
        token = begin // each + work
        low = gl.maximum(begin - token * each, 0)
        high = gl.minimum(end - token * each, each)
        if high <= 0:
            # Behind those that are dealt by tiles.
            token = dealt + (token - (end - 1) // each - 1) * groups + group
            high = each
        head_tile = gl.program_id(0) % HEAD_TILES
        part = 0
    else:
        token = work // (HEAD_TILES * PARTS)
        head_tile = work % HEAD_TILES
        part = (work // HEAD_TILES) % PARTS
        low = part * (SEGMENT // TILE)
        high = low + SEGMENT // TILE
    length = topk
    if HAS_LENS:
        length = gl.minimum(gl.load(lens_ptr + token), topk)
    filled = (length + (TILE - 1)) // TILE
    meets = 0
    if BALANCED:
        # No share is shorter than a list: no list is cut twice.
        meets = gl.where((low > 0) & (filled > low), group, 0)
        meets = gl.where((high < each) & (filled > high), group + 1, meets)
    return token, head_tile, part, length, low, gl.minimum(high, filled), meets


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
