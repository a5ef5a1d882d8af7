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
    Strides,
    row_of,
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
_VARYING = (
    *("query_ptr", "rotary_ptr", "query_token", "query_head", "rotary_token", "rotary_head"),
    *("sinks_ptr", "ids_ptr", "ids_row", "lens_ptr", "out_ptr", "lse_ptr", "states_ptr"),
    "sums_ptr",
)
"""Arguments that every launch of either kernel is given."""


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


def _values(stores: bool, tensors: SparseTensors, strides: Strides) -> tuple[Any, ...]:
    """Values of ``_VARYING``; a pointer that a flag says is unused may be any.

    Strides of queries per token and per head are in units of 16 bytes. They are not compile-time
    constants: an engine's absorbed queries lie head by head, so the stride of heads depends on the
    number of tokens in the batch.

    Args:
        stores: the kernel stores states.
        tensors: the tensors of the launch.
        strides: of the queries.
    """
    query, output, indices = tensors.query, tensors.output, tensors.indices
    sinks, lens, lse = tensors.sinks, tensors.topk_lens, tensors.lse
    units = ALIGNMENT // query.element_size()
    query_token, query_head, rotary_token, rotary_head = strides
    return (
        query,
        tensors.rotary,
        query_token // units,
        query_head // units,
        rotary_token // units,
        rotary_head // units,
        output if sinks is None else sinks,
        indices,
        indices.stride()[0],
        indices if lens is None else lens,
        output,
        output if lse is None else lse,
        tensors.states if stores else output,
        tensors.sums if stores else output,
    )


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

    def values(tensors: SparseTensors, strides: Strides) -> tuple[Any, ...]:
        rows, k_scale, lse = tensors.rows, tensors.k_scale, tensors.lse
        assert rows is not None
        unused = tensors.output if lse is None else lse
        return (
            *_values(parts > 1, tensors, strides),
            # Rows begin with their latents.
            rows.words(torch.int32),
            unused if k_scale is None else k_scale,
        )

    return LaunchForm(
        hopper_narrow_sparse_kernel,
        {**constants, **own},
        (*_VARYING, "latent_ptr", "factor_ptr"),
        values,
        lambda rows: (rows * pieces,),
        LaunchOptions(num_warps=4, waits=True, few_registers=True),
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

    # Scratch for lists of which two programs have a part each; any pointers where none has.
    shares = tile.shares > 0

    def values(given: SparseTensors, strides: Strides) -> tuple[Any, ...]:
        rows = given.rows
        assert rows is not None
        return (
            *_values(shares or parts > 1, given, strides),
            rows.words(element),
            given.query.shape[0],
            given.counters if shares else given.indices,
        )

    return LaunchForm(
        hopper_sparse_kernel,
        {**constants, **own},
        (*_VARYING, "latent_ptr", "tokens", "counters_ptr"),
        values,
        grid,
        LaunchOptions(num_warps=4, waits=True),
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
