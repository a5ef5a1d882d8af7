"""Small Hugging Face configs of every family, for tests of the reader."""

from typing import Any

from specs.hf_config import read_hf_config
from specs.hf_families import NESTED
from specs.model import LayerKind, ModelGeometry

BASE = {
    "hidden_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
INDEX = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}
SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
LATENT_TYPES = (
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
    *("kimi_linear", "kimi_k3"),
    *SPARSE_TYPES,
)
BLOCKS = {
    "nemotron_h": {"hybrid_override_pattern": "M-*EM*"},
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 8}}] * 6},
}
"""Fields that say which layers are attention, for families that need them."""


def config(model_type: str, **fields: object) -> dict[str, object]:
    """A small config of this model type, with every size that it needs."""
    latent = LATENT if model_type in LATENT_TYPES else {}
    index = INDEX if model_type in SPARSE_TYPES else {}
    body = {**BASE, **latent, **index, **BLOCKS.get(model_type, {}), **fields}
    if model_type in NESTED:
        return {"model_type": model_type, "text_config": body}
    return {"model_type": model_type, **body}


def attention_part(data: dict[str, Any]) -> dict[str, Any]:
    """The object of a config that holds its attention fields."""
    return data["text_config"] if data["model_type"] in NESTED else data


def read(model_type: str, **fields: object) -> ModelGeometry:
    """The geometry of :func:`config`."""
    return read_hf_config(config(model_type, **fields), "tiny", "config.json")


def kinds(model: ModelGeometry) -> list[LayerKind]:
    """The kind of each layer."""
    return [layer.kind for layer in model.layers]


def windows(model: ModelGeometry) -> list[int | None]:
    """The window of each layer."""
    return [layer.sliding_window for layer in model.layers]
