"""Small random models for vLLM's engine, made with ``transformers``.

Weights are scaled so that attention is peaked but not on one key, and so that tokens differ from
position to position. With vLLM's own dummy weights every backend answers the same.
"""

from __future__ import annotations

import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.vllm.engine import latent

VOCAB = latent.VOCAB
MAX_LEN = 1024
PROMPT_LENS = (1, 7, 16, 17, 65, 190, 420)
"""Prompt lengths below and above the limit of the split-KV kernel, the windows and a page."""

ENCODER = "bert"
LATENT = "deepseek"
"""The model whose layers are latent (MLA)."""
HYBRID = "falcon_h1"
"""The model with Mamba beside attention, in each layer."""


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_LEN,
    )


def _gemma2() -> Any:
    """Layers with and without a window in turn; the cap of scores is low enough to matter."""
    from transformers import Gemma2Config

    return Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        query_pre_attn_scalar=128,
        sliding_window=48,
        attn_logit_softcapping=5.0,
        max_position_embeddings=MAX_LEN,
    )


def _gemma3() -> Any:
    """More layers with a window than without, queries and keys normalised, heads of 256 columns."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=48,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=MAX_LEN,
    )


def _gpt_oss() -> Any:
    """Sinks, heads of 64 columns, windows in every other layer; every token goes to all experts.

    A choice of experts that a rounding flips would outweigh every error of attention.
    """
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=48,
        num_local_experts=4,
        num_experts_per_tok=4,
        max_position_embeddings=MAX_LEN,
    )


def _deepseek() -> Any:
    """Latent layers of DeepSeek's own widths, without experts, since those need kernels of their
    own.
    """
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        n_routed_experts=0,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=MAX_LEN,
        num_nextn_predict_layers=0,
    )


def _falcon_h1() -> Any:
    """Attention and Mamba side by side; vLLM makes blocks as large as a Mamba state, 528 tokens.

    Before there is a KV cache vLLM tunes its Mamba kernels: 58 configurations, those of two kernels
    twice, compiled one after another on a machine that has none of them in Triton's cache.
    """
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=1024,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        max_position_embeddings=MAX_LEN,
    )


def _bert() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    LATENT: _deepseek,
    HYBRID: _falcon_h1,
    ENCODER: _bert,
}
"""A model's configuration, of ``transformers``."""

SCORE_STD = 2.0
"""Standard deviation of attention scores: the softmax then rests on a few of a hundred keys."""
_SCORING = {
    *("q_proj", "k_proj", "query", "key"),
    # Projections of latent layers, whose ranks are normalised: the last two give the key's parts.
    *("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"),
}
"""Projections whose outputs are queries or keys, or parts of them."""
LOGIT_STD = 3.0
TIED_EMBEDDING = 0.05
"""Size of a tied embedding in the residual stream: one as large as what layers add would make each
token predict itself."""


def fill(model: nn.Module, tied: bool, seed: int = 0) -> None:
    """Draw all weights.

    Args:
        model: just made, so that its norms are neutral.
        tied: its input embedding, which Gemma scales by the root of its width, is its output too.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_weight(name, weight, noise, hidden, tied))


def _weight(name: str, weight: Tensor, noise: Tensor, hidden: int, tied: bool) -> Tensor:
    """A parameter's values, made from normal noise of its shape."""
    module = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    if "norm" in module.lower():
        # Normalised queries and keys get their scale here; a tied output gets its scale by the last
        # norm.
        grown = {"q_norm": SCORE_STD**0.5 - 1, "k_norm": SCORE_STD**0.5 - 1}
        if tied:
            grown["norm"] = LOGIT_STD / TIED_EMBEDDING - 1
        return weight + grown.get(module, 0.0) + 0.1 * noise
    if module == "sinks":
        # A sink is about as high as the sum of a hundred keys.
        return math.log(100) + noise
    if weight.ndim == 1 or module.endswith("_bias"):
        return 0.1 * noise
    if "embed" in name:
        return noise * (TIED_EMBEDDING / hidden**0.5 if tied else 1.0)
    # Experts are ``[experts, in, out]``, all other weights ``[out, in]``.
    fan_in = weight.shape[1]
    gain = 1.0
    if module in _SCORING:
        gain = SCORE_STD**0.5
    elif module == "o_proj" or name.endswith("attention.output.dense.weight"):
        gain = 2.0
    elif module == "lm_head":
        gain = LOGIT_STD
    return noise * gain / fan_in**0.5


def make_model(name: str, folder: Path, seed: int = 0) -> None:
    """Save a model with random weights in bf16, unless the folder is there.

    Args:
        name: a name of ``CONFIGS``, or of :data:`tests.vllm.engine.latent.CONFIGS`.
        folder: the model's folder, which appears when it is complete: several runs may ask at once.
        seed: seed of the weights.
    """
    if folder.exists():
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        made = Path(parent) / "model"
        _save(name, made, seed)
        # Another run may have been faster.
        with contextlib.suppress(OSError):
            made.rename(folder)


def _save(name: str, folder: Path, seed: int) -> None:
    if name in latent.CONFIGS:
        latent.save_model(name, folder, seed)
        save_tokenizer(folder)
        return
    from transformers import AutoModel, AutoModelForCausalLM

    factory = AutoModel if name == ENCODER else AutoModelForCausalLM
    model = factory.from_config(CONFIGS[name]())
    fill(model, tied=name.startswith("gemma"), seed=seed)
    model.to(torch.bfloat16).save_pretrained(folder)
    if name == ENCODER:
        save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of words ``t0``, ``t1``, ...: vLLM serves no encoder without one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{number}": number for number in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", pad_token="t0")
    tokenizer.save_pretrained(folder)


def prompts_of(seed: int = 0, lens: Sequence[int] = PROMPT_LENS) -> list[list[int]]:
    """Random tokens; the second half of a longer prompt repeats its first, for n-grams."""
    draw = random.Random(seed)
    prompts = []
    for length in lens:
        half = length if length < 64 else (length + 1) // 2
        tokens = [draw.randrange(VOCAB) for _ in range(half)]
        prompts.append((tokens + tokens)[:length])
    return prompts
