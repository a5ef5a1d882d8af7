"""The base of every model family: its sizes, the type of each layer, its longest sequence."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from pydantic import AliasChoices, ConfigDict, Field, ValidationInfo, field_validator

from specs.base import PositiveFloat, PositiveInt, Spec
from specs.dtypes import DType
from specs.model import LayerGeometry, LayerKind, OtherLayers

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"

_YARN: Final = ("yarn", "deepseek_yarn")
_ALREADY_LONG: Final = ("default", "su", "longrope", "llama3", "deepseek_llama_scaling")
"""Rotary kinds for which ``max_position_embeddings`` of a file includes the scaling."""


def named(*names: str, default: Any = ...) -> Any:
    """A field that the config files of a family may call by any of these names."""
    return Field(default, validation_alias=AliasChoices(*names))


class ConfigPart(Spec):
    """An object of a config file: fields that are not declared are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    @classmethod
    def names_of(cls, field: str) -> tuple[str, ...]:
        """Every name by which files may call a field."""
        alias = cls.model_fields[field].validation_alias
        if isinstance(alias, AliasChoices):
            return tuple(str(choice) for choice in alias.choices)
        return (field,)


class Rope(ConfigPart):
    """Rotary scaling, as far as it scales attention or lengthens sequences."""

    rope_type: str = named("rope_type", "type", default="default")
    factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    mscale_all_dim: float | None = None

    @property
    def mscale(self) -> float:
        """YaRN's factor on queries and on keys, where it applies to all of their elements; else 1.

        With ``mscale_all_dim`` m and scaling ``factor`` f it is ``0.1 * m * ln(f) + 1``.
        """
        factor = self.factor or 1.0
        if self.rope_type == "default" or not self.mscale_all_dim or factor <= 1:
            return 1.0
        return 0.1 * self.mscale_all_dim * math.log(factor) + 1.0

    def longest(self, positions: int) -> int:
        """Tokens of the longest sequence of a model whose file says ``positions``.

        YaRN reaches ``factor`` times the length that the model was trained with. Some files give
        that product, others the trained length. For the kinds of ``_ALREADY_LONG`` files always
        give the product; every other kind multiplies the file's number. These are vLLM's rules.
        """
        if self.factor is None or self.rope_type in _ALREADY_LONG:
            return positions
        if self.rope_type in _YARN:
            trained = self.original_max_position_embeddings or positions
            return max(positions, int(trained * self.factor))
        return int(positions * self.factor)


class Family(ConfigPart):
    """Base of the model families. Names, defaults and meanings of fields are transformers'."""

    default_dtype: ClassVar[DType] = DType.BFLOAT16
    layer_kinds: ClassVar[Mapping[str, LayerKind]]
    """Entries of ``layer_types`` that are attention."""
    other_types: ClassVar[tuple[str, ...]] = ()
    """Entries of ``layer_types`` that are not attention."""
    not_read: ClassVar[tuple[str, ...]] = ()
    """Names of attention fields that files of this family hold although its models ignore them."""
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    """Rotary scaling in files that transformers 5 wrote; older files call it ``rope_scaling``."""
    layer_types: list[str] | None = None
    """Type of each layer; None means the family's own pattern."""

    @classmethod
    def prepared(cls, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config with its family's older spellings brought to the fields declared here."""
        return body

    @field_validator("rope_scaling", "rope_parameters", mode="before")
    @classmethod
    def _of_full_layers(cls, rope: Any) -> Any:
        """Rotary scaling of the full layers, where a file gives one for each type of layer."""
        if isinstance(rope, dict) and any(isinstance(part, dict) for part in rope.values()):
            return rope.get(FULL) or {}
        return rope

    @field_validator("layer_types")
    @classmethod
    def _one_known_type_for_each_layer(
        cls, types: list[str] | None, info: ValidationInfo
    ) -> list[str] | None:
        """The list has one entry for each layer, each of a type that the family has."""
        for index, entry in enumerate(types or ()):
            if entry not in cls.layer_kinds and entry not in cls.other_types:
                allowed = ", ".join((*cls.layer_kinds, *cls.other_types))
                raise ValueError(f"entry {index} is {entry!r}, expected one of {allowed}")
        count = info.data.get("num_hidden_layers")
        if types is not None and count is not None and len(types) != count:
            raise ValueError(f"has {len(types)} entries, expected num_hidden_layers ({count})")
        return types

    @property
    def rope(self) -> Rope:
        """Rotary scaling of full layers; a default one where the file names none."""
        return self.rope_scaling or self.rope_parameters or Rope()

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the model serves."""
        return self.rope.longest(self.max_position_embeddings)

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts that a user of the geometry must know and that its fields do not hold."""
        return ()

    @abstractmethod
    def pattern(self) -> list[str]:
        """``layer_types`` of a config that lists none."""

    @abstractmethod
    def layer(self, layer_type: str) -> LayerGeometry:
        """An attention layer of that type."""

    def types(self) -> list[str]:
        """Type of each layer, first to last."""
        return self.pattern() if self.layer_types is None else self.layer_types

    def layers(self) -> tuple[LayerGeometry, ...]:
        """The attention layers, first to last."""
        types = [name for name in self.types() if name not in self.other_types]
        made = {layer_type: self.layer(layer_type) for layer_type in dict.fromkeys(types)}
        return tuple(made[layer_type] for layer_type in types)

    def other_layers(self) -> tuple[OtherLayers, ...]:
        """The layers that are not attention, by type."""
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(self.types()):
            if name in self.other_types:
                indices.setdefault(name, []).append(index)
        return tuple(
            OtherLayers(name=name, indices=tuple(found)) for name, found in indices.items()
        )


def entries_for_layers(values: list[Any] | None, info: ValidationInfo) -> None:
    """Refuse a list that has not one entry for each layer.

    Raises:
        ValueError: another number of entries.
    """
    count = info.data.get("num_hidden_layers")
    if values is not None and count is not None and len(values) != count:
        raise ValueError(f"has {len(values)} entries, expected num_hidden_layers ({count})")
