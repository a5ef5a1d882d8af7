"""The launches of the Hopper kernels for the indexer's logits."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn.kernels.sparse.hopper_launch import ALIGNMENT
from attn.kernels.sparse.indexer.hopper_logits import hopper_paged_logits_kernel
from attn.kernels.sparse.indexer.hopper_ragged import hopper_ragged_logits_kernel
from builders.device import device_facts
from builders.launch.call import KernelCall
from builders.sparse.arguments import IndexerKeys, RequestPages
from builders.sparse.hopper_tiles import FEWEST_INDEX_ROWS, INDEX_KEYS, index_programs, index_tokens
from builders.sparse.tiles import IndexTile
from specs.base import cdiv

_KEY_BOX = 64


def hopper_paged_logits_call(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexerKeys,
    pages: RequestPages,
    kv_lens: torch.Tensor,
    logits: torch.Tensor,
    most: int,
) -> KernelCall:
    """The launch of the Hopper kernel, which replaces the portable one for tensors that it serves.

    Args:
        query: ``[T, Hi, 128]`` e4m3.
        weights: ``[T, Hi]`` fp32.
        keys: uint8 patterns ``[N, 64, 128]`` of the keys, and their scales ``[N, 64, 1]``.
        pages: the pages of each query token's request.
        kv_lens: ``[T]`` int32, the keys that each query token scores.
        logits: ``[T, M]`` fp32, written.
        most: the most keys that a query token has.
    """
    rows, heads, _ = query.shape
    q = query.view(torch.uint8)
    arguments = {
        "q_ptr": q,
        "weights_ptr": weights,
        "data_ptr": keys.data,
        "scale_ptr": keys.scale,
        "table_ptr": pages.block_table,
        "requests_ptr": pages.requests,
        "lens_ptr": kv_lens,
        "logits_ptr": logits,
        "q_token": _stride(q, 0),
        "q_head": _stride(q, 1),
        "weights_token": weights.stride(0),
        "data_block": _stride(keys.data, 0),
        "scale_block": keys.scale.stride(0),
        "table_row": pages.block_table.stride(0),
        "logits_row": logits.stride(0),
        "most": most,
        "rows": rows,
        "NUM_HEADS": heads,
        "HEADS": max(triton.next_power_of_2(heads), FEWEST_INDEX_ROWS),
    }
    programs = index_programs(device_facts(query.device).num_multiprocessors, rows)
    return KernelCall(hopper_paged_logits_kernel, (programs,), arguments, num_warps=4)


def hopper_ragged_logits_call(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexerKeys,
    starts: torch.Tensor,
    ends: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile,
) -> KernelCall:
    """The launch of the Hopper kernel, which replaces the portable one for tensors that it serves.

    Args:
        query: ``[T, Hi, 128]`` e4m3.
        weights: ``[T, Hi]`` fp32.
        keys: data ``[S, 128]`` e4m3 and scale ``[S]`` fp32 of the gathered keys.
        starts: ``[T]`` int32, first key that each query token sees.
        ends: ``[T]`` int32, one past the last.
        logits: ``[T, M]`` fp32, written.
        tile: how the launch cuts its work.
    """
    rows, heads, width = query.shape
    padded = max(triton.next_power_of_2(heads), FEWEST_INDEX_ROWS)
    # Most keys that a token sees.
    most = min(logits.shape[1], len(keys.data))
    tokens = index_tokens(tile, device_facts(query.device).num_multiprocessors, rows, most)
    arguments = {
        "q_desc": _described(query.view(torch.uint8), (1, padded, width), width),
        "weights_desc": _described(weights, (1, padded), 0),
        "data_desc": _described(keys.data.view(torch.uint8), (_KEY_BOX, width), width),
        "scale_ptr": keys.scale,
        "starts_ptr": starts,
        "ends_ptr": ends,
        "logits_ptr": logits,
        "num_rows": rows,
        "num_keys": len(keys.data),
        "tokens": tokens,
        "logits_row": logits.stride(0),
        "HEADS": padded,
        "STAGES": tile.hopper_stages,
        "AT_ONCE": tile.hopper_at_once,
    }
    grid = (cdiv(most, INDEX_KEYS), cdiv(rows, tokens))
    return KernelCall(hopper_ragged_logits_kernel, grid, arguments, num_warps=4)


def _stride(x: torch.Tensor, dim: int) -> int:
    """The stride of a dimension: 0 where it has one entry, whose stride may be any number.

    Strides that are no multiples of 16 bytes would leave no copy of 16 bytes.
    """
    return x.stride(dim) if x.shape[dim] > 1 else 0


def _described(rows: torch.Tensor, box: tuple[int, ...], swizzle: int) -> TensorDescriptor:
    """Describe rows for TMA, which fills the parts of a box outside the tensor with zeros."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * rows.element_size(), len(box))
    # A dimension of one element may have any stride, but TMA takes multiples of 16 bytes only.
    outer = zip(rows.stride()[:-1], rows.shape, strict=False)
    strides = [stride if count > 1 else ALIGNMENT for stride, count in outer]
    return TensorDescriptor(rows, [*rows.shape], [*strides, 1], [*box], layout)
