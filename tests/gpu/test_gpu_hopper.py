"""The Hopper prefill kernel on a GPU: every case that it serves, graphs, repeated launches."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.device import detect_device
from attn.testing.batches import BatchSpec
from attn.testing.cases import FEATURES, Case, LatentCase, cases_for
from attn.testing.conformance import check_case
from attn.testing.trial import Trial
from builders.batch import CommonAttentionMetadata
from builders.dense import dequantised
from builders.dense.dequantised import DequantisedPages
from builders.splitkv.record import SHORT_QUERY, DequantisedKeys
from specs.devices import DeviceKind, kind_of
from specs.dtypes import CacheDType, DType
from specs.engine import PrefillKernel
from tests.conformance import test_random_attention
from tests.dense.hopper_cases import is_served
from tests.gpu.test_gpu_triton_attn import (
    Results,
    Serving,
    Setup,
    check_far_blocks,
    check_interrupted,
    check_replays,
    disturb,
    many_blocks,
    part,
    same,
)

DEVICE = torch.device("cuda")
SHARDS = 10
LAYERS = 30
HERE = detect_device().compute_capability
CASES = [
    case
    for case in cases_for(TritonAttentionBackend)
    if isinstance(case, Case) and is_served(case) and max(case.batch.query_lens) > SHORT_QUERY
]
SETUPS = {
    f"{heads}of{kv_heads}-d{size}": Setup(
        heads=heads, kv_heads=kv_heads, head_size=size, prefill_kernel=PrefillKernel.HOPPER
    )
    for heads, kv_heads, size in (
        *((8, 2, 128), (16, 2, 64), (4, 2, 256), (7, 1, 128), (2, 2, 80), (6, 2, 96), (4, 2, 160)),
        (2, 1, 192),
    )
} | {
    f"fp8-d{size}": Setup(
        head_size=size, cache_dtype=CacheDType.FP8_E4M3, prefill_kernel=PrefillKernel.HOPPER
    )
    for size in (64, 128, 256)
}
BEHIND_WINDOW = BatchSpec("behind_window", (40, 1, 20), (300, 50, 90))
"""A batch of long requests with first blocks that a window has left."""
DEQUANTISED_CASES = [
    replace(case, feature=feature, batch=batch)
    for case in cases_for(TritonAttentionBackend)
    if isinstance(case, Case)
    and case.cache_dtype in (CacheDType.FP8, CacheDType.FP8_E4M3, CacheDType.FP8_E5M2)
    and max(case.batch.query_lens) > SHORT_QUERY
    and case.feature.name in ("causal", "soft_cap", "sinks", "fp8_output")
    and is_served(case)
    for feature, batch in (
        (case.feature, case.batch),
        (FEATURES["window"], case.batch),
        (FEATURES["window"], BEHIND_WINDOW),
    )[: 3 if case.feature.name == "causal" else 1]
]
LATENT_CASES = [
    replace(case, dtype=DType.BFLOAT16) if case.dtype is DType.FLOAT32 else case
    for case in cases_for(TritonMLABackend)
    if isinstance(case, LatentCase)
    and (case.cache_dtype is CacheDType.AUTO or case.cache_dtype.is_quantized)
    and case.sliding_window is None
    and max(case.batch.query_lens) > 16
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        HERE is None or kind_of(HERE) is not DeviceKind.SM90, reason="needs a Hopper GPU"
    ),
]


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "prefill_kernel", PrefillKernel.HOPPER)


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("case", DEQUANTISED_CASES, ids=str)
def test_quantised_cases_are_right_over_dequantised_keys(
    case: Case, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(case, heads=replace(case.heads, head_size=size, head_size_v=None))
    assert is_served(case)
    monkeypatch.setattr(dequantised, "LEAST_ROWS", 0)
    made: list[bool] = []
    plan = DequantisedPages.plan

    def noted(self: DequantisedPages, batch: CommonAttentionMetadata) -> DequantisedKeys | None:
        pages = plan(self, batch)
        made.append(pages is not None)
        return pages

    monkeypatch.setattr(DequantisedPages, "plan", noted)
    check_case(TritonAttentionBackend, case, DEVICE)
    assert any(made)


@pytest.mark.parametrize("kernel", [PrefillKernel.HOPPER, PrefillKernel.TRITON], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_that_it_serves_is_right_with_either_kernel(
    case: Case, kernel: PrefillKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a Hopper GPU only this test runs the portable kernel on these cases: "auto" takes the
    # Hopper kernel.
    monkeypatch.setattr(Trial, "prefill_kernel", kernel)
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_every_case_of_expanded_latent_attention_is_right(case: LatentCase) -> None:
    check_case(TritonMLABackend, case, DEVICE)


def is_drawn(case: Case) -> bool:
    return case.dtype is not DType.FLOAT32 and is_served(case)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_300_random_steps_of_random_layers_are_right(shard: int) -> None:
    cases = test_random_attention.layers(LAYERS, is_drawn)[shard::SHARDS]
    tiny = test_random_attention.tiny
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(test_random_attention.findings, map(tiny, cases))
        assert [one for one in found if one] == []
    test_random_attention.check_random(cases, test_random_attention.LARGE, 300 // SHARDS, shard)


@pytest.mark.parametrize("kind", SETUPS)
def test_a_request_has_the_same_bits_in_120_launches_among_others(kind: str) -> None:
    """The rows of a request depend on that request alone, and on no timing: nothing is split."""
    setup = SETUPS[kind]
    serving, dice = Serving(setup), random.Random(5)
    builder = serving.builder()
    counts = [17, 300, 64, 129, 33, 200, 18]
    lens = [count + dice.choice((0, 5, 700, 3000)) for count in counts]
    table = serving.tables(lens)
    queries = [serving.queries(count) for count in counts]
    known: dict[int, Results] = {}
    for turn in range(120):
        disturb(turn)
        chosen = dice.sample(range(len(counts)), dice.randint(1, len(counts)))
        batch = serving.step([counts[r] for r in chosen], [lens[r] for r in chosen], table[chosen])
        results = serving.forward(
            builder.build(0, batch), torch.cat([queries[row] for row in chosen])
        )
        start = 0
        for row in chosen:
            own = part(results, start, start + counts[row])
            start += counts[row]
            assert same(own, known.setdefault(row, own)), (turn, row)
            assert not bool(own[0].isnan().any())
    assert len(known) == len(counts)
    # The launches counted tiles, and have set the count back to 0 for the next launch.
    assert builder.planner.buffers["taken"].item() == 0


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("cache_dtype", [CacheDType.FP8_E4M3, CacheDType.FP8_E5M2], ids=str)
@pytest.mark.parametrize("size", [80, 128, 256])
def test_dequantised_keys_give_the_bits_of_tiles_that_convert_their_own(
    size: int, cache_dtype: CacheDType, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether keys are dequantised first depends on the whole step, so bits must be the same."""
    setup = Setup(
        head_size=size,
        cache_dtype=cache_dtype,
        window=window,
        prefill_kernel=PrefillKernel.HOPPER,
    )
    serving = Serving(setup)
    builder, counts, lens = serving.builder(), [17, 300, 129, 64], [20, 3300, 129, 833]
    batch, queries = serving.step(counts, lens, serving.tables(lens)), serving.queries(sum(counts))
    results = []
    for least in (0, 1 << 30):
        monkeypatch.setattr(dequantised, "LEAST_ROWS", least)
        record = builder.build(0, batch)
        assert (record.prefill.hopper.dequantised is not None) == (least == 0)
        results.append(serving.forward(record, queries))
    assert same(*results)


@pytest.mark.parametrize("kind", [kind for kind in SETUPS if not kind.startswith("fp8")])
def test_outputs_may_lie_at_odd_places(kind: str) -> None:
    """Rows that begin at odd elements are stored element by element, and get the same bits."""
    serving = Serving(SETUPS[kind])
    counts, lens = [17, 300, 64], [20, 3300, 64]
    record = serving.builder().build(0, serving.step(counts, lens, serving.tables(lens)))
    queries = serving.queries(sum(counts))
    wanted = serving.forward(record, queries)
    size = serving.setup.head_size
    for gap in (1, 3):
        room = torch.full((*queries.shape[:2], size + gap), -7.0, dtype=queries.dtype).to(DEVICE)
        found = serving.forward(record, queries, room[..., gap:])
        assert same(found, wanted)
        assert bool((room[..., :gap] == -7.0).all())


def test_an_engine_left_to_itself_takes_it_with_the_same_bits() -> None:
    results = []
    for wanted in (PrefillKernel.AUTO, PrefillKernel.HOPPER):
        serving = Serving(Setup(prefill_kernel=wanted))
        builder, table = serving.builder(), serving.tables([2000, 40])
        record = builder.build(0, serving.step([300, 40], [2000, 40], table))
        assert record.prefill.hopper is not None
        results.append(serving.forward(record, serving.queries(340)))
        (launcher,) = serving.impl._launchers.values()
        # No request is short and the portable kernels were not launched, so neither has a variant.
        assert len(launcher._splits) == 0
        assert len(launcher._tiled) == 0
    assert same(*results)


def test_it_reads_a_cache_beyond_32_bit_offsets() -> None:
    check_far_blocks(many_blocks(), (40,), PrefillKernel.HOPPER)


@pytest.mark.parametrize("kind", SETUPS)
def test_a_graph_replays_every_kind_of_step(kind: str) -> None:
    check_replays(SETUPS[kind], rows=64, tokens=512, replays=1000 // len(SETUPS))


@pytest.mark.parametrize("kind", SETUPS)
def test_launches_that_are_interrupted_give_the_same_bits(kind: str) -> None:
    check_interrupted(SETUPS[kind], 300, rows=3)
