"""The launch of sparse latent attention by the kernel for Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attn.kernels.hopper.sparse import hopper_sparse_kernel
from attn.kernels.launch import KernelCall, alignment
from builders.hopper_sparse import hopper_misfit
from builders.sparse_tiles import SparseShape, SparseTile
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.rows import LatentFormat

if TYPE_CHECKING:
    from attn.kernels.sparse_launch import SparseLayer, SparseTensors

ALIGNMENT = 16
"""Bytes that a thread copies at a time."""


def is_aligned(*tensors: torch.Tensor) -> bool:
    """Rows lie where the kernel's threads can copy them from."""
    return all(alignment(tensor) >= ALIGNMENT for tensor in tensors)


def hopper_sparse_call(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, addresses: Mapping[str, Any]
) -> KernelCall:
    """The launch in the place of the plain kernel's, with the same results and states.

    Args:
        layer: what never changes.
        tile: with what the kernel for Hopper is asked for.
        tensors: that fit together.
        addresses: of the cache's rows, as the plain kernel takes them.

    Raises:
        ValueError: the kernel does not serve them.
    """
    asked = tile.hopper
    assert asked is not None
    _check(layer, tensors)
    query, rotary, output = tensors.query, tensors.rotary, tensors.output
    rows, topk = tensors.indices.shape
    head_tiles, parts = tile.head_tiles(layer.num_heads), tile.segments(topk)
    total = rows * head_tiles * parts
    programs = total
    if asked.programs_per_sm is not None:
        programs = min(total, asked.programs_per_sm * _multiprocessors(tensors))
    is_scaled = layer.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    row = layer.layout.row(layer.rank, layer.rope_size, DType.parse(query.dtype))
    # What a flag says is not used is some pointer of its type.
    arguments = {
        "query_ptr": query,
        "rotary_ptr": rotary,
        "latent_ptr": addresses["latent_ptr"],
        "sinks_ptr": output if tensors.sinks is None else tensors.sinks,
        "ids_ptr": tensors.indices,
        "lens_ptr": tensors.indices if tensors.topk_lens is None else tensors.topk_lens,
        "out_ptr": output,
        "lse_ptr": output if tensors.lse is None else tensors.lse,
        "states_ptr": output if parts == 1 else tensors.states,
        "sums_ptr": output if parts == 1 else tensors.sums,
        "ids_row": tensors.indices.stride(0),
        "topk": topk,
        "total": total,
        "scale": layer.scale,
        "HEADS": layer.num_heads,
        "HEAD_TILES": head_tiles,
        "SEGMENT": tile.segment,
        "PARTS": parts,
        "BLOCK_SIZE": addresses["BLOCK_SIZE"],
        "BLOCK_UNITS": addresses["block"],
        "ROW_UNITS": addresses["stride"],
        "ROPE_AT": row["rope"].offset,
        "SCALES_AT": row["scale"].offset if is_scaled else 0,
        "ROW_BYTES": row.nbytes,
        "QUERY_TOKEN": query.stride(0),
        "QUERY_HEAD": query.stride(1),
        "ROTARY_TOKEN": rotary.stride(0),
        "ROTARY_HEAD": rotary.stride(1),
        "OUT_TOKEN": output.stride(0),
        "OUT_HEAD": output.stride(1),
        "LSE_TOKEN": 0 if tensors.lse is None else tensors.lse.stride(0),
        "HAS_LENS": tensors.topk_lens is not None,
        "SCALED": is_scaled,
        "EARLY": asked.early,
        "PREFETCH": asked.prefetch,
        "SINKS": tensors.sinks is not None,
        "LSE": tensors.lse is not None,
        "SECOND": asked.second_registers,
        "PRODUCER": asked.producer_registers,
    }
    return KernelCall(hopper_sparse_kernel, (programs,), arguments, num_warps=4)


def _multiprocessors(tensors: SparseTensors) -> int:
    from builders.triton_attn import device_facts

    return device_facts(tensors.query.device)[1]


def _check(layer: SparseLayer, tensors: SparseTensors) -> None:
    """The kernel serves the tensors."""
    query, topk = tensors.query, tensors.indices.shape[1]
    dtype = DType.parse(query.dtype)
    shape = SparseShape(
        layer.num_heads, topk, layer.layout, query.element_size(), layer.rank, layer.rope_size
    )
    misfit = hopper_misfit(shape, DeviceKind.SM90, dtype)
    if misfit is not None:
        raise ValueError(f"the sparse kernel for Hopper does not serve this layer: {misfit}")
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
