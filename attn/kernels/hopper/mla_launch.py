"""Launches of the latent attention kernel for Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn.kernels.hopper.launch import COLUMNS, HopperForms, asked, is_planned
from attn.kernels.hopper.mla import hopper_mla_kernel
from attn.kernels.hopper.mla_narrow import hopper_mla_narrow_kernel
from attn.kernels.launch import KernelForm
from builders.hopper_latent import NARROW_ROWS, latent_kernel_of
from builders.split_kv import SplitPlan, scratch_area
from specs.devices import DeviceKind
from specs.engine import DecodeKernel

if TYPE_CHECKING:
    from attn.kernels.dense import DenseLayer, DenseTensors
    from builders.triton_attn import TritonAttentionMetadata

FINISH_CELLS = 1024
"""Cells of a state that a warp group, which finishes a row, folds at a time; of tiles of 16 rows,
two warp groups twice as many."""
_HALF = 256


def check_serves(
    layer: DenseLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> None:
    """The kernel serves a step of a layer as it was planned: it is planned by name only.

    Raises:
        ValueError: it does not.
    """
    assert plan.hopper is not None
    shape, block_size, asks = asked(layer, step, tensors)
    # A tile has all the tokens that it was asked for, or as many as there is room for.
    tokens, wanted = plan.tile.query_tokens, DecodeKernel.HOPPER
    tile, _ = latent_kernel_of(shape, DeviceKind.SM90, block_size, tokens, asks, wanted)
    is_planned(tile, plan.hopper, True)
    for name, is_asked in {
        "an output scale": tensors.output_scale is not None,
        "sinks": tensors.sinks is not None,
        "a window": layer.sliding_window is not None or layer.attention_chunk_size is not None,
        "a soft cap": layer.logits_soft_cap is not None,
        "multimodal ranges": step.mm_ranges is not None,
        "a mask that is not causal": not layer.causal or step.causal is not True,
    }.items():
        if is_asked:
            raise ValueError(f"decode_kernel 'hopper' does not serve latent layers with {name}")


class HopperLatentLauncher(HopperForms[SplitPlan]):
    """The decode launches of one latent layer; none is left to the plain kernel."""

    def _static(self, plan: SplitPlan) -> tuple[Any, ...]:
        return plan.static

    def _add_varying(
        self,
        plan: SplitPlan,
        fixed: Mapping[str, Any],
        tensors: DenseTensors,
        varying: dict[str, Any],
    ) -> int:
        assert plan.hopper is not None
        rows = varying["key_ptr"][:, :, 0]
        varying["k_desc"] = self._descriptors.of("k", rows, (1, plan.hopper.run, COLUMNS))
        if plan.tile.rows == NARROW_ROWS:
            # Words of two elements, 32 of them the rotary part.
            rope = (1, plan.hopper.run, COLUMNS // 2)
            varying["rope_desc"] = self._descriptors.of("rope", rows, rope)
        else:
            varying["cache_ptr"] = rows
        varying["plan"] = plan.pointers
        return plan.groups * plan.heads

    def _new_form(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
    ) -> KernelForm | None:
        check_serves(self._layer, plan, step, tensors)
        is_narrow = plan.tile.rows == NARROW_ROWS
        output, lse, rows = tensors.output, tensors.lse, tensors.keys.key
        assert plan.hopper is not None
        fixed = {name: constants[name] for name in _PLANNED}
        fixed |= {
            "AREA": scratch_area(plan.hopper, plan.slots, plan.bundles, plan.head_loops),
            "QUERY_TOKEN": tensors.query.stride(0),
            "QUERY_HEAD": tensors.query.stride(1),
            "OUT_TOKEN": output.stride(0),
            "OUT_HEAD": output.stride(1),
            "LSE_TOKEN": 0 if lse is None else lse.stride(0),
            "scale": self._layer.scale,
            "GROUP": self._layer.num_heads,
            "BLOCK_SIZE": rows.shape[1],
            "RUN": plan.hopper.run,
            "LSE": lse is not None,
        }
        if is_narrow:
            fixed["STAGES"] = plan.hopper.num_stages
            fixed["FINISH_WIDTH"] = min(2 * _HALF, 2 * FINISH_CELLS // constants["FINISH_ROWS"])
            names = (*_VARYING, "k_scale_ptr", "rope_desc")
            return KernelForm(hopper_mla_narrow_kernel, fixed, names, num_warps=8, waits=True)
        fixed |= {
            "cache_block": rows.stride(0),
            "FINISH_WIDTH": min(_HALF, FINISH_CELLS // constants["FINISH_ROWS"]),
            # One program reads a row's keys, and memory is the limit; or several do, and products
            # are: then half of a block is not freed early, and the next tile is asked into L2.
            "EARLY": plan.tile.head_tiles == 1,
            "PREFETCH": plan.heads > 1 and rows.stride(1) == rows.shape[-1],
        }
        varying = (*_VARYING, "cache_ptr")
        return KernelForm(hopper_mla_kernel, fixed, varying, num_warps=4, waits=True)


_PLANNED = (
    "groups",
    "HEADS",
    "HEAD_LOOPS",
    "TILE_HEADS",
    "QUERY_TOKENS",
    "SLOTS",
    "BUNDLES",
    "SEGMENT_UNIT",
    "FINISH_ROWS",
)
_VARYING = (
    "k_desc",
    "query_ptr",
    "out_ptr",
    "lse_ptr",
    "table_ptr",
    "plan",
    "table_row",
)
