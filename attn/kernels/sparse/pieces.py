"""The pieces of work of the Hopper sparse kernels: which tokens, heads and listed keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.sparse.structures import Piece


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
    """The program's pieces of work, as arguments of :func:`place_at`: first, end, step."""
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
def place_at(work, lists, division, KEYS: gl.constexpr):
    """A piece of work as if its list were full: :class:`attn.kernels.sparse.structures.Piece`.

    A tile is KEYS keys for each of two consumers. With BALANCED, ``work`` counts the program's own
    pieces.

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
    meets = 0
    if division.BALANCED:
        # No share is shorter than a list, so no list is cut twice.
        meets = gl.where(low > 0, group, 0)
        meets = gl.where(high < each, group + 1, meets)
    return Piece(
        token=token, head_tile=head_tile, part=part, length=lists.topk, low=low, high=high,
        meets=meets,
    )  # fmt: skip


@gluon.jit
def filled(piece, length, lists, KEYS: gl.constexpr):
    """The piece with what its list has: ``length`` entries, as :meth:`Lists.length_of` gives it."""
    TILE: gl.constexpr = 2 * KEYS
    length = gl.minimum(length, lists.topk)
    tiles = (length + (TILE - 1)) // TILE
    # Nobody is met if all tiles are on one side of the cut.
    cut = gl.where(piece.low > 0, piece.low, piece.high)
    return Piece(
        token=piece.token, head_tile=piece.head_tile, part=piece.part, length=length,
        low=piece.low, high=gl.minimum(piece.high, tiles),
        meets=gl.where(tiles > cut, piece.meets, 0),
    )  # fmt: skip


@gluon.jit
def work_at(work, lists, division, KEYS: gl.constexpr):
    """A piece of work, whose length is waited for: :func:`place_at` and :func:`filled` in one."""
    piece = place_at(work, lists, division, KEYS)
    return filled(piece, lists.length_of(piece.token), lists, KEYS)
