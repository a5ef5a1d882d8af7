"""Small models with random weights, and a tokenizer, for tests of the Transformers integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 97
WINDOW = 12
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
# Name -> class of the model, class of its configuration, and fields beside SIZES.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", HEADS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**HEADS, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**HEADS, **MIXED, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**HEADS, **MIXED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**HEADS, **MIXED, **EXPERTS, "num_local_experts": 4},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, **EXPERTS}),
}


def make_model(name: str, **changes: Any) -> Any:
    """A model of :data:`MODELS`, with peaked attention and sinks of the height of its scores."""
    import transformers

    model_cls, config_cls, fields = MODELS[name]
    config = getattr(transformers, config_cls)(**{**SIZES, **fields, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, model_cls)(config).eval()
    for parameter_name, weights in model.named_parameters():
        if weights.dim() > 1:
            weights.data.normal_(0, 0.25)
        elif "sinks" in parameter_name:
            weights.data.normal_(0, 2)
    return model


def make_tokenizer() -> Any:
    """A tokenizer of single characters, for :data:`VOCABULARY` tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 32 + VOCABULARY - 2)]
    vocabulary = {"<pad>": 0, "<s>": 1}
    vocabulary |= {character: place + 2 for place, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<pad>"
    )


def save_model(folder: Path | str, name: str = "llama") -> None:
    """Save a model with its tokenizer, as ``attn generate --hf`` takes it."""
    make_model(name).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
