"""Tiles of sparse latent attention: how heads and listed keys are cut into programs for a device.

A row is one query token with its list of keys. Builders and launchers call the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from specs.base import cdiv
from specs.devices import DeviceKind
from specs.rows import LatentFormat

FEWEST_ROWS: Final = 16
"""Heads of the smallest product on tensor cores; a tile with fewer heads leaves rows empty."""
MOST_ROWS: Final = 64
"""Most heads of a tile: 64 rows of 512 fp32 sums are half a multiprocessor's registers."""
MOST_FOLDED_ROWS: Final = 16
"""Most heads of a tile whose program can hold two states in registers: the state of what is folded
so far, and the state of a segment."""
SEGMENT: Final = 128
"""Listed keys of a segment in tiles of 16 heads: a multiple of the listed keys of a step."""
WIDE_SEGMENT: Final = 256
"""Listed keys of a segment in tiles of more heads, whose states are larger."""


@dataclass(frozen=True)
class SparseShape:
    """The facts of a layer that its tile depends on; no length is among them."""

    num_heads: int
    """Query heads."""
    topk: int
    """Listed keys of a row."""
    layout: LatentFormat = LatentFormat.BF16
    """Format of the cache's rows."""
    element_bytes: int = 2
    """Bytes of an element of the query."""
    rank: int = 512
    """Columns of the latent."""
    rope_size: int = 64
    """Columns of the rotary part."""


@dataclass(frozen=True)
class HopperSparseTile:
    """Options of the Hopper kernel for many heads; other values are alternatives to be measured."""

    early: bool = False
    """Halves of blocks are given back before the program waits for more keys, which helps where
    keys come late."""
    balanced: bool | None = None
    """Programs walk equally many tiles if there is a row for each, so that two programs may share a
    list. None does so only where rounds of whole lists would leave much of the last one idle."""
    second_registers: int = 224
    """Registers per thread of the second warp group that multiplies, a multiple of 8. The first
    warp group has the rest of 504."""
    producer_registers: int = 56
    """Registers per thread of the warp group that gathers rows."""
    programs_per_sm: int | None = 1
    """Programs per multiprocessor that take piece after piece of the work; None launches one
    program for each piece."""
    tokens: int = 1
    """Neighbouring tokens whose heads fill a tile, and whose lists are joined: 1, 2, 4 or 8."""


@dataclass(frozen=True)
class NarrowSparseTile:
    """Options of the Hopper kernel for few heads; other values are alternatives to be measured."""

    second_registers: int = 208
    """Registers per thread of the second warp group that multiplies, a multiple of 8. The first
    warp group has the rest of 504."""
    producer_registers: int = 88
    """Registers per thread of the warp group that copies rows."""
    balanced: bool | None = None
    """Programs walk equally many tiles if there is a row for each, so that two programs may share a
    list. None does so only where the last round of whole lists would leave many of them idle."""
    programs_per_sm: int | None = 1
    """Programs per multiprocessor that take piece after piece of the work; None launches one
    program for each piece."""


@dataclass(frozen=True)
class SparseTile:
    """How a launch cuts its work into programs, and its compile options.

    Fields with a default are alternatives to be measured; results differ at most in rounding.
    """

    rows: int
    """Heads of a program."""
    kv_tile: int
    """Listed keys of one step."""
    segment: int
    """Listed keys of one state; where segments end follows from the position in the list alone."""
    span: int
    """Segments of a program; a program with all segments of a row writes the result itself."""
    num_warps: int
    num_stages: int
    carries_ids: bool = True
    """Indices go from step to step in registers. Otherwise the compiler's pipeline copies them to
    shared memory first."""
    holds_next: bool = False
    """The next step's latents wait in registers, for code in which the compiler does not copy them
    ahead."""
    many: bool = False
    """The portable kernel for many heads takes the rows."""
    max_registers: int | None = None
    """Most registers per thread; None leaves the number to the compiler."""
    finish_rows: int = 4
    """Heads of a program that folds stored states."""
    finish_width: int = 128
    """Columns of a program that folds stored states."""
    hastens: bool = False
    """The portable kernel that attends and the kernel that folds stored states may start while the
    kernel before still runs, and wait by themselves (programmatic dependent launch)."""
    hopper: HopperSparseTile | NarrowSparseTile | None = None
    """Options of the Hopper kernel that takes the rows, as
    :func:`builders.sparse.hopper_tiles.hopper_sparse_tile` cuts them; None for a portable
    kernel."""
    shares: int = 0
    """Programs of the Hopper kernel that walk equally many tiles; 0 where each program takes whole
    pieces of work."""

    def __post_init__(self) -> None:
        """Refuse tiles that no launch can have.

        Raises:
            ValueError: a segment is no whole number of steps; a program has several segments and no
                registers to fold them in; or latents are loaded before their indices.
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
        """Whether a program can fold its segments one after another, with the bits that folding
        stored states gives.
        """
        return self.rows <= MOST_FOLDED_ROWS

    def head_tiles(self, num_heads: int) -> int:
        """Programs that share a row's heads."""
        return cdiv(num_heads, self.rows)

    def segments(self, topk: int) -> int:
        """Segments of a row whose list is full."""
        return max(cdiv(topk, self.segment), 1)

    def programs(self, topk: int) -> int:
        """Programs that share the keys of a row whose list is full."""
        return cdiv(self.segments(topk), self.span)

    @property
    def tokens(self) -> int:
        """Tokens whose lists are joined; 1 where every token has a list of its own."""
        return self.hopper.tokens if isinstance(self.hopper, HopperSparseTile) else 1

    @property
    def counters(self) -> int:
        """Number of counters, which count the programs that arrive where two shares meet.

        There is one for each program and each half of the columns, which the narrow kernel does not
        divide: it uses half of them.
        """
        return 2 * self.shares

    def state_floats(
        self, num_rows: int, num_heads: int, topk: int, rank: int = 512
    ) -> tuple[int, int]:
        """fp32 elements of stored states, and of their maxima and sums; 0 where none is stored."""
        if self.shares:
            # Both parts of a list are stored where two shares meet; each half of the columns has
            # maxima and sums of its own. The narrow kernel does not divide the columns, so it
            # leaves half of the maxima and sums unused.
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
    """The portable kernel's tile for a number of rows.

    With ``batch_invariant`` a row's bits depend on the row alone, whatever the number of rows. They
    also do where tiles fold, unless the device is Hopper. Tiles fold with up to 16 heads, and on
    all devices but Hopper. On Hopper few rows are computed with a segment in one step, which is
    another order of sums. Where tiles do not fold, the number of rows decides into how many
    segments a list is cut.

    Args:
        shape: the layer.
        kind: kind of the device.
        multiprocessors: multiprocessors of the device.
        num_rows: rows of the launch, padding included.
        batch_invariant: a row's bits must depend on the row alone.
    """
    tile = _tile_of(shape, kind)
    segments = tile.segments(shape.topk)
    programs = max(num_rows, 1) * tile.head_tiles(shape.num_heads)
    if tile.folds:
        # A program that has all keys of a row stores no state. So programs take whole rows as soon
        # as the rows' programs fill half the device.
        if 2 * programs > multiprocessors:
            return replace(tile, span=segments)
        split = replace(tile, span=1, hastens=kind is DeviceKind.SM90)
        split = replace(split, finish_rows=rows_to_finish(programs, multiprocessors))
        if kind is not DeviceKind.SM90 or shape.element_bytes > 2 or batch_invariant:
            return split
        # A segment in one step, so that all its keys are loaded at once. By steps of 64 keys
        # `dec_656_h16_b1` took 17.8 us, in one step 13.2 us; `dec_bf16_h16_b1` took 17.6 us by
        # steps, in one step 12.6 us.
        # Half a segment where programs leave most of the device idle: more states are folded, but
        # each comes earlier. One row of `dec_656_h16_b1` takes 11.0 us for 11.9, four rows 13.9 us
        # for 12.4.
        keys = SEGMENT // 2 if 8 * segments * programs <= multiprocessors else SEGMENT
        split = replace(split, kv_tile=keys, segment=keys)
        if shape.layout is LatentFormat.BF16:
            return replace(split, num_stages=1)
        return split
    finish = rows_to_finish(programs, multiprocessors)
    tile = replace(tile, hastens=kind is DeviceKind.SM90, finish_rows=finish)
    if batch_invariant:
        return tile
    # Each program has one segment, and there are as many programs as fill the device once.
    parts = max(1, min(segments, multiprocessors // programs))
    return replace(tile, segment=cdiv(segments, parts) * tile.segment)


def rows_to_finish(programs: int, multiprocessors: int) -> int:
    """Heads of a program that folds stored states; no bit of a result depends on the number.

    Where few programs attend, the step waits for the programs that fold, so each folds one head.
    `dec_656_h16_b1` took 11.8 us with one head, and 13.7 us with four.

    Args:
        programs: rows times tiles of heads.
        multiprocessors: multiprocessors of the device.
    """
    return 1 if 16 * programs <= multiprocessors else SparseTile.finish_rows


def _tile_of(shape: SparseShape, kind: DeviceKind) -> SparseTile:
    """The tile by heads and layout; the compile tests show that it compiles without spills."""
    is_wide = shape.element_bytes > 2
    is_native = shape.layout is LatentFormat.BF16
    heads = shape.num_heads
    if kind is not DeviceKind.SM90 or is_wide or heads <= FEWEST_ROWS:
        if is_wide:
            return SparseTile(FEWEST_ROWS, 16, SEGMENT, 1, num_warps=8, num_stages=2)
        # On other devices 64 keys are not measured, and do not fit shared memory everywhere.
        keys = 64 if kind is DeviceKind.SM90 else 32
        return SparseTile(FEWEST_ROWS, keys, SEGMENT, 1, 8, 3, holds_next=not is_native)
    if is_native and heads <= 2 * FEWEST_ROWS:
        return SparseTile(2 * FEWEST_ROWS, 32, WIDE_SEGMENT, 1, num_warps=8, num_stages=3)
    # On Hopper products by warp group need 64 rows.
    return SparseTile(MOST_ROWS, 64, WIDE_SEGMENT, 1, 8, 2, many=True)


@dataclass(frozen=True)
class IndexTile:
    """How launches of the indexer cut their work; all fields are alternatives to be measured."""

    pages: int = 2
    """Pages of one step over a row's keys."""
    steps: int = 4
    """Steps of a program that scores over pages."""
    keys: int = 128
    """Gathered keys of a program."""
    rows: int = 32
    """Rows of queries that a program scores over its gathered keys."""
    num_warps: int = 4
    num_stages: int = 3
    fp8_products: bool = False
    """e4m3 queries and keys are multiplied as e4m3, whose sums have less than fp32's precision.
    Otherwise they are multiplied as fp16, exactly."""
    takes_hopper: bool = False
    """Whether the Hopper kernel scores over pages. It multiplies e4m3 as e4m3."""
    hopper_rows: int = 0
    """Most rows of queries that a program of the Hopper kernel scores over gathered keys; 0 gives
    all rows to the portable kernel. The Hopper kernel multiplies e4m3 as e4m3."""
    hopper_stages: int = 4
    """Rows of queries that are under way in the Hopper kernel, a power of two, at least 2."""
    hopper_at_once: int = 4
    """Rows of queries whose products follow each other without a pause in the Hopper kernel."""
    select_short: int = 4096
    """Logits of a short row, a power of two, at least 128; launches over short rows alone have
    kernels of their own, with fewer registers."""
    select_long: int = 16384
    """Most logits of a row that one program selects from, a power of two; longer rows are cut into
    segments of as many. Segments of long lists are longer, see :meth:`segment_of`."""
    select_warps: int = 4
    """Warps of a program that selects from a short row."""
    select_long_warps: int = 8
    """Warps of a program that selects from a longer one, or from a segment."""

    def segment_of(self, topk: int) -> int:
        """Most logits of a row that one program selects from, for lists of ``topk`` entries."""
        return max(self.select_long, 4 * (1 << (topk - 1).bit_length()))
