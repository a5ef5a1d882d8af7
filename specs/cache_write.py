"""The tensors of a cache write, in groups: new rows, what rotates them, and where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from specs.dtypes import CacheDType
from specs.layouts import KVViews
from specs.rows import LatentFormat

if TYPE_CHECKING:
    import torch


class Rotation(NamedTuple):
    """How rotary position embedding (RoPE) turns the rows of a step."""

    positions: torch.Tensor
    """``[T]`` int32 or int64; a row whose position is outside the table is padding and stays."""
    cos_sin_cache: torch.Tensor
    """``[max_position, rotary_dim]``: ``rotary_dim / 2`` cosines, then sines."""
    is_neox: bool
    """The pair of element i is i + rotary_dim / 2 (True) or its neighbour (False)."""


class CacheTarget(NamedTuple):
    """Where new keys and values of a step are written, and how they are stored there."""

    views: KVViews
    """K and V of the cache."""
    slot_mapping: torch.Tensor
    """``[<= T]`` int64, ``block * P + offset``; a row with a negative slot is not written."""
    k_scale: torch.Tensor
    """fp32 scalar or ``[Hk]`` on the device; read for a per-tensor fp8 cache only."""
    v_scale: torch.Tensor
    """fp32 scalar or ``[Hk]`` on the device; read for a per-tensor fp8 cache only."""
    cache_dtype: CacheDType
    """How the cache is quantised."""


class UnrotatedLatents(NamedTuple):
    """Absorbed queries and new latent rows of T tokens, whose rotary parts are not rotated yet.

    All four have the model's type, and dense rows in any strides.
    """

    q_nope: torch.Tensor
    """``[T, H, L]``, absorbed queries."""
    q_pe: torch.Tensor
    """``[T, H, r]``, rotary parts of the queries."""
    kv_c: torch.Tensor
    """``[T, L]``, latents."""
    k_pe: torch.Tensor
    """``[T, r]``, rotary keys."""


class RowsAtSlots(NamedTuple):
    """Latent rows in one format, at slots of a cache, which a conversion reads or writes."""

    fields: dict[str, torch.Tensor]
    """Views ``[N, P, count]`` of the rows' fields, by name: ``nope``, ``rope`` and ``scale``."""
    format: LatentFormat
    """Format of the rows."""
    slots: torch.Tensor | None = None
    """``[S]`` int32 or int64: slot of row i, -1 for none; None where row i is at slot i."""
