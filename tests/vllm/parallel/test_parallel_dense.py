"""Decode context parallelism through vLLM's layer: two ranks, one after the other, on one CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SinkFullAttentionSpec

from attn.integrations.vllm import compat
from builders.splitkv.stripe import Stripe
from tests.vllm.runner import (
    HEAD_SIZE,
    HEADS,
    NAME,
    SCALE,
    Answer,
    Runner,
    answer_of,
    plain_rules,
)

RANKS = 2
STEP = ((1, 30, 4), (50, 30, 39))


def make_layer(config: Any, **extras: Any) -> Any:
    return Attention(
        HEADS,
        HEAD_SIZE,
        SCALE,
        num_kv_heads=1,
        cache_config=config.cache_config,
        prefix=NAME,
        **extras,
    )


@pytest.fixture
def as_rank(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Runner]:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()

    def make(rank: int, interleave: int = 1, **extras: Any) -> Runner:
        group = SimpleNamespace(world_size=RANKS, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "_DCP", group)
        config = make_config()
        config.parallel_config.decode_context_parallel_size = RANKS
        config.parallel_config.cp_kv_cache_interleave_size = interleave
        return Runner(config, lambda config: make_layer(config, **extras))

    return make


@pytest.mark.parametrize(("interleave", "sinks"), [(1, False), (16, False), (1, True)])
def test_ranks_attend_their_own_tokens_with_the_heads_of_all(
    as_rank: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, interleave: int, sinks: bool
) -> None:
    every_sink = torch.linspace(-2, 4, HEADS * RANKS).half()
    query_lens, seq_lens = STEP
    generator = torch.Generator().manual_seed(1)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, HEAD_SIZE, generator=generator).half()

    query = rows(sum(query_lens), HEADS * RANKS)
    keys, values = ([rows(length, 1) for length in seq_lens] for _ in range(2))
    states = []

    def merge(output: Tensor, lse: Tensor, group: Any) -> Tensor:
        states.append((output.clone(), lse.clone()))
        return output[:, :HEADS]

    monkeypatch.setattr(compat, "merge_ranks", merge)
    for rank in range(RANKS):
        extras = {"sinks": every_sink[rank * HEADS : (rank + 1) * HEADS]} if sinks else {}
        loading = SimpleNamespace(all_gather=lambda mine, dim: every_sink)
        monkeypatch.setattr(compat, "dcp_group", lambda group=loading: group)
        runner = as_rank(rank, interleave, **extras)
        assert runner.layer.impl.dcp_world_size == RANKS
        assert runner.builder.visible.stripe == Stripe(RANKS, rank, interleave)
        assert runner.builder.shape.num_heads == HEADS * RANKS
        group = SimpleNamespace(all_gather=lambda mine, dim: query)
        monkeypatch.setattr(compat, "dcp_group", lambda group=group: group)
        for row, (key, value) in enumerate(zip(keys, values, strict=True)):
            position = torch.arange(len(key))
            here = position // interleave % RANKS == rank
            place = (here.cumsum(0) - 1).clamp(min=0)
            slots = runner.table[row][place // 16].long() * 16 + place % 16
            runner.layer.impl.do_kv_cache_update(
                runner.layer, key, value, runner.layer.kv_cache, torch.where(here, slots, -1)
            )
        batch = runner.batch(query_lens, seq_lens)
        batch.slot_mapping.fill_(-1)
        batch.dcp_local_seq_lens = batch.seq_lens
        own = query[:, rank * HEADS : (rank + 1) * HEADS]
        new = query.new_zeros(len(query), 1, HEAD_SIZE)
        record = runner.builder.build(0, batch)
        output = runner.call(record, own, new, new, batch)
        assert torch.equal(output, states[-1][0][:, :HEADS])
    outputs, lses = (torch.stack([state[side].double() for state in states]) for side in (0, 1))
    merged = (outputs * torch.softmax(lses, 0)[..., None]).sum(0)
    rules = plain_rules(sinks=every_sink if sinks else None)
    parts = [
        answer_of(part, key, value, len(key) - len(part), rules)
        for part, key, value in zip(query.split(query_lens), keys, values, strict=True)
    ]
    right = Answer(*(torch.cat(side) for side in zip(*parts, strict=True)))
    right.assert_is(merged.half())


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ({"per_layer_sliding_window": 20}, "sliding window"),
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "(cross attention|encoder_decoder)"),
    ],
)
def test_what_ranks_cannot_share_is_refused_when_the_layer_is_made(
    as_rank: Callable[..., Runner], extras: dict[str, Any], words: str
) -> None:
    """By selection where vLLM's asks for DCP, else by the impl."""
    with pytest.raises(ValueError, match=f"(decode_context_parallel_size 2|DCP) .*{words}"):
        as_rank(0, **extras)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("is_mm_prefix_lm", True, "multimodal ranges"), ("rswa_window", 64, "R-SWA")],
)
def test_what_a_model_asks_of_all_layers_is_refused_when_a_layer_is_made(
    as_rank: Callable[..., Runner],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    words: str,
) -> None:
    monkeypatch.setattr(ModelConfig, name, property(lambda _: value), raising=False)
    with pytest.raises(ValueError, match=f"(decode_context_parallel_size 2|DCP) .*{words}"):
        as_rank(0)


def test_a_cache_that_ranks_do_not_share_is_refused(as_rank: Callable[..., Runner]) -> None:
    runner = as_rank(0)
    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": HEAD_SIZE, "dtype": torch.float16}
    for spec in (
        SinkFullAttentionSpec(**fields, sink_len=16),
        ChunkedLocalAttentionSpec(**fields, attention_chunk_size=32),
    ):
        words = f"decode_context_parallel_size 2 does not go together with {type(spec).__name__}"
        with pytest.raises(ValueError, match=words):
            type(runner.builder)(spec, [NAME], runner.config, torch.device("cpu"))


def test_nothing_is_fused_into_what_is_merged_later(as_rank: Callable[..., Runner]) -> None:
    impl = as_rank(0).layer.impl
    assert impl.supports_dcp
    assert impl.need_to_return_lse_for_decode
    assert impl.lse_base_on_e
    scale = SimpleNamespace(static=True, group_shape=SimpleNamespace(is_per_tensor=lambda: True))
    key = SimpleNamespace(dtype=torch.float8_e4m3fn, scale=scale)
    assert not impl.fused_output_quant_supported(key)
    assert impl.gathered.fused_output_quant_supported(key)


def test_both_versions_have_what_merges_ranks() -> None:
    module = "common" if compat.BACKENDS_SHAPE_CACHES else "dcp"
    imported = __import__(f"vllm.v1.attention.ops.{module}", fromlist=["cp_lse_ag_out_rs"])
    assert callable(imported.cp_lse_ag_out_rs)
