"""Tiles of the portable latent (MLA) decode kernel: a function of the layer's shape and the GPU.

Builders and launchers call the same function, so a plan and the kernel that it is made for agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from builders.splitkv.tiles import SplitTile
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

MULTIPLIES_64_ROWS = frozenset({DeviceKind.SM90})
"""Kinds of devices that have tiles of 64 query rows; on others 16 rows share a walk over the keys.

On Hopper, products by warp group take the query from shared memory. Elsewhere every warp would hold
its share of all rows of the query in registers. On sm_100 a tile of 64 rows does not fit shared
memory, since Triton 3.6 keeps much of both products there."""
MOST_QUERY_TOKENS = 16
"""Query tokens of a tile, at most."""


@dataclass(frozen=True)
class LatentShape:
    """The facts of a layer with one latent row per token that the tile depends on."""

    num_heads: int
    """Query heads."""
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
        """Bytes that a cached row takes in a tile, each of its parts padded to a power of two."""
        return (power_of_two(self.rank) + power_of_two(self.rope_size)) * self.stored_bits // 8


def latent_tile(shape: LatentShape, gpu: GpuFacts, max_query_len: int) -> SplitTile:
    """The portable latent decode kernel's tile of a layer.

    All work items of a configuration have the same tile, so a request's bits do not depend on how
    many of its tokens are computed together.

    Args:
        shape: the layer.
        gpu: the GPU that runs the layer.
        max_query_len: query tokens of a verify, of which as many as fit share a pass over the keys.
    """
    tokens = min(max_query_len, MOST_QUERY_TOKENS)
    wide = shape.itemsize > 2
    by_group = not wide and gpu.kind in MULTIPLIES_64_ROWS and shape.num_heads * tokens > 16
    rows = 64 if by_group else 16
    head_tiles = cdiv(shape.num_heads, rows)
    tile_heads = cdiv(shape.num_heads, head_tiles)
    narrow = shape.stored_bits < 16
    # A row of a quantised cache has fewer bytes, so there are more stages.
    kv_tile, stages = 64, 4 if narrow else 3
    if by_group and narrow:
        kv_tile, stages = 32, 4
    elif wide:
        kv_tile = 16
    room = gpu.shared_memory
    width = power_of_two(shape.rank) + power_of_two(shape.rope_size)

    def needed() -> int:
        # Shared memory holds the keys under way, the query and the softmax weights. For 64 rows it
        # also holds the dequantised keys of a quantised cache.
        buffers = stages if by_group and not narrow else stages - 1
        converted = kv_tile * width * shape.itemsize if by_group and narrow else 0
        if not (by_group or wide):
            # It also holds a state in fp32 that changes its layout to be folded: over a quantised
            # cache one half of the state at a time.
            converted = rows * power_of_two(shape.rank) * (2 if narrow else 4)
        fixed = rows * (width + kv_tile) * shape.itemsize
        return buffers * kv_tile * shape.row_bytes + converted + fixed

    # With 64 rows both warp groups compute all scores, and read all queries for each half of the
    # keys. So a tile with twice as many keys gains more than a stage that is loaded a tile ahead.
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
        # A state of 64 rows is folded in scratch between two segments, so segments are longer.
        segment_scale=1 if rows == 16 else 2,
        num_warps=8,
        num_stages=stages,
        programs_per_sm=1,
        max_registers=255 if gpu.is_nvidia else None,
    )
