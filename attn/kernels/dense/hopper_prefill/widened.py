"""Launches of the Hopper prefill kernel over a quantised cache whose rows are widened first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn.kernels.cache.widen import widen_form
from attn.kernels.dense.checks import check_call
from attn.kernels.dense.hopper_prefill.launch import HopperLauncher
from attn.kernels.lang.stored import WIDENED, decode_form
from attn.kernels.launch import FormCall, Forms
from specs.dtypes import CacheDType
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata
    from builders.splitkv.record import HopperPlan


class WidenedLauncher:
    """Both launches of one layer."""

    def __init__(self, layer: DenseLayer, kind: int) -> None:
        """
        Args:
            layer: what never changes.
            kind: how its cache stores its elements, as in :mod:`attn.kernels.lang.stored`.
        """
        self._kind = kind
        # What the kernel reads is the workspace.
        self._layer = replace(layer, cache_dtype=CacheDType.AUTO)
        self._attending = HopperLauncher(self._layer, WIDENED)
        self._widening = Forms()

    def calls(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: Mapping[str, Any],
        likeness: tuple[Any, ...],
    ) -> tuple[FormCall, FormCall] | None:
        """The launch that widens, and the one that attends; None where tiles convert their own.

        Args:
            plan: with a workspace.
            step: the builder's record.
            tensors: of this forward.
            varying: arguments that differ from call to call, by the plain kernel's names.
            likeness: everything else that a form depends on.

        Raises:
            ValueError: tensors that do not fit the layer.
        """
        widened = plan.widened
        assert widened is not None
        over = replace(tensors, keys=KVViews(widened.key, widened.value), rows=None)
        misaligned = tensors.query.data_ptr() % 16
        key = (likeness, widened.key.shape[1:], misaligned, step.first_positions is None)
        if not self._attending.knows(plan, key):
            step_over = replace(step, block_table=widened.table)
            check_call(self._layer, step_over, over)
            self._attending.prepare(plan, step_over, over, {}, key)
        arguments = dict(varying)
        arguments["table_ptr"], arguments["table_row"] = widened.table, widened.table.stride()[0]
        arguments["query_start_ptr"] = step.query_start_loc
        arguments["seq_lens_ptr"] = step.seq_lens
        arguments["num_reqs"] = step.num_reqs
        attends = self._attending.call(plan, over, arguments)
        if attends is None:
            return None
        if not self._widening.has(key):
            words = varying["key_ptr"], varying["value_ptr"]
            decode, _ = decode_form(tensors.query.device)
            self._widening.keep(key, widen_form(words, widened, self._kind, decode))
        form = self._widening.latest
        assert form is not None
        grid = (widened.pages, self._layer.num_kv_heads)
        arguments = {
            **varying,
            "wide_key_ptr": widened.key,
            "wide_value_ptr": widened.value,
            "sources_ptr": widened.sources,
            "total_ptr": widened.total,
            "seq_lens_ptr": step.seq_lens,
        }
        return form.call(grid, arguments), attends
