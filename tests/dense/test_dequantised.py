"""Pages of dequantised keys: where they come from, and when prefills are given them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import builders.dense.choice
import builders.dense.triton_attn
from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.dense import dequantised
from builders.dense.dequantised import (
    PAGE,
    DequantisedPages,
    launch_dequantised_pages,
    write_dequantised_pages,
)
from builders.dense.record import TritonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.device import interprets
from builders.splitkv.record import DequantisedKeys, SplitLimits
from builders.splitkv.tiles import DenseShape
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from tests.tools.gpus import hopper

CPU = torch.device("cpu")
SHAPE = DenseShape(8, 2, 128, 128, 2, 8)
TYPES = torch.float16, CacheDType.FP8_E4M3
SHORT = 16
LENS = ([20, 0, 3, 300, 17, 1], [20, 0, 900, 1000, 129, 128])
"""Query and KV lengths: three requests have long queries."""


def pages_of(
    query_lens: list[int], kv_lens: list[int], window: int | None, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, DequantisedKeys]:
    """A step's query starts, its KV lengths, and empty buffers for its pages."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    buffers = GraphBuffers(CPU)
    buffers.declare("table", (len(kv_lens), 16), torch.int32, fill=-1)
    buffers.declare("sources", (capacity, 3), torch.int32, fill=-1)
    buffers.declare("total", (1,), torch.int32, fill=-1)
    rows = torch.zeros(0)
    named = buffers["table"], buffers["sources"], buffers["total"]
    return starts, torch.tensor(kv_lens, dtype=torch.int32), DequantisedKeys(rows, rows, *named, 0)


@pytest.mark.parametrize("capacity", [64, 10, 1])
@pytest.mark.parametrize("window", [None, 1, 100, 513])
def test_pages_follow_one_another_from_the_first_that_is_seen(
    window: int | None, capacity: int
) -> None:
    starts, lens, pages = pages_of(*LENS, window, capacity)
    write_dequantised_pages(starts, lens, pages, SHORT, window)
    expected, place = [], 0
    for req, (count, kv_len) in enumerate(zip(*LENS, strict=True)):
        seen = (
            range(kv_len) if window is None else range(max(kv_len - count - window + 1, 0), kv_len)
        )
        if count > SHORT:
            expected += [[req, page, seen[0]] for page in sorted({key // PAGE for key in seen})]
    assert pages.total.tolist() == [min(len(expected), capacity)]
    assert pages.sources.tolist()[: len(expected)] == expected[:capacity]
    for place, (req, page, _) in enumerate(expected[:capacity]):
        assert int(pages.table[req, page]) == place


@pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("capacity", [64, 5])
@pytest.mark.parametrize("window", [None, 1, 100, 513])
def test_the_kernel_writes_what_its_twin_does(window: int | None, capacity: int) -> None:
    starts, lens, expected = pages_of(*LENS, window, capacity)
    write_dequantised_pages(starts, lens, expected, SHORT, window)
    pages = pages_of(*LENS, window, capacity)[2]
    launch_dequantised_pages(starts, lens, pages, SHORT, window, 8)
    for name in ("table", "sources", "total"):
        assert torch.equal(getattr(pages, name), getattr(expected, name)), name


def test_the_host_counts_the_same_pages() -> None:
    queries, keys = (torch.tensor(lens) for lens in LENS)
    for window in (None, 1, 100, 513):
        limits = SplitLimits(8, 512, 2048, window)
        made = DequantisedPages(SHAPE, *TYPES, limits, SHORT, window, 1 << 24, CPU)
        starts, lens, pages = pages_of(*LENS, window, 64)
        write_dequantised_pages(starts, lens, pages, SHORT, window)
        assert made.host_rows(queries, keys).pages == int(pages.total)
    rows = DequantisedPages(SHAPE, *TYPES, SplitLimits(8, 512, 2048, None), SHORT, None, None, CPU)
    # A key meets the rows of 600 new tokens by 4 query heads of its KV head.
    assert rows.host_rows(torch.tensor([600]), torch.tensor([800])).rows_per_key == 2400


@pytest.mark.parametrize("window", [2, PAGE - 1, PAGE, PAGE + 1, 300])
def test_the_host_counts_the_page_of_the_first_key_wherever_that_lies(window: int) -> None:
    """The launch has a program for each page that the host counts.

    With one program too few, the last page would keep the keys of an earlier step.
    """
    for context in range(window + PAGE - 3, window + PAGE + 3):
        lens = [SHORT + 1, 40], [context + SHORT + 1, context + 40]
        limits = SplitLimits(8, 512, 2048, window)
        made = DequantisedPages(SHAPE, *TYPES, limits, SHORT, window, 1 << 24, CPU)
        first = context - (window - 1)
        expected = sum(len({key // PAGE for key in range(first, stop)}) for stop in lens[1])
        assert made.host_rows(*map(torch.tensor, lens)).pages == expected
        starts, kv_lens, pages = pages_of(*lens, window, 64)
        write_dequantised_pages(starts, kv_lens, pages, SHORT, window)
        assert int(pages.total) == expected
        if interprets():
            launched = pages_of(*lens, window, 64)[2]
            launch_dequantised_pages(starts, kv_lens, launched, SHORT, window, 8)
            assert torch.equal(launched.sources, pages.sources)
            assert torch.equal(launched.total, pages.total)


def builder_of(
    monkeypatch: pytest.MonkeyPatch, spec: AnyKVCacheSpec | None = None, **changes: Any
) -> TritonAttentionMetadataBuilder:
    """A builder on the CPU, which takes its device for a Hopper GPU."""
    monkeypatch.setattr(builders.dense.triton_attn, "device_facts", lambda _: hopper(132))
    config = EngineConfig(
        max_model_len=2048,
        max_num_seqs=8,
        num_heads=8,
        kernels=Kernels.own(PrefillKernel.HOPPER, DecodeKernel.TRITON),
        prefill_workspace_bytes=1 << 23,
    ).replace(**changes)
    return TritonAttentionMetadataBuilder(spec or FullAttentionSpec(**FIELDS), ["x"], config, "cpu")


FIELDS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 128,
    "dtype": DType.BFLOAT16,
    "cache_dtype": CacheDType.FP8_E4M3,
}


def batch_of(query_lens: list[int], kv_lens: list[int]) -> CommonAttentionMetadata:
    table = torch.ones(len(kv_lens), 128, dtype=torch.int32)
    return CommonAttentionMetadata.from_lengths(query_lens, kv_lens, table, 16)


def dequantised_of(record: TritonAttentionMetadata) -> DequantisedKeys | None:
    assert record.prefill is not None
    assert record.prefill.hopper is not None
    return record.prefill.hopper.dequantised


@pytest.mark.parametrize("by_13", [False, True])
@pytest.mark.parametrize("head_size", range(48, 257, 8))
def test_prompts_of_every_head_size_are_dequantised(
    head_size: int, by_13: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tile over dequantised keys has the query tokens and the keys of one that dequantises them.
    monkeypatch.setattr(builders.dense.choice, "is_by_ptxas_13", lambda: by_13)
    spec = FullAttentionSpec(**FIELDS | {"head_size": head_size})
    builder = builder_of(monkeypatch, spec, prefill_workspace_bytes=1 << 25)
    assert dequantised_of(builder.build(0, batch_of([600], [800]))) is not None


def test_prompts_long_enough_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(monkeypatch)
    pages = dequantised_of(builder.build(0, batch_of([600, 1], [800, 5])))
    assert pages is not None
    assert pages.pages == 7
    assert pages.sources[:7].tolist() == [[0, page, 0] for page in range(7)]
    assert pages.key.shape[1:] == (PAGE, 2, 128)
    # Nothing is dequantised: a key meets 80 rows only, or the workspace is too small.
    assert dequantised_of(builder.build(0, batch_of([20], [800]))) is None
    assert dequantised_of(builder.build(0, batch_of([1000] * 8, [2048] * 8))) is None
    # Nothing is dequantised where only the device knows the lengths.
    batch = batch_of([600], [800]).replace(seq_lens_cpu_upper_bound=None)
    assert dequantised_of(builder.build(0, batch)) is None


def test_a_window_s_keys_count_with_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # A layer of gpt-oss: 8 query heads to a KV head and a window of 128 keys, 1,024 query rows for
    # a key. A chunk of a prompt reads keys of the chunk before, so that on average there are fewer.
    shape = {"head_size": 64, "num_kv_heads": 1}
    spec = SlidingWindowSpec(**FIELDS | shape, sliding_window=128)
    builder = builder_of(monkeypatch, spec)
    assert dequantised_of(builder.build(0, batch_of([1000], [2000]))) is not None


def test_other_blocks_are_dequantised_and_other_lengths_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder, batch = builder_of(monkeypatch), batch_of([600, 20, 3], [800, 300, 4])
    assert dequantised_of(builder.build_for_cudagraph_capture(batch)) is None
    record = builder.build(0, batch)
    table, slots = record.block_table + 1, record.slot_mapping
    pages = dequantised_of(record)
    assert pages is not None
    assert dequantised_of(builder.update_block_table(record, table, slots)) is pages
    # The builder of another group has pages of its own.
    other = builder_of(monkeypatch)
    own = dequantised_of(other.update_block_table(record, table, slots))
    assert own is not None
    assert own.key.data_ptr() != pages.key.data_ptr()
    for name in ("table", "sources", "total"):
        assert torch.equal(getattr(own, name), getattr(pages, name)), name
    small = builder_of(monkeypatch, prefill_workspace_bytes=1 << 17)
    assert dequantised_of(small.update_block_table(record, table, slots)) is None
    builder.update_draft_decode_metadata(record)
    assert dequantised_of(record) is None


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (None, {"prefill_workspace_bytes": 0}),
        (None, {"exact_host_lengths": False}),
        (None, {"rswa_window": 8}),
        (FullAttentionSpec(**FIELDS | {"cache_dtype": CacheDType.AUTO}), {}),
        (ChunkedLocalAttentionSpec(**FIELDS, attention_chunk_size=64), {}),
        (CrossAttentionSpec(**FIELDS), {"kernels": Kernels.own(decode=DecodeKernel.TRITON)}),
    ],
)
def test_what_is_never_dequantised(
    spec: AnyKVCacheSpec | None, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builder_of(monkeypatch, spec, **changes)._dequantised is None


def test_ranges_reach_beyond_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SlidingWindowSpec(**FIELDS, sliding_window=600)
    builder, batch = builder_of(monkeypatch, spec), batch_of([600], [1500])
    pages = dequantised_of(builder.build(0, batch))
    assert pages is not None
    assert pages.pages == 12 - (1500 - 600 - 599) // PAGE
    ranged = batch.replace(mm_req_doc_ranges={0: [(0, 700)]})
    assert dequantised_of(builder.build(0, ranged)) is None


def test_the_bound_of_rows_is_the_module_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantised, "LEAST_ROWS", 0)
    assert dequantised_of(builder_of(monkeypatch).build(0, batch_of([20], [800]))) is not None


@pytest.mark.parametrize(
    ("cache_dtype", "of_values"),
    [(CacheDType.FP8_E4M3, torch.float16), (CacheDType.FP8_E5M2, torch.bfloat16)],
)
def test_values_have_the_type_that_tiles_convert_to(
    cache_dtype: CacheDType, of_values: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = FIELDS | {"cache_dtype": cache_dtype, "dtype": DType.BFLOAT16}
    pages = dequantised_of(
        builder_of(monkeypatch, FullAttentionSpec(**fields)).build(0, batch_of([600], [800]))
    )
    assert pages is not None
    assert (pages.key.dtype, pages.value.dtype) == (torch.bfloat16, of_values)
