"""Launches of the Hopper prefill kernel, and why it is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn.kernels.hopper.prefill import hopper_prefill_kernel
from attn.kernels.launch import KernelCall, KernelForm, alignment
from builders.split_kv import HopperPlan
from builders.tiles import HopperTile

if TYPE_CHECKING:
    from attn.kernels.dense import DenseLayer, DenseTensors
    from builders.triton_attn import TritonAttentionMetadata

COLUMNS = 64
"""Columns of a box: the 128 bytes of a swizzled row."""
MOST_DESCRIPTORS = 64
"""Of a layer, kept for calls with tensors at the same addresses."""


def refusal(layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors) -> str | None:
    """Why the prefill kernel does not serve a step of a layer; None where it does.

    The builder has looked at the geometry already, see :func:`builders.tiles.hopper_tile`.
    """
    reason = refusal_of_keys(layer, step, tensors, tensors.query.dtype)
    if reason is None and alignment(tensors.query) < 16:
        reason = f"rows of query are aligned to {alignment(tensors.query)} bytes, not 16"
    if tensors.output_scale is None and tensors.output.dtype != tensors.query.dtype:
        reason = (
            reason or f"an output of {tensors.output.dtype} for a query of {tensors.query.dtype}"
        )
    return reason


def refusal_of_keys(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors, dtype: torch.dtype
) -> str | None:
    """Why no kernel of this family serves a step of a layer; None where they do, from a cache of
    that type.
    """
    if tensors.keys.key.dim() != 4:
        return "keys and values are not in a paged cache"
    if tensors.alibi_slopes is not None:
        return "ALiBi"
    if step.rswa_prefix_lens is not None:
        return "R-SWA"
    if step.stripe is not None:
        return "decode context parallelism"
    if not tensors.keys.key.dtype == tensors.keys.value.dtype == dtype:
        return f"a cache of {tensors.keys.key.dtype} for a query of {tensors.query.dtype}"
    if layer.scale <= 0:
        return f"scale {layer.scale} is not positive"
    for name, rows in (("key", tensors.keys.key), ("value", tensors.keys.value)):
        if alignment(rows) < 16:
            return f"rows of {name} are aligned to {alignment(rows)} bytes, not 16"
    return None


class Descriptors:
    """Descriptors of a layer: it has one cache, and queries come back to the same addresses."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], TensorDescriptor] = {}

    def of(self, rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
        """A descriptor of rows in boxes of that shape."""
        key = (rows.data_ptr(), rows.shape, rows.stride(), box)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_DESCRIPTORS:
                self._known.clear()
            found = self._known[key] = _describe(rows, box)
        return found


class HopperLauncher:
    """The prefill launches of one layer."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: what never changes.
        """
        self._layer = layer
        self._forms: dict[tuple[Any, ...], KernelForm] = {}
        self._descriptors = Descriptors()

    def knows(self, plan: HopperPlan, key: tuple[Any, ...]) -> bool:
        """Whether launches like this one were prepared before."""
        return (plan.tile, key) in self._forms

    def call(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> KernelCall:
        """The launch that serves the step's rows with many query tokens.

        Args:
            plan: the builder's.
            step: the builder's record.
            tensors: of this forward.
            varying: values of what differs from call to call, by the twin's names.
            key: everything that a form depends on.

        Raises:
            ValueError: the kernel does not serve this.
        """
        form = self._forms.get((plan.tile, key))
        if form is None:
            reason = refusal(self._layer, step, tensors)
            if reason is not None:
                raise ValueError(f"prefill_kernel 'hopper' does not serve this layer: {reason}")
            form = self._forms[plan.tile, key] = self._new_form(plan.tile, step, tensors)
        tile, keys = plan.tile, tensors.keys
        shared = {name: varying[name] for name in _SHARED}
        page = (1, tile.run, 1, COLUMNS)
        rows = (tile.rows_per_group, tile.packed, COLUMNS)
        shared["q_desc"] = self._descriptors.of(tensors.query, rows)
        shared["k_desc"] = self._descriptors.of(keys.key, page)
        shared["v_desc"] = self._descriptors.of(keys.value, page)
        shared["tile_starts_ptr"] = plan.tile_starts
        shared["programs"] = plan.programs
        return form.call((plan.programs,), shared)

    def _new_form(
        self, tile: HopperTile, step: TritonAttentionMetadata, tensors: DenseTensors
    ) -> KernelForm:
        layer, output, lse = self._layer, tensors.output, tensors.lse
        cap, chunk, causal = layer.logits_soft_cap, layer.attention_chunk_size, step.causal
        fixed = {
            "out_token": output.stride(0),
            "out_head": output.stride(1),
            "lse_token": 0 if lse is None else lse.stride(0),
            "scale": layer.scale,
            "soft_cap": 1.0 if cap is None else float(cap),
            "window": layer.sliding_window or 0,
            "chunk": chunk or 1,
            "lookback": layer.chunk_lookback,
            "HEADS": layer.num_heads // tile.packed,
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "PACKED": tile.packed,
            "WARP_GROUPS": tile.warp_groups,
            "KV_TILE": tile.kv_tile,
            "SIZE": layer.head_size,
            "WIDTH": tile.width,
            "BLOCK_SIZE": tensors.keys.key.shape[1],
            "RUN": tile.run,
            "Q_STAGES": tile.query_stages,
            "STAGES": tile.num_stages,
            "REGISTERS": tile.registers,
            "CAUSAL": 0 if not layer.causal or causal is False else 1 if causal is True else 2,
            "WINDOW": layer.sliding_window is not None,
            "CHUNK": chunk is not None,
            "RANGES": step.mm_ranges is not None,
            "CLAMP": layer.clamps_ranges and layer.sliding_window is not None,
            "SOFT_CAP": cap is not None,
            "SINKS": tensors.sinks is not None,
            "FP8_OUT": tensors.output_scale is not None,
            "LSE": lse is not None,
        }
        varying = (*_SHARED, "q_desc", "k_desc", "v_desc", "tile_starts_ptr", "programs")
        return KernelForm(hopper_prefill_kernel, fixed, varying, num_warps=4)


_SHARED = (
    "out_ptr",
    "lse_ptr",
    "output_scale_ptr",
    "table_ptr",
    "query_start_ptr",
    "seq_lens_ptr",
    "causal_ptr",
    "ranges_ptr",
    "sinks_ptr",
    "table_row",
    "num_reqs",
    "num_ranges",
)


class _Address:
    """What a descriptor reads of a tensor. The tensor itself would be kept alive by it."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.dtype = rows.dtype
        self._address = rows.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _describe(rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor whose boxes are swizzled as products want them; outside they are zeros."""
    layout = gl.NVMMASharedLayout(128, 16, len(box))
    return TensorDescriptor(_Address(rows), [*rows.shape], [*rows.stride()], [*box], layout)
