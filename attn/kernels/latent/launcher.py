"""The launcher of latent (MLA) decode: it makes launches of a layer, a step and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.dense.tensors import DenseLayer, DenseTensors
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.lang.stored import E4M3, NATIVE, decode_form
from attn.kernels.latent.decode import mla_decode_kernel
from builders.dense.record import TritonAttentionMetadata
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import PLAN_POINTERS, SPARE_STATES, SplitPlan, latent_states
from specs.base import power_of_two
from specs.dtypes import CacheDType
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.latent.hopper_wide.launch import HopperLatentLauncher

FINISH_CELLS = 2048
"""Elements of a state that the program which finishes a work item folds at a time."""
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True)
class LatentLayer:
    """The constants of one latent layer."""

    num_heads: int
    rank: int
    rope_size: int
    scale: float
    cache_dtype: CacheDType
    sliding_window: int | None = None
    """Keys that a token sees, itself included; None: it sees itself and all keys before it."""


@dataclass
class LatentTensors:
    """The tensors of one decode: T query tokens, H heads, rank L, rotary size r."""

    query: torch.Tensor
    """``[T, H, L]``, absorbed; contiguous in its last dimension, like every tensor here."""
    rotary: torch.Tensor
    """``[T, H, r]``, the rotated part of the query."""
    latent: torch.Tensor
    """``[N, P, L]``: the latent part of the cache's rows."""
    rope: torch.Tensor
    """``[N, P, r]``: the rotary part of the cache's rows, in the strides of ``latent``."""
    output: torch.Tensor
    """``[T, H, L]``, in the query's type."""
    lse: torch.Tensor | None
    """``[T, H]`` fp32, natural logarithm; None: it is not written."""
    k_scale: torch.Tensor
    """fp32 scalar by which elements of an fp8 cache are multiplied."""


class LatentLauncher:
    """The decode launches of one layer.

    A launcher for each compiled variant is made once and kept. A later forward of the same variant
    only hands over addresses and sizes.
    """

    def __init__(self, layer: LatentLayer) -> None:
        """
        Args:
            layer: the constants of the layer.
        """
        self.layer = layer
        self._variants: Variants[Launcher] = Variants()
        self._hopper: HopperLatentLauncher | None = None

    def attend(self, step: TritonAttentionMetadata, tensors: LatentTensors) -> None:
        """Enqueue the step's launches.

        Args:
            step: the builder's record of the decode rows.
            tensors: the tensors of this forward.

        Raises:
            ValueError: the tensors do not fit the layer, or the plan was made for another layer.
        """
        for launch in self._launches(step, tensors):
            launch.launch()

    def calls(
        self, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[KernelCall, ...]:
        """The launches for the step's decode rows, as data: nothing is enqueued.

        Args:
            step: the builder's record of the decode rows.
            tensors: the tensors of this forward.

        Raises:
            ValueError: the tensors do not fit the layer, or the plan was made for another layer.
        """
        return tuple(launch.call for launch in self._launches(step, tensors))

    def _launches(
        self, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[Launch, ...]:
        plan = step.split
        assert plan is not None
        if plan.hopper is not None:
            return self._on_hopper(plan, step, tensors)
        latent, rope = self._words(tensors.latent), self._words(tensors.rope)
        varying = _varying(plan, step, tensors) | {
            "query_ptr": tensors.query,
            "rotary_ptr": tensors.rotary,
            "latent_ptr": latent,
            "rope_ptr": rope,
            "scale_ptr": tensors.k_scale,
        }

        def new_launcher() -> Launcher:
            _check(self.layer, plan, step, tensors)
            fixed = self._fixed(tensors, latent, rope) | _plan_constants(plan)
            fixed["FINISH_WIDTH"] = min(
                fixed["WIDTH"] * fixed["PLANES"], FINISH_CELLS // fixed["FINISH_ROWS"]
            )
            tile = plan.tile
            return Launcher(
                mla_decode_kernel,
                fixed,
                [*varying],
                groups={"plan": PLAN_POINTERS},
                options=LaunchOptions(
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    max_registers=tile.max_registers,
                ),
            )

        launcher = self._variants.of((plan.static, _variant(tensors)), new_launcher)
        return (launcher.bind((plan.groups * plan.heads,), varying),)

    def _words(self, rows: torch.Tensor) -> torch.Tensor:
        """Cache rows as the words that kernels load: int16 of an fp8 cache, else elements."""
        return rows.view(torch.int16) if self.layer.cache_dtype.is_quantized else rows

    def _on_hopper(
        self, plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[Launch, ...]:
        """The launches of the Hopper kernel.

        That kernel takes the latent and the rotary part of queries and rows as one tensor. To it
        the layer has one KV head: its key is the whole row, its value the row's latent part.
        """
        layer = self.layer
        width = layer.rank + layer.rope_size
        if self._hopper is None:
            from attn.kernels.latent.hopper_wide.launch import HopperLatentLauncher

            sizes = (layer.num_heads, 1, width, layer.rank)
            self._hopper = HopperLatentLauncher(
                DenseLayer(
                    *(*sizes, layer.scale, layer.cache_dtype),
                    causal=True,
                    sliding_window=layer.sliding_window,
                )
            )
        latent, scale = tensors.latent, tensors.k_scale
        shape, strides = (*latent.shape[:2], 1, width), (*latent.stride()[:2], 0, 1)
        rows = latent.as_strided(shape, strides)
        keys = KVViews(rows, rows[..., : layer.rank])
        query = whole_query(tensors.query, tensors.rotary)
        key = (
            *_variant(tensors),
            query.stride(),
            (query.data_ptr() | tensors.output.data_ptr()) % 16,
        )
        given = DenseTensors(query, keys, tensors.output, scale, scale, lse=tensors.lse)
        varying = _varying(plan, step, tensors) | {
            "query_ptr": query,
            "key_ptr": self._words(keys.key),
            "value_ptr": self._words(keys.value),
            "k_scale_ptr": scale,
            "v_scale_ptr": scale,
        }

        def check() -> dict[str, Any]:
            _check(layer, plan, step, tensors)
            return _plan_constants(plan)

        return self._hopper.launches(plan, step, given, varying, key, check)

    def _fixed(
        self, tensors: LatentTensors, latent: torch.Tensor, rope: torch.Tensor
    ) -> dict[str, Any]:
        """The arguments of the portable kernel that one compiled variant fixes."""
        layer, query, rotary, output = self.layer, tensors.query, tensors.rotary, tensors.output
        quantized = layer.cache_dtype.is_quantized
        planes = 2 if quantized else 1
        # Rows of another 16-bit type are multiplied in fp32: fp16 lacks bf16's range, and bf16
        # lacks fp16's precision.
        same = quantized or latent.dtype == query.dtype
        # Triton's interpreter multiplies the bit patterns of bf16 as if they were integers.
        is_wrong = INTERPRETED.value and query.dtype == torch.bfloat16
        used, rope_used = layer.rank // planes, layer.rope_size // planes
        starts = (rows.data_ptr() // rows.element_size() for rows in (latent, rope))
        decode, _ = decode_form(query.device)
        return {
            "query_token": query.stride(0),
            "query_head": query.stride(1),
            "rotary_token": rotary.stride(0),
            "rotary_head": rotary.stride(1),
            "out_token": output.stride(0),
            "out_head": output.stride(1),
            "lse_token": 0 if tensors.lse is None else tensors.lse.stride(0),
            "block": latent.stride(0),
            "stride": latent.stride(1),
            "scale": layer.scale,
            "window": layer.sliding_window or 0,
            "WINDOW": layer.sliding_window is not None,
            "NUM_HEADS": layer.num_heads,
            "BLOCK_SIZE": latent.shape[1],
            "SIZE": layer.rank,
            "WIDTH": max(power_of_two(used), 16),
            "USED": used,
            "ROPE_SIZE": layer.rope_size,
            "ROPE_WIDTH": max(power_of_two(rope_used), 16),
            "ROPE_USED": rope_used,
            "KIND": E4M3 if quantized else NATIVE,
            "PLANES": planes,
            "DECODE": decode,
            "COMPUTE": _TYPES[query.dtype] if same and not is_wrong else tl.float32,
            # Every row starts at a multiple of this power of two, at most 16, of words.
            "ALIGN": math.gcd(16, latent.stride(0), latent.stride(1), *starts),
            "SIMPLE": layer.scale > 0,
            "LSE": tensors.lse is not None,
        }


def whole_query(query: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Both query parts as ``[T, H, L + r]``: a view if side by side, else a copy."""
    rank = query.shape[-1]
    is_whole = (
        rotary.data_ptr() == query.data_ptr() + rank * query.element_size()
        and rotary.stride() == query.stride()
        and rotary.dtype == query.dtype
        and query.stride(1) >= rank + rotary.shape[-1]
    )
    if is_whole:
        shape = (*query.shape[:2], rank + rotary.shape[-1])
        return query.as_strided(shape, query.stride())
    return torch.cat((query, rotary), dim=-1)


def _varying(
    plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
) -> dict[str, Any]:
    """Arguments of the portable and the Hopper kernel that differ from call to call."""
    return {
        "out_ptr": tensors.output,
        "lse_ptr": tensors.lse,
        "table_ptr": step.block_table,
        "plan": plan.pointers,
        "table_row": step.block_table.stride()[0],
    }


def _plan_constants(plan: SplitPlan) -> dict[str, Any]:
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


def _variant(tensors: LatentTensors) -> tuple[Any, ...]:
    """The variant key of the tensors: everything about them that a compiled variant depends on."""
    query, rotary, latent, rope = tensors.query, tensors.rotary, tensors.latent, tensors.rope
    output, lse = tensors.output, tensors.lse
    return (
        query.dtype,
        query.device,
        query.shape[1:],
        query.stride(),
        rotary.dtype,
        rotary.shape[1:],
        rotary.stride(),
        output.dtype,
        output.shape[1:],
        output.stride(),
        None if lse is None else (lse.dtype, lse.shape[1:], lse.stride()),
        latent.dtype,
        latent.shape[1:],
        rope.shape[1:],
        latent.stride(),
        rope.stride(),
        (latent.data_ptr() | rope.data_ptr()) % 64,
        tensors.k_scale.numel(),
    )


def _check(
    layer: LatentLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
) -> None:
    """Refuse what does not fit together; run once per variant, so that a call costs nothing."""
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
        check_reach(name, rows)
    query = tensors.query.dtype
    if query not in _TYPES or not query == tensors.rotary.dtype == tensors.output.dtype:
        names = ", ".join(str(dtype) for dtype in _TYPES)
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
