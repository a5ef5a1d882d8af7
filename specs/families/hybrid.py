"""Families that mix attention with layers of other kinds, or give layers sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pydantic import ValidationInfo, field_validator

from specs.base import PositiveInt
from specs.families.base import FULL, LINEAR, ConfigPart, entries_for_layers, named
from specs.families.dense import Dense, Plain
from specs.families.latent import Latent
from specs.model import LayerGeometry, LayerKind


class Qwen3Next(Plain):
    """Attention every few layers, gated delta networks between; output gates are not attention."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {FULL: LayerKind.FULL}
    other_types: ClassVar[tuple[str, ...]] = (LINEAR,)
    num_key_value_heads: PositiveInt | None = 2
    head_dim: PositiveInt | None = 256
    full_attention_interval: PositiveInt = 4

    def pattern(self) -> list[str]:
        return [
            LINEAR if (index + 1) % self.full_attention_interval else FULL
            for index in range(self.num_hidden_layers)
        ]


class Qwen35(Qwen3Next):
    """Qwen 3.5: Qwen3-Next's layers with another default number of KV heads."""

    num_key_value_heads: PositiveInt | None = 4


class Qwen35Moe(Qwen3Next):
    """Qwen 3.5 with experts: Qwen3-Next's layers and defaults."""

    num_key_value_heads: PositiveInt | None = 2


_BLOCKS: Final = {"M": "mamba", "E": "moe", "-": "mlp", "*": FULL}
"""Letters of ``hybrid_override_pattern``."""


class NemotronH(Dense):
    """A layer is attention, a state-space model or an MLP; positions are not encoded."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        FULL: LayerKind.FULL,
        "attention": LayerKind.FULL,
    }
    other_types: ClassVar[tuple[str, ...]] = ("mamba", LINEAR, "moe", "mlp")
    not_read: ClassVar[tuple[str, ...]] = (
        "use_sliding_window",
        "mamba_num_heads",
        "ssm_state_size",
    )
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = named("head_dim", "attention_head_dim", default=128)
    layer_types: list[str] | None = named("layers_block_type", "layer_types", default=None)
    hybrid_override_pattern: str | None = None
    """A letter for each layer: M mamba, E mixture of experts, - MLP, * attention."""

    @classmethod
    def prepared(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fill in a missing number of layers from the list of layers or the letters."""
        names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
        listed = next((body[name] for name in names if body.get(name)), None)
        if "num_hidden_layers" not in body and isinstance(listed, list | str):
            return {**body, "num_hidden_layers": len(listed)}
        return body

    @field_validator("hybrid_override_pattern")
    @classmethod
    def _letters_are_blocks(cls, letters: str | None, info: ValidationInfo) -> str | None:
        """Every layer has a letter of :data:`_BLOCKS`."""
        for index, letter in enumerate(letters or ""):
            if letter not in _BLOCKS:
                allowed = ", ".join(_BLOCKS)
                raise ValueError(f"letter {index} is {letter!r}, expected one of {allowed}")
        entries_for_layers(None if letters is None else list(letters), info)
        return letters

    @field_validator("hybrid_override_pattern")
    @classmethod
    def _layers_are_listed(cls, letters: str | None, info: ValidationInfo) -> str | None:
        """The file gives the layers as letters or as ``layers_block_type``."""
        if letters is None and info.data.get("layer_types", ()) is None:
            raise ValueError("a file without layers_block_type needs it")
        return letters

    def pattern(self) -> list[str]:
        return [_BLOCKS[letter] for letter in self.hybrid_override_pattern or ""]

    def layer(self, layer_type: str) -> LayerGeometry:
        layer = super().layer(FULL)
        if self.local_size is None:
            return layer
        return layer.replace(kind=LayerKind.SLIDING_WINDOW, sliding_window=self.local_size)


class _LinearAttention(ConfigPart):
    """Numbers of the layers of each kind, counted from 1."""

    full_attn_layers: list[PositiveInt]
    kda_layers: list[PositiveInt]


class KimiLinear(Latent):
    """Latent attention every few layers, Kimi delta attention between.

    With ``mla_use_nope`` the rotary columns stay unrotated, but are cached and scored too. Output
    gates are outside attention.
    """

    other_types: ClassVar[tuple[str, ...]] = (LINEAR,)
    max_position_embeddings: PositiveInt = named("max_position_embeddings", "model_max_length")
    linear_attn_config: _LinearAttention | None = None

    @field_validator("linear_attn_config")
    @classmethod
    def _lists_name_every_layer(
        cls, lists: _LinearAttention | None, info: ValidationInfo
    ) -> _LinearAttention | None:
        """Each layer is in one of the two lists."""
        count = info.data.get("num_hidden_layers")
        if lists is None or count is None:
            return lists
        if sorted(lists.full_attn_layers + lists.kda_layers) != list(range(1, count + 1)):
            raise ValueError(
                f"full_attn_layers and kda_layers must name layers 1 to {count}, each once"
            )
        return lists

    def pattern(self) -> list[str]:
        count = self.num_hidden_layers
        if self.linear_attn_config is None:
            return [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
        full = set(self.linear_attn_config.full_attn_layers)
        return [FULL if index + 1 in full else LINEAR for index in range(count)]


class _BlockAttention(ConfigPart):
    """Attention of one block of a searched architecture."""

    no_op: bool = False
    """True for a block without attention."""
    replace_with_linear: bool = False
    """True for a block with a linear layer in place of attention."""
    n_heads_in_group: PositiveInt | None = None
    """Query heads that share a KV head."""
    window_length: None = None
    num_sink_tokens: None = None
    sparsify: None = None
    unshifted_sink: Literal[False] | None = False
    use_prefill_window_in_sink_attention: Literal[False] | None = False


class _Block(ConfigPart):
    attention: _BlockAttention


class NemotronNas(Plain):
    """Blocks of one Llama have other numbers of KV heads, or no attention at all."""

    other_types: ClassVar[tuple[str, ...]] = ("no_op", "linear")
    block_configs: list[_Block]

    @field_validator("block_configs")
    @classmethod
    def _one_for_each_layer(cls, blocks: list[_Block], info: ValidationInfo) -> list[_Block]:
        """The list has one block for each layer, each with KV heads that divide the heads."""
        entries_for_layers(blocks, info)
        heads = info.data.get("num_attention_heads")
        for index, block in enumerate(blocks):
            attention = block.attention
            if attention.no_op or attention.replace_with_linear:
                continue
            group = attention.n_heads_in_group
            if group is None:
                raise ValueError(f"block {index} has attention and no n_heads_in_group")
            if heads is not None and heads % group:
                raise ValueError(
                    f"n_heads_in_group ({group}) of block {index} must divide "
                    f"num_attention_heads ({heads})"
                )
        return blocks

    def pattern(self) -> list[str]:
        return [
            "no_op"
            if block.attention.no_op
            else "linear"
            if block.attention.replace_with_linear
            else FULL
            for block in self.block_configs
        ]

    def layers(self) -> tuple[LayerGeometry, ...]:
        full = self.layer(FULL)
        return tuple(
            full.replace(num_kv_heads=self.num_attention_heads // group)
            for block, name in zip(self.block_configs, self.pattern(), strict=True)
            for group in (block.attention.n_heads_in_group,)
            if name == FULL and group is not None
        )
