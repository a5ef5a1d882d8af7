"""Sparse latent (MLA) attention over listed rows of a cache, in plain torch."""

from __future__ import annotations

import torch

from attn.reference.cache import latent_values
from attn.reference.latent_convert import gather_fields
from attn.reference.mla import attend_topk
from builders.sparse.arguments import ListedRows
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import LatentFormat


def read_listed(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    layout: LatentFormat,
    rank: int,
    rope_size: int,
    k_scale: torch.Tensor | None,
    model_dtype: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Real latent rows ``[S, L + r]`` of ``[S]`` slots, in ``dtype``.

    Args:
        kv_cache: ``[N, P, row]`` of the layout.
        slots: ``block * P + offset``.
        layout: row format of the cache.
        rank: L.
        rope_size: r.
        k_scale: fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows.
        model_dtype: element type of ``BF16`` rows.
        dtype: float32 or float64.
    """
    row = layout.row(rank, rope_size, DType.parse(model_dtype))
    fields = gather_fields(latent_views(kv_cache, row), slots)
    one = torch.ones((), device=kv_cache.device)
    return latent_values(fields, one if k_scale is None else k_scale, row, dtype)


def sparse_mla(
    query: torch.Tensor,
    rotary: torch.Tensor,
    listed: ListedRows,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of each query row over the cache rows that it lists.

    The arguments are those of :func:`attn.ops.sparse_mla.sparse_mla`.

    Returns:
        ``[T, H, L]`` and LSE ``[T, H]``, in float32, or float64 for a float64 query; zero and -inf
        for a row that lists nothing.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rank, rope_size = query.shape[-1], rotary.shape[-1]
    kv_cache, layout, indices, topk_lens, k_scale = listed
    if topk_lens is not None:
        columns = torch.arange(indices.shape[1], device=indices.device)
        indices = torch.where(columns < topk_lens[:, None], indices, -1)

    def read(slots: torch.Tensor) -> torch.Tensor:
        return read_listed(kv_cache, slots, layout, rank, rope_size, k_scale, query.dtype, dtype)

    whole = torch.cat([query, rotary], -1).to(dtype)
    return attend_topk(whole, indices, read, rank, scale, sinks)
