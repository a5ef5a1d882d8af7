"""Device functions for segments of keys, and for the keys that a query may see.

They are the Triton twins of :mod:`builders.splitkv.segments` and :mod:`builders.splitkv.stripe`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv import segments

_SEGMENT = tl.constexpr(segments.SEGMENT)
_LIMIT = tl.constexpr(segments.LIMIT)
_PER_OCTAVE = tl.constexpr(segments.PER_OCTAVE)
_SEGMENT_BITS = tl.constexpr(segments.SEGMENT.bit_length() - 1)
_LIMIT_BITS = tl.constexpr(segments.LIMIT.bit_length() - 1)
_OCTAVE_BITS = tl.constexpr(segments.PER_OCTAVE.bit_length() - 1)
"""The lengths are powers of two, and these are their exponents: the functions shift, since the
compiler does not know that it could replace a division."""


@triton.jit
def segment_of(position, DIVIDES: tl.constexpr = False):
    """The segment that holds a position, see :func:`builders.splitkv.segments.segment_of`.

    ``position`` is a scalar or a tensor of int32. DIVIDES replaces one shift by a division, for the
    Hopper split-KV kernel: there, with the shift, code of Triton 3.9's ptxas reads registers that
    it never wrote (64/8/64, window and sinks).
    """
    # The octave is floor(log2) of the number of whole limits, which is exact in fp32: its exponent.
    limits = (position >> _LIMIT_BITS).to(tl.float32)
    octave = tl.maximum((limits.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    far = _LIMIT // _SEGMENT + _PER_OCTAVE * octave
    if DIVIDES:
        far += (position - (_LIMIT << octave)) // ((2 * _SEGMENT) << octave)
    else:
        far += (position - (_LIMIT << octave)) >> (octave + (_SEGMENT_BITS + 1))
    return tl.where(position < _LIMIT, position >> _SEGMENT_BITS, far)


@triton.jit
def segment_start(segment):
    """First position of a segment, see :func:`builders.splitkv.segments.segment_start`.

    ``segment`` is a scalar or a tensor of int32.
    """
    beyond = tl.maximum(segment - _LIMIT // _SEGMENT, 0)
    octave = beyond >> _OCTAVE_BITS
    far = (_LIMIT << octave) + ((beyond & (_PER_OCTAVE - 1)) << (octave + (_SEGMENT_BITS + 1)))
    return tl.where(segment <= _LIMIT // _SEGMENT, segment * _SEGMENT, far)


@triton.jit
def local_len(length, dcp_size, dcp_rank, dcp_interleave):
    """How many of a request's first ``length`` tokens a rank keeps.

    Arguments are scalars or tensors of int32, see
    :meth:`builders.splitkv.stripe.Stripe.local_len`.
    """
    turn = dcp_interleave * dcp_size
    rest = length % turn - dcp_rank * dcp_interleave
    return length // turn * dcp_interleave + tl.minimum(tl.maximum(rest, 0), dcp_interleave)


@triton.jit
def local_position(position, dcp_size, dcp_rank, dcp_interleave):
    """The last of a rank's keys that a causal query at ``position`` may see; -1 when there is none.

    The key is counted among the rank's keys. A query may see a key of the rank if the key's number
    is at most this one.
    """
    return local_len(position + 1, dcp_size, dcp_rank, dcp_interleave) - 1


@triton.jit
def first_visible(
    first,
    last,
    window,
    chunk,
    lookback,
    ranges_ptr,
    num_ranges,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RANGES: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """First key position that any query in ``[first, last]`` may see.

    The queries see a WINDOW of ``window`` keys, or their CHUNK of ``chunk`` tokens and ``lookback``
    chunks before it. RANGES are ``num_ranges`` pairs of inclusive positions at ``ranges_ptr``,
    whose tokens see each other. CLAMP: a range is visible only as far back as the window.
    """
    start = first * 0
    if CHUNK:
        start = (first // chunk - lookback) * chunk
    elif WINDOW:
        start = first - window + 1
    start = tl.maximum(start, 0)
    if RANGES:
        for i in range(num_ranges):
            low = tl.load(ranges_ptr + 2 * i)
            high = tl.load(ranges_ptr + 2 * i + 1)
            meets = (low < high) & (low <= last) & (high >= first)
            if CLAMP:
                # Keys before the window may be gone from the cache.
                low = tl.maximum(low, first - window + 1)
            start = tl.where(meets, tl.minimum(start, low), start)
    return start
