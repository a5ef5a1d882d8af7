"""Launches of the dense attention kernels: from a layer, a step and its tensors to records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attn.kernels.dense.checks import check_call, check_heads
from attn.kernels.dense.constants import prefill_constants, shared_constants, split_constants
from attn.kernels.dense.decode import decode_kernel
from attn.kernels.dense.prefill import prefill_kernel
from attn.kernels.dense.tensors import DenseLayer, DenseTensors, KeyRows, address, stored_as
from attn.kernels.lang.stored import decode_form
from attn.kernels.launch import FormCall, Forms, KernelForm, Repeats
from builders.checks.tensors import check_lengths
from builders.dense.record import TritonAttentionMetadata
from builders.launch.call import KernelCall
from builders.launch.launcher import Repeat
from builders.splitkv.record import HopperPlan, PrefillPlan, SplitPlan

if TYPE_CHECKING:
    from attn.kernels.dense.again import Launched, PrefillAgain
    from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher
    from attn.kernels.dense.hopper_prefill.launch import HopperLauncher
    from attn.kernels.dense.hopper_prefill.widened import WidenedLauncher


class DenseLauncher:
    """The launches of one layer. What a launch shares with those before it is prepared once.

    A *form* is a launch without its tensors. It depends on the layer, on dtypes, strides and
    alignment of the tensors, on which of them there are, and on static numbers of the plan.
    """

    tensors = DenseTensors
    """What :meth:`attend` takes, for those who import this module late: at no forward again."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: what never changes.
        """
        self.layer = layer
        self._stored = stored_as(layer.cache_dtype)
        self._splits, self._tiled = Forms(), Forms()
        self._split_repeats: Repeats[Repeat] = Repeats()
        self._prefill_repeats: Repeats[PrefillAgain] = Repeats()
        self._hopper: HopperLauncher | None = None
        self._widened: WidenedLauncher | None = None
        self._hopper_decode: HopperDecodeLauncher | None = None

    def attend(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> Launched | None:
        """Enqueue the step's launches.

        Args:
            step: the builder's record.
            tensors: of this forward.

        Returns:
            What made the only launch, where that was made before.

        Raises:
            ValueError: tensors that do not fit the layer.
        """
        split, prefill = step.split, step.prefill
        if split is None and prefill is None:
            return None
        again: Repeat | None = None
        attends: PrefillAgain | None = None
        rows, read = tensors.rows, step.read
        # Rows that are made for one forward do not come back.
        repeats = rows is not None and read.is_plain
        likeness, given = self._read(step, tensors)
        place = () if rows is None else rows.place
        if split is not None:
            of_split = (likeness, place, split.likeness)
            again = self._split_repeats.of(of_split) if repeats else None
            programs = split.groups * split.heads
            if again is None or not again.launch(programs, (*given, split.pointers.given)):
                call = self._split(step, tensors, self._varying(step, tensors), likeness)
                call.launch()
                again = None
                if repeats:
                    self._split_repeats.keep(of_split, call.repeat((*_GIVEN, "plan")))
        if prefill is not None:
            of_prefill = (likeness, place, prefill.likeness, read.likeness_of_prefill)
            attends = self._prefill_repeats.of(of_prefill) if repeats else None
            if attends is None or not attends.launch(prefill, tensors.query, given, read.lengths):
                calls = self._prefills(step, tensors, self._varying(step, tensors), likeness)
                for call in calls:
                    call.launch()
                attends = None
                if repeats and len(calls) == 1:
                    self._prefill_repeats.keep(of_prefill, _repeated_prefill(calls[0]))
        return again if prefill is None else attends if split is None else None

    def split(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with few query tokens."""
        likeness, _ = self._read(step, tensors)
        return self._split(step, tensors, self._varying(step, tensors), likeness).record

    def prefill(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> KernelCall:
        """The launch that serves the step's rows with many query tokens, after that which widens
        their keys, if any does.
        """
        likeness, _ = self._read(step, tensors)
        return self._prefills(step, tensors, self._varying(step, tensors), likeness)[-1].record

    def _split(
        self,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        likeness: tuple[Any, ...],
    ) -> FormCall:
        plan = step.split
        assert plan is not None
        varying["plan"] = plan.pointers
        if plan.hopper is not None:
            call = self._split_on_hopper(plan, step, tensors, varying, likeness)
            if call is not None:
                return call
        tile = plan.tile
        key = (plan.static, likeness)
        if not self._splits.has(key):
            fixed = self._fixed(step, tensors, varying)
            check_heads(self.layer, plan)
            fixed |= split_constants(plan, fixed["V_WIDTH"] * fixed["PLANES"])
            launch = (tile.num_warps, tile.num_stages, tile.max_registers)
            names = {"plan", *(varying.keys() & set(decode_kernel.arg_names))}
            made = KernelForm(decode_kernel, fixed, names, *launch, waits=plan.waits)
            self._splits.keep(key, made)
        form = self._splits.latest
        assert form is not None
        return form.call((plan.groups * plan.heads,), varying)

    def _prefill(
        self,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        likeness: tuple[Any, ...],
    ) -> FormCall:
        plan = step.prefill
        assert plan is not None
        varying["tile_starts_ptr"] = plan.tile_starts
        varying["query_start_ptr"] = step.query_start_loc
        varying["seq_lens_ptr"] = step.seq_lens
        varying["num_reqs"] = step.num_reqs
        if plan.hopper is not None:
            call = self._on_hopper(plan.hopper, step, tensors, varying, likeness)
            if call is not None:
                return call
        varying["first_ptr"] = step.first_positions
        key = (plan.tile, likeness)
        if not self._tiled.has(key):
            fixed = self._fixed(step, tensors, varying)
            tile, own = prefill_constants(plan.tile, fixed)
            fixed |= own
            fixed["HEADS"] = self.layer.num_heads
            launch = (tile.num_warps, tile.num_stages)
            names = varying.keys() & set(prefill_kernel.arg_names)
            self._tiled.keep(key, KernelForm(prefill_kernel, fixed, names, *launch))
        form = self._tiled.latest
        assert form is not None
        return form.call((plan.programs,), varying)

    def _prefills(
        self,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        likeness: tuple[Any, ...],
    ) -> tuple[FormCall, ...]:
        """The launches that serve rows with many query tokens: over keys widened first, or one."""
        plan = step.prefill
        if plan is not None and plan.hopper is not None and plan.hopper.widened is not None:
            if self._widened is None:
                from attn.kernels.dense.hopper_prefill.widened import WidenedLauncher

                self._widened = WidenedLauncher(self.layer, self._stored.kind)
            calls = self._widened.calls(plan.hopper, step, tensors, varying, likeness)
            if calls is not None:
                return calls
        return (self._prefill(step, tensors, varying, likeness),)

    def _on_hopper(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        likeness: tuple[Any, ...],
    ) -> FormCall | None:
        """The launch of the kernel for Hopper; None where it leaves the layer to the plain one."""
        if self._hopper is None:
            from attn.kernels.dense.hopper_prefill.launch import HopperLauncher

            self._hopper = HopperLauncher(self.layer)
        # The rest of what its descriptors need aligned is part of the likeness.
        key = (likeness, tensors.query.data_ptr() % 16, step.first_positions is None)
        if not self._hopper.knows(plan, key):
            check_call(self.layer, step, tensors)
            self._hopper.prepare(plan, step, tensors, {}, key)
        return self._hopper.call(plan, tensors, varying)

    def _split_on_hopper(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        varying: dict[str, Any],
        likeness: tuple[Any, ...],
    ) -> FormCall | None:
        """The launch of the kernel for Hopper; None where it leaves the layer to the plain one."""
        if self._hopper_decode is None:
            from attn.kernels.dense.hopper_decode.launch import HopperDecodeLauncher

            self._hopper_decode = HopperDecodeLauncher(self.layer)
        if not self._hopper_decode.knows(plan, likeness):
            check_call(self.layer, step, tensors)
            check_heads(self.layer, plan)
            constants = split_constants(plan, self.layer.head_size)
            self._hopper_decode.prepare(plan, step, tensors, constants, likeness)
        return self._hopper_decode.call(plan, tensors, varying)

    def _read(
        self, step: TritonAttentionMetadata, tensors: DenseTensors
    ) -> tuple[tuple[Any, ...], tuple[tuple[Any, ...], ...]]:
        """What is read of a step and its tensors, once for all its launches.

        Returns:
            The likeness: everything that a form depends on, no length among it, and the types and
            places of the tensors; and in turn the values of :data:`_GIVEN`.
        """
        rows = tensors.rows
        if rows is None:
            rows = tensors.rows = KeyRows(tensors.keys, self._stored)
        query, output, lse, scale = tensors.query, tensors.output, tensors.lse, tensors.output_scale
        k_scale, v_scale = tensors.k_scale, tensors.v_scale
        sinks, slopes = tensors.sinks, tensors.alibi_slopes
        read = step.read
        try:
            # A slice of a shape costs more than all of it.
            tokens, heads, size = query.shape
            out_tokens, out_heads, out_size = output.shape
        except ValueError:
            check_call(self.layer, step, tensors)
            raise
        least = tensors.num_tokens
        if tokens < least or out_tokens < least or lse is not None:
            check_lengths(least, query, output, lse)
        likeness_of_rest, rest = _NOTHING
        if not (lse is scale is k_scale is v_scale is sinks is slopes is None):
            likeness_of_rest = (
                None if lse is None else (lse.dtype, lse.is_cuda, lse.shape[1:], lse.stride()),
                *map(_kind, (scale, k_scale, v_scale, sinks, slopes)),
            )
            rest = (*map(address, (sinks, slopes, lse, scale, k_scale, v_scale)),)
        # In one piece: each layer of each step comes by.
        likeness = (
            query.dtype,
            query.device,
            heads,
            size,
            query.stride(),
            output.dtype,
            output.is_cuda,
            out_heads,
            out_size,
            output.stride(),
            rows.likeness,
            likeness_of_rest,
            read.likeness,
        )
        return likeness, ((query.data_ptr(), tokens, output.data_ptr()), read.table, rest)

    def _varying(self, step: TritonAttentionMetadata, tensors: DenseTensors) -> dict[str, Any]:
        """Arguments of both kernels that differ from call to call."""
        rows = tensors.rows
        assert rows is not None
        keys, output, ranges = tensors.keys, tensors.output, step.mm_ranges
        causal: Any = step.causal
        if isinstance(causal, bool):
            causal = None
        elif causal.dtype == torch.bool:
            causal = causal.view(torch.uint8)
        return {
            "query_ptr": tensors.query,
            "key_ptr": rows.words[0],
            "value_ptr": rows.words[1],
            "k_inline_ptr": keys.key_scale,
            "v_inline_ptr": keys.value_scale,
            "k_scale_ptr": tensors.k_scale,
            "v_scale_ptr": tensors.v_scale,
            "out_ptr": output if tensors.output_scale is None else output.view(torch.uint8),
            "lse_ptr": tensors.lse,
            "output_scale_ptr": tensors.output_scale,
            "table_ptr": step.block_table,
            "causal_ptr": causal,
            "prefix_ptr": step.rswa_prefix_lens,
            "ranges_ptr": ranges,
            "sinks_ptr": tensors.sinks,
            "slopes_ptr": tensors.alibi_slopes,
            "table_row": step.block_table.stride()[0],
            "num_ranges": 0 if ranges is None else ranges.shape[1],
        }

    def _fixed(
        self, step: TritonAttentionMetadata, tensors: DenseTensors, varying: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of both kernels that a form holds; the tensors are checked on the way."""
        check_call(self.layer, step, tensors)
        form = decode_form(tensors.query.device)
        return shared_constants(self.layer, self._stored, step, tensors, varying, form)


def split_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with few query tokens, prepared anew."""
    return DenseLauncher(layer).split(step, tensors)


def prefill_call(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> KernelCall:
    """The launch that serves the step's rows with many query tokens, prepared anew."""
    return DenseLauncher(layer).prefill(step, tensors)


_GIVEN = (
    "query_ptr",
    "tokens",
    "out_ptr",
    "table_row",
    "table_ptr",
    "sinks_ptr",
    "slopes_ptr",
    "lse_ptr",
    "output_scale_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
)
"""What launches are given that are made again."""
_LENGTHS = ("query_start_ptr", "seq_lens_ptr", "num_reqs")
"""Likewise, of prefills."""
_NOTHING: tuple[tuple[Any, ...], tuple[int | None, ...]] = ((), (None,) * 6)
"""What is read of tensors that a forward mostly has none of."""


class _PlainPrefill:
    """Launches of the plain prefill kernel made again."""

    def __init__(self, repeat: Repeat) -> None:
        """
        Args:
            repeat: of :data:`_GIVEN`, the plan's tiles and the lengths.
        """
        self._repeat = repeat

    def launch(
        self,
        plan: PrefillPlan,
        query: torch.Tensor,
        given: tuple[tuple[Any, ...], ...],
        lengths: tuple[Any, ...],
    ) -> bool:
        """See :class:`attn.kernels.dense.hopper_prefill.launch.RepeatedPrefill`."""
        starts = (plan.tile_starts.data_ptr(),)
        return self._repeat.launch(plan.programs, (*given, lengths, starts))


def _repeated_prefill(call: FormCall) -> PrefillAgain | None:
    """For prefills like one that was launched."""
    if call.form.kernel is not prefill_kernel:
        from attn.kernels.dense.hopper_prefill.launch import repeated_prefill

        return repeated_prefill(call, (*_GIVEN, *_LENGTHS))
    repeat = call.repeat((*_GIVEN, *_LENGTHS, "tile_starts_ptr"))
    return None if repeat is None else _PlainPrefill(repeat)


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Of one that is read by a pointer alone."""
    return None if tensor is None else (tensor.dtype, tensor.is_cuda, tensor.numel())
