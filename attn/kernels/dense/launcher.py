"""Launches of the dense attention kernels, made from a layer, a step's record and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from builders.launch.call import KernelCall, LaunchOptions, collected_calls
from builders.launch.launcher import Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import PLAN_POINTERS, HopperPlan, PrefillPlan, SplitPlan

if TYPE_CHECKING:
    from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher
    from attn.kernels.dense.hopper_prefill.dequantised import DequantisedLauncher
    from attn.kernels.dense.hopper_prefill.launch import HopperLauncher

_VARYING = ("query_ptr", "key_ptr", "value_ptr", "out_ptr", "table_ptr", "table_row")
"""Arguments that every launch of a portable kernel is given."""
_VARYING_IN_PREFILL = (
    "query_start_ptr",
    "seq_lens_ptr",
    "num_reqs",
    "tile_starts_ptr",
    "first_ptr",
)
"""More arguments that every launch of the portable prefill kernel is given."""
_SCRATCH_OF_PREFILL = ("states_ptr", "sums_ptr")
"""More arguments of a portable prefill kernel whose plan cuts keys into segments."""
_SIZED = ("k_scale_ptr", "v_scale_ptr", "output_scale_ptr", "sinks_ptr", "slopes_ptr")
"""Arguments that a step may lack and whose number of elements is the layer's."""


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
        optional = _optional(step, tensors)
        variant = self._variant(step, tensors, optional)
        if step.split is not None:
            self._split(step.split, step, tensors, optional, variant)
        if step.prefill is not None:
            self._prefill(step.prefill, step, tensors, optional, variant)

    def split(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with few query tokens, as data."""
        assert step.split is not None
        with collected_calls() as calls:
            self.attend(replace(step, prefill=None), tensors)
        return calls[-1]

    def prefill(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with many query tokens, as data.

        Where a launch before it dequantises their keys, that launch is left out.
        """
        assert step.prefill is not None
        with collected_calls() as calls:
            self.attend(replace(step, split=None), tensors)
        return calls[-1]

    def _split(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        variant: tuple[Any, ...],
    ) -> None:
        """Launch for rows with few query tokens.

        The Hopper kernel is launched where the plan is for it and it serves the layer; otherwise
        the portable kernel is.
        """
        if plan.hopper is not None:
            if self._hopper_decode is None:
                from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher

                self._hopper_decode = HopperDecodeLauncher(self.layer)
            if self._hopper_decode.launch(plan, step, tensors, optional, variant):
                return
        launcher = self._splits.of(
            (plan.static, variant), self._new_split, plan, step, tensors, optional
        )
        rows, table = tensors.rows, step.block_table
        assert rows is not None
        launcher(
            (plan.groups * plan.heads,),
            tensors.query,
            *rows.words,
            tensors.written,
            table,
            table.stride()[0],
            plan.pointers,
            *optional.values(),
        )

    def _new_split(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
    ) -> Launcher:
        """The launcher of a new variant of the portable split-KV kernel."""
        fixed = self._fixed(step, tensors, optional)
        check_heads(self.layer, plan)
        fixed |= split_constants(plan, fixed["V_WIDTH"] * fixed["PLANES"])
        tile = plan.tile
        return Launcher(
            decode_kernel,
            fixed,
            [*_VARYING, "plan", *optional],
            groups={"plan": PLAN_POINTERS},
            options=LaunchOptions(
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                max_registers=tile.max_registers,
                waits=plan.waits,
            ),
            is_typed=True,
        )

    def _prefill(
        self,
        plan: PrefillPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        variant: tuple[Any, ...],
    ) -> None:
        """Launch for rows with many query tokens.

        There is one launch, or two where the keys of a quantised cache are dequantised first.
        """
        query_start, seq_lens, first = step.query_start_loc, step.seq_lens, step.first_positions
        # Only these kernels read the tensors that are added to the variant key here.
        variant = (
            variant,
            *(query_start.dtype, query_start.is_cuda, seq_lens.dtype, seq_lens.is_cuda),
            None if first is None else (first.dtype, first.is_cuda),
        )
        if plan.hopper is not None and self._prefill_on_hopper(
            plan.hopper, step, tensors, optional, variant
        ):
            return
        launcher = self._tiled.of(
            (plan.static, variant), self._new_prefill, plan, step, tensors, optional
        )
        rows, table, cuts = tensors.rows, step.block_table, plan.segmented
        assert rows is not None
        launcher(
            (plan.programs,),
            tensors.query,
            *rows.words,
            tensors.written,
            table,
            table.stride()[0],
            query_start,
            seq_lens,
            step.num_reqs,
            plan.tile_starts,
            first,
            *(() if cuts is None else (cuts.states, cuts.sums)),
            *optional.values(),
        )

    def _new_prefill(
        self,
        plan: PrefillPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
    ) -> Launcher:
        """The launcher of a new variant of the portable prefill kernel."""
        fixed = self._fixed(step, tensors, optional)
        tile, own = prefill_constants(plan, fixed)
        given = () if plan.segmented is None else _SCRATCH_OF_PREFILL
        absent = dict.fromkeys(_SCRATCH_OF_PREFILL[len(given) :])
        return Launcher(
            prefill_kernel,
            fixed | own | absent | {"HEADS": self.layer.num_heads},
            [*_VARYING, *_VARYING_IN_PREFILL, *given, *optional],
            options=LaunchOptions(num_warps=tile.num_warps, num_stages=tile.num_stages),
            is_typed=True,
        )

    def _prefill_on_hopper(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        variant: tuple[Any, ...],
    ) -> bool:
        """Launch the Hopper kernel; False where the portable kernel serves the layer."""
        # Descriptors need aligned addresses. The variant key holds the alignment of all addresses
        # but the query's already.
        variant = (variant, tensors.query.data_ptr() % 16)
        if plan.dequantised is not None:
            if self._dequantised is None:
                from attn.kernels.dense.hopper_prefill.dequantised import DequantisedLauncher

                self._dequantised = DequantisedLauncher(self.layer, self._stored.kind)
            if self._dequantised.launch(plan, step, tensors, optional, variant):
                return True
        if self._hopper is None:
            from attn.kernels.dense.hopper_prefill.launch import HopperLauncher

            self._hopper = HopperLauncher(self.layer)
        return self._hopper.launch(plan, step, tensors, optional, variant)

    def _variant(
        self, step: TritonAttentionMetadata, tensors: DenseTensors, optional: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The variant key: everything that a variant depends on, except the plans.

        No length is part of it, and of addresses only the alignment. The type of every tensor is,
        so that launchers need not check it. The numbers of rows of query, output and LSE are
        checked here too.
        """
        rows = tensors.rows
        if rows is None:
            rows = tensors.rows = KeyRows(tensors.keys, self._stored)
        query, output, lse = tensors.query, tensors.output, tensors.lse
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
        kinds = tuple([_kind(*item) for item in optional.items()]) if optional else None
        causal, table = step.causal, step.block_table
        # One expression, without helpers: this runs in every layer of every step.
        return (
            query.dtype,
            query.get_device(),
            heads,
            size,
            query.stride(),
            output.dtype,
            output.is_cuda,
            out_heads,
            out_size,
            output.stride(),
            rows.variant,
            kinds,
            table.dtype,
            table.is_cuda,
            # Tensors are checked once for each variant, so the variant must hold what is checked.
            table.stride()[1],
            causal if isinstance(causal, bool) else None,
            step.rswa_window if step.rswa_prefix_lens is not None else None,
            step.stripe,
            step.block_size,
            step.cache_dtype,
        )

    def _fixed(
        self, step: TritonAttentionMetadata, tensors: DenseTensors, optional: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments that launchers of both portable kernels keep; checks the tensors first."""
        check_call(self.layer, step, tensors)
        form, rows = decode_form(tensors.query.device), tensors.rows
        assert rows is not None
        fixed = shared_constants(self.layer, self._stored, step, tensors, rows.words, form)
        return fixed | absent_arguments(optional)


def _optional(step: TritonAttentionMetadata, tensors: DenseTensors) -> dict[str, Any]:
    """The arguments of the dense kernels that a step may lack, by name: those that it has.

    Which these are, and their types, are a part of the variant key.
    """
    optional: dict[str, Any] = {}
    causal, lse, output_scale = step.causal, tensors.lse, tensors.output_scale
    if tensors.keys.key_scale is not None:
        optional["k_inline_ptr"] = tensors.keys.key_scale
        optional["v_inline_ptr"] = tensors.keys.value_scale
    if tensors.k_scale is not None:
        optional["k_scale_ptr"] = tensors.k_scale
    if tensors.v_scale is not None:
        optional["v_scale_ptr"] = tensors.v_scale
    if lse is not None:
        optional["lse_ptr"] = lse
    if output_scale is not None:
        optional["output_scale_ptr"] = output_scale
    if tensors.sinks is not None:
        optional["sinks_ptr"] = tensors.sinks
    if tensors.alibi_slopes is not None:
        optional["slopes_ptr"] = tensors.alibi_slopes
    if not isinstance(causal, bool):
        optional["causal_ptr"] = causal.view(torch.uint8) if causal.dtype == torch.bool else causal
    if step.rswa_prefix_lens is not None and step.rswa_window is not None:
        optional["prefix_ptr"] = step.rswa_prefix_lens
    if step.mm_ranges is not None:
        optional["ranges_ptr"] = step.mm_ranges
        optional["num_ranges"] = step.mm_ranges.shape[1]
    return optional


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


def _kind(name: str, value: torch.Tensor | int) -> tuple[Any, ...]:
    """The part of the variant key that stands for an argument which a step may lack."""
    if isinstance(value, int):
        return (name,)
    if name in _SIZED:
        return name, value.dtype, value.is_cuda, value.numel()
    if name == "lse_ptr":
        return name, value.dtype, value.is_cuda, value.shape[1:], value.stride()
    return name, value.dtype, value.is_cuda
