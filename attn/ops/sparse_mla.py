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
    """The launch record for these rows on their device, for callers without a builder: chosen by
    what a builder chooses by, :func:`builders.sparse.tiles.sparse_tile`.

    Args:
        query: ``[T, H, L]``.
        indices: ``[T, topk]``.
        layout: of the cache.
        batch_invariant: a row's bits depend on the row alone with any number of heads.
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
    """Each query row attends the cache's rows that it lists; one listed twice counts twice.

    An entry of its own, without metadata; an impl passes its builder's tile and workspace.

    Args:
        query: ``[T, H, L]``, absorbed.
        rotary: ``[T, H, r]``.
        kv_cache: ``[N, P, row]`` of the layout; compact rows are one block ``[1, S, row]``.
        indices: ``[T, topk]`` int32, ``block * P + offset``; -1 for none, anywhere.
        topk_lens: ``[T]`` int32: entries of each list that count, others are not looked at; None
            for all.
        layout: of the cache's rows.
        scale: multiplies q.k; positive.
        output: ``[T, H, L]`` in the query's type, written; zero for a row that lists nothing.
        lse: ``[T, H]`` fp32, natural log, written; -inf for such a row.
        k_scale: fp32 scalar of ``FP8_NOPE_FP8_ROPE`` rows: real = stored * scale.
        sinks: ``[H]`` logits that only the denominator has; the LSE has them too.
        tile: of a builder's launch, or from :func:`tile_for` to measure others without a builder;
            None makes it.
        twin: the plain kernel's, in place of a tile of the one for Hopper that cannot copy these
            tensors' rows.
        workspace: of a builder's launch; None allocates it where the tile splits rows.

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

    tile = tile or tile_for(query, indices, layout)
    if tile.hopper is not None and twin is not None:
        # Gluon only where it is used.
        from attn.kernels.sparse.hopper_launch import is_aligned
        from builders.launch.launcher import launch

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
