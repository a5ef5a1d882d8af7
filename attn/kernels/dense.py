"""Launchers of the dense attention kernels: from a layer, a step and its tensors to launch records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl

from attn.kernels.decode import decode_kernel
from attn.kernels.launch import KernelCall
from attn.kernels.numerics import INTERPRETED
from attn.kernels.prefill import prefill_kernel
from attn.kernels.tile import E4M3, E5M2, INT4, INT8, NATIVE, PLAIN, PTX, PTX_SM89
from builders.split_kv import power_of_two
from builders.triton_attn import TritonAttentionMetadata
from specs.dtypes import CacheDType, KVQuantMode
from specs.layouts import KVViews

FINISH_CELLS = 1024
"""Cells of a state that the program which finishes a row folds at a time."""


@dataclass(frozen=True)
class DenseLayer:
    """What never changes in a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    cache_dtype: CacheDType
    causal: bool
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    chunk_lookback: int = 0
    logits_soft_cap: float | None = None
    use_alibi_sqrt: bool = False
    clamps_ranges: bool = False
    """Multimodal ranges reach no further back than the window."""


@dataclass
class DenseTensors:
    """The tensors of one forward."""

    query: torch.Tensor
    """``[T, H, D]``, last dimension contiguous."""
    keys: KVViews
    """The cache, or an encoder's ``[T, Hk, D]`` rows as key and value."""
    output: torch.Tensor
    """``[T, H, Dv]``, last dimension contiguous; fp8 with ``output_scale``."""
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    lse: torch.Tensor | None = None
    """``[T, H]`` fp32, last dimension contiguous."""
    output_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


@dataclass(frozen=True)
class _Stored:
    """How rows of a cache are read."""

    kind: int
    planes: int
    inline: bool

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the words that kernels load."""
        return rows if self.kind == NATIVE else rows.view(torch.int16)

    def width(self, size: int) -> tuple[int, int]:
        """Words of a plane of ``size`` elements: padded to a power of two, and used."""
        used = size // self.planes
        return max(power_of_two(used), 16), used


def _stored(cache_dtype: CacheDType) -> _Stored:
    if cache_dtype is CacheDType.INT4_PER_TOKEN_HEAD:
        return _Stored(INT4, 4, True)
    if cache_dtype is CacheDType.INT8_PER_TOKEN_HEAD:
        return _Stored(INT8, 2, True)
    if cache_dtype is CacheDType.FP8_PER_TOKEN_HEAD:
        return _Stored(E4M3, 2, True)
    if cache_dtype is CacheDType.FP8_E5M2:
        return _Stored(E5M2, 2, False)
    return _Stored(
        E4M3 if cache_dtype.is_quantized else NATIVE, 2 if cache_dtype.is_quantized else 1, False
    )


_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def _compute_type(model: torch.dtype, stored: _Stored, element: torch.dtype) -> tuple[Any, bool]:
    """Type of the products' operands, and whether the query must be brought into its range."""
    if model == torch.float32:
        return tl.float32, False
    if stored.kind != NATIVE or element == torch.float16:
        return tl.float16, model == torch.bfloat16
    # A 16-bit type holds neither the other's range nor its precision.
    return _TRITON_TYPES[model] if element == model else tl.float32, False


@cache
def decode_form(device: torch.device) -> tuple[int, bool]:
    """How stored 8-bit rows are decoded on a device, and whether it has e4m3 instructions."""
    if INTERPRETED.value or device.type != "cuda" or torch.version.hip is not None:
        return PLAIN, False
    has_e4m3 = torch.cuda.get_device_capability(device) >= (8, 9)
    return PTX_SM89 if has_e4m3 else PTX, has_e4m3


def _alignment(keys: torch.Tensor, values: torch.Tensor, strides: tuple[int, ...]) -> int:
    """Largest power of two, up to 16 words, that every row starts at a multiple of."""
    starts = (rows.data_ptr() // rows.element_size() for rows in (keys, values))
    return math.gcd(16, *strides, *starts)


def _common(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> dict[str, Any]:
    """Arguments of both kernels, in the names that they share."""
    keys, query, output = tensors.keys, tensors.query, tensors.output
    stored = _stored(layer.cache_dtype)
    k_words, v_words = stored.words(keys.key), stored.words(keys.value)
    paged = k_words.dim() == 4
    compute, guard = _compute_type(query.dtype, stored, keys.key.dtype)
    k_width, k_used = stored.width(layer.head_size)
    v_width, v_used = stored.width(layer.head_size_v)
    decode, hardware = decode_form(query.device)
    causal: Any = step.causal
    per_request = isinstance(causal, torch.Tensor)
    rswa = step.rswa_prefix_lens is not None and step.rswa_window is not None
    window = step.rswa_window if rswa else layer.sliding_window
    chunk = layer.attention_chunk_size
    ranges = step.mm_ranges
    fp8_out = tensors.output_scale is not None
    k_strides = k_words.stride()[:3] if paged else (0, *k_words.stride()[:2])
    v_strides = v_words.stride()[:3] if paged else (0, *v_words.stride()[:2])
    s_strides = (0, 0, 0) if keys.key_scale is None else keys.key_scale.stride()
    arguments: dict[str, Any] = {
        "query_ptr": query,
        "key_ptr": k_words,
        "value_ptr": v_words,
        "k_inline_ptr": keys.key_scale,
        "v_inline_ptr": keys.value_scale,
        "k_scale_ptr": tensors.k_scale,
        "v_scale_ptr": tensors.v_scale,
        "out_ptr": output.view(torch.uint8) if fp8_out else output,
        "lse_ptr": tensors.lse,
        "output_scale_ptr": tensors.output_scale,
        "table_ptr": step.block_table,
        "causal_ptr": causal.view(torch.uint8)
        if per_request and causal.dtype == torch.bool
        else causal
        if per_request
        else None,
        "prefix_ptr": step.rswa_prefix_lens,
        "ranges_ptr": ranges,
        "sinks_ptr": tensors.sinks,
        "slopes_ptr": tensors.alibi_slopes,
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "out_token": output.stride(0),
        "out_head": output.stride(1),
        "lse_token": 0 if tensors.lse is None else tensors.lse.stride(0),
        "table_row": step.block_table.stride(0),
        "scale_head": 1 if tensors.k_scale.numel() > 1 else 0,
        "scale": layer.scale,
        "soft_cap": layer.logits_soft_cap or 1.0,
        "window": window or 0,
        "chunk": chunk or 1,
        "lookback": layer.chunk_lookback,
        "num_ranges": 0 if ranges is None else ranges.shape[1],
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "K_SIZE": layer.head_size,
        "V_SIZE": layer.head_size_v,
        "BLOCK_SIZE": keys.key.shape[1] if paged else 0,
        "K_WIDTH": k_width,
        "K_USED": k_used,
        "V_WIDTH": v_width,
        "V_USED": v_used,
        "KIND": stored.kind,
        "PLANES": stored.planes,
        "INLINE": stored.inline,
        "DECODE": decode,
        "COMPUTE": compute,
        "GUARD": guard,
        "PER_TENSOR": layer.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR,
        "SAME_ROWS": k_strides == v_strides,
        "ALIGN": _alignment(k_words, v_words, (*k_strides, *v_strides)),
        "CAUSAL": 0 if not layer.causal or causal is False else 2 if per_request else 1,
        "WINDOW": window is not None and not rswa,
        "CHUNK": chunk is not None,
        "RSWA": rswa,
        "RANGES": ranges is not None,
        "CLAMP": layer.clamps_ranges and layer.sliding_window is not None,
        "SOFT_CAP": layer.logits_soft_cap is not None,
        "ALIBI": 0 if tensors.alibi_slopes is None else 2 if layer.use_alibi_sqrt else 1,
        "SINKS": tensors.sinks is not None,
        "SIMPLE": (
            layer.logits_soft_cap is None
            and tensors.alibi_slopes is None
            and not stored.inline
            and layer.scale > 0
        ),
        "FP8_OUT": fp8_out,
        "LSE": tensors.lse is not None,
        "HARDWARE_E4M3": hardware,
    }
    for name, strides in (("k", k_strides), ("v", v_strides), ("s", s_strides)):
        for axis, stride in zip(("block", "token", "head"), strides, strict=True):
            arguments[f"{name}_{axis}"] = stride
    return arguments


def split_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with few query tokens."""
    plan = step.split
    assert plan is not None
    tile = plan.tile
    arguments = _common(layer, step, tensors)
    width = arguments["V_WIDTH"] * arguments["PLANES"]
    finish_rows = power_of_two(tile.tile_heads * tile.query_tokens)
    arguments |= {
        "rows_ptr": plan.rows,
        "total_ptr": plan.total,
        "starts_ptr": plan.starts,
        "counters_ptr": plan.counters,
        "states_ptr": plan.states,
        "sums_ptr": plan.sums,
        "groups": plan.groups,
        "HEADS": plan.heads,
        "HEAD_LOOPS": plan.head_loops,
        "HEAD_TILES": tile.head_tiles,
        "TILE_HEADS": tile.tile_heads,
        "QUERY_TOKENS": tile.query_tokens,
        "ROWS": tile.rows,
        "SLOTS": plan.slots,
        "KV_TILE": tile.kv_tile,
        "SEGMENT_UNIT": tile.segment_unit,
        "FREE": plan.is_free,
        "FINISH_ROWS": finish_rows,
        "FINISH_WIDTH": max(16, min(width, FINISH_CELLS // finish_rows)),
        "STAGES": tile.num_stages,
    }
    grid = (plan.groups * plan.heads,)
    return KernelCall(decode_kernel, grid, arguments, tile.num_warps, tile.num_stages)


def prefill_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with many query tokens."""
    plan = step.prefill
    assert plan is not None
    tile = plan.tile
    arguments = _common(layer, step, tensors) | {
        "tile_starts_ptr": plan.tile_starts,
        "query_start_ptr": step.query_start_loc,
        "seq_lens_ptr": step.seq_lens,
        "num_reqs": step.num_reqs,
        "HEADS": layer.num_heads,
        "QUERY_TILE": tile.query_tile,
        "REQ_STEPS": 20,
        "KV_TILE": tile.kv_tile,
        "STAGES": tile.num_stages,
    }
    return KernelCall(prefill_kernel, (plan.programs,), arguments, tile.num_warps, tile.num_stages)
