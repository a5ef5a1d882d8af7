"""Decode context parallelism: ranks keep a part of the keys each, and their states merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attn.backends.triton_attn import TritonAttentionBackend
from attn.impls.dense.triton_attn import TritonAttentionImpl
from builders.batch import CommonAttentionMetadata
from builders.dense.torch_ref import TorchRefMetadataBuilder
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.latent.torch_ref_mla import TorchRefMLAMetadataBuilder
from builders.splitkv.stripe import Stripe
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from tests.conformance.ranks import BLOCK, DEVICE, HEADS, SIZE, Asks, Rank, check_ranks

SCALE = SIZE**-0.5
STEPS = {
    "decode": ((1, 1, 1, 1), (70, 1, 33, 2)),
    "verify": ((3, 4, 1), (70, 33, 17)),
    "prefill": ((40, 20), (40, 20)),
    "mix": ((1, 30, 4, 2), (90, 45, 33, 2)),
}
SINKS = Asks(sinks=(0.5, -2.0, 3.0, 1.0))


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_states_of_all_ranks_merge_to_the_whole(name: str, ranks: int, interleave: int) -> None:
    check_ranks([Stripe(ranks, rank, interleave) for rank in range(ranks)], STEPS[name])


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (DType.FLOAT16, CacheDType.AUTO),
        (DType.FLOAT16, CacheDType.FP8),
        (DType.FLOAT16, CacheDType.INT8_PER_TOKEN_HEAD),
    ],
)
def test_every_cache_can_be_shared(dtype: DType, cache_dtype: CacheDType) -> None:
    stripes = [Stripe(2, rank, 1) for rank in range(2)]
    check_ranks(stripes, STEPS["mix"], dtype, cache_dtype)


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 16)])
@pytest.mark.parametrize("name", STEPS)
def test_a_sink_is_counted_once_whatever_the_ranks(name: str, ranks: int, interleave: int) -> None:
    """Rank 0 counts the sink: some rows of the second step have keys on rank 0 only."""
    check_ranks([Stripe(ranks, rank, interleave) for rank in range(ranks)], STEPS[name], asks=SINKS)


def test_a_sink_outweighs_all_keys_on_one_rank_only() -> None:
    """With lengths 40 and 70, sinks counted on both ranks would halve the output once more."""
    stripes = [Stripe(2, rank, 1) for rank in range(2)]
    states = check_ranks(stripes, ((1, 1), (40, 70)), asks=Asks(sinks=(9.0, 9.0, 9.0, 9.0)))
    with_sinks, without = (lse for _, lse in states)
    assert (with_sinks > 8.9).all()
    assert (without < 8.9).all()


def test_a_layer_without_log_sum_exps_counts_sinks_by_rank_again_and_again() -> None:
    """Later steps, which launch a kept variant, give the results of the first step."""
    rank = Rank(Stripe(2, 1, 1), DType.FLOAT32, CacheDType.AUTO, SINKS)
    plain = Rank(Stripe(2, 1, 1), DType.FLOAT32, CacheDType.AUTO)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, HEADS, SIZE, generator=generator).to(DEVICE)
    key, value = (torch.randn(40, 1, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    outputs = []
    for one in (rank, rank, rank, plain):
        one.write(0, key, value)
        batch = CommonAttentionMetadata.from_lengths((1,), (40,), one.table[:1], BLOCK)
        record = one.builder.build(0, batch)
        output = torch.empty_like(query)
        one.impl.forward(one.layer, query, None, None, one.cache, record, output)
        outputs.append(output)
    assert all(torch.equal(output, outputs[-1]) for output in outputs)


@pytest.mark.parametrize(
    "asks",
    [
        replace(SINKS, logits_soft_cap=5.0),
        replace(SINKS, causal=False),
        replace(SINKS, head_size_v=40),
        Asks(causal=False, logits_soft_cap=5.0, head_size_v=40),
    ],
)
def test_what_does_not_depend_on_positions_goes_together_with_ranks(asks: Asks) -> None:
    check_ranks([Stripe(2, rank, 4) for rank in range(2)], STEPS["mix"], asks=asks)


@pytest.mark.parametrize("cache_dtype", [CacheDType.FP8, CacheDType.FP8_E5M2])
def test_ranks_scale_what_they_keep(cache_dtype: CacheDType) -> None:
    asks = replace(SINKS, k_scale=(0.037,))
    check_ranks(
        [Stripe(2, rank, 1) for rank in range(2)], STEPS["mix"], DType.FLOAT16, cache_dtype, asks
    )


def test_batch_invariant_ranks_merge_too() -> None:
    stripes = [Stripe(2, rank, 1) for rank in range(2)]
    check_ranks(stripes, STEPS["mix"], asks=SINKS, batch_invariant=True)
    check_ranks(stripes, STEPS["mix"], asks=SINKS, exact_host_lengths=False)


def test_a_rank_has_blocks_for_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    stripes = [Stripe(3, rank, 1) for rank in range(3)]
    check_ranks(stripes, ((1, 1), (9 * BLOCK * 3 - 1, 40)))


def test_masks_of_positions_are_refused() -> None:
    rank = Rank(Stripe(2, 0, 1), DType.FLOAT16, CacheDType.AUTO)
    rank.impl = TritonAttentionImpl(HEADS, SIZE, SCALE, 1, [0.5] * HEADS)
    query = torch.zeros(1, HEADS, SIZE, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match=r"decode_context_parallel_size \(2\).*alibi_slopes"):
        rank.state(query, (1,), (9,))
    rank.impl = TritonAttentionImpl(HEADS, SIZE, SCALE, 1, sliding_window=5)
    with pytest.raises(ValueError, match=r"decode_context_parallel_size \(2\).*sliding_window"):
        rank.state(query, (1,), (9,))


def builder_of(spec: AnyKVCacheSpec, **config: Any) -> TritonAttentionMetadataBuilder:
    parallel = ParallelConfig(decode_context_parallel_size=2, decode_context_parallel_rank=1)
    engine = EngineConfig(max_model_len=64, num_heads=HEADS, parallel=parallel, **config)
    return TritonAttentionMetadataBuilder(spec, ["layers.0"], engine, DEVICE)


FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE)


@pytest.mark.parametrize(
    "kind",
    [
        partial(SlidingWindowSpec, sliding_window=9),
        partial(ChunkedLocalAttentionSpec, attention_chunk_size=9),
        partial(SinkFullAttentionSpec, sink_len=16),
        CrossAttentionSpec,
    ],
)
def test_a_group_that_ranks_do_not_share_is_refused(kind: Callable[..., AnyKVCacheSpec]) -> None:
    """Ranks would keep keys that nobody merges, or would miss keys that were never written."""
    spec = kind(block_size=BLOCK, num_kv_heads=1, head_size=SIZE)
    with pytest.raises(ValueError, match=r"FullAttentionSpec with .*_size 2, got [A-Z]\w+: the"):
        builder_of(spec)
    assert TritonAttentionBackend.supports_dcp()


def test_a_group_that_every_rank_keeps_whole_has_no_stripe() -> None:
    assert builder_of(FULL).visible.stripe == Stripe(2, 1, 1)
    assert builder_of(FULL.replace(dcp_sharded=False)).visible.stripe is None
    encoder = EncoderOnlyAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE)
    assert builder_of(encoder).visible.stripe is None


def test_masks_that_a_batch_asks_for_are_refused_when_it_is_built() -> None:
    rank = Rank(Stripe(2, 0, 1), DType.FLOAT16, CacheDType.AUTO)
    batch = CommonAttentionMetadata.from_lengths((1,), (40,), rank.table[:1], BLOCK)
    ranges = batch.replace(mm_req_doc_ranges={0: [(2, 9)]})
    with pytest.raises(ValueError, match=r"parallel_size \(2\) .* with mm_req_doc_ranges$"):
        rank.builder.build(0, ranges)
    assert rank.builder.build(0, batch.replace(mm_req_doc_ranges={0: []})).mm_ranges is None
    with pytest.raises(ValueError, match=r"parallel_size \(2\) .* with rswa_window \(7\)"):
        builder_of(FULL, rswa_window=7)


@pytest.mark.parametrize(
    ("builder", "spec"),
    [
        (TorchRefMetadataBuilder, FULL),
        (TorchRefMLAMetadataBuilder, MLAAttentionSpec(block_size=64)),
    ],
)
def test_builders_of_kernels_without_ranks_refuse_them(
    builder: Callable[..., Any], spec: AnyKVCacheSpec
) -> None:
    parallel = ParallelConfig(decode_context_parallel_size=2)
    engine = EngineConfig(max_model_len=64, num_heads=HEADS, parallel=parallel)
    with pytest.raises(ValueError, match=r"decode_context_parallel_size must be 1 for .*, got 2"):
        builder(spec, ["layers.0"], engine, DEVICE)
