"""The indexer of sparse attention: quantised keys, logits, causal top-k (DeepSeek-V3.2)."""

from __future__ import annotations

import torch

from attn.reference.cache import gather_rows, scatter_rows
from attn.reference.quant import power_of_two_scale, saturate
from builders.sparse.arguments import RequestPages
from specs.layouts import latent_views
from specs.rows import INDEXER_LEAST, LatentFormat


def write_index_keys(k_index: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise and write indexer keys: e4m3 with one power-of-two scale per token.

    Args:
        k_index: ``[T, Di]``.
        kv_cache: ``[N, 64, Di + 4]`` uint8, planar pages.
        slots: ``[<= T]`` int64, -1 skips.
    """
    views = latent_views(kv_cache, LatentFormat.INDEXER_FP8.row(k_index.shape[-1]))
    k_index = k_index[: len(slots)].float()
    absmax = k_index.abs().amax(-1, keepdim=True).clamp(min=INDEXER_LEAST)
    scale = power_of_two_scale(absmax, torch.float8_e4m3fn)
    scatter_rows(views["data"], slots, saturate(k_index / scale, torch.float8_e4m3fn))
    scatter_rows(views["scale"], slots, scale)


def gather_index_keys(
    kv_cache: torch.Tensor, slots: torch.Tensor, data: torch.Tensor, scale: torch.Tensor
) -> None:
    """Copy cached keys and scales as stored: :func:`attn.ops.indexer.gather_index_keys`."""
    views = latent_views(kv_cache, LatentFormat.INDEXER_FP8.row(data.shape[1]))
    rows = torch.nonzero(slots >= 0).flatten()
    block, offset = slots[rows].long() // kv_cache.shape[1], slots[rows].long() % kv_cache.shape[1]
    # Not every device has indexed writes of e4m3, but all have them of bytes.
    data.view(torch.uint8)[rows] = views["data"].view(torch.uint8)[block, offset]
    scale[rows] = views["scale"][block, offset, 0]


def read_index_keys(
    kv_cache: torch.Tensor, table_row: torch.Tensor, num_keys: int, dtype: torch.dtype
) -> torch.Tensor:
    """Real indexer keys ``[num_keys, Di]`` of one request."""
    head_dim = kv_cache.shape[-1] - 4
    views = latent_views(kv_cache, LatentFormat.INDEXER_FP8.row(head_dim))
    data = gather_rows(views["data"], table_row, 0, num_keys)
    scale = gather_rows(views["scale"], table_row, 0, num_keys)
    return data.to(dtype) * scale.to(dtype)


def index_logits(
    q_index: torch.Tensor, k_index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """``logits[t, s] = sum over heads of weights[t, h] * relu(q_index[t, h] . k_index[s])``.

    Args:
        q_index: ``[T, Hi, Di]``.
        k_index: ``[S, Di]``.
        weights: ``[T, Hi]``.

    Returns:
        ``[T, S]``.
    """
    scores = torch.einsum("thd,sd->ths", q_index, k_index.to(q_index.dtype))
    return torch.einsum("ths,th->ts", scores.relu(), weights.to(scores.dtype))


def causal_topk(logits: torch.Tensor, first_position: int, topk: int) -> torch.Tensor:
    """The ``topk`` visible positions with each query's largest logits, ties to the lower position.

    Args:
        logits: ``[T, S]``.
        first_position: position of the first query; query t sees keys up to
            ``first_position + t``.
        topk: entries per query.

    Returns:
        ``[T, topk]`` int32, largest logit first, filled with -1.
    """
    num_tokens, num_keys = logits.shape
    queries = first_position + torch.arange(num_tokens, device=logits.device)
    keys = torch.arange(num_keys, device=logits.device)
    seen = keys[None, :] <= queries[:, None]
    logits = torch.where(seen, logits, float("-inf"))
    # A stable sort of descending values keeps the lower position first among equals.
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :topk]
    listed = torch.where(torch.gather(seen, 1, order), order, -1).to(torch.int32)
    padding = listed.new_full((num_tokens, max(0, topk - num_keys)), -1)
    return torch.cat([listed, padding], dim=-1)


def paged_index_logits(
    q_index: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor | None,
    kv_lens: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Logits over paged keys: see :func:`attn.ops.indexer.paged_index_logits`."""
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    most = min(logits.shape[1], block_table.shape[1] * kv_cache.shape[1])
    for token, (query, weight) in enumerate(zip(q_index, weights, strict=True)):
        request = token if requests is None else int(requests[token])
        count = min(int(kv_lens[token]), most)
        keys = read_index_keys(kv_cache, block_table[request], count, dtype)
        found = index_logits(query[None].to(dtype), keys, weight[None].to(dtype))
        logits[token, :count] = found[0].to(logits.dtype)


def ragged_index_logits(
    q_index: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """Logits over compact keys: see :func:`attn.ops.indexer.ragged_index_logits`."""
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    for token, (query, weight) in enumerate(zip(q_index, weights, strict=True)):
        first, last = int(starts[token]), min(int(ends[token]), len(data))
        if last <= first:
            continue
        keys = data[first:last].to(dtype) * scale[first:last, None].to(dtype)
        found = index_logits(query[None].to(dtype), keys, weight[None].to(dtype))
        logits[token, : last - first] = found[0].to(logits.dtype)


def select_topk(
    logits: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
    out_lens: torch.Tensor | None,
    pages: RequestPages | None,
    offsets: torch.Tensor | None,
) -> None:
    """Positions of each row's largest logits: see :func:`attn.ops.indexer.select_topk`."""
    topk = out.shape[1]
    out.fill_(-1)
    for token, row in enumerate(logits):
        length = max(int(lens[token]), 0)
        seen = row[:length]
        seen = torch.where(seen.isnan(), torch.full_like(seen, float("-inf")), seen)
        # NaN sorts behind all numbers, -inf included, as in the kernel.
        order = torch.sort(seen, descending=True, stable=True).indices
        order = torch.cat([order[~row[order].isnan()], order[row[order].isnan()]])
        listed = order[:topk].sort().values
        if pages is not None:
            table, requests, block_size = pages
            request = token if requests is None else int(requests[token])
            blocks = table[request, listed // block_size].long()
            listed = blocks * block_size + listed % block_size
        if offsets is not None:
            listed = listed + offsets[token]
        out[token, : len(listed)] = listed.to(out.dtype)
        if out_lens is not None:
            out_lens[token] = len(listed)
