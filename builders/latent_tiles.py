"""Tiles of the latent (MLA) decode kernel: a function of the layer's shape and the kind of device.

Builders and launchers share them, so that a plan and the kernel that it is for agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from builders.tiles import NVIDIA, SHARED_MEMORY, SplitTile, power_of_two
from specs.base import cdiv
from specs.devices import DeviceKind

MULTIPLIES_64_ROWS = frozenset({DeviceKind.SM90, DeviceKind.SM100})
"""Devices whose products take tiles of 64 rows from shared memory; elsewhere a warp holds the query
in registers, where 16 rows are what there is room for."""
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


def latent_tile(shape: LatentShape, kind: DeviceKind, max_query_len: int) -> SplitTile:
    """The latent decode tile of a layer.

    One shape serves every row of a configuration, so that a row's bits do not depend on the number
    of tokens that it is computed with.

    Args:
        shape: the layer.
        kind: device.
        max_query_len: query tokens of a verify, as many of which as fit share a pass over the keys.
    """
    tokens = min(max_query_len, MOST_QUERY_TOKENS)
    wide = shape.itemsize > 2
    by_group = not wide and kind in MULTIPLIES_64_ROWS and shape.num_heads * tokens > 16
    rows = 64 if by_group else 16
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    narrow = shape.stored_bits < 16
    # What is read has to be converted too: more keys between two barriers.
    kv_tile = 16 if wide else 128 if narrow and not by_group else 64
    stages = 3
    room = SHARED_MEMORY.get(kind, 99) * 1024
    width = power_of_two(shape.rank) + power_of_two(shape.rope_size)
    # The query, or what is left of the output on its way from one arrangement to another.
    fixed = rows * width * shape.itemsize

    def needed() -> int:
        # Narrow rows lie there once more as the products take them.
        converted = kv_tile * width * shape.itemsize if narrow else 0
        weights = rows * kv_tile * shape.itemsize
        return stages * kv_tile * shape.row_bytes + converted + weights + fixed

    while needed() > room and kv_tile > 32:
        kv_tile //= 2
    while needed() > room and stages > 2:
        stages -= 1
    while needed() > room and kv_tile > 16:
        kv_tile //= 2
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
        max_registers=255 if kind in NVIDIA else None,
    )
