"""Tiles fit the device that they are made for, whatever the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders.dense.choice import (
    LayerRequirements,
    decode_kernel_of,
    prefill_kernel_of,
)
from builders.splitkv.segments import segment_start
from builders.splitkv.tiles import (
    MOST_ROWS,
    DenseShape,
    HopperDecodeTile,
    PrefillTile,
    SplitTile,
    invariant_split_tile,
    prefill_tile,
    split_tile,
)
from specs.base import power_of_two
from specs.devices import KNOWN_DEVICES, DeviceKind, GpuFacts
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, PrefillKernel

ONE_OF_EACH_SIZE = {
    name: KNOWN_DEVICES[name]
    for name in (
        *("a100", "a10", "orin", "l40s", "h200", "b200"),
        *("b300", "rtx-pro-6000", "mi300x"),
    )
}
GPUS = [pytest.param(device.facts, id=name) for name, device in ONE_OF_EACH_SIZE.items()]
HOPPER = KNOWN_DEVICES["h200"].facts
SIZES = range(32, 513, 8)


def shapes() -> list[DenseShape]:
    """Shapes of layers: many groups of query heads, head sizes, and types of model and cache."""
    bits = [(2, 16), (2, 8), (2, 4), (4, 32), (4, 8), (4, 4)]
    pairs = [(group, 128) for group in range(1, 129)]
    pairs += [(group, size) for group in (1, 5, 16) for size in SIZES]
    return [
        DenseShape(group * 2, 2, size, size, itemsize, stored)
        for group, size in pairs
        for itemsize, stored in bits
    ]


def staged_bytes(shape: DenseShape, tile: SplitTile | PrefillTile) -> int:
    """Bytes of the keys and values under way, without the tile that is being multiplied."""
    row = (power_of_two(shape.head_size) + power_of_two(shape.head_size_v)) * shape.stored_bits // 8
    return (tile.num_stages - 1) * tile.kv_tile * row


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("max_query_len", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 128, 4096])
def test_split_tiles_fit(gpu: GpuFacts, max_query_len: int, window: int | None) -> None:
    for shape in shapes():
        tile = split_tile(shape, gpu, max_query_len, window)
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
        assert tile.programs_per_sm <= gpu.programs(staged_bytes(shape, tile)), (shape, tile)


@pytest.mark.parametrize("gpu", GPUS)
def test_prefill_tiles_fit(gpu: GpuFacts) -> None:
    for shape in shapes():
        tile = prefill_tile(shape, gpu)
        assert power_of_two(tile.query_tile) == tile.query_tile >= 16
        assert power_of_two(tile.kv_tile) == tile.kv_tile >= 16
        assert staged_bytes(shape, tile) <= gpu.shared_memory, (shape, tile)


def test_rows_behind_a_narrow_window_are_many_at_once() -> None:
    shape = DenseShape(64, 8, 64, 64, 2, 16)
    narrow = split_tile(shape, HOPPER, 1, 128)
    assert narrow.programs_per_sm > split_tile(shape, HOPPER, 1, 4096).programs_per_sm
    assert split_tile(shape, HOPPER, 1, 4096) == split_tile(shape, HOPPER, 1)


def test_tall_tiles_of_narrow_heads_have_half_the_keys_whose_scores_would_be_spilled() -> None:
    shape = DenseShape(64, 8, 64, 64, 2, 16)
    keys = [split_tile(shape, HOPPER, tokens).kv_tile for tokens in (1, 4, 5, 8)]
    assert keys == [128, 128, 64, 64]


def test_a_verify_of_a_whole_group_shares_one_pass_over_the_keys() -> None:
    for group in (1, 2, 4, 8, 16):
        tile = split_tile(DenseShape(group, 1, 128, 128, 2, 16), HOPPER, 4)
        assert tile.query_tokens >= 4


# -- Which prefill kernel.

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)
ASKED = LayerRequirements(query=DType.BFLOAT16, cache_dtype=CacheDType.AUTO)
REFUSED = {
    "ALiBi": LayerRequirements(alibi=True),
    "R-SWA": LayerRequirements(rswa=True),
    "positions of queries": LayerRequirements(positions=True),
    "decode context parallelism": LayerRequirements(dcp=True),
    "batch invariance": LayerRequirements(batch_invariant=True),
    "a cache of float16 for a query of bfloat16": replace(ASKED, cache_dtype=CacheDType.FLOAT16),
    "a cache of int8_per_token_head": replace(ASKED, cache_dtype=CacheDType.INT8_PER_TOKEN_HEAD),
    "a cache of fp8_e5m2 for a query of float16": LayerRequirements(
        query=DType.FLOAT16, cache_dtype=CacheDType.FP8_E5M2
    ),
    "scale 0.0 is not positive": LayerRequirements(scale=0.0),
    "rows of key are aligned to 8 bytes, not 16": LayerRequirements(alignments=(("key", 8),)),
}


@pytest.mark.parametrize("kind", DeviceKind, ids=str)
def test_left_to_itself_hopper_gets_its_kernel_and_nothing_else_does(kind: DeviceKind) -> None:
    tile, why = prefill_kernel_of(SHAPE, kind, 16, ASKED, PrefillKernel.AUTO)
    assert (tile is not None) == (kind is DeviceKind.SM90)
    said = "it serves" if tile else f"the device is {kind.value}, not sm90"
    assert said in why


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_layer_asks_decides(said: str) -> None:
    asks = REFUSED[said]
    tile, why = prefill_kernel_of(SHAPE, DeviceKind.SM90, 16, asks, PrefillKernel.AUTO)
    assert tile is None
    assert f"the Hopper kernel does not serve: {said}" in why
    with pytest.raises(
        ValueError, match=r"kernels\.dense\.prefill 'hopper' does not serve"
    ) as error:
        prefill_kernel_of(SHAPE, DeviceKind.SM90, 16, asks, PrefillKernel.HOPPER)
    assert said in str(error.value)


def test_what_is_not_known_yet_refuses_nothing() -> None:
    for asks in (LayerRequirements(), LayerRequirements(query=DType.FLOAT16), ASKED):
        for wanted in (PrefillKernel.AUTO, PrefillKernel.HOPPER):
            tile, why = prefill_kernel_of(SHAPE, DeviceKind.SM90, 16, asks, wanted)
            assert tile is not None
            assert repr(wanted.value) in why
        tile, why = prefill_kernel_of(SHAPE, DeviceKind.SM90, 16, asks, PrefillKernel.TRITON)
        assert tile is None
        assert "'triton'" in why


# -- Which split-KV kernel.

SHARD = DenseShape(8, 1, 128, 128, 2, 16)
WIDE = DenseShape(16, 8, 256, 256, 2, 16)


def invariant(shape: DenseShape, tokens: int = 1) -> LayerRequirements:
    """What a layer of a batch-invariant engine asks for."""
    cache = CacheDType.FP8 if shape.stored_bits == 8 else CacheDType.AUTO
    split = invariant_split_tile(shape, HOPPER, tokens)
    return replace(ASKED, cache_dtype=cache, batch_invariant=True, split=split)


def decode_of(
    shape: DenseShape,
    wanted: DecodeKernel = DecodeKernel.AUTO,
    tokens: int = 1,
    asks: LayerRequirements = ASKED,
    kind: DeviceKind = DeviceKind.SM90,
) -> tuple[HopperDecodeTile | None, str]:
    return decode_kernel_of(shape, kind, 16, tokens, asks, wanted)


@pytest.mark.parametrize("kind", DeviceKind, ids=str)
def test_hopper_gets_its_split_kv_kernel_and_nothing_else_does(kind: DeviceKind) -> None:
    tile, why = decode_of(SHARD, kind=kind)
    assert (tile is not None) == (kind is DeviceKind.SM90)
    said = "it measured faster" if tile else f"the device is {kind.value}, not sm90"
    assert said in why


@pytest.mark.parametrize(
    ("shape", "tokens", "asks", "slower"),
    [
        (SHARD, 1, ASKED, None),
        (replace(SHARD, num_heads=16, num_kv_heads=2), 2, ASKED, None),
        (WIDE, 4, ASKED, None),
        (replace(SHARD, num_heads=24, num_kv_heads=3), 1, ASKED, None),
        (replace(SHARD, num_heads=24, num_kv_heads=3), 2, ASKED, None),
        (SHAPE, 1, ASKED, None),
        (SHAPE, 2, ASKED, None),
        (SHAPE, 4, ASKED, None),
        (SHAPE, 5, ASKED, None),
        (SHAPE, 8, ASKED, None),
        *(
            (
                replace(SHARD, head_size=64, head_size_v=64),
                n,
                ASKED,
                f"head size 64 and tiles of {8 * n}",
            )
            for n in (1, 2, 3, 4)
        ),
        (replace(SHARD, head_size=64, head_size_v=64), 8, ASKED, None),
        (SHARD, 4, ASKED, None),
        *(
            (shape, tokens, invariant(shape, tokens), slower)
            for shape, tokens, slower in (
                (SHARD, 1, None),
                (SHARD, 8, None),
                (replace(SHARD, head_size=64, head_size_v=64), 1, None),
                (
                    replace(SHARD, head_size=64, head_size_v=64),
                    4,
                    "batch invariance and head size 64",
                ),
                (WIDE, 1, None),
                (replace(SHAPE, stored_bits=8), 1, None),
            )
        ),
        (WIDE, 1, replace(ASKED, is_local=True), None),
        *(
            (replace(SHARD, head_size=64, head_size_v=64), n, replace(ASKED, is_local=True), slower)
            for n, slower in (
                (4, "head size 64 and tiles of 32 query rows"),
                (5, "head size 64 and a window or chunk"),
            )
        ),
        *(
            (SHARD, n, replace(ASKED, is_local=True), slower)
            for n, slower in (
                (2, None),
                (3, "a window or chunk and tiles of 24 query rows"),
                (4, "a window or chunk and tiles of 32 query rows"),
                (5, None),
            )
        ),
        (replace(SHARD, stored_bits=8), 1, replace(ASKED, cache_dtype=CacheDType.FP8), None),
        (
            replace(SHAPE, stored_bits=8),
            4,
            replace(ASKED, cache_dtype=CacheDType.FP8, is_local=True),
            None,
        ),
    ],
    ids=str,
)
def test_left_to_itself_an_engine_takes_what_measured_faster(
    shape: DenseShape, tokens: int, asks: LayerRequirements, slower: str | None
) -> None:
    tile, why = decode_of(shape, tokens=tokens, asks=asks)
    named, because = decode_of(shape, DecodeKernel.HOPPER, tokens, asks)
    assert named is not None
    assert because == "it serves this layer, and kernels.dense.decode is 'hopper'"
    if slower is None:
        assert tile == named
        assert "it measured faster" in why
    else:
        assert tile is None
        assert f"serves, but did not measure faster with {slower}" in why
    assert decode_of(shape, DecodeKernel.TRITON, tokens, asks) == (
        None,
        "kernels.dense.decode is 'triton'",
    )


SAME = [said for said in REFUSED if said != "batch invariance"]


@pytest.mark.parametrize("said", SAME)
def test_what_a_layer_asks_decides_for_short_rows_too(said: str) -> None:
    shape, asks = SHARD, REFUSED[said]
    if asks.cache_dtype is CacheDType.FP8_E5M2:
        shape, said = replace(SHARD, stored_bits=8), "a cache of fp8_e5m2"
    tile, why = decode_of(shape, asks=asks)
    assert tile is None
    assert f"the Hopper kernel does not serve: {said}" in why
    with pytest.raises(
        ValueError, match=r"kernels\.dense\.decode 'hopper' does not serve"
    ) as error:
        decode_of(shape, DecodeKernel.HOPPER, asks=asks)
    assert said in str(error.value)


def test_wide_heads_of_a_batch_invariant_engine_have_prompts_tiles_of_64_keys() -> None:
    """On other GPUs, and where a verify has more than 16 rows, the tile is the default's."""
    tile = invariant_split_tile(WIDE, HOPPER, 4)
    assert (split_tile(WIDE, HOPPER, 4).kv_tile, tile.kv_tile, tile.rows) == (32, 64, 16)
    assert tile.programs_per_sm == 1
    other = replace(HOPPER, kind=DeviceKind.SM80)
    for shape, gpu, tokens in ((WIDE, other, 1), (WIDE, HOPPER, 16), (SHAPE, HOPPER, 1)):
        assert invariant_split_tile(shape, gpu, tokens) == split_tile(shape, gpu, tokens)


@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16, 64, 128])
@pytest.mark.parametrize("size", [64, 96, 128])
def test_a_batch_invariant_engine_cuts_keys_alike_on_both_split_kv_kernels(
    size: int, group: int, tokens: int
) -> None:
    """Whatever decides bits is the portable tile's, so a layer may go to either kernel."""
    shape = DenseShape(2 * group, 2, size, size, 2, 16)
    asks = invariant(shape, tokens)
    assert asks.split is not None
    tile, _ = decode_of(shape, DecodeKernel.HOPPER, tokens, asks)
    assert tile is not None
    own = replace(asks.split, rows=tile.split.rows, programs_per_sm=tile.split.programs_per_sm)
    assert tile.split == own
    assert tile.split.sums_apart == asks.split.sums_apart
    assert tile.consumers == 1
    # The launcher asks again with the plan's own tile.
    again, _ = decode_of(shape, DecodeKernel.HOPPER, tokens, replace(asks, split=tile.split))
    assert again == tile


def test_a_batch_invariant_engine_without_a_prompt_kernel_takes_no_hopper_kernel() -> None:
    _, why = decode_of(SHAPE, asks=replace(ASKED, batch_invariant=True))
    assert "every row has a tile of the portable kernel's" in why


def test_narrow_windows_leave_the_hopper_kernel_as_many_sums_as_its_warps_have_columns() -> None:
    shape = replace(SHARD, head_size=64, head_size_v=64)
    assert split_tile(shape, HOPPER, 1, 128).sums_apart == 16
    tile = invariant_split_tile(shape, HOPPER, 1, 128)
    assert tile == invariant_split_tile(shape, HOPPER, 1)
    assert tile.sums_apart == 32
