"""Segments: where a row's keys may be cut between programs, as a function of position alone.

A row's result must not depend on what else is in the batch, so the places where its keys can be cut
follow from the position of a key and nothing else: every 512 tokens up to 8k, every 1024 up to 64k,
then 32 per octave. Long enough that the states of segments cost little beside their keys, short
enough that one request fills a GPU. The Triton twins are in :mod:`builders.kernels`.
"""

from __future__ import annotations

SHORT_SEGMENT = 512
"""Tokens of a segment below ``SHORT_LIMIT``."""
SHORT_LIMIT = 8192
LONG_SEGMENT = 1024
"""Tokens of a segment from there to ``LONG_LIMIT``, and doubled from one octave to the next."""
LONG_LIMIT = 65536

_SHORT = SHORT_LIMIT // SHORT_SEGMENT
_LONG = (LONG_LIMIT - SHORT_LIMIT) // LONG_SEGMENT
_PER_OCTAVE = LONG_LIMIT // (2 * LONG_SEGMENT)


def segment_of(position: int) -> int:
    """The segment that holds a position."""
    if position < SHORT_LIMIT:
        return position // SHORT_SEGMENT
    if position < LONG_LIMIT:
        return _SHORT + (position - SHORT_LIMIT) // LONG_SEGMENT
    octave = (position // LONG_LIMIT).bit_length() - 1
    first = _SHORT + _LONG + _PER_OCTAVE * octave
    return first + (position - (LONG_LIMIT << octave)) // (2 * LONG_SEGMENT << octave)


def segment_start(segment: int) -> int:
    """First position of a segment."""
    if segment <= _SHORT:
        return segment * SHORT_SEGMENT
    if segment <= _SHORT + _LONG:
        return SHORT_LIMIT + (segment - _SHORT) * LONG_SEGMENT
    octave, rest = divmod(segment - _SHORT - _LONG, _PER_OCTAVE)
    return (LONG_LIMIT << octave) + rest * (2 * LONG_SEGMENT << octave)


def max_segments(length: int, window: int | None = None) -> int:
    """Most segments that a row of up to ``length`` keys touches, ``window`` of them visible."""
    whole = segment_of(max(length, 1) - 1) + 1
    if window is None:
        return whole
    # A window cuts at most one segment on either side.
    return min(whole, -(-window // SHORT_SEGMENT) + 2)
