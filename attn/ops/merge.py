"""Merging attention states over disjoint keys: by a kernel on a GPU, by the reference elsewhere."""

from __future__ import annotations

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import merge as reference
from attn.reference.quant import saturate


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    output: torch.Tensor,
    *,
    output_lse: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    num_tokens: int | None = None,
) -> None:
    """Merge N states of every row into ``output``: zero and ``-inf`` where all N are empty.

    Args:
        outs: ``[N, T, H, Dv]``, last dimension contiguous; an empty state may hold anything, even
            NaN.
        lses: ``[N, T, H]`` fp32 natural log-sum-exps, ``-inf`` where a state is empty.
        output: ``[>= num_tokens, H, Dv]``, last dimension contiguous; float8_e4m3fn, saturated,
            with ``output_scale``.
        output_lse: ``[>= num_tokens, H]`` fp32 to receive the merged log-sum-exp, or None.
        output_scale: fp32 scalar; ``output`` then holds result / scale.
        num_tokens: rows to merge; rows past them stay unchanged. None means T.

    Raises:
        ValueError: tensors that do not fit together.
    """
    count = outs.shape[1] if num_tokens is None else num_tokens
    _check(outs, lses, output, output_lse, output_scale, count)
    if not has_kernel(outs):
        parts = outs[:, :count].double() if outs.dtype == torch.float64 else outs[:, :count].float()
        states = list(zip(parts, lses[:, :count], strict=True))
        merged, lse = reference.merge_states(states)
        if output_scale is not None:
            merged = saturate(merged / output_scale.reshape(()), output.dtype)
        output[:count] = merged.to(output.dtype)
        if output_lse is not None:
            output_lse[:count] = lse.float()
        return
    from attn.kernels.cache.merge import merge_launch

    merge_launch(
        outs,
        lses,
        output,
        output_lse=output_lse,
        output_scale=output_scale,
        num_tokens=count,
        hardware_e4m3=converts_float8(outs.device),
    ).launch()


def _check(
    outs: torch.Tensor,
    lses: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    count: int,
) -> None:
    if outs.dim() != 4 or outs.shape[0] == 0:
        raise ValueError(f"outs must be [N, T, H, Dv] with N > 0, got shape {list(outs.shape)}")
    _, tokens, heads, size = outs.shape
    allowed = {torch.float32, outs.dtype} if outs.dtype == torch.float64 else {torch.float32}
    if lses.shape != outs.shape[:3] or lses.dtype not in allowed:
        raise ValueError(
            f"lses must be {list(outs.shape[:3])} float32 like outs, got {_named(lses)}"
        )
    if not 0 <= count <= min(tokens, output.shape[0]):
        raise ValueError(
            f"num_tokens must be at most the rows of outs ({tokens}) and of output "
            f"({output.shape[0]}), got {count}"
        )
    if output.shape[1:] != (heads, size):
        raise ValueError(f"output must be [T, {heads}, {size}] like outs, got {_named(output)}")
    for name, rows in (("outs", outs), ("output", output)):
        if rows.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {rows.stride()}"
            )
    if output_lse is not None:
        fits = output_lse.dim() == 2 and output_lse.shape[0] >= count
        if not fits or output_lse.shape[1] != heads or output_lse.dtype != torch.float32:
            raise ValueError(
                f"output_lse must be [>= {count}, {heads}] float32, got {_named(output_lse)}"
            )
    _check_scale(output, output_scale)


def _check_scale(output: torch.Tensor, output_scale: torch.Tensor | None) -> None:
    if (output.dtype == torch.float8_e4m3fn) != (output_scale is not None):
        given = "without" if output_scale is None else "with"
        raise ValueError(
            f"output must be float8_e4m3fn with an output_scale and only then, got {output.dtype} "
            f"{given} output_scale"
        )
    if output_scale is not None and (
        output_scale.dtype != torch.float32 or output_scale.numel() != 1
    ):
        raise ValueError(f"output_scale must be one float32 element, got {_named(output_scale)}")


def _named(x: torch.Tensor) -> str:
    return f"shape {list(x.shape)} of {x.dtype}"
