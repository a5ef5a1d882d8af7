"""Kernels over caches and rows with offsets, in elements, that do not fit 32 bits.

Every stride fits, as it does in a large cache of an engine. Triton then passes the stride as int32,
and its product with the number of a page is int32 too unless the kernel converts it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.sparse_mla import SparseMLABackend
from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.kernels.dense.checks import check_reach
from attn.ops.clear import clear_tails
from attn.ops.dispatch import has_kernel
from attn.ops.gather import pack_query
from attn.ops.indexer import gather_index_keys, paged_index_logits, write_index_keys
from attn.ops.rope_quant import rope_quantize
from attn.testing import batches
from attn.testing.batches import BatchSpec, Heads, poisoned
from attn.testing.cases import Case, Feature, LatentCase
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from builders.sparse.tiles import SparseTile
from specs.attention import AttentionType
from specs.cache_write import Rotation, UnrotatedLatents
from specs.dtypes import CacheDType, DType
from specs.layouts import KVOrder, KVPacking
from specs.rows import LatentFormat
from tests.lang.far_memory import PAGE_BYTES, far_pages, spread
from tests.sparse.sparse_cases import LAYOUTS, SparseCase, SparseTrial, attend
from tests.sparse.test_index_kernels import Paged

pytestmark = pytest.mark.skipif(
    not has_kernel(torch.ones(1)) or torch.cuda.is_available(),
    reason="needs Triton's interpreter, and memory that is given when it is written",
)
CPU = torch.device("cpu")
STEP = BatchSpec("far_offsets", (1, 2, 20), (33, 40, 51))
CACHES = (
    CacheDType.AUTO,
    CacheDType.FP8_E4M3,
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.INT4_PER_TOKEN_HEAD,
)
TOKEN = 1 << 27
"""Elements from one token to the next: token 16 lies at offset 2^31."""
ROW = 1 << 30
"""Elements from one row to the next: row 2 lies at offset 2^31."""


def findings(trial: Trial) -> dict[str, list[str]]:
    """The oracle's findings about one step over a far cache: its writes and its attention."""
    trial.write()
    record = trial.build(trial.builder())
    result = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    return result.findings


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("packing", KVPacking)
def test_dense_pages_are_written_and_attended(cache_dtype: CacheDType, packing: KVPacking) -> None:
    case = Case(
        batch=STEP,
        heads=Heads(2, 1, 32),
        dtype=DType.FLOAT32,
        cache_dtype=cache_dtype,
        packing=packing,
        order=KVOrder.NHD,
        padded_pages=True,
    )
    with far_pages():
        assert findings(DenseTrial(TritonAttentionBackend, case, CPU)) == {}


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3])
def test_latent_pages_are_written_attended_and_expanded(cache_dtype: CacheDType) -> None:
    case = LatentCase(
        batch=STEP,
        dtype=DType.FLOAT16,
        cache_dtype=cache_dtype,
        num_heads=1,
        rank=64,
        rope_size=32,
        padded_pages=True,
    )
    with far_pages():
        assert findings(LatentTrial(TritonMLABackend, case, CPU)) == {}


def test_a_sparse_layer_writes_and_attends_its_pages() -> None:
    case = LatentCase(
        batch=STEP,
        dtype=DType.FLOAT16,
        num_heads=1,
        rank=128,
        rope_size=32,
        block_size=64,
        padded_pages=True,
        lists="holes",
    )
    with far_pages():
        assert findings(LatentTrial(SparseMLABackend, case, CPU)) == {}


def far_rows(*shape: int, **given: Any) -> Tensor:
    return spread(poisoned(*shape, **given), 0, TOKEN)


# The last two decodes and the prefill lie at offsets of 2^31 and more.
ROWS = BatchSpec("far_rows", (1,) * 18 + (20,), (5,) * 18 + (30,))
ENCODER = AttentionType.ENCODER_ONLY
KINDS = {
    "paged": (TritonAttentionBackend, Case(batch=ROWS, heads=Heads(2, 1, 32))),
    "encoder": (
        TritonAttentionBackend,
        Case(
            Feature("encoder", attn_type=ENCODER),
            BatchSpec("far_offsets", (33, 20), (33, 20)),
            Heads(2, 1, 32),
        ),
    ),
    "latent": (
        TritonMLABackend,
        LatentCase(batch=ROWS, dtype=DType.FLOAT32, num_heads=1, rank=64, rope_size=32),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_queries_keys_and_outputs_of_tokens_lie_anywhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, case = KINDS[name]
    trial: Any = (LatentTrial if name == "latent" else DenseTrial)(backend, case, CPU)
    inputs = trial.inputs
    trial.inputs = replace(
        inputs,
        query=spread(inputs.query, 0, TOKEN),
        key=spread(inputs.key, 0, TOKEN),
        value=None if inputs.value is None else spread(inputs.value, 0, TOKEN),
    )
    monkeypatch.setattr(batches, "poisoned", far_rows)
    assert findings(trial) == {}


def test_heads_of_a_token_beyond_32_bits_are_refused() -> None:
    near = torch.empty_strided((4, 3, 8), (8, 2**30 - 1, 1), device="meta")
    check_reach("query", near)
    far = torch.empty_strided((4, 3, 8), (8, 2**30, 1), device="meta")
    with pytest.raises(
        ValueError, match=r"query must have .* within 2\^31 .* got shape \[4, 3, 8\]"
    ):
        check_reach("query", far)


TILES = {
    "few heads": (4, SparseTile(16, 16, 32, 1, 4, 2)),
    "few heads, held": (4, SparseTile(16, 16, 32, 99, 4, 2, holds_next=True)),
    "many heads": (20, SparseTile(64, 16, 64, 1, 4, 2, many=True)),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_listed_rows_lie_anywhere(layout: LatentFormat, name: str) -> None:
    heads, tile = TILES[name]
    trial = SparseTrial(SparseCase(layout, heads, (90, 40, 5)))
    given = trial.arguments()
    # The kernel counts offsets in units of 16 bytes, to which rows are aligned.
    pages = spread(trial.cache, 0, 1 << 33)
    one = trial.cache.reshape(1, -1, trial.cache.shape[2])
    # In a cache of one page, the number of a row is its place in the page.
    rows = spread(one, 1, 1 << 29)
    queries = {name: spread(given[name], 0, ROW) for name in ("query", "rotary")}
    for changes in ({"kv_cache": pages}, {"kv_cache": rows}, queries):
        out, lse = trial.results()
        attend(**{**given, **changes}, output=out, lse=lse, tile=tile)
        assert trial.misses(out, lse) == {}


def test_index_keys_are_written_gathered_and_scored() -> None:
    given = Paged((130, 1, 64, 65), 4, torch.float16)
    cache = spread(given.cache, 0, PAGE_BYTES)
    count, width = 64 * len(cache), cache.shape[2] - 4
    # The scores of the keys that the cache holds must be equal.
    lens = torch.tensor(given.lens, dtype=torch.int32)
    found = [torch.zeros(4, 256) for _ in range(2)]
    for logits, keys in zip(found, (given.cache, cache), strict=True):
        paged_index_logits(given.query, given.weights, keys, given.table, None, lens, logits)
    assert torch.equal(*found)
    # New keys are written over some of them, and must be read back alike.
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:99]
    rows = []
    for keys in (given.cache, cache):
        write_index_keys(torch.randn(99, width, generator=_seeded()), keys, slots)
        out = torch.zeros(99, width).to(torch.float8_e4m3fn), torch.zeros(99)
        gather_index_keys(keys, slots, *out)
        rows.append(out)
    assert torch.equal(rows[0][0].view(torch.uint8), rows[1][0].view(torch.uint8))
    assert torch.equal(rows[0][1], rows[1][1])
    assert bool(rows[0][1].all())


def test_slots_behind_the_last_key_are_cleared() -> None:
    cache = torch.randint(1, 100, (5, 16, 2, 32), dtype=torch.int16)
    far = spread(cache, 0, ROW)
    pages = torch.tensor([[4, 2], [1, 3]], dtype=torch.int32)
    lens = torch.tensor([20, 7], dtype=torch.int32)
    for rows in (cache, far):
        clear_tails(rows[..., :16], rows[..., 16:], pages, lens)
    assert torch.equal(far, cache)
    assert not bool(cache[2, 4:].any())
    assert not bool(cache[1, 7:].any())


def test_rows_of_a_batch_lie_anywhere() -> None:
    nope, rope = torch.randn(4, 2, 32).half(), torch.randn(4, 2, 16).half()
    index = torch.tensor([3, -1, 2, 0], dtype=torch.int32)
    packed = [torch.zeros(4, 2, 48).half() for _ in range(2)]
    for out, axis in zip(packed, (0, 1), strict=True):
        far = [spread(x, axis, ROW << axis) for x in (nope, rope)]
        pack_query(*far, index, 1.0, out)
    assert torch.equal(*packed)
    assert torch.equal(packed[0][0], torch.cat([nope[3], rope[3]], -1))


def test_latent_rows_are_rotated_and_written() -> None:
    tokens, rank, rope = 4, 32, 16
    generator = _seeded()
    nope = torch.randn(tokens, 2, rank, generator=generator).half()
    q_pe = torch.randn(tokens, 2, rope, generator=generator).half()
    kv_c = torch.randn(tokens, rank, generator=generator).half()
    k_pe = torch.randn(tokens, rope, generator=generator).half()
    table = torch.randn(64, rope, generator=generator)
    slots = torch.tensor([70, 1, 33, 50])
    one = torch.ones(())
    cache = torch.zeros(5, 16, rank + rope, dtype=torch.uint8)
    for pages in (cache, far := spread(cache, 0, ROW)):
        e4m3 = pages.view(torch.float8_e4m3fn)
        out = torch.zeros(tokens, 2, rank + rope).to(torch.float8_e4m3fn)
        rope_quantize(
            UnrotatedLatents(nope, q_pe, spread(kv_c, 0, ROW), spread(k_pe, 0, ROW)),
            Rotation(torch.arange(tokens), table, True),
            *(one, one, out, None),
            (e4m3[..., :rank], e4m3[..., rank:]),
            slots,
        )
    assert torch.equal(far, cache)
    assert bool(cache[4, 6].any())


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)
