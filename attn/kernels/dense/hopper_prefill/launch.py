"""Launches of the Hopper prefill kernel, and why it is not taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.kernels.lang.stored import E4M3, E5M2, NATIVE
from attn.kernels.launch import FormCall, Forms, KernelForm, alignment
from builders.dense.choice import (
    DENSE_OPTION,
    LATENT_OPTION,
    LayerAsks,
    prefill_kernel_of,
)
from builders.dense.widened import widened_value_type
from builders.launch.launcher import Repeat
from builders.splitkv.record import (
    HopperPlan,
    PrefillPlan,
    SplitPlan,
)
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
)
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import PrefillKernel

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata

Plan = TypeVar("Plan", HopperPlan, SplitPlan)
COLUMNS = 64
"""Columns of a box: the 128 bytes of a swizzled row."""
MOST_DESCRIPTORS = 64
"""Kept for calls with tensors at the same addresses."""


def tile_of(
    layer: DenseLayer, plan: HopperPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> HopperTile | None:
    """The tile with which the prefill kernel serves a step of a layer; None where it does not.

    The builder has asked the same of what it knew; here all is known.

    Raises:
        ValueError: it does not, though it is asked for by name; likewise a plan for a layer of
            other tiles.
    """
    shape, block_size, asks = asked(layer, step, tensors)
    asks = replace(
        asks,
        alignments=(("query", alignment(tensors.query)), *asks.alignments),
    )
    wanted = PrefillKernel.HOPPER if plan.is_required else PrefillKernel.AUTO
    # Expanded latent keys have no pages, and are wider than their values.
    is_latent = not block_size and shape.head_size != shape.head_size_v
    option = LATENT_OPTION if is_latent else DENSE_OPTION
    tile, _ = prefill_kernel_of(shape, DeviceKind.SM90, block_size, asks, wanted, option)
    if tile is None or tile.query_tile == plan.query_tile:
        return tile
    if plan.is_required:
        raise ValueError(
            f"the builder's plan is for tiles of {plan.query_tile} query tokens, the layer and its "
            f"cache for {tile.query_tile}"
        )
    return None


def asked(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> tuple[DenseShape, int, LayerAsks]:
    """What both kernels depend on: the layer's shape, tokens of a page, and what else is asked."""
    query, key, value = tensors.query, tensors.keys.key, tensors.keys.value
    shape = DenseShape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.head_size_v,
        query.element_size(),
        key.element_size() * 8 // layer.cache_dtype.packing,
    )
    asks = LayerAsks(
        dcp=step.stripe is not None,
        rswa=step.rswa_prefix_lens is not None,
        alibi=tensors.alibi_slopes is not None,
        positions=step.first_positions is not None and not _sees_all(layer, step),
        scale=layer.scale,
        query=DType.parse(query.dtype),
        cache_dtype=layer.cache_dtype,
        alignments=(("key", alignment(key)), ("value", alignment(value))),
    )
    return shape, key.shape[1] if key.dim() == 4 else 0, asks


def _sees_all(layer: DenseLayer, step: TritonAttentionMetadata) -> bool:
    """Every query sees every key, wherever it stands."""
    is_local = layer.sliding_window is not None or layer.attention_chunk_size is not None
    return not is_local and (step.causal is False or not layer.causal)


def is_planned(
    found: HopperDecodeTile | None, planned: HopperDecodeTile, is_required: bool
) -> bool:
    """The tile of a layer is that of the plan.

    Raises:
        ValueError: it is another one, and the kernel is asked for by name.
    """
    if found is not None and found != planned and is_required:
        raise ValueError(
            f"the builder's plan is for {planned}, the layer and its cache for {found}"
        )
    return found == planned


class Descriptors:
    """Descriptors of tensors that come back at the same addresses; they hold no tensor."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], TensorDescriptor] = {}
        self._latest: dict[str, tuple[tuple[Any, ...], TensorDescriptor]] = {}

    def of(self, name: str, rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
        """A descriptor of rows in boxes of that shape, for the argument of that name."""
        key = (rows.data_ptr(), rows.dtype, rows.shape, rows.stride(), box)
        latest = self._latest.get(name)
        # Comparing costs less than a hash.
        if latest is not None and latest[0] == key:
            return latest[1]
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_DESCRIPTORS:
                self._known.clear()
            found = self._known[key] = _describe(rows, box)
        self._latest[name] = (key, found)
        return found


_queries = Descriptors()
"""Of all layers: in a step their queries have one shape, and often one place."""


class HopperForms(ABC, Generic[Plan]):
    """The launches of one of the kernels for Hopper, in one layer."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: what never changes.
        """
        self._layer = layer
        self._forms = Forms()
        self._descriptors = Descriptors()

    def knows(self, plan: Plan, key: tuple[Any, ...]) -> bool:
        """Whether launches like this one were prepared, or left to the plain kernel, before.

        Args:
            plan: the builder's.
            key: everything that a form, or leaving the step, depends on beside the plan.
        """
        return self._forms.has((self._static(plan), key))

    def prepare(
        self,
        plan: Plan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> None:
        """Make ready for launches like this one, or leave them to the plain kernel.

        Args:
            plan: the builder's.
            step: the builder's record.
            tensors: of this forward.
            constants: what the plain kernel is given of the plan.
            key: as in :meth:`knows`.

        Raises:
            ValueError: the kernel does not serve this and is asked for by name; likewise a plan
                for a layer of another shape.
        """
        form = self._new_form(plan, step, tensors, constants)
        self._forms.keep((self._static(plan), key), form)

    def call(self, plan: Plan, tensors: DenseTensors, varying: dict[str, Any]) -> FormCall | None:
        """The launch that was last asked after, or prepared; None where it is the plain kernel's.

        Args:
            plan: the builder's.
            tensors: of this forward.
            varying: values of what differs from call to call, by the twin's names; this kernel's
                own are added.
        """
        form = self._forms.latest
        if form is None:
            return None
        programs = self._add_varying(plan, form.arguments, tensors, varying)
        return form.call((programs,), varying)

    @abstractmethod
    def _static(self, plan: Plan) -> tuple[Any, ...]:
        """What a form depends on in a plan."""

    @abstractmethod
    def _new_form(
        self,
        plan: Plan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
    ) -> KernelForm | None:
        """What launches like this one share; None leaves them to the plain kernel."""

    @abstractmethod
    def _add_varying(
        self,
        plan: Plan,
        fixed: Mapping[str, Any],
        tensors: DenseTensors,
        varying: dict[str, Any],
    ) -> int:
        """Add this kernel's own arguments to those that a form holds; its programs."""


class RepeatedPrefill:
    """Prefill launches made again: the query's descriptor is another one where the query moved."""

    def __init__(self, repeat: Repeat, box: tuple[int, ...]) -> None:
        """
        Args:
            repeat: as :func:`repeated_prefill` makes it.
            box: of the query's descriptor.
        """
        self._repeat = repeat
        self._box = box
        self._latest: tuple[int, int, tuple[Any, ...]] = (0, 0, ())
        """Address and tokens of a query, and its descriptor: one piece, for several threads."""

    def launch(
        self,
        plan: PrefillPlan,
        query: torch.Tensor,
        given: tuple[tuple[Any, ...], ...],
        lengths: tuple[Any, ...],
    ) -> bool:
        """As :meth:`builders.launch.launcher.Repeat.launch`.

        Args:
            plan: with one for this kernel.
            query: of this forward.
            given: the query's address, its tokens and the output's address; then what else names
                were given of but for the lengths.
            lengths: of the step.
        """
        hopper, (address, tokens, _) = plan.hopper, given[0]
        assert hopper is not None
        latest_address, latest_tokens, own = self._latest
        if latest_address != address or latest_tokens != tokens:
            if address % 16:
                return False
            described = _queries.of("q", query, self._box)
            words = self._repeat.encoded("q_desc", described)
            if words is None:
                return False
            own = (words,)
            self._latest = address, tokens, own
        return self._repeat.launch(hopper.programs, (*given, lengths, hopper.given, own))


class HopperLauncher(HopperForms[HopperPlan]):
    """The prefill launches of one layer."""

    def __init__(self, layer: DenseLayer, kind: int | None = None) -> None:
        """
        Args:
            layer: what never changes.
            kind: how elements are stored, as in :mod:`attn.kernels.lang.stored`; None as the
            layer's
                cache does.
        """
        super().__init__(layer)
        self._kind = _kind_of(layer.cache_dtype) if kind is None else kind

    def _static(self, plan: HopperPlan) -> tuple[Any, ...]:
        return plan.query_tile, plan.is_required

    def _add_varying(
        self,
        plan: HopperPlan,
        fixed: Mapping[str, Any],
        tensors: DenseTensors,
        varying: dict[str, Any],
    ) -> int:
        keys, of = tensors.keys, self._descriptors.of
        varying["q_desc"] = _queries.of("q", tensors.query, _query_box(fixed))
        if not self._layer.cache_dtype.is_quantized:
            page = (1, fixed["RUN"], 1, COLUMNS)
            varying["k_desc"] = of("k", keys.key, page)
            varying["v_desc"] = of("v", keys.value, page)
        varying["tile_starts_ptr"] = plan.tile_starts
        varying["num_tiles_ptr"] = plan.num_tiles
        varying["counter_ptr"] = plan.counter
        varying["programs"] = plan.programs
        return plan.programs

    def _new_form(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        constants: Mapping[str, Any],
    ) -> KernelForm | None:
        tile = tile_of(self._layer, plan, step, tensors)
        if tile is None:
            return None
        layer, output, lse = self._layer, tensors.output, tensors.lse
        cap, chunk, causal = layer.logits_soft_cap, layer.attention_chunk_size, step.causal
        key, value, of_values = tensors.keys.key, tensors.keys.value, tensors.keys.value.dtype
        narrow = layer.cache_dtype.is_quantized
        if narrow:
            of_values = widened_value_type(layer.cache_dtype, tensors.query.dtype)
        fixed: dict[str, Any] = {
            "out_token": output.stride(0),
            "out_head": output.stride(1),
            "lse_token": 0 if lse is None else lse.stride(0),
            "scale": layer.scale,
            "soft_cap": 1.0 if cap is None else float(cap),
            "window": layer.sliding_window or 0,
            "chunk": chunk or 1,
            "lookback": layer.chunk_lookback,
            "scale_head": 1 if tensors.k_scale is not None and tensors.k_scale.numel() > 1 else 0,
            "HEADS": layer.num_heads // tile.packed,
            "GROUP": layer.num_heads // layer.num_kv_heads,
            "PACKED": tile.packed,
            "WARP_GROUPS": tile.warp_groups,
            "KV_TILE": tile.kv_tile,
            "SIZE": layer.head_size_v,
            "WIDTH": tile.width,
            "EXTRA": tile.extra,
            "BLOCK_SIZE": key.shape[1] if key.dim() == 4 else 0,
            "RUN": tile.run,
            "Q_STAGES": tile.query_stages,
            "STAGES": tile.num_stages,
            "KIND": self._kind,
            "FP16_VALUES": of_values == torch.float16,
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
        # Of four bytes.
        words = [stride // 4 for stride in (*key.stride()[:3], *value.stride()[:3])]
        names = ("k_block", "k_token", "k_head", "v_block", "v_token", "v_head")
        fixed |= dict(zip(names, words, strict=True))
        rows, descriptors = ("key_ptr", "value_ptr"), ("k_desc", "v_desc")
        fixed |= dict.fromkeys(descriptors if narrow else rows)
        varying = (*_VARYING, *(rows if narrow else descriptors))
        return KernelForm(hopper_prefill_kernel, fixed, varying, waits=True, few_registers=True)


def repeated_prefill(call: FormCall, given: tuple[str, ...]) -> RepeatedPrefill | None:
    """For prefills like one that was launched; None where they stay as they are.

    Args:
        call: of this kernel.
        given: names of what :meth:`RepeatedPrefill.launch` takes.
    """
    tiles = ("tile_starts_ptr", "num_tiles_ptr", "counter_ptr")
    repeat = call.repeat((*given, *tiles, "programs", "q_desc"))
    return None if repeat is None else RepeatedPrefill(repeat, _query_box(call.form.arguments))


def _query_box(fixed: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows of a warp group's product: tokens of the heads that share a tile."""
    packed: int = fixed["PACKED"]
    return 64 // packed, packed, COLUMNS


def _kind_of(cache_dtype: CacheDType) -> int:
    """How the kernel reads the cache."""
    if not cache_dtype.is_quantized:
        return NATIVE
    return E5M2 if cache_dtype is CacheDType.FP8_E5M2 else E4M3


_VARYING = (
    "q_desc",
    "tile_starts_ptr",
    "num_tiles_ptr",
    "counter_ptr",
    "programs",
    "out_ptr",
    "lse_ptr",
    "output_scale_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
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
        # Bytes are bytes to TMA.
        self.dtype = torch.uint8 if rows.element_size() == 1 else rows.dtype
        self._address = rows.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _describe(rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor whose boxes are swizzled as products want them; outside they are zeros.

    Rows without pages are one page.
    """
    if rows.dim() < len(box):
        rows = rows[None]
    layout = _layout(box, rows.element_size())
    return TensorDescriptor(_Address(rows), [*rows.shape], [*rows.stride()], [*box], layout)


@cache
def _layout(box: tuple[int, ...], itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(box[-1] * itemsize, 8 * itemsize, len(box))
