"""Launches of the latent attention kernel for Hopper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.dense.hopper_launch import COLUMNS, HopperVariants, asked, is_planned
from attn.kernels.latent.hopper_narrow.kernel import hopper_mla_narrow_kernel
from attn.kernels.latent.hopper_wide.fold import fold_cuts_kernel
from attn.kernels.latent.hopper_wide.kernel import hopper_mla_kernel
from builders.latent.choice import latent_kernel_of
from builders.launch.launcher import Launch, Launcher
from builders.splitkv.record import PLAN_POINTERS, SplitPlan, area_of
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind
from specs.engine import DecodeKernel

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata

FINISH_CELLS = 2048
"""Cells of a state of 16 rows that whoever finishes a row folds at a time."""
SLICE = 4
"""Rows that a program folds of a row of the plan that is cut."""
_WIDTH = 512


def check_serves(
    layer: DenseLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> None:
    """The kernel serves a step of a layer as it was planned: no other takes over such a plan.

    Raises:
        ValueError: it does not.
    """
    assert plan.hopper is not None
    shape, block_size, asks = asked(layer, step, tensors)
    # Where few rows would be enough, this changes nothing.
    asks = replace(asks, batch_invariant=not plan.is_free)
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
            raise ValueError(
                f"kernels.latent.decode 'hopper' does not serve latent layers with {name}"
            )


class HopperLatentLauncher(HopperVariants[SplitPlan]):
    """The decode launches of one latent layer; none is left to the plain kernel."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: what never changes.
        """
        super().__init__(layer)
        self._folds: dict[Launcher, Launcher] = {}

    def launches(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        key: tuple[Any, ...],
        check: Callable[[], Mapping[str, Any]],
    ) -> tuple[Launch, ...]:
        """The launches of a step in their order: the kernel that attends, and the fold of its cuts
        where rows are cut between any two tiles.

        Args:
            plan: the builder's, like all that follow: see :meth:`HopperVariants.bind`.
            step: see there.
            tensors: see there.
            varying: see there.
            key: see there.
            check: see there.

        Raises:
            ValueError: the kernel does not serve the layer.
        """
        attends = self.bind(plan, step, tensors, varying, key, check)
        if attends is None:
            raise ValueError("the plan is for the Hopper kernel, which does not serve the layer")
        if not plan.is_free:
            return (attends,)
        fold = self._folds.get(attends.launcher)
        if fold is None:
            fold = self._folds[attends.launcher] = _new_fold(plan, attends.launcher, tensors)
        slices = cdiv(plan.tile.tile_heads * plan.tile.query_tokens, SLICE)
        return attends, fold.bind((plan.groups * plan.heads * slices,), varying)

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
        if plan.is_free:
            varying["cache_ptr"] = rows
        else:
            # Words of two elements, 32 of them the rotary part; or elements.
            words = COLUMNS // 2 if self._layer.cache_dtype.is_quantized else COLUMNS
            rope = (1, plan.hopper.run, words)
            varying["rope_desc"] = self._descriptors.of("rope", rows, rope)
        varying["plan"] = plan.pointers
        return plan.groups * plan.heads

    def _new_launcher(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
    ) -> Launcher | None:
        check_serves(self._layer, plan, step, tensors)
        output, lse, rows = tensors.output, tensors.lse, tensors.keys.key
        assert plan.hopper is not None
        fixed = {name: constants[name] for name in _PLANNED}
        fixed |= {
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
        if plan.is_free:
            fixed |= {
                "cache_block": rows.stride(0),
                # One program reads a row's keys, and memory is the limit; or several do, and
                # products are: then half of a block is not freed early, and the next tile is asked
                # into L2.
                "EARLY": plan.tile.head_tiles == 1,
                "PREFETCH": plan.heads > 1 and rows.stride(1) == rows.shape[-1],
            }
            varying = (*_VARYING, "cache_ptr")
            return Launcher(
                hopper_mla_kernel, fixed, varying, groups=_PLAN, num_warps=4, waits=True
            )
        fixed |= {name: constants[name] for name in _SEGMENTED} | {
            "AREA": area_of(plan.slots, plan.bundles, plan.head_loops),
            "STAGES": plan.hopper.num_stages,
            "E4M3": self._layer.cache_dtype.is_quantized,
            "FINISH_WIDTH": min(_WIDTH, FINISH_CELLS // constants["FINISH_ROWS"]),
        }
        names = (*_VARYING, "k_scale_ptr", "rope_desc")
        return Launcher(
            hopper_mla_narrow_kernel, fixed, names, groups=_PLAN, num_warps=8, waits=True
        )


def _new_fold(plan: SplitPlan, attends: Launcher, tensors: DenseTensors) -> Launcher:
    """The fold behind launches of a kernel that attends."""
    shared = ("HEADS", "HEAD_LOOPS", "GROUP", "TILE_HEADS", "QUERY_TOKENS", *_OUTPUTS)
    fixed = {name: attends.arguments[name] for name in shared}
    fixed |= {
        "groups": plan.groups,
        "GROUPS": power_of_two(plan.groups),
        "SLICE": SLICE,
        "WAITS": tensors.output.is_cuda,
    }
    names = ("out_ptr", "lse_ptr", "plan")
    return Launcher(fold_cuts_kernel, fixed, names, groups=_PLAN, waits=True)


_PLAN = {"plan": PLAN_POINTERS}
_OUTPUTS = ("OUT_TOKEN", "OUT_HEAD", "LSE_TOKEN", "LSE")
_PLANNED = ("HEADS", "HEAD_LOOPS", "TILE_HEADS", "QUERY_TOKENS")
_SEGMENTED = ("groups", "SLOTS", "BUNDLES", "SEGMENT_UNIT", "KV_TILE", "FINISH_ROWS")
_VARYING = (
    "k_desc",
    "query_ptr",
    "out_ptr",
    "lse_ptr",
    "table_ptr",
    "plan",
    "table_row",
)
