"""What callers of the dense kernels can get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from builders.dense_limits import BLOCK_MULTIPLE, MODEL_DTYPES
from builders.mask_limits import refuse_masks
from builders.split_plan import (
    SplitPlan,
)
from specs.dtypes import KVQuantMode

if TYPE_CHECKING:
    from attn.kernels.dense_tensors import DenseLayer, DenseTensors
    from builders.dense_step import TritonAttentionMetadata


def check_call(layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors) -> None:
    """Tensors and step of a call; once per form, so that others cost nothing.

    Raises:
        ValueError: what does not fit the layer; both values are named.
    """
    _check_tensors(layer, tensors)
    _check_step(step, tensors)
    _check_stripe(layer, step, tensors)
    rswa_window = None if step.rswa_prefix_lens is None else step.rswa_window
    refuse_masks(layer.causal and step.causal is True, layer.attention_chunk_size, rswa_window)


def _check_tensors(layer: DenseLayer, tensors: DenseTensors) -> None:
    query, output, scale = tensors.query, tensors.output, tensors.output_scale
    if query.dtype not in MODEL_DTYPES:
        names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
        raise ValueError(f"query must be one of {names}, got {query.dtype}")
    _check_rows("query", query, (layer.num_heads, layer.head_size))
    _check_rows("output", output, (layer.num_heads, layer.head_size_v))
    # Scratch of a merge is fp32.
    allowed = {query.dtype, torch.float32} if scale is None else {torch.float8_e4m3fn}
    if output.dtype not in allowed:
        given = "without" if scale is None else "with"
        names = " or ".join(sorted(str(dtype) for dtype in allowed))
        raise ValueError(f"output must be {names} {given} an output_scale, got {output.dtype}")
    if scale is not None:
        _check_scale("output_scale", scale, (1,))
    lse = tensors.lse
    if lse is not None:
        if lse.dtype != torch.float32:
            raise ValueError(f"output_lse must be float32, got {lse.dtype}")
        _check_rows("output_lse", lse, (layer.num_heads,))
    _check_keys(layer, tensors)


def check_lengths(
    num_tokens: int, first: torch.Tensor, second: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Every tensor has a row for each token of the step.

    Raises:
        ValueError: one has fewer.
    """
    if first.shape[0] < num_tokens or second.shape[0] < num_tokens:
        raise ValueError(
            f"query, key, value and output must have at least num_actual_tokens ({num_tokens}) "
            f"rows, got {first.shape[0]} and {second.shape[0]}"
        )
    if lse is not None and lse.shape[0] < num_tokens:
        raise ValueError(
            f"output_lse must have at least num_actual_tokens ({num_tokens}) rows, got "
            f"{lse.shape[0]}"
        )


def check_heads(layer: DenseLayer, plan: SplitPlan) -> None:
    """The plan is for layers with these heads."""
    tile, group = plan.tile, layer.num_heads // layer.num_kv_heads
    planned = plan.heads * plan.head_loops // tile.head_tiles
    if planned != layer.num_kv_heads or not 0 <= tile.tile_heads * tile.head_tiles - group < (
        tile.tile_heads
    ):
        raise ValueError(
            f"the builder's plan is for {planned} KV heads of up to "
            f"{tile.tile_heads * tile.head_tiles} query heads each, the layer has "
            f"{layer.num_kv_heads} of {group}"
        )


def _check_step(step: TritonAttentionMetadata, tensors: DenseTensors) -> None:
    """What kernels read by a pointer alone is dense."""
    read = {
        "block_table": step.block_table,
        "causal": step.causal,
        "rswa_prefix_lens": step.rswa_prefix_lens,
        "sinks": tensors.sinks,
        "alibi_slopes": tensors.alibi_slopes,
    }
    for name, tensor in read.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}"
            )


def _check_stripe(layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors) -> None:
    """Nothing but causality depends on positions when the keys are one rank's."""
    asked = {
        "sliding_window": layer.sliding_window,
        "attention_chunk_size": layer.attention_chunk_size,
        "alibi_slopes": tensors.alibi_slopes,
        "mm_req_doc_ranges": step.mm_ranges,
        "rswa_prefix_lens": step.rswa_prefix_lens,
    }
    names = [name for name, value in asked.items() if value is not None]
    if step.stripe is not None and names:
        raise ValueError(
            f"decode_context_parallel_size ({step.stripe.size}) does not go together with "
            f"{', '.join(names)}"
        )


def _check_keys(layer: DenseLayer, tensors: DenseTensors) -> None:
    """Shapes of the keys and values, and the layer's scales."""
    key, value = tensors.keys.key, tensors.keys.value
    packing = layer.cache_dtype.packing
    if key.dim() == 4 and key.shape[1] % BLOCK_MULTIPLE:
        raise ValueError(
            f"block size of kv_cache must be a multiple of {BLOCK_MULTIPLE}, got {key.shape[1]}"
        )
    page = key.shape[1:2] if key.dim() == 4 else ()
    for name, rows, size in (("key", key, layer.head_size), ("value", value, layer.head_size_v)):
        _check_rows(name, rows, (*page, layer.num_kv_heads, size // packing))
    if key.dim() == 3 and not key.dtype == value.dtype == tensors.query.dtype:
        raise ValueError(
            f"key and value must have query's dtype {tensors.query.dtype}, got {key.dtype} and "
            f"{value.dtype}"
        )
    if layer.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        k_scale, v_scale = tensors.k_scale, tensors.v_scale
        for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
            _check_scale(name, factor, (1, layer.num_kv_heads))
        if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
            raise ValueError(
                f"k_scale and v_scale must both be per tensor or both per head, got "
                f"{k_scale.numel()} and {v_scale.numel()} elements"
            )


def _check_rows(name: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
    if rows.shape[1:] != shape:
        wanted = ", ".join(["*", *(str(size) for size in shape)])
        raise ValueError(f"{name} must have shape [{wanted}], got {list(rows.shape)}")
    if rows.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {rows.stride()}"
        )


def _check_scale(name: str, scale: torch.Tensor | None, counts: tuple[int, ...]) -> None:
    if scale is None:
        raise ValueError(f"{name} is needed, got None")
    if scale.dtype != torch.float32 or scale.numel() not in counts or not scale.is_contiguous():
        wanted = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise ValueError(
            f"{name} must be contiguous float32 of {wanted} elements, got shape "
            f"{list(scale.shape)} of {scale.dtype}"
        )
