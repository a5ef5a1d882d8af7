"""Launches of the Hopper prefill kernel over a quantised cache whose rows are dequantised first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.cache.dequantise import dequantise_launcher
from attn.kernels.dense.checks import check_call
from attn.kernels.dense.hopper_prefill.launch import HopperLauncher
from attn.kernels.lang.stored import DEQUANTISED, decode_form
from builders.launch.launcher import Launch, Launcher
from builders.launch.variants import Variants
from specs.dtypes import CacheDType
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata
    from builders.splitkv.record import HopperPlan


class DequantisedLauncher:
    """The two launches of one layer: keys and values are dequantised, then attended."""

    def __init__(self, layer: DenseLayer, kind: int) -> None:
        """
        Args:
            layer: what never changes.
            kind: how the layer's cache stores its elements, one of
                :mod:`attn.kernels.lang.stored`'s kinds.
        """
        self._kind = kind
        # What the kernel reads is the workspace.
        self._layer = replace(layer, cache_dtype=CacheDType.AUTO)
        self._attending = HopperLauncher(self._layer, DEQUANTISED)
        self._dequantising: Variants[Launcher] = Variants()

    def launches(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: Mapping[str, Any],
        variant: tuple[Any, ...],
    ) -> tuple[Launch, Launch] | None:
        """The launch that dequantises and the launch that attends.

        Args:
            plan: with a workspace.
            step: the builder's record.
            tensors: of this forward.
            varying: arguments that differ from call to call, by the portable kernel's names.
            variant: everything else that a launcher depends on.

        Returns:
            Both, in their order; None where each tile dequantises the keys that it reads.

        Raises:
            ValueError: tensors that do not fit the layer.
        """
        dequantised = plan.dequantised
        assert dequantised is not None
        over = replace(tensors, keys=KVViews(dequantised.key, dequantised.value), rows=None)
        misaligned = tensors.query.data_ptr() % 16
        key = (variant, dequantised.key.shape[1:], misaligned, step.first_positions is None)
        arguments = dict(varying)
        arguments["table_ptr"], arguments["table_row"] = (
            dequantised.table,
            dequantised.table.stride()[0],
        )
        arguments["query_start_ptr"] = step.query_start_loc
        arguments["seq_lens_ptr"] = step.seq_lens
        arguments["num_reqs"] = step.num_reqs
        step_over = replace(step, block_table=dequantised.table)

        def check() -> dict[str, Any]:
            check_call(self._layer, step_over, over)
            return {}

        attends = self._attending.bind(plan, step_over, over, arguments, key, check)
        if attends is None:
            return None
        words = varying["key_ptr"], varying["value_ptr"]
        decode, _ = decode_form(tensors.query.device)
        launcher = self._dequantising.of(
            key, lambda: dequantise_launcher(words, dequantised, self._kind, decode)
        )
        grid = (dequantised.pages, self._layer.num_kv_heads)
        arguments = {
            **varying,
            "wide_key_ptr": dequantised.key,
            "wide_value_ptr": dequantised.value,
            "sources_ptr": dequantised.sources,
            "total_ptr": dequantised.total,
            "seq_lens_ptr": step.seq_lens,
        }
        return launcher.bind(grid, arguments), attends
