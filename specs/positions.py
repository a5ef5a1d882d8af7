"""The bound on token positions, and windows, chunks and ranges cut to it.

Kernels add positions, windows and chunks in 32 bits, where a sum past 2^31 - 1 turns negative and
silently gives a wrong mask. Positions therefore end at :data:`MOST_POSITIONS`, which leaves one bit
of head-room. The builder of a step and the impl of a layer cut windows, chunks and ranges with the
functions of this module before a kernel gets them. Cutting changes no mask: as no position exceeds
``MOST_POSITIONS - 1``, a window of ``MOST_POSITIONS`` keys sees as much as any larger window.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_POSITIONS = 1 << 30
"""Number of positions of a request: they go from 0 to ``MOST_POSITIONS - 1``. The sum of a position
and a cut window is at most 2^31 - 1, their difference at least -2^31."""

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

    All positions lie in ``MOST_POSITIONS / size`` chunks, rounded up, so a lookback of that many
    chunks sees all of them.

    Args:
        size: tokens of a chunk; None without chunks.
        lookback: visible chunks before the token's own chunk.

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
    """The part of a range of positions that lies below :data:`MOST_POSITIONS`.

    A range of at most one position lets no two keys see each other; it stays a range of at most
    one position.

    Args:
        low: first position.
        high: last position, included.
    """
    last = MOST_POSITIONS - 1
    return min(max(low, 0), last), min(max(high, 0), last)
