"""Launches of the Hopper prefill kernel over a quantised cache whose rows are dequantised first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.cache.dequantise import dequantise_launcher
from attn.kernels.dense.hopper_prefill.launch import HopperLauncher
from attn.kernels.lang.stored import DEQUANTISED, decode_form
from builders.launch.launcher import Launcher
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

    def launch(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        variant: tuple[Any, ...],
    ) -> bool:
        """Launch the kernel that dequantises and the kernel that attends.

        Args:
            plan: with a workspace.
            step: the builder's record.
            tensors: of this forward.
            optional: arguments that a step may lack, by the portable kernel's names.
            variant: everything else that a launcher depends on.

        Returns:
            False, without a launch, where each tile dequantises the keys that it reads.

        Raises:
            ValueError: tensors that do not fit the layer.
        """
        dequantised, rows = plan.dequantised, tensors.rows
        assert dequantised is not None
        assert rows is not None
        over = replace(tensors, keys=KVViews(dequantised.key, dequantised.value), rows=None)
        step_over = replace(step, block_table=dequantised.table)
        key = (variant, dequantised.key.shape[1:])
        attending = (plan, step_over, over, optional, key)
        if self._attending.launcher_of(*attending) is None:
            return False
        words, device = rows.words, tensors.query.device
        dequantising = self._dequantising.of(
            key,
            lambda: dequantise_launcher(words, dequantised, self._kind, decode_form(device)[0]),
        )
        arguments = {
            "key_ptr": words[0],
            "value_ptr": words[1],
            "table_ptr": step.block_table,
            "table_row": step.block_table.stride()[0],
            "wide_key_ptr": dequantised.key,
            "wide_value_ptr": dequantised.value,
            "sources_ptr": dequantised.sources,
            "total_ptr": dequantised.total,
            "seq_lens_ptr": step.seq_lens,
        }
        grid = (dequantised.pages, self._layer.num_kv_heads)
        dequantising.bind(grid, arguments).launch()
        return self._attending.launch(*attending)
