"""Which dense layers the kernels for Hopper take, how, and why or why not.

Shared by builder, launcher and ``attn explain``, as the tiles of :mod:`builders.splitkv.tiles` are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from builders.launch.call import is_by_ptxas_13
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    SplitTile,
    registers_per_thread,
)
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.engine import DecodeKernel, PrefillKernel

HOPPER_RING = 128 * 1024
"""Bytes of keys and values under way in the split-KV kernel for Hopper. With half as many again, 24
MB by all programs, decodes of heads of 128 took 1 to 3 % longer."""

DENSE_OPTION = "kernels.dense.prefill"
"""The engine's setting that chooses the prefill kernel of dense layers."""
LATENT_OPTION = "kernels.latent.prefill"
"""The engine's setting that chooses the prefill kernel of latent layers, over expanded keys."""

_Tile = TypeVar("_Tile")


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
    option: str = DENSE_OPTION,
) -> tuple[HopperTile | None, str]:
    """Which kernel takes a layer's rows with many new tokens, and why.

    Builder, launcher and ``attn explain`` decide by this alone.

    Args:
        shape: the layer.
        kind: device.
        block_size: tokens of a page; 0 without pages.
        asks: what else the layer asks, as far as it is known.
        wanted: what the engine is configured to.
        option: the engine's setting that says so; ``LATENT_OPTION`` for expanded latent layers.

    Returns:
        The Hopper kernel's tile, None for the plain kernel; and the reason in words.

    Raises:
        ValueError: the Hopper kernel is wanted by name and does not serve.
    """
    found = hopper_tile(shape, kind, block_size, asks)
    return chosen_kernel(option, wanted, found)


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
        if is_by_ptxas_13():
            # Of three warp groups it spills in the loops of products.
            return HopperTile(packed, 2, 128, 64, min(run, 128), 2, 4, 232)
        return HopperTile(packed, 3, 128, 64, min(run, 128), 2, 4, 160)
    if shape.width <= 128:
        return HopperTile(packed, 2, 128, 128, min(run, 128), 2, 2, 240)
    return HopperTile(packed, 2, 64, 256, min(run, 64), 1, 2, 224)


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
    why = "it measured faster at this head size"
    return chosen_kernel("kernels.dense.decode", wanted, found, left=left, why=why)


def _measured_slower(shape: DenseShape, tile: SplitTile, asks: LayerAsks) -> str | None:
    """Of what a layer has, where the Hopper split-KV kernel was not the faster one on an H200.

    Times of both are in docs/performance.md.
    """
    is_wide = shape.head_size == 256 and shape.stored_bits == 16
    if asks.batch_invariant and (asks.is_local or not is_wide):
        # Most rows of a tile are nobody's in a decode, and a prompt's are this kernel's, too.
        return f"batch invariance and tiles of {tile.rows} rows"
    used = tile.tile_heads * tile.query_tokens
    if shape.head_size == 64 and used <= 32:
        # Of up to 16 rows faster in some batches, slower in others; more are multiplied as 64,
        # where the plain kernel has tiles of 32.
        return f"head size 64 and tiles of {used} query rows"
    if shape.head_size == 64 and asks.is_local:
        # By one batch of 64 rows behind a narrow window.
        return "head size 64 and a window or chunk"
    if asks.is_local and 16 < used <= 32:
        # Likewise by one, of 32 rows.
        return f"a window or chunk and tiles of {used} query rows"
    return None


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
        max_registers=registers_per_thread(8),
    )
    stage = 2 * kv_tile * shape.head_size * shape.stored_bits // 8
    return HopperDecodeTile(
        split,
        min(block_size & -block_size, kv_tile),
        HOPPER_RING // stage,
        consumers=_consumers(shape, used),
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
