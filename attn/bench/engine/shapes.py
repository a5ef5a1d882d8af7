"""Models whose engines are compared: their sizes, their contenders, and what is asked of ours."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Any, Final, Self

from pydantic import Field, StrictBool, model_validator

from attn.bench.engine.engine import MODEL, OURS
from specs.base import PositiveInt, Spec

BLOCK_SIZE: Final = 64
"""Tokens of a block: all backends take it, and FlashMLA takes no other."""
MAX_MODEL_LEN: Final = 16384


class Contender(Spec):
    """A backend of vLLM and the KV cache that it reads."""

    backend: str
    cache: str = "auto"
    """vLLM's ``kv_cache_dtype``; ``auto`` is the model's bf16."""

    @property
    def label(self) -> str:
        """The contender in a table."""
        return self.backend if self.cache == "auto" else f"{self.backend}, {self.cache}"


class Load(Spec):
    """Requests that an engine gets together, and what their rate counts."""

    name: str
    num_prompts: PositiveInt
    prompt_len: PositiveInt
    output_len: PositiveInt
    is_cached: StrictBool = False
    """True where the prompts are the same in every round, so that all but the last token of each is
    read from the prefix cache and the rate counts generated tokens. False where the prompts are new
    and the rate counts their tokens."""

    repeats: PositiveInt = 1
    """Times that a round asks for the load, which must be cached: other prompts would be read from
    the cache the second time. Seconds of decodes depend on the host, and vary."""

    @model_validator(mode="after")
    def _repeats_are_cached(self) -> Self:
        if self.repeats > 1 and not self.is_cached:
            raise ValueError(f"repeats of new prompts must be 1, got {self.repeats}")
        return self

    @property
    def tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.num_prompts * (self.output_len if self.is_cached else self.prompt_len)

    @property
    def what(self) -> str:
        """Sizes in a few words."""
        prompt, counted = ("cached", "out") if self.is_cached else ("in", "in")
        sizes = f"{self.prompt_len} {prompt} + {self.output_len} out"
        return f"{self.num_prompts} x ({sizes}), {counted} tok/s"


@unique
class Measure(StrEnum):
    """What a target compares."""

    RATE = "tokens/s"
    ATTENTION = "attention's speed"
    START_UP = "start-up"


class Goal(Spec):
    """What is asked of our backend on a model.

    It is ``ratio`` times the speed of the fastest rival at least; a start-up may take ``ratio``
    times the seconds at most.
    """

    measure: Measure
    load: str = ""
    """Name of the load; empty for a start-up."""
    ours: Contender
    rivals: tuple[Contender, ...] = Field(min_length=1)
    ratio: float = Field(default=1.0, gt=0)

    @property
    def text(self) -> str:
        """The goal in words."""
        names = " and ".join(rival.label for rival in self.rivals)
        if self.measure is Measure.START_UP:
            return f"start-up of {self.ours.label} <= {self.ratio:.2f} x {names}"
        what = self.load if self.measure is Measure.RATE else f"attention of {self.load}"
        return f"{what}: {self.ours.label} >= {self.ratio:.2f} x {names}"


class EngineModel(Spec):
    """A model of random weights, whose engines are compared."""

    name: str
    title: str
    config: dict[str, Any]
    """Content of its ``config.json``."""
    contenders: tuple[Contender, ...]
    loads: tuple[Load, ...]
    goals: tuple[Goal, ...]
    kv_cache_gib: PositiveInt = 8
    """Size of the KV cache. All contenders' engines are in memory at once."""


PREFILL: Final = Load(name="prefill", num_prompts=16, prompt_len=4096, output_len=1)
DECODE: Final = Load(
    name="decode", num_prompts=128, prompt_len=1025, output_len=256, is_cached=True, repeats=2
)
LONG: Final = Load(name="long", num_prompts=4, prompt_len=12288, output_len=1)
LONG_DECODE: Final = Load(
    name="decode", num_prompts=64, prompt_len=8193, output_len=256, is_cached=True, repeats=2
)
"""Decodes of a sparse model: a list of 2,048 keys leaves three quarters of the context out."""

DENSE_LOADS: Final = (PREFILL, DECODE, LONG)
SPARSE_LOADS: Final = (PREFILL, LONG_DECODE, LONG)

FLASH, TRITON = Contender(backend="FLASH_ATTN"), Contender(backend="TRITON_ATTN")
FLASH_FP8 = Contender(backend="FLASH_ATTN", cache="fp8")
CUSTOM, CUSTOM_FP8 = Contender(backend=OURS), Contender(backend=OURS, cache="fp8")
CUSTOM_ROWS = Contender(backend=OURS, cache="fp8_ds_mla")
FLASH_MLA_3 = Contender(backend="FLASH_ATTN_MLA")
FLASHMLA, TRITON_MLA = Contender(backend="FLASHMLA"), Contender(backend="TRITON_MLA")
FLASH_SPARSE = Contender(backend="FLASH_ATTN_MLA_SPARSE")
FLASHMLA_SPARSE = Contender(backend="FLASHMLA_SPARSE", cache="fp8_ds_mla")

_LLAMA: Final = {**MODEL, "num_hidden_layers": 6, "max_position_embeddings": MAX_MODEL_LEN}
_GPT_OSS: Final[dict[str, Any]] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "vocab_size": 32768,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def latent_config(heads: int, inner: int, sparse: bool, layers: int = 6) -> dict[str, Any]:
    """A ``config.json`` with the widths of DeepSeek-V3 or V3.2, of which a rank has a share.

    Args:
        heads: query heads of the rank.
        inner: width of the rank's part of the dense MLPs; there are no experts.
        sparse: True for V3.2, whose layers have an indexer.
        layers: number of layers.
    """
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "n_routed_experts": 0,
        "n_shared_experts": 0,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": 32768,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
    }
    if sparse:
        config.update(
            architectures=["DeepseekV32ForCausalLM"],
            model_type="deepseek_v32",
            index_topk=2048,
            index_n_heads=64,
            index_head_dim=128,
        )
    return config


def _rates(
    ours: Contender, rivals: tuple[Contender, ...], loads: tuple[Load, ...], ratio: float = 1.0
) -> tuple[Goal, ...]:
    return tuple(
        Goal(measure=Measure.RATE, load=load.name, ours=ours, rivals=rivals, ratio=ratio)
        for load in loads
    )


def _dense(name: str, title: str, config: dict[str, Any]) -> EngineModel:
    """A model with a KV cache of heads, in bf16 and in fp8."""
    fp8_pays = Goal(measure=Measure.RATE, load="decode", ours=CUSTOM_FP8, rivals=(CUSTOM,))
    return EngineModel(
        name=name,
        title=title,
        config=config,
        contenders=(FLASH, CUSTOM, FLASH_FP8, CUSTOM_FP8),
        loads=DENSE_LOADS,
        goals=(
            *_rates(CUSTOM, (FLASH,), DENSE_LOADS),
            *_rates(CUSTOM_FP8, (FLASH_FP8,), DENSE_LOADS),
            fp8_pays,
        ),
    )


def _latent(heads: int, inner: int) -> EngineModel:
    rivals = (FLASH_MLA_3, FLASHMLA, TRITON_MLA)
    start_up = Goal(measure=Measure.START_UP, ours=CUSTOM, rivals=(TRITON_MLA,))
    return EngineModel(
        name=f"deepseek-v3-{heads}",
        title=f"DeepSeek-V3-like, {heads} heads per rank",
        config=latent_config(heads, inner, sparse=False),
        contenders=(*rivals, CUSTOM),
        loads=DENSE_LOADS,
        goals=(*_rates(CUSTOM, rivals, DENSE_LOADS), start_up),
        kv_cache_gib=4,
    )


def _sparse(heads: int) -> EngineModel:
    pairs = ((CUSTOM_ROWS, FLASHMLA_SPARSE, 1.2), (CUSTOM, FLASH_SPARSE, 1.0))
    goals: list[Goal] = []
    for ours, rival, ratio in pairs:
        goals += [
            Goal(measure=Measure.ATTENTION, load=load.name, ours=ours, rivals=(rival,), ratio=ratio)
            for load in (PREFILL, LONG_DECODE)
        ]
        goals += _rates(ours, (rival,), SPARSE_LOADS)
    return EngineModel(
        name=f"deepseek-v32-{heads}",
        title=f"DeepSeek-V3.2-like, {heads} heads per rank, lists of 2,048 keys",
        config=latent_config(heads, 2304, sparse=True),
        contenders=(FLASH_SPARSE, CUSTOM, FLASHMLA_SPARSE, CUSTOM_ROWS),
        loads=SPARSE_LOADS,
        goals=tuple(goals),
        kv_cache_gib=6,
    )


MODELS: Final = {
    model.name: model
    for model in (
        _latent(16, 2304),
        _latent(128, 18432),
        _sparse(16),
        _sparse(8),
        _dense("llama", "Llama-3.1-8B's shape, 6 layers", _LLAMA),
        _dense("gpt-oss", "gpt-oss-like, 12 layers, dense MLPs", _GPT_OSS),
    )
}
"""The models by name."""


def select_models(names: tuple[str, ...]) -> tuple[EngineModel, ...]:
    """Models by name, in their order; no name means all.

    Raises:
        ValueError: a name is no model's.
    """
    for name in names:
        if name not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}; got {name!r}")
    return tuple(model for name, model in MODELS.items() if not names or name in names)
