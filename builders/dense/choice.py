"""Which dense layers take the Hopper kernels, with which tiles, and the reason in words.

Builder, launcher and ``attn explain`` all call these functions, so that they agree. A builder knows
the layers' specs only; a launcher also knows what a layer's tensors show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from builders.launch.call import is_by_ptxas_13
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    PrefillTile,
    SplitTile,
    registers_per_thread,
    segmented_tile,
)
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.engine import DecodeKernel, PrefillKernel

HOPPER_RING = 128 * 1024
"""Bytes of keys and values that a program of the Hopper split-KV kernel has under way. With half as
many again, 24 MB by all programs, decodes at head size 128 took 1 to 3 % longer."""

ONE_PRODUCT = (
    DeviceKind.CPU,
    DeviceKind.SM80,
    DeviceKind.SM89,
    DeviceKind.SM90,
    DeviceKind.SM120,
)
"""Kinds of devices whose 16-bit products have the same bits in tiles of any number of query rows.

Measured on Hopper (docs/notebook/invariance.md). Kinds 8.0, 8.9 and 12.0 have one instruction for
tiles of every size. A CPU's kernels are those of Triton's interpreter; tests make its products so.
"""

DENSE_OPTION = "kernels.dense.prefill"
"""The engine's setting that chooses the prefill kernel of dense layers."""
LATENT_OPTION = "kernels.latent.prefill"
"""The engine's setting that chooses the prefill kernel of latent layers, over expanded keys."""

_Tile = TypeVar("_Tile")


@dataclass(frozen=True)
class LayerRequirements:
    """The requirements of a layer on the Hopper kernels, beyond its shape.

    A builder leaves out the requirements that only the layer and its tensors show. A launcher knows
    all of them.
    """

    batch_invariant: bool = False
    """The result has the same bits however a prompt is cut into chunks; prompts of dense layers
    then have the bits of the split-KV kernel, see :func:`segmented_prefill_of`."""
    kv_tile: int | None = None
    """Keys of the split-KV kernel's tiles, whose bits the Hopper prefill kernel's rows are to have;
    read with ``batch_invariant``, where None says that no prompt has a kernel of its own."""
    split: SplitTile | None = None
    """Tile of the split-KV kernel whose bits a request's rows are to have, whichever kernel takes
    them; read with ``batch_invariant``, where None says that no prompt has a kernel of its own."""
    is_local: bool = False
    """Queries see a window or a chunk only."""
    dcp: bool = False
    """The cache holds one rank's keys (decode context parallelism)."""
    rswa: bool = False
    """A prefix stays visible beside the window (R-SWA)."""
    alibi: bool = False
    """Scores have an ALiBi bias."""
    positions: bool = False
    """The mask needs positions of queries that do not follow from the lengths."""
    scale: float = 1.0
    """Factor of the products of query and key."""
    query: DType | None = None
    """Type of the model's elements; None where it is not known."""
    cache_dtype: CacheDType | None = None
    """Type of the cache's elements; None where it is not known."""
    fp8_queries: bool = False
    """Queries over an e4m3 cache may be rounded to e4m3."""
    dequantised: bool = False
    """Elements of 16 bits were dequantised from an 8-bit cache. The tile then has the query rows of
    a tile that dequantises its own keys, since a step takes either."""
    alignments: tuple[tuple[str, int], ...] = ()
    """Name of a tensor and bytes that its rows are aligned to, for the tensors that are known."""


def chosen_kernel(
    option: str,
    wanted: PrefillKernel | DecodeKernel,
    found: _Tile | str,
    *,
    layer: str = "layer",
    left: str | None = None,
    why: str = "it serves this layer",
) -> tuple[_Tile | None, str]:
    """Choose between the Hopper kernel and the portable kernel.

    Args:
        option: name of the engine's setting.
        wanted: value of that setting.
        found: the Hopper kernel's tile, or the reason why it does not serve the layer.
        layer: what an error calls the layer.
        left: why ``"auto"`` does not take the Hopper kernel though it serves; None if it does.
        why: why ``"auto"`` takes the Hopper kernel.

    Returns:
        The Hopper kernel's tile, or None for the portable kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    if wanted.value == "triton":
        return None, f"{option} is {wanted.value!r}"
    by_name = wanted.value == "hopper"
    if isinstance(found, str):
        if by_name:
            raise ValueError(f"{option} 'hopper' does not serve this {layer}: {found}")
        return None, f"the Hopper kernel does not serve: {found}"
    if by_name:
        return found, f"it serves this layer, and {option} is {wanted.value!r}"
    if left is not None:
        return None, f"the Hopper kernel serves, but {left}"
    return found, f"{why}, and {option} is {wanted.value!r}"


def prefill_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    asks: LayerRequirements,
    wanted: PrefillKernel,
    option: str = DENSE_OPTION,
) -> tuple[HopperTile | None, str]:
    """Which kernel takes a layer's requests with many new tokens, and why.

    Builder, launcher and ``attn explain`` decide by this function alone.

    Args:
        shape: the layer.
        kind: kind of the device.
        block_size: tokens of a page; 0 without pages.
        asks: the layer's other requirements, as far as they are known.
        wanted: the engine's setting.
        option: name of that setting; ``LATENT_OPTION`` for expanded latent layers.

    Returns:
        The Hopper kernel's tile, or None for the portable kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_tile(shape, kind, block_size, asks)
    return chosen_kernel(option, wanted, found)


def hopper_tile(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    asks: LayerRequirements = LayerRequirements(),
) -> HopperTile | str:
    """The Hopper prefill kernel's tile of a layer, or the reason why the kernel does not take it.

    Args:
        shape: the layer.
        kind: kind of the device.
        block_size: tokens of a page; 0 without pages.
        asks: the layer's other requirements, as far as they are known.
    """
    refused = misfit_of(shape, kind, block_size)
    if refused is not None:
        return refused
    if not 48 <= shape.head_size <= 256 or shape.head_size % 8:
        return f"head size {shape.head_size} is not a multiple of 8 from 48 to 256"
    is_pair = shape.head_size != shape.head_size_v
    # Head sizes of expanded latent attention.
    if is_pair and (shape.head_size, shape.head_size_v, shape.stored_bits) != (192, 128, 16):
        return (
            f"head size {shape.head_size} is not that of values, {shape.head_size_v}, nor are they "
            "192 and 128 of 16 bits"
        )
    if asks.batch_invariant and asks.kv_tile is None:
        return "batch invariance, for which every row has the bits of the split-KV kernel"
    refused = refusal_of(asks)
    if refused is not None:
        return refused
    run = block_size & -block_size if block_size else 128
    packed = min(shape.group & -shape.group, 64)
    if asks.batch_invariant and asks.kv_tile is not None:
        if is_pair:
            return "batch invariance and heads of 192 and 128 elements"
        if shape.stored_bits == 8:
            # It dequantises keys to rows in their natural order. The split-KV kernel multiplies
            # even columns first and then odd ones, in sums of another order.
            return "batch invariance and a cache of 8 bits"
        return _segmented_tile(packed, run, asks.kv_tile, *_columns(shape.head_size))
    if shape.stored_bits == 8:
        # Producers dequantise and need registers too: two warp groups, or one at head size 256.
        if shape.width <= 64:
            return HopperTile(packed, 2, 128, 64, min(run, 128), 2, 3, 176)
        if shape.width <= 128:
            return HopperTile(packed, 2, 128, 128, min(run, 128), 2, 2, 192)
        return HopperTile(packed, 2, 64, 256, min(run, 64), 1, 2, 208)
    columns = _columns(shape.head_size)
    return _tile_of_16_bits(packed, run, *columns, is_pair, asks.dequantised)


def _tile_of_16_bits(
    packed: int, run: int, width: int, extra: int, is_pair: bool, dequantised: bool
) -> HopperTile:
    """The Hopper prefill kernel's tile over keys and values of 16 bits.

    Args:
        packed: query heads of a tile.
        run: consecutive tokens of a page, or more than a tile has.
        width: columns of the first product.
        extra: columns of the second product, or 0.
        is_pair: values have the columns of the first product only.
        dequantised: the elements were dequantised from an 8-bit cache.
    """
    # Measured: narrow heads are fastest with 192 query rows. Wide heads have large accumulators, so
    # their tiles have fewer keys.
    if is_pair:
        return HopperTile(packed, 2, 128, width, min(run, 128), 1, 2, 240, extra)
    if extra and width == 64:
        return HopperTile(packed, 2, 128, width, min(run, 128), 2, 3, 240, extra)
    if extra == 64:
        return HopperTile(packed, 2, 64, width, min(run, 64), 2, 2, 240, extra)
    if extra:
        return HopperTile(packed, 2, 64, width, min(run, 64), 1, 3, 240, extra)
    if width <= 64:
        if dequantised or is_by_ptxas_13():
            # ptxas 13 spills in the loops of products if there are three warp groups.
            return HopperTile(packed, 2, 128, 64, min(run, 128), 2, 4, 232)
        return HopperTile(packed, 3, 128, 64, min(run, 128), 2, 4, 160)
    if width <= 128:
        return HopperTile(packed, 2, 128, 128, min(run, 128), 2, 2, 240)
    return HopperTile(packed, 2, 64, 256, min(run, 64), 1, 2, 224)


def _segmented_tile(packed: int, run: int, kv_tile: int, width: int, extra: int) -> HopperTile:
    """The Hopper prefill kernel's tile where its rows have the bits of the split-KV kernel's.

    There are two states, of a segment and of those before it. Where registers have no room for
    both, the second one waits in memory.

    Args:
        packed: query heads of a tile.
        run: consecutive tokens of a page, or more than a tile has.
        kv_tile: keys of a tile.
        width: columns of the first product.
        extra: columns of the second product, or 0.
    """
    # ptxas 13 keeps more values in registers, so up to heads of 192 the consumers get all there
    # are. Otherwise the producer needs some where rows are wide, and more for two products.
    stores = width + extra > (64 if is_by_ptxas_13() else 128)
    registers = 240
    if stores and (width + extra > 192 or not is_by_ptxas_13()):
        registers = 224 if extra else 232
    # Queries of narrow heads leave room for those of the next tile.
    query_stages = 2 if width + extra <= 128 else 1
    room = 216 * 1024 - query_stages * 256 * (width + extra)
    stages = min(room // (4 * kv_tile * (width + extra)), 6)
    return HopperTile(
        packed, 2, kv_tile, width, min(run, kv_tile), query_stages, stages, registers, extra, stores
    )


def segmented_prefill_of(
    shape: DenseShape,
    gpu: GpuFacts,
    split: SplitTile,
    asks: LayerRequirements,
) -> PrefillTile | str:
    """The prefill kernel's tile in a batch-invariant engine, or why every row is a decode's.

    A request has the same bits however its prompt is cut into chunks. So a kernel of large tiles of
    queries may take long queries only where its products round as those of the split-KV kernel's
    small tiles do. docs/notebook/invariance.md says on which GPUs that is known.

    Args:
        shape: the layer.
        gpu: the GPU that runs the layer.
        split: the portable split-KV kernel's tile.
        asks: the layer's other requirements, as far as they are known.
    """
    if gpu.kind not in ONE_PRODUCT:
        return (
            f"on {gpu.kind.value} products of small and of large tiles may round in another order"
        )
    if shape.itemsize != 2:
        return f"the model's elements have {shape.itemsize} bytes, not 2"
    if shape.stored_bits not in (8, 16):
        return f"the cache's elements have {shape.stored_bits} bits, not 8 or 16"
    if shape.stored_bits == 16 and asks.query is not None and asks.cache_dtype is not None:
        # Products of two types would be in fp32, in sums of parts that depend on the tile.
        stored = asks.cache_dtype.element(asks.query)
        if stored is not asks.query:
            return f"the cache's elements are {stored}, the model's {asks.query}"
    return segmented_tile(shape, gpu, split)


def _columns(head_size: int) -> tuple[int, int]:
    """The columns of a head that the Hopper prefill kernel multiplies, in one or two products.

    Returns:
        The columns of the first product, a power of two; and those of the second, 0 where there is
        none. Together they are fewer than the next power of two, where a head leaves a quarter of
        that or more unused.
    """
    width = power_of_two(head_size)
    rest = max(head_size - width // 2, 0)
    extra = max(power_of_two(rest), 16) if rest else 0
    # The second product's columns lie in one box.
    return (width // 2, extra) if width > 64 and extra <= min(64, width // 4) else (width, 0)


def decode_kernel_of(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerRequirements,
    wanted: DecodeKernel,
) -> tuple[HopperDecodeTile | None, str]:
    """Which kernel takes a layer's requests with few new tokens, and why.

    Builder, launcher and ``attn explain`` decide by this function alone.

    Args:
        shape: the layer.
        kind: kind of the device.
        block_size: tokens of a page; 0 without pages.
        max_query_len: query tokens of a verify, all of which share one pass over the keys.
        asks: the layer's other requirements, as far as they are known.
        wanted: the engine's setting ``kernels.dense.decode``.

    Returns:
        The Hopper kernel's tile, or None for the portable kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_decode_tile(shape, kind, block_size, max_query_len, asks)
    slower = None if isinstance(found, str) else _measured_slower(shape, found.split, asks)
    left = None if slower is None else f"did not measure faster with {slower}"
    why = "it measured faster at this head size"
    return chosen_kernel("kernels.dense.decode", wanted, found, left=left, why=why)


def _measured_slower(shape: DenseShape, tile: SplitTile, asks: LayerRequirements) -> str | None:
    """Why the Hopper split-KV kernel was not faster than the portable kernel on an H200.

    None for layers where it was faster. docs/notebook/decode.md has the times of both kernels.
    """
    used = tile.tile_heads * tile.query_tokens
    if asks.batch_invariant:
        # More than 16 rows were measured at head size 128 only.
        is_faster = shape.width == 128 or used <= 16
        return None if is_faster else f"batch invariance and head size {shape.head_size}"
    if shape.head_size == 64 and used <= 32:
        # With up to 16 query rows it was faster in some batches and slower in others. It multiplies
        # 17 to 32 rows as 64, while the portable kernel has tiles of 32.
        return f"head size 64 and tiles of {used} query rows"
    if shape.head_size == 64 and asks.is_local:
        # Measured with a single batch: 64 query rows behind a narrow window.
        return "head size 64 and a window or chunk"
    if 96 < shape.head_size < 128 and shape.stored_bits == 16:
        # Measured at head size 112 with a single batch.
        return f"head size {shape.head_size}"
    if asks.is_local and 16 < used <= 32:
        # Measured with a single batch: 32 query rows.
        return f"a window or chunk and tiles of {used} query rows"
    return None


def hopper_decode_tile(
    shape: DenseShape,
    kind: DeviceKind,
    block_size: int,
    max_query_len: int,
    asks: LayerRequirements = LayerRequirements(),
) -> HopperDecodeTile | str:
    """The Hopper split-KV kernel's tile of a layer, or the reason why the kernel does not take it.

    Args:
        shape: the layer.
        kind: kind of the device.
        block_size: tokens of a page; 0 without pages.
        max_query_len: query tokens of a verify, all of which share one pass over the keys.
        asks: the layer's other requirements, as far as they are known.
    """
    refused = misfit_of(shape, kind, block_size)
    if refused is not None:
        return refused
    if block_size == 0:
        return "there are no pages"
    if shape.head_size != shape.head_size_v:
        return f"head size {shape.head_size} is not that of values, {shape.head_size_v}"
    is_e4m3 = shape.stored_bits == 8
    least = 72 if is_e4m3 else 64
    if not least <= shape.head_size <= 256 or shape.head_size % 8:
        return f"head size {shape.head_size} is not a multiple of 8 from {least} to 256"
    if asks.cache_dtype is CacheDType.FP8_E5M2:
        return f"a cache of {asks.cache_dtype}"
    refused = refusal_of(asks)
    if refused is not None:
        return refused
    # At head size 256, two states of 64 rows do not fit a thread's registers. A cache of e4m3 is
    # dequantised in registers, while products of 64 rows read their keys from shared memory.
    most_rows = 16 if shape.width == 256 or is_e4m3 else 64
    if asks.batch_invariant:
        if asks.split is None:
            return "batch invariance, for which every row has a tile of the portable kernel's"
        return _invariant_decode_tile(shape, asks.split, most_rows, block_size)
    head_tiles = cdiv(shape.group, most_rows)
    tile_heads = cdiv(shape.group, head_tiles)
    if tile_heads * max_query_len > most_rows:
        return (
            f"a tile of {tile_heads} query heads and {max_query_len} query tokens has more than "
            f"{most_rows} rows"
        )
    query_tokens = min(most_rows // tile_heads, max_query_len)
    used = tile_heads * query_tokens
    # Tiles of 16 rows have 64 KiB of 16-bit keys and values in a stage (32 KiB at head size 64),
    # since each tile costs barriers. Fewer keys where a thread holds two states of 64 rows already.
    kv_tile = 64 if shape.width == 256 or (used > 16 and shape.width == 128) else 128
    split = SplitTile(
        rows=16 if used <= 16 else 64,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        query_tokens=query_tokens,
        kv_tile=kv_tile,
        segment_scale=1 if used <= 16 else power_of_two(used) // 8,
        # The portable kernel's launch configuration, for layers in which it runs with this plan.
        num_warps=8,
        num_stages=2,
        programs_per_sm=1,
        max_registers=registers_per_thread(8),
    )
    # A stage has room for whole boxes; what lies behind a head's last column is not loaded.
    stage = 2 * kv_tile * shape.width * shape.stored_bits // 8
    return HopperDecodeTile(
        split,
        min(block_size & -block_size, kv_tile),
        HOPPER_RING // stage,
        consumers=_consumers(shape, used),
    )


def _invariant_decode_tile(
    shape: DenseShape, split: SplitTile, most_rows: int, block_size: int
) -> HopperDecodeTile | str:
    """The Hopper split-KV kernel's tile where its rows have the bits of the portable kernel's.

    It has the portable tile's heads, tokens and keys, and one consumer, since two would have
    maxima and sums of their own. With up to 16 rows, two programs share a multiprocessor instead:
    decodes then took 1.00 to 1.02 of the default's time on an H200, and 1.02 to 1.10 one by one.

    Args:
        shape: the layer.
        split: the portable kernel's tile.
        most_rows: rows of a tile at most.
        block_size: tokens of a page.
    """
    used = split.tile_heads * split.query_tokens
    if used > most_rows:
        return f"batch invariance and tiles of {used} query rows, more than {most_rows}"
    if used > 16:
        tile = replace(split, rows=64, programs_per_sm=1)
    else:
        # A single consumer that waits for its own softmax would leave the multiprocessor idle.
        # Two of 256 columns would spill.
        tile = replace(split, rows=16, programs_per_sm=1 if shape.width > 128 else 2)
    stage = 2 * split.kv_tile * shape.width * shape.stored_bits // 8
    stages = HOPPER_RING // (stage * tile.programs_per_sm)
    return HopperDecodeTile(tile, min(block_size & -block_size, split.kv_tile), stages)


def _consumers(shape: DenseShape, used: int) -> int:
    """Warp groups of the Hopper split-KV kernel that multiply; two take turns with tiles of keys.

    There are two where one would need as long for a tile as its keys need to arrive, 1700 to 2000
    clocks for 32 KiB. That is so for 64 rows at head size 128, whose products wait for their
    softmax, and where a key has few bytes. Otherwise the program waits for memory anyway; and at
    head size 256 two states would be spilled.
    """
    if shape.width == 128:
        return 2 if used > 16 or shape.stored_bits == 8 else 1
    return 2 if shape.head_size == 64 and used <= 16 else 1


def misfit_of(shape: DenseShape, kind: DeviceKind, block_size: int) -> str | None:
    """Why no Hopper kernel takes a layer of this geometry; None if its geometry is no obstacle."""
    if kind is not DeviceKind.SM90:
        return f"the device is {kind.value}, not {DeviceKind.SM90.value}"
    if shape.itemsize != 2:
        return f"the model's elements have {shape.itemsize} bytes, not 2"
    if shape.stored_bits not in (8, 16):
        return f"the cache's elements have {shape.stored_bits} bits, not 8 or 16"
    return f"block size {block_size} is not a multiple of 16" if block_size % 16 else None


def _stored_type(cache_dtype: CacheDType, query: DType) -> DType | CacheDType | None:
    """The type of the cache's elements where the query must have the same type; None elsewhere.

    A quantised type that Hopper kernels do not dequantise is returned too: no query has it, so the
    layer is refused.
    """
    if not cache_dtype.is_quantized:
        return cache_dtype.element(query)
    if cache_dtype.quant_mode is not KVQuantMode.FP8_PER_TENSOR:
        return cache_dtype
    # e5m2 has as many bits of exponent as fp16. So stored bytes that nobody has written yet could
    # be infinite in fp16.
    is_e5m2 = cache_dtype.element(query) is DType.FLOAT8_E5M2
    return cache_dtype if is_e5m2 and query is DType.FLOAT16 else None


def refusal_of(asks: LayerRequirements) -> str | None:
    """The first of a layer's requirements that no Hopper kernel meets; None if they meet all."""
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
