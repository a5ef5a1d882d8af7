"""A latent layer, the tensors of one decode, and what launches depend on in a cache's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specs.dtypes import CacheDType


@dataclass(frozen=True)
class LatentLayer:
    """The constants of one latent layer."""

    num_heads: int
    rank: int
    rope_size: int
    scale: float
    cache_dtype: CacheDType
    sliding_window: int | None = None
    """Keys that a token sees, itself included; None: it sees itself and all keys before it."""


class StoredRows:
    """What launches depend on in the rows of a latent cache.

    It keeps no tensor alive, and is right for all tensors at the same addresses.
    """

    def __init__(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """
        Args:
            latent: ``[N, P, L]``, the latent part of the cache's rows.
            rope: ``[N, P, r]``, the rotary part.
        """
        self.described: dict[int, tuple[Any, Any]] = {}
        """Two TMA descriptors of whole rows, by the tokens of their boxes."""
        self.variant = (
            latent.dtype,
            latent.is_cuda,
            latent.shape[1:],
            rope.dtype,
            rope.is_cuda,
            rope.shape[1:],
            latent.stride(),
            rope.stride(),
            (latent.data_ptr() | rope.data_ptr()) % 64,
        )
        """The part of the variant key that stands for the rows.

        It holds the alignment of their addresses, but no address and no number of pages."""


@dataclass(slots=True)
class LatentTensors:
    """The tensors of one decode: T query tokens, H heads, rank L, rotary size r."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed; contiguous in its last dimension, like every tensor here."""
    rotary: torch.Tensor
    """``[T, H, r]``, the rotated part of the query; it may be part of another tensor."""
    latent: torch.Tensor
    """``[N, P, L]``: the latent part of the cache's rows."""
    rope: torch.Tensor
    """``[N, P, r]``: the rotary part of the cache's rows, in the strides of ``latent``."""
    output: torch.Tensor
    """``[T, H, L]``, in the query's type; rows that no request owns are cleared, see
    ``num_covered``."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, natural logarithm, -inf for rows that no request owns; None: it is not
    written."""
    k_scale: torch.Tensor
    """fp32 scalar by which elements of an fp8 cache are multiplied."""
    num_covered: int | None = None
    """The leading tokens that requests own; None where nothing behind them needs to be cleared."""
    rows: StoredRows | None = None
    """What an earlier launch made of ``latent`` and ``rope``; the launcher sets it if None."""
