"""Launches of the dense attention kernels, made from a layer, a step's record and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attn.kernels.dense.checks import check_call, check_heads
from attn.kernels.dense.constants import (
    absent_arguments,
    prefill_constants,
    shared_constants,
    split_constants,
)
from attn.kernels.dense.decode import decode_kernel
from attn.kernels.dense.prefill import prefill_kernel
from attn.kernels.dense.tensors import DenseLayer, DenseTensors, KeyRows, stored_as
from attn.kernels.lang.stored import decode_form
from builders.checks.tensors import check_lengths
from builders.dense.record import TritonAttentionMetadata
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import PLAN_POINTERS, HopperPlan, PrefillPlan, SplitPlan

if TYPE_CHECKING:
    from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher
    from attn.kernels.dense.hopper_prefill.dequantised import DequantisedLauncher
    from attn.kernels.dense.hopper_prefill.launch import HopperLauncher


class DenseLauncher:
    """The launches of one layer.

    A *variant* is a launch without its tensors: a kernel, and the arguments that all launches of
    the variant share. A variant depends on the layer, on the dtypes, strides and alignment of the
    tensors, on which optional tensors are given, and on static numbers of the plan. It depends on
    no length. A variant is prepared, and its tensors are checked, once.
    """

    tensors = DenseTensors
    """The class of :meth:`attend`'s argument.

    An impl imports this module late; with the class here, no forward has to import it again."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: the layer's constants.
        """
        self.layer = layer
        self._stored = stored_as(layer.cache_dtype)
        self._splits: Variants[Launcher] = Variants()
        self._tiled: Variants[Launcher] = Variants()
        self._hopper: HopperLauncher | None = None
        self._dequantised: DequantisedLauncher | None = None
        self._hopper_decode: HopperDecodeLauncher | None = None

    def attend(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> None:
        """Enqueue the step's launches.

        Args:
            step: the builder's record.
            tensors: the tensors of this forward.

        Raises:
            ValueError: tensors that do not fit the layer.
        """
        if step.split is None and step.prefill is None:
            return
        variant = self._variant(step, tensors)
        varying = self._varying(step, tensors)
        if step.split is not None:
            own = varying if step.prefill is None else dict(varying)
            self._split(step.split, step, tensors, own, variant).launch()
        if step.prefill is not None:
            for launch in self._prefills(step.prefill, step, tensors, varying, variant):
                launch.launch()

    def split(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with few query tokens, as data."""
        assert step.split is not None
        variant = self._variant(step, tensors)
        varying = self._varying(step, tensors)
        return self._split(step.split, step, tensors, varying, variant).call

    def prefill(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with many query tokens, as data.

        Where a launch before it dequantises their keys, that launch is left out.
        """
        assert step.prefill is not None
        variant = self._variant(step, tensors)
        varying = self._varying(step, tensors)
        return self._prefills(step.prefill, step, tensors, varying, variant)[-1].call

    def _split(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        variant: tuple[Any, ...],
    ) -> Launch:
        """The launch for rows with few query tokens.

        The Hopper kernel is launched where the plan is for it and it serves the layer; otherwise
        the portable kernel is.
        """
        varying["plan"] = plan.pointers
        if plan.hopper is not None:
            on_hopper = self._split_on_hopper(plan, step, tensors, varying, variant)
            if on_hopper is not None:
                return on_hopper

        def new_launcher() -> Launcher:
            fixed = self._fixed(step, tensors, varying)
            check_heads(self.layer, plan)
            fixed |= split_constants(plan, fixed["V_WIDTH"] * fixed["PLANES"])
            fixed |= absent_arguments(decode_kernel.arg_names, varying)
            tile, names = plan.tile, varying.keys() & set(decode_kernel.arg_names)
            return Launcher(
                decode_kernel,
                fixed,
                ["plan", *names],
                groups={"plan": PLAN_POINTERS},
                options=LaunchOptions(
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    max_registers=tile.max_registers,
                    waits=plan.waits,
                ),
            )

        launcher = self._splits.of((plan.static, variant), new_launcher)
        return launcher.bind((plan.groups * plan.heads,), varying)

    def _prefills(
        self,
        plan: PrefillPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        variant: tuple[Any, ...],
    ) -> tuple[Launch, ...]:
        """The launches for rows with many query tokens, in their order.

        There is one launch, or two where the keys of a quantised cache are dequantised first.
        """
        hopper = plan.hopper
        if hopper is not None and hopper.dequantised is not None:
            if self._dequantised is None:
                from attn.kernels.dense.hopper_prefill.dequantised import DequantisedLauncher

                self._dequantised = DequantisedLauncher(self.layer, self._stored.kind)
            launches = self._dequantised.launches(hopper, step, tensors, varying, variant)
            if launches is not None:
                return launches
        varying["query_start_ptr"] = step.query_start_loc
        varying["seq_lens_ptr"] = step.seq_lens
        varying["num_reqs"] = step.num_reqs
        if hopper is not None:
            on_hopper = self._prefill_on_hopper(hopper, step, tensors, varying, variant)
            if on_hopper is not None:
                return (on_hopper,)
        varying["tile_starts_ptr"] = plan.tile_starts
        varying["first_ptr"] = step.first_positions

        def new_launcher() -> Launcher:
            fixed = self._fixed(step, tensors, varying)
            tile, own = prefill_constants(plan.tile, fixed)
            fixed |= own
            fixed["HEADS"] = self.layer.num_heads
            fixed |= absent_arguments(prefill_kernel.arg_names, varying)
            return Launcher(
                prefill_kernel,
                fixed,
                [*(varying.keys() & set(prefill_kernel.arg_names))],
                options=LaunchOptions(num_warps=tile.num_warps, num_stages=tile.num_stages),
            )

        launcher = self._tiled.of((plan.tile, variant), new_launcher)
        return (launcher.bind((plan.programs,), varying),)

    def _prefill_on_hopper(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        variant: tuple[Any, ...],
    ) -> Launch | None:
        """The launch of the Hopper kernel; None where the portable kernel serves the layer."""
        if self._hopper is None:
            from attn.kernels.dense.hopper_prefill.launch import HopperLauncher

            self._hopper = HopperLauncher(self.layer)

        def check() -> dict[str, Any]:
            check_call(self.layer, step, tensors)
            return {}

        # Descriptors need aligned addresses. The variant key holds the alignment of all addresses
        # but the query's already.
        key = (variant, tensors.query.data_ptr() % 16, step.first_positions is None)
        return self._hopper.bind(plan, step, tensors, varying, key, check)

    def _split_on_hopper(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        variant: tuple[Any, ...],
    ) -> Launch | None:
        """The launch of the Hopper kernel; None where the portable kernel serves the layer."""
        if self._hopper_decode is None:
            from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher

            self._hopper_decode = HopperDecodeLauncher(self.layer)

        def check() -> dict[str, Any]:
            check_call(self.layer, step, tensors)
            check_heads(self.layer, plan)
            return split_constants(plan, self.layer.head_size)

        return self._hopper_decode.bind(plan, step, tensors, varying, variant, check)

    def _variant(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> tuple[Any, ...]:
        """The variant key: everything that a variant depends on, except the plans.

        No length is part of it, and of addresses only the alignment. The numbers of rows of query,
        output and LSE are checked here too.
        """
        rows = tensors.rows
        if rows is None:
            rows = tensors.rows = KeyRows(tensors.keys, self._stored)
        query, output, lse, scale = tensors.query, tensors.output, tensors.lse, tensors.output_scale
        k_scale, v_scale = tensors.k_scale, tensors.v_scale
        sinks, slopes = tensors.sinks, tensors.alibi_slopes
        try:
            # Unpacking a whole shape costs less than slicing it.
            tokens, heads, size = query.shape
            out_tokens, out_heads, out_size = output.shape
        except ValueError:
            check_call(self.layer, step, tensors)
            raise
        least = tensors.num_tokens
        if tokens < least or out_tokens < least or lse is not None:
            check_lengths(least, query, output, lse)
        rest: tuple[Any, ...] = ()
        if not (lse is scale is k_scale is v_scale is sinks is slopes is None):
            rest = (
                None if lse is None else (lse.dtype, lse.shape[1:], lse.stride()),
                *map(_kind, (scale, k_scale, v_scale, sinks, slopes)),
            )
        causal, table = step.causal, step.block_table
        # One expression, without helpers: this runs in every layer of every step.
        return (
            query.dtype,
            query.device,
            heads,
            size,
            query.stride(),
            output.dtype,
            out_heads,
            out_size,
            output.stride(),
            rows.variant,
            rest,
            table.dtype,
            # Tensors are checked once for each variant, so the variant must hold what is checked.
            table.stride()[1],
            causal if isinstance(causal, bool) else None,
            step.mm_ranges is not None,
            step.rswa_window if step.rswa_prefix_lens is not None else None,
            step.stripe,
            step.block_size,
            step.cache_dtype,
        )

    def _varying(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> dict[str, Any]:
        """The arguments that differ from launch to launch, for all dense kernels.

        Tensors that are not given are left out; which these are is a part of the variant key.
        """
        rows, table, causal = tensors.rows, step.block_table, step.causal
        assert rows is not None
        varying: dict[str, Any] = {
            "query_ptr": tensors.query,
            "key_ptr": rows.words[0],
            "value_ptr": rows.words[1],
            "out_ptr": tensors.output,
            "table_ptr": table,
            "table_row": table.stride()[0],
        }
        if tensors.keys.key_scale is not None:
            varying["k_inline_ptr"] = tensors.keys.key_scale
            varying["v_inline_ptr"] = tensors.keys.value_scale
        if tensors.k_scale is not None:
            varying["k_scale_ptr"] = tensors.k_scale
        if tensors.v_scale is not None:
            varying["v_scale_ptr"] = tensors.v_scale
        if tensors.lse is not None:
            varying["lse_ptr"] = tensors.lse
        if tensors.output_scale is not None:
            varying["output_scale_ptr"] = tensors.output_scale
            varying["out_ptr"] = tensors.output.view(torch.uint8)
        if tensors.sinks is not None:
            varying["sinks_ptr"] = tensors.sinks
        if tensors.alibi_slopes is not None:
            varying["slopes_ptr"] = tensors.alibi_slopes
        if not isinstance(causal, bool):
            is_bool = causal.dtype == torch.bool
            varying["causal_ptr"] = causal.view(torch.uint8) if is_bool else causal
        if step.rswa_prefix_lens is not None and step.rswa_window is not None:
            varying["prefix_ptr"] = step.rswa_prefix_lens
        if step.mm_ranges is not None:
            varying["ranges_ptr"] = step.mm_ranges
            varying["num_ranges"] = step.mm_ranges.shape[1]
        return varying

    def _fixed(
        self, step: TritonAttentionMetadata, tensors: DenseTensors, varying: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments that a launcher of a portable kernel keeps; checks the tensors first."""
        check_call(self.layer, step, tensors)
        form = decode_form(tensors.query.device)
        return shared_constants(self.layer, self._stored, step, tensors, varying, form)


def split_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with few query tokens, by a launcher of its own."""
    return DenseLauncher(layer).split(step, tensors)


def prefill_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with many query tokens, by a launcher of its own."""
    return DenseLauncher(layer).prefill(step, tensors)


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The part of the variant key that stands for a tensor read through its address alone."""
    return None if tensor is None else (tensor.dtype, tensor.numel())
