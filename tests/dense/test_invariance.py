"""Batch invariance of dense layers: any chunking of a prompt gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import attn.kernels.dense.prefill as prefill_module
import attn.kernels.dense.tile as tile_module
from attn.backends.triton_attn import TritonAttentionBackend
from attn.kernels.dense.tile import fold_states
from attn.reference import cache as reference
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult
from builders.dense import triton_attn
from builders.dense.choice import LayerRequirements, segmented_prefill_of
from builders.splitkv import segments
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.record import PrefillPlan
from builders.splitkv.tiles import DenseShape, invariant_split_tile, segmented_tile, split_tile
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels, PrefillKernel
from specs.kv_cache import FullAttentionSpec
from tests.dense.chunked import Prompt, Rows, Setup, differing, products_in_order
from tests.tools.gpus import hopper

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_gpu_invariance.py is for a GPU"
)
CPU = torch.device("cpu")
SMALL = Setup(heads=(2, 1, 64), dtype=DType.FLOAT16, keys=2300, queries=70, max_len=4096)
"""Its keys are five segments, in three segment groups of two."""
E4M3 = replace(
    SMALL, heads=(2, 1, 128), dtype=DType.BFLOAT16, cache_dtype=CacheDType.FP8, queries=140
)
"""Outputs of a prompt's earlier segments wait in memory, in two planes."""
INT8 = replace(SMALL, cache_dtype=CacheDType.INT8_PER_TOKEN_HEAD)
LAYERS = {
    "causal": SMALL,
    "window": replace(SMALL, window=700),
    "chunk": replace(SMALL, chunk=1024),
    "cap and sinks": replace(SMALL, soft_cap=30.0, sinks=True),
    "alibi": replace(SMALL, alibi=True, keys=1100),
    "wide heads": replace(SMALL, heads=(2, 2, 128), keys=1100, queries=40),
    "stored": replace(SMALL, heads=(2, 1, 256), keys=2300, queries=40),
    "stored behind a window": replace(SMALL, heads=(2, 1, 256), keys=1400, queries=40, window=700),
    "bf16": replace(SMALL, dtype=DType.BFLOAT16, keys=1100),
    "e4m3": replace(SMALL, cache_dtype=CacheDType.FP8),
    "e4m3, wide heads": replace(E4M3, window=700, keys=1400),
    "e4m3, scales of heads": replace(
        E4M3, heads=(4, 2, 128), dtype=DType.FLOAT16, keys=1100, head_scales=True
    ),
    "e4m3, 256": replace(E4M3, heads=(2, 1, 256), keys=1100),
    "e4m3, cap and sinks": replace(E4M3, keys=1100, soft_cap=30.0, sinks=True),
    "e5m2": replace(E4M3, cache_dtype=CacheDType.FP8_E5M2, keys=1100),
    "int8": replace(INT8, keys=1100),
    "int8, wide heads": replace(INT8, heads=(2, 1, 128), alibi=True, keys=1100),
    "fp8 per token": replace(INT8, cache_dtype=CacheDType.FP8_PER_TOKEN_HEAD, keys=1100),
}


@pytest.fixture(autouse=True)
def _short_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segment groups of two segments, and products whose order is that of a GPU's."""
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", 2)
    with products_in_order():
        yield


def part(rows: Rows, start: int, stop: int) -> Rows:
    return rows[0][start:stop], rows[1][start:stop]


@pytest.mark.parametrize("layer", LAYERS)
def test_decodes_verifies_and_chunks_have_the_bits_of_the_whole_prompt(layer: str) -> None:
    prompt = Prompt(LAYERS[layer], CPU)
    last = prompt.setup.queries
    whole = prompt.rows(0, last)
    assert differing(whole, whole) == 0
    # One token and four are the split-KV kernel's, 33 and more the prefill kernel's.
    for size, start in ((1, last - 3), (4, last - 8), (7, last - 14), (33, 0)):
        found = prompt.in_chunks(size, start)
        assert differing(found, part(whole, start, last)) == 0, size


def test_other_requests_of_the_step_change_no_bit() -> None:
    prompt = Prompt(replace(SMALL, keys=1300), CPU)
    whole = prompt.rows(0, 70)
    assert differing(prompt.rows(0, 70, ((1, 1200), (20, 600))), whole) == 0
    assert differing(prompt.rows(69, 70, ((1, 1200), (4, 600))), part(whole, 69, 70)) == 0


@pytest.mark.parametrize(
    "layer", ["causal", "stored", "stored behind a window", "e4m3, scales of heads"]
)
def test_a_prompts_programs_share_few_slots(layer: str) -> None:
    """Fewer programs than tiles: each takes several, and reads no state of the tile before."""
    prompt = Prompt(replace(LAYERS[layer], queries=70), CPU)
    whole = prompt.rows(0, 70)
    planner: SplitPlanner = prompt.builder.planner
    planner.prefill_programs = 1
    states = planner.buffers["prefill_states"]
    states.fill_(float("nan"))
    assert differing(prompt.rows(0, 70), whole) == 0


# -- Right results.

LONG = BatchSpec("long_queries", (40, 1, 70), (1300, 1100, 530))
"""Two prompts of the prefill kernel, whose keys fill up to three segments, and a decode."""


MASKS = [
    "causal",
    "non_causal",
    "causal_per_request_window",
    "window",
    "chunked_lookback",
    "alibi_sqrt",
    "sinks",
    "soft_cap_window",
    "mm_prefix",
    "mm_prefix_clamped",
    "rswa",
    "fp8_output",
]
QUANTISED = {
    "e4m3": (CacheDType.FP8, Heads(2, 1, 128), ["window", "mm_prefix_clamped", "rswa"]),
    "int8": (CacheDType.INT8_PER_TOKEN_HEAD, Heads(2, 1, 64), ["soft_cap_window", "rswa"]),
}
"""Caches of 8 bits, with masks of which some leave slots unread."""


@pytest.mark.parametrize("feature", MASKS)
def test_every_mask_and_bias_is_right(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(FEATURES[feature], LONG, Heads(2, 1, 64), DType.FLOAT16)
    check_results(case, monkeypatch)


@pytest.mark.parametrize(
    ("stored", "feature"),
    [(stored, name) for stored, (_, _, names) in QUANTISED.items() for name in names],
)
def test_masks_over_8_bits_are_right(
    stored: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dtype, heads, _ = QUANTISED[stored]
    case = Case(FEATURES[feature], LONG, heads, DType.FLOAT16, cache_dtype)
    check_results(case, monkeypatch)


def check_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a batch-invariant engine are those of the oracle."""
    monkeypatch.setattr("attn.impls.dense.cached.write_kv", reference.write_kv)
    trial = DenseTrial(TritonAttentionBackend, case, CPU)
    trial.config = trial.config.replace(batch_invariant=True)
    trial.write()
    record = trial.build(trial.builder())
    assert record.prefill.segmented is not None
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    assert result.findings == {}
    assert "output" in result.checked


# -- Seeded faults: each makes bits differ.


@pytest.mark.parametrize("layer", ["stored", "e4m3, scales of heads"])
def test_stored_outputs_that_nobody_folds_differ(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last segment of a segment group finds nothing in memory."""
    prompt = Prompt(LAYERS[layer], CPU)
    last = prompt.setup.queries
    decodes = prompt.in_chunks(1, last - 2)
    assert differing(decodes, part(prompt.rows(0, last), last - 2, last)) == 0
    monkeypatch.setattr(prefill_module, "opened", lambda number, begin, unit: number < 0)
    assert differing(decodes, part(prompt.rows(0, last), last - 2, last)) > 0


def test_segments_of_another_length_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(SMALL, CPU)
    plan = prompt.builder.planner.prefill_plan

    def longer(*given: Any) -> PrefillPlan | None:
        made: PrefillPlan | None = plan(*given)
        if made is None or made.segmented is None:
            return made
        unit = made.segmented.segment_unit // 2
        return replace(made, segmented=replace(made.segmented, segment_unit=unit))

    monkeypatch.setattr(prompt.builder.planner, "prefill_plan", longer)
    assert differing(prompt.in_chunks(1, 68), part(prompt.rows(0, 70), 68, 70)) > 0


def test_segment_groups_of_another_length_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(SMALL, CPU)
    plan = prompt.builder.planner.prefill_plan

    def longer(*given: Any) -> PrefillPlan | None:
        made: PrefillPlan | None = plan(*given)
        if made is None or made.segmented is None:
            return made
        return replace(made, segmented=replace(made.segmented, segment_group=3))

    monkeypatch.setattr(prompt.builder.planner, "prefill_plan", longer)
    assert differing(prompt.in_chunks(1, 68), part(prompt.rows(0, 70), 68, 70)) > 0


def test_two_chains_of_segments_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even and odd segments are folded apart, as two consumers with states of their own would."""
    chains: list[Any] = []

    def fold(state: Any, m: Any, sums: Any, new: Any, planes: Any) -> Any:
        if np.isinf(state.m.handle.data).all():
            chains[:] = [state, state]
        chains[0] = fold_states(chains[0], m, sums, new, planes)
        chains.reverse()
        return fold_states(chains[0], chains[1].m, chains[1].l, chains[1], planes)

    prompt = Prompt(SMALL, CPU)
    decodes = prompt.in_chunks(1, 66)
    assert differing(decodes, part(prompt.rows(0, 70), 66, 70)) == 0
    for module in (prefill_module, tile_module):
        monkeypatch.setattr(module, "fold_states", fold)
    assert differing(decodes, part(prompt.rows(0, 70), 66, 70)) > 0


# -- Which layers have it.

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)
ASKED = LayerRequirements(True, query=DType.BFLOAT16, cache_dtype=CacheDType.AUTO)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("size", [64, 80, 128, 192, 256])
def test_prompts_have_the_key_tile_of_decodes(size: int, bits: int) -> None:
    shape = replace(SHAPE, head_size=size, head_size_v=size, stored_bits=bits)
    tile = invariant_split_tile(shape, hopper(132), 4)
    asks = ASKED if bits == 16 else replace(ASKED, cache_dtype=CacheDType.FP8)
    found = segmented_prefill_of(shape, hopper(132), tile, asks)
    assert not isinstance(found, str)
    assert found.kv_tile == tile.kv_tile


@pytest.mark.parametrize(
    ("size", "kind", "wanted"),
    [
        (64, DeviceKind.SM90, (64, 4, False)),
        (128, DeviceKind.SM90, (128, 8, True)),
        (256, DeviceKind.SM90, (64, 8, True)),
        (64, DeviceKind.SM80, (64, 4, True)),
        (128, DeviceKind.SM80, (32, 4, True)),
    ],
)
def test_prompts_over_8_bits_have_tiles_whose_loops_hardly_spill(
    size: int, kind: DeviceKind, wanted: tuple[int, int, bool]
) -> None:
    """docs/notebook/invariance.md has the bytes that other tiles spill."""
    shape = replace(SHAPE, head_size=size, head_size_v=size, stored_bits=8)
    gpu = replace(hopper(132), kind=kind)
    tile = segmented_tile(shape, gpu, split_tile(shape, gpu, 1))
    assert not isinstance(tile, str)
    assert (tile.query_tile, tile.num_warps, tile.stores_totals) == wanted


def test_decodes_over_an_fp8_cache_have_the_defaults_tile_and_plan() -> None:
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": DType.BFLOAT16}
    spec = FullAttentionSpec(**fields, cache_dtype=CacheDType.FP8)
    limits = {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    config = EngineConfig(**limits, num_heads=32, kernels=Kernels.own(PrefillKernel.TRITON))
    with mock.patch.object(triton_attn, "device_facts", return_value=hopper(132)):
        default, own = (
            triton_attn.TritonAttentionMetadataBuilder(
                spec, ["layers.0"], config.replace(batch_invariant=is_invariant), CPU
            ).planner
            for is_invariant in (False, True)
        )
    assert own.is_segmented
    assert own.tile == default.tile
    assert (own.groups, own.short_query) == (default.groups, default.short_query)
    assert own.prefill.kv_tile == own.tile.kv_tile


@pytest.mark.parametrize(
    ("shape", "kind", "asks", "said"),
    [
        (SHAPE, DeviceKind.ROCM, ASKED, "on rocm products"),
        (SHAPE, DeviceKind.SM100, ASKED, "on sm100 products"),
        (replace(SHAPE, itemsize=4), DeviceKind.SM90, ASKED, "4 bytes"),
        (replace(SHAPE, stored_bits=4), DeviceKind.SM90, ASKED, "4 bits"),
        (
            replace(SHAPE, head_size=512, head_size_v=512),
            DeviceKind.SM90,
            ASKED,
            "head size 512",
        ),
        (
            SHAPE,
            DeviceKind.SM90,
            replace(ASKED, query=DType.FLOAT16, cache_dtype=CacheDType.BFLOAT16),
            "the cache's elements are",
        ),
    ],
)
def test_layers_whose_prompts_are_taken_as_decodes_are(
    shape: DenseShape, kind: DeviceKind, asks: LayerRequirements, said: str
) -> None:
    gpu = replace(hopper(132), kind=kind)
    found = segmented_prefill_of(shape, gpu, split_tile(SHAPE, gpu, 1), asks)
    assert isinstance(found, str)
    assert said in found
