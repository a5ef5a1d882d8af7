"""What the narrow Hopper sparse kernel asks of a :class:`attn.kernels.sparse.structures.Piece`.

A tile of the piece is a pair of the kernel's tiles of KEYS keys, one for each consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def entries(ids_ptr, first, length, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of a list from ``first`` on; -1 from ``length`` on.

    :func:`attn.kernels.sparse.hopper_wide.parts.listed` does the same, but hides the addresses from
    the compiler. The producer keeps them in registers; it would spill others if it did not.
    """
    at = first + gl.arange(0, KEYS, layout=LAYOUT)
    return gl.load(ids_ptr + at, mask=at < length, other=-1)


@gluon.jit
def start_of(piece, lists, KEYS: gl.constexpr):
    """Pointer to the first entry of the piece."""
    return lists.of(piece.token) + piece.low * (2 * KEYS)


@gluon.jit
def first_entries(piece, first, lists, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """KEYS entries of the piece from ``first`` on, in its first tile, whether they count or not.

    They are asked for before it is known how many entries count. Behind the list they are -1.
    """
    room = lists.topk - piece.low * (2 * KEYS)
    return entries(start_of(piece, lists, KEYS), first, room, KEYS, LAYOUT)


@gluon.jit
def count_of(piece, KEYS: gl.constexpr):
    """The number of entries of the piece that count; none if it is 0 or less."""
    return gl.minimum(piece.length, piece.high * (2 * KEYS)) - piece.low * (2 * KEYS)


@gluon.jit
def tiles_of(piece):
    """The kernel's tiles of KEYS keys of the piece: as many for either consumer, at least one.

    So a stage belongs to the same consumer in all pieces. A tile may be without entries, which
    changes no bit of a state.
    """
    return gl.maximum(piece.high - piece.low, 1) * 2
