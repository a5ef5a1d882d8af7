"""The launch of the Hopper kernels of sparse latent attention: wide (many heads), narrow (few)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn.kernels.lang.memory import alignment
from attn.kernels.sparse.hopper_narrow.consumer import NATIVE, RAW, SCALED
from attn.kernels.sparse.hopper_narrow.kernel import hopper_narrow_sparse_kernel
from attn.kernels.sparse.hopper_wide.kernel import hopper_sparse_kernel
from attn.kernels.sparse.layer import SparseLayer, SparseTensors
from builders.launch.call import KernelCall
from builders.sparse.hopper_tiles import hopper_misfit
from builders.sparse.tiles import HopperSparseTile, NarrowSparseTile, SparseShape, SparseTile
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import LatentFormat, RowFormat

_KINDS = {
    LatentFormat.BF16: NATIVE.value,
    LatentFormat.FP8_NOPE_FP8_ROPE: RAW.value,
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: SCALED.value,
}
ALIGNMENT = 16
"""Bytes that a thread copies at a time."""


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Rows start at multiples of the bytes that a thread of the Hopper kernels copies at a time."""
    return all(alignment(tensor) >= ALIGNMENT for tensor in tensors)


def hopper_sparse_call(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, addresses: Mapping[str, Any]
) -> KernelCall:
    """The launch of the Hopper kernel, which replaces the portable kernel's.

    It gives the same results, and the same states for the kernel that folds them.

    Args:
        layer: the constants of the layer.
        tile: how heads and lists are cut; ``tile.hopper`` selects the wide or the narrow kernel.
        tensors: the tensors of the launch, which were checked to fit together.
        addresses: pointers and distances of the cache's rows, as the portable kernel takes them.

    Raises:
        ValueError: the Hopper kernel does not serve the layer or the tensors.
    """
    asked = tile.hopper
    assert asked is not None
    _check(layer, tensors)
    shared = _shared(layer, tile, tensors, addresses)
    if isinstance(asked, NarrowSparseTile):
        return _narrow_call(layer, tile, asked, tensors, shared)
    return _wide_call(layer, tile, asked, tensors, addresses, shared)


def _shared(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, addresses: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of both Hopper kernels; a pointer that a flag says is unused may be any tensor."""
    query, rotary, output = tensors.query, tensors.rotary, tensors.output
    topk = tensors.indices.shape[1]
    parts = tile.segments(topk)
    return {
        "query_ptr": query,
        "rotary_ptr": rotary,
        "sinks_ptr": output if tensors.sinks is None else tensors.sinks,
        "ids_ptr": tensors.indices,
        "lens_ptr": tensors.indices if tensors.topk_lens is None else tensors.topk_lens,
        "out_ptr": output,
        "lse_ptr": output if tensors.lse is None else tensors.lse,
        "states_ptr": output if parts == 1 else tensors.states,
        "sums_ptr": output if parts == 1 else tensors.sums,
        "ids_row": tensors.indices.stride(0),
        "topk": topk,
        "scale": layer.scale,
        **_distances("query", query),
        **_distances("rotary", rotary),
        "HEADS": layer.num_heads,
        "HEAD_TILES": tile.head_tiles(layer.num_heads),
        "SEGMENT": tile.segment,
        "PARTS": parts,
        "BLOCK_SIZE": addresses["BLOCK_SIZE"],
        "BLOCK_UNITS": addresses["BLOCK_UNITS"],
        "ROW_UNITS": addresses["ROW_UNITS"],
        "OUT_TOKEN": output.stride(0),
        "OUT_HEAD": output.stride(1),
        "LSE_TOKEN": 0 if tensors.lse is None else tensors.lse.stride(0),
        "HAS_LENS": tensors.topk_lens is not None,
        "SINKS": tensors.sinks is not None,
        "LSE": tensors.lse is not None,
    }


def _distances(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """Strides of queries per token and per head, in units of 16 bytes.

    They are not compile-time constants: an engine's absorbed queries lie head by head, so the
    stride of heads depends on the number of tokens in the batch.
    """
    units = ALIGNMENT // tensor.element_size()
    return {f"{name}_token": tensor.stride(0) // units, f"{name}_head": tensor.stride(1) // units}


def _work(layer: SparseLayer, tile: SparseTile, tensors: SparseTensors) -> int:
    """Number of pieces of work: one for each list, tile of heads and part of a list."""
    rows, topk = tensors.indices.shape
    return rows * tile.head_tiles(layer.num_heads) * tile.segments(topk)


def _narrow_call(
    layer: SparseLayer,
    tile: SparseTile,
    asked: NarrowSparseTile,
    tensors: SparseTensors,
    shared: Mapping[str, Any],
) -> KernelCall:
    row = _row(layer, tensors)
    arguments = {
        **shared,
        "latent_ptr": latent_views(tensors.kv_cache, row)["nope"].view(torch.int32),
        "factor_ptr": shared["lse_ptr"] if tensors.k_scale is None else tensors.k_scale,
        "KIND": _KINDS[layer.layout],
        "TILE": tile.kv_tile,
        "STAGES": tile.num_stages,
        "SECOND": asked.second_registers,
        "PRODUCER": asked.producer_registers,
    }
    grid = (_work(layer, tile, tensors),)
    return KernelCall(hopper_narrow_sparse_kernel, grid, arguments, num_warps=4, waits=True)


def _wide_call(
    layer: SparseLayer,
    tile: SparseTile,
    asked: HopperSparseTile,
    tensors: SparseTensors,
    addresses: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> KernelCall:
    if layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE:
        raise ValueError(
            f"the Hopper sparse kernel for many heads does not serve this layer: rows of "
            f"{layer.layout.value} are read by the kernel for few heads, or the portable kernel"
        )
    programs = pieces = _work(layer, tile, tensors)
    if tile.shares:
        programs = tile.shares
    elif asked.programs_per_sm is not None:
        programs = min(pieces, asked.programs_per_sm * _multiprocessors(tensors))
    is_scaled = layer.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    row = _row(layer, tensors)
    arguments = {
        **shared,
        "latent_ptr": addresses["latent_ptr"],
        **_places_to_meet(tile, tensors),
        "tokens": len(tensors.query),
        "TOKENS": tile.tokens,
        "ROPE_AT": row["rope"].offset,
        "SCALES_AT": row["scale"].offset if is_scaled else 0,
        "SCALED": is_scaled,
        "KEYS": tile.kv_tile // 2,
        "BALANCED": tile.shares > 0,
        "EARLY": asked.early,
        "SECOND": asked.second_registers,
        "PRODUCER": asked.producer_registers,
    }
    return KernelCall(hopper_sparse_kernel, (programs,), arguments, num_warps=4)


def _places_to_meet(tile: SparseTile, tensors: SparseTensors) -> dict[str, Any]:
    """Scratch for lists of which two programs have a part each; any pointers where none has."""
    if not tile.shares:
        return {"counters_ptr": tensors.indices}
    return {
        "states_ptr": tensors.states,
        "sums_ptr": tensors.sums,
        "counters_ptr": tensors.counters,
    }


def _row(layer: SparseLayer, tensors: SparseTensors) -> RowFormat:
    return layer.layout.row(layer.rank, layer.rope_size, DType.parse(tensors.query.dtype))


def _multiprocessors(tensors: SparseTensors) -> int:
    from builders.device import device_facts

    return device_facts(tensors.query.device).num_multiprocessors


def _check(layer: SparseLayer, tensors: SparseTensors) -> None:
    """Check that the Hopper kernels serve the layer and the tensors.

    Raises:
        ValueError: they do not.
    """
    query, topk = tensors.query, tensors.indices.shape[1]
    dtype = DType.parse(query.dtype)
    shape = SparseShape(
        layer.num_heads, topk, layer.layout, query.element_size(), layer.rank, layer.rope_size
    )
    misfit = hopper_misfit(shape, DeviceKind.SM90, dtype)
    if misfit is not None:
        raise ValueError(f"the Hopper sparse kernel does not serve this layer: {misfit}")
    for name, tensor in {
        "query": query,
        "rotary": tensors.rotary,
        "kv_cache": tensors.kv_cache,
    }.items():
        found = alignment(tensor)
        if found < ALIGNMENT:
            raise ValueError(
                f"{name} must have rows at multiples of {ALIGNMENT} bytes for the sparse kernel "
                f"for Hopper, got {found}"
            )
