"""Hugging Face model families: which config fields attention depends on, and what they mean.

Names, defaults and meanings are transformers'; other fields are ignored. Sizes must be given, but
for Gemma 3 and Llama 4: the ``text_config`` of their files holds only what differs from a default.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pydantic import AliasChoices, ConfigDict, Field, ValidationInfo, field_validator

from specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from specs.dtypes import DType
from specs.model import IndexerGeometry, LayerGeometry, LayerKind, MLAGeometry

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def _named(*names: str, default: Any = ...) -> Any:
    """A field that configs of a family call by any of these names."""
    return Field(default, validation_alias=AliasChoices(*names))


class Family(Spec):
    """What every family has."""

    model_config = ConfigDict(extra="ignore", strict=True)
    default_dtype: ClassVar[DType] = DType.BFLOAT16
    layer_kinds: ClassVar[Mapping[str, LayerKind]]
    """Entries that ``layer_types`` may have."""
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    layer_types: list[str] | None = None
    """Type of each layer; None means the family's own pattern."""

    @field_validator("layer_types")
    @classmethod
    def _one_known_type_for_each_layer(
        cls, types: list[str] | None, info: ValidationInfo
    ) -> list[str] | None:
        """As many entries as layers, each of a type that the family has."""
        for index, entry in enumerate(types or ()):
            if entry not in cls.layer_kinds:
                allowed = ", ".join(cls.layer_kinds)
                raise ValueError(f"entry {index} is {entry!r}, expected one of {allowed}")
        count = info.data.get("num_hidden_layers")
        if types is not None and count is not None and len(types) != count:
            raise ValueError(f"has {len(types)} entries, expected num_hidden_layers ({count})")
        return types

    @abstractmethod
    def pattern(self) -> list[str]:
        """``layer_types`` of a config that lists none."""

    @abstractmethod
    def layer(self, layer_type: str) -> LayerGeometry:
        """A layer of that type."""

    def layers(self) -> tuple[LayerGeometry, ...]:
        """All layers, first to last."""
        types = self.pattern() if self.layer_types is None else self.layer_types
        made = {layer_type: self.layer(layer_type) for layer_type in dict.fromkeys(types)}
        return tuple(made[layer_type] for layer_type in types)


class _Dense(Family):
    """K and V for each KV head; layers are full or local, local meaning a window or a chunk."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        _FULL: LayerKind.FULL,
        _SLIDING: LayerKind.SLIDING_WINDOW,
    }
    local_type: ClassVar[str] = _SLIDING
    has_sinks: ClassVar[bool] = False
    use_alibi: ClassVar[bool] = False
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    sliding_window: NonNegativeInt | None = None
    attn_logit_softcapping: PositiveFloat | None = None

    @field_validator("num_key_value_heads")
    @classmethod
    def _kv_heads_divide_the_heads(cls, kv_heads: int | None, info: ValidationInfo) -> int | None:
        """Every KV head serves the same number of query heads."""
        heads = info.data.get("num_attention_heads")
        if kv_heads and heads and heads % kv_heads:
            raise ValueError(f"must divide num_attention_heads ({heads})")
        return kv_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    @property
    def local_size(self) -> int | None:
        """Window (or chunk) of local layers; None when all layers are full."""
        return self.sliding_window or None

    def is_local(self, index: int) -> bool:
        """True when that layer is local, in a model with local layers."""
        return True

    def pattern(self) -> list[str]:
        types = (_FULL, self.local_type)
        local = self.local_size is not None
        return [types[local and self.is_local(index)] for index in range(self.num_hidden_layers)]

    def layer(self, layer_type: str) -> LayerGeometry:
        return LayerGeometry(
            kind=self.layer_kinds[layer_type],
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_size=self.head_size,
            scale=self.scale,
            sliding_window=self.local_size if layer_type == _SLIDING else None,
            attention_chunk_size=self.local_size if layer_type == _CHUNKED else None,
            logits_soft_cap=self.attn_logit_softcapping,
            has_sinks=self.has_sinks,
            use_alibi=self.use_alibi,
        )


class _Mixtral(_Dense):
    num_key_value_heads: PositiveInt | None = 8


class _Mistral(_Mixtral):
    sliding_window: NonNegativeInt | None = 4096


class _Qwen2(_Dense):
    """The window is off unless asked for, and then holds from ``max_window_layers`` on."""

    num_key_value_heads: PositiveInt | None = 32
    sliding_window: NonNegativeInt | None = 4096
    use_sliding_window: bool = False
    max_window_layers: NonNegativeInt = 28

    @property
    def local_size(self) -> int | None:
        return super().local_size if self.use_sliding_window else None

    def is_local(self, index: int) -> bool:
        return index >= self.max_window_layers


class _Qwen3(_Qwen2):
    head_dim: PositiveInt | None = 128


class _Qwen2Moe(_Qwen2):
    num_key_value_heads: PositiveInt | None = 16

    def is_local(self, index: int) -> bool:
        return index % 2 == 0 and index < self.max_window_layers


class _Qwen3Moe(_Qwen2):
    num_key_value_heads: PositiveInt | None = 4

    def is_local(self, index: int) -> bool:
        return True


class _Gemma2(_Dense):
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    sliding_window: NonNegativeInt | None = 4096
    query_pre_attn_scalar: PositiveFloat = 256
    attn_logit_softcapping: PositiveFloat | None = 50.0

    @property
    def scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    def is_local(self, index: int) -> bool:
        return index % 2 == 0


class _Gemma3(_Gemma2):
    hidden_size: PositiveInt = 2304
    num_hidden_layers: PositiveInt = 26
    num_attention_heads: PositiveInt = 8
    max_position_embeddings: PositiveInt = 131072
    attn_logit_softcapping: PositiveFloat | None = None
    sliding_window_pattern: PositiveInt = 6
    use_bidirectional_attention: bool | None = False
    """True for an encoder (EmbeddingGemma), whose ``sliding_window`` counts both sides."""

    @property
    def local_size(self) -> int | None:
        window = super().local_size
        return window // 2 + 1 if window and self.use_bidirectional_attention else window

    def is_local(self, index: int) -> bool:
        return (index + 1) % self.sliding_window_pattern != 0

    def layer(self, layer_type: str) -> LayerGeometry:
        layer = super().layer(layer_type)
        if self.use_bidirectional_attention:
            return layer.replace(kind=LayerKind.ENCODER_ONLY)
        return layer


class _GptOss(_Dense):
    has_sinks: ClassVar[bool] = True
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 64
    sliding_window: NonNegativeInt | None = 128

    def is_local(self, index: int) -> bool:
        return index % 2 == 0


class _Llama4(_Dense):
    """Layers with rotary positions attend their chunk, layers without attend everything."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        _FULL: LayerKind.FULL,
        _CHUNKED: LayerKind.CHUNKED_LOCAL,
    }
    local_type: ClassVar[str] = _CHUNKED
    hidden_size: PositiveInt = 5120
    num_hidden_layers: PositiveInt = 48
    num_attention_heads: PositiveInt = 40
    max_position_embeddings: PositiveInt = 131072
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    attention_chunk_size: PositiveInt | None = 8192
    no_rope_layers: list[int] | None = None
    """1 for a layer with rotary positions, 0 for one without; empty means by the interval."""
    no_rope_layer_interval: PositiveInt = 4

    @field_validator("no_rope_layers")
    @classmethod
    def _one_flag_a_layer(cls, flags: list[int] | None, info: ValidationInfo) -> list[int] | None:
        """At least one flag per layer, as transformers asks."""
        count = info.data.get("num_hidden_layers", 0)
        if flags and len(flags) < count:
            raise ValueError(f"has {len(flags)} entries, expected num_hidden_layers ({count})")
        return flags

    @property
    def local_size(self) -> int | None:
        return self.attention_chunk_size

    def is_local(self, index: int) -> bool:
        if self.no_rope_layers:
            return self.no_rope_layers[index] != 0
        return (index + 1) % self.no_rope_layer_interval != 0


class _Rope(Spec):
    """Rotary scaling, as far as it scales attention."""

    model_config = ConfigDict(extra="ignore", strict=True)
    rope_type: str = _named("rope_type", "type", default="default")
    factor: PositiveFloat = 1.0
    mscale_all_dim: float | None = None

    @property
    def mscale(self) -> float:
        """YaRN's factor on queries and on keys, where it covers all of their elements."""
        if self.rope_type == "default" or not self.mscale_all_dim or self.factor <= 1:
            return 1.0
        return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0


class _Mla(Family):
    """Latent attention; ``num_key_value_heads`` of these configs says nothing about the cache."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {_FULL: LayerKind.MLA}
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    v_head_dim: PositiveInt
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    """``rope_scaling`` of files that transformers 5 wrote."""

    @property
    def indexer(self) -> IndexerGeometry | None:
        return None

    def pattern(self) -> list[str]:
        return [next(iter(self.layer_kinds))] * self.num_hidden_layers

    def layer(self, layer_type: str) -> LayerGeometry:
        rope = self.rope_scaling or self.rope_parameters or _Rope()
        mla = MLAGeometry(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        return LayerGeometry(
            kind=self.layer_kinds[layer_type],
            num_heads=self.num_attention_heads,
            num_kv_heads=1,
            head_size=mla.qk_head_dim,
            head_size_v=mla.v_head_dim,
            scale=mla.qk_head_dim**-0.5 * rope.mscale**2,
            mla=mla,
            indexer=self.indexer,
        )


class _SparseMla(_Mla):
    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        "indexed_attention": LayerKind.SPARSE_MLA,
        "deepseek_sparse_attention": LayerKind.SPARSE_MLA,
    }
    index_topk: PositiveInt
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt

    @property
    def indexer(self) -> IndexerGeometry | None:
        return IndexerGeometry(
            index_topk=self.index_topk,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
        )


class _Encoder(_Dense):
    """Bidirectional attention over one input."""

    default_dtype: ClassVar[DType] = DType.FLOAT32
    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        _FULL: LayerKind.ENCODER_ONLY,
        _SLIDING: LayerKind.ENCODER_ONLY,
    }
    is_decoder: Literal[False] = False


class _ModernBert(_Encoder):
    local_attention: PositiveInt = 128
    """Tokens of a local layer's window, both sides together."""
    global_attn_every_n_layers: PositiveInt = 3

    @property
    def local_size(self) -> int | None:
        return self.local_attention // 2 + 1

    def is_local(self, index: int) -> bool:
        return index % self.global_attn_every_n_layers != 0


class _Bloom(_Dense):
    use_alibi: ClassVar[bool] = True
    hidden_size: PositiveInt = _named("n_embed", "hidden_size")
    num_hidden_layers: PositiveInt = _named("n_layer", "num_hidden_layers")
    num_attention_heads: PositiveInt = _named("n_head", "num_attention_heads")
    max_position_embeddings: PositiveInt = _named("seq_length", default=2048)


FAMILIES: Final[Mapping[str, type[Family]]] = {
    "llama": _Dense,
    "mistral": _Mistral,
    "mixtral": _Mixtral,
    "phi3": _Dense,
    "qwen2": _Qwen2,
    "qwen2_moe": _Qwen2Moe,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "gemma": _Dense,
    "gemma2": _Gemma2,
    "gemma3": _Gemma3,
    "gemma3_text": _Gemma3,
    "gpt_oss": _GptOss,
    "llama4": _Llama4,
    "llama4_text": _Llama4,
    "deepseek_v2": _Mla,
    "deepseek_v3": _Mla,
    "kimi_k2": _Mla,
    "glm4_moe_lite": _Mla,
    "deepseek_v32": _SparseMla,
    "glm_moe_dsa": _SparseMla,
    "bert": _Encoder,
    "roberta": _Encoder,
    "xlm-roberta": _Encoder,
    "modernbert": _ModernBert,
    "bloom": _Bloom,
}
"""The reader of each ``model_type``."""

NESTED: Final = frozenset({"gemma3", "llama4"})
"""Model types whose attention fields sit in ``text_config``."""
