"""Decode context parallelism: ranks keep a part of the keys each, and their states merge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_attn import TritonAttentionBackend
from attn.impls.base import LayerScales
from attn.impls.triton_attn import TritonAttentionImpl
from builders.common import CommonAttentionMetadata
from builders.paging import Stripe
from builders.triton_attn import TritonAttentionMetadataBuilder
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec
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


class Rank:
    """One rank's part of a layer: a cache of its own tokens."""

    def __init__(
        self, stripe: Stripe, dtype: DType, cache_dtype: CacheDType, **config: Any
    ) -> None:
        self.stripe = stripe
        self.spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            head_size=SIZE,
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
        self.impl = TritonAttentionImpl(HEADS, SIZE, SCALE, 1, kv_cache_dtype=cache_dtype.value)
        self.layer = LayerScales.of(device=DEVICE)
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
        # A rank's table has columns for its own tokens alone; lengths are those of all ranks.
        every = table.repeat(1, self.stripe.size)
        batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, every, BLOCK)
        batch = batch.replace(block_table_tensor=table)
        record = self.builder.build(0, batch.replace(dcp_local_seq_lens=batch.seq_lens))
        output = torch.full_like(query, -7)
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
    **config: Any,
) -> None:
    query_lens, seq_lens = step
    generator = torch.Generator().manual_seed(3)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, SIZE, generator=generator).to(dtype.torch)

    keys, values = ([rows(length, 1) for length in seq_lens] for _ in range(2))
    query = rows(sum(query_lens), HEADS)
    states = []
    for stripe in stripes:
        rank = Rank(stripe, dtype, cache_dtype, **config)
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            rank.write(row, key.to(DEVICE), value.to(DEVICE))
        states.append(rank.state(query.to(DEVICE), query_lens, seq_lens))
    exact, low = [], []
    for part, *held in zip(query.split(query_lens), keys, values, strict=True):
        first = len(held[0]) - len(part)
        exact.append(attention(part, *held, first, Rules(SCALE))[0])
        stored = [stored_rows.quantized(x, cache_dtype.value, torch.ones(())) for x in held]
        low.append(low_precision(part, *stored, first, Rules(SCALE), dtype.torch)[0].double())
    right, actual = torch.cat(exact), merged(states).to(dtype.torch)
    error = budget.row_errors(actual, right).max()
    assert error <= budget.budget(right, torch.cat(low), dtype.torch)
    for output, lse in states:
        unseen = lse.isneginf()
        assert not output[unseen].any()


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


def test_batch_invariant_ranks_merge_too() -> None:
    check([Stripe(2, rank, 1) for rank in range(2)], STEPS["mix"], batch_invariant=True)


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


def test_a_windows_cache_is_not_shared() -> None:
    rank = Rank(Stripe(2, 1, 1), DType.FLOAT16, CacheDType.AUTO)
    spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE, sliding_window=9)
    config = rank.builder.vllm_config
    builder = TritonAttentionMetadataBuilder(spec, ["layers.0"], config, DEVICE)
    assert builder.visible.stripe is None
    assert rank.builder.visible.stripe == Stripe(2, 1, 1)
    assert TritonAttentionBackend.supports_dcp()
