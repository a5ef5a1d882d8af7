"""Decode context parallelism: ranks keep a part of the keys each, and their states merge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_attn import TritonAttentionBackend
from attn.impls.base import LayerScales
from attn.impls.triton_attn import TritonAttentionImpl
from builders.common import CommonAttentionMetadata
from builders.paging import Stripe
from builders.torch_ref import TorchRefMetadataBuilder
from builders.torch_ref_mla import TorchRefMLAMetadataBuilder
from builders.triton_attn import TritonAttentionMetadataBuilder
from builders.triton_mla import TritonMLAMetadataBuilder
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
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
from tests import budget, stored_rows
from tests.oracle import Rules, attention
from tests.trials import low_precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE, BLOCK = 4, 32, 16
SCALE = SIZE**-0.5
STEPS = {
    "decode": ((1, 1, 1, 1), (70, 1, 33, 2)),
    "verify": ((3, 4, 1), (70, 33, 17)),
    "prefill": ((40, 20), (40, 20)),
    "mix": ((1, 30, 4, 2), (90, 45, 33, 2)),
}


@dataclass(frozen=True)
class Asks:
    """What a layer asks beyond plain causal attention."""

    causal: bool = True
    sinks: tuple[float, ...] | None = None
    """One logit per query head."""
    logits_soft_cap: float | None = None
    head_size_v: int | None = None
    k_scale: tuple[float, ...] = (1.0,)
    """Per KV head; of V a half of them."""

    @property
    def v_size(self) -> int:
        return self.head_size_v or SIZE

    @property
    def sink_logits(self) -> Tensor | None:
        return None if self.sinks is None else torch.tensor(self.sinks)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.k_scale), torch.tensor(self.k_scale) / 2

    @property
    def rules(self) -> Rules:
        return Rules(
            SCALE,
            causal=self.causal,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sink_logits,
        )


PLAIN = Asks()
SINKS = Asks(sinks=(0.5, -2.0, 3.0, 1.0))


class Rank:
    """One rank's part of a layer: a cache of its own tokens."""

    def __init__(
        self,
        stripe: Stripe,
        dtype: DType,
        cache_dtype: CacheDType,
        asks: Asks = PLAIN,
        **config: Any,
    ) -> None:
        self.stripe, self.asks = stripe, asks
        self.spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=SIZE,
            head_size_v=asks.head_size_v,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )
        engine = EngineConfig(
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            num_heads=HEADS,
            parallel=ParallelConfig(
                decode_context_parallel_size=stripe.size,
                decode_context_parallel_rank=stripe.rank,
                dcp_interleave=stripe.interleave,
            ),
            speculative=SpeculativeConfig(num_speculative_tokens=3),
            **config,
        )
        self.builder = TritonAttentionMetadataBuilder(self.spec, ["layers.0"], engine, DEVICE)
        self.impl = TritonAttentionImpl(
            *(HEADS, SIZE, SCALE, 1),
            kv_cache_dtype=cache_dtype.value,
            logits_soft_cap=asks.logits_soft_cap,
            sinks=asks.sink_logits,
            head_size_v=asks.head_size_v,
        )
        k_scale, v_scale = (scale.to(DEVICE) for scale in asks.scales)
        self.layer = LayerScales(torch.ones((), device=DEVICE), k_scale, v_scale)
        # NaN where no token lives: nothing else may be read.
        self.cache = self.spec.layout().allocate(40, DEVICE, fill_byte=0xFF)
        self.table = (torch.arange(36, dtype=torch.int32).view(4, 9) + 2).to(DEVICE)

    def is_here(self, position: Tensor) -> Tensor:
        return position // self.stripe.interleave % self.stripe.size == self.stripe.rank

    def write(self, row: int, key: Tensor, value: Tensor) -> None:
        """Every token of a request, as an engine does it: slot -1 for those of other ranks."""
        position = torch.arange(len(key))
        here = self.is_here(position)
        place = (here.cumsum(0) - 1).clamp(min=0)
        slots = self.table[row].cpu()[place // BLOCK].long() * BLOCK + place % BLOCK
        slots = torch.where(here, slots, -1).to(DEVICE)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)

    def state(
        self, query: Tensor, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        table = self.table[: len(seq_lens)]
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, BLOCK)
        batch = batch.replace(dcp_local_seq_lens=batch.seq_lens, causal=self.asks.causal)
        record = self.builder.build(0, batch)
        output = query.new_full((*query.shape[:2], self.asks.v_size), -7)
        lse = torch.full(query.shape[:2], -7.0, device=DEVICE)
        self.impl.forward(self.layer, query, None, None, self.cache, record, output, output_lse=lse)
        return output, lse


def merged(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    outputs, lses = (torch.stack([state[side].double() for state in states]) for side in (0, 1))
    weights = torch.softmax(lses, 0)
    return (outputs * weights[..., None]).sum(0).cpu()


def check(
    stripes: list[Stripe],
    step: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DType = DType.FLOAT32,
    cache_dtype: CacheDType = CacheDType.AUTO,
    asks: Asks = PLAIN,
    **config: Any,
) -> list[tuple[Tensor, Tensor]]:
    """The ranks' states, which merge to what the oracle says of all keys."""
    query_lens, seq_lens = step
    generator = torch.Generator().manual_seed(3)

    def rows(count: int, heads: int, size: int = SIZE) -> Tensor:
        return torch.randn(count, heads, size, generator=generator).to(dtype.torch)

    keys = [rows(length, 1) for length in seq_lens]
    values = [rows(length, 1, asks.v_size) for length in seq_lens]
    query = rows(sum(query_lens), HEADS)
    states = []
    for stripe in stripes:
        rank = Rank(stripe, dtype, cache_dtype, asks, **config)
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            rank.write(row, key.to(DEVICE), value.to(DEVICE))
        states.append(rank.state(query.to(DEVICE), query_lens, seq_lens))
    exact, low = [], []
    for part, *held in zip(query.split(query_lens), keys, values, strict=True):
        first = len(held[0]) - len(part)
        exact.append(attention(part, *held, first, asks.rules)[0])
        stored = [
            stored_rows.quantized(x, cache_dtype.value, scale)
            for x, scale in zip(held, asks.scales, strict=True)
        ]
        low.append(low_precision(part, *stored, first, asks.rules, dtype.torch)[0].double())
    right, actual = torch.cat(exact), merged(states).to(dtype.torch)
    error = budget.row_errors(actual, right).max()
    assert error <= budget.budget(right, torch.cat(low), dtype.torch)
    for output, lse in states:
        unseen = lse.isneginf()
        assert not output[unseen].any()
    return states


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_states_of_all_ranks_merge_to_the_whole(name: str, ranks: int, interleave: int) -> None:
    check([Stripe(ranks, rank, interleave) for rank in range(ranks)], STEPS[name])


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
    check(stripes, STEPS["mix"], dtype, cache_dtype)


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_sink_is_counted_once_whatever_the_ranks(name: str, ranks: int, interleave: int) -> None:
    """Of the second step's rows some have keys on rank 0 alone, which counts the sink."""
    check([Stripe(ranks, rank, interleave) for rank in range(ranks)], STEPS[name], asks=SINKS)


def test_a_sink_outweighs_all_keys_on_one_rank_only() -> None:
    """Lengths 40 and 70: counted on each of two ranks, such sinks halve the output once more."""
    stripes = [Stripe(2, rank, 1) for rank in range(2)]
    states = check(stripes, ((1, 1), (40, 70)), asks=Asks(sinks=(9.0, 9.0, 9.0, 9.0)))
    with_sinks, without = (lse for _, lse in states)
    assert (with_sinks > 8.9).all()
    assert (without < 8.9).all()


def test_a_layer_without_log_sum_exps_counts_sinks_by_rank_again_and_again() -> None:
    """The launch that is made again for later steps gives what the first one gave."""
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
    check([Stripe(2, rank, 4) for rank in range(2)], STEPS["mix"], asks=asks)


@pytest.mark.parametrize("cache_dtype", [CacheDType.FP8, CacheDType.FP8_E5M2])
def test_ranks_scale_what_they_keep(cache_dtype: CacheDType) -> None:
    asks = replace(SINKS, k_scale=(0.037,))
    check([Stripe(2, rank, 1) for rank in range(2)], STEPS["mix"], DType.FLOAT16, cache_dtype, asks)


def test_batch_invariant_ranks_merge_too() -> None:
    stripes = [Stripe(2, rank, 1) for rank in range(2)]
    check(stripes, STEPS["mix"], asks=SINKS, batch_invariant=True)
    check(stripes, STEPS["mix"], asks=SINKS, exact_host_lengths=False)


def test_a_rank_has_blocks_for_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    stripes = [Stripe(3, rank, 1) for rank in range(3)]
    check(stripes, ((1, 1), (9 * BLOCK * 3 - 1, 40)))


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
    """Its ranks would keep keys that nobody merges, or miss those that were not written."""
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
        (TritonMLAMetadataBuilder, MLAAttentionSpec(block_size=64)),
    ],
)
def test_builders_of_kernels_without_ranks_refuse_them(
    builder: Callable[..., Any], spec: AnyKVCacheSpec
) -> None:
    parallel = ParallelConfig(decode_context_parallel_size=2)
    engine = EngineConfig(max_model_len=64, num_heads=HEADS, parallel=parallel)
    with pytest.raises(ValueError, match=r"decode_context_parallel_size must be 1 for .*, got 2"):
        builder(spec, ["layers.0"], engine, DEVICE)
