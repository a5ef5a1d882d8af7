"""The Hopper split-KV kernel on a GPU: every case that it serves, graphs, repeated launches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from attn.backends.triton_attn import TritonAttentionBackend
from attn.device import detect_device
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case, cases_for
from attn.testing.conformance import check_case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import Trial
from builders.splitkv.record import SHORT_QUERY
from specs.devices import DeviceKind, kind_of
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel
from tests.conformance import test_random_attention
from tests.dense.hopper_cases import is_decoded
from tests.gpu.test_gpu_triton_attn import (
    DEVICE,
    SHAPES,
    Serving,
    Setup,
    check_alone,
    check_drafting,
    check_interrupted,
    check_launches,
    check_repeats,
    check_replays,
)

SHARDS = 10
LAYERS = 30
HERE = detect_device().compute_capability
CASES = [
    case
    for case in cases_for(TritonAttentionBackend)
    if isinstance(case, Case) and is_decoded(case) and min(case.batch.query_lens) <= SHORT_QUERY
]
PLAIN = Setup(decode_kernel=DecodeKernel.HOPPER)
KINDS = {
    "decode": (PLAIN, 1),
    "verify": (PLAIN, 4),
    "fp16": (replace(PLAIN, dtype=DType.FLOAT16), 2),
    "one_kv_head": (replace(PLAIN, heads=4, kv_heads=1), 3),
    "no_group": (replace(PLAIN, heads=8, kv_heads=8), 1),
    "d64": (replace(PLAIN, heads=16, head_size=64, speculative=1), 2),
    "d256": (replace(PLAIN, head_size=256, num_blocks=2048), 1),
    "d80": (replace(PLAIN, head_size=80), 1),
    "d192": (replace(PLAIN, head_size=192, num_blocks=2048), 1),
    "wide_d96": (replace(PLAIN, head_size=96, speculative=7), 8),
    "fp8_d160": (replace(PLAIN, cache_dtype=CacheDType.FP8, head_size=160), 1),
    "wide": (replace(PLAIN, speculative=7), 8),
    "wide_group": (replace(PLAIN, heads=32, kv_heads=1, speculative=1), 2),
    "wide_d64": (replace(PLAIN, heads=16, head_size=64, speculative=7), 8),
    "fp8": (replace(PLAIN, cache_dtype=CacheDType.FP8), 4),
    "fp8_fp16_d256": (
        replace(PLAIN, cache_dtype=CacheDType.FP8, dtype=DType.FLOAT16, head_size=256),
        1,
    ),
    "window": (replace(PLAIN, heads=16, head_size=64, speculative=None, window=128), 1),
    "long_window": (replace(PLAIN, window=5000), 4),
    "wide_window": (replace(PLAIN, heads=16, head_size=64, speculative=7, window=128), 8),
    "chunk": (replace(PLAIN, speculative=None, chunk=8192), 1),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        HERE is None or kind_of(HERE) is not DeviceKind.SM90, reason="needs a Hopper GPU"
    ),
]


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.HOPPER)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_that_it_serves_is_right(case: Case) -> None:
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("feature", ["alibi", "causal", "chunked"])
def test_an_engine_left_to_itself_is_right_in_what_is_planned_for_it(
    size: int, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the launch sees ALiBi: the portable kernel then runs by the Hopper kernel's plan."""
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.AUTO)
    batch = BatchSpec("long", (1, 1, 1), (9000, 700, 33))
    heads, dtype = Heads(8, 1, size), DType.BFLOAT16
    case = Case(heads=heads, dtype=dtype, batch=batch, feature=FEATURES[feature])
    trial = DenseTrial(TritonAttentionBackend, case, DEVICE)
    assert trial.builder().planner.hopper_decode is not None
    check_case(TritonAttentionBackend, case, DEVICE)


def is_drawn(case: Case) -> bool:
    return case.dtype is not DType.FLOAT32 and is_decoded(case)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_300_random_steps_of_random_layers_are_right(shard: int) -> None:
    cases = test_random_attention.layers(LAYERS, is_drawn)[shard::SHARDS]
    tiny = test_random_attention.tiny
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(test_random_attention.findings, map(tiny, cases))
        assert [one for one in found if one] == []
    test_random_attention.check_random(cases, test_random_attention.LARGE, 300 // SHARDS, shard)


@pytest.mark.parametrize("kind", KINDS)
def test_120_launches_among_other_neighbours_give_the_same_bits(kind: str) -> None:
    setup, query_len = KINDS[kind]
    check_launches(setup, query_len, launches=120, rows=48)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_120_launches_of_a_batch_give_the_same_bits(kind: str, shape: str) -> None:
    setup, query_len = KINDS[kind]
    check_repeats(Serving(setup), query_len, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_one_result_alone_amid_255_others_and_in_a_verify(kind: str) -> None:
    setup, query_len = KINDS[kind]
    check_alone(setup, rows=256, verify=max(query_len, 2))


@pytest.mark.parametrize("kind", ["decode", "d64", "d256", "wide", "fp8"])
def test_a_graph_of_decodes_replays_every_kind_of_step(kind: str) -> None:
    check_replays(KINDS[kind][0], rows=64, tokens=512, replays=1000)


@pytest.mark.parametrize("kind", KINDS)
def test_launches_that_are_interrupted_give_the_same_bits(kind: str) -> None:
    check_interrupted(*KINDS[kind])


def test_draft_steps_of_one_graph_are_those_of_eager_steps() -> None:
    check_drafting(PLAIN, rows=16, steps=4, replays=20)
