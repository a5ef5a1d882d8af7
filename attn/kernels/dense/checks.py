"""Checks of what callers hand to the dense kernels; each names the argument and its value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from builders.checks.kernel_limits import BLOCK_MULTIPLE, MODEL_DTYPES
from builders.checks.masks import refuse_conflicts, refuse_masks
from builders.checks.tensors import check_dense
from builders.splitkv.record import (
    SplitPlan,
)
from specs.conflicts import ALIBI, CHUNKS, DCP, RANGES, RSWA, WINDOW

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata


def check_call(layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors) -> None:
    """Check the tensors and the step of a call. A launcher calls this once per compiled variant.

    Raises:
        ValueError: a tensor or the step does not fit the layer; the message names both values.
    """
    _check_tensors(layer, tensors)
    _check_step(step, tensors)
    _check_stripe(layer, step, tensors)
    rswa_window = None if step.rswa_prefix_lens is None else step.rswa_window
    refuse_masks(layer.causal and step.causal is True, layer.attention_chunk_size, rswa_window)


def _check_tensors(layer: DenseLayer, tensors: DenseTensors) -> None:
    check_dense(
        layer,
        tensors.query,
        tensors.keys,
        tensors.output,
        dtypes=MODEL_DTYPES,
        output_scale=tensors.output_scale,
        lse=tensors.lse,
        scales=(tensors.k_scale, tensors.v_scale),
    )
    key, value = tensors.keys.key, tensors.keys.value
    rows = {"query": tensors.query, "key": key, "value": value, "output": tensors.output}
    for name, tensor in rows.items():
        check_reach(name, tensor)
    if key.dim() == 4 and key.shape[1] % BLOCK_MULTIPLE:
        raise ValueError(
            f"block size of kv_cache must be a multiple of {BLOCK_MULTIPLE}, got {key.shape[1]}"
        )


def check_reach(name: str, rows: torch.Tensor) -> None:
    """Check that offsets within a token, or within a page, fit 32 bits.

    Kernels compute the offset of a token, or of a page, in 64 bits. They compute the offset of a
    head within its token, or of a token within its page, in 32 bits.

    Args:
        name: the tensor's name in the message.
        rows: ``[T, H, D]``, or a cache ``[N, P, ...]``.

    Raises:
        ValueError: the second dimension spans 2^31 elements or more.
    """
    reach = (rows.shape[1] - 1) * rows.stride(1)
    if reach >= 1 << 31:
        raise ValueError(
            f"{name} must have all of its second dimension within 2^31 elements, got shape "
            f"{list(rows.shape)} in strides {rows.stride()}: a copy of it, or fewer tokens, will do"
        )


def check_heads(layer: DenseLayer, plan: SplitPlan) -> None:
    """Check that the plan is for layers with this layer's heads.

    Raises:
        ValueError: it is for another number of KV heads, or of query heads per KV head.
    """
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
    """Check that tensors which kernels read without a stride are contiguous.

    Raises:
        ValueError: one is not contiguous in its last dimension.
    """
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
    """Check that a layer whose cache holds one rank's keys has no mask or bias besides causality.

    Raises:
        ValueError: it has one that depends on positions.
    """
    if step.stripe is None:
        return
    asked = {DCP: f"decode_context_parallel_size ({step.stripe.size})"}
    for feature, name, value in (
        (WINDOW, "sliding_window", layer.sliding_window),
        (CHUNKS, "attention_chunk_size", layer.attention_chunk_size),
        (ALIBI, "alibi_slopes", tensors.alibi_slopes),
        (RANGES, "mm_req_doc_ranges", step.mm_ranges),
        (RSWA, "rswa_prefix_lens", step.rswa_prefix_lens),
    ):
        if value is not None:
            asked[feature] = name
    refuse_conflicts(asked)
