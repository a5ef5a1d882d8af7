"""Where an operation runs: on kernels, or in the reference."""

from __future__ import annotations

from functools import cache

import torch


def has_kernel(rows: torch.Tensor) -> bool:
    """The rows are where kernels run, in a type they know; float64 is the reference's."""
    return rows.dtype != torch.float64 and (rows.is_cuda or (rows.is_cpu and _interprets()))


@cache
def _interprets() -> bool:
    """Kernels run on CPU tensors, in Triton's interpreter."""
    try:
        from attn.kernels.lang.numerics import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return False
    return bool(INTERPRETED.value)


@cache
def converts_float8(device: torch.device) -> bool:
    """The GPU has instructions for e4m3; other GPUs and the interpreter take the integer form."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
