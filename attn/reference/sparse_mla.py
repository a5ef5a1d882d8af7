"""Sparse latent (MLA) attention over listed rows of a cache, in plain torch."""

from __future__ import annotations

import torch

from attn.reference.quant import dequantize_blocks
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
        layout: of the rows.
        rank: L.
        rope_size: r.
        k_scale: fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows.
        model_dtype: what ``BF16`` rows are of.
        dtype: float32 or float64.
    """
    row = layout.row(rank, rope_size, DType.parse(model_dtype))
    block, offset = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    views = latent_views(kv_cache, row)
    fields = {name: view[block, offset] for name, view in views.items()}
    rope = fields["rope"].to(dtype)
    if layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
        return torch.cat([dequantize_blocks(fields["nope"], fields["scale"], dtype), rope], -1)
    rows = torch.cat([fields["nope"].to(dtype), rope], -1)
    if layout is LatentFormat.FP8_NOPE_FP8_ROPE and k_scale is not None:
        rows = rows * k_scale.to(dtype)
    return rows


def sparse_mla(
    query: torch.Tensor,
    rotary: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_lens: torch.Tensor | None,
    layout: LatentFormat,
    scale: float,
    k_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of each query row over the rows that it lists; arguments as in ``attn.ops.sparse_mla``.

    Returns:
        ``[T, H, L]`` and LSE ``[T, H]``, in float32 (float64 of a float64 query); zero and -inf for
        a row that lists nothing.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rank, rope_size = query.shape[-1], rotary.shape[-1]
    whole = torch.cat([query, rotary], -1).to(dtype)
    out = whole.new_zeros((*query.shape[:2], rank))
    lse = whole.new_full(query.shape[:2], float("-inf"))
    for token, listed in enumerate(indices):
        if topk_lens is not None:
            listed = listed[: max(int(topk_lens[token]), 0)]
        slots = listed[listed >= 0].long()
        if len(slots) == 0:
            continue
        rows = read_listed(kv_cache, slots, layout, rank, rope_size, k_scale, query.dtype, dtype)
        scores = whole[token] @ rows.T * scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None]], -1)
        lse[token] = scores.logsumexp(-1)
        weights = (scores - lse[token][:, None]).exp()[:, : len(slots)]
        out[token] = weights @ rows[:, :rank]
    return out, lse
