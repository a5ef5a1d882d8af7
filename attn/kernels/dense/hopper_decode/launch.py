"""Launches of the Hopper split-KV kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.dense.checks import check_call, check_heads
from attn.kernels.dense.constants import absent_arguments, split_constants, step_constants
from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from attn.kernels.dense.hopper_launch import HopperVariants, asked, is_planned
from builders.dense.choice import decode_kernel_of
from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launcher
from builders.splitkv.record import PLAN_POINTERS, SplitPlan
from builders.splitkv.tiles import registers_per_thread
from specs.base import power_of_two
from specs.devices import DeviceKind
from specs.engine import DecodeKernel

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata

FINISH_CELLS = 2048
"""Elements of a state that a program folds at a time: as many as there are registers for.

The program waits for memory each time, so fewer elements at a time would mean more waits."""


def serves(
    layer: DenseLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> bool:
    """Whether the Hopper split-KV kernel serves a step of a layer as it was planned.

    The builder has asked the same question before it knew the tensors. Here everything is known.

    Raises:
        ValueError: the kernel does not serve the step, but the configuration asks for it by name.
    """
    assert plan.hopper is not None
    shape, block_size, asks = asked(layer, step, tensors)
    wanted = DecodeKernel.HOPPER if plan.requires_hopper else DecodeKernel.AUTO
    if plan.sums_apart > 0:
        # The plan's tile has all of the portable tile that the choice looks at.
        asks = replace(asks, batch_invariant=True, split=plan.tile)
    # A tile has as many query tokens as were asked for, or as many as it has room for: asking for
    # the planned number gives the planned tile.
    tokens = plan.tile.query_tokens
    tile, _ = decode_kernel_of(shape, DeviceKind.SM90, block_size, tokens, asks, wanted)
    return is_planned(tile, plan.hopper, plan.requires_hopper)


class HopperDecodeLauncher(HopperVariants[SplitPlan]):
    """The launches of the Hopper split-KV kernel in one layer."""

    def launch(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> bool:
        """See the base class."""
        launcher = self._variants.of(
            (plan.static, key), self._new_launcher, plan, step, tensors, optional
        )
        if launcher is None:
            return False
        rows, table = tensors.rows, step.block_table
        assert rows is not None
        assert plan.hopper is not None
        # The descriptors are of the same stored words that the portable kernel reads.
        launcher(
            (plan.groups * plan.heads,),
            *self._described(*rows.words, plan.hopper.run, tensors),
            tensors.query,
            tensors.written,
            table,
            table.stride()[0],
            plan.pointers,
            *optional.values(),
        )
        return True

    def _new_launcher(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
    ) -> Launcher | None:
        check_call(self._layer, step, tensors)
        if not serves(self._layer, plan, step, tensors):
            return None
        layer = self._layer
        check_heads(layer, plan)
        width = power_of_two(layer.head_size)
        constants = split_constants(plan, width)
        assert plan.hopper is not None
        programs = plan.tile.programs_per_sm
        # A consumer and a producer have four warps each: Triton starts warps by four.
        most = None if programs == 1 else registers_per_thread(8 * programs)
        fixed = {name: constants[name] for name in _PLANNED}
        fixed |= step_constants(layer, step, tensors) | {
            "query_token": tensors.query.stride(0),
            "query_head": tensors.query.stride(1),
            "SIZE": layer.head_size,
            "WIDTH": width,
            "BLOCK_SIZE": tensors.keys.key.shape[1],
            "RUN": plan.hopper.run,
            "E4M3": layer.cache_dtype.is_quantized,
            "STAGES": plan.hopper.num_stages,
            "CONSUMERS": plan.hopper.consumers,
            "PROGRAMS": programs,
            "FINISH_WIDTH": min(width, FINISH_CELLS // constants["FINISH_ROWS"]),
        }
        absent = absent_arguments(optional, hopper_decode_kernel.arg_names)
        return Launcher(
            hopper_decode_kernel,
            fixed | absent,
            [*_VARYING, *optional],
            groups={"plan": PLAN_POINTERS},
            options=LaunchOptions(waits=True, max_registers=most),
            is_typed=True,
        )


_PLANNED = (
    "groups",
    "HEADS",
    "HEAD_LOOPS",
    "HEAD_TILES",
    "TILE_HEADS",
    "QUERY_TOKENS",
    "ROWS",
    "SLOTS",
    "SEGMENT_GROUPS",
    "AREA",
    "KV_TILE",
    "SEGMENT_UNIT",
    "SUMS",
    "FINISH_ROWS",
)
_VARYING = ("k_desc", "v_desc", "query_ptr", "out_ptr", "table_ptr", "table_row", "plan")
"""Arguments that every launch is given."""
