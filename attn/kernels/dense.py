"""Launches of the dense attention kernels: from a layer, a step and its tensors to records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from attn.kernels.checks import check_call, check_heads, check_lengths
from attn.kernels.decode import decode_kernel
from attn.kernels.launch import FormCall, Forms, KernelForm, Repeats
from attn.kernels.numerics import INTERPRETED
from attn.kernels.prefill import prefill_kernel
from attn.kernels.stored import E4M3, E5M2, INT4, INT8, NATIVE, PLAIN, PTX, PTX_SM89
from builders.dense_step import TritonAttentionMetadata
from builders.fast_launch import Repeat
from builders.kernel_calls import KernelCall
from builders.paging import Stripe
from builders.split_plan import (
    HopperPlan,
    PrefillPlan,
    SplitPlan,
    area_of,
)
from builders.tiles import (
    PrefillTile,
    power_of_two,
)
from specs.dtypes import CacheDType, KVQuantMode
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.again import Launched, PrefillAgain
    from attn.kernels.hopper.decode_launch import HopperDecodeLauncher
    from attn.kernels.hopper.launch import HopperLauncher
    from attn.kernels.hopper.widened import WidenedLauncher

FINISH_CELLS = 1024
"""Cells of a state that the program which finishes a row folds at a time."""


@dataclass(frozen=True)
class DenseLayer:
    """What never changes in a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    cache_dtype: CacheDType
    causal: bool
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    chunk_lookback: int = 0
    logits_soft_cap: float | None = None
    use_alibi_sqrt: bool = False
    clamps_ranges: bool = False
    """Multimodal ranges reach no further back than the window."""


@dataclass(slots=True)
class DenseTensors:
    """The tensors of one forward."""

    query: torch.Tensor
    """``[T, H, D]``, last dimension contiguous."""
    keys: KVViews
    """The cache, or an encoder's ``[T, Hk, D]`` rows as key and value."""
    output: torch.Tensor
    """``[T, H, Dv]``, last dimension contiguous; fp8 with ``output_scale``."""
    k_scale: torch.Tensor | None
    """fp32 scalar or ``[Hk]`` of an fp8 cache; of others nothing is read, and None is cheaper."""
    v_scale: torch.Tensor | None
    lse: torch.Tensor | None = None
    """``[T, H]`` fp32, last dimension contiguous."""
    output_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    rows: KeyRows | None = None
    """What a forward before made of ``keys``; made here where it is None."""
    num_tokens: int = 0
    """Rows that there must be of query and output."""


class KeyRows:
    """Keys and values as kernels read them, and what a form depends on of them."""

    def __init__(self, keys: KVViews, stored: _Stored) -> None:
        """
        Args:
            keys: neither of which moves.
            stored: how they are read.
        """
        key, value, inline = keys.key, keys.value, keys.key_scale
        self.words = stored.words(key), stored.words(value)
        self.place = key.data_ptr(), value.data_ptr(), len(key), *map(_address, keys[2:])
        """All that a launch depends on beside the likeness."""
        self.likeness = (
            key.dtype,
            value.dtype,
            key.shape[1:],
            value.shape[1:],
            key.stride(),
            value.stride(),
            (key.data_ptr() | value.data_ptr()) % 64,
            None if inline is None else inline.stride(),
        )


@dataclass(frozen=True)
class _Stored:
    """How rows of a cache are read."""

    kind: int
    planes: int
    inline: bool

    def words(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the words that kernels load."""
        return rows if self.kind == NATIVE else rows.view(torch.int16)

    def width(self, size: int) -> tuple[int, int]:
        """Words of a plane of ``size`` elements: padded to a power of two, and used."""
        used = size // self.planes
        return max(power_of_two(used), 16), used


def _stored(cache_dtype: CacheDType) -> _Stored:
    if cache_dtype is CacheDType.INT4_PER_TOKEN_HEAD:
        return _Stored(INT4, 4, True)
    if cache_dtype is CacheDType.INT8_PER_TOKEN_HEAD:
        return _Stored(INT8, 2, True)
    if cache_dtype is CacheDType.FP8_PER_TOKEN_HEAD:
        return _Stored(E4M3, 2, True)
    if cache_dtype is CacheDType.FP8_E5M2:
        return _Stored(E5M2, 2, False)
    return _Stored(
        E4M3 if cache_dtype.is_quantized else NATIVE, 2 if cache_dtype.is_quantized else 1, False
    )


_TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def _compute_type(model: torch.dtype, stored: _Stored, element: torch.dtype) -> tuple[Any, bool]:
    """Type of the products' operands, and whether the query must be brought into its range."""
    if model == torch.float32:
        return tl.float32, False
    if stored.kind != NATIVE or element == torch.float16:
        return tl.float16, model == torch.bfloat16
    # A 16-bit type holds neither the other's range nor its precision.
    return _TRITON_TYPES[model] if element == model else tl.float32, False


@cache
def decode_form(device: torch.device) -> tuple[int, bool]:
    """How stored 8-bit rows are decoded on a device, and whether it has e4m3 instructions."""
    if INTERPRETED.value or device.type != "cuda" or torch.version.hip is not None:
        return PLAIN, False
    has_e4m3 = torch.cuda.get_device_capability(device) >= (8, 9)
    return PTX_SM89 if has_e4m3 else PTX, has_e4m3


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
        self._stored = _stored(layer.cache_dtype)
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
            fixed |= _split_constants(plan, fixed["V_WIDTH"] * fixed["PLANES"])
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
            tile, own = _prefill_constants(plan.tile, fixed)
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
                from attn.kernels.hopper.widened import WidenedLauncher

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
            from attn.kernels.hopper.launch import HopperLauncher

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
            from attn.kernels.hopper.decode_launch import HopperDecodeLauncher

            self._hopper_decode = HopperDecodeLauncher(self.layer)
        if not self._hopper_decode.knows(plan, likeness):
            check_call(self.layer, step, tensors)
            check_heads(self.layer, plan)
            constants = _split_constants(plan, self.layer.head_size)
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
            rest = (*map(_address, (sinks, slopes, lse, scale, k_scale, v_scale)),)
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
        stripe = step.stripe or Stripe(1, 0, 1)
        layer, stored = self.layer, self._stored
        rswa = step.rswa_prefix_lens is not None and step.rswa_window is not None
        window = step.rswa_window if rswa else layer.sliding_window
        chunk, cap = layer.attention_chunk_size, layer.logits_soft_cap
        causal = step.causal
        k_width, k_used = stored.width(layer.head_size)
        v_width, v_used = stored.width(layer.head_size_v)
        compute, guard = _compute_type(tensors.query.dtype, stored, tensors.keys.key.dtype)
        decode, hardware = decode_form(tensors.query.device)
        return _strides(tensors, varying["key_ptr"], varying["value_ptr"]) | {
            "scale_head": 1 if tensors.k_scale is not None and tensors.k_scale.numel() > 1 else 0,
            "scale": layer.scale,
            "soft_cap": 1.0 if cap is None else float(cap),
            "window": window or 0,
            "chunk": chunk or 1,
            "lookback": layer.chunk_lookback,
            "dcp_size": stripe.size,
            "dcp_rank": stripe.rank,
            "dcp_interleave": stripe.interleave,
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "K_SIZE": layer.head_size,
            "V_SIZE": layer.head_size_v,
            "K_WIDTH": k_width,
            "K_USED": k_used,
            "V_WIDTH": v_width,
            "V_USED": v_used,
            "KIND": stored.kind,
            "PLANES": stored.planes,
            "INLINE": stored.inline,
            "DECODE": decode,
            "COMPUTE": compute,
            "GUARD": guard,
            "PER_TENSOR": layer.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR,
            "CAUSAL": 0 if not layer.causal or causal is False else 1 if causal is True else 2,
            "WINDOW": window is not None and not rswa,
            "CHUNK": chunk is not None,
            "RSWA": rswa,
            "RANGES": step.mm_ranges is not None,
            "CLAMP": layer.clamps_ranges and layer.sliding_window is not None,
            "DCP": step.stripe is not None,
            "SOFT_CAP": cap is not None,
            "ALIBI": 0 if tensors.alibi_slopes is None else 2 if layer.use_alibi_sqrt else 1,
            "SINKS": tensors.sinks is not None,
            "SIMPLE": cap is None
            and tensors.alibi_slopes is None
            and not stored.inline
            and layer.scale > 0,
            "FP8_OUT": tensors.output_scale is not None,
            "LSE": tensors.lse is not None,
            "HARDWARE_E4M3": hardware,
        }


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
        """See :class:`attn.kernels.hopper.launch.RepeatedPrefill`."""
        starts = (plan.tile_starts.data_ptr(),)
        return self._repeat.launch(plan.programs, (*given, lengths, starts))


def _repeated_prefill(call: FormCall) -> PrefillAgain | None:
    """For prefills like one that was launched."""
    if call.form.kernel is not prefill_kernel:
        from attn.kernels.hopper.launch import repeated_prefill

        return repeated_prefill(call, (*_GIVEN, *_LENGTHS))
    repeat = call.repeat((*_GIVEN, *_LENGTHS, "tile_starts_ptr"))
    return None if repeat is None else _PlainPrefill(repeat)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Of one that is read by a pointer alone."""
    return None if tensor is None else (tensor.dtype, tensor.is_cuda, tensor.numel())


def _strides(tensors: DenseTensors, k_words: torch.Tensor, v_words: torch.Tensor) -> dict[str, Any]:
    """Strides and alignment of rows, and the block size, 0 for an encoder's."""
    query, output, lse, inline = tensors.query, tensors.output, tensors.lse, tensors.keys.key_scale
    paged = k_words.dim() == 4
    k_strides = k_words.stride()[:3] if paged else (0, *k_words.stride()[:2])
    v_strides = v_words.stride()[:3] if paged else (0, *v_words.stride()[:2])
    starts = (rows.data_ptr() // rows.element_size() for rows in (k_words, v_words))
    named = {"k": k_strides, "v": v_strides, "s": (0, 0, 0) if inline is None else inline.stride()}
    arguments = {
        f"{name}_{axis}": stride
        for name, strides in named.items()
        for axis, stride in zip(("block", "token", "head"), strides, strict=True)
    }
    return arguments | {
        "query_token": query.stride(0),
        "query_head": query.stride(1),
        "out_token": output.stride(0),
        "out_head": output.stride(1),
        "lse_token": 0 if lse is None else lse.stride(0),
        "BLOCK_SIZE": k_words.shape[1] if paged else 0,
        "SAME_ROWS": k_strides == v_strides,
        # Largest power of two, up to 16 words, that every row starts at a multiple of.
        "ALIGN": math.gcd(16, *k_strides, *v_strides, *starts),
    }


def _split_constants(plan: SplitPlan, width: int) -> dict[str, Any]:
    """The split-KV kernel's own constants; ``width`` is that of a state's row."""
    tile = plan.tile
    finish_rows = power_of_two(tile.tile_heads * tile.query_tokens)
    return {
        "groups": plan.groups,
        "WAITS": plan.waits,
        "HEADS": plan.heads,
        "HEAD_LOOPS": plan.head_loops,
        "HEAD_TILES": tile.head_tiles,
        "TILE_HEADS": tile.tile_heads,
        "QUERY_TOKENS": tile.query_tokens,
        "ROWS": tile.rows,
        "SLOTS": plan.slots,
        "BUNDLES": plan.bundles,
        "AREA": area_of(plan.slots, plan.bundles, plan.head_loops),
        "KV_TILE": tile.kv_tile,
        "SEGMENT_UNIT": tile.segment_unit,
        "FREE": plan.is_free,
        "FINISH_ROWS": finish_rows,
        "FINISH_WIDTH": max(16, min(width, FINISH_CELLS // finish_rows)),
        "STAGES": tile.num_stages,
    }


def _prefill_constants(
    tile: PrefillTile, fixed: Mapping[str, Any]
) -> tuple[PrefillTile, dict[str, Any]]:
    """The prefill kernel's own constants, after those of both kernels; and the launch's tile."""
    sizes = (fixed["K_SIZE"], fixed["V_SIZE"], fixed["KIND"])
    apart: dict[str, Any] = {"REST": 0}
    if sizes == (192, 128, NATIVE) and fixed["COMPUTE"] != tl.float32 and tile.pair_stages:
        tile, apart = tile.for_pair, {"K_WIDTH": 128, "K_USED": 128, "REST": 64}
    return tile, apart | {
        "QUERY_TILE": tile.query_tile,
        "REQ_STEPS": 20,
        "KV_TILE": tile.kv_tile,
        "STAGES": tile.num_stages,
    }
