"""The kernels that list the largest logits of rows, each row by a program that holds all of it.

A row's floor is the logit that ``topk`` of its logits reach, and fewer exceed. It is searched by
counting how many logits reach three values at a time. Logits are compared as fp32, which costs half
of a comparison of integers, but the values of a round are computed as keys, int32 in the order of
the logits. Equal logits have equal keys, and neighbours differ by 1, so that the search ends.

The compiler keeps four neighbouring logits, and all multiples of four times the threads from them,
in a thread. Reshapes are written so that sums over what a thread holds stay in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST_KEY = tl.constexpr(-0x7F800001)
"""The key of minus infinity; NaN has none."""
_MOST_KEY = tl.constexpr(0x7F800000)
"""The key of infinity."""
_LARGE = tl.constexpr(1e15)
"""Larger logits are left out where a row's spread is estimated: their squares are too large."""
_FIRST = tl.constexpr(0.1)
"""Distance of the first three values, in standard deviations."""
_LOG = tl.constexpr(0.4073)
"""A normal quantile is about this times the binary logarithm of the odds."""
_GUESSES = tl.constexpr(4)
"""Rounds whose values follow from what is known of the counts."""
_NEAR = tl.constexpr(0.0625)
"""Distance of the values of such a round, as a share of the range."""


@triton.jit
def _logit_of(key):
    """The logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_of(logit):
    """The key of a logit; -0 has that of 0, and NaN that of minus infinity."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(logit == logit, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST_KEY)


@triton.jit
def _between(low, high, share):
    """The key at a share of the range of keys, at least one from either end."""
    # The range may be wider than the largest int32.
    low = low.to(tl.int64)
    width = (high - low).to(tl.uint32)
    step = (tl.minimum(tl.maximum(share, 0.0), 0.9999) * width.to(tl.float32)).to(tl.uint32)
    return (low + tl.minimum(tl.maximum(step, 1), width - 1)).to(tl.int32)


@triton.jit
def _middle(low, high):
    """The key in the middle, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _held(x, WARPS: tl.constexpr):
    """``[warps, 32]``: the sum of what each thread holds of ``[TILE]``."""
    MOST: tl.constexpr = x.shape[0] // 128
    COUNT: tl.constexpr = WARPS if WARPS < MOST else MOST
    return tl.sum(tl.sum(tl.reshape(x, [MOST // COUNT, COUNT, 32, 4]), 3), 0)


@triton.jit
def _reaching(logits, key, WARPS: tl.constexpr):
    """``[warps, 32]`` int32: how many of a thread's logits reach a key; NaN reaches none."""
    return _held(tl.where(logits >= _logit_of(key), 1.0, 0.0), WARPS).to(tl.int32)


@triton.jit
def _quarters(x):
    """``[TILE / 4]`` four times: the first of each four, the second, the third, the fourth."""
    a, b = tl.split(tl.reshape(x, [x.shape[0] // 4, 2, 2]))
    first, third = tl.split(a)
    second, fourth = tl.split(b)
    return first, second, third, fourth


@triton.jit
def _first_keys(logits, length, wanted, WARPS: tl.constexpr):
    """Three keys near that which ``wanted`` of a row's logits would reach if it were normal."""
    # A quarter of the row is enough, the first of each four.
    sample, _, _, _ = _quarters(logits)
    sample = tl.where(tl.abs(sample) < _LARGE, sample, 0.0)
    MOST: tl.constexpr = sample.shape[0] // 32
    COUNT: tl.constexpr = WARPS if WARPS < MOST else MOST
    sample = tl.reshape(sample, [MOST // COUNT, COUNT * 32])
    total, squares = tl.reduce((tl.sum(sample, 0), tl.sum(sample * sample, 0)), 0, _add_pairs)
    count = tl.cdiv(length, 4).to(tl.float32)
    mean = total / count
    deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
    odds = (length - wanted).to(tl.float32) / wanted.to(tl.float32)
    b = mean + deviation * (_LOG * tl.log2(odds))
    return _key_of(b - _FIRST * deviation), _key_of(b), _key_of(b + _FIRST * deviation)


@triton.jit
def _inside(key, low, high):
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _floor_of(logits, length, wanted, WARPS: tl.constexpr):
    """The key of the floor, and how many of the logits at it are wanted; 0 if all of them are.

    Each round costs the time of a reduction over the program, whatever it counts. Rounds end as
    soon as a count is exact. The first ones look where a normal row would have its floor, and then
    near where it would be if logits were evenly spread; if those miss, later ones leave a quarter
    of the range each.
    """
    low = tl.zeros([], tl.int32) + _LEAST_KEY
    high = tl.zeros([], tl.int32) + _MOST_KEY + 1
    # How many reach ``low``, NaN counted as if they did, and ``high``.
    reach = length
    over = tl.zeros([], tl.int32)
    a, b, c = _first_keys(logits, length, wanted, WARPS)
    a, b, c = _inside(a, low, high), _inside(b, low, high), _inside(c, low, high)
    turn = tl.zeros([], tl.int32)
    while (low + 1 < high) & (reach != wanted):
        # Sums of 32 bits over a warp are one instruction each.
        pair = _reaching(logits, a, WARPS) + _reaching(logits, b, WARPS) * 65536
        pair, third = tl.sum(pair, 1), tl.sum(_reaching(logits, c, WARPS), 1)
        # One reduction over warps for all three counts, which have fewer than 21 bits.
        counts = (pair & 65535).to(tl.int64) + ((pair >> 16).to(tl.int64) << 21)
        counts = tl.sum(counts + (third.to(tl.int64) << 42), 0)
        reach_a = (counts & 0x1FFFFF).to(tl.int32)
        reach_b = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        reach_c = (counts >> 42).to(tl.int32)
        in_a, in_b, in_c = reach_a >= wanted, reach_b >= wanted, reach_c >= wanted
        high = tl.where(in_c, high, tl.where(in_b, c, tl.where(in_a, b, a)))
        over = tl.where(in_c, over, tl.where(in_b, reach_c, tl.where(in_a, reach_b, reach_a)))
        low = tl.where(in_c, c, tl.where(in_b, b, tl.where(in_a, a, low)))
        reach = tl.where(in_c, reach_c, tl.where(in_b, reach_b, tl.where(in_a, reach_a, reach)))
        b = _middle(low, high)
        # ``low`` is not counted again: ``reach`` has its count, NaN included, which a comparison
        # leaves out.
        a, c = tl.maximum(_middle(low, b), low + 1), _middle(b, high)
        turn += 1
        if turn < _GUESSES:
            share = (reach - wanted).to(tl.float32) / (reach - over).to(tl.float32)
            b = _between(low, high, share)
            a, c = _between(low, high, share - _NEAR), _between(low, high, share + _NEAR)
    return low, tl.where(reach == wanted, 0, wanted - over)


@triton.jit
def _largest(row, length, wanted, TILE: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr):
    """Which logits of a row of at most TILE are taken, and the place of each among them.

    ``wanted`` of them are taken, fewer than ``length``.
    """
    at = tl.arange(0, TILE)
    there = at < length
    if VECTOR:
        # Whole fours are loaded, so that each is one load.
        logits = tl.load(row + at, mask=at < tl.cdiv(length, 4) * 4, other=float("nan"))
        logits = tl.where(there, logits, float("nan"))
    else:
        logits = tl.load(row + at, mask=there, other=float("nan"))
    key, level_wanted = _floor_of(logits, length, wanted, WARPS)
    floor = _logit_of(key)
    if level_wanted > 0:
        # The first logits at the floor are taken, and NaN behind all of minus infinity.
        level = logits == floor
        none = there & (logits != logits) & (key == _LEAST_KEY)
        counts = tl.cumsum(level.to(tl.int32) + none.to(tl.int32) * 65536, 0)
        levels, nones = counts & 65535, (counts >> 16) & 65535
        none_wanted = level_wanted - tl.max(levels, 0)
        logits = tl.where(level & (levels > level_wanted), float("nan"), logits)
        logits = tl.where(none & (nones <= none_wanted), floor, logits)
    taken = logits >= floor
    return taken, tl.cumsum(taken.to(tl.int32), 0) - 1


@triton.jit
def _store_listed(
    at, taken, place, token, out, positions, table, offsets_ptr, BLOCK_SIZE: tl.constexpr
):
    """Write the columns ``at`` that are taken to their places: as they are or by positions, and
    then as slots or with an offset.
    """
    listed = at
    if positions is not None:
        listed = tl.load(positions + at, mask=taken, other=0)
    if table is not None:
        block = tl.load(table + listed // BLOCK_SIZE, mask=taken, other=0)
        listed = block * BLOCK_SIZE + listed % BLOCK_SIZE
    if offsets_ptr is not None:
        listed += tl.load(offsets_ptr + token)
    tl.store(out + place, listed, mask=taken)


@triton.jit
def _list_row(
    row, length, wanted, token, out, positions, table, offsets_ptr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """List the ``wanted`` largest logits of a row that fits a tile."""
    taken, place = _largest(row, length, wanted, TILE, VECTOR, WARPS)
    at = tl.arange(0, TILE)
    if VECTOR:
        # By one store, addresses and masks of four neighbours would go to four threads first.
        at_a, at_b, at_c, at_d = _quarters(at)
        taken_a, taken_b, taken_c, taken_d = _quarters(taken)
        place_a, place_b, place_c, place_d = _quarters(place)
        _store_listed(
            at_a, taken_a, place_a, token, out, positions, table, offsets_ptr, BLOCK_SIZE
        )  # fmt: skip
        _store_listed(
            at_b, taken_b, place_b, token, out, positions, table, offsets_ptr, BLOCK_SIZE
        )  # fmt: skip
        _store_listed(
            at_c, taken_c, place_c, token, out, positions, table, offsets_ptr, BLOCK_SIZE
        )  # fmt: skip
        _store_listed(
            at_d, taken_d, place_d, token, out, positions, table, offsets_ptr, BLOCK_SIZE
        )  # fmt: skip
    else:
        _store_listed(at, taken, place, token, out, positions, table, offsets_ptr, BLOCK_SIZE)


@triton.jit
def _list_in_smallest(
    row, length, wanted, token, out, positions, table, offsets_ptr, TILE: tl.constexpr,
    SHORT: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """List a row in the smallest of TILE, TILE / 2 and so on that holds it, SHORT at least."""
    # Nested branches: Triton cannot join a constexpr and a comparison by "and".
    if TILE // 2 >= SHORT:
        if length <= TILE // 2:
            _list_in_smallest(
                row, length, wanted, token, out, positions, table, offsets_ptr, TILE // 2, SHORT,
                BLOCK_SIZE, VECTOR, WARPS,
            )  # fmt: skip
        else:
            _list_row(
                row, length, wanted, token, out, positions, table, offsets_ptr, TILE,
                BLOCK_SIZE, VECTOR, WARPS,
            )  # fmt: skip
    else:
        _list_row(
            row, length, wanted, token, out, positions, table, offsets_ptr, TILE,
            BLOCK_SIZE, VECTOR, WARPS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["logits_row", "table_row", "out_row"],
    do_not_specialize_on_alignment=[
        *("lens_ptr", "positions_ptr", "out_ptr", "out_lens_ptr", "table_ptr", "requests_ptr"),
        "offsets_ptr",
    ],
)
def select_topk_kernel(
    logits_ptr,
    lens_ptr,
    positions_ptr,
    out_ptr,
    out_lens_ptr,
    table_ptr,
    requests_ptr,
    offsets_ptr,
    logits_row,
    table_row,
    out_row,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    SHORT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
):
    """List the TOPK largest logits of each row in ascending order of their positions, then -1; grid
    ``(T,)``.

    Among equal logits the lower positions are taken; NaN counts as less than every number. A row is
    kept in registers, in the smallest of MOST, MOST / 2 and so on that is enough, but in no fewer
    than SHORT. A table turns positions into slots, an offset moves them.

    Shapes: logits ``[T, *]`` fp32, of which no row has more than MOST, out ``[T, TOPK]``, lens,
    offsets and out lens ``[T]``, positions ``[T, *]`` in rows as far apart as logits, or None where
    a logit's position is its column; all but logits are int32. With VECTOR rows begin at 16 bytes,
    and ``logits_row`` counts fours of logits. WIDTH is TOPK rounded up to a power of two. WARPS is
    the launch's number of warps.
    """
    token = tl.program_id(0).to(tl.int64)
    length = tl.maximum(tl.load(lens_ptr + token), 0)
    column = token * logits_row
    if VECTOR:
        column *= 4
    row = logits_ptr + column
    positions = positions_ptr
    if positions_ptr is not None:
        positions = positions_ptr + column
    out = out_ptr + token * out_row
    table = table_ptr
    if table_ptr is not None:
        request = token
        if requests_ptr is not None:
            request = tl.load(requests_ptr + token).to(tl.int64)
        table = table_ptr + request * table_row
    wanted = tl.zeros([], tl.int32) + TOPK
    if length <= TOPK:
        place = tl.arange(0, WIDTH)
        tl.store(out + place, place * 0 - 1, mask=(place >= length) & (place < TOPK))
        _store_listed(
            place, place < length, place, token, out, positions, table, offsets_ptr, BLOCK_SIZE
        )  # fmt: skip
    else:
        _list_in_smallest(
            row, length, wanted, token, out, positions, table, offsets_ptr, MOST, SHORT,
            BLOCK_SIZE, VECTOR, WARPS,
        )  # fmt: skip
    if out_lens_ptr is not None:
        tl.store(out_lens_ptr + token, tl.minimum(length, TOPK))


@triton.jit
def _store_candidates(at, taken, place, row, first, positions, out, out_positions):
    """Write the logits ``at`` columns of a segment that are taken, and their positions."""
    listed = first + at
    if positions is not None:
        listed = tl.load(positions + listed, mask=taken, other=0)
    # They are in the cache, and registers are scarce.
    tl.store(out + place, tl.load(row + at, mask=taken, other=0.0), mask=taken)
    tl.store(out_positions + place, listed, mask=taken)


@triton.jit
def _offer(
    row, length, wanted, first, positions, out, out_positions, TILE: tl.constexpr,
    VECTOR: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Write the ``wanted`` largest logits of a segment, and their positions."""
    taken, place = _largest(row, length, wanted, TILE, VECTOR, WARPS)
    at = tl.arange(0, TILE)
    if VECTOR:
        at_a, at_b, at_c, at_d = _quarters(at)
        taken_a, taken_b, taken_c, taken_d = _quarters(taken)
        place_a, place_b, place_c, place_d = _quarters(place)
        _store_candidates(at_a, taken_a, place_a, row, first, positions, out, out_positions)
        _store_candidates(at_b, taken_b, place_b, row, first, positions, out, out_positions)
        _store_candidates(at_c, taken_c, place_c, row, first, positions, out, out_positions)
        _store_candidates(at_d, taken_d, place_d, row, first, positions, out, out_positions)
    else:
        _store_candidates(at, taken, place, row, first, positions, out, out_positions)


@triton.jit(
    do_not_specialize=["logits_row", "out_row"],
    do_not_specialize_on_alignment=[
        *("lens_ptr", "positions_ptr", "out_ptr", "out_positions_ptr", "out_lens_ptr"),
    ],
)
def select_candidates_kernel(
    logits_ptr,
    lens_ptr,
    positions_ptr,
    out_ptr,
    out_positions_ptr,
    out_lens_ptr,
    logits_row,
    out_row,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Write the logits that may be among the TOPK largest of their rows, in order; grid
    ``(T, segments)``.

    Of each SEGMENT logits of a row the TOPK largest are candidates, so that a row has
    ``n // SEGMENT * TOPK + min(n % SEGMENT, TOPK)`` of them. Logits, lens and positions are as in
    :func:`select_topk_kernel`, and so are out, out lens and out positions, which it may be given.
    SEGMENT is more than TOPK.
    """
    token, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    whole = tl.maximum(tl.load(lens_ptr + token), 0)
    first = segment * SEGMENT
    length = tl.minimum(whole - first, SEGMENT)
    column = token * logits_row
    if VECTOR:
        column *= 4
    row = logits_ptr + column + first
    positions = positions_ptr
    if positions_ptr is not None:
        positions = positions_ptr + column
    place = token * out_row + segment * TOPK
    out, out_positions = out_ptr + place, out_positions_ptr + place
    wanted = tl.zeros([], tl.int32) + TOPK
    if segment == 0:
        count = whole // SEGMENT * TOPK + tl.minimum(whole % SEGMENT, TOPK)
        tl.store(out_lens_ptr + token, count)
    if length > TOPK:
        if length <= SEGMENT // 2:
            _offer(
                row, length, wanted, first, positions, out, out_positions, SEGMENT // 2, VECTOR,
                WARPS,
            )  # fmt: skip
        else:
            _offer(
                row, length, wanted, first, positions, out, out_positions, SEGMENT, VECTOR, WARPS
            )  # fmt: skip
    elif length > 0:
        at = tl.arange(0, WIDTH)
        _store_candidates(at, at < length, at, row, first, positions, out, out_positions)
