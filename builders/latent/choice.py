"""Tiles of latent attention on Hopper: whether its kernel takes a layer, and how.

Shared by builder and launcher, as those of :mod:`builders.splitkv.tiles` are.
"""

from __future__ import annotations

from dataclasses import replace

from builders.dense.choice import (
    LayerAsks,
    chosen_kernel,
    misfit_of,
    refusal_of,
)
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    SplitTile,
)
from specs.base import cdiv
from specs.devices import DeviceKind
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel

ROWS = 64
"""Query rows (tokens x heads) of a tile."""
KV_TILE = 128
"""Keys of a tile: two blocks, one for each warp group."""
NARROW_ROWS = 16
"""Of a tile whose products are by warp: over a cache of e4m3, or where there are no more."""
NARROW_BYTES = KV_TILE * 576
"""Of such a tile's keys: 128 of e4m3, 64 of 16 bits."""
COLUMNS = (576, 512)
"""Columns of a latent row, and of them those that are its value."""
LEAST_TILES = 2
"""Of a program's share of a row: a part costs about as much as one more."""
ROW_COST = 2
"""Tiles that the beginning of a row takes as long as: queries come, and first scores, before any
product is under another. In `mla_h128_b64_zipf` a program of seven rows took 60 us longer than its
tiles alone."""


def latent_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerAsks,
    wanted: DecodeKernel,
) -> tuple[HopperDecodeTile | None, str]:
    """Which kernel takes a latent layer's decode and verify rows, and why.

    Args:
        shape: the layer, with one KV head.
        kind: device.
        block_size: tokens of a page.
        max_query_len: query tokens of a verify, of which as many as fit share a pass over the keys.
        asks: what else the layer asks, as far as it is known.
        wanted: what the engine is configured to.

    Returns:
        The Hopper kernel's tile, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_latent_tile(shape, kind, block_size, max_query_len, asks)
    left = None
    if asks.batch_invariant and _needs_rows(shape, max_query_len) > NARROW_ROWS:
        left = f"by tiles of {NARROW_ROWS} rows, which read a latent row more often"
    return chosen_kernel("kernels.latent.decode", wanted, found, layer="latent layer", left=left)


def _needs_rows(shape: DenseShape, max_query_len: int) -> int:
    """Rows that share a walk over the keys where there is room: of e4m3 there is for no more."""
    return NARROW_ROWS if shape.stored_bits == 8 else shape.num_heads * max_query_len


def hopper_latent_tile(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerAsks,
) -> HopperDecodeTile | str:
    """The Hopper kernel's tile of a latent layer, or why the kernel does not take it.

    Args:
        shape: the layer, with one KV head.
        kind: device.
        block_size: tokens of a page.
        max_query_len: query tokens of a verify.
        asks: what else the layer asks, as far as it is known.
    """
    # Of a latent row, the value is a part.
    if asks.is_local:
        return "a sliding window"
    refused = misfit_of(replace(shape, head_size_v=shape.head_size), kind, block_size)
    if refused is not None:
        return refused
    if (shape.head_size, shape.head_size_v) != COLUMNS:
        return (
            f"rows of {shape.head_size} columns, of which {shape.head_size_v} are the value, are "
            f"not {COLUMNS[0]} and {COLUMNS[1]}"
        )
    if shape.num_kv_heads != 1:
        return f"there are {shape.num_kv_heads} KV heads, not 1"
    if asks.cache_dtype is CacheDType.FP8_E5M2:
        return f"a cache of {asks.cache_dtype}"
    refused = refusal_of(asks)
    if refused is not None:
        return refused
    # Tiles of more rows are cut anywhere, where their batch leads: their bits are not their own.
    is_narrow = asks.batch_invariant or _needs_rows(shape, max_query_len) <= NARROW_ROWS
    rows = NARROW_ROWS if is_narrow else ROWS
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    kv_tile = NARROW_BYTES * 8 // (shape.stored_bits * COLUMNS[0]) if is_narrow else KV_TILE
    split = SplitTile(
        rows=rows,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        query_tokens=max(1, min(rows // tile_heads, max_query_len)),
        kv_tile=kv_tile,
        segment_scale=1,
        num_warps=4,
        num_stages=2,
        programs_per_sm=1,
        max_registers=None,
    )
    run = block_size & -block_size
    # A state of 16 rows stays in registers from segment to segment.
    if is_narrow:
        return HopperDecodeTile(split, min(run, kv_tile), 2)
    return HopperDecodeTile(split, min(run, KV_TILE // 2), 2, LEAST_TILES, ROW_COST)
