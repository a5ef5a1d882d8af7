"""Families of bidirectional attention over one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from specs.base import NonNegativeInt, PositiveInt
from specs.dtypes import DType
from specs.families.base import FULL, SLIDING
from specs.families.dense import Dense
from specs.model import LayerKind


class Encoder(Dense):
    """BERT and its kin."""

    default_dtype: ClassVar[DType] = DType.FLOAT32
    layer_kinds: ClassVar[Mapping[str, LayerKind]] = {
        FULL: LayerKind.ENCODER_ONLY,
        SLIDING: LayerKind.ENCODER_ONLY,
    }
    is_decoder: Literal[False] = False


class Bert(Encoder):
    """BERT, and jina-v2 under its name."""

    position_embedding_type: Literal["absolute", "rope", "rotary", "alibi"] | None = "absolute"
    """How the model uses positions: "alibi" (jina-v2) biases scores, the others do not enter
    attention."""

    @property
    def uses_alibi(self) -> bool:
        return self.position_embedding_type == "alibi"


class Roberta(Bert):
    """Positions start behind the padding token's id, so the table's first rows serve no token."""

    pad_token_id: NonNegativeInt | None = 1

    @property
    def longest_sequence(self) -> int:
        padding = 1 if self.pad_token_id is None else self.pad_token_id
        return self.max_position_embeddings - padding - 1


class ModernBert(Encoder):
    """A full layer begins each period of ``global_attn_every_n_layers`` layers."""

    local_attention: PositiveInt = 128
    """Tokens of a local layer's window, both sides together."""
    global_attn_every_n_layers: PositiveInt = 3

    @property
    def local_size(self) -> int | None:
        return self.local_attention // 2 + 1

    def is_local(self, index: int) -> bool:
        return index % self.global_attn_every_n_layers != 0
