"""The table of readers: one for each Hugging Face ``model_type``, and the types without one.

A file must give every size, except in families whose files omit default values: the
``text_config`` of Gemma 3, Gemma 4 and Llama 4. Fields that attention does not depend on are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specs.families import dense, encoder, hybrid, latent
from specs.families.base import Family

FAMILIES: Final[Mapping[str, type[Family]]] = {
    "llama": dense.Plain,
    "mistral": dense.Mistral,
    "mixtral": dense.Mixtral,
    "phi3": dense.Phi3,
    "qwen2": dense.Qwen2,
    "qwen2_moe": dense.Qwen2Moe,
    "qwen3": dense.Qwen3,
    "qwen3_moe": dense.Qwen3Moe,
    "qwen3_vl": dense.Qwen3VL,
    "qwen3_vl_text": dense.Qwen3VL,
    "qwen3_vl_moe": dense.Qwen3VLMoe,
    "qwen3_vl_moe_text": dense.Qwen3VLMoe,
    "mimo": dense.Qwen2,
    "mimo_v2": dense.MiMoV2,
    "mimo_v2_flash": dense.MiMoV2,
    "glm4_moe": dense.Glm4Moe,
    "minimax_m2": dense.MiniMaxM2,
    "gemma": dense.Gemma,
    "gemma2": dense.Gemma2,
    "gemma3": dense.Gemma3,
    "gemma3_text": dense.Gemma3,
    "gemma4": dense.Gemma4,
    "gemma4_text": dense.Gemma4,
    "gemma4_unified": dense.Gemma4Unified,
    "gemma4_unified_text": dense.Gemma4Unified,
    "gpt_oss": dense.GptOss,
    "llama4": dense.Llama4,
    "llama4_text": dense.Llama4,
    "step3p5": dense.Step3p5,
    "step3p7": dense.Step3p5,
    "bloom": dense.Bloom,
    "deepseek_v2": latent.Latent,
    "deepseek_v3": latent.Latent,
    "kimi_k2": latent.Latent,
    "kimi_k25": latent.Latent,
    "glm4_moe_lite": latent.Latent,
    "deepseek_v32": latent.SparseLatent,
    "glm_moe_dsa": latent.SparseLatent,
    "qwen3_next": hybrid.Qwen3Next,
    "qwen3_5": hybrid.Qwen35,
    "qwen3_5_text": hybrid.Qwen35,
    "qwen3_5_moe": hybrid.Qwen35Moe,
    "qwen3_5_moe_text": hybrid.Qwen35Moe,
    "nemotron_h": hybrid.NemotronH,
    "nemotron-nas": hybrid.NemotronNas,
    "kimi_linear": hybrid.KimiLinear,
    "kimi_k3": hybrid.KimiLinear,
    "bert": encoder.Bert,
    "roberta": encoder.Roberta,
    "xlm-roberta": encoder.Roberta,
    "modernbert": encoder.ModernBert,
}
"""The reader of each ``model_type``."""

NESTED: Final[Mapping[str, str]] = {
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "step3p7": "step3p5",
    "kimi_k25": "kimi_k2",
    "kimi_k3": "kimi_linear",
}
"""Model types whose attention fields sit in ``text_config``, with that config's own type."""

_V4 = (
    "attends a window and, in one softmax, compressed keys of a second cache, keys that are values"
)
_M3 = "attends the blocks of keys that a block indexer picks for each KV head"

MISSING: Final[Mapping[str, str]] = {
    "deepseek_v4": _V4,
    "deepseek_v41": _V4,
    "minimax_m3": _M3,
    "minimax_m3_text": _M3,
    "minimax_m3_vl": _M3,
    "minimax_m3_vl_text": _M3,
    "hy_v4": "has sinks in sparse latent attention",
    "glm5_next": "lists pools of keys, and caches latent rows without rotary columns",
    "dots3_note": "has windows in latent attention",
    "mistral_large4": "shares latent rows across layers",
    "inkling": "adds a learned bias by distance to scores",
    "inkling2": "adds a learned bias by distance to scores and has a sink for each token",
    "qwen4_exp": "attends groups of keys that an indexer over their means picks",
    "step5": "attends pages of eight keys that their summaries pick",
    "diffllama": "subtracts a second softmax from the first",
}
"""Model types that cannot be read, each with the part of its attention that this library lacks."""
