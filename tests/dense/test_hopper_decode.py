"""The Hopper split-KV kernel, tested without a GPU: refusals, its plan, its results by numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

import builders.dense.triton_attn
from attn.backends.triton_attn import TritonAttentionBackend
from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from attn.kernels.dense.hopper_decode.launch import serves
from attn.kernels.dense.tensors import DenseLayer, DenseTensors
from attn.testing.batches import BATCHES, BatchSpec, Heads
from attn.testing.cases import FEATURES, Case, cases_for
from attn.testing.conformance import check_case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import Trial
from builders.dense.choice import (
    HOPPER_RING,
    LayerRequirements,
    hopper_decode_tile,
)
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.launch.call import KernelCall, collected_calls
from builders.splitkv.planner import (
    SplitPlanner,
)
from builders.splitkv.segments import SEGMENT
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    split_tile,
)
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, PrefillKernel
from specs.layouts import KVViews
from tests.compile import variants
from tests.compile.variants import Kernel, Layer, Variant, attention_calls, call_of
from tests.conformance import test_random_attention
from tests.dense.hopper_cases import is_decoded
from tests.tools import gluon_in_numpy

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)


@pytest.mark.parametrize(
    ("shape", "kind", "block_size", "tokens", "said"),
    [
        (SHAPE, DeviceKind.SM100, 16, 1, "the device is sm100, not sm90"),
        (replace(SHAPE, itemsize=4), DeviceKind.SM90, 16, 1, "have 4 bytes, not 2"),
        (replace(SHAPE, stored_bits=4), DeviceKind.SM90, 16, 1, "4 bits, not 8 or 16"),
        (replace(SHAPE, head_size_v=64), DeviceKind.SM90, 16, 1, "128 is not that of values, 64"),
        (
            replace(SHAPE, head_size=264, head_size_v=264),
            DeviceKind.SM90,
            16,
            1,
            "head size 264 is not a multiple of 8 from 64 to 256",
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
    groups, sizes = (1, 2, 3, 4, 6, 7, 8, 16, 17, 64, 128), (64, 72, 80, 96, 128, 136, 192, 256)
    for group, size, block_size in product(groups, sizes, (16, 48, 64, 128, 256, 528, 1072)):
        shape = DenseShape(group * 2, 2, size, size, 2, 16)
        width = shape.width
        gpu = KNOWN_DEVICES["h100"].facts
        for is_invariant in (False, True):
            asks = LayerRequirements(is_invariant, split=split_tile(shape, gpu, 1))
            tile = hopper_decode_tile(shape, DeviceKind.SM90, block_size, 1, asks)
            if is_invariant and width == 256 and min(group, 32) > 16:
                assert isinstance(tile, str)
                continue
            assert isinstance(tile, HopperDecodeTile)
            split = tile.split
            assert split.kv_tile % tile.run == 0
            assert block_size % tile.run == 0
            assert SEGMENT % split.segment_unit == 0
            assert split.tile_heads * split.head_tiles >= group
            assert split.tile_heads * split.query_tokens <= split.rows
            assert split.rows == 16 or (split.rows == 64 and width < 256)
            assert split.query_tokens == 1
            stages = tile.num_stages * split.programs_per_sm
            loaded, ring = (stages * 2 * split.kv_tile * n * 2 for n in (size, width))
            assert HOPPER_RING // 2 < loaded <= HOPPER_RING
            assert size < width or ring == HOPPER_RING
            # Beside the ring, shared memory holds both consumers' queries and the mailbox's state.
            beside = 8 * split.rows * width if tile.consumers > 1 else 0
            assert ring + beside + 10240 * split.programs_per_sm <= gpu.shared_memory
            if not is_invariant:
                # A launcher knows only the plan's tokens, which must give the same tile.
                tokens = split.query_tokens
                assert hopper_decode_tile(shape, DeviceKind.SM90, block_size, tokens) == tile
    assert KNOWN_DEVICES["h100"].facts.shared_memory > HOPPER_RING


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Layer(alibi=True), "ALiBi"),
        (Layer(rswa=128), "R-SWA"),
        (Layer(cache=variants._E5M2), "a cache of fp8_e5m2"),
        (Layer(cache=variants._FP8_INLINE), "a cache of fp8_per_token_head"),
        (Layer(heads=(64, 8, 64), cache=variants._FP8), "head size 64"),
        (Layer(heads=(32, 8, 256), drafts=7), "8 query tokens"),
    ],
)
def test_a_layer_that_it_does_not_serve_is_refused_by_name(layer: Layer, said: str) -> None:
    with pytest.raises(
        ValueError, match=r"kernels\.dense\.decode 'hopper' does not serve"
    ) as error:
        call_of(Variant(Kernel.HOPPER_DECODE, "", layer), 90)
    assert said in str(error.value)


def test_e4m3_is_loaded_as_words() -> None:
    shape = replace(SHAPE, stored_bits=8)
    tile = hopper_decode_tile(shape, DeviceKind.SM90, 16, 4)
    assert isinstance(tile, HopperDecodeTile)
    assert tile.num_stages * 2 * tile.split.kv_tile * 128 == HOPPER_RING
    said = hopper_decode_tile(shape, DeviceKind.SM90, 16, 5)
    assert isinstance(said, str)
    assert "more than 16 rows" in said
    call = call_of(Variant(Kernel.HOPPER_DECODE, "", Layer(cache=variants._FP8)), 90)
    assert call.arguments["E4M3"]
    assert call.arguments["k_desc"].shape[-1] == 64


def builder_of(layer: Layer, wanted: DecodeKernel) -> TritonAttentionMetadataBuilder:
    engine = layer.engine(PrefillKernel.AUTO, wanted)
    return TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")


def test_on_a_cpu_it_is_planned_only_where_it_is_asked_for() -> None:
    layer = Layer(heads=(8, 1, 128))
    for wanted in DecodeKernel:
        plan = builder_of(layer, wanted).build(0, variants._batch(layer, 1)).split
        assert plan is not None
        assert (plan.hopper is not None) == (wanted is DecodeKernel.HOPPER)


FEW_HEADS = Layer(heads=(8, 1, 128))
PLAIN, HOPPER = "decode_kernel", "hopper_decode_kernel"


def kernel_of(layer: Layer, decode: DecodeKernel = DecodeKernel.AUTO, **given: Any) -> str:
    """The kernel launched for two requests of one new token, on a device that runs Gluon."""
    with mock.patch.object(builders.dense.triton_attn, "runs_gluon", return_value=True):
        calls = attention_calls(layer, 1, PrefillKernel.AUTO, decode, **given)
    (call,) = calls
    return str(call.kernel.__name__)


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (FEW_HEADS, HOPPER),
        (replace(FEW_HEADS, sinks=True, soft_cap=30.0, lse=True), HOPPER),
        (replace(FEW_HEADS, fp8_output=True), HOPPER),
        (Layer(heads=(16, 8, 256)), HOPPER),
        (Layer(), HOPPER),
        (Layer(drafts=3), HOPPER),
        (Layer(drafts=4), HOPPER),
        (Layer(heads=(8, 1, 64)), PLAIN),
        (Layer(heads=(8, 1, 64), drafts=1), PLAIN),
        (Layer(heads=(8, 1, 64), drafts=3), PLAIN),
        (Layer(heads=(8, 1, 64), drafts=4), HOPPER),
        (replace(FEW_HEADS, drafts=3), HOPPER),
        (replace(FEW_HEADS, batch_invariant=True), HOPPER),
        (Layer(heads=(16, 8, 256), batch_invariant=True), HOPPER),
        (Layer(heads=(8, 1, 64), drafts=7, window=128), PLAIN),
        (replace(FEW_HEADS, window=128), HOPPER),
        (replace(FEW_HEADS, window=128, drafts=3), PLAIN),
        (replace(FEW_HEADS, window=128, batch_invariant=True), HOPPER),
        (replace(FEW_HEADS, chunk=64), HOPPER),
        (replace(FEW_HEADS, cache=variants._FP8), HOPPER),
        (replace(FEW_HEADS, cache=variants._FP8, window=128), HOPPER),
        (replace(FEW_HEADS, cache=variants._FP8, batch_invariant=True), HOPPER),
        (replace(FEW_HEADS, cache=variants._INT8), PLAIN),
        (replace(FEW_HEADS, cache=CacheDType.FLOAT16), PLAIN),
        (replace(FEW_HEADS, dtype=DType.FLOAT32), PLAIN),
        (replace(FEW_HEADS, rswa=128), PLAIN),
        (replace(FEW_HEADS, alibi=True), PLAIN),
    ],
    ids=str,
)
def test_left_to_itself_an_engine_takes_it_where_it_measured_faster(
    layer: Layer, kernel: str
) -> None:
    assert kernel_of(layer) == kernel
    assert kernel_of(layer, DecodeKernel.TRITON) == PLAIN


def test_what_only_tensors_show_leads_to_the_plain_kernel_over_the_same_plan() -> None:
    layer = replace(FEW_HEADS, alibi=True)
    with mock.patch.object(builders.dense.triton_attn, "runs_gluon", return_value=True):
        plan = builder_of(layer, DecodeKernel.AUTO).planner.split()
        (call,) = attention_calls(layer, 1, PrefillKernel.AUTO, DecodeKernel.AUTO)
    assert plan.hopper is not None
    assert not plan.requires_hopper
    assert call.grid == (plan.groups * plan.heads,)
    assert (call.num_warps, call.num_stages) == (plan.tile.num_warps, plan.tile.num_stages)
    for name in ("KV_TILE", "SEGMENT_UNIT", "QUERY_TOKENS", "TILE_HEADS"):
        assert call.arguments[name] == getattr(plan.tile, name.lower())


def test_any_query_and_output_will_do() -> None:
    flat = torch.zeros(2 * 8 * 128 + 4, dtype=torch.bfloat16)
    for start in (0, 4):
        query = flat[start : start + 2 * 8 * 128].view(2, 8, 128)
        assert kernel_of(FEW_HEADS, query=query, output_dtype=torch.float32) == HOPPER


@pytest.mark.parametrize("wanted", [DecodeKernel.AUTO, DecodeKernel.HOPPER], ids=str)
def test_rows_that_tma_cannot_address_are_the_plain_kernels(wanted: DecodeKernel) -> None:
    record = builder_of(FEW_HEADS, DecodeKernel.HOPPER).build(0, variants._batch(FEW_HEADS, 1))
    assert record.split is not None
    plan = replace(record.split, requires_hopper=wanted is DecodeKernel.HOPPER)
    flat = torch.zeros(2, 10 * 16 * 128 + 8, dtype=torch.bfloat16)
    tensors = DenseTensors(
        query=torch.zeros(2, 8, 128, dtype=torch.bfloat16),
        keys=KVViews(*(rows[4:-4].view(10, 16, 1, 128) for rows in flat)),
        output=torch.zeros(2, 8, 128, dtype=torch.bfloat16),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    dense = DenseLayer(8, 1, 128, 128, 0.1, CacheDType.AUTO, True)
    aligned = replace(tensors, keys=KVViews(*(rows[8:].view(10, 16, 1, 128) for rows in flat)))
    assert serves(dense, plan, record, aligned)
    negative = replace(dense, scale=-0.1)
    for layer, given, said in (
        (dense, tensors, "rows of key are aligned to 8 bytes"),
        (negative, aligned, "scale -0.1 is not positive"),
    ):
        if wanted is DecodeKernel.AUTO:
            assert not serves(layer, plan, record, given)
        else:
            with pytest.raises(ValueError, match=said):
                serves(layer, plan, record, given)


def test_a_plan_for_another_shape_is_not_taken() -> None:
    """The layer has four query heads per KV head, but the plan is for eight."""
    record = builder_of(FEW_HEADS, DecodeKernel.HOPPER).build(0, variants._batch(FEW_HEADS, 1))
    tensors = DenseTensors(
        query=torch.zeros(2, 4, 128, dtype=torch.bfloat16),
        keys=KVViews(*torch.zeros(2, 10, 16, 1, 128, dtype=torch.bfloat16)),
        output=torch.zeros(2, 4, 128, dtype=torch.bfloat16),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    dense = DenseLayer(4, 1, 128, 128, 0.1, CacheDType.AUTO, True)
    assert record.split is not None
    assert not serves(dense, replace(record.split, requires_hopper=False), record, tensors)
    with pytest.raises(ValueError, match="the builder's plan is for HopperDecodeTile"):
        serves(dense, record.split, record, tensors)


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


# -- Results, computed by numpy; tests.tools.gluon_in_numpy says what numpy does not show.

LEFT_OUT = ("causal_per_request", "window_of_one", "mm_prefix")
"""Features that other features cover too; numpy is slow, so they are left out."""
_DENSE = [case for case in cases_for(TritonAttentionBackend) if isinstance(case, Case)]
_SERVED = [
    case
    # Numpy has no bf16, so no case has it.
    for case in (replace(one, dtype=DType.FLOAT16) for one in _DENSE if one.dtype.itemsize == 2)
    if is_decoded(case) and min(case.batch.query_lens) <= 16 and case.feature.name not in LEFT_OUT
]
CASES = {
    f"{case.feature.name}-{case.cache_dtype.quant_mode.name}"
    + (f"-{case.batch.name}" if case.feature.name == "causal" else ""): case
    for case in reversed(_SERVED)
}
"""One case of each kind; a GPU runs all cases (tests/gpu)."""
IN_FULL = {
    f"causal-NONE-{name}": Case(batch=BATCHES[name], heads=Heads(8, 2, 64), dtype=DType.FLOAT16)
    for name in ("keyless_rows", "padding_rows")
}
"""Cases that are small enough to run whole in numpy."""


@pytest.fixture
def instead() -> dict[str, Any]:
    """Functions that replace functions of the kernel; a test may override this."""
    return {}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]) -> list[KernelCall]:
    """The kernel's launches so far; numpy runs each, with its programs in a random order."""
    translation = gluon_in_numpy.Translation(**instead)
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.HOPPER)
    return gluon_in_numpy.take_over(monkeypatch, hopper_decode_kernel, translation)


@pytest.mark.parametrize("name", sorted({*CASES} - {*IN_FULL}))
def test_it_computes_a_step_of_every_kind(name: str, launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(CASES[name]) == {}
    assert launched


@pytest.mark.parametrize("name", IN_FULL)
def test_it_keeps_all_that_is_promised(name: str, launched: list[KernelCall]) -> None:
    """A request has the same bits when it is alone, in replays, and over another block table."""
    check_case(TritonAttentionBackend, IN_FULL[name], torch.device("cpu"))
    assert launched


HEADS = {size: Heads(4, 1, size) for size in (64, 128, 256)}
WHOLE = Case(heads=HEADS[128], dtype=DType.FLOAT16)
LONG = {
    "verify": replace(
        WHOLE, batch=BatchSpec("a", (4, 2, 1), (600, 40, 530), num_speculative_tokens=3)
    ),
    "wide": replace(WHOLE, batch=BatchSpec("b", (9, 8), (700, 90), num_speculative_tokens=8)),
    "segment_groups": replace(WHOLE, heads=HEADS[64], batch=BatchSpec("c", (1,), (8250,))),
    "d256": replace(WHOLE, heads=HEADS[256], batch=BatchSpec("d", (1, 1), (530, 33))),
    "e4m3": replace(WHOLE, cache_dtype=CacheDType.FP8, batch=BatchSpec("e", (2, 1), (600, 33))),
    "head_loops": replace(WHOLE, heads=Heads(4, 4, 64), batch=BatchSpec("f", (1, 1), (600, 33))),
    "d192": replace(WHOLE, heads=Heads(4, 1, 192), batch=BatchSpec("g", (1, 1), (530, 33))),
    "d80": replace(WHOLE, heads=Heads(4, 1, 80), batch=BatchSpec("h", (2, 1), (1100, 33))),
    "d96_wide": replace(
        WHOLE,
        heads=Heads(4, 1, 96),
        batch=BatchSpec("i", (9, 8), (700, 90), num_speculative_tokens=8),
    ),
    "d160_e4m3": replace(
        WHOLE,
        heads=Heads(4, 1, 160),
        cache_dtype=CacheDType.FP8,
        batch=BatchSpec("j", (2, 1), (600, 33)),
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_it_computes_rows_of_many_segments(kind: str, launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(LONG[kind]) == {}
    assert len(launched) == 1


@pytest.mark.parametrize("kind", LONG)
def test_keys_that_come_late_are_waited_for(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One consumer may finish keys that were loaded after keys the other consumer still needs."""
    gluon_in_numpy.delay(monkeypatch)
    for _ in range(4):
        assert test_random_attention.findings(LONG[kind]) == {}
    assert len(launched) == 4


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_plain_kernel_computes_alibi_over_its_plan(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders.dense.triton_attn, "runs_gluon", lambda device: True)
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.AUTO)
    batch = BatchSpec("g", (1 + drafts, 1), (600, 33), num_speculative_tokens=drafts or None)
    case = replace(WHOLE, batch=batch, feature=FEATURES["alibi"])
    trial = DenseTrial(TritonAttentionBackend, case, torch.device("cpu"))
    assert trial.builder().planner.hopper_decode is not None
    assert test_random_attention.findings(case) == {}


@pytest.mark.parametrize("instead", [{"_clear_tail": lambda *_: None}], indirect=False)
def test_values_that_nobody_wrote_would_show(launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(LONG["verify"])
    assert launched


TWO = [
    name for name in LONG if name in ("wide", "d96_wide", "segment_groups", "e4m3", "head_loops")
]
"""The kinds in which two consumers share the keys."""


@pytest.mark.parametrize("kind", LONG)
def test_two_consumers_share_the_keys_where_one_would_be_waited_for(
    kind: str, launched: list[KernelCall]
) -> None:
    test_random_attention.findings(LONG[kind])
    assert {call.arguments["CONSUMERS"] for call in launched} == {2 if kind in TWO else 1}


def _without_what_was_sent(state: Any, times: Any, mailbox: Any) -> Any:
    mailbox.sent.wait(times & 1)
    mailbox.taken.arrive()
    return state


@pytest.mark.parametrize("instead", [{"_with_sent": _without_what_was_sent}], indirect=False)
@pytest.mark.parametrize("kind", TWO)
def test_the_other_consumers_keys_would_be_missed(kind: str, launched: list[KernelCall]) -> None:
    assert test_random_attention.findings(LONG[kind])
    assert launched
