"""The launcher of the Hopper latent kernels, wide and narrow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.dense.hopper_launch import COLUMNS, HopperVariants, asked, is_planned
from attn.kernels.latent.hopper_narrow.kernel import hopper_mla_narrow_kernel
from attn.kernels.latent.hopper_wide.fold import fold_cuts_kernel
from attn.kernels.latent.hopper_wide.kernel import hopper_mla_kernel
from builders.latent.choice import latent_kernel_of
from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.splitkv.record import PLAN_POINTERS, SplitPlan, area_of
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind
from specs.engine import DecodeKernel

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata

FINISH_CELLS = 2048
"""Elements of a state that the program which finishes a work item folds at a time."""
SLICE = 4
"""Query rows of a cut work item that one program folds."""
_WIDTH = 512


def check_serves(
    layer: DenseLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> None:
    """Check that the Hopper kernel serves a step as planned; no other kernel can run such a plan.

    Args:
        layer: the constants of the layer.
        plan: the plan of the step, made for the Hopper kernel.
        step: the builder's record.
        tensors: the tensors of the forward.

    Raises:
        ValueError: the kernel does not serve it.
    """
    assert plan.hopper is not None
    shape, block_size, asks = asked(layer, step, tensors)
    # A plan that cuts items freely (the wide kernel's) was not asked to be batch invariant. Few
    # query rows get the narrow kernel either way.
    asks = replace(asks, batch_invariant=not plan.depends_on_batch)
    # A tile has all the query tokens that were asked for, or as many as fit.
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
    """The Hopper decode launches of one latent layer; no step falls back to the portable kernel."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: the constants of the layer.
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
        """The launches of a step in their order.

        The first is the kernel that attends. Where the plan cuts work items between any two tiles
        (the wide kernel), the kernel that folds the cuts follows.

        Args:
            plan: the plan of the step.
            step: the builder's record.
            tensors: the tensors of the forward.
            varying: arguments that differ from call to call, by name.
            key: the variant key of the tensors.
            check: checks the arguments and gives the plan's constants; called once per variant.

        Raises:
            ValueError: the kernel does not serve the layer.
        """
        attends = self.bind(plan, step, tensors, varying, key, check)
        if attends is None:
            raise ValueError("the plan is for the Hopper kernel, which does not serve the layer")
        if not plan.depends_on_batch:
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
        if plan.depends_on_batch:
            varying["cache_ptr"] = rows
        else:
            # The rotary part of e4m3 rows is 32 words of two elements; else it is 64 elements.
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
        varying: Mapping[str, Any],
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
        if plan.depends_on_batch:
            fixed |= {
                "cache_block": rows.stride(0),
                # With one head tile, one program reads a work item's keys, and memory is the limit:
                # half of a block is freed early. With several, products are the limit: nothing is
                # freed early, and the programs prefetch the next tile into L2.
                "EARLY": plan.tile.head_tiles == 1,
                "PREFETCH": plan.heads > 1 and rows.stride(1) == rows.shape[-1],
            }
            return Launcher(
                hopper_mla_kernel,
                fixed,
                (*_VARYING, "cache_ptr"),
                groups=_PLAN,
                options=LaunchOptions(num_warps=4, waits=True),
            )
        fixed |= {name: constants[name] for name in _SEGMENTED} | {
            "AREA": area_of(plan.slots, plan.segment_groups, plan.head_loops),
            "STAGES": plan.hopper.num_stages,
            "E4M3": self._layer.cache_dtype.is_quantized,
            "FINISH_WIDTH": min(_WIDTH, FINISH_CELLS // constants["FINISH_ROWS"]),
        }
        names = (*_VARYING, "k_scale_ptr", "rope_desc")
        return Launcher(
            hopper_mla_narrow_kernel,
            fixed,
            names,
            groups=_PLAN,
            options=LaunchOptions(num_warps=8, waits=True),
        )


def _new_fold(plan: SplitPlan, attends: Launcher, tensors: DenseTensors) -> Launcher:
    """The launcher of the fold that runs after ``attends``, with the constants they share."""
    shared = ("HEADS", "HEAD_LOOPS", "GROUP", "TILE_HEADS", "QUERY_TOKENS", *_OUTPUTS)
    fixed = {name: attends.arguments[name] for name in shared}
    fixed |= {
        "groups": plan.groups,
        "GROUPS": power_of_two(plan.groups),
        "SLICE": SLICE,
        "WAITS": tensors.output.is_cuda,
    }
    names = ("out_ptr", "lse_ptr", "plan")
    return Launcher(fold_cuts_kernel, fixed, names, groups=_PLAN, options=LaunchOptions(waits=True))


_PLAN = {"plan": PLAN_POINTERS}
_OUTPUTS = ("OUT_TOKEN", "OUT_HEAD", "LSE_TOKEN", "LSE")
_PLANNED = ("HEADS", "HEAD_LOOPS", "TILE_HEADS", "QUERY_TOKENS")
_SEGMENTED = ("groups", "SLOTS", "SEGMENT_GROUPS", "SEGMENT_UNIT", "KV_TILE", "FINISH_ROWS")
_VARYING = (
    "k_desc",
    "query_ptr",
    "out_ptr",
    "lse_ptr",
    "table_ptr",
    "plan",
    "table_row",
)
