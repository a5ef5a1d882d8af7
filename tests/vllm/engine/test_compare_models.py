"""What vLLM makes of the models and contenders of ``attn.bench.engine.compare``; no engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from attn.bench.engine.compare_worker import DenseMlp, compiled_parts, engine_options
from attn.bench.engine.shapes import MODELS
from attn.bench.engine.vllm_worker import draw_weights

PAIRS = [(model, contender) for model in MODELS.values() for contender in model.contenders]


@pytest.mark.parametrize(
    ("model", "contender"), PAIRS, ids=[f"{model.name}, {item.label}" for model, item in PAIRS]
)
def test_vllm_takes_the_settings(
    model: Any, contender: Any, tmp_path: Path, cuda: Any, plugin: Any
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    plugin.register()
    options = engine_options(model, contender)
    register_model_loader(options["load_format"])(type("Drawn", (BaseModelLoader,), {}))
    (tmp_path / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    made = EngineArgs(model=str(tmp_path), **options).create_engine_config()
    assert made.attention_config.backend.name == contender.backend
    assert made.cache_config.cache_dtype == contender.cache
    assert made.model_config.use_mla == ("kv_lora_rank" in model.config)
    assert getattr(made.model_config.hf_config, "index_topk", None) == model.config.get(
        "index_topk"
    )
    heads = made.model_config.get_num_attention_heads(made.parallel_config)
    assert heads == model.config["num_attention_heads"]
    assert (
        made.model_config.get_num_layers(made.parallel_config)
        == (model.config["num_hidden_layers"])
    )


def test_a_dense_mlp_stands_in_for_experts() -> None:
    from types import SimpleNamespace as Simple

    config = Simple(hidden_size=8, intermediate_size=16)
    made = DenseMlp(Simple(model_config=Simple(hf_config=config)), 0, "model.layers.0.mlp")
    draw_weights(made)
    out = made(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    assert out.shape == (3, 8)
    assert out.std() > 0.1


def test_compiled_parts_are_those_that_are_installed() -> None:
    assert all(name.endswith(".so") for name in compiled_parts())
