"""How far positions of tokens go, and windows, chunks and ranges cut to that.

Kernels add positions, windows and chunks in 32 bits, where a sum past 2^31 - 1 turns negative and a
mask comes out wrong without a word. So positions end at :data:`MOST_POSITIONS`, which leaves a bit
of head-room, and whatever a mask is made of is cut here, by the builder of a step and by the impl
of a layer alike, before it reaches a kernel. No mask changes by that: where no position is beyond
``MOST_POSITIONS - 1``, a window of ``MOST_POSITIONS`` keys sees what any larger one does.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_POSITIONS = 1 << 30
"""Positions of a request: 0 to one less than this. The sum of a position and a window, each cut to
it, is at most 2^31 - 1, their difference at least -2^31."""

TokenCount = Annotated[int, Field(gt=0, le=MOST_POSITIONS, strict=True)]
"""Tokens of a request, or of a step."""


def cut_window(window: int | None) -> int | None:
    """A window that masks as ``window`` does, and whose sums with positions fit 32 bits.

    Args:
        window: visible keys, the token's own included; None for all.

    Raises:
        ValueError: it is not positive.
    """
    if window is None:
        return None
    if window < 1:
        raise ValueError(f"window must be positive or None, got {window}")
    return min(window, MOST_POSITIONS)


def cut_chunks(size: int | None, lookback: int) -> tuple[int | None, int]:
    """Chunks that mask as those given do, and whose products fit 32 bits.

    All positions lie in ``MOST_POSITIONS / size`` chunks, rounded up: so many before the own one
    are all there are.

    Args:
        size: tokens of a chunk; None without chunks.
        lookback: visible chunks before the own one.

    Raises:
        ValueError: the size is not positive, or the lookback is negative.
    """
    if lookback < 0:
        raise ValueError(f"lookback must not be negative, got {lookback}")
    if size is None:
        return None, lookback
    if size < 1:
        raise ValueError(f"size must be positive or None, got {size}")
    size = min(size, MOST_POSITIONS)
    return size, min(lookback, -(-MOST_POSITIONS // size))


def cut_range(low: int, high: int) -> tuple[int, int]:
    """The part of a range of positions that requests can have.

    A range of one position, or of none, joins no two keys; it stays such a range.

    Args:
        low: first position.
        high: last position, included.
    """
    last = MOST_POSITIONS - 1
    return min(max(low, 0), last), min(max(high, 0), last)
