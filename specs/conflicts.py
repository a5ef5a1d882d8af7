"""Features of one layer that do not go together, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterable, Set
from itertools import product
from typing import Final

from specs.attention import AttentionType
from specs.base import Spec

WINDOW: Final = "sliding window"
CHUNKS: Final = "chunked local attention"
ALIBI: Final = "ALiBi"
ALIBI_SQRT: Final = "ALiBi-sqrt"
RANGES: Final = "multimodal ranges"
RSWA: Final = "R-SWA"
NON_CAUSAL: Final = "non-causal attention"
DCP: Final = "DCP"
QUANTIZED: Final = "a quantised KV cache"


def role(attn_type: AttentionType) -> str:
    """The name that a layer's role has in a set of features."""
    return f"attention type {attn_type.value}"


_ENCODERS = tuple(role(kind) for kind in AttentionType if not kind.is_cached)
_CROSS = role(AttentionType.ENCODER_DECODER)
_POSITIONS = (WINDOW, CHUNKS, ALIBI, ALIBI_SQRT, RANGES, RSWA)
"""Features that need positions of queries and keys for more than the causal mask."""


class Conflict(Spec):
    """Two features, and why no layer has both."""

    first: str
    second: str
    why: str

    def __str__(self) -> str:
        return f"{self.first} with {self.second} not supported: {self.why}"


def _pairs(firsts: Iterable[str], seconds: Iterable[str], why: str) -> tuple[Conflict, ...]:
    return tuple(
        Conflict(first=first, second=second, why=why) for first, second in product(firsts, seconds)
    )


CONFLICTS: Final[tuple[Conflict, ...]] = (
    *_pairs([DCP], _POSITIONS, "a rank keeps a part of the keys, and knows no other's positions"),
    *_pairs([DCP], [_CROSS], "keys of an encoder are not divided over ranks"),
    *_pairs([QUANTIZED], _ENCODERS, "encoders cache nothing"),
    *_pairs([CHUNKS, RSWA], [NON_CAUSAL, *_ENCODERS], "it is defined for causal attention"),
    *_pairs(_POSITIONS, [_CROSS], "decoder and encoder count positions of their own"),
    *_pairs([CHUNKS], [RSWA], "a prefix does not stay visible outside of its chunk"),
)
"""Every pair of features that exclude each other. A layer with more features is refused only for a
pair among them."""


def among(features: Set[str]) -> list[Conflict]:
    """The conflicts whose two features are both in ``features``, in order of :data:`CONFLICTS`."""
    return [pair for pair in CONFLICTS if {pair.first, pair.second} <= features]
