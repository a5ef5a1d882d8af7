"""Launches of the Hopper prefill kernel, and why it is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attn.kernels.dense.checks import check_call
from attn.kernels.dense.constants import absent_arguments, step_constants
from attn.kernels.dense.hopper_launch import COLUMNS, Descriptors, HopperVariants, asked
from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.kernels.lang.memory import alignment
from attn.kernels.lang.stored import DEQUANTISED, E4M3, E5M2, NATIVE
from builders.dense.choice import (
    DENSE_OPTION,
    LATENT_OPTION,
    prefill_kernel_of,
)
from builders.dense.dequantised import dequantised_value_type
from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launcher
from builders.splitkv.record import TILE_POINTERS, HopperPlan
from builders.splitkv.tiles import HopperTile
from specs.devices import DeviceKind
from specs.dtypes import CacheDType
from specs.engine import PrefillKernel

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata


def tile_of(
    layer: DenseLayer,
    plan: HopperPlan,
    step: TritonAttentionMetadata,
    tensors: DenseTensors,
    dequantised: bool = False,
) -> HopperTile | None:
    """The tile with which the prefill kernel serves a step of a layer; None where it does not.

    The builder has asked the same question with what it knew; here the tensors are known too.
    ``dequantised`` is True for keys and values of the workspace of a quantised cache.

    Raises:
        ValueError: the kernel is asked for by name and does not serve the step, or the plan is for
            tiles of another size.
    """
    shape, block_size, asks = asked(layer, step, tensors)
    asks = replace(
        asks,
        dequantised=dequantised,
        batch_invariant=plan.segmented is not None,
        kv_tile=None if plan.segmented is None else plan.segmented.kv_tile,
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


_queries = Descriptors()
"""Descriptors of queries, shared by all layers: in a step their queries have one shape, and often
one address."""


class HopperLauncher(HopperVariants[HopperPlan]):
    """The prefill launches of one layer."""

    def __init__(self, layer: DenseLayer, kind: int | None = None) -> None:
        """
        Args:
            layer: what never changes.
            kind: how elements are stored, one of :mod:`attn.kernels.lang.stored`'s kinds; None
                for that of the layer's cache.
        """
        super().__init__(layer)
        self._kind = _kind_of(layer.cache_dtype) if kind is None else kind
        self._is_quantised = layer.cache_dtype.is_quantized

    def launcher_of(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> Launcher | None:
        """The launcher that :meth:`launch` takes; None where the portable kernel serves the step.

        Arguments and errors are those of :meth:`launch`.
        """
        cuts = plan.segmented
        key = (plan.query_tile, plan.is_required, None if cuts is None else cuts.static, key)
        return self._variants.of(key, self._new_launcher, plan, step, tensors, optional)

    def launch(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> bool:
        """See the base class."""
        launcher = self.launcher_of(plan, step, tensors, optional, key)
        if launcher is None:
            return False
        keys, table, fixed = tensors.keys, step.block_table, launcher.arguments
        cuts = plan.segmented
        rows: tuple[Any, ...]
        if self._is_quantised:
            # Producers load these rows themselves, since they convert them.
            assert tensors.rows is not None
            rows = tensors.rows.words
        else:
            rows = self._described(keys.key, keys.value, fixed["RUN"], tensors)
            columns = fixed["EXTRA"]
            if 0 < columns < COLUMNS:
                more = self._described(keys.key, keys.value, fixed["RUN"], tensors, columns)
                box = (*_query_box(fixed)[:2], columns)
                rows += (_queries.of("q_extra", tensors.query, box), *more)
        launcher(
            (plan.programs,),
            _queries.of("q", tensors.query, _query_box(fixed)),
            *rows,
            plan.pointers,
            plan.programs,
            tensors.written,
            table,
            table.stride()[0],
            step.query_start_loc,
            step.seq_lens,
            step.num_reqs,
            *(() if cuts is None else (cuts.states, cuts.sums)),
            *optional.values(),
        )
        return True

    def _new_launcher(
        self,
        plan: HopperPlan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
    ) -> Launcher | None:
        check_call(self._layer, step, tensors)
        tile = tile_of(self._layer, plan, step, tensors, self._kind == DEQUANTISED)
        if tile is None:
            return None
        layer, cuts = self._layer, plan.segmented
        key, value, of_values = tensors.keys.key, tensors.keys.value, tensors.keys.value.dtype
        if self._is_quantised:
            of_values = dequantised_value_type(layer.cache_dtype, tensors.query.dtype)
        fixed = step_constants(layer, step, tensors) | {
            "HEADS": layer.num_heads // tile.packed,
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
            "HELD": cuts is None and _is_held(tile),
            "SEGMENT_UNIT": 0 if cuts is None else cuts.segment_unit,
            "SEGMENTS_PER_GROUP": 0 if cuts is None else cuts.segment_group,
            "SUMS": 0 if cuts is None else cuts.sums_apart,
            "TOTALS_STORED": tile.stores_totals,
        }
        if cuts is None:
            fixed |= dict.fromkeys(_SCRATCH)
        # Strides in words of four bytes.
        words = [stride // 4 for stride in (*key.stride()[:3], *value.stride()[:3])]
        names = ("k_block", "k_token", "k_head", "v_block", "v_token", "v_head")
        fixed |= dict(zip(names, words, strict=True))
        rows: tuple[str, ...] = ("k_desc", "v_desc")
        if self._is_quantised:
            rows = ("key_ptr", "value_ptr")
        elif 0 < tile.extra < COLUMNS:
            rows += _EXTRA
        fixed |= dict.fromkeys({*_ROWS, *_EXTRA} - {*rows})
        fixed |= absent_arguments(optional, hopper_prefill_kernel.arg_names)
        return Launcher(
            hopper_prefill_kernel,
            fixed,
            ["q_desc", *rows, *_VARYING, *(() if cuts is None else _SCRATCH), *optional],
            groups={"plan": TILE_POINTERS},
            options=LaunchOptions(waits=True, few_registers=True),
            is_typed=True,
        )


def _query_box(fixed: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows of a warp group's product: tokens of the heads that share a tile."""
    packed: int = fixed["PACKED"]
    return 64 // packed, packed, COLUMNS


def _is_held(tile: HopperTile) -> bool:
    """Whether the softmax is computed under the output's product, which wide heads do without."""
    return tile.width + tile.extra <= 96


def _kind_of(cache_dtype: CacheDType) -> int:
    """How the kernel reads the cache."""
    if not cache_dtype.is_quantized:
        return NATIVE
    return E5M2 if cache_dtype is CacheDType.FP8_E5M2 else E4M3


_ROWS = ("k_desc", "v_desc", "key_ptr", "value_ptr")
"""Descriptors of keys and values, or pointers to them."""
_EXTRA = ("q_extra_desc", "k_extra_desc", "v_extra_desc")
"""Descriptors of the columns of a second product, where they are fewer than a box has."""
_SCRATCH = ("states_ptr", "sums_ptr")
"""Arguments of a launch whose plan cuts keys into segments."""
_VARYING = (
    "plan",
    "programs",
    "out_ptr",
    "table_ptr",
    "table_row",
    "query_start_ptr",
    "seq_lens_ptr",
    "num_reqs",
)
"""Arguments that every launch is given, besides descriptors and rows."""
