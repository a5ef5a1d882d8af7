"""Tiles of sparse latent attention, as data: how heads and listed keys are cut for a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from specs.base import cdiv
from specs.devices import DeviceKind
from specs.rows import LatentFormat

FEWEST_ROWS: Final = 16
"""Rows of the smallest product on tensor cores; a tile of fewer heads leaves the others empty."""
MOST_ROWS: Final = 64
"""64 rows of 512 fp32 sums are half a multiprocessor's registers."""
MOST_FOLDED_ROWS: Final = 16
"""Rows up to which a program holds the sums of two states in registers: of what is folded so far,
and of a segment."""
SEGMENT: Final = 128
"""Listed keys of a segment where rows are few: a multiple of every key tile there."""
WIDE_SEGMENT: Final = 256
"""Likewise where the states are large."""


@dataclass(frozen=True)
class SparseShape:
    """What the tile depends on besides the device; no length is among it."""

    num_heads: int
    topk: int
    """Listed keys of a row."""
    layout: LatentFormat = LatentFormat.BF16
    element_bytes: int = 2
    """Of the query."""
    rank: int = 512
    rope_size: int = 64


@dataclass(frozen=True)
class HopperSparseTile:
    """What the kernel for Hopper is asked for besides; alternatives to be measured."""

    early: bool = False
    """Halves of blocks are given back before more keys are waited for: where these come late."""
    balanced: bool | None = None
    """Programs walk equally many tiles, where there is a row for each: a list may lie in two. None:
    where rounds of whole lists would leave much of the last one idle."""
    second_registers: int = 224
    """Per thread of the second warp group that multiplies, a multiple of 8; the first has what is
    left of 504."""
    producer_registers: int = 56
    """Per thread of the warp group that gathers rows."""
    programs_per_sm: int | None = 1
    """Programs that take piece after piece of the work; None: one for each piece."""


@dataclass(frozen=True)
class NarrowSparseTile:
    """What the kernel for few heads on Hopper is asked for besides; alternatives to be measured."""

    second_registers: int = 208
    """Per thread of the second warp group that multiplies, a multiple of 8; the first has what is
    left of 504."""
    producer_registers: int = 88
    """Per thread of the warp group that copies rows."""


@dataclass(frozen=True)
class SparseTile:
    """How a launch of the kernel cuts its work, and what it asks of the compiler.

    What has a default is an alternative to be measured: results differ at most in rounding.
    """

    rows: int
    """Heads of a program."""
    kv_tile: int
    """Listed keys of one step."""
    segment: int
    """Listed keys that one state is of; boundaries are a function of the position in the list."""
    span: int
    """Segments of a program; when all are, it writes the result itself."""
    num_warps: int
    num_stages: int
    carries_ids: bool = True
    """Indices are handed on from step to step in registers; else the compiler's pipeline copies
    them to shared memory first."""
    holds_next: bool = False
    """The next step's latents wait in registers: where the compiler does not copy them ahead."""
    many: bool = False
    """The kernel for many heads takes the rows."""
    max_registers: int | None = None
    """Per thread."""
    finish_rows: int = 4
    """Heads of a program that folds stored states."""
    finish_width: int = 128
    """Columns of it."""
    hastens: bool = False
    """What folds stored states may start ahead, and waits by itself: on Hopper and later."""
    hopper: HopperSparseTile | NarrowSparseTile | None = None
    """A kernel for Hopper takes the rows, as
    :func:`builders.sparse.hopper_tiles.hopper_sparse_tile` cuts them."""
    shares: int = 0
    """Programs of that kernel that walk equally many tiles; 0: each takes whole pieces of work."""

    def __post_init__(self) -> None:
        """Refuse what no launch can be.

        Raises:
            ValueError: segments that are no whole steps, several of a program without registers to
                fold them in, or latents asked for before their indices.
        """
        if self.segment % self.kv_tile:
            raise ValueError(
                f"segment must be a multiple of kv_tile ({self.kv_tile}), got {self.segment}"
            )
        if self.holds_next and not self.carries_ids:
            raise ValueError(
                "holds_next needs carries_ids: the next step's indices, got holds_next alone"
            )
        if self.span > 1 and not self.folds:
            raise ValueError(
                f"span must be 1 for tiles of more than {MOST_FOLDED_ROWS} rows, got {self.span}"
            )

    @property
    def folds(self) -> bool:
        """A program can fold its segments one after another, to the bits of stored ones."""
        return self.rows <= MOST_FOLDED_ROWS

    def head_tiles(self, num_heads: int) -> int:
        """Programs that share a row's heads."""
        return cdiv(num_heads, self.rows)

    def segments(self, topk: int) -> int:
        """Segments of a row whose list is full."""
        return max(cdiv(topk, self.segment), 1)

    def programs(self, topk: int) -> int:
        """Programs that share a row's keys."""
        return cdiv(self.segments(topk), self.span)

    @property
    def counters(self) -> int:
        """Of programs that have come to where two shares meet, for each half of the columns."""
        return 2 * self.shares

    def state_floats(
        self, num_rows: int, num_heads: int, topk: int, rank: int = 512
    ) -> tuple[int, int]:
        """fp32 elements of stored states, and of their maxima and sums; 0 where none is stored."""
        if self.shares:
            # Of both parts of a list where two shares meet; sums by each half of the columns.
            return 2 * self.shares * self.rows * rank, 2 * self.shares * self.rows * 4
        if self.programs(topk) == 1:
            return 0, 0
        slots = num_rows * self.head_tiles(num_heads) * self.segments(topk)
        return slots * self.rows * rank, slots * self.rows * 2


def sparse_tile(
    shape: SparseShape,
    kind: DeviceKind,
    multiprocessors: int,
    num_rows: int,
    batch_invariant: bool = False,
) -> SparseTile:
    """The launch record for rows of queries.

    Where tiles fold (up to 16 heads, and everywhere but on Hopper), a row's bits depend on the row
    alone, whatever the number of rows; but on Hopper rows that are few take their segments whole,
    which is another order of sums. Elsewhere, and there, they do when ``batch_invariant``;
    otherwise rows that are many are not split.

    Args:
        shape: of the layer.
        kind: of the device.
        multiprocessors: of it.
        num_rows: of the launch, padding included.
        batch_invariant: as above.
    """
    tile = _tile_of(shape, kind)
    segments = tile.segments(shape.topk)
    programs = max(num_rows, 1) * tile.head_tiles(shape.num_heads)
    if tile.folds:
        # A program that has a row alone stores nothing: as soon as those fill half the device.
        if 2 * programs > multiprocessors:
            return replace(tile, span=segments)
        split = replace(tile, span=1, hastens=kind is DeviceKind.SM90)
        split = replace(split, finish_rows=rows_to_finish(programs, multiprocessors))
        if kind is not DeviceKind.SM90 or shape.element_bytes > 2 or batch_invariant:
            return split
        # A segment in one step, all of whose rows are asked for at once: `dec_656_h16_b1` took
        # 17.8 us by steps of 64 keys, so 13.2; `dec_bf16_h16_b1` 17.6 and 12.6.
        if shape.layout is LatentFormat.BF16:
            return replace(split, kv_tile=SEGMENT, num_stages=1)
        return replace(split, kv_tile=SEGMENT)
    finish = rows_to_finish(programs, multiprocessors)
    tile = replace(tile, hastens=kind is DeviceKind.SM90, finish_rows=finish)
    if batch_invariant:
        return tile
    # One segment for each program, as many as fill the device once.
    parts = max(1, min(segments, multiprocessors // programs))
    return replace(tile, segment=cdiv(segments, parts) * tile.segment)


def rows_to_finish(programs: int, multiprocessors: int) -> int:
    """Heads of a program that folds stored states; the bits are the same.

    Where few programs attend, what folds is waited for: with one head each `dec_656_h16_b1` took
    11.8 us, with four 13.7.

    Args:
        programs: rows times tiles of heads.
        multiprocessors: of the device.
    """
    return 1 if 16 * programs <= multiprocessors else SparseTile.finish_rows


def _tile_of(shape: SparseShape, kind: DeviceKind) -> SparseTile:
    """Sizes by heads and layout: what compiles without spills, by the compile tests."""
    is_wide = shape.element_bytes > 2
    is_native = shape.layout is LatentFormat.BF16
    heads = shape.num_heads
    if kind is not DeviceKind.SM90 or is_wide or heads <= FEWEST_ROWS:
        if is_wide:
            return SparseTile(FEWEST_ROWS, 16, SEGMENT, 1, num_warps=8, num_stages=2)
        # Elsewhere 64 are not measured, and do not fit everywhere.
        keys = 64 if kind is DeviceKind.SM90 else 32
        return SparseTile(FEWEST_ROWS, keys, SEGMENT, 1, 8, 3, holds_next=not is_native)
    if is_native and heads <= 2 * FEWEST_ROWS:
        return SparseTile(2 * FEWEST_ROWS, 32, WIDE_SEGMENT, 1, num_warps=8, num_stages=3)
    # Products by warp group.
    return SparseTile(MOST_ROWS, 64, WIDE_SEGMENT, 1, 8, 2, many=True)


@dataclass(frozen=True)
class IndexTile:
    """How launches of the indexer cut their work; all are alternatives to be measured."""

    pages: int = 2
    """Pages of one step over a row's keys."""
    steps: int = 4
    """Steps of a program, over a row's own pages."""
    keys: int = 128
    """Compact keys of a program."""
    rows: int = 32
    """Rows of queries that a program takes over these."""
    num_warps: int = 4
    num_stages: int = 3
    fp8_products: bool = False
    """e4m3 queries and keys are multiplied as they are, with sums of less than fp32's precision;
    else as fp16, exactly."""
    hopper_pages: int = 0
    """Pages of a program of the kernel for Hopper, at most; 0: the plain kernel takes all rows."""
    select: int = 4096
    """Logits of one step of the selection."""
    select_warps: int = 8
