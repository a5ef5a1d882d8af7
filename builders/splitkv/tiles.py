"""Tiles of the dense attention kernels: functions of the layer's shape and the GPU.

Builders and launchers share them, so that a plan and the kernels that it is for agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

MOST_ROWS = 64
"""Query rows (tokens x heads of a group) of a tile of the split-KV kernel, at most."""
MOST_CELLS = 8192
"""Elements of such a tile's output, at most: a thread keeps two states of its share."""
LARGE_SHARED_MEMORY = 160 * 1024
"""Bytes of shared memory from which on prefill has its large tiles."""


@dataclass(frozen=True)
class DenseShape:
    """What tile sizes depend on, of a layer with K and V per KV head."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    itemsize: int
    """Bytes of an element of the model."""
    stored_bits: int
    """Bits of an element of the cache."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        """The larger head size, rounded up to a power of two."""
        return power_of_two(max(self.head_size, self.head_size_v))


@dataclass(frozen=True)
class SplitTile:
    """Launch configuration of the split-KV kernel."""

    rows: int
    """M of the tile, a power of two."""
    tile_heads: int
    """Query heads of a tile, of one KV head."""
    head_tiles: int
    """Tiles that a KV head's group of query heads takes."""
    query_tokens: int
    """Query tokens of a tile."""
    kv_tile: int
    """Keys of a tile."""
    segment_scale: int
    """Segments are this many times as long: a state grows with the rows, its cost should not."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int | None
    """Registers per thread that the programs of a multiprocessor leave each other; named, since
    ptxas takes fewer and spills. None where there is no such option."""

    @property
    def segment_unit(self) -> int:
        """Tokens of a tile, in the positions that :mod:`builders.splitkv.segments` knows."""
        return self.kv_tile // self.segment_scale


@dataclass(frozen=True)
class PrefillTile:
    """Launch configuration of the prefill kernel."""

    query_tile: int
    kv_tile: int
    num_warps: int
    num_stages: int
    pair_stages: int = 0
    """Stages for keys of 192 and values of 128 16-bit elements (latent attention, expanded), the
    last 64 columns of whose keys are then loaded and multiplied apart, where others are padded to
    256. 0 where those are padded too."""

    @property
    def for_pair(self) -> PrefillTile:
        """The same for a layer of such heads."""
        return replace(self, num_stages=self.pair_stages or self.num_stages)


@dataclass(frozen=True)
class HopperTile:
    """Launch configuration of the prefill kernel for Hopper."""

    packed: int
    """Query heads of a tile, of one KV head: a power of two."""
    warp_groups: int
    """Warp groups that multiply, of 64 query rows each."""
    kv_tile: int
    width: int
    """The head size, rounded up to a power of two."""
    run: int
    """Consecutive tokens of a page that are loaded at once."""
    query_stages: int
    num_stages: int
    registers: int
    """Registers of a thread that multiplies."""
    extra: int = 0
    """Columns of keys beyond ``width``, which is then that of values."""

    @property
    def rows_per_group(self) -> int:
        """Query tokens of a warp group."""
        return 64 // self.packed

    @property
    def query_tile(self) -> int:
        """Query tokens of a tile."""
        return self.warp_groups * self.rows_per_group


@dataclass(frozen=True)
class HopperDecodeTile:
    """Launch configuration of the split-KV kernel for Hopper."""

    split: SplitTile
    """What the plan knows of it; and the plain kernel's launch configuration over such a plan, for
    a layer that only its tensors show not to be served."""
    run: int
    """Consecutive tokens of a page that are loaded at once."""
    num_stages: int
    """Tiles under way."""
    least_tiles: int | None = None
    """Rows are cut between any two tiles, for shares of so many tiles at least; None cuts them
    where segments end. See :mod:`attn.kernels.latent.hopper_wide.kernel`, whose states are too
    large for that."""
    row_cost: int = 0
    """Tiles that the beginning of such a row takes as long as: programs of many short rows would be
    waited for."""
    consumers: int = 1
    """Warp groups that multiply, each with every other tile of keys, whose states meet at the end
    of each segment: see :mod:`attn.kernels.dense.hopper_decode.kernel`, the only kernel that has
    two."""


def split_tile(
    shape: DenseShape, gpu: GpuFacts, max_query_len: int, window: int | None = None
) -> SplitTile:
    """The split-KV tile of a layer.

    One shape serves every row of a configuration, so that a row's bits do not depend on the number
    of tokens that it is computed with.

    Args:
        shape: the layer.
        gpu: what runs it.
        max_query_len: query tokens of a verify, all of which should share one pass over the keys.
        window: largest visible span of one query, or None.
    """
    most_rows = min(MOST_ROWS, max(MOST_CELLS // shape.width, 16))
    head_tiles = cdiv(shape.group, most_rows)
    tile_heads = cdiv(shape.group, head_tiles)
    rows = min(max(power_of_two(tile_heads * max_query_len), 16), most_rows)
    # About 16 KiB of keys and as much of values in a stage.
    wide = shape.itemsize > 2
    kv_tile = min(max((4096 if wide else 8192) // shape.width, 16), 128)
    narrow = shape.stored_bits < 16
    if rows == MOST_ROWS and shape.width <= 64 and not (wide or narrow):
        # Scores of twice as many keys are spilled: a verify of 64 rows took 302 us on an H200, so
        # 180. At head size 128 full batches gain likewise, but few programs take 1.4 times as long.
        kv_tile //= 2
    stages = 4 if narrow else 3
    warps, most_programs = 4, 2
    if narrow and rows == 16:
        # What is read has to be converted too: more keys between two barriers, for more warps.
        kv_tile, stages, warps = min(2 * kv_tile, 128), 3, 8
    elif rows == 16 and shape.width <= 64 and not wide and (window or 4096) <= 256:
        # Of a few tiles each, it is the number of rows under way at once that counts. Wider heads
        # would spill with two warps.
        kv_tile, stages, warps, most_programs = 64, 2, 2, 4
    row_bytes = 2 * shape.width * shape.stored_bits // 8
    room = gpu.shared_memory
    # The query, and the output on its way from one arrangement to another.
    fixed = rows * shape.width * (shape.itemsize + 4)

    def needed() -> int:
        return (stages - 1) * kv_tile * row_bytes + fixed

    while needed() > room and stages > 2:
        stages -= 1
    while needed() > room and kv_tile > 16:
        kv_tile //= 2
    if needed() > room:
        stages = 1
    programs = max(1, min(most_programs, gpu.programs(needed())))
    return SplitTile(
        rows=rows,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        # Scratch grows with it: no more than what should share one pass over the keys.
        query_tokens=max(1, min(rows // tile_heads, max_query_len)),
        kv_tile=kv_tile,
        segment_scale=1 if rows <= 16 else rows // 8,
        num_warps=warps,
        num_stages=stages,
        programs_per_sm=programs,
        max_registers=registers_per_thread(warps * programs) if gpu.is_nvidia else None,
    )


def registers_per_thread(num_warps: int) -> int:
    """Registers that each thread of ``num_warps`` warps on one multiprocessor can have."""
    return min(65536 // (32 * num_warps), 255)


def prefill_tile(shape: DenseShape, gpu: GpuFacts) -> PrefillTile:
    """The prefill tile of a layer on a GPU."""
    if shape.itemsize > 2:
        return PrefillTile(32, 32 if shape.width <= 128 else 16, 4, 2)
    small = gpu.shared_memory < LARGE_SHARED_MEMORY
    if shape.width <= 64:
        return PrefillTile(128, 64, 4, 3)
    if shape.width <= 128:
        return PrefillTile(64, 64, 4, 2 if small else 3)
    if shape.width <= 256:
        # Products by warp group read from one stage more than is loaded: with two, each iteration
        # waits for what the last one asked for.
        pair = 3 if gpu.kind is DeviceKind.SM90 else 0
        return PrefillTile(64, 32, 4, 2) if small else PrefillTile(128, 64, 8, 2, pair)
    return PrefillTile(32, 16, 4, 2) if small else PrefillTile(64, 32, 8, 2)
