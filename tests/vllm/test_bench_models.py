"""The models whose engines are compared are models of vLLM's: each is made, narrower."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import platforms
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention

from attn.bench.engine.compare_worker import DenseMlp
from attn.bench.engine.shapes import MODELS
from tests.vllm.test_latent import NoPrefill
from tests.vllm.test_latent_model import config_of, define_silu

NARROW = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.mark.parametrize("name", MODELS)
def test_vllm_makes_the_model(
    plugin: Any,
    cuda: Callable[..., None],
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    from vllm.model_executor.models import deepseek_v2, gpt_oss
    from vllm.model_executor.models.registry import ModelRegistry

    cuda()
    # A sparse model makes a buffer of lists on the device.
    for platform in (deepseek_v2.current_platform, platforms.current_platform):
        monkeypatch.setattr(platform, "device_type", "cpu")
    define_silu()
    plugin.register()
    monkeypatch.setattr(gpt_oss.TransformerBlock, "mlp_cls", DenseMlp)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    fields = {"head_dim": 128, **MODELS[name].config, **NARROW}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: NARROW["num_hidden_layers"]]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = config_of(tmp_path)
    with set_current_vllm_config(config):
        one_process()
        given = config.model_config
        kind, _ = ModelRegistry.resolve_model_cls(given.architectures, given)
        kind(vllm_config=config, prefix="")
    layers = config.compilation_config.static_forward_context.values()
    impls = [type(layer.impl).__module__ for layer in layers if hasattr(layer, "impl")]
    assert impls == ["attn.integrations.vllm.members"] * NARROW["num_hidden_layers"]
