"""Sparse latent attention, by kernels on a GPU, by the reference elsewhere."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import sparse_mla as reference
from builders.device import device_facts
from builders.sparse.arguments import ListedRows
from builders.sparse.launches import SparseLaunch, workspace_for
from builders.sparse.tiles import SparseShape, SparseTile, sparse_tile
from specs.rows import LatentFormat

if TYPE_CHECKING:
    from attn.kernels.sparse.launcher import SparseLauncher
    from attn.kernels.sparse.layer import SparseTensors


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


def launch_with(tile: SparseTile, query: torch.Tensor, indices: torch.Tensor) -> SparseLaunch:
    """A launch of these rows with a tile and scratch of its own, for callers without a builder.

    Args:
        tile: how heads and lists are cut.
        query: ``[T, H, L]``.
        indices: ``[T, topk]``.
    """
    rows, topk = indices.shape
    heads, rank = query.shape[1:]
    workspace = workspace_for(tile, rows, heads, topk, rank, query.device)
    return SparseLaunch(tile, tile, rows, workspace)


def sparse_mla(
    query: torch.Tensor,
    rotary: torch.Tensor,
    listed: ListedRows,
    scale: float,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    launch: SparseLaunch | None = None,
) -> None:
    """Attention of each query row over the cache rows that it lists; a duplicate counts twice.

    The function needs no metadata; an impl passes its builder's launch.

    Args:
        query: ``[T, H, L]``, absorbed.
        rotary: ``[T, H, r]``.
        listed: the cache, and the list of each query row.
        scale: multiplies q.k; positive.
        output: ``[T, H, L]`` in the query's type, written; zero for a row that lists nothing.
        lse: ``[T, H]`` fp32, natural log, written; -inf for a row that lists nothing.
        sinks: ``[H]`` logits added to the softmax denominator and to the LSE.
        launch: tiles and scratch, from a builder or from :func:`launch_with`; None takes the tile
            of :func:`tile_for` and allocates scratch.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: sizes that no kernel takes.
    """
    if not has_kernel(query):
        out, found = reference.sparse_mla(query, rotary, listed, scale, sinks)
        output.copy_(out)
        if lse is not None:
            lse.copy_(found)
        return
    from attn.kernels.sparse.layer import SparseTensors

    kv_cache, layout, indices, topk_lens, k_scale = listed
    launch = launch or launch_with(tile_for(query, indices, layout), query, indices)
    _, heads, rank = query.shape
    launcher = sparse_launcher(heads, scale, layout, rank, rotary.shape[2], query.device)
    given = query, rotary, kv_cache, indices, topk_lens, output, lse, k_scale, sinks
    attend_listed(launcher, launch, SparseTensors(*given))


def attend_listed(launcher: SparseLauncher, launch: SparseLaunch, tensors: SparseTensors) -> None:
    """Enqueue the launches of :func:`sparse_mla` by a launcher that a layer keeps.

    Args:
        launcher: of the layer's constants.
        launch: tiles and scratch.
        tensors: the tensors of the rows, without scratch.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: sizes that no kernel takes.
    """
    tile, workspace = launch.tile, launch.workspace
    if tile.hopper is not None and not launcher.is_aligned(tensors):
        tile = launch.twin
    tensors.states, tensors.sums = workspace.states, workspace.sums
    tensors.counters = workspace.counters
    most, count = launch.rows, tensors.indices.shape[0]
    if count <= most:
        launcher.attend(tile, tensors)
        return
    for first in range(0, count, most):
        launcher.attend(tile, tensors.part(slice(first, first + most)))


@lru_cache(maxsize=256)
def sparse_launcher(
    heads: int,
    scale: float,
    layout: LatentFormat,
    rank: int,
    rope_size: int,
    device: torch.device,
) -> SparseLauncher:
    """The launcher of all layers with these constants."""
    from attn.kernels.sparse.launcher import SparseLauncher
    from attn.kernels.sparse.layer import SparseLayer

    layer = SparseLayer(heads, scale, layout, rank, rope_size)
    return SparseLauncher(layer, hardware_e4m3=converts_float8(device))
