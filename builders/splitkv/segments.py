"""Segments: where a request's keys may be cut between programs, as a function of position alone.

A request's result must not depend on the rest of the batch. So the places where its keys can be cut
follow from the position of a key and from nothing else. Up to 128k tokens a segment has 512 tokens;
beyond, every octave of positions has 128 segments. A segment is long enough that its state costs
little beside its keys, and short enough that one short request fills a GPU.

The states of up to 16 segments, a segment group, are folded into one;
then the states of segment groups are folded. So several programs fold side by side, and few steps
remain after the last key. Tiles of many query rows have longer segments, and fewer of them in a
segment group, since a program that starts within a segment group stores a state for each segment up
to its end. Both lengths follow from numbers that never change between steps.

The Triton twins of these functions are in :mod:`builders.splitkv.device.segments`.
"""

from __future__ import annotations

SEGMENT = 512
"""Tokens of a segment below ``LIMIT``. Segments from ``LIMIT`` to ``2 * LIMIT`` have twice as many,
and the number doubles with every octave."""
LIMIT = 131072
"""First position, in tokens, of a segment that is longer than ``SEGMENT``."""
PER_OCTAVE = LIMIT // (2 * SEGMENT)
"""Segments of ``[LIMIT, 2 * LIMIT)``, and of every octave after it."""
SEGMENTS_PER_GROUP = 16
"""Most segments of a segment group."""
GROUP_KEYS = 16384
"""Most tokens of a segment group below ``LIMIT``, as long as that makes at most
``MOST_SEGMENT_GROUPS`` segment groups."""
MOST_SEGMENT_GROUPS = 8
"""Segment groups of the longest request from which on they are made longer, up to
``SEGMENTS_PER_GROUP`` segments: scratch has a state slot for each of them."""


def segment_of(position: int) -> int:
    """The number of the segment that holds a position, both counted from 0."""
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
    """Most segments that a request's visible keys touch.

    Args:
        length: most keys of the request.
        window: consecutive keys of them that are visible; None for all.
    """
    whole = segment_of(max(length, 1) - 1) + 1
    if window is None:
        return whole
    # A window cuts at most one segment on either side.
    return min(whole, -(-window // SEGMENT) + 2)


def segments_per_group(max_kv_len: int, scale: int) -> int:
    """Segments of a segment group: with n of them, group b begins with segment ``b * n``.

    Args:
        max_kv_len: most keys of any request, in tokens.
        scale: segments of the tile are this many times as long as this module's segments.
    """
    longest = max_segments(-(-max_kv_len // scale))
    segment_group = max(1, min(SEGMENTS_PER_GROUP, GROUP_KEYS // (SEGMENT * scale)))
    while segment_group < SEGMENTS_PER_GROUP and longest > MOST_SEGMENT_GROUPS * segment_group:
        segment_group *= 2
    return segment_group
