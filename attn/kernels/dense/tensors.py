"""A layer of dense attention, the tensors of one forward, and how kernels read their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn.kernels.lang.stored import E4M3, E5M2, INT4, INT8, NATIVE
from specs.base import power_of_two
from specs.dtypes import CacheDType
from specs.layouts import KVViews


@dataclass(frozen=True)
class DenseLayer:
    """The constants of a layer of dense attention."""

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
    """Whether multimodal ranges reach no further back than the window."""


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
    """fp32 scalar or ``[Hk]``, scale of the keys of a per-tensor fp8 cache.

    Kernels read no scale for other caches; None is cheaper there."""
    v_scale: torch.Tensor | None
    lse: torch.Tensor | None = None
    """``[T, H]`` fp32, last dimension contiguous."""
    output_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    rows: KeyRows | None = None
    """``keys`` as kernels read them, kept from an earlier forward; the launcher sets it if None."""
    num_tokens: int = 0
    """The least number of rows that query and output must have."""

    @property
    def written(self) -> torch.Tensor:
        """The output as kernels write it: bytes with ``output_scale``."""
        return self.output if self.output_scale is None else self.output.view(torch.uint8)


class KeyRows:
    """Keys and values as kernels read them, and their part of the variant key."""

    def __init__(self, keys: KVViews, stored: Stored) -> None:
        """
        Args:
            keys: views of keys and values, whose addresses stay the same.
            stored: how their rows are read.
        """
        key, value, inline = keys.key, keys.value, keys.key_scale
        self.words = stored.words(key), stored.words(value)
        self.described: dict[tuple[int, int], tuple[Any, Any]] = {}
        """TMA descriptors of keys and of values, by the tokens and columns of their boxes."""
        self.variant = (
            key.dtype,
            value.dtype,
            key.is_cuda,
            value.is_cuda,
            key.shape[1:],
            value.shape[1:],
            key.stride(),
            value.stride(),
            (key.data_ptr() | value.data_ptr()) % 64,
            None if inline is None else inline.stride(),
        )
        """The part of the variant key that stands for keys and values.

        It holds the alignment of their addresses, but no address and no number of pages."""


@dataclass(frozen=True)
class Stored:
    """How kernels read the rows of a cache: kind of element, planes, and inline scales."""

    kind: int
    planes: int
    inline: bool

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the words that kernels load."""
        return rows if self.kind == NATIVE else rows.view(torch.int16)

    def width(self, size: int) -> tuple[int, int]:
        """Words of one plane of a row of ``size`` elements: padded to a power of two, and used."""
        used = size // self.planes
        return max(power_of_two(used), 16), used


def stored_as(cache_dtype: CacheDType) -> Stored:
    """How kernels read the rows of a cache of ``cache_dtype``."""
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
