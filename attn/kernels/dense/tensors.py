"""A layer of dense attention, the tensors of one forward, and how kernels read their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn.kernels.lang.stored import E4M3, E5M2, INT4, INT8, NATIVE
from builders.splitkv.tiles import power_of_two
from specs.dtypes import CacheDType
from specs.layouts import KVViews


@dataclass(frozen=True)
class DenseLayer:
    """What never changes in a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    cache_dtype: CacheDType
    causal: bool
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    chunk_lookback: int = 0
    logits_soft_cap: float | None = None
    use_alibi_sqrt: bool = False
    clamps_ranges: bool = False
    """Multimodal ranges reach no further back than the window."""


@dataclass(slots=True)
class DenseTensors:
    """The tensors of one forward."""

    query: torch.Tensor
    """``[T, H, D]``, last dimension contiguous."""
    keys: KVViews
    """The cache, or an encoder's ``[T, Hk, D]`` rows as key and value."""
    output: torch.Tensor
    """``[T, H, Dv]``, last dimension contiguous; fp8 with ``output_scale``."""
    k_scale: torch.Tensor | None
    """fp32 scalar or ``[Hk]`` of an fp8 cache; of others nothing is read, and None is cheaper."""
    v_scale: torch.Tensor | None
    lse: torch.Tensor | None = None
    """``[T, H]`` fp32, last dimension contiguous."""
    output_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    rows: KeyRows | None = None
    """What a forward before made of ``keys``; made here where it is None."""
    num_tokens: int = 0
    """Rows that there must be of query and output."""


class KeyRows:
    """Keys and values as kernels read them, and what a kernel's variant depends on of them."""

    def __init__(self, keys: KVViews, stored: Stored) -> None:
        """
        Args:
            keys: neither of which moves.
            stored: how they are read.
        """
        key, value, inline = keys.key, keys.value, keys.key_scale
        self.words = stored.words(key), stored.words(value)
        self.described: dict[tuple[str, tuple[int, ...]], Any] = {}
        """Descriptors of them for TMA, by the argument's name and the box."""
        self.variant = (
            key.dtype,
            value.dtype,
            key.shape[1:],
            value.shape[1:],
            key.stride(),
            value.stride(),
            (key.data_ptr() | value.data_ptr()) % 64,
            None if inline is None else inline.stride(),
        )
        """All of them that a kernel's variant depends on; no address and no number of pages."""


@dataclass(frozen=True)
class Stored:
    """How rows of a cache are read."""

    kind: int
    planes: int
    inline: bool

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the words that kernels load."""
        return rows if self.kind == NATIVE else rows.view(torch.int16)

    def width(self, size: int) -> tuple[int, int]:
        """Words of a plane of ``size`` elements: padded to a power of two, and used."""
        used = size // self.planes
        return max(power_of_two(used), 16), used


def stored_as(cache_dtype: CacheDType) -> Stored:
    """How rows of a cache of a dtype are read."""
    if cache_dtype is CacheDType.INT4_PER_TOKEN_HEAD:
        return Stored(INT4, 4, True)
    if cache_dtype is CacheDType.INT8_PER_TOKEN_HEAD:
        return Stored(INT8, 2, True)
    if cache_dtype is CacheDType.FP8_PER_TOKEN_HEAD:
        return Stored(E4M3, 2, True)
    if cache_dtype is CacheDType.FP8_E5M2:
        return Stored(E5M2, 2, False)
    return Stored(
        E4M3 if cache_dtype.is_quantized else NATIVE, 2 if cache_dtype.is_quantized else 1, False
    )
