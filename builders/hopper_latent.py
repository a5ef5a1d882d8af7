"""Tiles of latent attention on Hopper: whether its kernel takes a layer, and how.

Shared by builder and launcher, as those of :mod:`builders.tiles` are.
"""

from __future__ import annotations

from dataclasses import replace

from builders.tiles import (
    DenseShape,
    HopperDecodeTile,
    LayerAsks,
    SplitTile,
    chosen_kernel,
    misfit_of,
    refusal_of,
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
"""Of a tile over a cache of e4m3, whose products are by warp."""
COLUMNS = (576, 512)
"""Columns of a latent row, and of them those that are its value."""
SEGMENT_SCALE = 2
"""Segments are this many times as long, 1024 tokens: every one is folded through memory.

What that takes of scratch: a state of 64 rows is 128 KiB, and a program lends one for each segment
of the row in whose middle it starts, 16 at most, a bundle; whoever enters a row later can not fold
what it has, since states are folded from the left, and every program may start in a row's middle.
With one more, of the part that it is at, and two for each bundle where there are several, 132
programs have

    rows of up to      8k    16k    32k    128k
    states each         9     17     21      33
    128 heads, MiB    149    282    349     548
    16 heads, MiB      37     70     87     137

whatever the number of requests. Twice the scale would halve it up to 16k, and the time between two
segments with it (a state each way, a tenth of the segment's own time perhaps), but leave one
request of 8k tokens four cuts, which is the GPU's eighth part.
"""


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
    left = "has not been measured beside it"
    return chosen_kernel("decode_kernel", wanted, found, layer="latent layer", left=left)


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
    is_e4m3 = shape.stored_bits == 8
    rows = NARROW_ROWS if is_e4m3 else ROWS
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    split = SplitTile(
        rows=rows,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        query_tokens=max(1, min(rows // tile_heads, max_query_len)),
        kv_tile=KV_TILE,
        # A state of 16 rows stays in registers.
        segment_scale=1 if is_e4m3 else SEGMENT_SCALE,
        num_warps=4,
        num_stages=2,
        programs_per_sm=1,
        max_registers=None,
    )
    run, groups = block_size & -block_size, 1 if is_e4m3 else 2
    return HopperDecodeTile(split, min(run, KV_TILE // groups), 2, warp_groups=groups)
