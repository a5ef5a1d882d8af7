"""Which cases of the conformance suite the Hopper kernels serve."""

from __future__ import annotations

from attn.testing.cases import Case, LatentCase
from builders.dense.choice import (
    LayerRequirements,
    hopper_decode_tile,
    hopper_tile,
)
from builders.latent.choice import hopper_latent_tile
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
)
from specs.devices import DeviceKind


def is_served(case: Case) -> bool:
    """Whether the Hopper prefill kernel serves the layer of a case."""
    if case.feature.num_shared_blocks:
        # A step with a shared prefix always runs on the portable kernel.
        return False
    pages = case.block_size if case.feature.attn_type.is_cached else 0
    tile = hopper_tile(_shape(case), DeviceKind.SM90, pages, _asks(case))
    return isinstance(tile, HopperTile)


def is_decoded(case: Case) -> bool:
    """Whether the Hopper split-KV kernel serves the layer and the drafts of a case."""
    if not case.feature.attn_type.is_cached:
        return False
    tokens = 1 + (case.batch.num_speculative_tokens or 0)
    tile = hopper_decode_tile(_shape(case), DeviceKind.SM90, case.block_size, tokens, _asks(case))
    return isinstance(tile, HopperDecodeTile)


def is_latent_served(case: LatentCase) -> bool:
    """Whether a Hopper latent kernel serves a case's layer; it runs the short rows of steps."""
    element, rank = case.cache_dtype.element(case.dtype), case.rank
    bits = 8 * element.itemsize
    shape = DenseShape(case.num_heads, 1, rank + case.rope_size, rank, case.dtype.itemsize, bits)
    windowed = case.sliding_window is not None
    asks = LayerRequirements(is_local=windowed, query=case.dtype, cache_dtype=case.cache_dtype)
    tokens = 1 + (case.batch.num_speculative_tokens or 0)
    tile = hopper_latent_tile(shape, DeviceKind.SM90, case.block_size, tokens, asks)
    return isinstance(tile, HopperDecodeTile)


def _asks(case: Case) -> LayerRequirements:
    element = case.cache_dtype.element(case.dtype)
    return LayerRequirements(
        alibi=case.feature.alibi,
        rswa=case.feature.rswa_window is not None,
        query=case.dtype,
        cache_dtype=case.cache_dtype,
        alignments=(("key", case.heads.head_size * element.itemsize % 16 or 16),),
    )


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
