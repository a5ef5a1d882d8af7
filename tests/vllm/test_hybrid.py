"""Models with Mamba beside attention: vLLM makes attention's blocks as large as a Mamba state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from attn.integrations.vllm import adapter, compat, members
from builders.launch.call import collected_calls
from tests.vllm.engine.models import CONFIGS, HYBRID
from tests.vllm.runner import HEAD_SIZE, KV_HEADS, Runner, Tokens, expected, plain_rules
from tests.vllm.test_layers import dense

OURS = members.CUSTOM_TRITON_ATTN


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    config = CONFIGS[HYBRID]()
    config.architectures = ["FalconH1ForCausalLM"]
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def aligned(
    cuda: Callable[..., None], make_config: Callable[..., Any], hybrid_folder: Path
) -> Callable[[Any], int]:
    """Block size that vLLM settles on for the hybrid model, by backend class."""
    import vllm.platforms

    def block_size_of(backend: Any) -> int:
        config = make_config(model=hybrid_folder, dtype="bfloat16", max_model_len=1024)
        assert config.model_config.is_hybrid
        vllm.platforms.current_platform._align_hybrid_block_size(config, backend)
        return int(config.cache_config.block_size)

    return block_size_of


def kernel_block_size(block_size: int, backend: Any) -> int:
    """The block size that kernels see: vLLM cuts blocks that a backend does not take whole."""
    from vllm.v1.worker import utils

    return int(utils.select_common_block_size(block_size, [backend]))


def runner_of(
    make_config: Callable[..., Any], plugin: Any, block_size: int, max_model_len: int
) -> Runner:
    config = make_config(block_size=block_size, max_model_len=max_model_len)
    plugin.register()
    return Runner(config, dense())


def test_blocks_are_those_of_vllms_own_backend_and_stay_whole(
    aligned: Callable[[Any], int],
) -> None:
    size = aligned(OURS)
    assert size == aligned(TritonAttentionBackend)
    # Blocks are as large as a Mamba state, so their size is no power of two.
    assert size > 500
    assert size & (size - 1)
    assert kernel_block_size(size, OURS) == size


def test_attention_is_right_over_such_blocks(
    aligned: Callable[[Any], int],
    plugin: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    size = aligned(OURS)
    runner = runner_of(make_config, plugin, size, 2 * size)
    # A decode whose keys end in a second block, and a prompt.
    lens = (1, 20), (size + 5, 20)
    tokens = Tokens.random(lens[1], runner.dtype)
    before = size + 4

    def known(rows: list[Tensor]) -> Tensor:
        return rows[0][:before].view(before, KV_HEADS, HEAD_SIZE)

    place = torch.arange(before)
    slots = runner.table[0][place // size].long() * size + place % size
    runner.layer.impl.do_kv_cache_update(
        *(runner.layer, known(tokens.key), known(tokens.value), runner.layer.kv_cache, slots)
    )
    expected(tokens, *lens, plain_rules()).assert_is(runner.step(tokens, *lens))


def test_no_more_is_compiled_for_such_blocks_than_for_small_ones(
    aligned: Callable[[Any], int],
    plugin: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    features = replace(compat.Features(False, False, False, False), shared_prefix=True)
    large = aligned(OURS)

    def launched(block_size: int) -> list[str]:
        runner = runner_of(make_config, plugin, block_size, 2 * large)
        with (
            mock.patch("attn.impls.dense.triton_attn.run_compiled", lambda steps, device: steps()),
            collected_calls() as calls,
        ):
            adapter.warm_up(runner.builder, [runner.layer], features)
        return sorted(call.kernel.fn.__name__ for call in calls)

    small = launched(16)
    assert small
    assert launched(large) == small
