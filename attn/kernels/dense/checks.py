"""What callers of the dense kernels can get wrong."""

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
    check_dense(
        layer,
        tensors.query,
        tensors.keys,
        tensors.output,
        dtypes=MODEL_DTYPES,
        output_scale=tensors.output_scale,
        lse=tensors.lse,
        k_scale=tensors.k_scale,
        v_scale=tensors.v_scale,
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
    """Kernels reckon the place of a token in 64 bits, and that of its heads, or of a token inside
    its page, in 32.

    Args:
        name: of the tensor.
        rows: ``[T, H, D]``, or a cache ``[N, P, ...]``.

    Raises:
        ValueError: heads of one token, or tokens of one page, lie further apart than that.
    """
    reach = (rows.shape[1] - 1) * rows.stride(1)
    if reach >= 1 << 31:
        raise ValueError(
            f"{name} must have all of its second dimension within 2^31 elements, got shape "
            f"{list(rows.shape)} in strides {rows.stride()}: a copy of it, or fewer tokens, will do"
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
