"""The launcher of sparse latent attention: it makes launches of a layer, a tile and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.lang.stored import E4M3, NATIVE
from attn.kernels.sparse.attend import fold_states_kernel, sparse_mla_kernel
from attn.kernels.sparse.attend_many import sparse_mla_many_kernel
from attn.kernels.sparse.layer import (
    LaunchForm,
    SparseLayer,
    SparseTensors,
    field_pointers,
    row_of,
)
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.launch.variants import Variants
from builders.sparse.tiles import SparseTile
from specs.base import cdiv
from specs.rows import LatentFormat, RowFormat

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MOST_REACH = 1 << 31
"""Elements from the first to the last head of a token that 32 bits can count."""
_ALIGNMENT = 16
"""Bytes of the widest load of a thread."""


_NOTHING = (0, 0)
_Made: TypeAlias = tuple[tuple[int, int], tuple[tuple[LaunchForm, Launcher], ...]]
"""What is made once for a variant."""


class SparseLauncher:
    """The launches of sparse layers with the same constants.

    A launcher for each compiled variant is made once and kept. A later forward of the same variant
    only hands over addresses and sizes.
    """

    def __init__(self, layer: SparseLayer, *, hardware_e4m3: bool) -> None:
        """
        Args:
            layer: the constants of the layers.
            hardware_e4m3: the GPU has instructions that convert e4m3.
        """
        self.layer, self._hardware_e4m3 = layer, hardware_e4m3
        self._variants: Variants[_Made] = Variants()

    def attend(self, tile: SparseTile, tensors: SparseTensors) -> None:
        """Enqueue the launches of :func:`attn.ops.sparse_mla.sparse_mla`.

        There is one launch, or two where several programs share a list: the second folds their
        states.

        Args:
            tile: how heads and lists are cut.
            tensors: the tensors of the launches.

        Raises:
            ValueError: the tensors do not fit together, or the Hopper kernel does not serve them.
            NotImplementedError: the rank or the rotary size is none that a tile holds.
        """
        for launch in self._launches(tile, tensors):
            launch.launch()

    def calls(self, tile: SparseTile, tensors: SparseTensors) -> tuple[KernelCall, ...]:
        """The launches as data: nothing is enqueued. Arguments and errors are :meth:`attend`'s."""
        return tuple(launch.call for launch in self._launches(tile, tensors))

    def _launches(self, tile: SparseTile, tensors: SparseTensors) -> Iterator[Launch]:
        rows = tensors.indices.shape[0]
        variant = self._variant(tile, tensors)
        needed, made = self._variants.of(variant, lambda: self._new_launchers(tile, tensors))
        if not _fits(tile, tensors, rows, needed):
            _check(self.layer, tile, tensors)
        for form, launcher in made:
            yield launcher.bind(form.grid(rows), form.varying(tensors))

    def _variant(self, tile: SparseTile, tensors: SparseTensors) -> tuple[Any, ...]:
        """The variant key: everything that a compiled variant depends on.

        Left out are the number of query tokens, and the strides of queries, which differ from batch
        to batch, since an engine's absorbed part lies head by head.
        """
        query, rotary, cache = tensors.query, tensors.rotary, tensors.kv_cache
        output, lse, indices = tensors.output, tensors.lse, tensors.indices
        lens, k_scale, sinks = tensors.topk_lens, tensors.k_scale, tensors.sinks
        return (
            tile,
            query.dtype,
            query.device,
            query.shape[1:],
            query.stride()[2:],
            rotary.dtype,
            rotary.shape[1:],
            rotary.stride()[2:],
            cache.dtype,
            cache.shape[1:],
            cache.stride(),
            # If there is one page only, its stride says nothing.
            cache.shape[0] == 1,
            cache.data_ptr() % 16,
            indices.dtype,
            indices.shape[1],
            indices.stride()[1:],
            None if lens is None else (lens.dtype, lens.stride()),
            output.dtype,
            output.shape[1:],
            output.stride(),
            None if lse is None else (lse.dtype, lse.shape[1:], lse.stride()),
            None if k_scale is None else k_scale.numel(),
            None if sinks is None else sinks.shape,
            tensors.states is None,
            tensors.counters is None,
        )

    def _new_launchers(self, tile: SparseTile, tensors: SparseTensors) -> _Made:
        """The scratch that one query token needs, and the launches with their launchers."""
        made = []
        for form in self._forms(tile, tensors):
            names = [*form.varying(tensors)]
            made.append((form, Launcher(form.kernel, form.constants, names, options=form.options)))
        topk = tensors.indices.shape[1]
        return tile.state_floats(1, self.layer.num_heads, topk, self.layer.rank), tuple(made)

    def _forms(self, tile: SparseTile, tensors: SparseTensors) -> tuple[LaunchForm, ...]:
        """The launches of a variant; the tensors are checked."""
        layer = self.layer
        _check(layer, tile, tensors)
        topk = tensors.indices.shape[1]
        programs = tile.programs(topk)
        waits = tile.hastens and programs > 1 and not INTERPRETED
        places = _distances(tensors.kv_cache, row_of(layer, tensors.query.dtype))
        if tile.hopper is None:
            first = _portable_form(layer, tile, tensors, places, waits, self._hardware_e4m3)
        else:
            # Gluon is imported only where it is used.
            from attn.kernels.sparse.hopper_launch import hopper_sparse_form

            first = hopper_sparse_form(layer, tile, tensors, places)
        if programs == 1:
            return (first,)
        heads, width = min(tile.finish_rows, tile.rows), min(tile.finish_width, layer.rank)
        own = {"FINISH_ROWS": heads, "FINISH_WIDTH": width, "WAITS": waits}
        tiles = tile.head_tiles(layer.num_heads)
        return first, LaunchForm(
            fold_states_kernel,
            _shared_constants(layer, tile, tensors) | own,
            partial(_shared_pointers, layer),
            lambda rows: (rows * tiles, tile.rows // heads, layer.rank // width),
            LaunchOptions(num_warps=2, waits=waits),
        )


def sparse_calls(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, *, hardware_e4m3: bool
) -> tuple[KernelCall, ...]:
    """The launches of :meth:`SparseLauncher.attend` as data, by a launcher of their own."""
    return SparseLauncher(layer, hardware_e4m3=hardware_e4m3).calls(tile, tensors)


def _shared_pointers(layer: SparseLayer, tensors: SparseTensors) -> dict[str, Any]:
    """Varying arguments that the portable kernels and the kernel that folds their states share."""
    has_factor = layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE
    return {
        "factor_ptr": tensors.k_scale if has_factor else None,
        "sinks_ptr": tensors.sinks,
        "lens_ptr": tensors.topk_lens,
        "out_ptr": tensors.output,
        "lse_ptr": tensors.lse,
        "states_ptr": tensors.states,
        "sums_ptr": tensors.sums,
    }


def _shared_constants(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors
) -> dict[str, Any]:
    """Constants that the portable kernels and the kernel that folds their states share."""
    topk = tensors.indices.shape[1]
    return {
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


def _portable_form(
    layer: SparseLayer,
    tile: SparseTile,
    tensors: SparseTensors,
    places: Mapping[str, Any],
    waits: bool,
    hardware_e4m3: bool,
) -> LaunchForm:
    """The launch of the portable kernel that attends."""
    topk, row = tensors.indices.shape[1], row_of(layer, tensors.query.dtype)
    constants: dict[str, Any] = {
        **_shared_constants(layer, tile, tensors),
        **places,
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
        constants["WHOLE_STEPS"] = topk % tile.kv_tile == 0
        constants["ROW_BYTES"] = row.nbytes
    else:
        constants["SPAN"] = tile.span
        constants["FOLDS"] = tile.folds
        constants["CARRIES_IDS"] = tile.carries_ids
        constants["HOLDS_NEXT"] = tile.holds_next
    tiles, programs = tile.head_tiles(layer.num_heads), tile.programs(topk)
    return LaunchForm(
        kernel,
        constants,
        partial(_portable_varying, layer, row),
        lambda rows: (rows * tiles, programs),
        LaunchOptions(
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
        ),
    )


def _portable_varying(layer: SparseLayer, row: RowFormat, tensors: SparseTensors) -> dict[str, Any]:
    query, rotary = tensors.query, tensors.rotary
    return {
        **_shared_pointers(layer, tensors),
        "query_ptr": query,
        "rotary_ptr": rotary,
        "ids_ptr": tensors.indices,
        **(tensors.fields or field_pointers(tensors.kv_cache, row)),
        "ids_row": tensors.indices.stride(0),
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "rotary_token": rotary.stride(0),
        "rotary_head": rotary.stride(1),
    }


def _compute_type(dtype: torch.dtype) -> Any:
    """The type of products: the query's; fp32 for bf16 in the interpreter, which gets it wrong."""
    return tl.float32 if INTERPRETED.value and dtype == torch.bfloat16 else _TYPES[dtype]


def _distances(kv_cache: torch.Tensor, row: RowFormat) -> dict[str, Any]:
    """Distances of a cache's rows, in units that loads of their fields are aligned to."""
    size, (blocks, block_size) = kv_cache.element_size(), kv_cache.shape[:2]
    block, stride = (kv_cache.stride(dim) * size for dim in (0, 1))
    unit = math.gcd(_ALIGNMENT, block if blocks > 1 else 0, stride)
    # If all rows are equally far apart, a kernel need not divide by the block's size.
    is_flat = blocks == 1 or block == block_size * stride
    scale = row.get("scale")
    return {
        "BLOCK_UNITS": 0 if is_flat else block // unit,
        "ROW_UNITS": stride // unit,
        "BLOCK_SIZE": 1 if is_flat else block_size,
        "LATENT_UNIT": unit // row["nope"].dtype.itemsize,
        "ROPE_UNIT": unit // row["rope"].dtype.itemsize,
        "SCALE_UNIT": 1 if scale is None else unit // scale.dtype.itemsize,
    }


def _fits(tile: SparseTile, tensors: SparseTensors, rows: int, needed: tuple[int, int]) -> bool:
    """Whether what the variant key leaves out fits together, as :func:`_check` asks for it.

    ``needed`` are the fp32 elements of scratch for one query token, or for any number of them where
    programs share lists.
    """
    query, rotary, lse, lens = tensors.query, tensors.rotary, tensors.lse, tensors.topk_lens
    tokens = query.shape[0]
    lists = tokens if tile.tokens == 1 else cdiv(tokens, tile.tokens)
    if not (
        lists == rows
        and tokens == rotary.shape[0] == tensors.output.shape[0]
        and (lse is None or lse.shape[0] == tokens)
        and (lens is None or lens.shape[0] == rows)
        and query.shape[1] * query.stride()[1] < MOST_REACH
        and rotary.shape[1] * rotary.stride()[1] < MOST_REACH
    ):
        return False
    if needed != _NOTHING:
        count = 1 if tile.shares else rows
        for scratch, each in zip((tensors.states, tensors.sums), needed, strict=True):
            if scratch is None or scratch.numel() < count * each:
                return False
    shares = tile.shares
    return not shares or (
        tensors.counters is not None and tensors.counters.numel() >= tile.counters
    )


def _check(layer: SparseLayer, tile: SparseTile, tensors: SparseTensors) -> None:
    """Refuse tensors that do not fit together; never waits for the device."""
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
