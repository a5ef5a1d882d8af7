"""Segments: where a row's keys may be cut between programs, as a function of position alone.

A row's result must not depend on what else is in the batch, so the places where its keys can be cut
follow from the position of a key and nothing else: every 512 tokens up to 128k, then 128 per
octave. Long enough that the states of segments cost little beside their keys, short enough that one
short request fills a GPU. States are folded in bundles of 16, then those of bundles: side by side,
and with few steps after the last key. Tiles of many rows have longer segments, and fewer of them in
a bundle: whoever starts within a bundle stores a state for each segment up to its end. Both follow
from what never changes between steps. The Triton twins are in
:mod:`builders.splitkv.device.segments`.
"""

from __future__ import annotations

SEGMENT = 512
"""Tokens of a segment below ``LIMIT``, and doubled from one octave to the next."""
LIMIT = 131072
PER_OCTAVE = LIMIT // (2 * SEGMENT)
"""Segments of ``[LIMIT, 2 * LIMIT)``, and of every octave after it."""
BUNDLE = 16
"""Most segments of a bundle."""
BUNDLE_KEYS = 16384
"""Most tokens of a bundle, below ``LIMIT``, where rows have no more than ``MOST_BUNDLES`` then."""
MOST_BUNDLES = 8
"""Longer rows have longer bundles, up to ``BUNDLE`` segments: scratch has states for them all."""


def segment_of(position: int) -> int:
    """The segment that holds a position."""
    if position < LIMIT:
        return position // SEGMENT
    octave = (position // LIMIT).bit_length() - 1
    first = LIMIT // SEGMENT + PER_OCTAVE * octave
    return first + (position - (LIMIT << octave)) // (2 * SEGMENT << octave)


def segment_start(segment: int) -> int:
    """First position of a segment."""
    beyond = segment - LIMIT // SEGMENT
    if beyond <= 0:
        return segment * SEGMENT
    octave, rest = divmod(beyond, PER_OCTAVE)
    return (LIMIT << octave) + rest * (2 * SEGMENT << octave)


def max_segments(length: int, window: int | None = None) -> int:
    """Most segments that a row of up to ``length`` keys touches, ``window`` of them visible."""
    whole = segment_of(max(length, 1) - 1) + 1
    if window is None:
        return whole
    # A window cuts at most one segment on either side.
    return min(whole, -(-window // SEGMENT) + 2)


def bundle_segments(max_kv_len: int, scale: int) -> int:
    """Segments of a bundle; bundle b begins with segment b times as many.

    Args:
        max_kv_len: of the longest row that there may be, in tokens.
        scale: segments are this many times as long.
    """
    longest = max_segments(-(-max_kv_len // scale))
    bundle = max(1, min(BUNDLE, BUNDLE_KEYS // (SEGMENT * scale)))
    while bundle < BUNDLE and longest > MOST_BUNDLES * bundle:
        bundle *= 2
    return bundle
