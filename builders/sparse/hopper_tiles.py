"""Sparse latent attention on Hopper: whether its kernel takes a layer's rows, and how.

Shared by builder and launcher, as the tiles of :mod:`builders.sparse.tiles` are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, TypeAlias

from builders.dense.choice import chosen_kernel
from builders.sparse.tiles import (
    FEWEST_ROWS,
    MOST_ROWS,
    HopperSparseTile,
    IndexTile,
    NarrowSparseTile,
    SparseShape,
    SparseTile,
    rows_to_finish,
    sparse_tile,
)
from specs.base import cdiv
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.engine import DecodeKernel, PrefillKernel
from specs.rows import LatentFormat

KV_TILE: Final = 128
"""Listed keys of a tile: two blocks, one for each warp group."""
COLUMNS: Final = (512, 64)
"""Of the latent and of the rotary part: what a tile's shared memory is cut for."""
MOST_NARROW_HEADS: Final = 32
"""Up to so many, tiles of 16 heads; beyond, of 64."""
FEWEST_NARROW_PROGRAMS: Final = 8
"""Rows times tiles of heads below which the plain kernel's short segments are sooner done."""
INDEX_WIDTH: Final = 128
"""Columns of the indexer's keys."""
FEWEST_INDEX_ROWS: Final = 32
MOST_INDEX_ROWS: Final = 64
"""Heads of the indexer that a product is cut for."""
INDEX_PAGES: Final = 16
"""Pages of a program, at most: its queries are loaded once."""
INDEX_PROGRAMS: Final = 8
"""Of each multiprocessor, at least, before a program takes several pages."""
MOST_IDLE: Final = 1.1
"""Programs' time in rounds of whole lists, to that which these take, beyond which lists are dealt
by tiles: `dec_656_h128_b128` (1.03) took 223 us by tiles and 214 by lists, 100 of its rows (1.32)
180 and 213."""
_SIXTEEN_BITS: Final = (DType.FLOAT16, DType.BFLOAT16)
HopperOptions: TypeAlias = HopperSparseTile | NarrowSparseTile
"""What either kernel for Hopper is asked for."""


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
    elif shape.layout is not LatentFormat.BF16 and shape.num_heads > MOST_NARROW_HEADS:
        return (
            f"rows of {shape.layout.value} for more than {MOST_NARROW_HEADS} heads, of which there "
            f"are {shape.num_heads}, are read by the plain kernel alone"
        )
    return None


def sparse_kernel_of(
    shape: SparseShape,
    kind: DeviceKind,
    dtype: DType,
    batch_invariant: bool,
    option: str,
    wanted: PrefillKernel | DecodeKernel,
) -> tuple[HopperOptions | None, str]:
    """Which of the library's own kernels takes a layer's rows, and why.

    Args:
        shape: of the layer.
        kind: of the device.
        dtype: of the query.
        batch_invariant: a row's bits are to depend on the row alone.
        option: the engine's setting for these rows.
        wanted: its value.

    Returns:
        What the kernel for Hopper is asked for, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the kernel for Hopper is wanted by name and does not serve.
    """
    found: HopperOptions | str | None = hopper_misfit(shape, kind, dtype)
    if found is None and batch_invariant:
        found = "it cuts lists where the number of rows leads, and bits are to be a row's own"
    found = usual_options(shape) if found is None else found
    return chosen_kernel(option, wanted, found, layer="sparse layer")


def usual_options(shape: SparseShape) -> HopperOptions:
    """What a launch is given: who widens e4m3 needs registers, more than who multiplies gives up,
    and its blocks come late: `dec_656_h128_b128` took 232 us without ``early``, so 222.
    """
    is_native = shape.layout is LatentFormat.BF16
    if shape.num_heads <= MOST_NARROW_HEADS:
        return NarrowSparseTile(224, 56) if is_native else NarrowSparseTile()
    if is_native:
        return HopperSparseTile()
    return HopperSparseTile(early=True, second_registers=200, producer_registers=104)


def hopper_sparse_tile(
    shape: SparseShape,
    multiprocessors: int,
    num_rows: int,
    options: HopperOptions | None = None,
) -> SparseTile:
    """The kernel's launch record for rows of queries; the plain kernel's for few of few heads.

    Rows of which there are few are cut into parts, whose states the plain kernel's fold puts
    together; how many is a function of the number of rows. Many may be dealt by tiles, so that two
    programs have parts of one.

    Args:
        shape: of the layer.
        multiprocessors: of the device.
        num_rows: of the launch, padding included.
        options: of the kernel; None for the usual.
    """
    options = options or usual_options(shape)
    is_narrow = isinstance(options, NarrowSparseTile)
    is_scaled = shape.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    tile = SparseTile(
        rows=FEWEST_ROWS if is_narrow else MOST_ROWS,
        # What is widened waits beside what is widened from it.
        kv_tile=KV_TILE // 2 if is_scaled else KV_TILE,
        segment=KV_TILE,
        span=1,
        num_warps=4,
        num_stages=2,
        hopper=options,
        hastens=True,
    )
    programs = max(num_rows, 1) * tile.head_tiles(shape.num_heads)
    if is_narrow:
        if programs < FEWEST_NARROW_PROGRAMS:
            return sparse_tile(shape, DeviceKind.SM90, multiprocessors, num_rows)
        is_native = shape.layout is LatentFormat.BF16
        tile = replace(tile, kv_tile=32 if is_native else 64, num_stages=4)
    segments = cdiv(shape.topk, KV_TILE)
    parts = max(1, min(segments, multiprocessors // programs))
    finish = rows_to_finish(programs, multiprocessors)
    tile = replace(tile, segment=max(cdiv(segments, parts), 1) * KV_TILE, finish_rows=finish)
    if isinstance(options, NarrowSparseTile) or options.programs_per_sm is None:
        return tile
    head_tiles = tile.head_tiles(shape.num_heads)
    groups = options.programs_per_sm * multiprocessors // head_tiles
    balanced = options.balanced
    if not 0 < groups <= num_rows:
        return tile
    if balanced is None:
        balanced = cdiv(num_rows, groups) * groups > MOST_IDLE * num_rows
    return replace(tile, shares=groups * head_tiles) if balanced else tile


def deciding_rows(multiprocessors: int) -> int:
    """Rows beyond which their number decides nothing: one round more or less is too little."""
    return math.ceil(multiprocessors / (MOST_IDLE - 1))


def index_tile_of(kind: DeviceKind, dtype: DType, num_heads: int, width: int) -> IndexTile:
    """The indexer's launch record; the number of rows decides nothing.

    Args:
        kind: of the device, on which kernels in Gluon run.
        dtype: of the indexer's queries.
        num_heads: of the indexer.
        width: of its keys.
    """
    serves = (
        kind is DeviceKind.SM90
        and dtype is DType.FLOAT8_E4M3FN
        and num_heads <= MOST_INDEX_ROWS
        and width == INDEX_WIDTH
    )
    return IndexTile(hopper_pages=INDEX_PAGES if serves else 0)


def index_pages(tile: IndexTile, multiprocessors: int, num_rows: int, blocks: int) -> int:
    """Pages of a program, a power of two: each of these is compiled. No bit depends on it.

    Args:
        tile: with what it is at most.
        multiprocessors: of the device.
        num_rows: of the launch.
        blocks: of a row, at most.
    """
    pages = min(tile.hopper_pages, num_rows * blocks // (INDEX_PROGRAMS * multiprocessors))
    return 1 << (max(pages, 1).bit_length() - 1)


def index_sizes(
    tile: IndexTile, multiprocessors: int, most_rows: int, most_blocks: int
) -> tuple[tuple[int, int], ...]:
    """Rows and blocks of one launch for each number of pages that any launch comes to, but for one
    page, to which the smallest comes.

    Args:
        tile: with what it is at most.
        multiprocessors: of the device.
        most_rows: of a launch.
        most_blocks: of a row.
    """
    found, pages = [], 2
    while pages <= tile.hopper_pages:
        rows = cdiv(pages * INDEX_PROGRAMS * multiprocessors, most_blocks)
        if rows <= most_rows:
            found.append((rows, most_blocks))
        pages *= 2
    return tuple(found)
