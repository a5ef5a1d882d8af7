"""The launch of the Hopper kernel for the indexer's logits."""

from __future__ import annotations

import torch
import triton

from attn.kernels.sparse.indexer.hopper_logits import hopper_paged_logits_kernel
from builders.device import device_facts
from builders.launch.call import KernelCall
from builders.sparse.arguments import IndexerKeys, RequestPages
from builders.sparse.hopper_tiles import FEWEST_INDEX_ROWS, index_pages
from builders.sparse.tiles import IndexTile
from specs.base import cdiv
from specs.rows import INDEXER_PAGE


def hopper_paged_logits_call(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: IndexerKeys,
    pages: RequestPages,
    kv_lens: torch.Tensor,
    logits: torch.Tensor,
    tile: IndexTile,
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
        tile: how the launch cuts its work.
        most: the most keys that a query token has.
    """
    rows, heads, _ = query.shape
    q, words = query.view(torch.int32), keys.data.view(torch.int32)
    blocks = cdiv(most, INDEXER_PAGE)
    pages_per_program = index_pages(
        tile, device_facts(query.device).num_multiprocessors, rows, blocks
    )
    arguments = {
        "q_ptr": q,
        "weights_ptr": weights,
        "data_ptr": words,
        "scale_ptr": keys.scale,
        "table_ptr": pages.block_table,
        "requests_ptr": pages.requests,
        "lens_ptr": kv_lens,
        "logits_ptr": logits,
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "weights_token": weights.stride(0),
        "data_block": words.stride(0),
        "scale_block": keys.scale.stride(0),
        "table_row": pages.block_table.stride(0),
        "logits_row": logits.stride(0),
        "most": most,
        "NUM_HEADS": heads,
        "HEADS": max(triton.next_power_of_2(heads), FEWEST_INDEX_ROWS),
        "PAGES": pages_per_program,
    }
    grid = (cdiv(blocks, pages_per_program), rows)
    return KernelCall(hopper_paged_logits_kernel, grid, arguments, num_warps=4)
