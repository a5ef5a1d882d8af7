"""A sparse layer of vLLM's with its own indexer, both over ours, as a model makes them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as vllm_op
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

from attn.integrations.vllm import indexer as ours
from tests.vllm.runner import torch_rotary
from tests.vllm.sparse import sparse_runner as layers
from tests.vllm.sparse.sparse_runner import BLOCK_SIZE, NARROW, TOPK, Sequences, expected_rows
from tests.vllm.views import cache_view

CACHE_NAME = "model.layers.0.self_attn.indexer.k_cache"
HIDDEN, RANK, LONGEST = 64, 32, 256
STEPS = (
    ([30, 20], [30, 20]),
    ([1, 1], [31, 21]),
    ([1, 50], [32, 71]),
    ([1, 1], [33, 72]),
)
"""New tokens and lengths of two requests, in steps with decodes and a later chunk."""


def made_indexer(config: Any, topk: int) -> Any:
    """vLLM's own ``Indexer`` with random weights."""
    fields = {"index_topk": topk, "index_n_heads": 4, "index_head_dim": 128}
    hf = types.SimpleNamespace(qk_rope_head_dim=64, **fields)
    buffer = torch.full((512, topk), layers.WILD, dtype=torch.int32)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            indexer = deepseek_v2.Indexer(
                *(config, hf, HIDDEN, RANK, None, config.cache_config, buffer),
                CACHE_NAME.removesuffix(".k_cache"),
            )
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator().manual_seed(5)
    for parameter in indexer.parameters():
        parameter.data.normal_(generator=generator)
    return indexer


@pytest.fixture
def restore(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Undoes what adopting replaces; kernels of vLLM's that need a GPU are restated."""

    def quantise(rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        absmax = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-10)
        scale = torch.exp2(torch.ceil(torch.log2(absmax / 448.0)))
        return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", quantise)
    monkeypatch.setattr(vllm_op, "has_deep_gemm", lambda: True)
    yield
    for library in ours._libraries.values():
        library._destroy()
    ours._libraries.clear()
    ours._reserved.clear()


@pytest.mark.usefixtures("restore")
def test_a_layer_attends_what_its_indexer_lists(
    runner_of: Callable[..., Any],
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms

    made: list[Any] = []

    def prepare(config: Any) -> None:
        for module in (vllm_op, deepseek_v2, ours):
            monkeypatch.setattr(module, "current_platform", platforms.current_platform)
        config.model_config.hf_text_config.index_topk = TOPK
        with set_current_vllm_config(config):
            one_process()
        made.append(made_indexer(config, TOPK))
        assert made[0].k_cache.get_attn_backend() is DeepseekV32IndexerBackend
        monkeypatch.setattr(layers, "Lists", lambda topk: made[0])

    runner = runner_of(prepare=prepare, max_model_len=LONGEST)
    (indexer,) = made
    config, cache = runner.config, indexer.k_cache
    # The layer's impl took its indexer over when it was made.
    assert cache.get_attn_backend() is ours.IndexerBackend
    ours.serve_op("CPU")
    indexer.use_fused_indexer_q = False
    with set_current_vllm_config(config):
        spec = cache.get_kv_cache_spec(config)
        view = cache_view(spec, len(runner.layer.kv_cache), ours.IndexerBackend, BLOCK_SIZE)
        cache.kv_cache = view
        if hasattr(cache, "bind_kv_cache"):
            cache.bind_kv_cache(view)
        builder = ours.IndexerBuilder(spec, [CACHE_NAME], config, runner.builder.device)
        rotary = torch_rotary(64, LONGEST)
    sequences = Sequences.random((33, 72), NARROW, torch.bfloat16)
    generator = torch.Generator().manual_seed(6)
    lengths = set()
    for query_lens, seq_lens in STEPS:
        batch = runner.batch(query_lens, seq_lens)
        tokens, buffer = sum(query_lens), indexer.topk_indices_buffer
        buffer.fill_(layers.WILD)
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
        listed = [row[row >= 0].long() for row in buffer[:tokens]]
        lengths |= {len(one) for one in listed}
        at = 0
        for lists, new, end in zip(sequences.lists, query_lens, seq_lens, strict=True):
            lists[end - new : end] = listed[at : at + new]
            at += new
        output = runner.step(sequences.tokens(), query_lens, seq_lens)
        expected_rows(sequences, NARROW, query_lens, seq_lens).assert_is(output)
    assert lengths == set(range(1, TOPK + 1))
