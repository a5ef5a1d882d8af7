"""Families whose layers cache K and V for each KV head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, ValidationInfo, field_validator

from specs.base import NonNegativeInt, PositiveFloat, PositiveInt, Spec
from specs.families.base import (
    CHUNKED,
    FULL,
    SLIDING,
    ConfigPart,
    Family,
    entries_for_layers,
    named,
)
from specs.model import LayerGeometry, LayerKind


class _OneLayer(Spec):
    """Sizes that replace the model's own in one layer (``per_layer_config``)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None

    def applied(self, layer: LayerGeometry) -> LayerGeometry:
        """The layer with these sizes; its scale is unchanged unless it follows the head size."""
        size = self.head_dim or layer.head_size
        follows = layer.scale == layer.head_size**-0.5
        return layer.replace(
            num_heads=self.num_attention_heads or layer.num_heads,
            num_kv_heads=self.num_key_value_heads or layer.num_kv_heads,
            head_size=size,
            scale=size**-0.5 if follows else layer.scale,
        )


class Dense(Family):
    """Base of families with K and V per KV head: a layer is full or local (a window or a chunk)."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        FULL: LayerKind.FULL,
        SLIDING: LayerKind.SLIDING_WINDOW,
    }
    local_type: ClassVar[str] = SLIDING
    not_read: ClassVar[tuple[str, ...]] = ("use_sliding_window", "max_window_layers")
    has_sinks: ClassVar[bool] = False
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    sliding_window: NonNegativeInt | None = None
    attn_logit_softcapping: PositiveFloat | None = None
    per_layer_config: dict[str, _OneLayer] | None = None
    """Sizes of single layers by their index, in files that transformers 5 wrote."""

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
    def uses_alibi(self) -> bool:
        """True where positions are a linear bias for each head (ALiBi)."""
        return False

    @property
    def local_size(self) -> int | None:
        """Window (or chunk) of local layers; None when all layers are full."""
        return self.sliding_window or None

    @property
    def chunk_size(self) -> int | None:
        """Chunk of layers that attend chunks."""
        return self.local_size

    def is_local(self, index: int) -> bool:
        """True when that layer is local, in a model with local layers."""
        return True

    def pattern(self) -> list[str]:
        types = (FULL, self.local_type)
        local = self.local_size is not None
        return [types[local and self.is_local(index)] for index in range(self.num_hidden_layers)]

    def layer(self, layer_type: str) -> LayerGeometry:
        return LayerGeometry(
            kind=self.layer_kinds[layer_type],
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_size=self.head_size,
            scale=self.scale,
            sliding_window=self.local_size if layer_type == SLIDING else None,
            attention_chunk_size=self.chunk_size if layer_type == CHUNKED else None,
            logits_soft_cap=self.attn_logit_softcapping,
            has_sinks=self.has_sinks,
            use_alibi=self.uses_alibi,
        )

    def layers(self) -> tuple[LayerGeometry, ...]:
        layers = super().layers()
        if self.per_layer_config is None:
            return layers
        types = self.types()
        attention = [index for index, name in enumerate(types) if name not in self.other_types]
        return tuple(
            self.per_layer_config.get(str(index), _OneLayer()).applied(layer)
            for index, layer in zip(attention, layers, strict=True)
        )


class Plain(Dense):
    """Every layer is full unless ``layer_types`` says otherwise, whatever ``sliding_window`` is."""

    def is_local(self, index: int) -> bool:
        return False


class Gemma(Plain):
    """Gemma 1 has no windows at all."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {FULL: LayerKind.FULL}
    num_key_value_heads: PositiveInt | None = 16
    head_dim: PositiveInt | None = 256


class Phi3(Dense):
    """Every layer has the window, where the file gives one."""

    @property
    def longest_sequence(self) -> int:
        """The file's own number: transformers reads each rotary scaling of Phi-3 as LongRoPE."""
        return self.max_position_embeddings


class Mixtral(Dense):
    """Every layer has the window, where the file gives one."""

    num_key_value_heads: PositiveInt | None = 8


class Mistral(Mixtral):
    """All layers have one window, or a list of windows repeats over the layers."""

    sliding_window: NonNegativeInt | None = 4096
    interleaved_sliding_window: list[NonNegativeInt | None] | None = None
    """Windows of the first layers, repeated; None or 0 for a layer that sees everything."""

    @classmethod
    def prepared(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sort the two fields for windows: in files either may hold one window or a list."""
        window, several = body.get("sliding_window"), body.get("interleaved_sliding_window")
        if isinstance(several, int) and not isinstance(several, bool):
            window, several = several, None
        elif several is None and isinstance(window, list):
            window, several = None, window
        elif several is None:
            return body
        return {**body, "sliding_window": window, "interleaved_sliding_window": several}

    @field_validator("interleaved_sliding_window")
    @classmethod
    def _is_not_empty(
        cls, windows: list[int | None] | None, info: ValidationInfo
    ) -> list[int | None] | None:
        """At least one window."""
        if windows is not None and not windows:
            raise ValueError("has no entries, expected at least one window")
        return windows

    def layers(self) -> tuple[LayerGeometry, ...]:
        windows = self.interleaved_sliding_window
        if windows is None or self.layer_types is not None:
            return super().layers()
        full = self.layer(FULL)
        sliding = LayerKind.SLIDING_WINDOW
        return tuple(
            full.replace(kind=sliding, sliding_window=window) if window else full
            for index in range(self.num_hidden_layers)
            for window in (windows[index % len(windows)],)
        )


class Qwen2(Dense):
    """With ``use_sliding_window``, layers from ``max_window_layers`` on have the window."""

    num_key_value_heads: PositiveInt | None = 32
    sliding_window: NonNegativeInt | None = 4096
    use_sliding_window: bool = False
    max_window_layers: NonNegativeInt = 28

    @property
    def local_size(self) -> int | None:
        return super().local_size if self.use_sliding_window else None

    def is_local(self, index: int) -> bool:
        return index >= self.max_window_layers


class Qwen3(Qwen2):
    """Qwen 3: Qwen 2's layers, with heads of 128 elements unless the file says otherwise."""

    head_dim: PositiveInt | None = 128


class Qwen2Moe(Qwen2):
    """The window, when asked for, is in every other layer up to ``max_window_layers``."""

    num_key_value_heads: PositiveInt | None = 16

    def is_local(self, index: int) -> bool:
        return index % 2 == 0 and index < self.max_window_layers


class Qwen3Moe(Qwen2):
    """The window, when asked for, is in every layer."""

    num_key_value_heads: PositiveInt | None = 4

    def is_local(self, index: int) -> bool:
        return True


class Qwen3VL(Plain):
    """The text model of Qwen3-VL has no windows."""

    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128


class Qwen3VLMoe(Plain):
    """The text model of Qwen3-VL with experts has no windows."""

    num_key_value_heads: PositiveInt | None = 16


class Glm4Moe(Plain):
    """GLM-4.5 to 4.7: full attention throughout."""

    num_key_value_heads: PositiveInt | None = 8


class MiniMaxM2(Plain):
    """Every layer is softmax attention: the model's forerunner had linear layers too."""

    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 128
    attn_type_list: list[Literal[1]] | None = None
    """1 for each layer: softmax attention."""


class Gemma2(Dense):
    """Every other layer has a window; scores are capped."""

    not_read: ClassVar[tuple[str, ...]] = ("use_sliding_window", "sliding_window_size")
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


class Gemma3(Gemma2):
    """One full layer ends each period of ``sliding_window_pattern`` layers."""

    hidden_size: PositiveInt = 2304
    num_hidden_layers: PositiveInt = 26
    num_attention_heads: PositiveInt = 8
    max_position_embeddings: PositiveInt = 131072
    attn_logit_softcapping: PositiveFloat | None = None
    sliding_window_pattern: PositiveInt = named(
        "sliding_window_pattern", "_sliding_window_pattern", default=6
    )
    use_bidirectional_attention: bool | None = False
    """True for an encoder (EmbeddingGemma), whose ``sliding_window`` counts both sides."""

    @property
    def longest_sequence(self) -> int:
        """The file's own number: in files of Gemma 3 it includes the rotary scaling."""
        return self.max_position_embeddings

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


class Gemma4(Dense):
    """Full layers have heads of their own size and number; the last layers may share K and V.

    With ``attention_k_eq_v`` the full layers have one projection for keys and values. The two are
    normalised separately and only keys are rotated, so the cache holds both.
    """

    hidden_size: PositiveInt = 2304
    num_hidden_layers: PositiveInt = 30
    num_attention_heads: PositiveInt = 8
    max_position_embeddings: PositiveInt = 131072
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    sliding_window: NonNegativeInt | None = 512
    attention_k_eq_v: bool = False
    global_head_dim: PositiveInt | None = 512
    """Head size of full layers; None means ``head_dim``."""
    num_global_key_value_heads: PositiveInt | None = None
    """KV heads of full layers whose K and V are one projection; None: as many as other layers."""
    num_kv_shared_layers: NonNegativeInt = 0
    """Last layers that attend the cache of the last layer of their type before them."""
    use_bidirectional_attention: Literal["vision"] | None = None
    """With "vision", tokens of an image see the later tokens of that image too."""

    @property
    def scale(self) -> float:
        """One: queries and keys are normalised."""
        return 1.0

    @property
    def notes(self) -> tuple[str, ...]:
        if self.use_bidirectional_attention is None:
            return ()
        return ("tokens of an image see each other both ways, which this geometry does not say",)

    def is_local(self, index: int) -> bool:
        return (index + 1) % 6 != 0

    def types(self) -> list[str]:
        """``layer_types`` or the family's pattern, with the last layer always full."""
        return [*super().types()[:-1], FULL]

    def layer(self, layer_type: str) -> LayerGeometry:
        layer = super().layer(layer_type)
        if layer_type != FULL:
            return layer
        kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return layer.replace(
            head_size=self.global_head_dim or layer.head_size,
            num_kv_heads=kv_heads or layer.num_kv_heads,
        )

    def layers(self) -> tuple[LayerGeometry, ...]:
        layers = super().layers()
        own = max(len(layers) - self.num_kv_shared_layers, 0)
        return layers[:own] + tuple(layer.replace(shares_kv=True) for layer in layers[own:])


class Gemma4Unified(Gemma4):
    """Gemma 4 with images, unless the file says otherwise."""

    max_position_embeddings: PositiveInt = 262144
    sliding_window: NonNegativeInt | None = 1024
    use_bidirectional_attention: Literal["vision"] | None = "vision"


class GptOss(Dense):
    """Every other layer has a window, and every layer a sink for each head."""

    has_sinks: ClassVar[bool] = True
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = 64
    sliding_window: NonNegativeInt | None = 128

    def is_local(self, index: int) -> bool:
        return index % 2 == 0


class MiMoV2(Dense):
    """Window layers have KV heads and sinks of their own; values are narrower than keys."""

    not_read: ClassVar[tuple[str, ...]] = (
        *("use_sliding_window", "attention_chunk_size", "hybrid_block_size"),
    )
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 192
    v_head_dim: PositiveInt | None = 128
    sliding_window: NonNegativeInt | None = 129
    """Visible keys, the token's own included."""
    sliding_window_size: NonNegativeInt | None = None
    """Visible keys before the token's own, in the files of the model's makers."""
    hybrid_layer_pattern: list[Literal[0, 1]] | None = None
    """1 for a layer with a window; None means by the family's own pattern."""
    swa_num_attention_heads: PositiveInt | None = None
    swa_num_key_value_heads: PositiveInt | None = None
    """KV heads of window layers; None means twice those of full layers."""
    swa_head_dim: PositiveInt | None = None
    swa_v_head_dim: PositiveInt | None = None
    add_swa_attention_sink_bias: bool = True
    add_full_attention_sink_bias: bool = False

    @field_validator("hybrid_layer_pattern")
    @classmethod
    def _one_flag_a_layer(
        cls, flags: list[Literal[0, 1]] | None, info: ValidationInfo
    ) -> list[Literal[0, 1]] | None:
        """The list has one flag for each layer."""
        entries_for_layers(flags, info)
        return flags

    @property
    def local_size(self) -> int | None:
        if self.sliding_window_size:
            return self.sliding_window_size + 1
        return super().local_size

    def is_local(self, index: int) -> bool:
        if self.hybrid_layer_pattern is not None:
            return self.hybrid_layer_pattern[index] == 1
        return index > 0 and (index + 1) % 6 != 0

    def layer(self, layer_type: str) -> LayerGeometry:
        full = super().layer(layer_type)
        full = full.replace(
            head_size_v=self.v_head_dim, has_sinks=self.add_full_attention_sink_bias
        )
        if layer_type == FULL:
            return full
        size = self.swa_head_dim or full.head_size
        return full.replace(
            num_heads=self.swa_num_attention_heads or full.num_heads,
            num_kv_heads=self.swa_num_key_value_heads or 2 * full.num_kv_heads,
            head_size=size,
            head_size_v=self.swa_v_head_dim or self.v_head_dim,
            scale=size**-0.5,
            has_sinks=self.add_swa_attention_sink_bias,
        )


class _OtherHeads(ConfigPart):
    """Heads of one type of layer in files of Step 3.5 (``attention_other_setting``)."""

    attention_type: str = SLIDING
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = named(
        "num_attention_groups", "num_key_value_heads", default=None
    )
    head_dim: PositiveInt | None = None


class Step3p5(Dense):
    """Window layers have more query heads than full layers; gates are outside attention."""

    num_key_value_heads: PositiveInt | None = named(
        "num_attention_groups", "num_key_value_heads", default=8
    )
    head_dim: PositiveInt | None = 128
    num_sliding_attention_heads: PositiveInt | None = None
    attention_other_setting: _OtherHeads | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    """Scores are divided by its square root; None means the head size."""
    att_impl_type: Literal["GQA"] = "GQA"
    use_bidirectional_attention: Literal[False] | None = False

    @classmethod
    def prepared(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Drop entries of ``layer_types`` for draft layers, which the makers' files list too."""
        types, drafts = body.get("layer_types"), body.get("num_nextn_predict_layers")
        layers = body.get("num_hidden_layers")
        if (
            not isinstance(types, list)
            or not isinstance(layers, int)
            or not isinstance(drafts, int)
        ):
            return body
        return {**body, "layer_types": types[:layers]} if len(types) == layers + drafts else body

    def is_local(self, index: int) -> bool:
        return False

    @property
    def scale(self) -> float:
        return float((self.query_pre_attn_scalar or self.head_size) ** -0.5)

    def layer(self, layer_type: str) -> LayerGeometry:
        layer = super().layer(layer_type)
        if layer_type == SLIDING and self.num_sliding_attention_heads is not None:
            return layer.replace(num_heads=self.num_sliding_attention_heads)
        other = self.attention_other_setting
        if other is None or other.attention_type != layer_type:
            return layer
        size = other.head_dim or layer.head_size
        return layer.replace(
            num_heads=other.num_attention_heads,
            num_kv_heads=other.num_key_value_heads or layer.num_kv_heads,
            head_size=size,
            scale=float((self.query_pre_attn_scalar or size) ** -0.5),
        )


class Llama4(Dense):
    """Layers with rotary positions attend their chunk, layers without attend everything."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        FULL: LayerKind.FULL,
        CHUNKED: LayerKind.CHUNKED_LOCAL,
    }
    local_type: ClassVar[str] = CHUNKED
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


class Bloom(Dense):
    """Full attention with ALiBi, and names of its own for sizes."""

    hidden_size: PositiveInt = named("n_embed", "hidden_size")
    num_hidden_layers: PositiveInt = named("n_layer", "num_hidden_layers")
    num_attention_heads: PositiveInt = named("n_head", "num_attention_heads")
    max_position_embeddings: PositiveInt = named("seq_length", default=2048)

    @property
    def uses_alibi(self) -> bool:
        return True
