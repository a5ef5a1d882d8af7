"""A layer of sparse latent attention, and the tensors of one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

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
    fields: dict[str, torch.Tensor | None] | None = None
    """:func:`field_pointers` of ``kv_cache``, kept from an earlier forward; None: not yet made."""

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


@dataclass(frozen=True)
class LaunchForm:
    """One launch of a step, as it is for any number of rows."""

    kernel: Any
    """The ``triton.jit`` function."""
    constants: dict[str, Any]
    """The arguments that all launches of a variant share, by name."""
    varying: Callable[[SparseTensors], dict[str, Any]]
    """The other arguments, by name; which ones there are follows from the variant."""
    grid: Callable[[int], tuple[int, ...]]
    """The programs for a number of query tokens."""
    options: LaunchOptions
    """How the kernel is compiled and launched."""


@lru_cache(maxsize=256)
def row_of(layer: SparseLayer, dtype: torch.dtype) -> RowFormat:
    """The row format of the layer's cache, for a query of ``dtype``."""
    return layer.layout.row(layer.rank, layer.rope_size, DType.parse(dtype))


def field_pointers(kv_cache: torch.Tensor, row: RowFormat) -> dict[str, torch.Tensor | None]:
    """The fields of a cache's rows as the portable kernels take them, by the arguments' names.

    Elements in e4m3 are given as bytes, which every GPU can load.
    """
    fields = latent_views(kv_cache, row)
    latent, rope = as_bytes(fields["nope"]), as_bytes(fields["rope"])
    return {"latent_ptr": latent, "rope_ptr": rope, "scales_ptr": fields.get("scale")}


def stored_as(kv_cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cache as elements of ``dtype``; a cache of that type is returned as it is."""
    return kv_cache if kv_cache.dtype == dtype else kv_cache.view(dtype)
