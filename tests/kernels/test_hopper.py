"""The prefill kernel for Hopper without one: what it refuses, its plan, its compiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attn.kernels.hopper.launch import Descriptors
from builders.common import CommonAttentionMetadata
from builders.tiles import DenseShape, HopperTile, hopper_tile
from builders.triton_attn import TritonAttentionMetadataBuilder
from specs.devices import DeviceKind
from specs.engine import PrefillKernel
from tests.kernels import variants
from tests.kernels.compile_matrix import ByTarget, facts_of, misses_of
from tests.kernels.variants import HOPPER_VARIANTS, Kernel, Layer, Variant, call_of

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)
TESTED = [variant for variant in HOPPER_VARIANTS if variant.tested]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ByTarget:
    cache = tmp_path_factory.mktemp("triton")
    return facts_of([90], tested_only=True, cache=cache, of="hopper")


@pytest.mark.parametrize("variant", TESTED, ids=lambda variant: variant.name)
def test_a_variant_compiles_without_spills(compiled: ByTarget, variant: Variant) -> None:
    facts = compiled[90][variant.name]
    assert misses_of(variant, 90, facts) == []


@pytest.mark.parametrize(
    ("shape", "kind", "block_size", "said"),
    [
        (SHAPE, DeviceKind.SM100, 16, "the device is sm100, not sm90"),
        (replace(SHAPE, itemsize=4), DeviceKind.SM90, 16, "have 4 bytes, not 2"),
        (replace(SHAPE, stored_bits=8), DeviceKind.SM90, 16, "have 8 bits, not 16"),
        (replace(SHAPE, head_size_v=64), DeviceKind.SM90, 16, "128 is not that of values, 64"),
        (
            replace(SHAPE, head_size=512, head_size_v=512),
            DeviceKind.SM90,
            16,
            "head size 512 is not a multiple of 8 from 48 to 256",
        ),
        (SHAPE, DeviceKind.SM90, 8, "block size 8 is not a multiple of 16"),
        (SHAPE, DeviceKind.SM90, 0, "there are no pages"),
    ],
)
def test_a_geometry_that_it_does_not_take_is_refused_with_both_values(
    shape: DenseShape, kind: DeviceKind, block_size: int, said: str
) -> None:
    found = hopper_tile(shape, kind, block_size)
    assert isinstance(found, str)
    assert said in found


def test_boxes_of_a_tile_are_whole() -> None:
    groups, sizes = (1, 2, 3, 4, 6, 7, 8, 16, 64, 128), (48, 64, 80, 128, 192, 256)
    for group, head_size, block_size in product(groups, sizes, (16, 48, 64, 128, 256, 528, 1072)):
        shape = DenseShape(group * 2, 2, head_size, head_size, 2, 16)
        tile = hopper_tile(shape, DeviceKind.SM90, block_size)
        assert isinstance(tile, HopperTile)
        assert group % tile.packed == 0
        assert tile.rows_per_group * tile.packed == 64
        assert tile.query_tile * tile.packed == 64 * tile.warp_groups
        assert tile.kv_tile % tile.run == 0
        assert block_size % tile.run == 0
        assert tile.width >= head_size
        # Keys, values and queries under way, beside barriers and the output on its way out.
        rows = 2 * tile.num_stages * tile.kv_tile + tile.query_stages * 64 * tile.warp_groups
        assert rows * tile.width * 2 <= 215 * 1024


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Layer(alibi=True), "ALiBi"),
        (Layer(rswa=128), "R-SWA"),
        (Layer(cache=variants._FP8), "8 bits"),
    ],
)
def test_a_layer_that_it_does_not_serve_is_refused_by_name(layer: Layer, said: str) -> None:
    with pytest.raises(ValueError, match="prefill_kernel 'hopper' does not serve") as error:
        call_of(Variant(Kernel.HOPPER_PREFILL, "", layer), 90)
    assert said in str(error.value)


def test_it_is_taken_only_where_it_is_asked_for() -> None:
    layer = Layer()
    for wanted in PrefillKernel:
        builder = TritonAttentionMetadataBuilder(
            layer.spec(), ["layer"], layer.engine(wanted), "cpu"
        )
        record = builder.build(0, variants._batch(layer, 41))
        assert record.prefill is not None
        assert (record.prefill.hopper is not None) == (wanted is PrefillKernel.HOPPER)


def test_a_shared_prefix_is_the_other_kernels() -> None:
    layer = Layer()
    engine = layer.engine(PrefillKernel.HOPPER)
    builder = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    record = builder.build(16, variants._batch(layer, 20))
    assert record.prefill is not None
    assert record.prefill.hopper is not None
    assert record.shared is not None
    for part in (record.shared.prefix, record.shared.own):
        assert part.prefill is not None
        assert part.prefill.hopper is None


def test_its_tiles_are_counted_beside_the_others() -> None:
    layer = Layer()
    engine = layer.engine(PrefillKernel.HOPPER)
    builder = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    table = torch.ones(4, 64, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_lengths([40, 1, 33, 16], [40, 9, 100, 20], table, 16)
    plan = builder.build(0, batch).prefill
    assert plan is not None
    assert plan.hopper is not None
    # Tiles of 128 rows: 32 tokens of 4 query heads. Short queries go to the other kernel.
    assert plan.hopper.tile.query_tile == 32
    assert plan.hopper.tile_starts.tolist() == [0, 2, 2, 4, 4]


def test_descriptors_are_made_once_and_hold_no_tensor() -> None:
    layer = Layer()
    call = call_of(Variant(Kernel.HOPPER_PREFILL, "", layer), 90)
    assert not isinstance(call.arguments["k_desc"].base, torch.Tensor)
    descriptors = Descriptors()
    rows = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    one = descriptors.of(rows, (1, 16, 1, 64))
    assert descriptors.of(rows[:], (1, 16, 1, 64)) is one
    assert descriptors.of(rows[1:], (1, 16, 1, 64)) is not one
