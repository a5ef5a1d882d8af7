"""``attn explain`` and ``attn run`` on models whose layers take lists or caches from one another,
have sizes of their own, or are not attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.explain import remarks
from attn.cli.layers import SharedListReplayLayer, SparseReplayLayer
from attn.cli.replay import Replay, RunSettings, choose_groups
from attn.cli.report import RunReport
from attn.cli.trace import TraceRequest
from attn.device import detect_device
from attn.selector import explain
from specs.devices import KNOWN_DEVICES
from specs.hf_config import load_model_geometry, read_hf_config
from specs.model import ModelGeometry
from specs.rows import INDEXER_PAGE

GLM = {
    "model_type": "glm_moe_dsa",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "q_lora_rank": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "index_topk": 24,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "indexer_types": ["full", "shared", "full", "shared", "shared", "full"],
}
GEMMA = {
    "model_type": "gemma4_text",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 160,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "max_position_embeddings": 160,
    "sliding_window_size": 15,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "hybrid_override_pattern": "M-*EMM*-",
}
JINA = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "position_embedding_type": "alibi",
}


def geometry(config: dict[str, Any]) -> ModelGeometry:
    return read_hf_config(config, "tiny", "config.json")


def attn(*arguments: str) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, list(arguments))


def served(config: dict[str, Any], folder: Path, layers: int) -> tuple[Any, RunReport | None]:
    """A short run of a config, and its report where there is one."""
    model, trace = folder / "model.json", folder / "trace.csv"
    model.write_text(json.dumps(config))
    rows = ["2023-11-16 18:15:40.68,50,3", "2023-11-16 18:15:41.68,9,6"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    given = ["--model", str(model), "--trace", str(trace), "--report", str(folder)]
    result = attn("run", *given, "--layers", str(layers), "--max-num-batched-tokens", "64")
    report = folder / "report.json"
    found = RunReport.model_validate_json(report.read_text()) if report.exists() else None
    return result, found


# -- Lists that layers share.


def test_layers_without_an_indexer_are_replayed_on_the_lists_before_them(tmp_path: Path) -> None:
    result, report = served(GLM, tmp_path, 6)
    assert result.exit_code == 0, result.output
    assert report is not None
    assert report.passed
    names = [(group.name, group.num_layers) for group in report.layer_groups]
    assert names == [("sparse_mla", 3), ("sparse_mla (shared list)", 3)]


def test_each_layer_attends_the_list_of_the_nearest_indexer_before_it() -> None:
    settings = RunSettings(model=geometry(GLM), device=detect_device())
    replay = Replay(settings, [TraceRequest(0.0, 9, 2)])
    layers = {layer.index: layer for group in replay.layers for layer in group}
    made = {
        index: layer.indexer
        for index, layer in layers.items()
        if isinstance(layer, SparseReplayLayer)
    }
    assert made.keys() == {0, 2, 5}
    for index, maker in {1: 0, 3: 2, 4: 2}.items():
        layer = layers[index]
        assert isinstance(layer, SharedListReplayLayer)
        assert layer.impl.indexer is made[maker]


def test_only_layers_with_an_indexer_have_index_pages() -> None:
    own, shared = choose_groups(RunSettings(model=geometry(GLM), device=detect_device()))
    rows = INDEXER_PAGE * (128 + 32) * 4
    assert shared.block_bytes == 3 * rows
    # An index row: 16 e4m3 elements and a scale.
    assert own.block_bytes == 3 * (rows + INDEXER_PAGE * (16 + 4))


# -- Caches that layers share.


def test_layers_that_store_nothing_are_not_replayed(tmp_path: Path) -> None:
    result, report = served(GEMMA, tmp_path, 6)
    assert result.exit_code == 2
    assert report is None
    assert "layers that attend another layer's cache are not replayed" in result.stderr
    result, report = served(GEMMA, tmp_path, 2)
    assert result.exit_code == 0, result.output
    assert report is not None
    assert [(group.name, group.num_layers) for group in report.layer_groups] == [
        ("sliding_window 24", 1),
        ("full_attention", 1),
    ]


# -- Sizes by kind of layer.


def test_narrow_values_and_sinks_of_window_layers_are_replayed(tmp_path: Path) -> None:
    result, report = served(MIMO, tmp_path, 2)
    assert result.exit_code == 0, result.output
    assert report is not None
    assert report.passed
    found = [(group.name, group.num_heads, group.num_kv_heads) for group in report.layer_groups]
    assert found == [("full_attention", 4, 1), ("sliding_window 16", 4, 2)]


# -- Layers that are not attention.


def test_layers_that_are_not_attention_are_named(tmp_path: Path) -> None:
    expected = [
        "not attention: 3 mamba layers (0, 4-5)",
        "not attention: 2 mlp layers (1, 7)",
        "not attention: 1 moe layer (3)",
    ]
    assert remarks(geometry(NEMOTRON)) == expected
    result, report = served(NEMOTRON, tmp_path, 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:3] == expected
    assert report is not None
    assert [group.num_layers for group in report.layer_groups] == [2]


def test_explain_tells_of_other_layers_and_keeps_json_for_itself() -> None:
    arguments = ["explain", "--model", "qwen3-next-80b", "--device", "h200"]
    told = (
        "not attention: 36 linear_attention layers (0-2, 4-6, 8-10, 12-14, 16-18, 20-22, 24-26, "
        "28-30, 32-34, 36-38, 40-42, 44-46)"
    )
    assert attn(*arguments).stdout.splitlines()[0] == told
    result = attn(*arguments, "--json")
    (decision,) = json.loads(result.stdout)
    assert decision["layers"] == "12 full_attention layers"
    assert result.stderr.splitlines() == [told]


def test_explain_names_what_layers_take_from_others() -> None:
    result = attn("explain", "--model", "glm-5.2", "--device", "h200", "--json")
    assert [decision["layers"] for decision in json.loads(result.stdout)] == [
        "21 sparse_mla layers",
        "57 sparse_mla (shared list) layers",
    ]


def test_how_a_model_was_read_is_told() -> None:
    model = geometry({**MIMO, "model_type": "new", "v_head_dim": None, "sliding_window_size": None})
    (line,) = remarks(model)
    assert line.startswith("note: model_type 'new' is not known")


# -- Symmetric ALiBi.


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=KNOWN_DEVICES)
def test_symmetric_alibi_is_refused_everywhere_with_the_reason(device: Any) -> None:
    (layer,) = geometry(JINA).kinds
    decision = explain(layer.selector_config("bfloat16"), device)
    assert decision.chosen is None
    reasons = {candidate.name: candidate.reasons for candidate in decision.candidates}
    for name in ("TRITON_ATTN", "TORCH_REF"):
        assert "symmetric ALiBi (of encoders) not supported" in reasons[name]
    without = layer.replace(use_alibi=False)
    assert explain(without.selector_config("bfloat16"), device).chosen is not None


def test_every_bundled_model_is_served_by_a_gpu_of_today() -> None:
    for name in ("glm-5.2", "kimi-k2.5", "mimo-v2-flash", "gemma-4-31b", "qwen3-next-80b"):
        model = load_model_geometry(name)
        for layer in model.kinds:
            assert explain(layer.selector_config(model.dtype), KNOWN_DEVICES["h200"]).chosen
