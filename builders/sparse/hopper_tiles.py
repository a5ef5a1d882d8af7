"""Which layers take the Hopper kernels of sparse latent attention, with which tiles, and why.

Builder and launcher both call these functions, so that they agree.
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
"""Columns of the latent and of the rotary part, for which a tile's shared memory is laid out."""
MOST_NARROW_HEADS: Final = 32
"""Most query heads of a layer with tiles of 16 heads; layers with more have tiles of 64 heads."""
FEWEST_NARROW_PROGRAMS: Final = 8
"""Rows times tiles of heads below which the portable kernel is faster, thanks to its short
segments."""
INDEX_WIDTH: Final = 128
"""Columns of the indexer's keys."""
FEWEST_INDEX_ROWS: Final = 32
"""Fewest heads of the indexer that a product has rows for."""
MOST_INDEX_ROWS: Final = 64
"""Most heads of the indexer that a product has rows for."""
INDEX_PROGRAMS: Final = 5
"""Programs that score pages of the indexer and fit a multiprocessor side by side."""
INDEX_PIECES: Final = 6
"""Fewest programs that score pages of the indexer for each query token. With fewer, pieces of rows
would differ in length by more."""
INDEX_KEYS: Final = 256
"""Gathered keys of a tile of the indexer."""
MOST_INDEX_TOKENS: Final = 128
"""Most query tokens of a program that scores gathered keys."""
INDEX_ROUNDS: Final = {MOST_INDEX_TOKENS: 8, MOST_INDEX_TOKENS // 2: 2}
"""Fewest tiles of gathered keys for each multiprocessor, by the query tokens of a program; with
fewer tiles, programs take half as many tokens.

More programs fill the device better, but each takes as long as for about ten tokens ahead of its
first product: in a former kernel 100 tokens of 4,096 keys took 26 us by 32, 44 by 64 and 64 by 128
tokens, four prompts of 4,096 tokens 688, 638 and 625 us. Half of the tiles are of keys that no
token sees, if prompts are new."""
MOST_IDLE: Final = 1.1
"""Ratio beyond which lists are cut between programs by tiles.

It is the time of all programs in rounds of whole lists, divided by the time that the lists need.
`dec_656_h128_b128` has a ratio of 1.03 and took 223 us by tiles, 214 us by whole lists. 100 of its
rows have a ratio of 1.32 and took 180 us by tiles, 213 us by whole lists."""
MOST_NARROW_IDLE: Final = 8
"""With few heads lists are cut between programs by tiles if more than one in so many programs would
be idle in the last round of whole lists.

What is won is part of one list's time, however many rounds there are: of the 50 to 60 us of 2,048
entries, as many as programs were idle for. What is lost is the same for any number of rounds too: a
program stores one state of 32 KiB and folds another, which by their size take 2 us. So the ratio of
:data:`MOST_IDLE`, which falls with the rounds, does not decide here."""
_SIXTEEN_BITS: Final = (DType.FLOAT16, DType.BFLOAT16)
HopperOptions: TypeAlias = HopperSparseTile | NarrowSparseTile
"""Options of a Hopper kernel; their type says which kernel takes the rows."""


def hopper_misfit(shape: SparseShape, kind: DeviceKind, dtype: DType) -> str | None:
    """Why no Hopper kernel takes a layer's rows; None if one does.

    Args:
        shape: the layer.
        kind: kind of the device.
        dtype: type of the query.
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
            f"are {shape.num_heads}, are read by the portable kernel alone"
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
        shape: the layer.
        kind: kind of the device.
        dtype: type of the query.
        batch_invariant: a row's bits must depend on the row alone.
        option: name of the engine's setting for these rows.
        wanted: value of that setting.

    Returns:
        The Hopper kernel's options, or None for the portable kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found: HopperOptions | str | None = hopper_misfit(shape, kind, dtype)
    if found is None and batch_invariant:
        found = "it cuts lists where the number of rows leads, and bits are to be a row's own"
    found = usual_options(shape) if found is None else found
    return chosen_kernel(option, wanted, found, layer="sparse layer")


def usual_options(shape: SparseShape) -> HopperOptions:
    """The Hopper kernel's options, except in benchmarks that measure others."""
    is_native = shape.layout is LatentFormat.BF16
    if shape.num_heads <= MOST_NARROW_HEADS:
        return NarrowSparseTile(224, 56) if is_native else NarrowSparseTile()
    return wide_options(shape)


def wide_options(shape: SparseShape) -> HopperSparseTile:
    """Options of the Hopper kernel for many heads.

    A warp group that dequantises e4m3 needs registers, more than one that multiplies can spare, and
    its blocks come late. So over quantised rows the producer has more registers, and the kernel for
    many heads gives blocks back ``early``: `dec_656_h128_b128` took 232 us without ``early``, and
    222 us with it.
    """
    if shape.layout is LatentFormat.BF16:
        return HopperSparseTile()
    return HopperSparseTile(early=True, second_registers=200, producer_registers=104)


def hopper_sparse_tile(
    shape: SparseShape,
    multiprocessors: int,
    num_rows: int,
    options: HopperOptions | None = None,
) -> SparseTile:
    """The Hopper kernel's tile for a number of rows.

    If rows are few, each list is cut into parts, whose states the portable kernel's fold merges;
    the number of parts follows from the number of rows. If rows are many, programs may share the
    lists by tiles, so that two programs have parts of one list. For few rows of few heads it is the
    portable kernel's tile.

    Args:
        shape: the layer.
        multiprocessors: multiprocessors of the device.
        num_rows: rows of the launch, padding included.
        options: options of the kernel; None for the usual ones.
    """
    options = options or usual_options(shape)
    is_narrow = isinstance(options, NarrowSparseTile)
    is_scaled = shape.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    tile = SparseTile(
        rows=FEWEST_ROWS if is_narrow else MOST_ROWS,
        # Shared memory holds dequantised keys beside their stored bytes, so there are fewer keys.
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
    if options.programs_per_sm is None:
        return tile
    head_tiles = tile.head_tiles(shape.num_heads)
    groups = options.programs_per_sm * multiprocessors // head_tiles
    balanced = options.balanced
    if not 0 < groups <= num_rows:
        return tile
    if balanced is None:
        idle = -num_rows % groups
        if is_narrow:
            balanced = idle * MOST_NARROW_IDLE > groups
        else:
            balanced = num_rows + idle > MOST_IDLE * num_rows
    return replace(tile, shares=groups * head_tiles) if balanced else tile


def deciding_rows(multiprocessors: int) -> int:
    """Number of rows from which on it decides no more about how lists of many heads are cut.

    So many rows take so many rounds that idle programs in the last one are too few to matter. With
    few heads the number of rows decides for ever, but all that it decides occurs among the first
    two rounds, which are fewer rows.
    """
    return math.ceil(multiprocessors / (MOST_IDLE - 1))


def index_tile_of(kind: DeviceKind, dtype: DType, num_heads: int, width: int) -> IndexTile:
    """The indexer's tile, whatever the number of rows.

    Args:
        kind: kind of the device, on which kernels in Gluon run.
        dtype: type of the indexer's queries.
        num_heads: heads of the indexer.
        width: columns of the indexer's keys.
    """
    serves = (
        kind is DeviceKind.SM90
        and dtype is DType.FLOAT8_E4M3FN
        and num_heads <= MOST_INDEX_ROWS
        and width == INDEX_WIDTH
    )
    if not serves:
        return IndexTile()
    return IndexTile(takes_hopper=True, hopper_rows=MOST_INDEX_TOKENS)


def index_programs(multiprocessors: int, num_rows: int) -> int:
    """Programs of the indexer's Hopper kernel over pages: whole rounds of those that run at once.

    No bit of a result depends on the number.

    Args:
        multiprocessors: multiprocessors of the device.
        num_rows: rows of the launch.
    """
    at_once = INDEX_PROGRAMS * multiprocessors
    return cdiv(max(INDEX_PIECES * num_rows, 1), at_once) * at_once


def index_tokens(tile: IndexTile, multiprocessors: int, num_rows: int, most_keys: int) -> int:
    """Query tokens of a program of the indexer's Hopper kernel over gathered keys.

    No bit of a result depends on the number, and the kernel is compiled once for all numbers.

    Args:
        tile: tile of the indexer, with the most rows.
        multiprocessors: multiprocessors of the device.
        num_rows: rows of the launch.
        most_keys: most keys of a row.
    """
    tokens, tiles = tile.hopper_rows, cdiv(most_keys, INDEX_KEYS)
    while cdiv(num_rows, tokens) * tiles < INDEX_ROUNDS.get(tokens, 0) * multiprocessors:
        tokens //= 2
    return tokens
