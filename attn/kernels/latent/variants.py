"""What a compiled variant of the latent kernels is made from: checks, and constants of the plan."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.latent.tensors import LatentLayer, LatentTensors
from builders.dense.record import TritonAttentionMetadata
from builders.splitkv.record import SPARE_STATES, SplitPlan, latent_states
from specs.base import power_of_two

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Types of queries, and Triton's names for them."""


def plan_constants(plan: SplitPlan) -> dict[str, Any]:
    """The arguments of the portable and the Hopper kernel that follow from the plan."""
    tile = plan.tile
    return {
        "groups": plan.groups,
        "HEADS": plan.heads,
        "HEAD_LOOPS": plan.head_loops,
        "TILE_HEADS": tile.tile_heads,
        "QUERY_TOKENS": tile.query_tokens,
        "ROWS": tile.rows,
        "SLOTS": plan.slots,
        "SEGMENT_GROUPS": plan.segment_groups,
        "AREA": latent_states(plan.slots, plan.segment_groups, plan.head_loops)[0],
        "SEGMENT_UNIT": tile.segment_unit,
        "KV_TILE": tile.kv_tile,
        "SPARE": SPARE_STATES,
        "FINISH_ROWS": power_of_two(tile.tile_heads * tile.query_tokens),
        "STAGES": tile.num_stages,
    }


def check_tensors(
    layer: LatentLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
) -> None:
    """Refuse what does not fit together; run once per variant, so that a call costs nothing.

    Raises:
        ValueError: the tensors do not fit the layer, or the plan was made for another layer.
    """
    heads, block_size = layer.num_heads, tensors.latent.shape[1]
    lse = tensors.lse
    wanted = {
        "query": (tensors.query, (heads, layer.rank)),
        "rotary": (tensors.rotary, (heads, layer.rope_size)),
        "output": (tensors.output, (heads, layer.rank)),
        "latent": (tensors.latent, (block_size, layer.rank)),
        "rope": (tensors.rope, (block_size, layer.rope_size)),
    }
    for name, (rows, shape) in wanted.items():
        if rows.shape[1:] != shape or rows.stride(-1) != 1:
            sizes = ", ".join(["*", *(str(size) for size in shape)])
            raise ValueError(
                f"{name} must have shape [{sizes}] and be contiguous in its last dimension, got "
                f"{list(rows.shape)} with strides {rows.stride()}"
            )
        if name not in ("query", "rotary"):
            # The strides of queries may differ in the variant's next forward.
            check_reach(name, rows)
    query = tensors.query.dtype
    if query not in TYPES or not query == tensors.rotary.dtype == tensors.output.dtype:
        names = ", ".join(str(dtype) for dtype in TYPES)
        raise ValueError(
            f"query, rotary and output must have one of {names} in common, got {query}, "
            f"{tensors.rotary.dtype} and {tensors.output.dtype}"
        )
    if lse is not None and (lse.dtype != torch.float32 or lse.shape[1:] != (heads,)):
        raise ValueError(f"lse must be float32 [*, {heads}], got {list(lse.shape)} of {lse.dtype}")
    if tensors.latent.stride()[:2] != tensors.rope.stride()[:2]:
        raise ValueError(
            f"latent and rope must be parts of one row, got strides {tensors.latent.stride()} and "
            f"{tensors.rope.stride()}"
        )
    if layer.cache_dtype.is_quantized and tensors.k_scale.numel() != 1:
        raise ValueError(f"k_scale must be a scalar, got {tensors.k_scale.numel()} elements")
    table = step.block_table
    if table.stride(-1) != 1 and table.shape[-1] > 1:
        raise ValueError(f"block_table must be dense in its rows, got strides {table.stride()}")
    tile = plan.tile
    planned = plan.heads * plan.head_loops
    if not 0 <= tile.tile_heads * planned - heads < tile.tile_heads:
        raise ValueError(
            f"the builder's plan is for up to {tile.tile_heads * planned} query heads in "
            f"{planned} tiles, the layer has {heads}"
        )
