"""Tiles fit the device that they are for, whatever the layer."""

from __future__ import annotations

import pytest

from builders.segments import segment_start
from builders.tiles import (
    MOST_ROWS,
    SHARED_MEMORY,
    DenseShape,
    PrefillTile,
    SplitTile,
    power_of_two,
    prefill_tile,
    split_tile,
)
from specs.devices import DeviceKind

GPUS = [kind for kind in DeviceKind if kind in SHARED_MEMORY]
SIZES = range(32, 513, 8)


def shapes() -> list[DenseShape]:
    """Every group, and every head size with a few groups, in each width of model and cache."""
    bits = [(2, 16), (2, 8), (2, 4), (4, 32), (4, 8), (4, 4)]
    pairs = [(group, 128) for group in range(1, 129)]
    pairs += [(group, size) for group in (1, 5, 16) for size in SIZES]
    return [
        DenseShape(group * 2, 2, size, size, itemsize, stored)
        for group, size in pairs
        for itemsize, stored in bits
    ]


def staged_kib(shape: DenseShape, tile: SplitTile | PrefillTile) -> float:
    """KiB that the keys and values under way hold, besides those that are being multiplied."""
    row = (power_of_two(shape.head_size) + power_of_two(shape.head_size_v)) * shape.stored_bits / 8
    return (tile.num_stages - 1) * tile.kv_tile * row / 1024


@pytest.mark.parametrize("kind", GPUS, ids=str)
@pytest.mark.parametrize("max_query_len", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 128, 4096])
def test_split_tiles_fit(kind: DeviceKind, max_query_len: int, window: int | None) -> None:
    for shape in shapes():
        tile = split_tile(shape, kind, max_query_len, window)
        assert 16 <= tile.rows <= MOST_ROWS
        assert power_of_two(tile.rows) == tile.rows
        assert tile.query_tokens >= 1
        assert tile.query_tokens * tile.tile_heads <= tile.rows, shape
        assert (tile.head_tiles - 1) * tile.tile_heads < shape.group
        assert shape.group <= tile.head_tiles * tile.tile_heads
        assert power_of_two(tile.kv_tile) == tile.kv_tile >= 16
        # Segments are whole numbers of tiles.
        assert tile.segment_unit * tile.segment_scale == tile.kv_tile
        assert segment_start(1) % tile.segment_unit == 0
        assert tile.programs_per_sm in (1, 2, 4)
        fits = tile.programs_per_sm * staged_kib(shape, tile) <= SHARED_MEMORY[kind]
        assert fits or tile.programs_per_sm == 1, (shape, tile)
        assert staged_kib(shape, tile) <= SHARED_MEMORY[kind], (shape, tile)


@pytest.mark.parametrize("kind", GPUS, ids=str)
def test_prefill_tiles_fit(kind: DeviceKind) -> None:
    for shape in shapes():
        tile = prefill_tile(shape, kind)
        assert power_of_two(tile.query_tile) == tile.query_tile >= 16
        assert power_of_two(tile.kv_tile) == tile.kv_tile >= 16
        assert staged_kib(shape, tile) <= SHARED_MEMORY[kind], (shape, tile)


def test_rows_behind_a_narrow_window_are_many_at_once() -> None:
    shape = DenseShape(64, 8, 64, 64, 2, 16)
    narrow = split_tile(shape, DeviceKind.SM90, 1, 128)
    assert narrow.programs_per_sm > split_tile(shape, DeviceKind.SM90, 1, 4096).programs_per_sm
    assert split_tile(shape, DeviceKind.SM90, 1, 4096) == split_tile(shape, DeviceKind.SM90, 1)


def test_a_verify_of_a_whole_group_shares_one_pass_over_the_keys() -> None:
    for group in (1, 2, 4, 8, 16):
        tile = split_tile(DenseShape(group, 1, 128, 128, 2, 16), DeviceKind.SM90, 4)
        assert tile.query_tokens >= 4
