"""Quantisation of queries, for kernels that compute with a quantised cache and query."""

from __future__ import annotations

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference.quant import saturate


def quantize_into(rows: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write ``rows / scale`` to ``out`` in e4m3, clamped to e4m3's range.

    Args:
        rows: ``[T, H, D]``, any strides with dense rows of D.
        scale: real = stored * scale.
        out: ``[T, H, D]`` e4m3, contiguous, written.

    Raises:
        ValueError: tensors that do not fit together.
    """
    if not has_kernel(rows):
        out.copy_(saturate(rows.float() / scale, out.dtype))
        return
    from attn.kernels.cache.quant import quantize_rows

    quantize_rows(rows, scale, out, hardware_e4m3=converts_float8(rows.device))
