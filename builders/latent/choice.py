"""Which latent layers take the Hopper decode kernels, with which tiles, and the reason in words.

Builder and launcher both call these functions, so that they agree.
"""

from __future__ import annotations

from dataclasses import replace

from builders.dense.choice import (
    LayerRequirements,
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
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel

ROWS = 64
"""Query rows (tokens x heads) of a wide tile, for :mod:`attn.kernels.latent.hopper_wide`."""
KV_TILE = 128
"""Keys of a wide tile: two blocks, one for each warp group."""
NARROW_ROWS = 16
"""Query rows of a narrow tile, for :mod:`attn.kernels.latent.hopper_narrow`.

Its products are by warp. Layers have narrow tiles with few query rows, see :func:`_is_narrow`, and
with batch invariance."""
NARROW_BYTES = KV_TILE * 576
"""Bytes of a narrow tile's keys: 128 keys of e4m3, or 64 keys of 16 bits."""
COLUMNS = (576, 512)
"""Columns of a latent row, and how many of them are its value."""
LEAST_TILES = 1
"""Fewest wide tiles of a program share."""
ROW_COST = 2
"""Wide tiles that take as long as the beginning of a work item.

There queries and first scores have to arrive before any product overlaps another. In
`mla_h128_b64_zipf` a program with seven work items took 60 us longer than its tiles alone."""

NARROW_ROW_COST = 5
"""Narrow tiles that take as long as the beginning of a work item."""


def latent_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerRequirements,
    wanted: DecodeKernel,
) -> tuple[HopperDecodeTile | None, str]:
    """Which kernel takes a latent layer's decodes and verifies, and why.

    Args:
        shape: the layer, with one KV head.
        kind: kind of the device.
        block_size: tokens of a page.
        max_query_len: query tokens of a verify, of which as many as fit share a pass over the keys.
        asks: the layer's other requirements, as far as they are known.
        wanted: the engine's setting ``kernels.latent.decode``.

    Returns:
        The Hopper kernel's tile, or None for the portable kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_latent_tile(shape, kind, block_size, max_query_len, asks)
    left = None
    # Over e4m3 a row has half the bytes, and the portable kernel has to convert it too.
    reads_often = shape.stored_bits != 8 and not _is_narrow(shape, max_query_len, asks)
    if asks.batch_invariant and reads_often:
        left = f"by tiles of {NARROW_ROWS} rows, which read a latent row more often"
    return chosen_kernel("kernels.latent.decode", wanted, found, layer="latent layer", left=left)


def _is_narrow(shape: DenseShape, max_query_len: int, asks: LayerRequirements) -> bool:
    """Whether a request's query rows are for narrow tiles.

    Few rows are, since they take less time there than in a wide tile. Over e4m3 two narrow tiles
    do: a wide tile takes as long as three (``docs/notebook/latent.md``). Over e4m3 queries of fp16
    are, too: the wide kernel keeps fewer of their bits than fp16 has
    (:mod:`attn.kernels.latent.hopper_wide.queries`).
    """
    if shape.stored_bits == 8 and asks.query is DType.FLOAT16:
        return True
    tiles = 2 if shape.stored_bits == 8 else 1
    return shape.num_heads * max_query_len <= tiles * NARROW_ROWS


def hopper_latent_tile(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerRequirements,
) -> HopperDecodeTile | str:
    """The Hopper kernel's tile of a latent layer, or the reason why no Hopper kernel takes it.

    Args:
        shape: the layer, with one KV head.
        kind: kind of the device.
        block_size: tokens of a page.
        max_query_len: query tokens of a verify.
        asks: the layer's other requirements, as far as they are known.
    """
    if asks.is_local:
        return "a sliding window"
    # The value is a part of the latent row, so the value's size is checked below.
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
    # Work items of wide tiles are cut wherever the batch leads to, so their bits depend on it.
    is_narrow = asks.batch_invariant or _is_narrow(shape, max_query_len, asks)
    rows = NARROW_ROWS if is_narrow else ROWS
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    if is_narrow and 2 * tile_heads > rows:
        # There is no room for a second token, and a power of two spares the kernel divisions.
        tile_heads = rows
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
    # The state of 16 rows stays in registers from segment to segment, so these work items can be
    # cut at segments.
    if is_narrow:
        return HopperDecodeTile(split, min(run, kv_tile), 2, row_cost=NARROW_ROW_COST)
    return HopperDecodeTile(
        split,
        min(run, KV_TILE // 2),
        2,
        LEAST_TILES,
        ROW_COST,
        reads_again=head_tiles > 1 or max_query_len > split.query_tokens,
        rounds_queries=asks.fp8_queries and shape.stored_bits == 8,
    )
