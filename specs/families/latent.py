"""Families of multi-head latent attention (MLA), dense and sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from specs.base import NonNegativeInt, PositiveInt
from specs.families.base import FULL, Family, entries_for_layers
from specs.model import IndexerGeometry, LayerGeometry, LayerKind, MLAGeometry


class Latent(Family):
    """Latent attention in every layer; ``num_key_value_heads`` says nothing about the cache."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {FULL: LayerKind.MLA}
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: NonNegativeInt
    v_head_dim: PositiveInt

    def pattern(self) -> list[str]:
        return [next(iter(self.layer_kinds))] * self.num_hidden_layers

    def layer(self, layer_type: str) -> LayerGeometry:
        mla = MLAGeometry(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        return LayerGeometry(
            kind=LayerKind.MLA,
            num_heads=self.num_attention_heads,
            num_kv_heads=1,
            head_size=mla.qk_head_dim,
            head_size_v=mla.v_head_dim,
            scale=mla.qk_head_dim**-0.5 * self.rope.mscale**2,
            mla=mla,
        )


class SparseLatent(Latent):
    """Layers attend the tokens that their own indexer lists, or the nearest one before them."""

    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        "indexed_attention": LayerKind.SPARSE_MLA,
        "deepseek_sparse_attention": LayerKind.SPARSE_MLA,
    }
    index_topk: PositiveInt
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    indexer_types: list[Literal["full", "shared"]] | None = None
    """"full" for a layer with an indexer; "shared" for a layer that takes the latest list made."""
    index_topk_pattern: list[Literal["full", "shared"]] | None = None
    """Another name of ``indexer_types``; files write a letter for each layer, "F" or "S"."""
    index_topk_freq: NonNegativeInt = 1
    """From layer ``index_skip_topk_offset - 1`` on, every so many layers have an indexer."""
    index_skip_topk_offset: NonNegativeInt = 2

    @field_validator("index_topk_pattern", mode="before")
    @classmethod
    def _spelt_with_letters(cls, pattern: Any) -> Any:
        """Replace the letters "F" and "S" by the words; a letter without a word stays."""
        if not isinstance(pattern, str):
            return pattern
        return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]

    @field_validator("indexer_types", "index_topk_pattern")
    @classmethod
    def _one_for_each_layer(
        cls, types: list[Literal["full", "shared"]] | None, info: ValidationInfo
    ) -> list[Literal["full", "shared"]] | None:
        """The list has one entry for each layer, and the first layer has an indexer."""
        entries_for_layers(types, info)
        if types and types[0] != "full":
            raise ValueError("the first layer must be 'full': there is no list before it")
        return types

    def has_indexer(self, index: int) -> bool:
        """True when that layer has an indexer of its own."""
        types = self.indexer_types or self.index_topk_pattern
        if types is not None:
            return types[index] == "full"
        every = max(self.index_topk_freq, 1)
        return max(index - self.index_skip_topk_offset + 1, 0) % every == 0

    def layer(self, layer_type: str) -> LayerGeometry:
        indexer = IndexerGeometry(
            index_topk=self.index_topk,
            index_n_heads=self.index_n_heads,
            index_head_dim=self.index_head_dim,
        )
        return super().layer(layer_type).replace(kind=LayerKind.SPARSE_MLA, indexer=indexer)

    def layers(self) -> tuple[LayerGeometry, ...]:
        layers = super().layers()
        return tuple(
            layer
            if self.has_indexer(index)
            else layer.replace(indexer=None, shared_index_topk=self.index_topk)
            for index, layer in enumerate(layers)
        )
