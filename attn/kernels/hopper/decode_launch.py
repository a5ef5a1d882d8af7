"""Launches of the Hopper split-KV kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attn.kernels.hopper.decode import hopper_decode_kernel
from attn.kernels.hopper.launch import COLUMNS, Descriptors, refusal_of_keys
from attn.kernels.launch import KernelCall, KernelForm
from builders.split_kv import SplitPlan
from specs.dtypes import KVQuantMode

if TYPE_CHECKING:
    from attn.kernels.dense import DenseLayer, DenseTensors
    from builders.triton_attn import TritonAttentionMetadata


class HopperDecodeLauncher:
    """The split-KV launches of one layer."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: what never changes.
        """
        self._layer = layer
        self._forms: dict[tuple[Any, ...], KernelForm] = {}
        self._descriptors = Descriptors()

    def knows(self, plan: SplitPlan, key: tuple[Any, ...]) -> bool:
        """Whether launches like this one were prepared before."""
        return (*_static(plan), key) in self._forms

    def prepare(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> None:
        """Make ready for launches like this one.

        Args:
            plan: the builder's.
            step: the builder's record.
            tensors: of this forward.
            constants: what the plain kernel is given of the plan.
            key: everything that a form depends on beside the plan.

        Raises:
            ValueError: the kernel does not serve this.
        """
        is_e4m3 = self._layer.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        dtype = torch.float8_e4m3fn if is_e4m3 else tensors.query.dtype
        reason = refusal_of_keys(self._layer, step, tensors, dtype)
        if reason is not None:
            raise ValueError(f"decode_kernel 'hopper' does not serve this layer: {reason}")
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
            "scale_head": 1 if tensors.k_scale.numel() > 1 else 0,
            "E4M3": is_e4m3,
        }
        form = KernelForm(hopper_decode_kernel, fixed, (*_VARYING, "k_desc", "v_desc"), num_warps=4)
        self._forms[*_static(plan), key] = form

    def call(
        self,
        plan: SplitPlan,
        varying: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> KernelCall:
        """The launch that serves the step's rows with few query tokens, :meth:`prepare`-d before.

        Args:
            plan: the builder's.
            varying: values of what differs from call to call, by the twin's names.
            key: as in :meth:`prepare`.
        """
        assert plan.hopper is not None
        arguments = {name: varying[name] for name in _VARYING}
        page = (1, plan.hopper.run, 1, COLUMNS)
        # As the words that the plain kernel reads.
        arguments["k_desc"] = self._descriptors.of(varying["key_ptr"], page)
        arguments["v_desc"] = self._descriptors.of(varying["value_ptr"], page)
        form = self._forms[*_static(plan), key]
        return form.call((plan.groups * plan.heads,), arguments)


def _static(plan: SplitPlan) -> tuple[Any, ...]:
    """What a form depends on in a plan."""
    return plan.hopper, plan.groups, plan.heads, plan.head_loops, plan.slots, plan.bundles


_PLANNED = (
    "groups",
    "HEADS",
    "HEAD_LOOPS",
    "HEAD_TILES",
    "TILE_HEADS",
    "QUERY_TOKENS",
    "ROWS",
    "SLOTS",
    "BUNDLES",
    "AREA",
    "KV_TILE",
    "SEGMENT_UNIT",
    "FINISH_ROWS",
    "FINISH_WIDTH",
    "STAGES",
)
_VARYING = (
    "query_ptr",
    "out_ptr",
    "lse_ptr",
    "output_scale_ptr",
    "table_ptr",
    "rows_ptr",
    "total_ptr",
    "starts_ptr",
    "shares_ptr",
    "counters_ptr",
    "states_ptr",
    "sums_ptr",
    "causal_ptr",
    "ranges_ptr",
    "sinks_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "table_row",
    "num_ranges",
)
