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
from specs.dtypes import DType, KVQuantMode
from tests.cases import Case


def is_served(case: Case) -> bool:
    """The layer's geometry and what it asks are the prefill kernel's."""
    element = case.cache_dtype.element(case.dtype)
    if case.feature.num_shared_blocks or not _is_plain(case):
        # A shared prefix goes through the plain kernel, whatever is asked for.
        return False
    if element.torch != case.dtype.torch or case.cache_dtype.packing != 1:
        return False
    tile = hopper_tile(_shape(case), DeviceKind.SM90, case.block_size)
    return isinstance(tile, HopperTile)


def is_decoded(case: Case) -> bool:
    """The same of the split-KV kernel; the drafts of the case's batch count."""
    element = case.cache_dtype.element(case.dtype)
    is_e4m3 = element is DType.FLOAT8_E4M3FN
    is_e4m3 &= case.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
    if not _is_plain(case) or not (is_e4m3 or element.torch == case.dtype.torch):
        return False
    tile = hopper_decode_tile(
        _shape(case),
        DeviceKind.SM90,
        case.block_size,
        1 + (case.batch.num_speculative_tokens or 0),
        is_e4m3=is_e4m3,
    )
    return isinstance(tile, HopperDecodeTile)


def _is_plain(case: Case) -> bool:
    """Keys are in a cache, and nothing is asked that no kernel for Hopper does."""
    feature = case.feature
    return feature.attn_type.is_cached and not feature.alibi and feature.rswa_window is None


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
