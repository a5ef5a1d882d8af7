"""Readers of model types without a family of their own: they go by the names of fields alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationInfo, field_validator

from specs.base import NonNegativeInt, PositiveFloat, PositiveInt
from specs.families.base import CHUNKED, FULL, LINEAR, SLIDING, Family, named
from specs.families.dense import Dense
from specs.families.latent import Latent, SparseLatent
from specs.model import LayerKind

_NOT_ATTENTION = (LINEAR, "mamba", "mamba2", "conv", "recurrent", "moe", "mlp")


class UnknownDense(Dense):
    """Full attention, except where ``layer_types`` names windows, chunks or other kinds."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        FULL: LayerKind.FULL,
        "attention": LayerKind.FULL,
        SLIDING: LayerKind.SLIDING_WINDOW,
        CHUNKED: LayerKind.CHUNKED_LOCAL,
    }
    other_types: ClassVar[tuple[str, ...]] = _NOT_ATTENTION
    hidden_size: PositiveInt = named("hidden_size", "n_embd", "n_embed", "d_model", "dim")
    num_hidden_layers: PositiveInt = named("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    num_attention_heads: PositiveInt = named("num_attention_heads", "n_head", "n_heads")
    max_position_embeddings: PositiveInt = named(
        *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        *("model_max_length", "max_sequence_length", "max_seq_length", "seq_len"),
    )
    num_key_value_heads: PositiveInt | None = named(
        *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"), default=None
    )
    head_dim: PositiveInt | None = named("head_dim", "kv_channels", default=None)
    attention_chunk_size: NonNegativeInt | None = None
    use_sliding_window: bool | None = None
    query_pre_attn_scalar: PositiveFloat | None = None
    attention_multiplier: PositiveFloat | None = None
    """Multiplies scores in place of ``head_size ** -0.5`` (Granite)."""

    @classmethod
    def prepared(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Drop the window of a file that turns it off (``use_sliding_window`` is false)."""
        if body.get("use_sliding_window") is False:
            return {name: value for name, value in body.items() if name != "sliding_window"}
        return body

    @field_validator("sliding_window", "attention_chunk_size")
    @classmethod
    def _layers_that_have_it_are_named(cls, size: int | None, info: ValidationInfo) -> int | None:
        """Refuse a window or chunk size without ``layer_types``, which name the layers with it."""
        if size and info.data.get("layer_types", ()) is None:
            raise ValueError(
                "layer_types must name the layers that have it, for a model_type that is not known"
            )
        return size

    @property
    def chunk_size(self) -> int | None:
        return self.attention_chunk_size or None

    @property
    def scale(self) -> float:
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        return float((self.query_pre_attn_scalar or self.head_size) ** -0.5)

    def is_local(self, index: int) -> bool:
        return False


def family_by_names(body: Mapping[str, Any]) -> type[Family]:
    """The reader for a config, by the names of its fields."""
    if body.get("kv_lora_rank") is None:
        return UnknownDense
    return Latent if body.get("index_topk") is None else SparseLatent
