"""The kernel that casts a query to e4m3, saturating, from strided rows to dense rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn.kernels.lang.numerics import divide, encode_e4m3, to_float32
from builders.launch.call import KernelCall
from builders.launch.launcher import launch

TILE = 1024


@triton.jit(do_not_specialize=["scale"])
def quantize_rows_kernel(
    x_ptr,
    out_ptr,
    scale,
    token_stride: tl.int64,
    head_stride: tl.int64,
    WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):
    """Cast ``[T, H, D]`` to uint8 patterns of e4m3; a program has a tile of one token's heads.

    The grid is ``(T, cdiv(H * D, TILE))``.
    """
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = col < WIDTH
    row = x_ptr + token * token_stride
    x = tl.load(row + col // HEAD_SIZE * head_stride + col % HEAD_SIZE, mask=mask, other=0.0)
    code = encode_e4m3(divide(to_float32(x), scale), HARDWARE_E4M3)
    tl.store(out_ptr + token * WIDTH + col, code, mask=mask)


def quantize_rows(
    rows: torch.Tensor, scale: float, out: torch.Tensor, *, hardware_e4m3: bool
) -> None:
    """Write ``rows / scale`` in e4m3, in one launch; the twin in torch is
    ``attn.reference.quant.saturate``.

    Args:
        rows: ``[T, H, D]``, fp16, bf16 or fp32, last dimension contiguous.
        scale: real = stored * scale.
        out: ``[T, H, D]`` e4m3, contiguous, written.
        hardware_e4m3: whether the GPU has instructions for e4m3.

    Raises:
        ValueError: tensors that do not fit together.
    """
    if out.shape != rows.shape or out.dtype != torch.float8_e4m3fn or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous float8_e4m3fn of shape {[*rows.shape]}, got {out.dtype} of "
            f"{[*out.shape]} in strides {out.stride()}"
        )
    tokens, heads, head_size = rows.shape
    if rows.stride(-1) != 1:
        raise ValueError(f"rows must be dense in their last axis, got strides {rows.stride()}")
    if tokens == 0:
        return
    width = heads * head_size
    arguments = {
        "x_ptr": rows,
        "out_ptr": out.view(torch.uint8),
        "scale": scale,
        "token_stride": rows.stride(0),
        "head_stride": rows.stride(1),
        "WIDTH": width,
        "HEAD_SIZE": head_size,
        "TILE": TILE,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    launch(KernelCall(quantize_rows_kernel, (tokens, triton.cdiv(width, TILE)), arguments))
