"""A layer of sparse latent attention, and the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.rows import LatentFormat


@dataclass(frozen=True)
class SparseLayer:
    """What never changes in a layer."""

    num_heads: int
    scale: float
    layout: LatentFormat
    rank: int = 512
    rope_size: int = 64


@dataclass(frozen=True, eq=False)
class SparseTensors:
    """The tensors of one launch; T rows of queries."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed; last dimension contiguous, as everywhere here."""
    rotary: torch.Tensor
    """``[T, H, r]``."""
    kv_cache: torch.Tensor
    """``[N, P, row]`` of the layout, or compact rows as one block ``[1, S, row]``."""
    indices: torch.Tensor
    """``[T, topk]`` int32: ``block * P + offset`` of each listed row; -1 for none, anywhere."""
    topk_lens: torch.Tensor | None
    """``[T]`` int32: entries of each row that are looked at; None: all."""
    output: torch.Tensor
    """``[T, H, L]``, in the query's type, written."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, written."""
    k_scale: torch.Tensor | None = None
    """fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows."""
    sinks: torch.Tensor | None = None
    """``[H]`` logits that only the denominator, and the LSE, have."""
    states: torch.Tensor | None = None
    """fp32 scratch, of :meth:`builders.sparse.tiles.SparseTile.state_floats`; any content."""
    sums: torch.Tensor | None = None
    """Likewise."""
    counters: torch.Tensor | None = None
    """int32, of :attr:`builders.sparse.tiles.SparseTile.counters`; zeros, before and after."""
