"""Arguments of the dense kernels that do not differ between launches of one variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from attn.kernels.dense.tensors import DenseLayer, DenseTensors, Stored
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.lang.stored import NATIVE
from builders.splitkv.record import PrefillPlan, SplitPlan, area_of
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import PrefillTile
from specs.base import power_of_two
from specs.dtypes import KVQuantMode

if TYPE_CHECKING:
    from builders.dense.record import TritonAttentionMetadata

ABSENT: dict[str, Any] = {
    "k_inline_ptr": None,
    "v_inline_ptr": None,
    "k_scale_ptr": None,
    "v_scale_ptr": None,
    "lse_ptr": None,
    "output_scale_ptr": None,
    "sinks_ptr": None,
    "slopes_ptr": None,
    "causal_ptr": None,
    "prefix_ptr": None,
    "ranges_ptr": None,
    "num_ranges": 0,
}
"""Arguments of the dense kernels that a step may lack, and what a launch then passes for them."""
FINISH_CELLS = 1024
"""Elements of a state that a program folds at a time."""
_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def compute_type(model: torch.dtype, stored: Stored, element: torch.dtype) -> tuple[Any, bool]:
    """The type of the products' operands, and whether the query must be scaled into its range."""
    if model == torch.float32:
        return tl.float32, False
    if stored.kind != NATIVE or element == torch.float16:
        return tl.float16, model == torch.bfloat16
    # The cache is bf16 or fp32 from here on. fp16 lacks the range of bf16, and bf16 lacks the
    # precision of fp16: where the model has another type, products are in fp32. They are for bf16
    # under Triton's interpreter too, which would multiply the bit patterns.
    is_right = element == model and not (INTERPRETED.value and model == torch.bfloat16)
    return _TRITON_TYPES[model] if is_right else tl.float32, False


def absent_arguments(
    optional: Mapping[str, Any], names: Sequence[str] = (*ABSENT,)
) -> dict[str, Any]:
    """The fixed arguments that stand for those which a step lacks.

    Args:
        optional: the arguments that the step gives of those that it may lack.
        names: arguments of the kernel.
    """
    return {name: ABSENT[name] for name in ABSENT if name in names and name not in optional}


def strides(tensors: DenseTensors, k_words: torch.Tensor, v_words: torch.Tensor) -> dict[str, Any]:
    """Strides of queries and of stored rows, in elements, their alignment, and the block size.

    The block size is 0 for an encoder, which has no blocks.
    """
    query, inline = tensors.query, tensors.keys.key_scale
    paged = k_words.dim() == 4
    k_strides = k_words.stride()[:3] if paged else (0, *k_words.stride()[:2])
    v_strides = v_words.stride()[:3] if paged else (0, *v_words.stride()[:2])
    starts = (rows.data_ptr() // rows.element_size() for rows in (k_words, v_words))
    named = {"k": k_strides, "v": v_strides, "s": (0, 0, 0) if inline is None else inline.stride()}
    arguments = {
        f"{name}_{axis}": stride
        for name, strides in named.items()
        for axis, stride in zip(("block", "token", "head"), strides, strict=True)
    }
    return arguments | {
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "BLOCK_SIZE": k_words.shape[1] if paged else 0,
        "SAME_ROWS": k_strides == v_strides,
        # In words: the largest power of two, at most 16, that divides every row's start.
        "ALIGN": math.gcd(16, *k_strides, *v_strides, *starts),
    }


def step_constants(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> dict[str, Any]:
    """The arguments that every dense kernel has: strides of results, scales, and the mask.

    The window is the layer's own, which R-SWA replaces in :func:`shared_constants`.

    Args:
        layer: the layer's constants.
        step: the builder's record.
        tensors: the tensors of a forward, which fit layer and step.
    """
    output, lse = tensors.output, tensors.lse
    window, chunk = layer.sliding_window, layer.attention_chunk_size
    cap, causal = layer.logits_soft_cap, step.causal
    return {
        "out_token": output.stride(0),
        "out_head": output.stride(1),
        "lse_token": 0 if lse is None else lse.stride(0),
        "scale_head": 1 if tensors.k_scale is not None and tensors.k_scale.numel() > 1 else 0,
        "scale": layer.scale,
        "soft_cap": 1.0 if cap is None else float(cap),
        "window": window or 0,
        "chunk": chunk or 1,
        "lookback": layer.chunk_lookback,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "CAUSAL": 0 if not layer.causal or causal is False else 1 if causal is True else 2,
        "WINDOW": window is not None,
        "CHUNK": chunk is not None,
        "RANGES": step.mm_ranges is not None,
        "CLAMP": layer.clamps_ranges and window is not None,
        "SOFT_CAP": cap is not None,
        "SINKS": tensors.sinks is not None,
        "FP8_OUT": tensors.output_scale is not None,
        "LSE": lse is not None,
    }


def shared_constants(
    layer: DenseLayer,
    stored: Stored,
    step: TritonAttentionMetadata,
    tensors: DenseTensors,
    words: tuple[torch.Tensor, torch.Tensor],
    form: tuple[int, bool],
) -> dict[str, Any]:
    """The arguments that both portable kernels have in common.

    Args:
        layer: the layer's constants.
        stored: how rows of its cache are read.
        step: the builder's record.
        tensors: the tensors of a forward, which fit layer and step.
        words: keys and values as the kernels read them.
        form: the result of :func:`attn.kernels.lang.stored.decode_form` for the device.
    """
    stripe = step.stripe or Stripe(1, 0, 1)
    is_rswa = step.rswa_prefix_lens is not None and step.rswa_window is not None
    k_width, k_used = stored.width(layer.head_size)
    v_width, v_used = stored.width(layer.head_size_v)
    compute, guard = compute_type(tensors.query.dtype, stored, tensors.keys.key.dtype)
    decode, hardware = form
    fixed = strides(tensors, *words) | step_constants(layer, step, tensors)
    if is_rswa:
        fixed |= {"window": step.rswa_window or 0, "WINDOW": False}
    return fixed | {
        "dcp_size": stripe.size,
        "dcp_rank": stripe.rank,
        "dcp_interleave": stripe.interleave,
        "K_SIZE": layer.head_size,
        "V_SIZE": layer.head_size_v,
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
        "RSWA": is_rswa,
        "DCP": step.stripe is not None,
        "ALIBI": 0 if tensors.alibi_slopes is None else 2 if layer.use_alibi_sqrt else 1,
        "SIMPLE": layer.logits_soft_cap is None
        and tensors.alibi_slopes is None
        and not stored.inline
        and layer.scale > 0,
        "HARDWARE_E4M3": hardware,
    }


def split_constants(plan: SplitPlan, width: int) -> dict[str, Any]:
    """The arguments that only the split-KV kernel has; a state's row is ``width`` elements."""
    tile = plan.tile
    finish_rows = power_of_two(tile.tile_heads * tile.query_tokens)
    return {
        "groups": plan.groups,
        "WAITS": plan.waits,
        "HEADS": plan.heads,
        "HEAD_LOOPS": plan.head_loops,
        "HEAD_TILES": tile.head_tiles,
        "TILE_HEADS": tile.tile_heads,
        "QUERY_TOKENS": tile.query_tokens,
        "ROWS": tile.rows,
        "SLOTS": plan.slots,
        "SEGMENT_GROUPS": plan.segment_groups,
        "AREA": area_of(plan.slots, plan.segment_groups, plan.head_loops),
        "KV_TILE": tile.kv_tile,
        "SEGMENT_UNIT": tile.segment_unit,
        "DEPENDS_ON_BATCH": plan.depends_on_batch,
        "SUMS": plan.sums_apart,
        "FINISH_ROWS": finish_rows,
        "FINISH_WIDTH": max(16, min(width, FINISH_CELLS // finish_rows)),
        "STAGES": tile.num_stages,
    }


def prefill_constants(
    plan: PrefillPlan, fixed: Mapping[str, Any]
) -> tuple[PrefillTile, dict[str, Any]]:
    """The tile of the launch, and the arguments that only the prefill kernel has.

    ``fixed`` holds :func:`shared_constants`; the returned arguments replace some of them.
    """
    sizes = (fixed["K_SIZE"], fixed["V_SIZE"], fixed["KIND"])
    apart: dict[str, Any] = {"REST": 0}
    tile, cuts = plan.tile, plan.segmented
    if sizes == (192, 128, NATIVE) and fixed["COMPUTE"] != tl.float32 and tile.pair_stages:
        tile, apart = tile.for_pair, {"K_WIDTH": 128, "K_USED": 128, "REST": 64}
    return tile, apart | {
        "QUERY_TILE": tile.query_tile,
        "REQ_STEPS": 20,
        "KV_TILE": tile.kv_tile,
        "STAGES": tile.num_stages,
        "SEGMENT_UNIT": 0 if cuts is None else cuts.segment_unit,
        "SEGMENTS_PER_GROUP": 0 if cuts is None else cuts.segment_group,
        "SUMS": 0 if cuts is None else cuts.sums_apart,
        "TOTALS_STORED": cuts is not None and tile.stores_totals,
    }
