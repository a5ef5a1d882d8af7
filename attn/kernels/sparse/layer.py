"""A layer of sparse latent attention, and the tensors of one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.rows import LatentFormat


@dataclass(frozen=True)
class SparseLayer:
    """The constants of one sparse latent layer: heads, softmax scale, row format and widths."""

    num_heads: int
    scale: float
    layout: LatentFormat
    rank: int = 512
    rope_size: int = 64


@dataclass(frozen=True, eq=False)
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
