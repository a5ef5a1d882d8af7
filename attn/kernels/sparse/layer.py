"""A layer of sparse latent attention, and the tensors of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from attn.kernels.lang.memory import as_bytes
from builders.launch.call import LaunchOptions
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import LatentFormat, RowFormat


@dataclass(frozen=True)
class SparseLayer:
    """The constants of one sparse latent layer: heads, softmax scale, row format and widths."""

    num_heads: int
    scale: float
    layout: LatentFormat
    rank: int = 512
    rope_size: int = 64


@dataclass(slots=True, eq=False)
class SparseTensors:
    """The tensors of one launch: T query tokens, H heads, rank L, rotary size r."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed; contiguous in its last dimension."""
    rotary: torch.Tensor
    """``[T, H, r]``, the rotated part of the query; contiguous in its last dimension."""
    kv_cache: torch.Tensor
    """``[N, P, row]`` in the layer's layout; compact rows are one block ``[1, S, row]``."""
    indices: torch.Tensor
    """``[T, topk]`` int32: ``block * P + offset`` of each listed row; -1 lists no row. With a tile
    of several tokens: the entries ``[cdiv(T, tokens), tokens * topk]`` of joint lists."""
    topk_lens: torch.Tensor | None
    """int32 for each list: how many of its entries count, from its start; None: all."""
    output: torch.Tensor
    """``[T, H, L]`` in the query's type; the launch writes it."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32; the launch writes it. None: no LSE."""
    k_scale: torch.Tensor | None = None
    """fp32 scalar that multiplies ``FP8_NOPE_FP8_ROPE`` rows; None for other rows."""
    sinks: torch.Tensor | None = None
    """``[H]`` logits that are added to the softmax denominator and to the LSE only."""
    states: torch.Tensor | None = None
    """fp32 scratch for states; ``SparseTile.state_floats`` gives its size."""
    sums: torch.Tensor | None = None
    """fp32 scratch for maxima and sums of states; ``SparseTile.state_floats`` gives its size."""
    counters: torch.Tensor | None = None
    """``[SparseTile.counters]`` int32; zeros before and after every launch."""
    rows: CacheRows | None = None
    """``kv_cache`` as kernels read it, kept from an earlier forward; the launcher sets it if
    None."""

    def part(self, rows: slice) -> SparseTensors:
        """The tensors of some query tokens; the scratch is the same."""
        lens, lse = self.topk_lens, self.lse
        return replace(
            self,
            query=self.query[rows],
            rotary=self.rotary[rows],
            indices=self.indices[rows],
            topk_lens=None if lens is None else lens[rows],
            output=self.output[rows],
            lse=None if lse is None else lse[rows],
        )


class CacheRows:
    """The rows of a cache as kernels read them, and their part of the variant key."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        """
        Args:
            kv_cache: ``[N, P, row]``, whose address does not change.
        """
        self._cache = kv_cache.detach()
        self._words: dict[torch.dtype, torch.Tensor] = {}
        self._fields: tuple[torch.Tensor | None, ...] | None = None
        self.variant = (
            kv_cache.dtype,
            kv_cache.is_cuda,
            kv_cache.shape[1:],
            kv_cache.stride(),
            # If there is one page only, its stride says nothing.
            kv_cache.shape[0] == 1,
            kv_cache.data_ptr() % 16,
        )
        """The part of the variant key that stands for the cache.

        It holds the alignment of its address, but no address and no number of pages."""

    def words(self, dtype: torch.dtype) -> torch.Tensor:
        """The cache as elements of ``dtype``, as a Hopper kernel reads it."""
        found = self._words.get(dtype)
        if found is None:
            found = self._words[dtype] = self._cache.view(dtype)
        return found

    def fields(self, row: RowFormat) -> tuple[torch.Tensor | None, ...]:
        """The fields of the rows as the portable kernels read them: latent, rotary part, scales.

        Elements in e4m3 are given as bytes, which every GPU can load.

        Args:
            row: the format of the rows, always the same.
        """
        if self._fields is None:
            found = latent_views(self._cache, row)
            self._fields = as_bytes(found["nope"]), as_bytes(found["rope"]), found.get("scale")
        return self._fields


Strides: TypeAlias = tuple[int, int, int, int]
"""Elements from token to token and from head to head of the query, then of its rotary part."""


@dataclass(frozen=True)
class LaunchForm:
    """One launch of a step, as it is for any number of rows."""

    kernel: Any
    """The ``triton.jit`` function."""
    constants: dict[str, Any]
    """The arguments that all launches of a variant share, by name."""
    varying: tuple[str, ...]
    """Names of the other arguments."""
    values: Callable[[SparseTensors, Strides], tuple[Any, ...]]
    """Their values, in that order; which of them are None follows from the variant."""
    grid: Callable[[int], tuple[int, ...]]
    """The programs for a number of lists."""
    options: LaunchOptions
    """How the kernel is compiled and launched."""


@lru_cache(maxsize=256)
def row_of(layer: SparseLayer, dtype: torch.dtype) -> RowFormat:
    """The row format of the layer's cache, for a query of ``dtype``."""
    return layer.layout.row(layer.rank, layer.rope_size, DType.parse(dtype))
