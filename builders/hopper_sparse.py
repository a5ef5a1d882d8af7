"""Sparse latent attention on Hopper: whether its kernel takes a layer's rows, and how.

Shared by builder and launcher, as the tiles of :mod:`builders.sparse_tiles` are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from builders.sparse_tiles import MOST_ROWS, HopperSparseTile, SparseShape, SparseTile
from specs.base import cdiv
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.rows import LatentFormat

KV_TILE: Final = 128
"""Listed keys of a tile: two blocks, one for each warp group."""
COLUMNS: Final = (512, 64)
"""Of the latent and of the rotary part: what a tile's shared memory is cut for."""
FEWEST_HEADS: Final = 33
"""Below, half of a tile's rows and more would be empty, and tiles of fewer rows are faster."""
_SIXTEEN_BITS: Final = (DType.FLOAT16, DType.BFLOAT16)


def hopper_misfit(shape: SparseShape, kind: DeviceKind, dtype: DType) -> str | None:
    """Why the kernel for Hopper does not take a layer's rows; None: it does.

    Args:
        shape: of the layer.
        kind: of the device.
        dtype: of the query.
    """
    if kind is not DeviceKind.SM90:
        return f"the device is {kind.value}, not {DeviceKind.SM90.value}"
    if (shape.rank, shape.rope_size) != COLUMNS:
        return (
            f"rows of {shape.rank} latent and {shape.rope_size} rotary columns are not "
            f"{COLUMNS[0]} and {COLUMNS[1]}"
        )
    if dtype not in _SIXTEEN_BITS:
        return f"a query of {dtype.value} is of neither float16 nor bfloat16"
    if shape.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
        if dtype is not DType.BFLOAT16:
            return f"rows of {shape.layout.value} are multiplied as bfloat16, not {dtype.value}"
    elif shape.layout is not LatentFormat.BF16:
        return f"rows of {shape.layout.value} are read by the plain kernel alone"
    return None


def hopper_tile(
    shape: SparseShape,
    kind: DeviceKind,
    dtype: DType,
    multiprocessors: int,
    num_rows: int,
    options: HopperSparseTile | None = None,
) -> tuple[SparseTile | None, str]:
    """The kernel's launch record for rows of queries, and why it takes them or does not.

    Rows of which there are few are cut into parts, whose states the plain kernel's fold puts
    together; how many is a function of the number of rows.

    Args:
        shape: of the layer.
        kind: of the device.
        dtype: of the query.
        multiprocessors: of the device.
        num_rows: of the launch, padding included.
        options: what is to be measured; None for the usual.

    Returns:
        The record, None for the plain kernel; and the reason in words.
    """
    misfit = hopper_misfit(shape, kind, dtype)
    if misfit is not None:
        return None, misfit
    if shape.num_heads < FEWEST_HEADS:
        return None, (
            f"{shape.num_heads} heads, fewer than {FEWEST_HEADS}, are faster by tiles of few rows"
        )
    return forced_tile(shape, multiprocessors, num_rows, options), "it serves the rows"


def usual_options(layout: LatentFormat) -> HopperSparseTile:
    """What a launch is given: who widens e4m3 needs registers, of which those who multiply keep
    what they need by Triton 3.6.
    """
    if layout is LatentFormat.BF16:
        return HopperSparseTile()
    return HopperSparseTile(second_registers=216, producer_registers=72)


def forced_tile(
    shape: SparseShape,
    multiprocessors: int,
    num_rows: int,
    options: HopperSparseTile | None = None,
) -> SparseTile:
    """The record of any number of heads, where nothing else speaks against the kernel."""
    tile = SparseTile(
        rows=MOST_ROWS,
        kv_tile=KV_TILE,
        segment=KV_TILE,
        span=1,
        num_warps=4,
        num_stages=2,
        hopper=options or usual_options(shape.layout),
    )
    segments = tile.segments(shape.topk)
    programs = max(num_rows, 1) * tile.head_tiles(shape.num_heads)
    parts = max(1, min(segments, multiprocessors // programs))
    return replace(tile, segment=cdiv(segments, parts) * KV_TILE)
