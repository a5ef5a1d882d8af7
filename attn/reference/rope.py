"""Rotary position embedding, the reference of the kernels that fuse it with a cache write."""

from __future__ import annotations

import torch

from specs.cache_write import Rotation


def apply_rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` elements of each head; the rest pass through.

    Args:
        x: ``[T, heads, D]``.
        positions: ``[T]`` integer.
        cos_sin_cache: ``[max_position, rotary_dim]``: ``rotary_dim / 2`` cosines, then sines.
        is_neox: the pair of element i is i + rotary_dim / 2 (True) or its neighbour (False).

    Returns:
        A new tensor of ``x``'s shape and type.
    """
    rotary_dim = cos_sin_cache.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (part[:, None, :].to(dtype) for part in cos_sin_cache[positions].chunk(2, dim=-1))
    rotated, rest = x[..., :rotary_dim].to(dtype), x[..., rotary_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def rotate_in_place(rows: torch.Tensor, rotation: Rotation) -> None:
    """Rotate rows in place with :func:`apply_rope`; rows without a position in the table stay.

    Args:
        rows: ``[T, heads, D]``, any strides; rows past the last position stay unchanged.
        rotation: positions ``[T']`` and the table.
    """
    positions, cos_sin_cache, is_neox = rotation
    rows = rows[: len(positions)]
    positions = positions[: len(rows)]
    inside = (positions >= 0) & (positions < len(cos_sin_cache))
    rotated = apply_rope(rows, positions.where(inside, 0), cos_sin_cache, is_neox)
    rows.copy_(rotated.where(inside[:, None, None], rows))
