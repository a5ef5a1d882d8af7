"""The launch of the Hopper kernels of sparse latent attention: wide (many heads), narrow (few)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn.kernels.lang.memory import alignment
from attn.kernels.sparse.hopper_narrow.consumer import NATIVE, RAW, SCALED
from attn.kernels.sparse.hopper_narrow.kernel import hopper_narrow_sparse_kernel
from attn.kernels.sparse.hopper_wide.kernel import hopper_sparse_kernel
from attn.kernels.sparse.layer import (
    LaunchForm,
    SparseLayer,
    SparseTensors,
    row_of,
    stored_as,
)
from builders.launch.call import LaunchOptions
from builders.sparse.hopper_tiles import hopper_misfit
from builders.sparse.tiles import HopperSparseTile, NarrowSparseTile, SparseShape, SparseTile
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.rows import LatentFormat

_KINDS = {
    LatentFormat.BF16: NATIVE.value,
    LatentFormat.FP8_NOPE_FP8_ROPE: RAW.value,
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: SCALED.value,
}
ALIGNMENT = 16
"""Bytes that a thread copies at a time."""


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Rows start at multiples of the bytes that a thread of the Hopper kernels copies at a time."""
    places = 0
    for tensor in tensors:
        size = tensor.element_size()
        places |= tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            places |= stride * size
    # The strides of dimensions with one entry do not count, but mostly fit too.
    return places % ALIGNMENT == 0 or all(alignment(tensor) >= ALIGNMENT for tensor in tensors)


def hopper_sparse_form(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, places: Mapping[str, Any]
) -> LaunchForm:
    """The launch of the Hopper kernel, which replaces the portable kernel's.

    It gives the same results, and the same states for the kernel that folds them.

    Args:
        layer: the constants of the layer.
        tile: how heads and lists are cut; ``tile.hopper`` selects the wide or the narrow kernel.
        tensors: the tensors of the launch, which were checked to fit together.
        places: distances of the cache's rows, as the portable kernel takes them.

    Raises:
        ValueError: the Hopper kernel does not serve the layer or the tensors.
    """
    asked = tile.hopper
    assert asked is not None
    _check(layer, tensors)
    constants = _constants(layer, tile, tensors, places)
    parts = tile.segments(tensors.indices.shape[1])
    # Pieces of work of a list: one for each tile of heads and part of the list.
    pieces = tile.head_tiles(layer.num_heads) * parts
    if isinstance(asked, NarrowSparseTile):
        return _narrow_form(layer, tile, asked, constants, pieces, parts)
    return _wide_form(layer, tile, asked, tensors, constants, pieces)


def _constants(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, places: Mapping[str, Any]
) -> dict[str, Any]:
    """Constants of both Hopper kernels."""
    output, topk = tensors.output, tensors.indices.shape[1]
    return {
        "topk": topk,
        "scale": layer.scale,
        "HEADS": layer.num_heads,
        "HEAD_TILES": tile.head_tiles(layer.num_heads),
        "SEGMENT": tile.segment,
        "PARTS": tile.segments(topk),
        "BLOCK_SIZE": places["BLOCK_SIZE"],
        "BLOCK_UNITS": places["BLOCK_UNITS"],
        "ROW_UNITS": places["ROW_UNITS"],
        "OUT_TOKEN": output.stride(0),
        "OUT_HEAD": output.stride(1),
        "LSE_TOKEN": 0 if tensors.lse is None else tensors.lse.stride(0),
        "HAS_LENS": tensors.topk_lens is not None,
        "SINKS": tensors.sinks is not None,
        "LSE": tensors.lse is not None,
    }


def _varying(parts: int, tensors: SparseTensors) -> dict[str, Any]:
    """Varying arguments of both Hopper kernels; a pointer that a flag says is unused may be any.

    Strides of queries per token and per head are in units of 16 bytes. They are not compile-time
    constants: an engine's absorbed queries lie head by head, so the stride of heads depends on the
    number of tokens in the batch.
    """
    query, rotary, output, indices = tensors.query, tensors.rotary, tensors.output, tensors.indices
    units = ALIGNMENT // query.element_size()
    (query_token, query_head, _), (rotary_token, rotary_head, _) = query.stride(), rotary.stride()
    return {
        "query_ptr": query,
        "rotary_ptr": rotary,
        "sinks_ptr": output if tensors.sinks is None else tensors.sinks,
        "ids_ptr": indices,
        "lens_ptr": indices if tensors.topk_lens is None else tensors.topk_lens,
        "out_ptr": output,
        "lse_ptr": output if tensors.lse is None else tensors.lse,
        "states_ptr": output if parts == 1 else tensors.states,
        "sums_ptr": output if parts == 1 else tensors.sums,
        "ids_row": indices.stride()[0],
        "query_token": query_token // units,
        "query_head": query_head // units,
        "rotary_token": rotary_token // units,
        "rotary_head": rotary_head // units,
    }


def _narrow_form(
    layer: SparseLayer,
    tile: SparseTile,
    asked: NarrowSparseTile,
    constants: Mapping[str, Any],
    pieces: int,
    parts: int,
) -> LaunchForm:
    own = {
        "KIND": _KINDS[layer.layout],
        "TILE": tile.kv_tile,
        "STAGES": tile.num_stages,
        "SECOND": asked.second_registers,
        "PRODUCER": asked.producer_registers,
    }

    def varying(tensors: SparseTensors) -> dict[str, Any]:
        found = _varying(parts, tensors)
        # Rows begin with their latents.
        found["latent_ptr"] = stored_as(tensors.kv_cache, torch.int32)
        k_scale = tensors.k_scale
        found["factor_ptr"] = found["lse_ptr"] if k_scale is None else k_scale
        return found

    options = LaunchOptions(num_warps=4, waits=True)
    return LaunchForm(
        hopper_narrow_sparse_kernel,
        {**constants, **own},
        varying,
        lambda rows: (rows * pieces,),
        options,
    )


def _wide_form(
    layer: SparseLayer,
    tile: SparseTile,
    asked: HopperSparseTile,
    tensors: SparseTensors,
    constants: Mapping[str, Any],
    pieces: int,
) -> LaunchForm:
    if layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE:
        raise ValueError(
            f"the Hopper sparse kernel for many heads does not serve this layer: rows of "
            f"{layer.layout.value} are read by the kernel for few heads, or the portable kernel"
        )
    is_scaled = layer.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    row = row_of(layer, tensors.query.dtype)
    element = torch.uint8 if is_scaled else row["nope"].dtype.torch
    own = {
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
    parts = constants["PARTS"]
    most = 0
    if asked.programs_per_sm is not None:
        most = asked.programs_per_sm * _multiprocessors(tensors)

    def grid(rows: int) -> tuple[int, ...]:
        total = rows * pieces
        return (tile.shares or (min(total, most) if most else total),)

    def varying(given: SparseTensors) -> dict[str, Any]:
        found = _varying(parts, given)
        found["latent_ptr"] = stored_as(given.kv_cache, element)
        found["tokens"] = given.query.shape[0]
        # Scratch for lists of which two programs have a part each; any pointers where none has.
        found["counters_ptr"] = given.counters if tile.shares else given.indices
        if tile.shares:
            found["states_ptr"], found["sums_ptr"] = given.states, given.sums
        return found

    return LaunchForm(
        hopper_sparse_kernel, {**constants, **own}, varying, grid, LaunchOptions(num_warps=4)
    )


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
