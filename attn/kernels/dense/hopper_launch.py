"""Code that the launches of several Hopper kernels share.

It asks the builder's choice whether a kernel serves a layer, describes tensors for TMA, and keeps
the launchers of one kernel in one layer, one for each variant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn.kernels.lang.memory import alignment
from builders.dense.choice import LayerRequirements
from builders.launch.launcher import Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import HopperPlan, SplitPlan
from builders.splitkv.tiles import DenseShape, HopperDecodeTile
from specs.dtypes import DType

if TYPE_CHECKING:
    from attn.kernels.dense.tensors import DenseLayer, DenseTensors
    from builders.dense.record import TritonAttentionMetadata

Plan = TypeVar("Plan", HopperPlan, SplitPlan)
COLUMNS = 64
"""Columns of a TMA box: 64 16-bit words are the 128 bytes of a swizzled row."""
MOST_DESCRIPTORS = 64
"""Most descriptors that are kept for later launches with tensors at the same addresses."""


def asked(
    layer: DenseLayer, step: TritonAttentionMetadata, tensors: DenseTensors
) -> tuple[DenseShape, int, LayerRequirements]:
    """The question that decides whether a Hopper kernel serves a layer.

    Returns:
        The layer's shape; tokens of a page, 0 without pages; and what else the layer asks for.
    """
    query, key, value = tensors.query, tensors.keys.key, tensors.keys.value
    shape = DenseShape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.head_size_v,
        query.element_size(),
        key.element_size() * 8 // layer.cache_dtype.packing,
    )
    asks = LayerRequirements(
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
    """Whether every query sees every key, whatever its position."""
    is_local = layer.sliding_window is not None or layer.attention_chunk_size is not None
    return not is_local and (step.causal is False or not layer.causal)


def is_planned(
    found: HopperDecodeTile | None, planned: HopperDecodeTile, is_required: bool
) -> bool:
    """Whether the tile ``found`` for a layer is the plan's tile ``planned``.

    Raises:
        ValueError: the tiles differ, and the configuration asks for the kernel by name.
    """
    if found is not None and found != planned and is_required:
        raise ValueError(
            f"the builder's plan is for {planned}, the layer and its cache for {found}"
        )
    return found == planned


class Descriptors:
    """TMA descriptors of tensors that come back at the same addresses.

    A descriptor keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], TensorDescriptor] = {}
        self._latest: dict[str, tuple[tuple[Any, ...], TensorDescriptor]] = {}

    def of(self, name: str, rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
        """The descriptor of ``rows`` in boxes of shape ``box``, for the argument ``name``."""
        key = (rows.data_ptr(), rows.dtype, rows.shape, rows.stride(), box)
        latest = self._latest.get(name)
        # Comparing with the latest key costs less than a hash of this one.
        if latest is not None and latest[0] == key:
            return latest[1]
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_DESCRIPTORS:
                self._known.clear()
            found = self._known[key] = _describe(rows, box)
        self._latest[name] = (key, found)
        return found


class HopperVariants(ABC, Generic[Plan]):
    """The launches of one Hopper kernel in one layer."""

    def __init__(self, layer: DenseLayer) -> None:
        """
        Args:
            layer: the layer's constants.
        """
        self._layer = layer
        self._variants: Variants[Launcher | None] = Variants()
        self._descriptors = Descriptors()

    @abstractmethod
    def launch(
        self,
        plan: Plan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
        key: tuple[Any, ...],
    ) -> bool:
        """Enqueue the launch of a step, unless the portable kernel serves it.

        Args:
            plan: the builder's plan for this kernel.
            step: the builder's record.
            tensors: the tensors of this forward, which are checked once for each variant.
            optional: arguments that a step may lack, by the portable kernel's names.
            key: everything besides the plan that decides which variant of this kernel serves the
                step, or whether the portable kernel does.

        Returns:
            False, without a launch, where the portable kernel serves the step.

        Raises:
            ValueError: the kernel does not serve the step, but the configuration asks for it by
                name; or the plan is for a layer of another shape; or a tensor does not fit.
        """

    def _described(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        run: int,
        tensors: DenseTensors,
        columns: int = COLUMNS,
    ) -> tuple[TensorDescriptor, TensorDescriptor]:
        """The descriptors of keys and values in boxes of ``run`` tokens and ``columns`` columns.

        They are kept in ``tensors.rows`` where there is one. Rows that are made for one forward
        (encoders, expanded latent rows) lie at the same addresses in the next: their descriptors
        are found by address and are not encoded anew.
        """
        kept = tensors.rows
        found = None if kept is None else kept.described.get((run, columns))
        if found is None:
            box = (1, run, 1, columns)
            found = self._descriptors.of("k", keys, box), self._descriptors.of("v", values, box)
            if kept is not None:
                kept.described[run, columns] = found
        return found

    @abstractmethod
    def _new_launcher(
        self,
        plan: Plan,
        step: TritonAttentionMetadata,
        tensors: DenseTensors,
        optional: Mapping[str, Any],
    ) -> Launcher | None:
        """The launcher of a new variant; None leaves the step to the portable kernel.

        The arguments are those of :meth:`launch`.
        """


class _Address:
    """The dtype and the address of a tensor: a descriptor keeps this alive, and not the tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        # TMA copies bytes as they are, so that every 8-bit type can be uint8.
        self.dtype = torch.uint8 if rows.element_size() == 1 else rows.dtype
        self._address = rows.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def _describe(rows: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Describe rows for TMA, in boxes swizzled as the products need them.

    TMA fills the parts of a box outside the tensor with zeros. Rows without pages count as one
    page.
    """
    if rows.dim() < len(box):
        rows = rows[None]
    layout = _layout(box, rows.element_size())
    return TensorDescriptor(_Address(rows), [*rows.shape], [*rows.stride()], [*box], layout)


@cache
def _layout(box: tuple[int, ...], itemsize: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(box[-1] * itemsize, 8 * itemsize, len(box))
