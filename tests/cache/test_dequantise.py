"""The kernel that dequantises cache rows to the model's type, in Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from attn.kernels.cache.dequantise import dequantise_launcher
from attn.kernels.lang.stored import E4M3, E5M2, PLAIN
from builders.dense import dequantised
from builders.dense.dequantised import write_dequantised_pages
from builders.device import interprets
from builders.splitkv.record import DequantisedKeys
from specs.dtypes import CacheDType, DType
from specs.kv_cache import FullAttentionSpec
from specs.layouts import KVOrder, KVPacking, KVViews, split_kv_cache
from specs.rows import dense_row_format
from tests.compile.variants import HOPPER_VARIANTS, Kernel, Variant, call_of

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter")
PAGE, HEADS, BLOCKS = 32, 2, 24
KINDS = {CacheDType.FP8_E4M3: E4M3, CacheDType.FP8_E5M2: E5M2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packing", KVPacking)
@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("cache", "size", "block_size"),
    [
        (CacheDType.FP8_E4M3, 64, 16),
        (CacheDType.FP8_E4M3, 80, 48),
        (CacheDType.FP8_E5M2, 64, 32),
    ],
)
def test_every_live_row_is_dequantised_exactly(
    cache: CacheDType,
    size: int,
    block_size: int,
    order: KVOrder,
    packing: KVPacking,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    model = DType.BFLOAT16
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=HEADS, head_size=size, dtype=model, cache_dtype=cache
    )
    storage = spec.layout(order=order, packing=packing).allocate(BLOCKS)
    generator = torch.Generator().manual_seed(size + block_size)
    bytes_ = storage.view(torch.uint8)
    bytes_.random_(0, 256, generator=generator)
    # The cache holds no e4m3 NaN: no finite value is stored as one.
    bytes_[bytes_ & 0x7F == 0x7F] = 0
    views = split_kv_cache(storage, dense_row_format(size, size, cache, model))
    query_lens, kv_lens = [20, 1, 33, 17], [70, 40, 33, 50]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    starts_of_keys = [
        0 if window is None else max(kv_len - count - (window - 1), 0)
        for count, kv_len in zip(query_lens, kv_lens, strict=True)
    ]
    # Table entries behind the last block point outside the cache, and so do the entries of blocks
    # that a window has left.
    table = torch.full((4, 6), 1 << 30, dtype=torch.int32)
    ids = iter(torch.randperm(BLOCKS, generator=generator).tolist())
    for row, kv_len in enumerate(kv_lens):
        for block in range(starts_of_keys[row] // block_size, -(-kv_len // block_size)):
            table[row, block] = next(ids)
    wide = [torch.full((8, HEADS, PAGE, size), 7.0, dtype=dtype) for _ in range(2)]
    pages = DequantisedKeys(
        wide[0].transpose(1, 2),
        wide[1].transpose(1, 2),
        torch.zeros(4, 4, dtype=torch.int32),
        torch.zeros(8, 3, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        7,
    )
    _write_pages(starts, lens, pages, window)
    words = views.key.view(torch.int16), views.value.view(torch.int16)
    launcher = dequantise_launcher(words, pages, KINDS[cache], PLAIN)
    varying = {
        "key_ptr": words[0],
        "value_ptr": words[1],
        "wide_key_ptr": pages.key,
        "wide_value_ptr": pages.value,
        "sources_ptr": pages.sources,
        "total_ptr": pages.total,
        "table_ptr": table,
        "seq_lens_ptr": lens,
        "table_row": table.stride(0),
    }
    launcher.bind((7, HEADS), varying).launch()
    _check(wide, views, table, lens, starts_of_keys, pages, block_size)


def _write_pages(
    starts: torch.Tensor, lens: torch.Tensor, pages: DequantisedKeys, window: int | None
) -> None:
    """Write the table of pages as the builder does, with smaller pages."""
    with mock.patch.object(dequantised, "PAGE", PAGE):
        write_dequantised_pages(starts, lens, pages, 16, window)


def _check(
    wide: list[torch.Tensor],
    views: KVViews,
    table: torch.Tensor,
    lens: torch.Tensor,
    starts_of_keys: list[int],
    pages: DequantisedKeys,
    block_size: int,
) -> None:
    used = int(pages.total)
    wanted = [-(-int(lens[req]) // PAGE) - starts_of_keys[req] // PAGE for req in (0, 2, 3)]
    assert used == sum(wanted)
    for rows, stored in zip(wide, (views.key, views.value), strict=True):
        for place in range(len(rows)):
            req, page, _ = pages.sources[place].tolist()
            for inside in range(PAGE):
                token, found = page * PAGE + inside, rows[place, :, inside]
                if place >= used or token >= int(lens[req]):
                    # The kernel must not have written there.
                    assert bool((found == 7.0).all())
                    continue
                if token < starts_of_keys[req]:
                    assert not bool(found.any())
                    continue
                block = int(table[req, token // block_size])
                expected = stored[block, token % block_size].float().to(rows.dtype)
                assert torch.equal(found.nan_to_num(3.0), expected.nan_to_num(3.0))


DEQUANTISED = [variant for variant in HOPPER_VARIANTS if variant.kernel is Kernel.DEQUANTISE]


@pytest.mark.parametrize("variant", DEQUANTISED, ids=lambda variant: variant.of)
def test_every_page_of_the_step_has_a_program(variant: Variant) -> None:
    """Two requests of 41 keys have one page each.

    With one program too few, the last page would keep the keys of an earlier step.
    """
    assert call_of(variant, 90).grid == (2, variant.layer.heads[1])
