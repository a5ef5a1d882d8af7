"""Ranks of decode context parallelism, run one after another on one device, and their merge.

Each rank has a cache of its own tokens, as an engine writes it, and NaN everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from attn.testing import budget, stored_rows
from attn.testing.budget import low_precision
from attn.testing.oracle import Rules, attention
from builders.batch import CommonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.splitkv.stripe import Stripe
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE, BLOCK = 4, 32, 16


@dataclass(frozen=True)
class Asks:
    """What a layer asks beyond plain causal attention."""

    causal: bool = True
    sinks: tuple[float, ...] | None = None
    """One logit for each query head."""
    logits_soft_cap: float | None = None
    head_size: int = SIZE
    head_size_v: int | None = None
    k_scale: tuple[float, ...] = (1.0,)
    """Scale of K for each KV head; the scales of V are half of these."""

    @property
    def v_size(self) -> int:
        return self.head_size_v or self.head_size

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    @property
    def sink_logits(self) -> Tensor | None:
        return None if self.sinks is None else torch.tensor(self.sinks)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.k_scale), torch.tensor(self.k_scale) / 2

    @property
    def rules(self) -> Rules:
        return Rules(
            self.scale,
            causal=self.causal,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sink_logits,
        )


PLAIN = Asks()


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
            head_size=asks.head_size,
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
            *(HEADS, asks.head_size, asks.scale, 1),
            kv_cache_dtype=cache_dtype.value,
            logits_soft_cap=asks.logits_soft_cap,
            sinks=asks.sink_logits,
            head_size_v=asks.head_size_v,
        )
        k_scale, v_scale = (scale.to(DEVICE) for scale in asks.scales)
        self.layer = LayerScales(torch.ones((), device=DEVICE), k_scale, v_scale)
        # NaN stands where no token lives: nothing else may be read.
        self.cache = self.spec.layout().allocate(40, DEVICE, fill_byte=0xFF)
        self.table = (torch.arange(36, dtype=torch.int32).view(4, 9) + 2).to(DEVICE)

    def is_here(self, position: Tensor) -> Tensor:
        return position // self.stripe.interleave % self.stripe.size == self.stripe.rank

    def write(self, row: int, key: Tensor, value: Tensor) -> None:
        """Write every token of a request, as an engine does: other ranks' tokens have slot -1."""
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
        # A rank's table has columns for its own tokens alone; lengths count the tokens of all
        # ranks.
        every = table.repeat(1, self.stripe.size)
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, every, BLOCK)
        batch = batch.replace(block_table_tensor=table)
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


def check_ranks(
    stripes: list[Stripe],
    step: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: DType = DType.FLOAT32,
    cache_dtype: CacheDType = CacheDType.AUTO,
    asks: Asks = PLAIN,
    **config: Any,
) -> list[tuple[Tensor, Tensor]]:
    """The ranks' states; their merge is the oracle's state over all keys."""
    query_lens, seq_lens = step
    generator = torch.Generator().manual_seed(3)

    def rows(count: int, heads: int, size: int) -> Tensor:
        return torch.randn(count, heads, size, generator=generator).to(dtype.torch)

    keys = [rows(length, 1, asks.head_size) for length in seq_lens]
    values = [rows(length, 1, asks.v_size) for length in seq_lens]
    query = rows(sum(query_lens), HEADS, asks.head_size)
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
