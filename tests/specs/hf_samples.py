"""Small Hugging Face configs of every family, for tests of the reader."""

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
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", *SPARSE_TYPES)


def config(model_type: str, **fields: object) -> dict[str, object]:
    """A small config of that type, with every size that it needs."""
    latent = LATENT if model_type in LATENT_TYPES else {}
    index = INDEX if model_type in SPARSE_TYPES else {}
    body = {**BASE, **latent, **index, **fields}
    if model_type in NESTED:
        return {"model_type": model_type, "text_config": body}
    return {"model_type": model_type, **body}


def read(model_type: str, **fields: object) -> ModelGeometry:
    """The geometry of :func:`config`."""
    return read_hf_config(config(model_type, **fields), "tiny", "config.json")


def kinds(model: ModelGeometry) -> list[LayerKind]:
    """Kind of each layer."""
    return [layer.kind for layer in model.layers]


def windows(model: ModelGeometry) -> list[int | None]:
    """Window of each layer."""
    return [layer.sliding_window for layer in model.layers]
