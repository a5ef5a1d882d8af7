"""Tiles of the attention kernels: how many queries and keys a program multiplies at a time.

A tile follows from the layer's shape and the GPU. Builders and launchers call the same functions,
so a plan and the kernels that it is made for agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

MOST_ROWS = 64
"""Query rows (tokens x heads of a group) of a tile of the split-KV kernel, at most."""
MOST_CELLS = 8192
"""Most elements of the output of a split-KV tile: each thread keeps its share of two outputs in
registers."""
LARGE_SHARED_MEMORY = 160 * 1024
"""Bytes of shared memory of a multiprocessor from which on the prefill kernel has large tiles."""


@dataclass(frozen=True)
class DenseShape:
    """The facts of a layer with keys and values per KV head that tile sizes depend on."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_size: int
    """Elements of a query or key of one head."""
    head_size_v: int
    """Elements of a value of one head."""
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
    """Query rows (tokens x heads) that the tile multiplies, some of them unused; a power of two."""
    tile_heads: int
    """Query heads of a tile, of one KV head."""
    head_tiles: int
    """Tiles that a KV head's group of query heads takes."""
    query_tokens: int
    """Query tokens of a tile."""
    kv_tile: int
    """Keys of a tile."""
    segment_scale: int
    """Segments are this many times as long as :data:`builders.splitkv.segments.SEGMENT`: a state
    grows with the query rows, and its cost for each key should not."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values that the loop over keys has under way."""
    programs_per_sm: int
    """Programs that run on a multiprocessor at the same time."""
    max_registers: int | None
    """Registers that each thread may have with ``programs_per_sm`` programs on a multiprocessor.

    The launch names the number because ptxas by itself takes fewer and spills. None on GPUs whose
    compiler has no such option."""

    @property
    def segment_unit(self) -> int:
        """Positions of :mod:`builders.splitkv.segments` that a tile spans.

        Each position stands for ``segment_scale`` tokens.
        """
        return self.kv_tile // self.segment_scale

    @property
    def sums_apart(self) -> int:
        """Columns of a tile whose sums of weights are kept apart until a segment ends.

        Warps of this tile share the keys out, eight neighbouring ones to a warp. A thread then adds
        columns of its own alone, and so does a thread of the prefill kernel, whose warps share the
        rows out.
        """
        return min(8 * self.num_warps, self.kv_tile)


@dataclass(frozen=True)
class PrefillTile:
    """Launch configuration of the prefill kernel."""

    query_tile: int
    """Query tokens of a tile."""
    kv_tile: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values that the loop over keys has under way."""
    pair_stages: int = 0
    """``num_stages`` for keys of 192 and values of 128 16-bit elements (expanded latent attention).

    The kernel then loads and multiplies the last 64 columns of the keys apart, instead of padding
    keys to 256 columns. 0 means that it pads them."""

    stores_totals: bool = False
    """Outputs over earlier segments wait in memory and not in registers (batch invariance)."""

    @property
    def for_pair(self) -> PrefillTile:
        """The tile for a layer with keys of 192 and values of 128 elements."""
        return replace(self, num_stages=self.pair_stages or self.num_stages)


@dataclass(frozen=True)
class HopperTile:
    """Launch configuration of the Hopper prefill kernel."""

    packed: int
    """Query heads of a tile, of one KV head: a power of two."""
    warp_groups: int
    """Warp groups that multiply, of 64 query rows each."""
    kv_tile: int
    """Keys of a tile."""
    width: int
    """The head size, rounded up to a power of two."""
    run: int
    """Consecutive tokens of a page that are loaded at once."""
    query_stages: int
    """Tiles of queries that shared memory holds."""
    num_stages: int
    """Tiles of keys and values that shared memory holds."""
    registers: int
    """Registers of a thread that multiplies."""
    extra: int = 0
    """Columns of a second product beside that of ``width`` columns. Keys have them; so have values
    where keys and values have one head size."""
    stores_totals: bool = False
    """Outputs over earlier segments wait in memory and not in registers (batch invariance)."""

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
    """Launch configuration of the Hopper split-KV kernel."""

    split: SplitTile
    """The tile as the plan knows it. It is also the portable kernel's launch configuration over the
    same plan, for layers whose tensors turn out not to be served by the Hopper kernel."""
    run: int
    """Consecutive tokens of a page that are loaded at once."""
    num_stages: int
    """Tiles of keys and values that shared memory holds."""
    least_tiles: int | None = None
    """Fewest tiles of a share, where work items are cut between any two tiles; None where they are
    cut at segments only.

    :mod:`attn.kernels.latent.hopper_wide.kernel` cuts between any two tiles, because its states are
    too large to store one for every segment."""
    row_cost: int = 0
    """Tiles that take as long as the beginning of a work item. Shares count it, so that programs
    with many short work items end with the others."""
    reads_again: bool = False
    """Several work items of a request read the same keys at the same time, because its heads or the
    tokens of a verify take several tiles. Only :mod:`attn.kernels.latent.hopper_wide.kernel` uses
    it; tiles of other kernels leave it False."""
    rounds_queries: bool = False
    """Queries are rounded to e4m3 (``EngineConfig.fp8_mla_queries``). Only
    :mod:`attn.kernels.latent.hopper_wide.kernel` does, over e4m3."""
    consumers: int = 1
    """Warp groups that multiply. With two, each takes every other tile of keys, and their states
    are merged at the end of each segment. Only :mod:`attn.kernels.dense.hopper_decode.kernel` has
    two."""


def split_tile(
    shape: DenseShape, gpu: GpuFacts, max_query_len: int, window: int | None = None
) -> SplitTile:
    """The portable split-KV kernel's tile of a layer.

    All work items of a configuration have the same tile, so a request's bits do not depend on how
    many of its tokens are computed together.

    Args:
        shape: the layer.
        gpu: the GPU that runs the layer.
        max_query_len: query tokens of a verify, all of which should share one pass over the keys.
        window: largest visible span of one query, or None.
    """
    most_rows = min(MOST_ROWS, max(MOST_CELLS // shape.width, 16))
    head_tiles = cdiv(shape.group, most_rows)
    tile_heads = cdiv(shape.group, head_tiles)
    rows = min(max(power_of_two(tile_heads * max_query_len), 16), most_rows)
    # A stage holds about 16 KiB of keys and as much of values.
    wide = shape.itemsize > 2
    kv_tile = min(max((4096 if wide else 8192) // shape.width, 16), 128)
    narrow = shape.stored_bits < 16
    if rows == MOST_ROWS and shape.width <= 64 and not (wide or narrow):
        # Scores of 64 rows and twice as many keys are spilled. On an H200 a verify of 64 rows took
        # 302 us with twice as many keys, and takes 180 us. At head size 128 full batches gain as
        # well, but a step of few programs takes 1.4 times as long.
        kv_tile //= 2
    stages = 4 if narrow else 3
    warps, most_programs = 4, 2
    if narrow and rows == 16:
        # Stored elements have to be dequantised too, which takes more warps. More keys between two
        # barriers give the warps enough work.
        kv_tile, stages, warps = min(2 * kv_tile, 128), 3, 8
    elif rows == 16 and shape.width <= 64 and not wide and (window or 4096) <= 256:
        # Behind a narrow window a work item has few tiles, so the number of work items under way
        # decides: four programs of two warps. Wider heads would spill with two warps.
        kv_tile, stages, warps, most_programs = 64, 2, 2, 4
    row_bytes = 2 * shape.width * shape.stored_bits // 8
    room = gpu.shared_memory
    # Shared memory also holds the query, and the fp32 output while its layout changes.
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
        # Scratch grows with the query tokens of a tile, so there are no more than a verify has.
        query_tokens=max(1, min(rows // tile_heads, max_query_len)),
        kv_tile=kv_tile,
        segment_scale=1 if rows <= 16 else rows // 8,
        num_warps=warps,
        num_stages=stages,
        programs_per_sm=programs,
        max_registers=registers_per_thread(warps * programs) if gpu.is_nvidia else None,
    )


def invariant_split_tile(
    shape: DenseShape, gpu: GpuFacts, max_query_len: int, window: int | None = None
) -> SplitTile:
    """The tile of a batch-invariant engine, whose keys prompts have too.

    Arguments are those of :func:`split_tile`.
    """
    if gpu.kind is not DeviceKind.SM90 or shape.itemsize != 2:
        return split_tile(shape, gpu, max_query_len, window)
    # Tiles of two warps, for narrow windows, keep fewer sums apart than the Hopper kernel's four
    # warps can.
    tile = split_tile(shape, gpu, max_query_len)
    if 128 < shape.width <= 256 and shape.stored_bits == 16 and tile.rows == 16:
        # Half as many keys, as split_tile has, cost prompts twice the barriers: on an H200 1.7 of
        # the default's time instead of 1.5. Decodes go to the Hopper kernel, with one program.
        tile = replace(tile, kv_tile=64, num_stages=2, programs_per_sm=1)
    return tile


def registers_per_thread(num_warps: int) -> int:
    """Registers that each thread of ``num_warps`` warps on one multiprocessor can have."""
    return min(65536 // (32 * num_warps), 255)


def prefill_tile(shape: DenseShape, gpu: GpuFacts) -> PrefillTile:
    """The portable prefill kernel's tile of a layer on a GPU."""
    if shape.itemsize > 2:
        return PrefillTile(32, 32 if shape.width <= 128 else 16, 4, 2)
    small = gpu.shared_memory < LARGE_SHARED_MEMORY
    if shape.width <= 64:
        return PrefillTile(128, 64, 4, 3)
    if shape.width <= 128:
        return PrefillTile(64, 64, 4, 2 if small else 3)
    if shape.width <= 256:
        # On Hopper a product still reads one stage while the next is loaded. With two stages every
        # iteration would wait for the load that the previous iteration started.
        pair = 3 if gpu.kind is DeviceKind.SM90 else 0
        return PrefillTile(64, 32, 4, 2) if small else PrefillTile(128, 64, 8, 2, pair)
    return PrefillTile(32, 16, 4, 2) if small else PrefillTile(64, 32, 8, 2)


def segmented_tile(shape: DenseShape, gpu: GpuFacts, split: SplitTile) -> PrefillTile | str:
    """The portable prefill kernel's tile where its rows have the bits of the split-KV kernel's.

    Both kernels multiply tiles of the same keys. There are two states, of a segment and of those
    before it. Where registers have no room for both, the second one waits in memory: outputs of
    more than 128 columns, and outside Hopper, where queries are in registers too, of more than 64.
    Over quantised caches, whose tiles have twice the keys, those are all but the outputs of up to
    64 columns on Hopper.

    Args:
        shape: the layer.
        gpu: the GPU that runs the layer.
        split: the split-KV kernel's tile.

    Returns:
        The tile, or why there is none.
    """
    if shape.width > 256:
        return f"head size {max(shape.head_size, shape.head_size_v)} is above 256"
    is_hopper = gpu.kind is DeviceKind.SM90
    if shape.stored_bits < 16:
        # Threads also hold the keys that they dequantise: larger tiles would spill in the loop.
        if shape.width > 128:
            return PrefillTile(64, split.kv_tile, 8, 2, stores_totals=True)
        if shape.width > 64 and is_hopper:
            return PrefillTile(128, split.kv_tile, 8, 2, stores_totals=True)
        rows = 32 if shape.width > 64 else 64
        return PrefillTile(rows, split.kv_tile, 4, 2, stores_totals=not is_hopper)
    if shape.width > 128:
        rows = 128 if is_hopper else 64
        return PrefillTile(rows, split.kv_tile, 8, 2, stores_totals=True)
    if shape.width > 64 and not is_hopper:
        return PrefillTile(64, split.kv_tile, 4, 2, stores_totals=True)
    # Two programs share a multiprocessor: one multiplies while the other computes weights.
    return PrefillTile(64, split.kv_tile, 4, 2 if gpu.shared_memory < LARGE_SHARED_MEMORY else 3)
