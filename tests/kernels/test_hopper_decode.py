"""The split-KV kernel for Hopper without one: what it refuses, and its plan."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attn.backends.triton_attn import TritonAttentionBackend
from attn.kernels.hopper import launch as hopper_launch
from attn.kernels.hopper.decode import hopper_decode_kernel
from attn.kernels.launch import KernelCall, collected_calls
from builders.segments import SEGMENT
from builders.split_kv import SplitPlanner
from builders.tiles import (
    HOPPER_RING,
    SHARED_MEMORY,
    DenseShape,
    HopperDecodeTile,
    hopper_decode_tile,
)
from builders.triton_attn import TritonAttentionMetadataBuilder
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, PrefillKernel
from tests import test_random_attention, trials
from tests.batches import BatchSpec, Heads
from tests.cases import Case, cases_for
from tests.conformance import check_case
from tests.hopper_cases import is_decoded
from tests.kernels import gluon_in_numpy, variants
from tests.kernels.variants import Kernel, Layer, Variant, call_of

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)


@pytest.mark.parametrize(
    ("shape", "kind", "block_size", "tokens", "said"),
    [
        (SHAPE, DeviceKind.SM100, 16, 1, "the device is sm100, not sm90"),
        (replace(SHAPE, itemsize=4), DeviceKind.SM90, 16, 1, "have 4 bytes, not 2"),
        (replace(SHAPE, stored_bits=8), DeviceKind.SM90, 16, 1, "8 bits and are not scaled e4m3"),
        (replace(SHAPE, head_size_v=64), DeviceKind.SM90, 16, 1, "128 is not that of values, 64"),
        (
            replace(SHAPE, head_size=96, head_size_v=96),
            DeviceKind.SM90,
            16,
            1,
            "head size 96 is not one of (64, 128, 256)",
        ),
        (SHAPE, DeviceKind.SM90, 8, 1, "block size 8 is not a multiple of 16"),
        (SHAPE, DeviceKind.SM90, 0, 1, "there are no pages"),
        (SHAPE, DeviceKind.SM90, 16, 17, "4 query heads and 17 query tokens has more than 64 rows"),
        (
            replace(SHAPE, head_size=256, head_size_v=256),
            DeviceKind.SM90,
            16,
            5,
            "4 query heads and 5 query tokens has more than 16 rows",
        ),
    ],
)
def test_a_geometry_that_it_does_not_take_is_refused_with_both_values(
    shape: DenseShape, kind: DeviceKind, block_size: int, tokens: int, said: str
) -> None:
    found = hopper_decode_tile(shape, kind, block_size, tokens)
    assert isinstance(found, str)
    assert said in found


def test_boxes_of_a_tile_are_whole_and_so_are_tiles_of_a_segment() -> None:
    groups, sizes = (1, 2, 3, 4, 6, 7, 8, 16, 17, 64, 128), (64, 128, 256)
    for group, size, block_size in product(groups, sizes, (16, 48, 64, 128, 256, 528, 1072)):
        shape = DenseShape(group * 2, 2, size, size, 2, 16)
        for every_row in (False, True):
            tile = hopper_decode_tile(shape, DeviceKind.SM90, block_size, 1, every_row)
            assert isinstance(tile, HopperDecodeTile)
            split = tile.split
            assert split.kv_tile % tile.run == 0
            assert block_size % tile.run == 0
            assert SEGMENT % split.segment_unit == 0
            assert split.tile_heads * split.head_tiles >= group
            assert split.tile_heads * split.query_tokens <= split.rows
            assert split.rows == 16 or (split.rows == 64 and size < 256)
            if not every_row:
                assert split.query_tokens == 1
            assert split.num_stages * 2 * split.kv_tile * size * 2 == HOPPER_RING
    assert SHARED_MEMORY[DeviceKind.SM90] * 1024 > HOPPER_RING


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Layer(alibi=True), "ALiBi"),
        (Layer(rswa=128), "R-SWA"),
        (Layer(cache=variants._E5M2), "8 bits"),
        (Layer(cache=variants._FP8_INLINE), "8 bits"),
        (Layer(heads=(64, 8, 64), cache=variants._FP8), "head size 64"),
        (Layer(heads=(32, 8, 256), drafts=7), "8 query tokens"),
    ],
)
def test_a_layer_that_it_does_not_serve_is_refused_by_name(layer: Layer, said: str) -> None:
    with pytest.raises(ValueError, match="decode_kernel 'hopper' does not serve") as error:
        call_of(Variant(Kernel.HOPPER_DECODE, "", layer), 90)
    assert said in str(error.value)


def test_e4m3_is_loaded_as_words() -> None:
    shape = replace(SHAPE, stored_bits=8)
    tile = hopper_decode_tile(shape, DeviceKind.SM90, 16, 4, is_e4m3=True)
    assert isinstance(tile, HopperDecodeTile)
    assert tile.split.num_stages * 2 * tile.split.kv_tile * 128 == HOPPER_RING
    said = hopper_decode_tile(shape, DeviceKind.SM90, 16, 5, is_e4m3=True)
    assert isinstance(said, str)
    assert "more than 16 rows" in said
    call = call_of(Variant(Kernel.HOPPER_DECODE, "", Layer(cache=variants._FP8)), 90)
    assert call.arguments["E4M3"]
    assert call.arguments["k_desc"].shape[-1] == 64


def builder_of(layer: Layer, wanted: DecodeKernel) -> TritonAttentionMetadataBuilder:
    engine = layer.engine(PrefillKernel.AUTO, wanted)
    return TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")


def test_it_is_taken_only_where_it_is_asked_for() -> None:
    layer = Layer()
    for wanted in DecodeKernel:
        plan = builder_of(layer, wanted).build(0, variants._batch(layer, 1)).split
        assert plan is not None
        assert (plan.hopper is not None) == (wanted is DecodeKernel.HOPPER)


def test_a_free_partition_is_the_other_kernels() -> None:
    layer = Layer()
    engine = layer.engine(PrefillKernel.AUTO, DecodeKernel.HOPPER)
    builder = TritonAttentionMetadataBuilder.for_free_partition(
        layer.spec(), ["layer"], engine, "cpu"
    )
    plan = builder.build(0, variants._batch(layer, 1)).split
    assert plan is not None
    assert plan.hopper is None


def test_the_own_part_behind_a_shared_prefix_is_its_too() -> None:
    layer = Layer()
    builder = builder_of(layer, DecodeKernel.HOPPER)
    record = builder.build(16, variants._batch(layer, 1))
    assert record.shared is not None
    assert record.shared.own.split is not None
    assert record.shared.own.split.hopper is not None


def test_a_program_has_a_multiprocessor_and_the_plan_is_cut_in_its_tiles() -> None:
    layer = Layer()
    planner: SplitPlanner = builder_of(layer, DecodeKernel.HOPPER).planner
    assert planner.groups * planner.heads <= planner.num_multiprocessors
    plan = planner.split()
    assert plan.hopper is not None
    assert plan.tile == plan.hopper.split
    assert plan.states.numel() >= plan.slots * plan.groups * plan.heads * 4 * 128


def test_a_form_is_made_once_and_launched_over_all_programs() -> None:
    layer = Layer()
    builder = builder_of(layer, DecodeKernel.HOPPER)
    impl, cache = layer.impl(), layer.spec().layout().allocate(10)
    record = builder.build(0, variants._batch(layer, 1))
    query, output = torch.zeros(2, 2, 32, 128, dtype=torch.bfloat16)
    with collected_calls() as calls:
        for _ in range(2):
            impl.forward(layer.scales(), query, None, None, cache, record, output)
    first, second = calls
    assert first.kernel is second.kernel is hopper_decode_kernel
    assert record.split is not None
    assert first.grid == (record.split.groups * record.split.heads,)
    assert first.arguments["k_desc"] is second.arguments["k_desc"]
    assert first.arguments["states_ptr"] is record.split.states


# -- What it computes, by numpy: see tests.kernels.gluon_in_numpy for what that does not see.

CASES = [
    case
    for case in cases_for(TritonAttentionBackend)
    if isinstance(case, Case)
    and case.dtype is DType.FLOAT16
    and is_decoded(case)
    and min(case.batch.query_lens) <= 16
]


@pytest.fixture
def instead() -> dict[str, Any]:
    """Functions of the kernel that a test replaces."""
    return {}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]) -> list[KernelCall]:
    """Launches of the kernel, each run by numpy, its programs in another order every time."""
    calls: list[KernelCall] = []
    translation, launch = gluon_in_numpy.Translation(**instead), KernelCall.launch

    def run(call: KernelCall) -> None:
        if call.kernel is not hopper_decode_kernel:
            launch(call)
            return
        calls.append(call)
        programs = list(range(call.grid[0]))
        random.Random(len(calls)).shuffle(programs)
        gluon_in_numpy.run(call, programs, translation)

    monkeypatch.setattr(KernelCall, "launch", run)
    monkeypatch.setattr(hopper_launch, "_describe", lambda rows, box: rows)
    monkeypatch.setattr(trials.Trial, "decode_kernel", DecodeKernel.HOPPER)
    return calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_every_case_that_it_serves(case: Case, launched: list[KernelCall]) -> None:
    check_case(TritonAttentionBackend, case, torch.device("cpu"))
    assert launched


HEADS = {size: Heads(4, 1, size) for size in (64, 128, 256)}
WHOLE = Case(heads=HEADS[128], dtype=DType.FLOAT16)
LONG = {
    "verify": replace(
        WHOLE, batch=BatchSpec("a", (4, 2, 1), (2100, 40, 700), num_speculative_tokens=3)
    ),
    "wide": replace(WHOLE, batch=BatchSpec("b", (9, 8), (1800, 300), num_speculative_tokens=8)),
    "bundles": replace(WHOLE, heads=HEADS[64], batch=BatchSpec("c", (1, 1), (17000, 8193))),
    "d256": replace(WHOLE, heads=HEADS[256], batch=BatchSpec("d", (1, 1), (1700, 513))),
    "e4m3": replace(WHOLE, cache_dtype=CacheDType.FP8, batch=BatchSpec("e", (2, 1), (1700, 33))),
    "head_loops": replace(WHOLE, heads=Heads(8, 8, 64), batch=BatchSpec("f", (1, 1), (1700, 33))),
}


@pytest.mark.parametrize("kind", LONG)
def test_it_computes_rows_of_many_segments(kind: str, launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(LONG[kind]) == {}
    assert len(launched) == 1


@pytest.mark.parametrize("instead", [{"_clear_tail": lambda *_: None}], indirect=False)
def test_values_that_nobody_wrote_would_show(launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(LONG["verify"])
    assert launched
