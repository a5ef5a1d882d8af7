"""The kernel that merges attention states of the same queries over different keys.

Each row (one head of one token) is the mean of the states' rows, weighted by the softmax of their
log-sum-exps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from attn.kernels.lang.memory import alignment
from attn.kernels.lang.numerics import divide, encode_e4m3, round_to, to_float32
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher

NUM_WARPS: Final = 4
TILE: Final = 1024
"""Elements of a program, unless a row is longer: 16 bytes of a 16-bit type for each thread."""

_INTEGERS: Final = [
    *("num_rows", "outs_state", "outs_token", "outs_head", "lses_state", "lses_token", "lses_head"),
    *("out_token", "out_head", "lse_token", "lse_head"),
]


@triton.jit(do_not_specialize=_INTEGERS)
def merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    output_scale_ptr,
    num_rows,
    outs_state,
    outs_token,
    outs_head,
    lses_state,
    lses_token,
    lses_head,
    out_token,
    out_head,
    lse_token,
    lse_head,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):
    """Merge STATES states of ``num_rows`` rows (tokens x heads); grid ``(cdiv(num_rows, ROWS),)``.

    Shapes: outs is ``[STATES, T, H, SIZE]``, lses is ``[STATES, T, H]`` fp32. out is
    ``[T, H, SIZE]``, of uint8 with an output scale. lse is ``[T, H]`` fp32 or None. Where only one
    state has keys of a row, the row keeps that state's bits.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = row // HEADS
    head = row % HEADS
    column = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] & (column < SIZE)
    lses = lses_ptr + token * lses_token + head * lses_head
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for state in tl.static_range(STATES):
        lse = tl.load(lses + state * lses_state.to(tl.int64), mask=inside, other=float("-inf"))
        peak = tl.maximum(peak, lse, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    rows = outs_ptr + token * outs_token + head * outs_head
    for state in tl.static_range(STATES):
        lse = tl.load(lses + state * lses_state.to(tl.int64), mask=inside, other=float("-inf"))
        at = (rows + state * outs_state.to(tl.int64))[:, None]
        part = tl.load(tl.multiple_of(at, [OUTS_ALIGN, OUTS_ALIGN]) + column, mask=mask, other=0.0)
        weight = tl.exp(lse - base)
        total += weight
        # An empty state's output may be anything: it is dropped, not multiplied by zero.
        acc += weight[:, None] * tl.where(weight[:, None] > 0, to_float32(part), 0.0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out = divide(acc, total[:, None])
    at = (out_ptr + token * out_token + head * out_head)[:, None]
    target = tl.multiple_of(at, [OUT_ALIGN, OUT_ALIGN]) + column
    if output_scale_ptr is not None:
        scaled = divide(out, tl.zeros([ROWS, WIDTH], tl.float32) + tl.load(output_scale_ptr))
        tl.store(target, encode_e4m3(scaled, HARDWARE_E4M3), mask=mask)
    else:
        tl.store(target, round_to(out, out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        merged = tl.where(empty, float("-inf"), base + tl.log(total))
        tl.store(lse_ptr + token * lse_token + head * lse_head, merged, mask=inside)


def merge_launch(
    outs: torch.Tensor,
    lses: torch.Tensor,
    output: torch.Tensor,
    *,
    output_lse: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    num_tokens: int,
    hardware_e4m3: bool,
) -> Launch:
    """The launch that merges the states of ``num_tokens`` tokens.

    The launcher of its variant prepares it, and is kept.

    Args:
        outs: ``[N, T, H, Dv]``, last dimension contiguous, and so is that of ``output``.
        lses: ``[N, T, H]`` fp32.
        output: ``[T, H, Dv]``; float8_e4m3fn with ``output_scale``.
        output_lse: ``[T, H]`` fp32, or None.
        output_scale: fp32 scalar, or None.
        num_tokens: tokens to merge; rows beyond them are neither read nor written.
        hardware_e4m3: whether the GPU has instructions for e4m3.
    """
    states, _, heads, size = outs.shape
    tensors = outs, lses, output, output_lse, output_scale
    types = tuple(None if one is None else (one.dtype, one.is_cuda) for one in tensors)
    launcher = _launcher(
        (states, heads, size), types, alignment(outs), alignment(output), hardware_e4m3
    )
    num_rows = num_tokens * heads
    outs_state, outs_token, outs_head, _ = outs.stride()
    lses_state, lses_token, lses_head = lses.stride()
    out_token, out_head, _ = output.stride()
    lse_token, lse_head = (0, 0) if output_lse is None else output_lse.stride()
    varying = {
        "outs_ptr": outs,
        "lses_ptr": lses,
        "out_ptr": output if output_scale is None else output.view(torch.uint8),
        "lse_ptr": output_lse,
        "output_scale_ptr": output_scale,
        "outs_state": outs_state,
        "outs_token": outs_token,
        "outs_head": outs_head,
        "lses_state": lses_state,
        "lses_token": lses_token,
        "lses_head": lses_head,
        "out_token": out_token,
        "out_head": out_head,
        "lse_token": lse_token,
        "lse_head": lse_head,
        "num_rows": num_rows,
    }
    return launcher.bind((-(-num_rows // launcher.arguments["ROWS"]),), varying)


def merge_call(
    outs: torch.Tensor, lses: torch.Tensor, output: torch.Tensor, **given: Any
) -> KernelCall:
    """The launch of :func:`merge_launch` as data; the arguments are the same."""
    return merge_launch(outs, lses, output, **given).call


@lru_cache(maxsize=256)
def _launcher(
    sizes: tuple[int, int, int],
    types: tuple[tuple[torch.dtype, bool] | None, ...],
    outs_align: int,
    out_align: int,
    hardware_e4m3: bool,
) -> Launcher:
    """The launcher for N, H and Dv, and for tensors of these types and alignments."""
    states, heads, size = sizes
    width = triton.next_power_of_2(size)
    fixed = {
        "STATES": states,
        "HEADS": heads,
        "SIZE": size,
        "WIDTH": width,
        "ROWS": max(1, TILE // width),
        "OUTS_ALIGN": outs_align,
        "OUT_ALIGN": out_align,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    return Launcher(merge_kernel, fixed, options=LaunchOptions(num_warps=NUM_WARPS), is_typed=True)
