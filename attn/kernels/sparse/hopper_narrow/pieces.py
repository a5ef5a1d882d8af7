"""Pieces of work of the narrow Hopper sparse kernel: a token, a tile of heads, a part of its list.

A program takes every ``programs``-th piece. Functions here may be asked about a piece behind the
last one, since a program loads ahead what its next piece begins with: such a piece has no entries.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def entries(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on; -1 from ``length`` on.

    :func:`attn.kernels.sparse.hopper_wide.parts.listed` does the same, but hides the addresses from
    the compiler. Here they may stay in registers: nothing is spilled for them.
    """
    at = first + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def place_of(work, division):
    """The token, the tile of heads and the part of the list of a piece of work.

    Tiles of heads of a token are neighbours, so that they find its rows in the L2 cache.
    """
    token = work // (division.HEAD_TILES * division.PARTS)
    part = work // division.HEAD_TILES % division.PARTS
    return token, work % division.HEAD_TILES, part


@gluon.jit
def start_of(work, lists, division):
    """Pointer to the first entry of the part of the list."""
    token, _, part = place_of(work, division)
    return lists.of(token) + part * division.SEGMENT


@gluon.jit
def _room_of(work, lists, division):
    """The number of entries that the part has room for, whether they count or not."""
    _, _, part = place_of(work, division)
    room = gl.minimum(lists.topk - part * division.SEGMENT, division.SEGMENT)
    return gl.where(work < division.pieces(), room, 0)


@gluon.jit
def first_entries(
    work, first, lists, division, KEYS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """KEYS entries of the part from ``first`` on, whether they count or not; -1 behind its end.

    They are asked for before it is known how many entries count.
    """
    room = _room_of(work, lists, division)
    return entries(start_of(work, lists, division), first, room, KEYS, LAYOUT)


@gluon.jit
def count_of(work, lists, division):
    """The number of entries of the part that count; none if it is 0 or less."""
    count = _room_of(work, lists, division)
    if lists.HAS_LENS:
        token, _, part = place_of(work, division)
        there = work < division.pieces()
        length = gl.load(lists.lens_ptr + token, mask=there, other=0)
        count = gl.minimum(count, length - part * division.SEGMENT)
    return count


@gluon.jit
def tiles_of(count, TILE: gl.constexpr):
    """Tiles of a piece of work with ``count`` entries: as many for either consumer, at least one.

    So a stage belongs to the same consumer in all pieces. A tile may be without entries, which
    changes no bit of a state.
    """
    return gl.maximum((count + (2 * TILE - 1)) // (2 * TILE), 1) * 2
