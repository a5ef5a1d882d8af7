"""Decode context parallelism of sparse layers of vLLM: two processes, over gloo on the CPU."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as vllm_op
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.models import deepseek_v2

from attn.integrations.vllm import compat
from attn.integrations.vllm import indexer as ours
from attn.testing.batches import LatentWeights
from builders.splitkv.stripe import Stripe
from tests.vllm.parallel.rank_processes import RANKS, give_ranks, in_torch, localise, run_ranks
from tests.vllm.runner import torch_rotary
from tests.vllm.sparse.sparse_runner import (
    BLOCK_SIZE,
    NARROW,
    TOPK,
    WIDE,
    WILD,
    Sequences,
    Sizes,
    SparseRunner,
    expected_rows,
)
from tests.vllm.test_latent import NoPrefill
from tests.vllm.views import cache_view

STEPS = (
    ([30, 20, 1], [30, 20, 1]),
    ([1, 1, 1], [31, 21, 2]),
    ([1, 50, 4], [32, 71, 6]),
    ([1, 1, 1], [33, 72, 7]),
)
"""New tokens and lengths of three requests, in steps with decodes, prompts and later chunks."""
LENS = (33, 72, 7)
CACHE_NAME = "model.layers.0.self_attn.indexer.k_cache"
HIDDEN, RANK, LONGEST = 64, 32, 256


@dataclass(frozen=True)
class RankSizes(Sizes):
    """Sizes of one rank's part of a layer with the heads of all ranks."""

    number: int = 0

    def weights(self, dtype: torch.dtype) -> LatentWeights:
        whole = every_size(self).weights(dtype)
        mine = slice(self.number * self.heads, (self.number + 1) * self.heads)
        return replace(
            whole, num_heads=self.heads, w_uk=whole.w_uk[:, mine], w_uv=whole.w_uv[:, mine]
        )


def every_size(sizes: Sizes) -> Sizes:
    """Sizes of the layer with the heads of all ranks."""
    return Sizes(sizes.heads * RANKS, sizes.rank, sizes.nope, sizes.rope, sizes.value)


class RankRunner(SparseRunner):
    """The layer on one rank: slots and block tables are those of its own tokens."""

    def __init__(self, config: Any, sizes: RankSizes, stripe: Stripe) -> None:
        self.stripe = stripe
        super().__init__(config, sizes)

    def batch(self, query_lens: Sequence[int], seq_lens: Sequence[int], **fields: Any) -> Any:
        batch = super().batch(query_lens, seq_lens, **fields)
        return localise(batch, self.stripe, query_lens, seq_lens, self.spec.block_size)


@pytest.fixture
def as_rank(
    cuda: Callable[..., None], make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RankRunner]:
    """The layer on this process's rank."""
    cuda()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    module = "common" if compat.BACKENDS_SHAPE_CACHES else "dcp"
    monkeypatch.setattr(f"vllm.v1.attention.ops.{module}.correct_attn_out", in_torch)

    def make(rank: int, sizes: Sizes = NARROW, interleave: int = 1, **settings: Any) -> RankRunner:
        config = make_config(**{"block_size": BLOCK_SIZE, "dtype": "bfloat16", **settings})
        give_ranks(config, interleave)
        own = RankSizes(sizes.heads, sizes.rank, sizes.nope, sizes.rope, sizes.value, rank)
        return RankRunner(config, own, Stripe(RANKS, rank, interleave))

    return make


def outputs_of(runner: RankRunner) -> list[Tensor]:
    """The outputs of every step on this rank, over random lists."""
    sizes, rank = runner.sizes, runner.stripe.rank
    sequences = Sequences.random(LENS, every_size(sizes), torch.bfloat16)
    mine = slice(rank * sizes.heads, (rank + 1) * sizes.heads)
    own = Sequences(
        [replace(request, query=request.query[:, mine]) for request in sequences.requests],
        sequences.lists,
    )
    # What no token was written to is NaN, whatever the type.
    runner.layer.kv_cache.view(torch.uint8).fill_(0xFF)
    return [runner.attend(own, *step) for step in STEPS]


CASES: dict[str, dict[str, Any]] = {
    "one token in turn": {},
    "16 tokens in turn, fp8": {"interleave": 16, "cache_dtype": "fp8"},
    "656 bytes": {"cache_dtype": "fp8_ds_mla", "sizes": WIDE},
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_give_what_one_rank_gives(
    as_rank: Callable[..., RankRunner],
    make_config: Callable[..., Any],
    tmp_path: Path,
    case: str,
) -> None:
    given = CASES[case]
    results = run_ranks(tmp_path, make_config(), lambda rank: outputs_of(as_rank(rank, **given)))
    sizes = every_size(given.get("sizes", NARROW))
    sequences = Sequences.random(LENS, sizes, torch.bfloat16)
    for step, lens in enumerate(STEPS):
        output = torch.cat([result[step] for result in results], 1)
        right = expected_rows(sequences, sizes, *lens, given.get("cache_dtype", "auto"))
        right.assert_is(output)


def test_a_rank_that_reads_another_ranks_rows_is_noticed(
    as_rank: Callable[..., RankRunner], make_config: Callable[..., Any], tmp_path: Path
) -> None:
    def faulty(rank: int) -> list[Tensor]:
        runner = as_rank(rank)
        runner.builder.stripe = replace(runner.builder.stripe, rank=1 - rank)
        return outputs_of(runner)

    results = run_ranks(tmp_path, make_config(), faulty)
    output = torch.cat([result[2] for result in results], 1)
    sizes = every_size(NARROW)
    sequences = Sequences.random(LENS, sizes, torch.bfloat16)
    with pytest.raises(AssertionError):
        expected_rows(sequences, sizes, *STEPS[2]).assert_is(output)


def made_indexer(config: Any) -> Any:
    """vLLM's own ``Indexer`` with random weights, adopted by ours."""
    fields = {"index_topk": TOPK, "index_n_heads": 4, "index_head_dim": 128}
    hf = types.SimpleNamespace(qk_rope_head_dim=64, **fields)
    config.model_config.hf_text_config.index_topk = TOPK
    buffer = torch.full((512, TOPK), WILD, dtype=torch.int32)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            indexer = deepseek_v2.Indexer(
                *(config, hf, HIDDEN, RANK, None, config.cache_config, buffer),
                CACHE_NAME.removesuffix(".k_cache"),
            )
            ours.adopt(indexer)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(5)
    for parameter in indexer.parameters():
        parameter.data.normal_(generator=generator)
    ours.serve_op("CPU")
    indexer.use_fused_indexer_q = False
    return indexer


def lists_of(config: Any, stripe: Stripe) -> list[Tensor]:
    """The lists of every step, by an indexer that keeps the keys of ``stripe``."""
    indexer = made_indexer(config)
    cache = indexer.k_cache
    blocks = 1 + len(LENS) * LONGEST // BLOCK_SIZE
    table = torch.arange(1, blocks, dtype=torch.int32).flip(0).view(len(LENS), -1)
    with set_current_vllm_config(config):
        spec = cache.get_kv_cache_spec(config)
        view = cache_view(spec, blocks, ours.IndexerBackend, BLOCK_SIZE)
        cache.kv_cache = view
        if hasattr(cache, "bind_kv_cache"):
            cache.bind_kv_cache(view)
        builder = ours.IndexerBuilder(spec, [CACHE_NAME], config, torch.device("cpu"))
        rotary = torch_rotary(64, LONGEST)
    view.view(torch.uint8).fill_(0xFF)
    generator = torch.Generator().manual_seed(6)
    found = []
    for query_lens, seq_lens in STEPS:
        batch = SparseRunner.batch(
            types.SimpleNamespace(  # type: ignore[arg-type]
                table=table, spec=types.SimpleNamespace(block_size=BLOCK_SIZE)
            ),
            query_lens,
            seq_lens,
        )
        if stripe.size > 1:
            batch = localise(batch, stripe, query_lens, seq_lens, BLOCK_SIZE)
        tokens = sum(query_lens)
        states, compressed = (
            torch.randn(tokens, width, generator=generator).bfloat16() for width in (HIDDEN, RANK)
        )
        pairs = zip(query_lens, seq_lens, strict=True)
        positions = torch.cat([torch.arange(end - new, end) for new, end in pairs])
        with (
            set_current_vllm_config(config),
            set_forward_context({CACHE_NAME: builder.build(0, batch)}, config),
            torch.no_grad(),
        ):
            indexer(states, compressed, positions, rotary)
        found.append(indexer.topk_indices_buffer[:tokens].clone())
    return found


@pytest.mark.parametrize("interleave", [1, 16])
def test_ranks_list_what_one_rank_lists(
    as_rank: Callable[..., RankRunner],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    interleave: int,
) -> None:
    from vllm import platforms

    def quantise(rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        absmax = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
        scale = torch.exp2(torch.ceil(torch.log2(absmax / 448.0)))
        return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    def index(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        for module in (vllm_op, deepseek_v2, ours):
            monkeypatch.setattr(module, "current_platform", platforms.current_platform)
        monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", quantise)
        monkeypatch.setattr(vllm_op, "has_deep_gemm", lambda: True)

        def engine() -> Any:
            return make_config(block_size=BLOCK_SIZE, dtype="bfloat16", max_model_len=LONGEST)

        whole = lists_of(engine(), Stripe(1, 0, 1))
        config = engine()
        give_ranks(config, interleave)
        return whole, lists_of(config, Stripe(RANKS, rank, interleave))

    results = run_ranks(tmp_path, make_config(), index)
    for whole, shared in results:
        for step, (one, other) in enumerate(zip(whole, shared, strict=True)):
            assert torch.equal(one, other), step
    lengths = {int(count) for one in results[0][0] for count in (one >= 0).sum(1)}
    assert lengths == set(range(1, TOPK + 1))
