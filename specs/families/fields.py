"""Names of config fields that change attention, in the files of any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_OFF: Final[tuple[Any, ...]] = (None, False, 0, 0.0, "", [], {})
"""Values by which a file says that the model does not have the feature."""

ATTENTION_FIELDS: Final[tuple[str, ...]] = (
    # Which keys a token sees: windows, chunks, patterns of layers.
    "sliding_window",
    "sliding_window_size",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "interleaved_sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_windows",
    "window_size",
    "attn_window_size",
    "attention_window",
    "attention_window_size",
    "attention_window_pattern",
    "local_attention",
    "local_window_size",
    "window_attn_skip_freq",
    "global_attn_every_n_layers",
    "global_attn_idx",
    "global_attention_layers",
    "hybrid_layer_pattern",
    "hybrid_block_size",
    "attention_chunk_size",
    "dual_chunk_attention_config",
    "layer_types",
    "attention_types",
    "attention_layers",
    "attn_layers",
    "no_rope_layers",
    "use_bidirectional_attention",
    "use_bidirectional_mask",
    "is_causal",
    "is_encoder_decoder",
    "add_cross_attention",
    "cross_attention_layers",
    "block_size_diffusion",
    "recurrent_kv_cache_mode",
    # Which of several keys are chosen.
    "sparse_attention",
    "sparse_attention_config",
    "sparse_attention_freq",
    "sparse_config",
    "moba_config",
    "moba_chunk_size",
    "moba_topk",
    "nsa_config",
    "compress_ratio",
    "compress_ratios",
    "compress_rates",
    "compress_rate_csa",
    "compress_rate_hca",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "index_skip_topk_offset",
    "index_n_heads",
    "index_head_dim",
    "index_kpool",
    "index_block_size",
    "index_topk_blocks",
    "index_local_blocks",
    "index_source_layer_ids",
    "indexer_types",
    "candidate_topk_blocks",
    # Scores.
    "alibi",
    "use_alibi",
    "alibi_bias_max",
    "position_embedding_type",
    "attn_config",
    "attn_logit_softcapping",
    "attn_logit_softcap",
    "attn_logit_cap",
    "attention_logit_cap",
    "attention_logit_softcapping",
    "attn_soft_cap",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "attention_scale",
    "attn_scaling",
    "softmax_scale",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "relative_attention",
    "relative_attention_num_buckets",
    "attention_sink",
    "attention_sinks",
    "attention_sink_bias",
    "use_attention_sink",
    "use_attention_sinks",
    "use_sinks",
    "num_sink_tokens",
    "add_swa_attention_sink_bias",
    "add_full_attention_sink_bias",
    "lambda_std_dev",
    # Heads and their sizes, for all layers or for some.
    "v_head_dim",
    "global_head_dim",
    "swa_head_dim",
    "swa_v_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "num_global_key_value_heads",
    "num_attention_groups",
    "num_sliding_attention_heads",
    "num_attention_heads_per_layer",
    "num_key_value_heads_per_layer",
    "attention_other_setting",
    "per_layer_config",
    "block_configs",
    "multi_query",
    "multi_query_attention",
    "multi_query_group_num",
    "num_kv_heads",
    "n_head_kv",
    "n_kv_heads",
    "kv_channels",
    "attention_head_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    # Caches that layers share, and layers that are not attention.
    "num_kv_shared_layers",
    "kv_source_layers",
    "attention_k_eq_v",
    "attn_type_list",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_layer_offset",
    "full_attention_interval",
    "full_attn_idxs",
    "layers_block_type",
    "layer_group_size",
    "linear_attn_config",
    "hybrid_override_pattern",
    "mixer_types",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "state_size",
)
"""Fields that change attention: a file that sets one needs a family that knows the field."""

_BY_LAYER_TYPES: Final = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
    "full_attention_interval",
    "global_attn_every_n_layers",
)
"""Fields that older files have in place of ``layer_types``; a file's ``layer_types`` wins."""

_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "is_causal": (True,),
    "scale_attn_weights": (True,),
    "position_embedding_type": (
        "absolute",
        "rope",
        "rotary",
        "mistral_yarn",
        "rope_llama",
        "rope_llama4",
    ),
}
"""Values in addition to ``_OFF`` with which a field leaves attention as it is."""

_MEANT_WHEN_FALSE: Final = ("is_causal", "scale_attn_weights")


def asks_for_something(name: str, value: Any) -> bool:
    """True where a field of :data:`ATTENTION_FIELDS` has a value that changes attention."""
    if name in _MEANT_WHEN_FALSE:
        return value is not None and value is not True
    is_off = any(value == off and type(value) is type(off) for off in _OFF)
    return not is_off and value not in _HARMLESS.get(name, ())


def unread_fields(config: Mapping[str, Any], understood: frozenset[str]) -> list[str]:
    """Fields of a config that change attention and that no family has read.

    Args:
        config: as in the file.
        understood: names that its family reads, or knows to mean nothing.
    """
    listed = asks_for_something("layer_types", config.get("layer_types"))
    return [
        name
        for name in ATTENTION_FIELDS
        if name in config
        and name not in understood
        and not (listed and name in _BY_LAYER_TYPES)
        and asks_for_something(name, config[name])
    ]
