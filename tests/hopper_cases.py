"""Which cases the kernels for Hopper serve."""

from __future__ import annotations

from builders.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    hopper_decode_tile,
    hopper_tile,
)
from specs.devices import DeviceKind
from tests.cases import Case


def is_served(case: Case) -> bool:
    """The layer's geometry and what it asks are the prefill kernel's."""
    if case.feature.num_shared_blocks or not _is_plain(case):
        # A shared prefix goes through the plain kernel, whatever is asked for.
        return False
    tile = hopper_tile(_shape(case), DeviceKind.SM90, case.block_size)
    return isinstance(tile, HopperTile)


def is_decoded(case: Case) -> bool:
    """The same of the split-KV kernel; the drafts of the case's batch count."""
    drafts = case.batch.num_speculative_tokens or 0
    tile = hopper_decode_tile(_shape(case), DeviceKind.SM90, case.block_size, 1 + drafts)
    return _is_plain(case) and isinstance(tile, HopperDecodeTile)


def _is_plain(case: Case) -> bool:
    """Keys are in a cache, in the model's type, and nothing is asked that no such kernel does."""
    feature, element = case.feature, case.cache_dtype.element(case.dtype)
    if not feature.attn_type.is_cached or feature.alibi or feature.rswa_window is not None:
        return False
    return element.torch == case.dtype.torch and case.cache_dtype.packing == 1


def _shape(case: Case) -> DenseShape:
    heads, element = case.heads, case.cache_dtype.element(case.dtype)
    return DenseShape(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_size,
        heads.v_size,
        case.dtype.itemsize,
        element.itemsize * 8 // case.cache_dtype.packing,
    )
