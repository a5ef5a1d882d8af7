"""The launcher of sparse latent attention: it makes launches of a layer, a tile and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    CacheRows,
    LaunchForm,
    SparseLayer,
    SparseTensors,
    Strides,
    row_of,
)
from builders.launch.call import KernelCall, LaunchOptions, collected_calls
from builders.launch.launcher import Launcher
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
_SHARED = ("factor_ptr", "sinks_ptr", "lens_ptr", "out_ptr", "lse_ptr", "states_ptr", "sums_ptr")
"""Arguments that the portable kernels and the kernel that folds their states are given."""
_VARYING = (
    *("query_ptr", "rotary_ptr", "query_token", "query_head", "rotary_token", "rotary_head"),
    *("ids_ptr", "ids_row", "latent_ptr", "rope_ptr", "scales_ptr"),
)
"""More arguments that the portable kernels are given."""
_Made: TypeAlias = tuple[tuple[int, int], tuple[tuple[LaunchForm, Launcher], ...]]
"""What is made once for a variant."""


class SparseLauncher:
    """The launches of sparse layers with the same constants.

    A launcher for each compiled variant is made once and kept. A later forward of the same variant
    only hands over addresses and sizes.
    """

    tensors = SparseTensors
    """The class of :meth:`attend`'s argument.

    An impl imports this module late; with the class here, no forward has to import it again."""

    def __init__(self, layer: SparseLayer, *, hardware_e4m3: bool) -> None:
        """
        Args:
            layer: the constants of the layers.
            hardware_e4m3: the GPU has instructions that convert e4m3.
        """
        self.layer, self._hardware_e4m3 = layer, hardware_e4m3
        self._variants: Variants[_Made] = Variants()
        self._hopper: Any = None

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
        rows = tensors.rows
        if rows is None:
            rows = tensors.rows = CacheRows(tensors.kv_cache)
        try:
            query_token, query_head, query_column = tensors.query.stride()
            rotary_token, rotary_head, rotary_column = tensors.rotary.stride()
            columns = query_column, rotary_column
            variant = _variant(tile, rows.variant, tensors, columns)
        except ValueError:
            _check(self.layer, tile, tensors)
            raise
        needed, made = self._variants.of(variant, self._new_launchers, tile, tensors)
        strides = query_token, query_head, rotary_token, rotary_head
        if not _fits(tile, tensors, needed, self.layer.num_heads * max(query_head, rotary_head)):
            _check(self.layer, tile, tensors)
        lists = tensors.indices.shape[0]
        for form, launcher in made:
            launcher(form.grid(lists), *form.values(tensors, strides))

    def calls(self, tile: SparseTile, tensors: SparseTensors) -> tuple[KernelCall, ...]:
        """The launches as data: nothing is enqueued. Arguments and errors are :meth:`attend`'s."""
        with collected_calls() as calls:
            self.attend(tile, tensors)
        return tuple(calls)

    def is_aligned(self, tensors: SparseTensors) -> bool:
        """Whether the Hopper kernels can read the tensors, whose rows must start at multiples of
        16 bytes.
        """
        if self._hopper is None:
            # Gluon is imported only where it is used.
            from attn.kernels.sparse import hopper_launch

            self._hopper = hopper_launch
        aligned: bool = self._hopper.is_aligned(tensors.query, tensors.rotary, tensors.kv_cache)
        return aligned

    def _new_launchers(self, tile: SparseTile, tensors: SparseTensors) -> _Made:
        """The scratch that one query token needs, and the launches with their launchers."""
        made = tuple(
            (
                form,
                Launcher(
                    form.kernel,
                    form.constants,
                    form.varying,
                    options=form.options,
                    is_typed=True,
                ),
            )
            for form in self._forms(tile, tensors)
        )
        topk = tensors.indices.shape[1]
        return tile.state_floats(1, self.layer.num_heads, topk, self.layer.rank), made

    def _forms(self, tile: SparseTile, tensors: SparseTensors) -> tuple[LaunchForm, ...]:
        """The launches of a variant; the tensors are checked."""
        layer = self.layer
        _check(layer, tile, tensors)
        topk = tensors.indices.shape[1]
        programs = tile.programs(topk)
        places = _distances(tensors.kv_cache, row_of(layer, tensors.query.dtype))
        if tile.hopper is None:
            first = _portable_form(layer, tile, tensors, places, self._hardware_e4m3)
        else:
            # Gluon is imported only where it is used.
            from attn.kernels.sparse.hopper_launch import hopper_sparse_form

            first = hopper_sparse_form(layer, tile, tensors, places)
        if programs == 1:
            return (first,)
        heads, width = min(tile.finish_rows, tile.rows), min(tile.finish_width, layer.rank)
        waits = _starts_early(tile)
        own = {"FINISH_ROWS": heads, "FINISH_WIDTH": width, "WAITS": waits}
        tiles = tile.head_tiles(layer.num_heads)
        return first, LaunchForm(
            fold_states_kernel,
            _shared_constants(layer, tile, tensors) | own,
            _SHARED,
            partial(_shared_values, layer),
            lambda rows: (rows * tiles, tile.rows // heads, layer.rank // width),
            LaunchOptions(num_warps=2, waits=waits),
        )


def sparse_calls(
    layer: SparseLayer, tile: SparseTile, tensors: SparseTensors, *, hardware_e4m3: bool
) -> tuple[KernelCall, ...]:
    """The launches of :meth:`SparseLauncher.attend` as data, by a launcher of their own."""
    return SparseLauncher(layer, hardware_e4m3=hardware_e4m3).calls(tile, tensors)


def _starts_early(tile: SparseTile) -> bool:
    """Whether a tile's kernels may start before the kernels ahead of them end, and so wait."""
    return tile.hastens and not INTERPRETED.value


def _variant(
    tile: SparseTile,
    rows: tuple[Any, ...],
    tensors: SparseTensors,
    columns: tuple[int, int],
) -> tuple[Any, ...]:
    """The variant key: everything that a compiled variant depends on.

    Left out are the number of query tokens, and the strides of queries, which differ from batch to
    batch, since an engine's absorbed part lies head by head. The type of every tensor is part of
    the key, so that launchers need not check it.

    Args:
        tile: how heads and lists are cut.
        rows: the part of the key that stands for the cache.
        tensors: the tensors of the launches.
        columns: strides from column to column of the query and of its rotary part.

    Raises:
        ValueError: a tensor has another number of dimensions.
    """
    query, rotary, output, lse = tensors.query, tensors.rotary, tensors.output, tensors.lse
    indices, lens, k_scale = tensors.indices, tensors.topk_lens, tensors.k_scale
    sinks, states, counters = tensors.sinks, tensors.states, tensors.counters
    # Unpacking a whole shape costs less than slicing it.
    _, heads, size = query.shape
    _, rotary_heads, rotary_size = rotary.shape
    _, out_heads, out_size = output.shape
    _, topk = indices.shape
    return (
        tile,
        rows,
        columns,
        query.dtype,
        query.get_device(),
        heads,
        size,
        rotary.dtype,
        rotary.is_cuda,
        rotary_heads,
        rotary_size,
        output.dtype,
        output.is_cuda,
        out_heads,
        out_size,
        output.stride(),
        indices.dtype,
        indices.is_cuda,
        topk,
        indices.stride()[1],
        None if lse is None else (lse.dtype, lse.is_cuda, lse.shape[-1], lse.stride()),
        None if lens is None else (lens.dtype, lens.is_cuda, lens.stride()),
        None if k_scale is None else (k_scale.dtype, k_scale.is_cuda, k_scale.numel()),
        None if sinks is None else (sinks.dtype, sinks.is_cuda, sinks.shape),
        None if states is None else (states.dtype, states.is_cuda),
        None if counters is None else (counters.dtype, counters.is_cuda),
    )


def _shared_values(layer: SparseLayer, tensors: SparseTensors, strides: Strides) -> tuple[Any, ...]:
    """Values of ``_SHARED``."""
    has_factor = layer.layout is LatentFormat.FP8_NOPE_FP8_ROPE
    return (
        tensors.k_scale if has_factor else None,
        tensors.sinks,
        tensors.topk_lens,
        tensors.output,
        tensors.lse,
        tensors.states,
        tensors.sums,
    )


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
    hardware_e4m3: bool,
) -> LaunchForm:
    """The launch of the portable kernel that attends."""
    topk, row = tensors.indices.shape[1], row_of(layer, tensors.query.dtype)
    tiles, programs = tile.head_tiles(layer.num_heads), tile.programs(topk)
    waits = _starts_early(tile)
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
        "HASTENS": waits and programs > 1,
        "WAITS": waits,
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
    return LaunchForm(
        kernel,
        constants,
        (*_SHARED, *_VARYING),
        partial(_portable_values, layer, row),
        lambda rows: (rows * tiles, programs),
        LaunchOptions(
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            waits=waits,
        ),
    )


def _portable_values(
    layer: SparseLayer, row: RowFormat, tensors: SparseTensors, strides: Strides
) -> tuple[Any, ...]:
    """Values of ``_SHARED`` and of ``_VARYING``."""
    indices, rows = tensors.indices, tensors.rows
    assert rows is not None
    return (
        *_shared_values(layer, tensors, strides),
        tensors.query,
        tensors.rotary,
        *strides,
        indices,
        indices.stride()[0],
        *rows.fields(row),
    )


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


def _fits(tile: SparseTile, tensors: SparseTensors, needed: tuple[int, int], reach: int) -> bool:
    """Whether what the variant key leaves out fits together, as :func:`_check` asks for it.

    Args:
        tile: how heads and lists are cut.
        tensors: the tensors of the launches.
        needed: fp32 elements of scratch for one query token, or for any number of them where
            programs share lists.
        reach: elements that the heads of a token's query span, its padding included.
    """
    lse, lens = tensors.lse, tensors.topk_lens
    tokens, rows = tensors.query.shape[0], tensors.indices.shape[0]
    lists = tokens if tile.tokens == 1 else cdiv(tokens, tile.tokens)
    if not (
        lists == rows
        and tokens == tensors.rotary.shape[0] == tensors.output.shape[0]
        and (lse is None or lse.shape[0] == tokens)
        and (lens is None or lens.shape[0] == rows)
        and reach < MOST_REACH
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
