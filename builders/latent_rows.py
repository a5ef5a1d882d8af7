"""Rows of latent decodes that have nothing to attend: padding, and requests without keys."""

from __future__ import annotations

import torch


def flag_keyless(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Which query rows no request owns, or one without keys; nothing is read back.

    Args:
        query_start_loc: ``[R + 1]`` int32, device.
        seq_lens: ``[R]`` int32, device.
        out: ``[T]`` bool, device, written.

    Returns:
        ``out``.
    """
    if len(seq_lens) == 0:
        return out.fill_(True)
    ends = query_start_loc[1:].contiguous()
    places = torch.arange(len(out), dtype=torch.int32, device=out.device)
    rows = torch.searchsorted(ends, places, right=True)
    keyless = seq_lens[rows.clamp(max=len(seq_lens) - 1)] <= 0
    return torch.logical_or(rows >= len(seq_lens), keyless, out=out)
