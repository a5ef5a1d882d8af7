"""Tiles of the latent (MLA) decode kernel: a function of the layer's shape and the GPU.

Builders and launchers share them, so that a plan and the kernel that it is for agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from builders.splitkv.tiles import SplitTile
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

MULTIPLIES_64_ROWS = frozenset({DeviceKind.SM90})
"""Devices where a tile of 64 rows fits: products by warp group take the query from shared memory.
Elsewhere every warp would hold all rows' share of it; and on sm_100 Triton 3.6 keeps so much of
both products in shared memory that it does not fit either. There 16 rows share a walk over the
keys."""
MOST_QUERY_TOKENS = 16


@dataclass(frozen=True)
class LatentShape:
    """What the tile depends on, of a layer with one latent row per token."""

    num_heads: int
    rank: int
    """Elements of the latent."""
    rope_size: int
    """Elements of the rotary part."""
    itemsize: int
    """Bytes of an element of the products."""
    stored_bits: int
    """Bits of an element of the cache."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a cached row in a tile."""
        return (power_of_two(self.rank) + power_of_two(self.rope_size)) * self.stored_bits // 8


def latent_tile(shape: LatentShape, gpu: GpuFacts, max_query_len: int) -> SplitTile:
    """The latent decode tile of a layer.

    One shape serves every row of a configuration, so that a row's bits do not depend on the number
    of tokens that it is computed with.

    Args:
        shape: the layer.
        gpu: what runs it.
        max_query_len: query tokens of a verify, as many of which as fit share a pass over the keys.
    """
    tokens = min(max_query_len, MOST_QUERY_TOKENS)
    wide = shape.itemsize > 2
    by_group = not wide and gpu.kind in MULTIPLIES_64_ROWS and shape.num_heads * tokens > 16
    rows = 64 if by_group else 16
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    narrow = shape.stored_bits < 16
    # Narrow rows have less under way.
    kv_tile, stages = 64, 4 if narrow else 3
    if by_group and narrow:
        kv_tile, stages = 32, 4
    elif wide:
        kv_tile = 16
    room = gpu.shared_memory
    width = power_of_two(shape.rank) + power_of_two(shape.rope_size)

    def needed() -> int:
        # Keys under way; the query, and the weights; narrow keys for 64 rows once more, converted.
        buffers = stages if by_group and not narrow else stages - 1
        converted = kv_tile * width * shape.itemsize if by_group and narrow else 0
        if not (by_group or wide):
            # A state that changes its layout to be folded, fp32: narrow ones are two halves.
            converted = rows * power_of_two(shape.rank) * (2 if narrow else 4)
        fixed = rows * (width + kv_tile) * shape.itemsize
        return buffers * kv_tile * shape.row_bytes + converted + fixed

    # Of 64 rows both warp groups compute all scores, and read all queries for each half of the
    # keys: twice the keys are worth more than loads that are asked for a whole tile ahead.
    keeps_keys = by_group and not narrow
    while needed() > room and kv_tile > 32 and not keeps_keys:
        kv_tile //= 2
    while needed() > room and stages > (2 if keeps_keys else 3):
        stages -= 1
    while needed() > room and stages > 2:
        stages -= 1
    while needed() > room and kv_tile > 16:
        kv_tile //= 2
    while needed() > room and stages > 1:
        stages -= 1
    return SplitTile(
        rows=rows,
        tile_heads=tile_heads,
        head_tiles=head_tiles,
        query_tokens=max(1, min(rows // tile_heads, tokens)),
        kv_tile=kv_tile,
        # Between two segments a state of 64 rows is folded in scratch.
        segment_scale=1 if rows == 16 else 2,
        num_warps=8,
        num_stages=stages,
        programs_per_sm=1,
        max_registers=255 if gpu.is_nvidia else None,
    )
