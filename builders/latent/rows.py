"""Query rows of latent decodes: which of them attend nothing, and how they fill a dense block."""

from __future__ import annotations

import torch


def leading(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of a tensor.

    A tensor that has no more is returned as it is, which costs the host less than a view of it.
    """
    return rows if rows.shape[0] == count else rows[:count]


def flag_keyless(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Mark the query rows that no request owns, and the rows of requests without keys.

    Nothing is read back from the device.

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


def pad_rows(query_start_loc: torch.Tensor, query_len: int, out: torch.Tensor) -> torch.Tensor:
    """Write the token of each row of a dense ``[R, query_len]`` block, -1 for rows without one.

    A request's tokens stand at the end of its rows. A kernel's causal mask lets a request's last
    row see the request's last key, so no token sees past its position.

    Args:
        query_start_loc: ``[R + 1]`` int32, device.
        query_len: most tokens of a request.
        out: ``[R * query_len]`` int32, device, written.

    Returns:
        ``out``.
    """
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    places = torch.arange(query_len, dtype=torch.int32, device=out.device)
    tokens = ends[:, None] - query_len + places
    block = out.view(len(starts), query_len)
    block.copy_(torch.where(tokens >= starts[:, None], tokens, -1))
    return out


def unpad_rows(query_start_loc: torch.Tensor, query_len: int, out: torch.Tensor) -> torch.Tensor:
    """Write the row of each token in the block of :func:`pad_rows`, -1 for tokens without request.

    Args:
        query_start_loc: ``[R + 1]`` int32, device.
        query_len: most tokens of a request.
        out: ``[T]`` int32, device, written.

    Returns:
        ``out``.
    """
    ends = query_start_loc[1:].contiguous()
    places = torch.arange(len(out), dtype=torch.int32, device=out.device)
    req = torch.searchsorted(ends, places, right=True)
    known = req.clamp(max=len(ends) - 1)
    rows = (known + 1) * query_len - (ends[known] - places)
    return out.copy_(torch.where(req < len(ends), rows, -1))
