"""Launches of the Hopper split-KV kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn.kernels.dense.constants import absent_arguments
from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from attn.kernels.dense.hopper_launch import COLUMNS, HopperVariants, asked, is_planned
from builders.dense.choice import decode_kernel_of
from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launcher
from builders.splitkv.record import PLAN_POINTERS, SplitPlan
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
    # A tile has as many query tokens as were asked for, or as many as it has room for: asking for
    # the planned number gives the planned tile.
    tokens = plan.tile.query_tokens
    tile, _ = decode_kernel_of(shape, DeviceKind.SM90, block_size, tokens, asks, wanted)
    return is_planned(tile, plan.hopper, plan.requires_hopper)


class HopperDecodeLauncher(HopperVariants[SplitPlan]):
    """The launches of the Hopper split-KV kernel in one layer."""

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
        page = (1, plan.hopper.run, 1, COLUMNS)
        # The descriptors are of the same stored words that the portable kernel reads.
        varying["k_desc"] = self._described("k", varying["key_ptr"], page, tensors)
        varying["v_desc"] = self._described("v", varying["value_ptr"], page, tensors)
        return plan.groups * plan.heads

    def _new_launcher(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
        varying: Mapping[str, Any],
    ) -> Launcher | None:
        if not serves(self._layer, plan, step, tensors):
            return None
        layer, output, lse = self._layer, tensors.output, tensors.lse
        cap, chunk, causal = layer.logits_soft_cap, layer.attention_chunk_size, step.causal
        assert plan.hopper is not None
        fixed = {name: constants[name] for name in _PLANNED}
        fixed |= {
            "query_token": tensors.query.stride(0),
            "query_head": tensors.query.stride(1),
            "out_token": output.stride(0),
            "out_head": output.stride(1),
            "lse_token": 0 if lse is None else lse.stride(0),
            "scale": layer.scale,
            "soft_cap": 1.0 if cap is None else float(cap),
            "window": layer.sliding_window or 0,
            "chunk": chunk or 1,
            "lookback": layer.chunk_lookback,
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "SIZE": layer.head_size,
            "BLOCK_SIZE": tensors.keys.key.shape[1],
            "RUN": plan.hopper.run,
            "CAUSAL": 0 if not layer.causal or causal is False else 1 if causal is True else 2,
            "WINDOW": layer.sliding_window is not None,
            "CHUNK": chunk is not None,
            "RANGES": step.mm_ranges is not None,
            "CLAMP": layer.clamps_ranges and layer.sliding_window is not None,
            "SOFT_CAP": cap is not None,
            "SINKS": tensors.sinks is not None,
            "FP8_OUT": tensors.output_scale is not None,
            "LSE": lse is not None,
            "scale_head": 1 if tensors.k_scale is not None and tensors.k_scale.numel() > 1 else 0,
            "E4M3": layer.cache_dtype.is_quantized,
            "STAGES": plan.hopper.num_stages,
            "CONSUMERS": plan.hopper.consumers,
            "FINISH_WIDTH": min(layer.head_size, FINISH_CELLS // constants["FINISH_ROWS"]),
        }
        absent = absent_arguments(_VARYING, varying)
        return Launcher(
            hopper_decode_kernel,
            fixed | absent,
            [name for name in _VARYING if name not in absent],
            groups={"plan": PLAN_POINTERS},
            options=LaunchOptions(waits=True),
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
    "FINISH_ROWS",
)
_VARYING = (
    "k_desc",
    "v_desc",
    "query_ptr",
    "out_ptr",
    "lse_ptr",
    "output_scale_ptr",
    "table_ptr",
    "plan",
    "causal_ptr",
    "ranges_ptr",
    "sinks_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "table_row",
    "num_ranges",
)
