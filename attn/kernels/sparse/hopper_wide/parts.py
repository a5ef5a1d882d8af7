"""The pieces of work of the wide Hopper sparse kernel: which tokens, heads and listed keys."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.sparse.structures import Piece

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
def _share(topk, division, KEYS: gl.constexpr):
    """The program's share where all programs walk equally many tiles.

    The programs of one tile of heads divide the tokens. The first ``dealt`` tokens are divided by
    tiles: a token for each program, plus the tokens that are left over when the rest is divided
    evenly. The tokens after them are dealt out whole. So a share is at least as long as a list, and
    a list lies in two programs at most. Every list counts as full.

    Returns:
        The program's tiles ``[begin, end)`` of the tokens divided by tiles; ``dealt``; the number
        of programs of a tile of heads, which is at most the number of tokens; and the number of
        this program among them.
    """
    TILE: gl.constexpr = 2 * KEYS
    tokens = division.tokens
    groups = gl.minimum(gl.num_programs(0) // division.HEAD_TILES, tokens)
    group = gl.program_id(0) // division.HEAD_TILES
    dealt = groups + tokens % groups
    tiles = dealt * ((topk + (TILE - 1)) // TILE)
    return group * tiles // groups, (group + 1) * tiles // groups, dealt, groups, group


@gluon.jit
def works_of(topk, division, KEYS: gl.constexpr):
    """The program's pieces of work, as arguments of :func:`work_at`: first, end, step."""
    if division.BALANCED:
        TILE: gl.constexpr = 2 * KEYS
        begin, end, dealt, groups, group = _share(topk, division, KEYS)
        each = (topk + (TILE - 1)) // TILE
        count = (end - 1) // each - begin // each + 1
        count += (division.tokens - dealt) // groups
        first = 0
        last = gl.where(group < groups, count, 0)
        step = 1
    else:
        first = gl.program_id(0)
        last = division.pieces()
        step = gl.num_programs(0)
    return first, last, step


@gluon.jit
def work_at(work, lists, division, KEYS: gl.constexpr):
    """A piece of work, as :class:`attn.kernels.sparse.structures.Piece`.

    A tile is two blocks of KEYS keys. With BALANCED, ``work`` counts the program's own pieces.

    Head tiles of a token are neighbours in the grid, so that they find its rows in the L2 cache.
    """
    TILE: gl.constexpr = 2 * KEYS
    if division.BALANCED:
        begin, end, dealt, groups, group = _share(lists.topk, division, KEYS)
        each = (lists.topk + (TILE - 1)) // TILE
        token = begin // each + work
        low = gl.maximum(begin - token * each, 0)
        high = gl.minimum(end - token * each, each)
        if high <= 0:
            # The program has passed the tokens that are divided by tiles: this one is dealt whole.
            token = dealt + (token - (end - 1) // each - 1) * groups + group
            high = each
        head_tile = gl.program_id(0) % division.HEAD_TILES
        part = 0
    else:
        token = work // (division.HEAD_TILES * division.PARTS)
        head_tile = work % division.HEAD_TILES
        part = (work // division.HEAD_TILES) % division.PARTS
        low = part * (division.SEGMENT // TILE)
        high = low + division.SEGMENT // TILE
    length = lists.topk
    if lists.HAS_LENS:
        length = gl.minimum(gl.load(lists.lens_ptr + token), lists.topk)
    filled = (length + (TILE - 1)) // TILE
    meets = 0
    if division.BALANCED:
        # No share is shorter than a list, so no list is cut twice.
        meets = gl.where((low > 0) & (filled > low), group, 0)
        meets = gl.where((high < each) & (filled > high), group + 1, meets)
    return Piece(
        token=token, head_tile=head_tile, part=part, length=length, low=low,
        high=gl.minimum(high, filled), meets=meets,
    )  # fmt: skip


@gluon.jit
def entries_at(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on; -1 from ``length`` on.

    Callers hide ``first`` from the compiler (:func:`attn.kernels.lang.opaque.opaque_int`), which
    would compute a thread's place in a list early and spill it.
    """
    at = first + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def listed(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on, which is hidden from the compiler; -1 from
    ``length`` on.
    """
    return entries_at(ids_ptr, first + opaque_zero(), length, KEYS, LAYOUT)


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
