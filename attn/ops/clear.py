"""Attention states of rows without keys: zero, and a log-sum-exp of -inf."""

from __future__ import annotations

import torch

from attn.ops.dispatch import has_kernel


def clear_rows(out: torch.Tensor, lse: torch.Tensor, flags: torch.Tensor) -> None:
    """Make rows neutral; one launch, which leaves all others alone.

    Args:
        out: ``[T, H, D]``, dense, written.
        lse: ``[T, H]`` fp32, dense, written.
        flags: ``[<= T]`` bool: which; rows beyond are left alone.
    """
    if len(flags) == 0:
        return
    if not has_kernel(out):
        out[: len(flags)].masked_fill_(flags[:, None, None], 0)
        lse[: len(flags)].masked_fill_(flags[:, None], float("-inf"))
        return
    from attn.kernels.clear import clear_call

    clear_call(out, lse, flags).launch()
