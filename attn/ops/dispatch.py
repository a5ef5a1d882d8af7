"""The decision whether an operation runs as a kernel or in the reference."""

from __future__ import annotations

from functools import cache

import torch

from builders.device import device_facts


def has_kernel(rows: torch.Tensor) -> bool:
    """True where kernels can take these rows: on a GPU, or interpreted on a CPU; not float64."""
    return rows.dtype != torch.float64 and (rows.is_cuda or (rows.is_cpu and _interprets()))


@cache
def _interprets() -> bool:
    """True where Triton's interpreter is on, which runs kernels on CPU tensors."""
    try:
        from attn.kernels.lang.numerics import INTERPRETED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        return False
    return bool(INTERPRETED.value)


@cache
def converts_float8(device: torch.device) -> bool:
    """True where the GPU has instructions for e4m3; elsewhere kernels convert by integers."""
    return device.type == "cuda" and device_facts(device).converts_float8
