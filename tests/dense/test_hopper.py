"""The Hopper prefill kernel, tested without a GPU: refusals, its plan, and that it compiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import builders.dense.triton_attn
from attn.kernels.dense.hopper_launch import Descriptors
from attn.kernels.dense.hopper_prefill.launch import HopperLauncher, tile_of
from attn.kernels.dense.tensors import DenseLayer, DenseTensors, KeyRows, stored_as
from builders.batch import CommonAttentionMetadata
from builders.dense import choice as hopper_dense
from builders.dense.choice import (
    hopper_tile,
)
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.splitkv.tiles import (
    DenseShape,
    HopperTile,
)
from specs.attention import AttentionType
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import PrefillKernel
from specs.layouts import KVViews
from tests.compile import variants
from tests.compile.compile_matrix import ByTarget, facts_of, misses_of
from tests.compile.variants import (
    HOPPER_VARIANTS,
    Kernel,
    Layer,
    Variant,
    attention_calls,
    call_of,
)

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)
TESTED = [variant for variant in HOPPER_VARIANTS if variant.tested]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ByTarget:
    cache = tmp_path_factory.mktemp("triton")
    return facts_of([90], tested_only=True, cache=cache, of=["hopper"])


@pytest.mark.parametrize("variant", TESTED, ids=lambda variant: variant.name)
def test_a_variant_compiles_without_spills(compiled: ByTarget, variant: Variant) -> None:
    facts = compiled[90][variant.name]
    assert misses_of(variant, 90, facts) == []


@pytest.mark.parametrize(
    "name", ["hopper_sparse 128 heads", "hopper_sparse 128 heads 656", "hopper_mla 128 heads"]
)
def test_rows_of_many_heads_are_written_in_wide_stores(compiled: ByTarget, name: str) -> None:
    """A thread has 128 of a warp group's 64 by 256 results, and stores eight at a time."""
    assert compiled[90][name].wide_stores == 2 * 128 // 8


@pytest.mark.parametrize(
    ("shape", "kind", "block_size", "said"),
    [
        (SHAPE, DeviceKind.SM100, 16, "the device is sm100, not sm90"),
        (replace(SHAPE, itemsize=4), DeviceKind.SM90, 16, "have 4 bytes, not 2"),
        (replace(SHAPE, stored_bits=4), DeviceKind.SM90, 16, "have 4 bits, not 8 or 16"),
        (
            replace(SHAPE, head_size_v=64),
            DeviceKind.SM90,
            16,
            "head size 128 is not that of values, 64, nor are they 192 and 128 of 16 bits",
        ),
        (
            replace(SHAPE, head_size=512, head_size_v=512),
            DeviceKind.SM90,
            16,
            "head size 512 is not a multiple of 8 from 48 to 256",
        ),
        (SHAPE, DeviceKind.SM90, 8, "block size 8 is not a multiple of 16"),
    ],
)
def test_a_geometry_that_it_does_not_take_is_refused_with_both_values(
    shape: DenseShape, kind: DeviceKind, block_size: int, said: str
) -> None:
    found = hopper_tile(shape, kind, block_size)
    assert isinstance(found, str)
    assert said in found


@pytest.mark.parametrize("by_13", [False, True])
def test_boxes_of_a_tile_are_whole(by_13: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_dense, "is_by_ptxas_13", lambda: by_13)
    groups, sizes = (1, 2, 3, 4, 6, 7, 8, 16, 64, 128), (48, 64, *range(72, 257, 8))
    blocks = (16, 48, 64, 128, 256, 528, 1072)
    for group, head_size, block_size, bits in product(groups, sizes, blocks, (8, 16)):
        shape = DenseShape(group * 2, 2, head_size, head_size, 2, bits)
        tile = hopper_tile(shape, DeviceKind.SM90, block_size)
        assert isinstance(tile, HopperTile)
        assert group % tile.packed == 0
        assert tile.rows_per_group * tile.packed == 64
        assert tile.query_tile * tile.packed == 64 * tile.warp_groups
        assert tile.kv_tile % tile.run == 0
        assert block_size % tile.run == 0
        columns = tile.width + tile.extra
        assert head_size <= columns <= shape.width
        # Fewer columns than a quarter of the next power of two are multiplied for nothing.
        assert bits == 8 or columns - head_size <= max(16, shape.width // 4 - 8)
        is_narrow = columns == 64 and bits == 16
        assert tile.warp_groups == (3 if is_narrow and not by_13 else 2)
        # Shared memory holds keys, values and queries, and beside them barriers and the output.
        rows = 2 * tile.num_stages * tile.kv_tile + tile.query_stages * 64 * tile.warp_groups
        room = (215 if columns > 64 else 224) * 1024
        assert rows * columns * 2 <= room


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Layer(alibi=True), "ALiBi"),
        (Layer(rswa=128), "R-SWA"),
        (Layer(cache=variants._INT8), "a cache of int8_per_token_head"),
    ],
)
def test_a_layer_that_it_does_not_serve_is_refused_by_name(layer: Layer, said: str) -> None:
    with pytest.raises(
        ValueError, match=r"kernels\.dense\.prefill 'hopper' does not serve"
    ) as error:
        call_of(Variant(Kernel.HOPPER_PREFILL, "", layer), 90)
    assert said in str(error.value)


PLAIN_LAYER = Layer()
SPLIT, PLAIN, HOPPER = "decode_kernel", "prefill_kernel", "hopper_prefill_kernel"


def kernels_of(
    monkeypatch: pytest.MonkeyPatch,
    layer: Layer = PLAIN_LAYER,
    wanted: PrefillKernel = PrefillKernel.AUTO,
    **given: Any,
) -> set[str]:
    """The kernels launched for two requests of 41 new tokens, on a device that runs Gluon."""
    monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
    calls = attention_calls(layer, 41, wanted, **given)
    return {call.kernel.__name__ for call in calls}


@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(sinks=True, lse=True),
        Layer(window=128, soft_cap=30.0),
        Layer(fp8_output=True),
        Layer(ranges=True),
        Layer(cache=variants._FP8, per_head_scales=True),
    ],
    ids=str,
)
def test_left_to_itself_an_engine_takes_it_for_what_it_serves(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels_of(monkeypatch, layer) == {SPLIT, HOPPER}
    assert kernels_of(monkeypatch, layer, PrefillKernel.TRITON) == {SPLIT, PLAIN}


@pytest.mark.parametrize(
    "layer",
    [
        Layer(alibi=True),
        Layer(rswa=128),
        Layer(cache=variants._INT8),
        Layer(cache=CacheDType.FLOAT16),
        Layer(dtype=DType.FLOAT32),
        Layer(head_size_v=64),
    ],
    ids=str,
)
def test_what_it_does_not_serve_goes_to_the_plain_kernel_without_a_word(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels_of(monkeypatch, layer) == {SPLIT, PLAIN}
    with pytest.raises(
        ValueError, match=r"kernels\.dense\.prefill 'hopper' does not serve this layer: "
    ):
        kernels_of(monkeypatch, layer, PrefillKernel.HOPPER)


def test_what_only_tensors_show_leads_to_the_plain_kernel_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = torch.zeros(82 * 32 * 128 + 8, dtype=torch.bfloat16)
    for start, kernel in ((0, HOPPER), (8, HOPPER), (4, PLAIN)):
        query = flat[start : start + 82 * 32 * 128].view(82, 32, 128)
        assert kernels_of(monkeypatch, query=query) == {SPLIT, kernel}
    assert kernels_of(monkeypatch, output_dtype=torch.float32) == {SPLIT, HOPPER}


def test_it_takes_what_has_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Layer(attn_type=AttentionType.ENCODER_ONLY, causal=False)
    assert kernels_of(monkeypatch, encoder) == {HOPPER}
    expanded = replace(encoder, heads=(16, 16, 192), head_size_v=128)
    assert kernels_of(monkeypatch, expanded) == {HOPPER}
    assert kernels_of(monkeypatch, replace(expanded, head_size_v=64)) == {PLAIN}


def test_a_launcher_chooses_anew_for_other_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of one layer is given outputs of both dtypes and queries of both alignments."""
    monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
    layer, made = Layer(), Layer().impl()
    monkeypatch.setattr(Layer, "impl", lambda self: made)
    flat = torch.zeros(82 * 32 * 128 + 8, dtype=torch.bfloat16)
    for start, dtype, kernel in 2 * (
        (0, torch.bfloat16, HOPPER),
        (4, torch.bfloat16, PLAIN),
        (0, torch.float32, HOPPER),
        (8, torch.bfloat16, HOPPER),
    ):
        query = flat[start : start + 82 * 32 * 128].view(82, 32, 128)
        calls = attention_calls(layer, 41, PrefillKernel.AUTO, query=query, output_dtype=dtype)
        assert {call.kernel.__name__ for call in calls} == {SPLIT, kernel}


def test_batch_invariance_takes_kernels_of_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(batch_invariant=True)
    assert kernels_of(monkeypatch, layer) == {SPLIT, HOPPER}
    assert kernels_of(monkeypatch, layer, PrefillKernel.TRITON) == {SPLIT, PLAIN}
    assert kernels_of(monkeypatch, replace(layer, alibi=True)) == {SPLIT, PLAIN}
    stored = replace(layer, cache=CacheDType.FP8)
    assert kernels_of(monkeypatch, stored) == {SPLIT, PLAIN}
    with pytest.raises(ValueError, match="does not serve this layer: batch invariance"):
        kernels_of(monkeypatch, stored, PrefillKernel.HOPPER)


def test_a_plan_for_another_shape_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder's spec has five query heads per KV head, but the layer has four."""
    spec = Layer(heads=(40, 8, 128)).spec()
    for wanted in (PrefillKernel.AUTO, PrefillKernel.HOPPER):
        monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
        engine = Layer(heads=(40, 8, 128)).engine(wanted)
        builder = TritonAttentionMetadataBuilder(spec, ["layer"], engine, "cpu")
        record = builder.build(0, variants._batch(Layer(), 41))
        assert record.prefill is not None
        assert record.prefill.hopper is not None
        tensors = DenseTensors(
            query=torch.zeros(82, 32, 128, dtype=torch.bfloat16),
            keys=KVViews(*torch.zeros(2, 10, 16, 8, 128, dtype=torch.bfloat16)),
            output=torch.zeros(82, 32, 128, dtype=torch.bfloat16),
            k_scale=torch.ones(1),
            v_scale=torch.ones(1),
        )
        dense = DenseLayer(32, 8, 128, 128, 0.1, CacheDType.AUTO, True)
        if wanted is PrefillKernel.AUTO:
            assert tile_of(dense, record.prefill.hopper, record, tensors) is None
        else:
            with pytest.raises(ValueError, match="is for tiles of 128 query tokens"):
                tile_of(dense, record.prefill.hopper, record, tensors)


def test_on_a_cpu_it_is_planned_only_where_it_is_asked_for() -> None:
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
    assert builder.planner.requires_hopper
    record = builder.build(16, variants._batch(layer, 20))
    assert record.prefill is not None
    assert record.prefill.hopper is not None
    assert record.shared is not None
    for part in (record.shared.prefix, record.shared.own):
        assert part.prefill is not None
        assert part.prefill.hopper is None


def test_launches_of_a_shared_prefix_are_the_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (PrefillKernel.AUTO, PrefillKernel.HOPPER):
        found = kernels_of(monkeypatch, wanted=wanted, prefix=16)
        assert PLAIN in found
        assert HOPPER not in found


def test_a_captured_record_keeps_both_plans_at_their_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
    layer = Layer()
    engine = layer.engine(PrefillKernel.AUTO)
    builder = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    captured = builder.build_for_cudagraph_capture(variants._batch(layer, 41)).prefill
    assert captured is not None
    assert captured.hopper is not None
    assert not captured.hopper.is_required
    table = torch.ones(2, 64, dtype=torch.int32)
    for lens in ([40, 33], [0, 70], [17, 0]):
        batch = CommonAttentionMetadata.from_lengths(lens, [100, 100], table, 16)
        plan = builder.build(0, batch).prefill
        assert plan is not None
        assert plan.hopper is not None
        for now, then, size in (
            (plan, captured, captured.tile.query_tile),
            (plan.hopper, captured.hopper, captured.hopper.query_tile),
        ):
            assert now.tile_starts.data_ptr() == then.tile_starts.data_ptr()
            tiles = [-(-count // size) for count in lens]
            assert then.tile_starts.tolist() == [0, tiles[0], sum(tiles)]
    other = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    moved = other.update_block_table(builder.build(0, batch), table, batch.slot_mapping).prefill
    assert moved is not None
    assert moved.hopper is not None
    assert moved.hopper.tile_starts.tolist() == captured.hopper.tile_starts.tolist()
    assert moved.hopper.tile_starts.data_ptr() != captured.hopper.tile_starts.data_ptr()


def test_its_tiles_are_counted_beside_the_others() -> None:
    layer = Layer()
    engine = layer.engine(PrefillKernel.HOPPER)
    builder = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    table = torch.ones(4, 64, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_lengths([40, 1, 33, 8], [40, 9, 100, 20], table, 16)
    plan = builder.build(0, batch).prefill
    assert plan is not None
    assert plan.hopper is not None
    # A tile of 128 rows holds 32 tokens of 4 query heads. Short queries go to the split-KV kernel.
    assert plan.hopper.query_tile == 32
    assert plan.hopper.tile_starts.tolist() == [0, 2, 2, 4, 4]


def test_descriptors_are_made_once_and_hold_no_tensor() -> None:
    layer = Layer()
    call = call_of(Variant(Kernel.HOPPER_PREFILL, "", layer), 90)
    assert not isinstance(call.arguments["k_desc"].base, torch.Tensor)
    descriptors = Descriptors()
    rows = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    one = descriptors.of("k", rows, (1, 16, 1, 64))
    assert descriptors.of("k", rows[:], (1, 16, 1, 64)) is one
    assert descriptors.of("k", rows[1:], (1, 16, 1, 64)) is not one
    assert descriptors.of("v", rows, (1, 16, 1, 64)) is one
    assert descriptors.of("v", rows.view(torch.float16), (1, 16, 1, 64)).base.dtype == torch.float16


def test_rows_of_one_forward_at_the_same_address_keep_their_descriptor() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 8, "head_size": 128, "head_size_v": 128}
    layer = DenseLayer(**sizes, scale=0.1, cache_dtype=CacheDType.AUTO, causal=False)
    launcher = HopperLauncher(layer)
    rows = torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)

    def described(key: torch.Tensor) -> object:
        # Encoders have no cache whose views are kept: each forward makes them anew.
        keys = KVViews(key, key)
        made = KeyRows(keys, stored_as(CacheDType.AUTO))
        tensors = DenseTensors(key, keys, key, None, None, rows=made)
        return launcher._described(key, key, 16, tensors)[0]

    first = described(rows)
    assert described(rows[:]) is first
    assert described(rows[1:]) is not first
