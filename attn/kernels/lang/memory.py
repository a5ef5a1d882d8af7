"""How kernels load rows from memory: alignment, and types that every GPU can load."""

from __future__ import annotations

import math

import torch


def alignment(x: torch.Tensor) -> int:
    """The largest power of two, at most 16, that divides the address in bytes of every row."""
    size, strides = x.element_size(), x.stride()[:-1]
    used = (stride * size for stride, count in zip(strides, x.shape, strict=False) if count > 1)
    return math.gcd(16, x.data_ptr(), *used)


def as_bytes(stored: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as uint8, so that kernels compile for GPUs without the type.

    Tensors of other types are returned as they are.
    """
    dtype = stored.dtype
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    return stored.view(torch.uint8) if is_float8 else stored
