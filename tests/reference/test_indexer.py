"""The indexer's planar cache, logits and causal top-k, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.reference.indexer import causal_topk, index_logits, read_index_keys, write_index_keys
from attn.testing import batches, oracle
from attn.testing.batches import POISON_BYTE, WILD_BLOCK
from attn.testing.stored_rows import Stored, block_scale
from specs.layouts import LatentKVLayout
from specs.rows import INDEXER_PAGE, LatentFormat

SIZE, BLOCKS = 128, 5
DATA = INDEXER_PAGE * SIZE
"""Bytes of a page before its scales."""
PAGE = DATA + INDEXER_PAGE * 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("padding", [0, 128])
def test_index_keys_lie_in_planar_pages_and_come_back(padding: int) -> None:
    layout = LatentKVLayout(
        block_size=INDEXER_PAGE,
        format=LatentFormat.INDEXER_FP8,
        kv_lora_rank=SIZE,
        qk_rope_head_dim=0,
        page_size_padded=PAGE + padding if padding else None,
    )
    buffer = torch.full((layout.nbytes(BLOCKS),), POISON_BYTE, dtype=torch.uint8)
    cache = layout.view(buffer, BLOCKS)
    keys = normal(100, SIZE) * torch.logspace(-3, 3, 100)[:, None]
    table = torch.tensor([3, 1, WILD_BLOCK], dtype=torch.int32)
    places = [(int(table[i // INDEXER_PAGE]), i % INDEXER_PAGE) for i in range(100)]
    slots = torch.tensor([block * INDEXER_PAGE + offset for block, offset in places])
    skipped = slots.clone()
    skipped[[7, 70]] = -1
    write_index_keys(keys, cache, skipped)

    pages = buffer.view(BLOCKS, PAGE + padding)
    data = pages[:, :DATA].reshape(BLOCKS * INDEXER_PAGE, SIZE)
    scales = pages[:, DATA:PAGE].reshape(BLOCKS * INDEXER_PAGE, 4)
    kept = skipped >= 0
    units = data[slots[kept]].view(torch.float8_e4m3fn).double()
    scale = scales[slots[kept]].contiguous().view(torch.float32).double()
    assert torch.equal(scale, block_scale(keys[kept]))
    assert not bool(Stored(units, scale, torch.float8_e4m3fn).misses(keys[kept]).any())
    untouched = torch.ones(BLOCKS * INDEXER_PAGE, dtype=torch.bool)
    untouched[skipped[kept]] = False
    for part in (data[untouched], scales[untouched], pages[:, PAGE:]):
        assert batches.is_poison(part)

    write_index_keys(keys[~kept], cache, slots[~kept])
    real = read_index_keys(cache, table, 100, torch.float64)
    assert torch.equal(real[kept], units * scale)
    assert bool(real.isfinite().all())


def test_no_and_zero_index_keys_are_no_error() -> None:
    layout = LatentKVLayout(
        block_size=INDEXER_PAGE, format=LatentFormat.INDEXER_FP8, kv_lora_rank=SIZE
    )
    cache = layout.allocate(BLOCKS, fill_byte=POISON_BYTE)
    write_index_keys(normal(0, SIZE), cache, torch.empty(0, dtype=torch.int64))
    assert batches.is_poison(cache)
    write_index_keys(torch.zeros(1, SIZE), cache, torch.tensor([INDEXER_PAGE]))
    row = torch.tensor([1, WILD_BLOCK], dtype=torch.int32)
    assert bool((read_index_keys(cache, row, 1, torch.float32) == 0).all())
    assert read_index_keys(cache, row, 0, torch.float32).shape == (0, SIZE)


def test_logits_match_the_oracle() -> None:
    q, k, weights = normal(6, 4, 16), normal(20, 16, seed=1), normal(6, 4, seed=2)
    expected = oracle.index_logits(q, k, weights, 14)
    seen = expected > -torch.inf
    # The reference does not mask; the float32 sum has at most 2 * 16 * 4 roundings.
    size = torch.einsum("thd,sd,th->ts", q.abs(), k.abs(), weights.abs())
    for dtype in (torch.float32, torch.float64):
        got = index_logits(q.to(dtype), k, weights)
        assert got.dtype == dtype
        limit = 2 * 16 * 4 * torch.finfo(dtype).eps * size.double()
        assert bool(((got.double() - expected).abs() <= limit)[seen].all())


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 9), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_topk_matches_the_oracle_and_breaks_ties_downwards(
    seed: int, num_queries: int, first: int, topk: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_keys = first + num_queries

    def small(*shape: int) -> Tensor:
        """Small integers, so that sums are exact and ties are many."""
        return torch.randint(-1, 2, shape, generator=generator).float()

    q, k, weights = small(num_queries, 2, 3), small(num_keys, 3), small(num_queries, 2)
    expected = oracle.index_topk(q, k, weights, first, topk)
    got = causal_topk(index_logits(q, k, weights), first, topk)
    assert got.dtype == torch.int32
    assert got.tolist() == expected.tolist()


def test_topk_of_no_queries_is_empty() -> None:
    assert causal_topk(torch.empty(0, 4), 4, 3).shape == (0, 3)
