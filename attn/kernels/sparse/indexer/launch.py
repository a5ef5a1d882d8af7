"""Launches of the indexer's kernels that write, gather and score keys."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.sparse.indexer.kernels import (
    gather_keys_kernel,
    paged_logits_kernel,
    ragged_logits_kernel,
    write_keys_kernel,
)
from builders.launch.call import KernelCall
from builders.sparse.arguments import IndexerKeys, RequestPages
from builders.sparse.tiles import IndexTile
from specs.base import cdiv
from specs.layouts import latent_views
from specs.rows import INDEXER_PAGE, LatentFormat

_E4M3 = torch.float8_e4m3fn
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_WRITE_ROWS = 4
_GATHER_ROWS = 16


def write_keys_call(
    k_index: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *, hardware_e4m3: bool
) -> KernelCall:
    """The launch of :func:`attn.ops.indexer.write_index_keys`, which explains the arguments."""
    width = k_index.shape[-1]
    data, scale = planes_of(kv_cache, width)
    arguments = {
        "k_ptr": k_index,
        "slots_ptr": slots,
        "data_ptr": data,
        "scale_ptr": scale,
        "num_tokens": len(slots),
        "k_token": k_index.stride(0),
        "data_block": data.stride(0),
        "scale_block": scale.stride(0),
        "BLOCK_SIZE": kv_cache.shape[1],
        "WIDTH": width,
        "ROWS": _WRITE_ROWS,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    return KernelCall(write_keys_kernel, (cdiv(len(slots), _WRITE_ROWS),), arguments, num_warps=4)


def gather_keys_call(
    kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, out_scale: torch.Tensor
) -> KernelCall:
    """The launch of :func:`attn.ops.indexer.gather_index_keys`, which explains the arguments."""
    width = out.shape[1]
    data, scale = planes_of(kv_cache, width)
    arguments = {
        "slots_ptr": slots,
        "data_ptr": data,
        "scale_ptr": scale,
        "out_ptr": out.view(torch.uint8),
        "out_scale_ptr": out_scale,
        "num_rows": len(slots),
        "data_block": data.stride(0),
        "scale_block": scale.stride(0),
        "BLOCK_SIZE": kv_cache.shape[1],
        "WIDTH": width,
        "ROWS": _GATHER_ROWS,
    }
    return KernelCall(gather_keys_kernel, (cdiv(len(slots), _GATHER_ROWS),), arguments, num_warps=4)


def planes_of(kv_cache: torch.Tensor, width: int) -> IndexerKeys:
    """The planes of pages: data ``[N, 64, width]`` as uint8 patterns, and scales ``[N, 64, 1]``."""
    views = latent_views(kv_cache, LatentFormat.INDEXER_FP8.row(width))
    return IndexerKeys(views["data"].view(torch.uint8), views["scale"])


def _query_arguments(
    query: torch.Tensor, weights: torch.Tensor, tile: IndexTile, hardware_e4m3: bool
) -> dict[str, Any]:
    check_reach("q_index", query)
    is_e4m3 = query.dtype == _E4M3
    compute = tl.float16 if is_e4m3 else _TYPES[query.dtype]
    if INTERPRETED.value and query.dtype == torch.bfloat16:
        # Triton's interpreter multiplies bf16 wrongly.
        compute = tl.float32
    return {
        "q_ptr": query.view(torch.uint8) if is_e4m3 else query,
        "weights_ptr": weights,
        "q_token": query.stride(0),
        "q_head": query.stride(1),
        "weights_token": weights.stride(0),
        "NUM_HEADS": query.shape[1],
        "HEADS": max(triton.next_power_of_2(query.shape[1]), 16),
        "WIDTH": query.shape[2],
        "E4M3": is_e4m3,
        "COMPUTE": compute,
        "FP8": is_e4m3 and tile.fp8_products and hardware_e4m3,
        "HARDWARE_E4M3": hardware_e4m3,
        "STAGES": tile.num_stages,
    }


def paged_logits_call(
    query: torch.Tensor,
    weights: torch.Tensor,
    kv_cache: torch.Tensor,
    pages: RequestPages,
    kv_lens: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch of :func:`attn.ops.indexer.paged_index_logits`, which explains the arguments."""
    keys, table = planes_of(kv_cache, query.shape[2]), pages.block_table
    most = min(logits.shape[1], table.shape[1] * INDEXER_PAGE)
    if tile.takes_hopper:
        # Gluon is imported only where it is used.
        from attn.kernels.sparse.hopper_launch import is_aligned
        from attn.kernels.sparse.indexer.hopper_launch import hopper_paged_logits_call

        if is_aligned(query, keys.data):
            return hopper_paged_logits_call(query, weights, keys, pages, kv_lens, logits, most)
    arguments = _query_arguments(query, weights, tile, hardware_e4m3) | {
        "data_ptr": keys.data,
        "scale_ptr": keys.scale,
        "table_ptr": table,
        "requests_ptr": pages.requests,
        "lens_ptr": kv_lens,
        "logits_ptr": logits,
        "data_block": keys.data.stride(0),
        "scale_block": keys.scale.stride(0),
        "table_row": table.stride(0),
        "logits_row": logits.stride(0),
        "most": most,
        "BLOCK_SIZE": INDEXER_PAGE,
        "PAGES": tile.pages,
        "TILES": tile.steps,
    }
    grid = (cdiv(most, tile.pages * tile.steps * INDEXER_PAGE), len(query))
    return KernelCall(
        paged_logits_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages
    )


def ragged_logits_call(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexerKeys,
    starts: torch.Tensor,
    ends: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch of :func:`attn.ops.indexer.ragged_index_logits`, which explains the arguments."""
    if tile.hopper_rows:
        # Gluon is imported only where it is used.
        from attn.kernels.sparse.hopper_launch import is_aligned
        from attn.kernels.sparse.indexer.hopper_launch import hopper_ragged_logits_call

        is_described = weights.dtype == torch.float32 and is_aligned(query, weights, keys.data)
        if len(keys.data) and is_described:
            return hopper_ragged_logits_call(query, weights, keys, starts, ends, logits, tile)
    arguments = _query_arguments(query, weights, tile, hardware_e4m3) | {
        "data_ptr": keys.data.view(torch.uint8),
        "scale_ptr": keys.scale,
        "starts_ptr": starts,
        "ends_ptr": ends,
        "logits_ptr": logits,
        "num_rows": len(query),
        "num_keys": len(keys.data),
        "data_row": keys.data.stride(0),
        "logits_row": logits.stride(0),
        "TILE": tile.keys,
        "ROWS": tile.rows,
    }
    grid = (cdiv(len(keys.data), tile.keys), cdiv(len(query), tile.rows))
    return KernelCall(
        ragged_logits_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages
    )
