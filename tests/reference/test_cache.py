"""Cache reads and writes, by slots in and by block table out, judged byte by byte."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from attn.reference.cache import (
    gather_positions,
    gather_rows,
    read_kv,
    read_latent,
    scatter_rows,
    write_kv,
    write_latent,
)
from attn.testing import batches, stored_rows
from attn.testing.batches import POISON_BYTE, WILD_BLOCK
from specs.cache_write import CacheTarget
from specs.dtypes import CacheDType, DType
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, LatentKVLayout
from specs.rows import LatentFormat

P, N = 4, 7
"""Tokens per block, blocks."""
RANK, ROPE = 256, 64


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(*blocks: int) -> Tensor:
    """A row of a block table, with wild ids past the row's blocks."""
    return torch.tensor([*blocks, WILD_BLOCK, -5], dtype=torch.int32)


# -- rows by slot and by position


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_rows_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    target = batches.poisoned(N, P, 3, dtype=dtype, device=torch.device("cpu"))
    rows = normal(5, 3).to(dtype)
    slots = torch.tensor([9, -1, 27, 0, 14])
    scatter_rows(target, slots, rows)
    flat = target.view(N * P, 3)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot >= 0:
            assert torch.equal(flat[slot].float(), row.float())
    others = [slot for slot in range(N * P) if slot not in slots.tolist()]
    assert all(batches.is_poison(flat[slot]) for slot in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 10), (0, 4), (3, 5), (4, 8), (5, 6), (9, 10), (7, 7), (8, 3)]
)
def test_any_range_of_positions_is_read_in_order(dtype: torch.dtype, start: int, stop: int) -> None:
    source = normal(N, P, 2, 3).to(dtype)
    blocks = (5, 2, 6)
    expected = torch.cat([source[block].float() for block in blocks])[start : max(start, stop)]
    got = gather_rows(source, table(*blocks), start, stop)
    assert got.dtype == dtype
    assert torch.equal(got.float(), expected)


def test_reading_a_range_looks_at_no_entry_outside_it() -> None:
    source = normal(N, P, 3)
    row = torch.tensor([WILD_BLOCK, 3, -1, 2], dtype=torch.int32)
    assert torch.equal(gather_rows(source, row, 5, 8), source[3, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_positions_are_read_in_the_order_given(dtype: torch.dtype) -> None:
    source = normal(N, P, 3).to(dtype)
    positions = torch.tensor([9, 0, 4, 4, 3])
    expected = torch.cat([source[block].float() for block in (5, 2, 6)])[positions]
    got = gather_positions(source, table(5, 2, 6), positions)
    assert torch.equal(got.float(), expected)
    assert gather_positions(source, table(), positions[:0]).shape == (0, 3)


@pytest.mark.parametrize("block", [N, WILD_BLOCK, -1])
def test_a_block_outside_the_cache_is_named(block: int) -> None:
    source = normal(N, P, 3)
    with pytest.raises(ValueError, match=rf"\[0, {N}\), got {block}"):
        gather_rows(source, table(1, block), 0, P + 1)
    with pytest.raises(ValueError, match=rf"\[0, {N}\), got {block}"):
        gather_positions(source, table(1, block), torch.tensor([0, P]))


@pytest.mark.parametrize("slot", [N * P, -2])
def test_a_slot_outside_the_cache_is_named(slot: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {slot} at token 1")):
        scatter_rows(normal(N, P, 3), torch.tensor([0, slot]), normal(2, 3))


# -- dense rows

DENSE = [
    dtype
    for dtype in CacheDType
    if dtype.has_row_format and dtype not in (CacheDType.FP8_DS_MLA, CacheDType.FP8_INC)
]


@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("packing", list(KVPacking))
@pytest.mark.parametrize("cache_dtype", DENSE)
def test_dense_rows_come_back_from_every_layout(
    cache_dtype: CacheDType, packing: KVPacking, order: KVOrder
) -> None:
    heads, size = 2, 16
    layout = DenseKVLayout(
        block_size=P,
        num_kv_heads=heads,
        head_size=size,
        model_dtype=DType.BFLOAT16,
        cache_dtype=cache_dtype,
        packing=packing,
        order=order,
    )
    views = layout.split(layout.allocate(N, fill_byte=POISON_BYTE))
    key, value = (normal(6, heads, size, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    slots = torch.tensor([20, 21, 22, -1, 23, 8])
    scales = (torch.tensor(0.03), torch.tensor([0.02, 0.05]))
    write_kv(key, value, CacheTarget(views, slots, *scales, cache_dtype))
    got = read_kv(views, table(5, 2), 0, 5, scales, cache_dtype, torch.float64)
    kept = [0, 1, 2, 4, 5]
    for x, scale, real in zip((key, value), scales, got, strict=True):
        expected = stored_rows.quantized(x[kept], cache_dtype.value, scale)
        assert real.dtype == torch.float64
        # Inline scales are fp32; the quotient of two fp32 numbers is rounded once.
        rounding = torch.finfo(torch.float32).eps * expected.abs()
        assert bool(((real - expected).abs() <= rounding).all())


def test_a_narrower_float_cache_saturates() -> None:
    layout = DenseKVLayout(
        block_size=P,
        num_kv_heads=1,
        head_size=4,
        model_dtype=DType.BFLOAT16,
        cache_dtype=CacheDType.FLOAT16,
    )
    views = layout.split(layout.allocate(N, fill_byte=POISON_BYTE))
    key = torch.tensor([[[1e6, -1e6, 1.0, torch.inf]]], dtype=torch.bfloat16)
    one = torch.ones(())
    target = CacheTarget(views, torch.tensor([4]), one, one, CacheDType.FLOAT16)
    write_kv(key, key, target)
    largest = torch.finfo(torch.float16).max
    assert views.key[1, 0, 0].tolist() == [largest, -largest, 1.0, largest]
    assert torch.equal(views.value[1, 0], views.key[1, 0])


def test_rows_past_the_slots_are_padding() -> None:
    layout = DenseKVLayout(block_size=P, num_kv_heads=1, head_size=4, model_dtype=DType.FLOAT32)
    cache = layout.allocate(N, fill_byte=POISON_BYTE)
    one, rows = torch.ones(()), normal(5, 1, 4)
    slots = torch.tensor([4, -1])
    write_kv(rows, rows, CacheTarget(layout.split(cache), slots, one, one, CacheDType.AUTO))
    views = layout.split(cache)
    assert torch.equal(views.key[1, 0], rows[0])
    views.key[1, 0], views.value[1, 0] = torch.nan, torch.nan
    assert bool(cache.isnan().all())


# -- latent rows

LATENT = [
    ("auto", LatentFormat.BF16, torch.bfloat16),
    ("auto", LatentFormat.BF16, torch.float16),
    ("auto", LatentFormat.BF16, torch.float32),
    ("auto", LatentFormat.BF16, torch.float64),
    ("fp8", LatentFormat.FP8_NOPE_FP8_ROPE, torch.bfloat16),
    ("fp8", LatentFormat.FP8_NOPE_FP8_ROPE, torch.float32),
    ("fp8_ds_mla", LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE, torch.bfloat16),
    ("fp8_ds_mla", LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE, torch.float32),
]


@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("padding", [0, 256])
@pytest.mark.parametrize(("name", "latent", "dtype"), LATENT)
def test_latent_rows_come_back_and_nothing_else_is_written(
    name: str, latent: LatentFormat, dtype: torch.dtype, padding: int, rope: int
) -> None:
    width = stored_rows.latent_row_bytes(RANK, rope, name, dtype)
    layout = LatentKVLayout(
        block_size=P,
        format=latent,
        kv_lora_rank=RANK,
        qk_rope_head_dim=rope,
        model_dtype=DType.parse(dtype),
        page_size_padded=P * width + padding if padding else None,
    )
    buffer = torch.full((layout.nbytes(N),), POISON_BYTE, dtype=torch.uint8)
    cache = layout.view(buffer, N)
    kv_c, k_pe = normal(6, RANK, dtype=dtype), normal(6, rope, seed=1, dtype=dtype)
    slots, scale = torch.tensor([20, 21, 22, -1, 23, 8]), torch.tensor(0.03)
    write_latent(kv_c, k_pe, cache, slots, scale, layout.row)

    pages = buffer.view(N, P * width + padding)
    bytes_by_slot = pages[:, : P * width].reshape(N * P, width)
    kept = slots >= 0
    parts = stored_rows.decode_latent(bytes_by_slot[slots[kept]], RANK, name, dtype, scale)
    for x, stored in zip((kv_c, k_pe), parts, strict=True):
        assert not bool(stored.misses(x[kept]).any())
    untouched = torch.ones(N * P, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert batches.is_poison(bytes_by_slot[untouched])
    assert batches.is_poison(pages[:, P * width :])

    real = read_latent(cache, table(5, 2), 0, 5, scale, layout.row, torch.float64)
    assert torch.equal(real, torch.cat([part.real.double() for part in parts], -1))


@pytest.mark.parametrize(("name", "latent", "dtype"), LATENT)
def test_writing_no_latent_rows_is_no_error(
    name: str, latent: LatentFormat, dtype: torch.dtype
) -> None:
    row = latent.row(RANK, ROPE, DType.parse(dtype))
    layout = LatentKVLayout(
        block_size=P, format=latent, kv_lora_rank=RANK, model_dtype=DType.parse(dtype)
    )
    cache = layout.allocate(N, fill_byte=POISON_BYTE)
    nothing = torch.empty(0, dtype=torch.int64)
    empty = (normal(0, RANK, dtype=dtype), normal(0, ROPE, dtype=dtype))
    write_latent(*empty, cache, nothing, torch.ones(()), row)
    assert batches.is_poison(cache)
    real = read_latent(cache, table(), 0, 0, torch.ones(()), row, torch.float32)
    assert real.shape == (0, RANK + ROPE)
