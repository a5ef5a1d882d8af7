"""Quantised queries: a saturating cast of what kernels read beside a quantised cache."""

from __future__ import annotations

import torch

from attn.reference.quant import saturate


def quantize_into(rows: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """``rows / scale`` in the narrow type of ``out``; values beyond its range become its largest.

    Args:
        rows: ``[T, H, D]``, any strides.
        scale: real = stored * scale.
        out: ``[T, H, D]``, written.
    """
    out.copy_(saturate(rows.float() / scale, out.dtype))
