"""The arguments of one call of sparse latent attention, by the library's or a vendor's kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.sparse.launches import SparseLaunch
from builders.sparse.vendor_calls import PlannedCalls
from specs.rows import RowFormat


@dataclass(slots=True)
class SparseCall:
    """One call of a kernel: query rows, and the cache rows that they list."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed queries."""
    rotary: torch.Tensor
    """``[T, H, r]``, rotary part of the queries."""
    rows: torch.Tensor
    """``[N, P, row]``: the cache, or converted rows as one block."""
    row: RowFormat
    """Format of ``rows``."""
    indices: torch.Tensor
    """``[T, width]`` int32, listed rows as ``block * P + offset``; -1 is no row."""
    lens: torch.Tensor | None
    """``[T]`` int32: number of entries at the front of a list that count. None: all but -1."""
    scale: float
    """Multiplies q.k before the softmax."""
    k_scale: torch.Tensor
    """fp32 scalar, scale of rows with one scale per tensor."""
    out: torch.Tensor
    """``[T, H, L]``, written."""
    lse: torch.Tensor
    """``[T, H]`` fp32, natural log, written; -inf, and zeros in ``out``, for an empty list."""
    planned: PlannedCalls | None = None
    """What all calls of a vendor's kernel in the step share, where the call needs it."""
    q_scale: torch.Tensor | None = None
    """fp32 scalar, scale of a query in e4m3: real = stored * scale. None is 1."""
    launch: SparseLaunch | None = None
    """How the library's own kernel is launched, where the call needs it."""
