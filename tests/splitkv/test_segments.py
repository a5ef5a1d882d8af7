"""Segments follow from positions alone, and host and device agree on them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from builders.splitkv.device import segments as kernels
from builders.splitkv.segments import (
    LIMIT,
    PER_OCTAVE,
    SEGMENT,
    SEGMENTS_PER_GROUP,
    max_segments,
    segment_of,
    segment_start,
    segments_per_group,
)

FARTHEST = 1 << 27
positions = st.one_of(st.integers(0, 4 * LIMIT), st.integers(0, FARTHEST))
LAST_SEGMENT = segment_of(FARTHEST)


def test_segments_have_512_tokens_up_to_128k_then_128_are_an_octave() -> None:
    assert (SEGMENT, LIMIT, PER_OCTAVE, SEGMENTS_PER_GROUP) == (512, 131072, 128, 16)
    near = [segment_start(segment) for segment in range(257)]
    assert near == list(range(0, 131072 + 1, 512))
    for octave in range(10):
        first = 256 + 128 * octave
        starts = [segment_start(first + step) for step in range(129)]
        assert starts == [(131072 << octave) + step * (1024 << octave) for step in range(129)]


@given(position=positions)
def test_every_position_lies_in_its_segment(position: int) -> None:
    segment = segment_of(position)
    assert segment_start(segment) <= position < segment_start(segment + 1)


@given(segment=st.integers(0, LAST_SEGMENT))
def test_a_segment_starts_in_itself_and_ends_before_the_next(segment: int) -> None:
    start, stop = segment_start(segment), segment_start(segment + 1)
    assert start < stop
    assert (segment_of(start), segment_of(stop - 1), segment_of(stop)) == (
        segment,
        segment,
        segment + 1,
    )


@given(one=positions, other=positions)
def test_later_positions_have_no_earlier_segment(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert segment_of(low) <= segment_of(high)


@given(segment=st.integers(0, LAST_SEGMENT))
def test_every_start_is_a_whole_number_of_the_largest_tiles(segment: int) -> None:
    assert segment_start(segment) % SEGMENT == 0


@given(length=st.integers(1, FARTHEST))
def test_the_most_segments_of_a_length_are_those_up_to_its_last_key(length: int) -> None:
    assert max_segments(length) == segment_of(length - 1) + 1
    assert max_segments(length) == max_segments(length, None)


@pytest.mark.parametrize("window", [None, 1, 5000])
def test_even_no_keys_have_one_segment(window: int | None) -> None:
    assert max_segments(0, window) == max_segments(1, window) == 1


@given(length=st.integers(1, FARTHEST), window=st.integers(1, 4 * LIMIT), data=st.data())
def test_a_window_touches_no_more_segments_than_is_said(
    length: int, window: int, data: st.DataObject
) -> None:
    last = data.draw(st.integers(0, length - 1))
    first = max(0, last - window + 1)
    touched = segment_of(last) - segment_of(first) + 1
    most = max_segments(length, window)
    assert touched <= most <= max_segments(length)
    assert most <= -(-window // SEGMENT) + 2


# -- The device's twins.


@triton.jit
def _segments_kernel(x_ptr, out_ptr, count, START: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < count, other=0)
    number = kernels.segment_start(x) if START else kernels.segment_of(x)
    tl.store(out_ptr + at, number, mask=at < count)


@triton.jit
def _scalar_kernel(x_ptr, out_ptr, START: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    number = kernels.segment_start(x) if START else kernels.segment_of(x)
    tl.store(out_ptr + tl.program_id(0), number)


def on_device(numbers: list[int], *, start: bool = False, scalar: bool = False) -> list[int]:
    """Triton's ``segment_of`` of positions, or its ``segment_start`` of segments."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.tensor(numbers, dtype=torch.int32, device=device)
    out, count = torch.full_like(x, -7), len(numbers)
    if scalar:
        _scalar_kernel[(count,)](x, out, START=start)
    else:
        _segments_kernel[(triton.cdiv(count, 1024),)](x, out, count, START=start, SIZE=1024)
    return list(out.tolist())


def borders() -> list[int]:
    """Positions around every border of segments, and around every power of two."""
    starts = {segment_start(segment) for segment in range(LAST_SEGMENT + 2)}
    starts |= {1 << bit for bit in range(28)}
    near = {start + step for start in starts for step in (-2, -1, 0, 1, 2)}
    return sorted(position for position in near if 0 <= position <= FARTHEST)


def test_the_devices_segment_of_is_the_hosts_around_every_border() -> None:
    numbers = borders()
    assert len(numbers) > 2000
    assert on_device(numbers) == [segment_of(number) for number in numbers]


def test_the_devices_segment_start_is_the_hosts() -> None:
    segments = list(range(LAST_SEGMENT + 2))
    assert on_device(segments, start=True) == [segment_start(segment) for segment in segments]


def test_the_device_takes_scalars_too() -> None:
    numbers = [0, 511, 512, 1023, 1024, LIMIT - 1, LIMIT, LIMIT + 1023, 2 * LIMIT, FARTHEST]
    assert on_device(numbers, scalar=True) == [segment_of(number) for number in numbers]
    small = [0, 1, 255, 256, 257, 383, 384, 385, LAST_SEGMENT]
    found = on_device(small, start=True, scalar=True)
    assert found == [segment_start(segment) for segment in small]


@pytest.mark.parametrize(
    ("scale", "max_kv_len", "keys"),
    [
        *((1, length, 8192) for length in (100, 131072, 1 << 20)),
        *((2, length, 16384) for length in (100, 131072, 1 << 20)),
        *((4, length, 16384) for length in (100, 32768, 131072)),
        (4, 131073, 32768),
        (4, 1 << 20, 32768),
        *((8, length, 16384) for length in (100, 131072)),
        (8, 262144, 32768),
        (8, 262145, 65536),
        (8, 1 << 24, 65536),
    ],
)
def test_segment_groups_are_short_where_that_makes_few_of_them(
    scale: int, max_kv_len: int, keys: int
) -> None:
    segment_group = segments_per_group(max_kv_len, scale)
    assert 1 <= segment_group <= SEGMENTS_PER_GROUP
    assert segment_start(segment_group) * scale == keys
