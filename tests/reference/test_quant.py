"""Quantisation never makes a NaN, rounds to nearest, and stores what its format says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.reference.quant import (
    dequantize,
    dequantize_blocks,
    power_of_two_scale,
    quantize_blocks,
    quantize_per_tensor,
    quantize_per_token_head,
    saturate,
)
from attn.testing.stored_rows import Stored, block_scale, expected_inline_scale
from specs.dtypes import CacheDType

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INLINE = [
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.FP8_PER_TOKEN_HEAD,
    CacheDType.INT4_PER_TOKEN_HEAD,
]
FP32 = torch.finfo(torch.float32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- saturating casts


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_beyond_the_range_become_the_largest(
    dtype: torch.dtype, source: torch.dtype
) -> None:
    largest = min(torch.finfo(dtype).max, torch.finfo(source).max)
    x = torch.tensor([math.inf, -math.inf, torch.finfo(source).max, 1.0, 0.0], dtype=source)
    stored = saturate(x, dtype)
    assert stored.dtype == dtype
    assert bool(stored.double().isfinite().all())
    assert stored.double()[1] == -stored.double()[0]
    assert stored.double()[0] >= torch.tensor(largest).to(dtype).double()
    assert stored.double()[3:].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_border_of_the_range_is_kept(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    x = torch.tensor([limit, limit * 1.01, limit * 2, 465.0, -1e30])
    stored = saturate(x, dtype).float()
    assert stored[:3].tolist() == [limit] * 3
    assert stored[4] == -limit


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_saturating_cast_rounds_to_nearest(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    stored = Stored(saturate(x, dtype).double(), torch.ones(()), dtype)
    assert not bool(stored.misses(x.clamp(-FP32.max, FP32.max)).any())


# -- one scale per tensor or head


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("per_head", [False, True])
def test_per_tensor_values_come_back_to_half_an_ulp(dtype: torch.dtype, per_head: bool) -> None:
    x = normal(9, 3, 16, dtype=torch.bfloat16)
    scale = torch.tensor([0.01, 0.3, 2.0]) if per_head else torch.tensor(0.037)
    stored = quantize_per_tensor(x, scale, dtype)
    assert (stored.shape, stored.dtype) == (x.shape, dtype)
    factor = scale.double().reshape(-1, 1)
    assert not bool(Stored(stored.double(), factor, dtype).misses(x).any())
    cache_dtype = CacheDType.FP8_E4M3 if dtype == E4M3 else CacheDType.FP8_E5M2
    real = dequantize(stored, scale, cache_dtype, torch.float64)
    assert torch.equal(real, stored.double() * factor)


def test_per_tensor_saturates_infinities() -> None:
    x = torch.tensor([[[math.inf, -math.inf, 1e30]]])
    stored = quantize_per_tensor(x, torch.tensor(0.5), E4M3)
    assert stored.float().tolist() == [[[448.0, -448.0, 448.0]]]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_one_element_is_a_scalar(shape: tuple[int, ...]) -> None:
    x = normal(4, 2, 8)
    stored = quantize_per_tensor(x, torch.full(shape, 0.25), E4M3)
    assert torch.equal(stored.float(), saturate(x / 0.25, E4M3).float())


# -- one scale per (token, head)


@pytest.mark.parametrize("cache_dtype", INLINE)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_inline_scales_follow_the_largest_value(cache_dtype: CacheDType, magnitude: float) -> None:
    x = normal(7, 3, 16) * magnitude
    stored, scale = quantize_per_token_head(x, cache_dtype)
    wanted = expected_inline_scale(x, cache_dtype.value)[..., 0]
    assert (scale.shape, scale.dtype) == ((7, 3), torch.float32)
    assert bool(((scale - wanted).abs() <= 2 * FP32.eps * wanted).all())
    dtype = E4M3 if cache_dtype is CacheDType.FP8_PER_TOKEN_HEAD else None
    units = dequantize(stored, torch.ones(7, 3), cache_dtype, torch.float64)
    assert not bool(Stored(units, scale.double()[..., None], dtype).misses(x).any())
    real = dequantize(stored, scale, cache_dtype, torch.float64)
    assert torch.equal(real, units * scale.double()[..., None])


def test_int4_pairs_share_a_byte_low_half_first() -> None:
    x = torch.tensor([[[-7.0, -3.0, 0.0, 1.0, 2.0, 3.0, 5.0, 7.0]]])
    stored, scale = quantize_per_token_head(x, CacheDType.INT4_PER_TOKEN_HEAD)
    assert scale.tolist() == [[1.0]]
    low, high = [-7, -3, 0, 1], [2, 3, 5, 7]
    expected = [(a + 8) | (b + 8) << 4 for a, b in zip(low, high, strict=True)]
    assert stored.dtype == torch.uint8
    assert stored.flatten().tolist() == expected
    real = dequantize(stored, scale, CacheDType.INT4_PER_TOKEN_HEAD, torch.float32)
    assert torch.equal(real, x)


@pytest.mark.parametrize("cache_dtype", INLINE)
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_infinite_value_spoils_no_row_with_nan(cache_dtype: CacheDType, bad: float) -> None:
    x = normal(2, 2, 8)
    x[0, 0, 3] = bad
    stored, scale = quantize_per_token_head(x, cache_dtype)
    real = dequantize(stored, scale, cache_dtype, torch.float64)
    assert bool(scale.isfinite().all())
    assert bool(real.isfinite().all())
    clean = quantize_per_token_head(x[1:], cache_dtype)
    assert torch.equal(real[1:], dequantize(*clean, cache_dtype, torch.float64))


@pytest.mark.parametrize("cache_dtype", INLINE)
def test_all_zero_rows_come_back_as_zeros(cache_dtype: CacheDType) -> None:
    stored, scale = quantize_per_token_head(torch.zeros(3, 2, 8), cache_dtype)
    assert bool((scale > 0).all())
    assert bool((dequantize(stored, scale, cache_dtype, torch.float32) == 0).all())


@pytest.mark.parametrize("cache_dtype", INLINE)
def test_no_rows_are_no_error(cache_dtype: CacheDType) -> None:
    stored, scale = quantize_per_token_head(torch.zeros(0, 2, 8), cache_dtype)
    assert (len(stored), scale.shape) == (0, (0, 2))


# -- one power-of-two scale per block


@given(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
@settings(max_examples=100, deadline=None)
def test_block_scales_are_the_smallest_power_of_two_that_fits(absmax: float) -> None:
    scale = power_of_two_scale(torch.tensor([absmax]), E4M3).double().item()
    assert math.frexp(scale)[0] == 0.5
    assert absmax / scale <= torch.finfo(E4M3).max < absmax / (scale / 2)


@pytest.mark.parametrize("absmax", [448.0, 448.0 * 2**7, 448.0 * 2**-9])
def test_a_block_that_just_fits_gets_no_larger_scale(absmax: float) -> None:
    scale = power_of_two_scale(torch.tensor([absmax, math.nextafter(absmax, 1e30) * 1.0001]), E4M3)
    assert scale.tolist() == [absmax / 448, absmax / 224]


def test_block_scales_of_zero_tiny_and_infinite_blocks_are_finite() -> None:
    scale = power_of_two_scale(torch.tensor([0.0, FP32.smallest_normal, 1e-44, math.inf]), E4M3)
    assert scale[0] == 1
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())


def test_blocks_come_back_to_half_an_ulp_each_with_its_own_scale() -> None:
    x = normal(5, 512) * torch.tensor([1.0, 1e-4, 30.0, 1e5]).repeat_interleave(128)
    stored, scale = quantize_blocks(x)
    assert (stored.dtype, scale.shape, scale.dtype) == (E4M3, (5, 4), torch.float32)
    assert torch.equal(scale.double(), block_scale(x.unflatten(-1, (-1, 128)))[..., 0])
    wide = scale.double().repeat_interleave(128, -1)
    assert not bool(Stored(stored.double(), wide, E4M3).misses(x).any())
    assert torch.equal(dequantize_blocks(stored, scale, torch.float64), stored.double() * wide)


def test_all_zero_blocks_come_back_as_zeros() -> None:
    x = normal(2, 256)
    x[:, :128] = 0
    stored, scale = quantize_blocks(x)
    real = dequantize_blocks(stored, scale, torch.float32)
    assert bool((real[:, :128] == 0).all())
    assert bool((scale[:, 0] == 1).all())


def test_an_infinite_value_spoils_no_block_with_nan() -> None:
    x = normal(2, 256)
    x[0, 5], x[1, 200] = math.inf, -math.inf
    real = dequantize_blocks(*quantize_blocks(x), torch.float64)
    assert bool(real.isfinite().all())
    clean = dequantize_blocks(*quantize_blocks(x[:1, 128:]), torch.float64)
    assert torch.equal(real[:1, 128:], clean)


def test_no_blocks_are_no_error() -> None:
    stored, scale = quantize_blocks(torch.zeros(0, 512))
    assert (stored.shape, scale.shape) == ((0, 512), (0, 4))
    assert dequantize_blocks(stored, scale, torch.float32).shape == (0, 512)
