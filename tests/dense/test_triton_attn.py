"""TRITON_ATTN beyond conformance: cascade attention, what it refuses, warming up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn.impls.dense.triton_attn
from attn.backends.triton_attn import TritonAttentionBackend
from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from attn.testing.batches import POISON_BYTE, WILD_BLOCK, BatchSpec, Heads, poisoned
from attn.testing.cases import FEATURES, Case, Feature
from attn.testing.conformance import check_case, contents
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult, Results
from builders.batch import CommonAttentionMetadata
from builders.checks.kernel_limits import BLOCK_MULTIPLE, CACHE_DTYPES, HEAD_SIZES, MODEL_DTYPES
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.launch.call import KernelCall
from specs.attention import AttentionType
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from specs.layouts import KVPacking
from tests.tools.interpreter import variant_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = TritonAttentionBackend
BLOCK, SHARED = 16, 2
PREFIX = SHARED * BLOCK

CASCADE = replace(FEATURES["cascade"], num_shared_blocks=SHARED)
PADDED = BatchSpec(
    "shared_prefix_padded",
    (1, 20, 4, 1),
    (70, 60, 50, 33),
    num_padding_tokens=3,
    pads_num_actual_tokens=True,
)


TALL = BatchSpec("tall", (8, 8, 5, 1), (200, 70, 9, 140), num_speculative_tokens=7)


@pytest.mark.parametrize("feature", ["causal", "window"])
def test_a_verify_of_64_rows_of_narrow_heads_is_right(feature: str) -> None:
    """A verify of 64 rows has a tile of its own, with fewer keys than other tiles at this size."""
    heads, dtype = Heads(8, 1, 64), DType.FLOAT16
    case = Case(heads=heads, dtype=dtype, batch=TALL, feature=FEATURES[feature])
    tile = DenseTrial(BACKEND, case, DEVICE).builder().planner.tile
    assert (tile.rows, tile.kv_tile) == (64, 64)
    check_case(BACKEND, case, DEVICE)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The states that the impl has merged so far: one entry for each forward with a cascade."""
    seen: list[Tensor] = []
    merge = attn.impls.dense.triton_attn.merge_states

    def noted(outs: Tensor, lses: Tensor, output: Tensor, **options: Any) -> None:
        seen.append(outs)
        merge(outs, lses, output, **options)

    monkeypatch.setattr(attn.impls.dense.triton_attn, "merge_states", noted)
    return seen


def trial_of(feature: Feature = CASCADE, **changes: Any) -> DenseTrial:
    case = Case(feature=feature, batch=PADDED, heads=Heads(4, 2, 32), **changes)
    trial = DenseTrial(BACKEND, case, DEVICE)
    trial.write()
    return trial


# -- Cascade attention.


@pytest.mark.parametrize(
    ("feature", "dtype", "cache_dtype"),
    [
        (CASCADE, DType.FLOAT16, CacheDType.AUTO),
        (CASCADE, DType.FLOAT32, CacheDType.FP8),
        (CASCADE, DType.FLOAT16, CacheDType.INT8_PER_TOKEN_HEAD),
        (replace(CASCADE, name="cascade_sinks", sinks=True), DType.FLOAT16, CacheDType.AUTO),
        (replace(CASCADE, name="cascade_cap", logits_soft_cap=6.0), DType.FLOAT32, CacheDType.AUTO),
        (replace(CASCADE, name="cascade_fp8", fp8_output=True), DType.FLOAT16, CacheDType.AUTO),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_shared_prefix_is_attended_once(
    merges: list[Tensor], feature: Feature, dtype: DType, cache_dtype: CacheDType
) -> None:
    case = Case(feature, PADDED, Heads(4, 2, 32), dtype, cache_dtype)
    result = check_case(BACKEND, case, DEVICE)
    assert {"output", "lse", "padding", "block_table", "rebuild", "unchanged"} <= result.checked
    assert len(merges) == 2  # the step, and the same step over moved blocks
    assert merges[0].shape == (2, PADDED.num_tokens, 4, 32)
    assert merges[0].dtype == torch.float32


@pytest.mark.parametrize(
    "feature",
    [
        replace(CASCADE, name="cascade_window", sliding_window=40),
        replace(CASCADE, name="cascade_chunk", attention_chunk_size=24),
        replace(CASCADE, name="cascade_alibi", alibi=True),
        replace(CASCADE, name="cascade_mm", mm_prefix=True),
        replace(CASCADE, name="cascade_flags", causal=None),
        replace(CASCADE, name="cascade_free", causal=False),
        replace(CASCADE, name="cascade_rswa", rswa_window=12),
    ],
    ids=lambda feature: feature.name,
)
def test_other_masks_attend_the_whole_sequence(merges: list[Tensor], feature: Feature) -> None:
    check_case(BACKEND, Case(feature, PADDED, Heads(4, 2, 32)), DEVICE)
    assert merges == []


def test_sinks_that_are_loaded_after_the_impl_is_made_count() -> None:
    trial = trial_of(FEATURES["sinks"])
    assert trial.sinks is not None
    record = trial.build(trial.builder())
    expected = trial.attend(record, trial.inputs, trial.cache())
    loaded = torch.zeros(4, dtype=torch.float32, device=DEVICE)
    trial.impl = TritonAttentionImpl(4, 32, trial.impl.scale, 2, sinks=loaded)
    other = trial.attend(record, trial.inputs, trial.cache())
    loaded.copy_(trial.sinks)
    assert_same(trial.attend(record, trial.inputs, trial.cache()), expected)
    with pytest.raises(AssertionError):
        assert_same(other, expected)


def test_a_free_partition_gives_the_same_attention_but_for_rounding() -> None:
    trial = trial_of(FEATURES["causal"])
    builder = trial.builder()
    free = TritonAttentionMetadataBuilder.for_free_partition(
        builder.kv_cache_spec, builder.layer_names, builder.vllm_config, DEVICE
    )
    records = [each.build(0, trial.inputs.batch) for each in (builder, free)]
    assert [record.split.depends_on_batch for record in records] == [False, True]
    results = [trial.attend(record, trial.inputs, trial.cache()) for record in records]
    torch.testing.assert_close(results[1], results[0], atol=2e-3, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("changes", [{"sliding_window": 40}, {"alibi_slopes": [0.1] * 4}])
def test_a_layer_that_cannot_share_reads_the_ordinary_plan(
    merges: list[Tensor], changes: dict[str, Any]
) -> None:
    trial = trial_of()
    plain = trial.builder().build(0, trial.inputs.batch)
    shared = trial.build(trial.builder())
    assert shared.shared is not None
    trial.impl = TritonAttentionImpl(4, 32, 0.2, 2, **changes)
    expected = trial.attend(plain, trial.inputs, trial.cache())
    assert_same(trial.attend(shared, trial.inputs, trial.cache()), expected)
    assert merges == []


def assert_same(results: Results, expected: Results, rows: slice = slice(None)) -> None:
    one, other = (contents({name: x[rows] for name, x in r.items()}) for r in (results, expected))
    for name, x in one.items():
        assert torch.equal(x.view(torch.uint8), other[name].view(torch.uint8)), name


def test_blocks_of_other_requests_do_not_reach_a_row(merges: list[Tensor]) -> None:
    trial = trial_of()
    record = trial.build(trial.builder())
    expected = trial.attend(record, trial.inputs, trial.cache())
    prefix = trial.paging.table[0, :SHARED].tolist()
    for row, request in enumerate(trial.requests):
        buffer = trial.buffer.clone()
        pages = buffer.view(trial.paging.num_blocks, -1)
        mine = {*prefix, *trial.paging.table[row].tolist()}
        for block in range(trial.paging.num_blocks):
            if block not in mine:
                pages[block] = POISON_BYTE
        results = trial.attend(record, trial.inputs, trial.cache(buffer))
        assert_same(results, expected, request.tokens)
    assert len(merges) == 1 + len(trial.requests)


def test_empty_and_padding_requests_cost_nothing(merges: list[Tensor]) -> None:
    trial = trial_of()
    expected = trial.attend(trial.build(trial.builder()), trial.inputs, trial.cache())
    batch, more = trial.inputs.batch, 2

    def longer(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((more, *tensor.shape[1:]), value)])

    padded = batch.replace(
        query_start_loc=longer(batch.query_start_loc, PADDED.num_tokens),
        query_start_loc_cpu=longer(batch.query_start_loc_cpu, PADDED.num_tokens),
        seq_lens=longer(batch.seq_lens, 0),
        seq_lens_cpu_upper_bound=longer(batch.seq_lens_cpu_upper_bound, 0),
        block_table_tensor=longer(batch.block_table_tensor, WILD_BLOCK),
        num_reqs=batch.num_reqs + more,
    )
    builder = trial.builder(trial.config.replace(max_num_seqs=padded.num_reqs))
    record = builder.build(PREFIX, padded)
    assert bool((record.shared.own.seq_lens >= 0).all())
    assert_same(trial.attend(record, trial.inputs, trial.cache()), expected)
    nothing = padded.replace(
        query_start_loc=padded.query_start_loc * 0, query_start_loc_cpu=longer(torch.zeros(5), 0)
    )
    assert builder.build(PREFIX, nothing).shared is None
    assert len(merges) == 2


def test_scratch_is_made_by_the_first_step_with_a_prefix() -> None:
    trial = trial_of()
    builder, batch = trial.builder(), trial.inputs.batch
    assert builder.build(0, batch).shared is None
    assert builder._shared is None
    ordinary = builder.buffers.nbytes
    first = builder.build(PREFIX, batch).shared
    second = builder.build(PREFIX, batch).shared
    assert first.outputs.data_ptr() == second.outputs.data_ptr()
    assert first.own.split.states.data_ptr() == second.own.split.states.data_ptr()
    assert first.own.split.states.data_ptr() != builder.buffers["states"].data_ptr()
    assert builder.buffers.nbytes == ordinary
    assert builder.build_for_cudagraph_capture(batch).shared is None


def test_batch_invariance_shares_nothing() -> None:
    trial = trial_of()
    builder = trial.builder(trial.config.replace(batch_invariant=True))
    assert builder.build(PREFIX, trial.inputs.batch).shared is None


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        (-16, "common_prefix_len must not be negative, got -16"),
        (20, r"common_prefix_len .*block_size \(16\).*got 20"),
        (1600, r"common_prefix_len .*blocks of 16, got 1600"),
    ],
)
def test_a_prefix_is_whole_blocks_of_the_table(length: int, problem: str) -> None:
    trial = trial_of()
    with pytest.raises(ValueError, match=problem):
        trial.builder().build(length, trial.inputs.batch)


def test_the_debug_switch_finds_a_prefix_that_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    trial = trial_of()
    batch = trial.inputs.batch
    trial.builder().build(PREFIX, batch)
    with pytest.raises(
        ValueError, match=r"at most the computed tokens of every request, got 48 and 35"
    ):
        trial.builder().build(PREFIX + BLOCK, batch)
    table = batch.block_table_tensor.clone()
    table[2, 1] = table[2, 0]
    with pytest.raises(ValueError, match=r"request 2 does not share with request 0"):
        trial.builder().build(PREFIX, batch.replace(block_table_tensor=table))


# -- What is refused at construction.

SPEC: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": "float16"}
CONFIG = EngineConfig(max_model_len=96, max_num_seqs=2, max_num_batched_tokens=48, num_heads=4)


def builder_of(spec: AnyKVCacheSpec, config: EngineConfig = CONFIG) -> Any:
    return TritonAttentionMetadataBuilder(spec, ["layer.0"], config, DEVICE)


def test_limits_are_those_that_the_backend_declares() -> None:
    capabilities = BACKEND.capabilities
    assert tuple(dtype.torch for dtype in capabilities.dtypes) == MODEL_DTYPES
    assert capabilities.kv_cache_dtypes == CACHE_DTYPES
    sizes = capabilities.head_sizes
    declared = range(sizes.minimum or 0, (sizes.maximum or 0) + 1, sizes.multiple_of)
    assert declared == HEAD_SIZES
    assert [block.base for block in capabilities.block_sizes] == [BLOCK_MULTIPLE]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_size": 24}, "head_size must be a multiple of 8 from 32 to 512, got 24"),
        ({"head_size": 36}, "head_size must be .*, got 36"),
        ({"head_size": 520}, "head_size must be .*, got 520"),
        ({"head_size_v": 24}, "head_size_v must be .*, got 24"),
        ({"block_size": 24}, "block_size must be a multiple of 16, got 24"),
        ({"dtype": "float64"}, "model dtype must be one of .*, got torch.float64"),
        ({"cache_dtype": "fp8_inc"}, "kv_cache_dtype must be one of auto, .*, got 'fp8_inc'"),
    ],
)
def test_the_builder_refuses_what_no_kernel_takes(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        builder_of(FullAttentionSpec(**{**SPEC, **changes}))


def test_heads_of_the_engine_must_fit_the_spec() -> None:
    with pytest.raises(ValueError, match=r"num_heads \(3\).*num_kv_heads \(2\)"):
        builder_of(FullAttentionSpec(**SPEC), CONFIG.replace(num_heads=3))
    with pytest.raises(ValueError, match=r"num_heads is needed .*got None"):
        builder_of(FullAttentionSpec(**SPEC), CONFIG.replace(num_heads=None))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_size": 24}, "head_size must be .*, got 24"),
        ({"head_size_v": 1024}, "head_size_v must be .*, got 1024"),
        ({"kv_cache_dtype": "fp8_inc"}, "kv_cache_dtype must be one of auto, .*, got 'fp8_inc'"),
        ({"sliding_window": -1}, "sliding_window must be positive or None, got -1"),
        ({"sinks": torch.zeros(3)}, r"sinks .*\[4\], got \[3\]"),
    ],
)
def test_the_impl_refuses_what_no_kernel_takes(changes: dict[str, Any], problem: str) -> None:
    arguments = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, **changes}
    with pytest.raises(ValueError, match=problem):
        TritonAttentionImpl(**arguments)


def test_the_impl_refuses_a_model_dtype_that_no_kernel_takes() -> None:
    impl = TritonAttentionImpl(4, 32, 0.2, 2)
    impl.process_weights_after_loading(torch.bfloat16)
    with pytest.raises(ValueError, match=r"model dtype must be one of .*, got torch.float64"):
        impl.process_weights_after_loading(torch.float64)


@pytest.mark.parametrize("window", [7, 13])
def test_ranges_that_end_with_one_window_do_not_end_with_another(window: int) -> None:
    """Where ranges end at the layer's window, R-SWA must have the same window.

    A kernel takes one window only.
    """
    ranges = replace(FEATURES["mm_prefix_clamped"], sliding_window=window, rswa_window=7)
    trial = trial_of(ranges, dtype=DType.FLOAT32)
    record = trial.build(trial.builder())
    if window == 7:
        result = CaseResult()
        trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
        assert result.findings == {}
        return
    with pytest.raises(NotImplementedError, match=r"sliding_window \(13\) does not go .* \(7\)"):
        trial.attend(record, trial.inputs, trial.cache())


# -- Warming up.

FLAGS = ("non_causal", "per_request_causal", "mm_ranges", "shared_prefix")


def warmed_up(
    spec: AnyKVCacheSpec,
    config: EngineConfig = CONFIG,
    attn_type: AttentionType = AttentionType.DECODER,
    **options: Any,
) -> tuple[TritonAttentionImpl, Any, Tensor]:
    """An impl, its builder and the bytes of its cache, after a warm-up over a poisoned cache."""
    dense: Any = spec
    builder = builder_of(spec, config)
    layout = dense.layout(KVPacking.PACKED)
    buffer = torch.full((layout.nbytes(3),), POISON_BYTE, dtype=torch.uint8, device=DEVICE)
    impl = TritonAttentionImpl(
        4, 32, 0.2, 2, kv_cache_dtype=dense.cache_dtype.value, attn_type=attn_type
    )
    dtype = torch.float16 if dense.dtype is DType.FLOAT16 else torch.float32
    impl.warm_up(LayerScales.of(device=DEVICE), layout.view(buffer, 3), builder, dtype, **options)
    return impl, builder, buffer


def num_forms(impl: TritonAttentionImpl) -> int:
    launchers = impl._launchers.values()
    return sum(len(launcher._splits) + len(launcher._tiled) for launcher in launchers)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "int8_per_token_head"])
def test_a_warm_up_leaves_the_cache_alone(cache_dtype: str) -> None:
    spec = FullAttentionSpec(**SPEC, cache_dtype=cache_dtype)
    impl, builder, buffer = warmed_up(spec, with_lse=True, **dict.fromkeys(FLAGS, True))
    assert bool((buffer == POISON_BYTE).all())
    assert not bool(builder.buffers["counters"].any())
    # Decode and prefill have four variants each: causal, non-causal, causal per request, ranges.
    # Cascade attention adds three, for the prefix and for the requests' own keys.
    assert num_forms(impl) == 2 * 4 + 3


@pytest.mark.parametrize(
    ("flags", "forms"),
    [
        ((), 2),
        (("non_causal",), 4),
        (("per_request_causal", "mm_ranges"), 6),
        (("shared_prefix",), 5),
    ],
)
def test_a_warm_up_compiles_what_is_asked_for(flags: Sequence[str], forms: int) -> None:
    impl, builder, _ = warmed_up(FullAttentionSpec(**SPEC), **dict.fromkeys(flags, True))
    assert num_forms(impl) == forms
    assert (builder._shared is not None) == ("shared_prefix" in flags)


@pytest.mark.parametrize(
    ("spec", "attn_type", "config", "forms"),
    [
        (SlidingWindowSpec(**SPEC, sliding_window=9), AttentionType.DECODER, CONFIG, 2),
        (FullAttentionSpec(**SPEC), AttentionType.DECODER, CONFIG.replace(rswa_window=8), 4),
        (FullAttentionSpec(**SPEC), AttentionType.DECODER, CONFIG.replace(max_model_len=9), 1),
        (FullAttentionSpec(**SPEC), AttentionType.DECODER, CONFIG.replace(batch_invariant=True), 2),
        (CrossAttentionSpec(**SPEC), AttentionType.ENCODER_DECODER, CONFIG, 2),
        (EncoderOnlyAttentionSpec(**SPEC), AttentionType.ENCODER_ONLY, CONFIG, 1),
    ],
)
def test_every_kind_of_layer_warms_up(
    spec: AnyKVCacheSpec, attn_type: AttentionType, config: EngineConfig, forms: int
) -> None:
    impl, _, buffer = warmed_up(spec, config, attn_type)
    assert bool((buffer == POISON_BYTE).all())
    assert num_forms(impl) == forms


def test_a_warm_up_is_for_the_outputs_that_it_is_given() -> None:
    spec, scale = FullAttentionSpec(**SPEC), torch.ones((), device=DEVICE)
    for options in ({"with_lse": True}, {"output_scale": scale}, {"query_stride": 256}):
        impl, _, _ = warmed_up(spec, **options)
        assert num_forms(impl) == 2


def test_serving_after_a_warm_up_meets_no_new_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    impl, builder, _ = warmed_up(FullAttentionSpec(**SPEC), with_lse=True, shared_prefix=True)
    known = {variant_of(call) for call in launches}
    launches.clear()
    cache = builder.kv_cache_spec.layout(KVPacking.PACKED).allocate(8, DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).repeat(2, 1)
    for lens, kv_lens in (([1, 1], [20, 93]), ([17, 1], [60, 40]), ([30, 18], [90, 50])):
        batch = CommonAttentionMetadata.from_lengths(lens, kv_lens, table, 16)
        for prefix in (0, 16, 32):
            if min(kv - new for new, kv in zip(lens, kv_lens, strict=True)) < prefix:
                continue
            rows = torch.zeros(sum(lens), 4, 32, dtype=torch.float16, device=DEVICE)
            lse = poisoned(sum(lens), 4, dtype=torch.float32, device=DEVICE)
            record = builder.build(prefix, batch)
            impl.forward(
                *(LayerScales.of(device=DEVICE), rows, None, None, cache, record),
                torch.empty_like(rows),
                output_lse=lse,
            )
    assert {variant_of(call) for call in launches} <= known
    assert len(launches) > 9


LENGTHS = {"num_reqs", "num_rows", "groups", "window", "chunk", "lookback", "num_ranges"}
"""Arguments that kernels must not specialise; only compiled kernels say which they do not."""


def test_the_kernels_specialise_no_length() -> None:
    code = (
        "import json\n"
        "from attn.kernels.dense.decode import decode_kernel as a\n"
        "from attn.kernels.dense.prefill import prefill_kernel as b\n"
        "from attn.kernels.cache.merge import merge_kernel as c\n"
        "print(json.dumps([[p.name for p in k.params if not p.do_not_specialize]"
        " for k in (a, b, c)]))"
    )
    # Kernels know it only outside Triton's interpreter.
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    decode, prefill, merge = (set(names) for names in json.loads(done.stdout))
    assert (decode | prefill | merge) & LENGTHS == set()
    strides = {name for name in merge if name.islower() and not name.endswith("_ptr")}
    assert strides == set()
