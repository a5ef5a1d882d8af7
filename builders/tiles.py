"""Tiles of the dense attention kernels: functions of the layer's shape and the kind of device.

Builders and launchers share them, so that a plan and the kernels that it is for agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from specs.base import cdiv
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.engine import DecodeKernel, PrefillKernel

MOST_ROWS = 64
"""Query rows (tokens x heads of a group) of a tile of the split-KV kernel, at most."""
MOST_CELLS = 8192
"""Elements of such a tile's output, at most: a thread keeps two states of its share."""
SHARED_MEMORY = {
    DeviceKind.SM80: 163,
    DeviceKind.SM89: 99,
    DeviceKind.SM90: 227,
    DeviceKind.SM100: 227,
    DeviceKind.SM120: 99,
    DeviceKind.ROCM: 64,
}
"""KiB of shared memory that the programs of one multiprocessor may use."""
HOPPER_RING = 192 * 1024
"""Bytes of keys and values under way in the split-KV kernel for Hopper."""
NVIDIA = frozenset(SHARED_MEMORY) - {DeviceKind.ROCM}


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
class LayerAsks:
    """What a layer asks of the kernels for Hopper, beyond its shape.

    A builder leaves out what only the layer and its tensors show; a launcher asks with all of it.
    """

    batch_invariant: bool = False
    """Same bits however a prompt is chunked: every row is the split-KV kernel's."""
    is_local: bool = False
    """Queries see a window or chunk only."""
    dcp: bool = False
    """The cache holds one rank's keys."""
    rswa: bool = False
    alibi: bool = False
    positions: bool = False
    """Where queries stand does not follow from lengths, and counts."""
    scale: float = 1.0
    """Multiplies q.k."""
    query: DType | None = None
    """Type of the model's elements; None where it is not known."""
    cache_dtype: CacheDType | None = None
    """Of the cache; None likewise."""
    alignments: tuple[tuple[str, int], ...] = ()
    """Bytes that rows are aligned to, by tensor, as far as they are known."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


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
        """Tokens of a tile, in the positions that :mod:`builders.segments` knows."""
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
    where segments end. See :mod:`attn.kernels.hopper.mla`, whose states are too large for that."""
    row_cost: int = 0
    """Tiles that the beginning of such a row takes as long as: programs of many short rows would be
    waited for."""
    consumers: int = 1
    """Warp groups that multiply, each with every other tile of keys, whose states meet at the end
    of each segment: see :mod:`attn.kernels.hopper.decode`, the only kernel that has two."""


_Tile = TypeVar("_Tile", HopperTile, HopperDecodeTile)


def split_tile(
    shape: DenseShape, kind: DeviceKind, max_query_len: int, window: int | None = None
) -> SplitTile:
    """The split-KV tile of a layer.

    One shape serves every row of a configuration, so that a row's bits do not depend on the number
    of tokens that it is computed with.

    Args:
        shape: the layer.
        kind: device.
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
    room = SHARED_MEMORY.get(kind, 99) * 1024
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
    programs = max(1, min(most_programs, room // max(needed(), 1)))
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
        max_registers=_registers(warps * programs) if kind in NVIDIA else None,
    )


def _registers(num_warps: int) -> int:
    """Registers that each thread of ``num_warps`` warps on one multiprocessor can have."""
    return min(65536 // (32 * num_warps), 255)


def prefill_tile(shape: DenseShape, kind: DeviceKind) -> PrefillTile:
    """The prefill tile of a layer."""
    if shape.itemsize > 2:
        return PrefillTile(32, 32 if shape.width <= 128 else 16, 4, 2)
    small = SHARED_MEMORY.get(kind, 99) < 160
    if shape.width <= 64:
        return PrefillTile(128, 64, 4, 3)
    if shape.width <= 128:
        return PrefillTile(64, 64, 4, 2 if small else 3)
    if shape.width <= 256:
        # Products by warp group read from one stage more than is loaded: with two, each iteration
        # waits for what the last one asked for.
        pair = 3 if kind is DeviceKind.SM90 else 0
        return PrefillTile(64, 32, 4, 2) if small else PrefillTile(128, 64, 8, 2, pair)
    return PrefillTile(32, 16, 4, 2) if small else PrefillTile(64, 32, 8, 2)


def chosen_kernel(
    option: str,
    wanted: PrefillKernel | DecodeKernel,
    found: _Tile | str,
    *,
    layer: str = "layer",
    left: str | None = None,
    why: str = "it serves this layer",
) -> tuple[_Tile | None, str]:
    """The kernel for Hopper or the plain one: what was wanted, of what there is, and the reason.

    Args:
        option: the engine's setting.
        wanted: its value.
        found: the Hopper kernel's tile, or why it does not serve.
        layer: what an error calls the layer.
        left: why it is not taken though it serves, unless it is wanted by name.
        why: why it is.

    Returns:
        The Hopper kernel's tile, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    if wanted.value == "triton":
        return None, f"{option} is {wanted.value!r}"
    by_name = wanted.value == "hopper"
    if isinstance(found, str):
        if by_name:
            raise ValueError(f"{option} 'hopper' does not serve this {layer}: {found}")
        return None, f"the one for Hopper does not serve: {found}"
    if by_name:
        return found, f"it serves this layer, and {option} is {wanted.value!r}"
    if left is not None:
        return None, f"the one for Hopper serves, but {left}"
    return found, f"{why}, and {option} is {wanted.value!r}"


def prefill_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    asks: LayerAsks,
    wanted: PrefillKernel,
) -> tuple[HopperTile | None, str]:
    """Which kernel takes a layer's rows with many new tokens, and why.

    Builder, launcher and ``attn explain`` decide by this alone.

    Args:
        shape: the layer.
        kind: device.
        block_size: tokens of a page; 0 without pages.
        asks: what else the layer asks, as far as it is known.
        wanted: what the engine is configured to.

    Returns:
        The Hopper kernel's tile, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_tile(shape, kind, block_size, asks)
    return chosen_kernel("prefill_kernel", wanted, found)


def hopper_tile(
    shape: DenseShape, kind: DeviceKind, block_size: int, asks: LayerAsks = LayerAsks()
) -> HopperTile | str:
    """The Hopper prefill kernel's tile of a layer, or why the kernel does not take it.

    Args:
        shape: the layer.
        kind: device.
        block_size: tokens of a page; 0 without pages.
        asks: what else the layer asks, as far as it is known.
    """
    refused = misfit_of(shape, kind, block_size)
    if refused is not None:
        return refused
    if not 48 <= shape.head_size <= 256 or shape.head_size % 8:
        return f"head size {shape.head_size} is not a multiple of 8 from 48 to 256"
    extra = 0
    if shape.head_size != shape.head_size_v:
        # Latent attention, expanded.
        if (shape.head_size, shape.head_size_v, shape.stored_bits) != (192, 128, 16):
            return (
                f"head size {shape.head_size} is not that of values, {shape.head_size_v}, nor are "
                "they 192 and 128 of 16 bits"
            )
        extra = 64
    if asks.batch_invariant:
        return "batch invariance, for which every row goes to the split-KV kernel"
    refused = refusal_of(asks)
    if refused is not None:
        return refused
    run = block_size & -block_size if block_size else 128
    packed = min(shape.group & -shape.group, 64)
    if shape.stored_bits == 8:
        # The producers are two warp groups, of wide heads one, and need registers, too.
        if shape.width <= 64:
            return HopperTile(packed, 2, 128, 64, min(run, 128), 2, 3, 176)
        if shape.width <= 128:
            return HopperTile(packed, 2, 128, 128, min(run, 128), 2, 2, 192)
        return HopperTile(packed, 2, 64, 256, min(run, 64), 1, 2, 208)
    # Measured: 192 rows for narrow heads, fewer keys for wide ones, whose accumulators are large.
    if extra:
        return HopperTile(packed, 2, 128, 128, min(run, 128), 1, 2, 240, extra)
    if shape.width <= 64:
        return HopperTile(packed, 3, 128, 64, min(run, 128), 2, 3, 160)
    if shape.width <= 128:
        return HopperTile(packed, 2, 128, 128, min(run, 128), 2, 2, 240)
    return HopperTile(packed, 2, 64, 256, min(run, 64), 1, 2, 240)


def decode_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerAsks,
    wanted: DecodeKernel,
) -> tuple[HopperDecodeTile | None, str]:
    """Which kernel takes a layer's rows with few new tokens, and why.

    Builder, launcher and ``attn explain`` decide by this alone.

    Args:
        shape: the layer.
        kind: device.
        block_size: tokens of a page; 0 without pages.
        max_query_len: query tokens of a verify, all of which share one pass over the keys.
        asks: what else the layer asks, as far as it is known.
        wanted: what the engine is configured to.

    Returns:
        The Hopper kernel's tile, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_decode_tile(shape, kind, block_size, max_query_len, asks)
    slower = None if isinstance(found, str) else _measured_slower(shape, found.split, asks)
    left = None if slower is None else f"did not measure faster with {slower}"
    why = "it measured faster in such layers"
    return chosen_kernel("decode_kernel", wanted, found, left=left, why=why)


def _measured_slower(shape: DenseShape, tile: SplitTile, asks: LayerAsks) -> str | None:
    """Of what a layer has, where the Hopper split-KV kernel was not the faster one on an H200.

    Times of both are in docs/performance.md; large batches over many KV heads are the plain one's.
    """
    if shape.stored_bits != 16:
        return f"a cache of {shape.stored_bits} bits"
    if asks.is_local:
        return "a window or chunks"
    if tile.rows > 16:
        return f"tiles of {tile.tile_heads * tile.query_tokens} rows, which are more than 16"
    if shape.head_size == 256:
        return None
    if shape.head_size != 128:
        return f"head size {shape.head_size}"
    heads = shape.num_kv_heads
    return None if heads <= 2 else f"{heads} KV heads of head size 128, which are more than 2"


def hopper_decode_tile(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerAsks = LayerAsks(),
) -> HopperDecodeTile | str:
    """The Hopper split-KV kernel's tile of a layer, or why the kernel does not take it.

    Args:
        shape: the layer.
        kind: device.
        block_size: tokens of a page; 0 without pages.
        max_query_len: query tokens of a verify, all of which share one pass over the keys.
        asks: what else the layer asks, as far as it is known.
    """
    refused = misfit_of(shape, kind, block_size)
    if refused is not None:
        return refused
    if block_size == 0:
        return "there are no pages"
    if shape.head_size != shape.head_size_v:
        return f"head size {shape.head_size} is not that of values, {shape.head_size_v}"
    is_e4m3 = shape.stored_bits == 8
    sizes = (128, 256) if is_e4m3 else (64, 128, 256)
    if shape.head_size not in sizes:
        return f"head size {shape.head_size} is not one of {sizes}"
    if asks.cache_dtype is CacheDType.FP8_E5M2:
        return f"a cache of {asks.cache_dtype}"
    refused = refusal_of(asks)
    if refused is not None:
        return refused
    # Of 64 rows of wide heads, a thread's share of two states would be too much; e4m3 is converted
    # in registers, where products of 64 rows do not look for keys.
    most_rows = 16 if shape.head_size == 256 or is_e4m3 else 64
    head_tiles = cdiv(shape.group, most_rows)
    tile_heads = cdiv(shape.group, head_tiles)
    if tile_heads * max_query_len > most_rows:
        return (
            f"a tile of {tile_heads} query heads and {max_query_len} query tokens has more than "
            f"{most_rows} rows"
        )
    query_tokens = min(most_rows // tile_heads, 16 if asks.batch_invariant else max_query_len)
    used = tile_heads * query_tokens
    # 64 KiB of keys and values in a stage where barriers cost, which they do per tile of 16 rows;
    # fewer keys where a thread has two states of 64 rows already.
    kv_tile = 64 if shape.head_size == 256 or (used > 16 and shape.head_size == 128) else 128
    split = SplitTile(
        rows=16 if used <= 16 else 64,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        query_tokens=query_tokens,
        kv_tile=kv_tile,
        segment_scale=1 if used <= 16 else power_of_two(used) // 8,
        # Of the plain kernel, where it has to do with this plan.
        num_warps=8,
        num_stages=2,
        programs_per_sm=1,
        max_registers=_registers(8),
    )
    stage = 2 * kv_tile * shape.head_size * shape.stored_bits // 8
    # Beside the ring there are queries of both consumers then, and a state on its way.
    consumers = _consumers(shape, used)
    ring = HOPPER_RING // 6 * 5 if used > 16 and consumers > 1 else HOPPER_RING
    return HopperDecodeTile(
        split, min(block_size & -block_size, kv_tile), ring // stage, consumers=consumers
    )


def _consumers(shape: DenseShape, used: int) -> int:
    """Warp groups that multiply, each with every other tile of keys.

    Two where one would need as long for a tile as its keys do to come, 1700 to 2000 clocks for
    32 KiB: 64 rows of heads of 128, whose products wait for their softmax, and few bytes per key.
    Otherwise memory is waited for anyway, and two states of wide heads would be spilled.
    """
    if shape.head_size == 128:
        return 2 if used > 16 or shape.stored_bits == 8 else 1
    return 2 if shape.head_size == 64 and used <= 16 else 1


def misfit_of(shape: DenseShape, kind: DeviceKind, block_size: int) -> str | None:
    """Of a layer's geometry, what no kernel for Hopper takes; None where there is no such thing."""
    if kind is not DeviceKind.SM90:
        return f"the device is {kind.value}, not {DeviceKind.SM90.value}"
    if shape.itemsize != 2:
        return f"the model's elements have {shape.itemsize} bytes, not 2"
    if shape.stored_bits not in (8, 16):
        return f"the cache's elements have {shape.stored_bits} bits, not 8 or 16"
    return f"block size {block_size} is not a multiple of 16" if block_size % 16 else None


def _stored_type(cache_dtype: CacheDType, query: DType) -> DType | CacheDType | None:
    """Of the cache's elements, as far as it has to be the query's; None where it has not."""
    if not cache_dtype.is_quantized:
        return cache_dtype.element(query)
    if cache_dtype.quant_mode is not KVQuantMode.FP8_PER_TENSOR:
        return cache_dtype
    # fp16 has as many bits of exponent as e5m2: what nothing was written to could be infinite.
    is_e5m2 = cache_dtype.element(query) is DType.FLOAT8_E5M2
    return cache_dtype if is_e5m2 and query is DType.FLOAT16 else None


def refusal_of(asks: LayerAsks) -> str | None:
    """What no kernel for Hopper does of what a layer asks; None where there is no such thing."""
    named = {
        "ALiBi": asks.alibi,
        "positions of queries": asks.positions,
        "R-SWA": asks.rswa,
        "decode context parallelism": asks.dcp,
    }
    for name, is_asked in named.items():
        if is_asked:
            return name
    query = asks.query
    if query is not None:
        stored = None if asks.cache_dtype is None else _stored_type(asks.cache_dtype, query)
        if stored not in (None, query):
            return f"a cache of {stored} for a query of {query}"
    if asks.scale <= 0:
        return f"scale {asks.scale} is not positive"
    for name, alignment in asks.alignments:
        if alignment < 16:
            return f"rows of {name} are aligned to {alignment} bytes, not 16"
    return None
