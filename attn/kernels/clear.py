"""Rows without keys made neutral: zero, and a log-sum-exp of -inf."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn.kernels.launch import KernelCall

_TILE = 1024


@triton.jit(do_not_specialize=["out_row", "lse_row"], do_not_specialize_on_alignment=["flag_ptr"])
def clear_kernel(
    out_ptr,
    lse_ptr,
    flag_ptr,
    out_row,
    lse_row,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows ``[T, WIDTH]`` and ``[T, HEADS]`` whose flag is set; grid ``(T,)``. Others are neither
    read nor written.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flag_ptr + row) != 0:
        column = tl.arange(0, TILE)
        for at in range(0, WIDTH, TILE):
            zero = tl.zeros([TILE], out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * out_row + at + column, zero, mask=at + column < WIDTH)
        head = tl.arange(0, HEAD_WIDTH)
        empty = tl.full([HEAD_WIDTH], float("-inf"), tl.float32)
        tl.store(lse_ptr + row * lse_row + head, empty, mask=head < HEADS)


def clear_call(out: torch.Tensor, lse: torch.Tensor, flags: torch.Tensor) -> KernelCall:
    """The launch that makes flagged rows neutral.

    Args:
        out: ``[T, H, D]``, dense in its last two axes, written.
        lse: ``[T, H]`` fp32, dense in its last axis, written.
        flags: ``[<= T]`` bool.
    """
    width, heads = out.shape[1] * out.shape[2], out.shape[1]
    arguments = {
        "out_ptr": out,
        "lse_ptr": lse,
        "flag_ptr": flags.view(torch.uint8),
        "out_row": out.stride(0),
        "lse_row": lse.stride(0),
        "WIDTH": width,
        "HEADS": heads,
        "HEAD_WIDTH": triton.next_power_of_2(heads),
        "TILE": _TILE,
    }
    return KernelCall(clear_kernel, (len(flags),), arguments, num_warps=4)
