"""Rotary embedding as multiplication by complex numbers, alone and fused with the cache write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn.reference.rope import apply_rope
from attn.registry import AttentionBackendEnum
from attn.testing import batches
from attn.testing.cases import Case, device_for
from attn.testing.dense_trial import DenseTrial
from attn.testing.stored_rows import half_ulp
from specs.dtypes import CacheDType

POSITIONS = torch.tensor([0, 1, 5, 63, 17])


def cos_sin(rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The table ``[64, rotary_dim]``: cosines, then sines."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(64).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def by_complex_numbers(x: Tensor, positions: Tensor, cache: Tensor, is_neox: bool) -> Tensor:
    """Rotated rows in float64: a pair of elements is a complex number that its position turns."""
    rotary_dim = cache.shape[-1]
    half = rotary_dim // 2
    x = x.double()
    turn = torch.complex(*cache[positions].double().split(half, -1))[:, None]
    if is_neox:
        first, second = slice(0, half), slice(half, rotary_dim)
    else:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    turned = torch.complex(x[..., first], x[..., second]) * turn
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rounding(x: Tensor, expected: Tensor) -> Tensor:
    """The allowed error: half an ulp of the result, and the roundings of two products and their
    sum.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    largest = x.double().abs().amax(-1, keepdim=True)
    return half_ulp(expected, x.dtype) + 3 * torch.finfo(compute).eps * largest


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [32, 16, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_rope_turns_pairs_and_passes_the_rest(
    dtype: torch.dtype, rotary_dim: int, is_neox: bool
) -> None:
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = x.clone()
    cache = cos_sin(rotary_dim, torch.float64 if dtype == torch.float64 else torch.float32)
    got = apply_rope(x, POSITIONS, cache, is_neox)
    expected = by_complex_numbers(x, POSITIONS, cache, is_neox)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert bool(((got.double() - expected).abs() <= rounding(x, expected)).all())
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(got[0], x[0])  # position 0
    assert torch.equal(x, kept)


def test_neox_and_interleaved_pair_different_elements() -> None:
    x = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(0))
    neox, interleaved = (apply_rope(x, POSITIONS, cos_sin(8), flag) for flag in (True, False))
    assert not torch.allclose(neox[1:], interleaved[1:])


# -- fused with the cache write, of every backend that offers it


def fused_backends() -> list[str]:
    names = []
    for row in AttentionBackendEnum:
        device = device_for(row)
        if device is None or row.get_class().is_mla():
            continue
        trial = DenseTrial(row.get_class(), plain(row.name), device)
        if trial.impl.fused_rope_kvcache_supported():
            names.append(row.name)
    return names


def plain(name: str, cache_dtype: CacheDType = CacheDType.AUTO) -> Case:
    dtype = AttentionBackendEnum[name].get_class().capabilities.dtypes[0]
    return Case(dtype=dtype, cache_dtype=cache_dtype)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8], ids=str)
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("name", fused_backends())
def test_fused_rope_rotates_in_place_and_writes_the_rotated_key(
    name: str, rotary_dim: int, cache_dtype: CacheDType, is_neox: bool
) -> None:
    row = AttentionBackendEnum[name]
    device = device_for(row)
    assert device is not None
    case = plain(name, cache_dtype)
    if not case.is_served_by(row.get_class()):
        pytest.skip(f"does not serve {cache_dtype.value}")
    trial = DenseTrial(row.get_class(), case, device)
    inputs = trial.inputs
    query, key, value = inputs.query.clone(), inputs.key.clone(), inputs.value.clone()
    slots, positions = inputs.batch.slot_mapping.clone(), inputs.batch.positions
    slots[1] = -1
    cache = cos_sin(rotary_dim).to(device)
    trial.impl.do_rope_and_kv_cache_update(
        trial.layer, query, key, value, positions, cache, is_neox, trial.cache(), slots
    )
    turned = {}
    for what, before, after in (("query", inputs.query, query), ("key", inputs.key, key)):
        expected = by_complex_numbers(before.cpu(), positions.cpu(), cache.cpu(), is_neox)
        error = (after.cpu().double() - expected).abs()
        assert bool((error <= rounding(before.cpu(), expected)).all()), what
        turned[what] = expected
    assert torch.equal(value, inputs.value)

    kept = (slots >= 0).cpu()
    stored_key, stored_value = trial._stored(slots.cpu()[kept])
    assert not bool(stored_value.misses(value.cpu()[kept]).any())
    # A kernel may or may not round the key to the model's type before the write.
    expected = turned["key"][kept]
    limit = half_ulp(expected / stored_key.scale, stored_key.dtype) * stored_key.scale
    limit = limit * (1 + torch.finfo(torch.float32).eps) + rounding(key.cpu()[kept], expected)
    assert bool(((stored_key.real - expected).abs() <= limit).all())
    untouched = torch.ones(trial.paging.num_blocks * case.block_size, dtype=torch.bool)
    untouched[slots.cpu()[kept]] = False
    rows = trial._pages().rows(trial.buffer.cpu()).flatten(0, 1)
    assert batches.is_poison(rows[untouched])
