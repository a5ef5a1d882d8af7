"""How rows lie in memory: alignment, and types that every GPU can load."""

from __future__ import annotations

import math

import torch


def alignment(x: torch.Tensor) -> int:
    """Bytes, a power of two up to 16, that the address of every row is a multiple of."""
    size, strides = x.element_size(), x.stride()[:-1]
    used = (stride * size for stride, count in zip(strides, x.shape, strict=False) if count > 1)
    return math.gcd(16, x.data_ptr(), *used)


def as_bytes(stored: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, so that GPUs without such a type compile the kernel."""
    dtype = stored.dtype
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    return stored.view(torch.uint8) if is_float8 else stored
