"""The launches of sparse latent attention, made of a layer, its cache and its queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.lang.stored import E4M3, NATIVE
from attn.kernels.sparse.attend import fold_states_kernel, sparse_mla_kernel
from attn.kernels.sparse.attend_many import sparse_mla_many_kernel
from attn.kernels.sparse.layer import SparseLayer, SparseTensors
from builders.launch.call import KernelCall
from builders.sparse.tiles import SparseTile
from specs.base import cdiv
from specs.dtypes import DType
from specs.layouts import latent_views
from specs.rows import LatentFormat

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_ALIGNMENT = 16
"""Bytes of the widest load of a thread."""


def sparse_calls(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, *, hardware_e4m3: bool
) -> tuple[KernelCall, ...]:
    """The launches of :func:`attn.ops.sparse_mla.sparse_mla`.

    There is one launch, or two where several programs share a list: the second folds their states.

    Args:
        layer: the constants of the layer.
        tile: how heads and lists are cut.
        tensors: the tensors of the launch.
        hardware_e4m3: the GPU has instructions that convert e4m3.

    Raises:
        ValueError: the tensors do not fit together, or the Hopper kernel does not serve them.
        NotImplementedError: the rank or the rotary size is none that a tile holds.
    """
    _check(layer, tile, tensors)
    rows, topk = tensors.indices.shape
    fields = latent_views(tensors.kv_cache, row_of(layer, tensors.query.dtype))
    addresses = _addresses(tensors.kv_cache, fields)
    programs = tile.programs(topk)
    waits = tile.hastens and programs > 1 and not INTERPRETED
    shared = _shared(layer, tile, tensors)
    if tile.hopper is None:
        first = _plain_call(layer, tile, tensors, addresses, shared, waits, hardware_e4m3)
    else:
        # Gluon is imported only where it is used.
        from attn.kernels.sparse.hopper_launch import hopper_sparse_call

        first = hopper_sparse_call(layer, tile, tensors, addresses)
    if programs == 1:
        return (first,)
    finish = (min(tile.finish_rows, tile.rows), min(tile.finish_width, layer.rank))
    shared |= {"FINISH_ROWS": finish[0], "FINISH_WIDTH": finish[1], "WAITS": waits}
    grid = (rows * shared["HEAD_TILES"], tile.rows // finish[0], layer.rank // finish[1])
    return first, KernelCall(fold_states_kernel, grid, shared, num_warps=2, waits=waits)


def _shared(layer: SparseLayer, tile: SparseTile, tensors: SparseTensors) -> dict[str, Any]:
    """Arguments that the portable kernels and the kernel that folds their states share."""
    topk = tensors.indices.shape[1]
    has_factor = layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE
    return {
        "factor_ptr": tensors.k_scale if has_factor else None,
        "sinks_ptr": tensors.sinks,
        "lens_ptr": tensors.topk_lens,
        "out_ptr": tensors.output,
        "lse_ptr": tensors.lse,
        "states_ptr": tensors.states,
        "sums_ptr": tensors.sums,
        "out_token": tensors.output.stride(0),
        "out_head": tensors.output.stride(1),
        "lse_token": 0 if tensors.lse is None else tensors.lse.stride(0),
        "topk": topk,
        "NUM_HEADS": layer.num_heads,
        "HEAD_TILES": tile.head_tiles(layer.num_heads),
        "ROWS": tile.rows,
        "SEGMENT": tile.segment,
        "SEGMENTS": tile.segments(topk),
        "WIDTH": layer.rank,
        "SINKS": tensors.sinks is not None,
        "LSE": tensors.lse is not None,
    }


def _plain_call(
    layer: SparseLayer,
    tile: SparseTile,
    tensors: SparseTensors,
    addresses: Mapping[str, Any],
    shared: Mapping[str, Any],
    waits: bool,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch of the portable kernel that attends."""
    rows, topk = tensors.indices.shape
    attend: dict[str, Any] = {
        **shared,
        "query_ptr": tensors.query,
        "rotary_ptr": tensors.rotary,
        "ids_ptr": tensors.indices,
        "ids_row": tensors.indices.stride(0),
        **addresses,
        **{
            f"{name}_{axis}": rows_of.stride(dim)
            for name, rows_of in (("query", tensors.query), ("rotary", tensors.rotary))
            for dim, axis in enumerate(("token", "head"))
        },
        "scale": layer.scale,
        "KV_TILE": tile.kv_tile,
        "ROPE": layer.rope_size,
        "KIND": NATIVE if layer.layout is LatentFormat.BF16 else E4M3,
        "SCALED": layer.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE,
        "COMPUTE": _compute_type(tensors.query.dtype),
        "HARDWARE_E4M3": hardware_e4m3,
        "STAGES": tile.num_stages,
        "HASTENS": waits,
    }
    kernel: Any = sparse_mla_kernel
    if tile.many:
        kernel = sparse_mla_many_kernel
        attend["WHOLE_STEPS"] = topk % tile.kv_tile == 0
        attend["ROW_BYTES"] = row_of(layer, tensors.query.dtype).nbytes
    else:
        attend["SPAN"] = tile.span
        attend["FOLDS"] = tile.folds
        attend["CARRIES_IDS"] = tile.carries_ids
        attend["HOLDS_NEXT"] = tile.holds_next
    grid = (rows * shared["HEAD_TILES"], tile.programs(topk))
    return KernelCall(
        kernel,
        grid,
        attend,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        max_registers=tile.max_registers,
    )


def _compute_type(dtype: torch.dtype) -> Any:
    """The type of products: the query's; fp32 for bf16 in the interpreter, which gets it wrong."""
    return tl.float32 if INTERPRETED.value and dtype == torch.bfloat16 else _TYPES[dtype]


def row_of(layer: SparseLayer, dtype: torch.dtype) -> Any:
    """The row format of the layer's cache, for a query of ``dtype``."""
    return layer.layout.row(layer.rank, layer.rope_size, DType.parse(dtype))


def _addresses(kv_cache: torch.Tensor, fields: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Pointers to the fields of rows, and distances of rows in units that loads are aligned to."""
    size, (blocks, block_size) = kv_cache.element_size(), kv_cache.shape[:2]
    block, stride = (kv_cache.stride(dim) * size for dim in (0, 1))
    unit = math.gcd(_ALIGNMENT, block if blocks > 1 else 0, stride)
    # If all rows are equally far apart, a kernel need not divide by the block's size.
    is_flat = blocks == 1 or block == block_size * stride
    scales = fields.get("scale")
    return {
        "latent_ptr": _words(fields["nope"]),
        "rope_ptr": _words(fields["rope"]),
        "scales_ptr": scales,
        "BLOCK_UNITS": 0 if is_flat else block // unit,
        "ROW_UNITS": stride // unit,
        "BLOCK_SIZE": 1 if is_flat else block_size,
        "LATENT_UNIT": unit // fields["nope"].element_size(),
        "ROPE_UNIT": unit // fields["rope"].element_size(),
        "SCALE_UNIT": 1 if scales is None else unit // scales.element_size(),
    }


def _words(field: torch.Tensor) -> torch.Tensor:
    """The field; e4m3 as its bytes, which every GPU can load."""
    return field.view(torch.uint8) if field.dtype == torch.float8_e4m3fn else field


def _check(layer: SparseLayer, tile: SparseTile, tensors: SparseTensors) -> None:
    """Refuse tensors that do not fit together; run once per call, never waits for the device."""
    query, heads = tensors.query, layer.num_heads
    lists, topk = tensors.indices.shape
    # Joint lists are fewer than the tokens; the last of them may be of fewer tokens.
    rows = lists if tile.tokens == 1 or cdiv(len(query), tile.tokens) != lists else len(query)
    wanted = {
        "query": (query, layer.rank),
        "rotary": (tensors.rotary, layer.rope_size),
        "output": (tensors.output, layer.rank),
    }
    for name, (tensor, width) in wanted.items():
        if tuple(tensor.shape) != (rows, heads, width) or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be [{rows}, {heads}, {width}] for indices of {rows} rows, contiguous "
                f"in its last dimension, got {list(tensor.shape)} with strides {tensor.stride()}"
            )
        check_reach(name, tensor)
    if query.dtype not in _TYPES or not query.dtype == tensors.rotary.dtype == tensors.output.dtype:
        names = ", ".join(str(dtype) for dtype in _TYPES)
        raise ValueError(
            f"query, rotary and output must have one of {names} in common, got {query.dtype}, "
            f"{tensors.rotary.dtype} and {tensors.output.dtype}"
        )
    for name, size in (("kv_lora_rank", layer.rank), ("qk_rope_head_dim", layer.rope_size)):
        if size < 16 or size != triton.next_power_of_2(size):
            raise NotImplementedError(f"{name} must be a power of two from 16 on, got {size}")
    _check_lists(tensors, lists, topk)
    if not layer.scale > 0:
        raise ValueError(f"scale must be positive, got {layer.scale}")
    if tensors.lse is not None and (
        tensors.lse.dtype != torch.float32 or tuple(tensors.lse.shape) != (rows, heads)
    ):
        raise ValueError(
            f"lse must be float32 [{rows}, {heads}], got {list(tensors.lse.shape)} of "
            f"{tensors.lse.dtype}"
        )
    if layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE and (
        tensors.k_scale is None or tensors.k_scale.numel() != 1
    ):
        found = "none" if tensors.k_scale is None else f"{tensors.k_scale.numel()} elements"
        raise ValueError(f"k_scale must be a scalar for {layer.layout.value} rows, got {found}")
    if tensors.sinks is not None and tuple(tensors.sinks.shape) != (heads,):
        raise ValueError(f"sinks must be [{heads}], got {list(tensors.sinks.shape)}")
    needed = tile.state_floats(rows, heads, topk, layer.rank)
    for name, scratch, count in zip(
        ("states", "sums"), (tensors.states, tensors.sums), needed, strict=True
    ):
        held = 0 if scratch is None else scratch.numel()
        if held < count:
            raise ValueError(f"{name} must hold {count} fp32 elements for this tile, got {held}")
    held = 0 if tensors.counters is None else tensors.counters.numel()
    if held < tile.counters:
        raise ValueError(f"counters must hold {tile.counters} int32 for this tile, got {held}")


def _check_lists(tensors: SparseTensors, rows: int, topk: int) -> None:
    """Refuse lists and lengths of lists of a wrong type or layout."""
    indices, lens = tensors.indices, tensors.topk_lens
    if indices.dtype != torch.int32 or (topk > 1 and indices.stride(-1) != 1):
        raise ValueError(
            f"indices must be int32 and contiguous in the last dimension, got {indices.dtype} with "
            f"strides {indices.stride()}"
        )
    if lens is not None and (
        lens.dtype != torch.int32 or tuple(lens.shape) != (rows,) or not lens.is_contiguous()
    ):
        raise ValueError(
            f"topk_lens must be contiguous int32 [{rows}], got {list(lens.shape)} of {lens.dtype}"
        )
