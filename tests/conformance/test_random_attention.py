"""Random layers over random batches, against the oracle; few constants vary, so that few kernels
compile.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st

from attn.backends.triton_attn import TritonAttentionBackend
from attn.testing.batches import BATCHES, BatchSpec, Heads
from attn.testing.budget import UselessBudgetError
from attn.testing.cases import FEATURES, HEADS, Case, runs_here
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult
from specs.attention import AttentionType
from specs.dtypes import DType
from specs.layouts import KVOrder, KVPacking

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEED = int(os.environ.get("ATTN_TEST_SEED", "0"))
"""Seed of the layers and of the batches; another seed is another test."""
MOST_LAYERS = 60
SHARDS = 12
BLOCK_SIZES = (16, 32, 48, 64, 528)
ODD_HEADS = (Heads(5, 1, 40), Heads(12, 3, 96), Heads(16, 1, 256), Heads(2, 2, 32))
FEATURE_NAMES = [name for name, feature in FEATURES.items() if not feature.num_shared_blocks]


def anything(_: Case) -> bool:
    return True


def layers(count: int, wanted: Callable[[Case], bool] = anything) -> list[Case]:
    """Random layers over caches, from the seed, without their batches: what kernels are compiled
    for.
    """
    dice, found = random.Random(SEED), []
    caches = TritonAttentionBackend.capabilities.kv_cache_dtypes
    while len(found) < count:
        case = Case(
            feature=FEATURES[dice.choice(FEATURE_NAMES)],
            heads=dice.choice((*HEADS, *ODD_HEADS)),
            dtype=dice.choice([DType.BFLOAT16, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32]),
            cache_dtype=dice.choice(caches),
            block_size=dice.choice(BLOCK_SIZES),
            packing=dice.choice(list(KVPacking)),
            order=dice.choice(list(KVOrder)),
        )
        served = case.is_served_by(TritonAttentionBackend)
        if wanted(case) and served and runs_here(TritonAttentionBackend, case):
            found.append(case)
    return found


@dataclass(frozen=True)
class Sizes:
    """How large random batches are."""

    rows: int
    query: int
    decode_kv: int
    prefill_kv: int


LARGE, SMALL = Sizes(7, 70, 20_000, 400), Sizes(3, 20, 150, 60)


@st.composite
def batch_specs(draw: st.DrawFn, kind: AttentionType, sizes: Sizes) -> BatchSpec:
    """Lengths of a step that such a layer can meet, and a name from which values are drawn."""
    name = f"random{draw(st.integers(0, 10**9))}"
    padding = {
        "num_padding_tokens": draw(st.integers(0, 3)),
        "pads_num_actual_tokens": draw(st.booleans()),
        "pads_slots": draw(st.booleans()),
    }
    if padding["pads_num_actual_tokens"]:
        padding["pads_slots"] = True
    queries, lens, encoders = [], [], []
    for _ in range(draw(st.integers(1, sizes.rows))):
        count = draw(st.one_of(st.sampled_from([0, 1, 1, 4]), st.integers(1, sizes.query)))
        most = sizes.decode_kv if count <= 4 else sizes.prefill_kv
        context = draw(st.one_of(st.integers(0, 40), st.integers(0, most)))
        queries.append(count)
        lens.append(count + context)
        encoders.append(draw(st.integers(0, sizes.prefill_kv)))
    if kind is AttentionType.ENCODER_DECODER:
        return BatchSpec(name, tuple(queries), tuple(lens), tuple(encoders), **padding)
    if not kind.is_cached:
        lens = queries
    return BatchSpec(name, tuple(queries), tuple(lens), **padding)


def findings(case: Case) -> dict[str, list[str]]:
    """The errors of one forward."""
    trial = DenseTrial(TritonAttentionBackend, case, DEVICE)
    trial.write()
    record = trial.build(trial.builder())
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    return result.findings


def check_random(cases: list[Case], sizes: Sizes, examples: int, shard: int = 0) -> None:
    print(f"ATTN_TEST_SEED={SEED}, shard {shard}")

    @seed(SEED + 1_000_003 * shard)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from(cases))
        case = replace(
            layer,
            batch=data.draw(batch_specs(layer.feature.attn_type, sizes)),
            padded_pages=data.draw(st.booleans()),
            fused_projection=data.draw(st.booleans()),
            per_head_scales=layer.cache_dtype.value in ("fp8", "fp8_e5m2")
            and data.draw(st.booleans()),
        )
        try:
            found = findings(case)
        except UselessBudgetError:
            # A 4-bit cache cannot hold these values, so nothing is learnt from them.
            reject()
        assert found == {}, str(case)

    run()


def tiny(case: Case) -> Case:
    """A small step that takes both kernels, so that they are compiled."""
    kind = case.feature.attn_type
    if kind is AttentionType.ENCODER_DECODER:
        return replace(case, batch=BATCHES["cross_prefill"])
    batch = BatchSpec("tiny", (1, 20), (18, 20) if kind.is_cached else (1, 20))
    return replace(case, batch=batch)


@pytest.mark.gpu
@pytest.mark.parametrize("shard", range(SHARDS))
def test_600_random_steps_of_random_layers_are_right(shard: int) -> None:
    """The steps are in parts that can run side by side: the oracle takes most of the time."""
    cases = layers(MOST_LAYERS)[shard::SHARDS]
    with ThreadPoolExecutor(2) as pool:
        assert [found for found in pool.map(findings, map(tiny, cases)) if found] == []
    check_random(cases, LARGE, 600 // SHARDS, shard)


def test_some_random_steps_of_random_layers_are_right() -> None:
    check_random(layers(8), SMALL, 12 if DEVICE.type == "cpu" else 100)
