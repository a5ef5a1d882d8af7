"""Sparse latent attention, by kernels on a GPU, by the reference elsewhere."""

from __future__ import annotations

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import sparse_mla as reference
from builders.device import device_facts
from builders.sparse.launches import SparseWorkspace
from builders.sparse.launches import workspace_for as workspace_for
from builders.sparse.tiles import SparseShape, SparseTile, sparse_tile
from specs.rows import LatentFormat


def tile_for(
    query: torch.Tensor,
    indices: torch.Tensor,
    layout: LatentFormat,
    batch_invariant: bool = False,
) -> SparseTile:
    """The launch record for these rows on their device, for callers without a builder.

    Builders use the same function for the choice: :func:`builders.sparse.tiles.sparse_tile`.

    Args:
        query: ``[T, H, L]``.
        indices: ``[T, topk]``.
        layout: row format of the cache.
        batch_invariant: a row's bits shall depend on the row alone, with any number of heads.
    """
    gpu = device_facts(query.device)
    shape = SparseShape(
        query.shape[1], indices.shape[1], layout, query.element_size(), query.shape[2]
    )
    return sparse_tile(shape, gpu.kind, gpu.num_multiprocessors, len(indices), batch_invariant)


def sparse_mla(
    query: torch.Tensor,
    rotary: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_lens: torch.Tensor | None,
    layout: LatentFormat,
    scale: float,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tile: SparseTile | None = None,
    twin: SparseTile | None = None,
    workspace: SparseWorkspace | None = None,
) -> None:
    """Attention of each query row over the cache rows that it lists; a duplicate counts twice.

    The function needs no metadata; an impl passes its builder's tile and workspace.

    Args:
        query: ``[T, H, L]``, absorbed.
        rotary: ``[T, H, r]``.
        kv_cache: ``[N, P, row]`` of the layout; compact rows are one block ``[1, S, row]``.
        indices: ``[T, topk]`` int32, ``block * P + offset``; -1 for no row, at any place.
        topk_lens: ``[T]`` int32, entries of each list to read; None reads all.
        layout: row format of the cache.
        scale: multiplies q.k; positive.
        output: ``[T, H, L]`` in the query's type, written; zero for a row that lists nothing.
        lse: ``[T, H]`` fp32, natural log, written; -inf for a row that lists nothing.
        k_scale: fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows: real = stored * scale.
        sinks: ``[H]`` logits added to the softmax denominator and to the LSE.
        tile: the launch record from a builder or from :func:`tile_for`; None calls
            :func:`tile_for`.
        twin: the portable kernel's launch record, used where ``tile`` is for the Hopper kernel but
            these tensors' rows are not aligned as its copies need.
        workspace: scratch of a builder's launch; None allocates it where the tile splits rows.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: sizes that no kernel takes.
    """
    if not has_kernel(query):
        out, found = reference.sparse_mla(
            query, rotary, kv_cache, indices, topk_lens, layout, scale, k_scale, sinks
        )
        output.copy_(out)
        if lse is not None:
            lse.copy_(found)
        return
    from attn.kernels.sparse.launcher import sparse_calls
    from attn.kernels.sparse.layer import SparseLayer, SparseTensors
    from builders.launch.launcher import launch

    tile = tile or tile_for(query, indices, layout)
    if tile.hopper is not None and twin is not None:
        # Imported late: the module needs Gluon, which other GPUs can do without.
        from attn.kernels.sparse.hopper_launch import is_aligned

        tile = tile if is_aligned(query, rotary, kv_cache) else twin
    heads, rank = query.shape[1:]
    if workspace is None:
        rows, topk = indices.shape
        workspace = workspace_for(tile, rows, heads, topk, rank, query.device)
    layer = SparseLayer(heads, scale, layout, rank, rotary.shape[-1])
    tensors = SparseTensors(
        query,
        rotary,
        kv_cache,
        indices,
        topk_lens,
        output,
        lse,
        k_scale,
        sinks,
        workspace.states,
        workspace.sums,
        workspace.counters,
    )
    hardware = converts_float8(query.device)
    for call in sparse_calls(layer, tile, tensors, hardware_e4m3=hardware):
        launch(call)
