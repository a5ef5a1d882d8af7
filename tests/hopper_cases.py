"""Which cases the prefill kernel for Hopper serves."""

from __future__ import annotations

from builders.tiles import DenseShape, HopperTile, PrefillAsks, hopper_tile
from specs.devices import DeviceKind
from tests.cases import Case


def is_served(case: Case) -> bool:
    """The layer's geometry and what it asks are the kernel's."""
    heads, feature = case.heads, case.feature
    if not feature.attn_type.is_cached or feature.alibi or feature.rswa_window is not None:
        return False
    if feature.num_shared_blocks:
        # A shared prefix goes through the plain kernel, whatever is asked for.
        return False
    element = case.cache_dtype.element(case.dtype)
    shape = DenseShape(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_size,
        heads.v_size,
        case.dtype.itemsize,
        element.itemsize * 8 // case.cache_dtype.packing,
    )
    asks = PrefillAsks(
        query=case.dtype,
        cache_dtype=case.cache_dtype,
        alignments=(("key", heads.head_size * element.itemsize % 16 or 16),),
    )
    return isinstance(hopper_tile(shape, DeviceKind.SM90, case.block_size, asks), HopperTile)
