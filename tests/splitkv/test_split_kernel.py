"""The split-KV kernel over work items that are cut: stored states are folded to the right result.

A work item is a ``row`` in names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.triton_attn import TritonAttentionBackend
from attn.reference import cache as reference
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case, Feature
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult, Results
from builders.device import device_facts
from builders.splitkv import segments
from builders.splitkv.record import (
    SHARE_FIELDS,
)
from builders.splitkv.segments import SEGMENT, SEGMENTS_PER_GROUP
from specs.devices import GpuFacts
from specs.dtypes import CacheDType, DType
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = 3
"""Groups of programs that share the work in these tests, whatever the device."""

DECODE = BatchSpec("long_decode", (1,) * 5, (5000, 2100, 40, 3333, 6000))
VERIFY = BatchSpec("long_verify", (4, 1, 3, 2), (5003, 2049, 4097, 3070), num_speculative_tokens=3)
SHORT_DECODE = BatchSpec("short_decode", (1,) * 3, (2100, 40, 3333))
EXTEND = BatchSpec("long_extend", (16, 3, 16), (2053, 3000, 4104), num_speculative_tokens=3)
"""Queries of several work items each; some do not see the request's last segment."""
GROUP_OF_FOUR = Heads(4, 1, 64)


@pytest.fixture(autouse=True)
def _a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for few programs, so that work items are cut.

    The reference writes the cache, since it is fast under the interpreter.
    """
    from builders.dense import triton_attn

    facts = device_facts

    def small(device: torch.device) -> GpuFacts:
        return replace(facts(device), num_multiprocessors=GROUPS)

    monkeypatch.setattr(triton_attn, "device_facts", small)
    monkeypatch.setattr("attn.impls.dense.cached.write_kv", reference.write_kv)


@pytest.fixture(autouse=True, params=[SEGMENTS_PER_GROUP, 2])
def segments_of_a_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short segment groups too, so that requests with few keys have several."""
    if request.param == SEGMENTS_PER_GROUP:
        return
    if DEVICE.type == "cuda":
        pytest.skip("compiled kernels do not change their constants")
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", request.param)


def case_of(batch: BatchSpec = DECODE, **changes: Any) -> Case:
    return Case(**{"batch": batch, "heads": GROUP_OF_FOUR, "dtype": DType.FLOAT16, **changes})


@dataclass
class Step:
    """A case, its record, and the results of one forward."""

    trial: DenseTrial
    builder: Any
    record: Any
    results: Results

    @property
    def runs(self) -> dict[int, list[tuple[int, int]]]:
        """For each work item, the runs of its segments ``[begin, end)`` that groups own."""
        rows = self.record.split.rows.tolist()
        loops = self.record.split.head_loops
        found: dict[int, list[tuple[int, int]]] = {}
        starts = [tuple(pair) for pair in self.record.split.starts.tolist()]
        for (row, begin), (last, end) in pairwise(starts):
            while row <= last:
                stop = end if row == last else rows[row // loops][9]
                if stop > begin:
                    found.setdefault(row, []).append((begin, stop))
                row, begin = row + 1, 0
        return found

    @property
    def cuts(self) -> int:
        """Places inside work items where one group ends and another begins."""
        return sum(len(runs) - 1 for runs in self.runs.values())


def trial_of(case: Case, spec: AnyKVCacheSpec | None = None) -> DenseTrial:
    """A trial whose cache is written; ``spec`` is the builder's, in place of the layer's own."""
    trial = DenseTrial(TritonAttentionBackend, case, DEVICE)
    trial.write()
    if spec is not None:
        trial.spec = spec
    return trial


def step_of(trial: DenseTrial) -> Step:
    builder = trial.builder()
    record = trial.build(builder)
    return Step(trial, builder, record, trial.attend(record, trial.inputs, trial.cache()))


def check(step: Step, least_cuts: int = 1) -> None:
    """Check that work items were cut, results are right, padding is untouched, counters are 0."""
    assert step.cuts >= least_cuts
    result = CaseResult()
    step.trial.judge(step.results, step.record, result)
    step.trial.check_padding(step.results, result)
    assert result.findings == {}
    assert {"output", "lse"} <= result.checked
    assert not bool(step.record.split.counters.any())


def bits(results: Results, tokens: slice = slice(None)) -> dict[str, Tensor]:
    return {
        name: rows[tokens].cpu().contiguous().view(torch.uint8) for name, rows in results.items()
    }


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- Right, whatever the batch.


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT32], ids=str)
@pytest.mark.parametrize("heads", [Heads(2, 1, 32), GROUP_OF_FOUR, Heads(4, 2, 64)], ids=str)
def test_cut_decode_rows_are_right(heads: Heads, dtype: DType) -> None:
    check(step_of(trial_of(case_of(heads=heads, dtype=dtype))), least_cuts=2)


@pytest.mark.parametrize("batch", [VERIFY, EXTEND], ids=lambda batch: batch.name)
@pytest.mark.parametrize("heads", [GROUP_OF_FOUR, Heads(8, 1, 32), Heads(3, 1, 64)], ids=str)
def test_cut_rows_of_several_tokens_are_right(batch: BatchSpec, heads: Heads) -> None:
    check(step_of(trial_of(case_of(batch, heads=heads))))


def test_rows_that_do_not_see_their_last_segment_are_right() -> None:
    """Work items keep all segments of a request when some requests are not causal."""
    case = case_of(EXTEND, heads=Heads(8, 1, 32), feature=FEATURES["causal_per_request"])
    step = step_of(trial_of(case))
    rows = step.record.split.rows[: int(step.record.split.total[0])].tolist()
    size = SEGMENT * step.record.split.tile.segment_scale
    last_segment = [size * (fields[8] + fields[9] - 1) for fields in rows]
    last_token = [fields[4] + fields[2] - 1 for fields in rows]
    assert any(seen < start for seen, start in zip(last_token, last_segment, strict=True))
    assert sum(fields[0] == 0 for fields in rows) > 1
    check(step)


@pytest.mark.parametrize("block_size", [48, 528])
def test_cut_rows_over_pages_of_any_size_are_right(block_size: int) -> None:
    check(step_of(trial_of(case_of(VERIFY, block_size=block_size))))


CACHES = [
    CacheDType.FP8_E4M3,
    CacheDType.FP8_E5M2,
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.INT4_PER_TOKEN_HEAD,
    CacheDType.FP8_PER_TOKEN_HEAD,
]


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize("batch", [DECODE, VERIFY], ids=lambda batch: batch.name)
def test_cut_rows_of_quantised_caches_are_right(batch: BatchSpec, cache_dtype: CacheDType) -> None:
    check(step_of(trial_of(case_of(batch, cache_dtype=cache_dtype))))


@pytest.mark.parametrize(
    "feature", ["soft_cap", "alibi", "alibi_sqrt", "sinks", "fp8_output", "non_causal"]
)
def test_features_of_scores_and_output_hold_for_cut_rows(feature: str) -> None:
    check(step_of(trial_of(case_of(VERIFY, feature=FEATURES[feature]))))


# -- Windows that the plan does not know.


@dataclass(frozen=True)
class FarPrefix(Feature):
    """R-SWA whose prefixes end before, at and after borders of segments."""

    def rswa_prefix_len(self, row: int) -> int:
        return (1300, 0, 2048, 5)[row % 4]


def dense_spec(cls: type[Any], **changes: Any) -> AnyKVCacheSpec:
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": DType.FLOAT16}
    spec: AnyKVCacheSpec = cls(**sizes, **changes)
    return spec


PLANS = {
    "full": dense_spec(FullAttentionSpec),
    "smaller": dense_spec(SlidingWindowSpec, sliding_window=700),
    "own": dense_spec(SlidingWindowSpec, sliding_window=1500),
    "larger": dense_spec(SlidingWindowSpec, sliding_window=2900),
    "chunk": dense_spec(ChunkedLocalAttentionSpec, attention_chunk_size=1024, chunk_lookback=1),
}
WINDOWED = {
    "window": Feature("window", sliding_window=1500),
    "window_of_one": Feature("window_of_one", sliding_window=1),
    "chunked": Feature("chunked", attention_chunk_size=1200, chunk_lookback=1),
    "window_as_chunk": Feature(
        "window_as_chunk", sliding_window=900, chunk_lookback=2, window_is_chunk=True
    ),
    "non_causal_window": Feature("non_causal_window", causal=False, sliding_window=1500),
    "ranges": Feature("ranges", mm_prefix=True, sliding_window=400),
    "rswa": FarPrefix("rswa", rswa_window=300),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("feature", WINDOWED)
def test_a_layer_may_see_more_or_less_than_the_plan_knows(feature: str, plan: str) -> None:
    if (feature, plan) == ("rswa", "chunk"):
        with pytest.raises(ValueError, match=r"rswa_window \(300\) does not go together"):
            trial_of(case_of(SHORT_DECODE, feature=WINDOWED[feature]), PLANS[plan]).builder()
        return
    # Where the plan leaves out keys, work items have one token, each with its own first key.
    case = case_of(VERIFY if plan == "full" else SHORT_DECODE, feature=WINDOWED[feature])
    check(step_of(trial_of(case, PLANS[plan])), least_cuts=plan == "full")


def test_several_query_tiles_under_a_window_are_right() -> None:
    heads = Heads(8, 1, 64)
    case = case_of(EXTEND, heads=heads, feature=WINDOWED["window"])
    for plan in ("full", "smaller"):
        check(step_of(trial_of(case, PLANS[plan])), least_cuts=plan == "full")


def test_long_queries_of_an_invariant_batch_under_a_window_are_right() -> None:
    batch = BatchSpec("long_window", (4200, 40), (4200, 900))
    # With flags per request, work items keep keys that causal queries do not see.
    feature = Feature("window", causal=None, sliding_window=60)
    # In fp32 the split-KV kernel takes every row.
    case = case_of(batch, heads=Heads(1, 1, 32), feature=feature, dtype=DType.FLOAT32)
    trial = trial_of(case)
    trial.config = trial.config.replace(batch_invariant=True)
    step = step_of(trial)
    segments = step.record.split.rows[: int(step.record.split.total[0]), 9]
    assert 3 < int(segments.max()) <= step.record.split.slots
    check(step)


# -- A request has the same bits whatever its batch.


@pytest.mark.parametrize("batch", [DECODE, VERIFY], ids=lambda batch: batch.name)
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8], ids=str)
def test_a_row_alone_gives_the_bits_it_gives_among_others(
    batch: BatchSpec, cache_dtype: CacheDType
) -> None:
    step = step_of(trial_of(case_of(batch, cache_dtype=cache_dtype)))
    trial = step.trial
    cuts = []
    for row in batch.live_rows:
        tokens = trial.requests[row].tokens
        inputs = trial.alone(row, tokens)
        record = trial.build(step.builder, inputs.batch)
        alone = Step(trial, step.builder, record, trial.attend(record, inputs, trial.cache()))
        assert same_bits(bits(alone.results), bits(step.results, tokens)), row
        cuts.append(alone.cuts)
    # A request alone is cut in more places than among others.
    assert max(cuts) >= 2


def test_where_rows_are_cut_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    trial, seen = trial_of(case_of(VERIFY)), []
    for multiprocessors in (1, 2, 5):
        monkeypatch.setitem(globals(), "GROUPS", multiprocessors)
        step = step_of(trial)
        seen.append((step.cuts, bits(step.results)))
    assert len({cuts for cuts, _ in seen}) > 1
    assert all(same_bits(found, seen[0][1]) for _, found in seen)


# -- Scratch.


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8], ids=str)
def test_what_the_scratch_held_before_does_not_matter(cache_dtype: CacheDType) -> None:
    for feature in (FEATURES["causal"], WINDOWED["window"]):
        trial = trial_of(case_of(VERIFY, cache_dtype=cache_dtype, feature=feature), PLANS["full"])
        trial.spec = trial.spec.replace(cache_dtype=cache_dtype)
        step = step_of(trial)
        plan = step.record.split
        plan.states.fill_(float("nan"))
        plan.sums.fill_(float("nan"))
        again = trial.attend(step.record, trial.inputs, trial.cache())
        assert same_bits(bits(again), bits(step.results))
        assert not bool(plan.counters.any())


def test_a_builders_record_serves_launch_after_launch() -> None:
    trial = trial_of(case_of(VERIFY))
    step = step_of(trial)
    for _ in range(2):
        again = trial.attend(step.record, trial.inputs, trial.cache())
        assert same_bits(bits(again), bits(step.results))


# -- Range of the products' type.


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_bf16_queries_beyond_fp16s_range_are_right(cache_dtype: CacheDType, size: float) -> None:
    """bf16 queries of any size give right results, though products with keys are in fp16."""
    trial = trial_of(case_of(VERIFY, cache_dtype=cache_dtype, dtype=DType.BFLOAT16))
    for request in trial.requests:
        request.query = (request.query.double() * size).to(torch.bfloat16)
    trial.inputs = trial._inputs()
    step = step_of(trial)
    output = step.results["output"][: trial.batch_spec.num_tokens]
    assert bool(output.isfinite().all())
    assert bool(step.results["lse"][: trial.batch_spec.num_tokens].isfinite().all())
    result = CaseResult()
    exact = [trial._stored(slots) for slots in trial.written_slots()]
    for request, (key, value) in zip(trial.requests, exact, strict=True):
        request.key, request.value = key.real, value.real
    trial.case = replace(trial.case, cache_dtype=CacheDType.AUTO)
    trial.judge({"output": step.results["output"]}, step.record, result)
    assert result.findings == {}


# -- Errors that were found by reading the code, each of them once there.


@dataclass(frozen=True)
class WideRange(Feature):
    """A range that starts long before every window."""

    def mm_ranges(self, kv_len: int) -> tuple[tuple[int, int], ...]:
        return ((2, kv_len - 1),)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [((4, 1), (100, 60)), ((20,), (120,))])
def test_a_clamped_range_reads_no_key_before_the_window(
    query_lens: tuple[int, ...], kv_lens: tuple[int, ...]
) -> None:
    feature = WideRange("clamped", mm_prefix=True, mm_clamp_window=True, sliding_window=6)
    batch = BatchSpec("clamped", query_lens, kv_lens)
    trial = DenseTrial(TritonAttentionBackend, case_of(batch, feature=feature), DEVICE)
    trial.write()
    record = trial.build(trial.builder())
    found = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, found)
    assert not found.findings


def test_a_free_partition_of_fewer_tiles_than_groups_finishes() -> None:
    trial = DenseTrial(
        TritonAttentionBackend, case_of(BatchSpec("few_tiles", (1,), (300,))), DEVICE
    )
    trial.write()
    made = trial.builder()
    free = type(made).for_free_partition(
        made.kv_cache_spec, made.layer_names, made.vllm_config, DEVICE
    )
    free.planner.groups = free.planner.slots = 3 * GROUPS
    for name in ("starts", "shares", "states", "sums", "counters"):
        del free.planner.buffers._buffers[name]
    for name in ("starts",):
        free.planner.buffers.declare(name, (3 * GROUPS + 1, 2), torch.int32)
    free.planner.buffers.declare("shares", (3 * GROUPS, SHARE_FIELDS), torch.int32)
    programs = 3 * GROUPS * free.planner.heads
    free.planner.buffers.declare("counters", (2 * programs,), torch.int32)
    size = 3 * GROUPS * 3 * GROUPS * free.planner.heads * 16
    free.planner.buffers.declare("states", (size * 64,), torch.float32)
    free.planner.buffers.declare("sums", (size * 2,), torch.float32)
    record = trial.build(free)
    assert int(record.split.total[1]) < record.split.groups
    found = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, found)
    assert not found.findings
    assert not record.split.counters.any()
