"""One call of a kernel of sparse latent attention, whoever's kernel it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.sparse.launches import SparseLaunch
from builders.sparse.vendor_calls import PlannedCalls
from specs.rows import RowFormat


@dataclass(frozen=True)
class SparseCall:
    """One call of a kernel: query rows, and the rows that they list."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed."""
    rotary: torch.Tensor
    """``[T, H, r]``."""
    rows: torch.Tensor
    """``[N, P, row]``: the cache, or converted rows as one block."""
    row: RowFormat
    """What they are."""
    indices: torch.Tensor
    """``[T, width]`` int32 ``block * P + offset``; -1 for none."""
    lens: torch.Tensor | None
    """``[T]`` int32: entries at the front of a list that count; None for all but -1."""
    scale: float
    k_scale: torch.Tensor
    """fp32 scalar, of rows with one scale per tensor."""
    out: torch.Tensor
    """``[T, H, L]``, written."""
    lse: torch.Tensor
    """``[T, H]`` fp32, natural log, written; -inf, and zeros in ``out``, for an empty list."""
    planned: PlannedCalls | None = None
    """Of a kernel of others: what its calls of the step share."""
    q_scale: torch.Tensor | None = None
    """fp32 scalar, of a query in e4m3: real = stored * scale. None is 1."""
    launch: SparseLaunch | None = None
    """Of the library's own kernel."""
