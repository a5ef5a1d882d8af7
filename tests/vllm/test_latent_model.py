"""A whole model of vLLM's with latent layers, over our backend, against ``transformers``.

The engine's tests on a GPU assume what is checked here: weights, rotation and scale of the model
mean the same to both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.vllm.engine.models import LATENT, make_model, prompts_of
from tests.vllm.engine.worker import Run, reference_of
from tests.vllm.test_latent import NoPrefill

MAX_LEN, BLOCK_SIZE = 256, 64
# The definition lives as long as this object.
ops = torch.library.Library("_C", "FRAGMENT")
STEPS = (3, 2, 1)
"""Tokens of each step: a prompt, its next chunk, a decode."""
TOLERANCE = 1e-4
"""Largest error of logits, whose standard deviation is 3; both sides are float32."""


def define_silu() -> None:
    """Define vLLM's compiled SiLU, which a layer looks up when it is made, and never calls."""
    if not hasattr(torch.ops._C, "silu_and_mul"):
        ops.define("silu_and_mul(Tensor(a!) out, Tensor x) -> ()")


def config_of(folder: Path) -> VllmConfig:
    model = ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_LEN
    )
    scheduler = SchedulerConfig(
        max_model_len=MAX_LEN,
        is_encoder_decoder=False,
        max_num_seqs=4,
        max_num_batched_tokens=MAX_LEN,
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        scheduler_config=scheduler,
        device_config=DeviceConfig(device="cpu"),
        attention_config=AttentionConfig(backend="CUSTOM"),
        # Attention runs in plain torch: vLLM's own kernels are missing.
        compilation_config=CompilationConfig(mode=0, custom_ops=["none"]),
    )


def loaded(config: VllmConfig, folder: Path) -> Any:
    """The model of a configuration, with all its weights."""
    from safetensors.torch import load_file
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.models.registry import ModelRegistry

    given = config.model_config
    kind, _ = ModelRegistry.resolve_model_cls(given.architectures, given)
    model = kind(vllm_config=config, prefix="")
    names = model.load_weights(load_file(folder / "model.safetensors").items())
    assert {name for name, _ in model.named_parameters()} == names
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            module.quant_method.process_weights_after_loading(module)
    for layer in config.compilation_config.static_forward_context.values():
        layer.process_weights_after_loading(given.dtype)
        layer.kv_cache = torch.zeros(5, BLOCK_SIZE, 576)
    return model


def answers_of(model: Any, config: VllmConfig, tokens: list[int]) -> Tensor:
    """Logits ``[T, V]`` of a request that comes in steps."""
    layers = config.compilation_config.static_forward_context
    first = next(iter(layers.values()))
    backend, spec = first.get_attn_backend(), first.get_kv_cache_spec(config)
    builder = backend.get_builder_cls()(spec, list(layers), config, torch.device("cpu"))
    table = torch.tensor([[3, 2, 1, 4]], dtype=torch.int32)
    answers, length = [], 0
    for count in STEPS:
        places = torch.arange(length, length + count)
        length += count
        starts, lens = torch.tensor([0, count]).int(), torch.tensor([length]).int()
        batch = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=length,
            block_table_tensor=table,
            slot_mapping=3 * BLOCK_SIZE + places,
            seq_lens_cpu_upper_bound=lens,
        )
        records = dict.fromkeys(layers, builder.build(0, batch))
        slots = dict.fromkeys(layers, batch.slot_mapping)
        with set_forward_context(records, config, slot_mapping=slots), torch.no_grad():
            states = model(torch.tensor(tokens)[places], places, None)
        answers.append(states @ model.lm_head.weight.detach().T)
    return torch.cat(answers)


def test_a_model_with_latent_layers_answers_as_its_definition(
    cuda: Callable[..., None],
    plugin: Any,
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    make_model(LATENT, folder)
    tokens = prompts_of()[-1][: sum(STEPS)]
    (expected,) = reference_of(Run(LATENT, str(folder), "TRITON_MLA"), [tokens])
    cuda()
    define_silu()
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    config = config_of(folder)
    # The engine's test is of vLLM's ordinary layers, not of its experts.
    assert not config.model_config.is_moe
    with set_current_vllm_config(config):
        one_process()
        model = loaded(config, folder)
        layers = config.compilation_config.static_forward_context.values()
        impls = [type(layer.impl).__module__ for layer in layers]
        assert impls == ["attn.integrations.vllm.members"] * 3
        actual = answers_of(model, config, tokens).double()
    assert (actual - expected).abs().max() < TOLERANCE
