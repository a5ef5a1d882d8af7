"""Sizes of plans inside vLLM: its longest sequence, its dummy batches, its encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.cross_attention import CrossAttention

from attn.integrations.vllm import translate
from tests.vllm.runner import Runner, Tokens, encoder_lens, expected, plain_rules
from tests.vllm.test_layers import dense
from tests.vllm.test_translate import their_spec

LONGEST, GRAPH = 64, 80


@pytest.fixture
def config(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A configuration, with the plugin registered, whose graphs have more tokens than the model."""
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    config = make_config(max_model_len=LONGEST)
    config.compilation_config.cudagraph_capture_sizes = [1, GRAPH]
    return config


def longer(runner: Runner, length: int) -> Any:
    """A decode of this length on host and device, with the block table of the model's longest."""
    lens = torch.tensor([length], dtype=torch.int32)
    batch = runner.batch((1,), (40,), seq_lens_cpu_upper_bound=lens)
    return batch.replace(seq_lens=lens.clone(), max_seq_len=length)


def test_the_longest_sequence_is_seen_whole(config: Any) -> None:
    runner = Runner(config, dense())
    tokens = Tokens.random((LONGEST, 40), runner.dtype)
    runner.step(tokens, (LONGEST - 1, 39), (LONGEST - 1, 39))
    output = runner.step(tokens, (1, 1), (LONGEST, 40))
    expected(tokens, (1, 1), (LONGEST, 40), plain_rules()).assert_is(output)


def test_dummy_batches_before_a_capture_are_as_long_as_a_graph(config: Any) -> None:
    mine = translate.engine_config(config, their_spec("full"), 4)
    assert mine.max_model_len == GRAPH
    runner = Runner(config, dense())
    assert runner.builder.build(0, longer(runner, GRAPH)).num_reqs == 1
    with pytest.raises(ValueError, match=r"\(81\) exceeds max_model_len \(80\)"):
        runner.builder.build(0, longer(runner, GRAPH + 1))


def test_drafts_come_with_bounds_that_run_ahead(config: Any) -> None:
    runner = Runner(config, dense())
    batch = runner.batch((1,), (40,), seq_lens_cpu_upper_bound=torch.tensor([GRAPH + 1]).int())
    batch = batch.replace(max_seq_len=GRAPH + 1)
    assert runner.builder.build_for_drafting(batch, 1).num_reqs == 1


def test_an_encoder_is_as_long_as_vllm_has_blocks_for(config: Any) -> None:
    def longest(name: str) -> int | None:
        return translate.engine_config(config, their_spec(name), 4).max_encoder_len

    config.scheduler_config.max_num_encoder_input_tokens = 1500
    assert longest("full") is None
    assert longest("cross") == 1500
    config.model_config.hf_config.max_source_positions = 3000
    assert longest("cross") == 3000
    config.scheduler_config.max_num_encoder_input_tokens = 10
    config.model_config.hf_config.max_source_positions = None
    assert longest("cross") == LONGEST


def test_a_longer_encoder_is_refused_at_its_first_step(config: Any) -> None:
    config.scheduler_config.max_num_encoder_input_tokens = 20
    runner = Runner(config, dense(CrossAttention))
    runner.builder.build(0, runner.batch((4,), (4,), **encoder_lens((LONGEST,))))
    batch = runner.batch((4,), (4,), **encoder_lens((LONGEST + 1,)))
    batch = batch.replace(block_table_tensor=torch.ones(1, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(65\) exceeds max_encoder_len \(64\)"):
        runner.builder.build(0, batch)
