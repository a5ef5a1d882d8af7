"""TRITON_MLA beyond conformance: chunks of context, the shapes of a step, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.backends.triton_mla import TritonMLABackend
from attn.testing.batches import BATCHES, BatchSpec, Layer
from attn.testing.cases import LatentCase
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Inputs
from builders.batch import CommonAttentionMetadata
from builders.latent.prefill import EXPANDED_WIDTH, PAGE
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.launch.call import KernelCall, collected_calls
from builders.splitkv.device.plan import plan_kernel
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec
from tests.tools.interpreter import variant_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKEND = TritonMLABackend
CHUNKED = BatchSpec("chunked_mix", (1, 20, 3, 33), (40, 90, 3, 49))
"""A decode, then prefills with much context, with none, and with some."""


def trial_of(**given: Any) -> LatentTrial:
    known = {"batch": CHUNKED, "dtype": DType.FLOAT16, "rank": 64, "rope_size": 32}
    case = LatentCase(**{**known, **given})
    return LatentTrial(BACKEND, case, DEVICE)


def builder_of(spec: Any = None, **settings: Any) -> TritonMLAMetadataBuilder:
    limits = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(**{**limits, "num_heads": 4, **settings})
    spec = spec or latent_spec()
    return TritonMLAMetadataBuilder(spec, ["layer.0"], config, DEVICE)


def latent_spec(**given: Any) -> MLAAttentionSpec:
    known = {"block_size": 16, "dtype": DType.FLOAT16, "kv_lora_rank": 64, "qk_rope_head_dim": 32}
    return MLAAttentionSpec(**{**known, **given})


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
@pytest.mark.parametrize(("tokens", "chunks"), [(1, 5), (100, 3), (10**6, 1)])
def test_context_is_attended_in_chunks_of_the_workspace(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunks: int, cache_dtype: CacheDType
) -> None:
    trial = trial_of(cache_dtype=cache_dtype)
    trial.write()
    builder = trial.builder()
    monkeypatch.setattr(builder.expanded, "workspace_tokens", tokens)
    record = trial.build(builder)
    context = record.prefill.context
    assert len(context.lens) == chunks
    assert context.lens.sum(0).tolist() == [70, 0, 16]
    assert context.span % PAGE == 0
    result = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    assert result.findings == {}


@pytest.mark.parametrize("batch", ["ragged_decode", "keyless_rows", "padding_rows", "all_padding"])
def test_every_row_of_a_decode_is_written(batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes the rows of requests; all rows are cleared only where others exist."""
    made = torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        found = made(like, *given, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    trial = trial_of(batch=BATCHES[batch])
    trial.write()
    assert judged(trial, trial.build(trial.builder())).findings == {}


def test_the_workspace_is_bounded_in_bytes() -> None:
    token, limits = 4 * 2 * EXPANDED_WIDTH * 2, {"max_num_seqs": 8, "max_model_len": 256}
    with pytest.raises(ValueError, match=rf"{token * 127}\b.*one chunk.*{token * 128} bytes"):
        builder_of(mla_workspace_bytes=token * 127, **limits)
    builder = builder_of(mla_workspace_bytes=token * 200, **limits)
    table = torch.zeros((3, 16), dtype=torch.int32, device=DEVICE)
    batch = CommonAttentionMetadata.from_lengths([9] * 3, [200, 100, 9], table, 16)
    context = builder.build(0, batch).prefill.context
    assert (context.span, len(context.lens)) == (64, 3)
    assert 3 * context.span <= 200
    # By default a chunk always holds one page per request.
    assert builder_of().expanded.workspace_tokens >= 8 * PAGE


@pytest.mark.parametrize(("rope_size", "apart"), [(64, 64), (32, 0)])
def test_heads_of_192_and_128_are_not_padded(rope_size: int, apart: int) -> None:
    """Keys of 192 columns are multiplied as 128 and 64; other sizes are rounded up."""
    trial = trial_of(rope_size=rope_size)
    trial.write()
    record = trial.build(trial.builder())
    assert judged(trial, record).findings == {}
    with collected_calls() as calls:
        trial.attend(record, trial.inputs, trial.cache())
    mine = [call.arguments for call in calls if call.kernel.__name__ == "prefill_kernel"]
    assert {given["REST"] for given in mine} == {apart}
    assert {given["K_WIDTH"] + given["REST"] for given in mine} == {192 if apart else 256}
    assert {given["STAGES"] for given in mine} == {3 if apart else 2}


def judged(trial: LatentTrial, record: Any) -> CaseResult:
    """Errors found in a step's results."""
    result = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    return result


@pytest.mark.parametrize(
    ("invariant", "row", "same"),
    # Request 1 has much context. Request 2 has none, and request 3's fits every chunk.
    [(True, 1, True), (True, 2, True), (True, 3, True), (False, 1, False), (False, 3, True)],
)
def test_with_batch_invariance_a_prompt_has_the_same_bits_alone(
    monkeypatch: pytest.MonkeyPatch, invariant: bool, row: int, same: bool
) -> None:
    trial = trial_of()
    trial.write()
    config = trial.config.replace(batch_invariant=invariant)

    def attended(inputs: Inputs) -> torch.Tensor:
        builder = trial.builder(config)
        # There is room for the whole context of one request, but not of three.
        monkeypatch.setattr(builder.expanded, "workspace_tokens", 5 * PAGE)
        record = trial.build(builder, inputs.batch)
        return trial.attend(record, inputs, trial.cache(), for_bits=True)["output"]

    tokens = trial.requests[row].tokens
    whole, alone = attended(trial.inputs), attended(trial.alone(row, tokens))
    assert torch.equal(whole[tokens], alone) == same


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 2), (10**6, 1)])
def test_behind_a_window_only_what_is_seen_is_expanded(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunks: int
) -> None:
    trial = trial_of(sliding_window=21)
    trial.write()
    builder = trial.builder()
    monkeypatch.setattr(builder.expanded, "workspace_tokens", tokens)
    record = trial.build(builder)
    context = record.prefill.context
    assert len(context.lens) == chunks
    assert context.lens.sum(0).tolist() == [20, 0, 16]
    assert context.starts[0].tolist() == [50, 0, 0]
    assert context.left[0].tolist() == [20, 0, 16]
    assert judged(trial, record).findings == {}


def test_a_window_is_not_for_the_kernel_for_hopper() -> None:
    spec = SlidingWindowMLASpec(block_size=16, dtype=DType.FLOAT16, sliding_window=100)
    problem = "kernels.latent.decode 'hopper' does not serve this latent layer: a sliding window"
    with pytest.raises(ValueError, match=problem):
        builder_of(spec, kernels=Kernels.own(decode=DecodeKernel.HOPPER))
    assert (
        builder_of(spec, kernels=Kernels.own(decode=DecodeKernel.AUTO)).planner.hopper_decode
        is None
    )


def test_a_window_of_one_needs_no_context() -> None:
    trial = trial_of(sliding_window=1)
    trial.write()
    record = trial.build(trial.builder())
    assert record.prefill.context is None
    assert judged(trial, record).findings == {}


@pytest.mark.parametrize("tokens", [1, 10**6])
def test_a_plan_for_every_key_serves_a_layer_with_a_window(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    trial = trial_of(sliding_window=21)
    trial.write()
    trial.spec = latent_spec()
    builder = trial.builder()
    monkeypatch.setattr(builder.expanded, "workspace_tokens", tokens)
    record = trial.build(builder)
    assert record.group.window is None
    assert judged(trial, record).findings == {}


@pytest.mark.parametrize("window", [None, 22])
def test_a_plan_for_a_window_is_not_for_a_layer_that_sees_more(window: int | None) -> None:
    trial = trial_of(sliding_window=21)
    record = trial.build(trial.builder())
    trial.impl.sliding_window = window
    cache = trial.cache()
    problem = f"planned for a window of 21, the layer's is {window}"
    with pytest.raises(ValueError, match=problem):
        trial.impl.forward_mha(*[None] * 3, cache, record, None, None)
    query = torch.zeros(1, 3, 96, device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match=problem):
        trial.impl.forward_mqa(query, cache, record, trial.layer)


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_serving_after_a_warm_up_meets_no_new_variant(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: CacheDType
) -> None:
    launches: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    trial = trial_of(cache_dtype=cache_dtype)
    cache = trial.cache()
    cache.view(torch.uint8).fill_(0x3C)
    kept = cache.view(torch.uint8).clone()
    builder = trial.builder()
    tokens = builder.expanded.workspace_tokens
    trial.impl.warm_up(trial.layer, cache, builder, torch.float16)
    assert torch.equal(cache.view(torch.uint8), kept)
    assert builder.expanded.workspace_tokens == tokens
    known = {variant_of(call) for call in launches}
    launches.clear()
    for limit in (1, 10**6):
        monkeypatch.setattr(builder.expanded, "workspace_tokens", limit)
        trial.attend(trial.build(builder), trial.inputs, cache)
    assert launches
    assert {variant_of(call) for call in launches} <= known


def test_a_step_without_context_needs_no_workspace() -> None:
    trial = trial_of(batch=BATCHES["full_prefill"])
    record = trial.build(trial.builder())
    assert record.decode is None
    assert record.prefill.context is None
    assert record.prefill.num_tokens == record.num_prefill_tokens == 56


def test_without_host_lengths_the_longest_sequence_bounds_the_context() -> None:
    trial = trial_of()
    batch = trial.inputs.batch
    bounded = trial.build(trial.builder(), batch.replace(seq_lens_cpu_upper_bound=None))
    assert bounded.prefill.context.lens.sum(0).tolist() == [70, 0, 16]


def test_verify_rows_are_decodes() -> None:
    trial = trial_of(batch=BATCHES["ragged_verify"])
    record = trial.build(trial.builder())
    assert (record.num_decodes, record.num_prefills) == (5, 0)
    assert record.prefill is None
    assert int(record.decode.split.total[0]) > 0


@pytest.mark.parametrize("heads", [5, 7, 9])
def test_any_number_of_heads_is_served(heads: int) -> None:
    batch = BatchSpec("short_mix", (1, 1, 9), (20, 3, 30))
    check_case(BACKEND, LatentCase(batch, heads, DType.FLOAT16, rank=64, rope_size=32), DEVICE)


@pytest.mark.parametrize(
    ("spec", "settings", "problem"),
    [
        (None, {"num_heads": None}, "num_heads"),
        (latent_spec(block_size=24), {}, "block_size must be a multiple of 16, got 24"),
        (latent_spec(kv_lora_rank=1024), {}, "from 32 to 512, got 1024 and 32"),
        (latent_spec(qk_rope_head_dim=20), {}, "multiples of 8 from 32 to 512, got 64 and 20"),
        (latent_spec(dtype=DType.FLOAT64), {}, "model dtype.*float64"),
        (latent_spec(cache_dtype=CacheDType.FP8_DS_MLA), {}, "kv_cache_dtype.*fp8_ds_mla"),
        (
            FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64),
            {},
            "MLAAttentionSpec or SlidingWindowMLASpec, got FullAttentionSpec",
        ),
    ],
)
def test_the_builder_refuses_what_no_kernel_takes(
    spec: Any, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        builder_of(spec, **settings)


def test_the_builder_refuses_batches_that_it_cannot_plan() -> None:
    trial = trial_of()
    batch, builder = trial.inputs.batch, trial.builder()
    with pytest.raises(NotImplementedError, match="causal"):
        builder.build(0, batch.replace(causal=False))
    small = trial.builder(trial.config.replace(max_num_seqs=2))
    with pytest.raises(ValueError, match=r"num_reqs \(4\) exceeds max_num_seqs \(2\)"):
        small.build(0, batch)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"kv_lora_rank": 520, "head_size": 552}, "kv_lora_rank .* from 32 to 512, got 520 and 32"),
        ({"qk_rope_head_dim": 24, "head_size": 88, "qk_head_dim": 56}, "got 64 and 24"),
        (
            {"qk_nope_head_dim": 288, "qk_head_dim": 320},
            "qk_head_dim and v_head_dim must be multiples of 8 from 32 to 256, got 320 and 32",
        ),
        ({"v_head_dim": 264}, "got 64 and 264"),
    ],
)
def test_the_impl_refuses_widths_that_no_kernel_takes(sizes: dict[str, int], problem: str) -> None:
    given = {
        "num_heads": 4,
        "head_size": 96,
        "scale": 0.1,
        "num_kv_heads": 1,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "qk_head_dim": 64,
        "v_head_dim": 32,
        "kv_b_proj": None,
    }
    impl_cls: Any = BACKEND.get_impl_cls()
    impl_cls(**given)
    with pytest.raises(ValueError, match=problem):
        impl_cls(**{**given, **sizes})


@pytest.fixture
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = KernelCall.launch_through_triton

    def launch(call: KernelCall) -> None:
        assert call.kernel is plan_kernel, f"{call.kernel} was launched"
        made(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", launch)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"kv_lora_rank": 128},
            r"planned for latent rows of 128 \+ 32, the layer has 64 \+ 32",
        ),
        ({"block_size": 32}, "kv_cache must have blocks of 32 tokens, .* got blocks of 16"),
    ],
)
def test_a_step_that_is_planned_for_other_rows_is_refused(
    no_launches: None, given: dict[str, Any], problem: str
) -> None:
    trial = trial_of()
    cache = trial.cache()
    trial.spec = latent_spec(**given)
    record = trial.build(trial.builder())
    with pytest.raises(ValueError, match=problem):
        trial.attend(record, trial.inputs, cache)


def test_tensors_of_another_width_are_refused_before_any_launch(no_launches: None) -> None:
    trial = trial_of()
    record = trial.build(trial.builder())
    cache, layer, impl = trial.cache(), trial.layer, trial.impl
    query = torch.zeros(1, 3, 96, device=DEVICE, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"kv_cache must be .* 96\] .* got \(.*, 16, 80\)"):
        impl.forward_mqa(query, cache[..., :80], record, layer)
    with pytest.raises(ValueError, match=r"q must have shape \[\*, 3, 96\], got \[1, 3, 88\]"):
        impl.forward_mqa(query[..., :88], cache, record, layer)
    rows = torch.zeros(56, 96, device=DEVICE, dtype=torch.float16)
    output = rows.new_zeros(56, 3 * 128)
    given = (rows.new_zeros(56, 3, 160), rows[:, :72], rows[:, 64:])
    problem = r"kv_c_normed must have shape \[\*, 64\], got \[56, 72\]"
    with pytest.raises(ValueError, match=problem):
        impl.forward_mha(*given, cache, record, layer._k_scale, output)
    slots = torch.arange(56, device=DEVICE)
    with pytest.raises(ValueError, match=problem):
        impl.do_kv_cache_update(*given[1:], cache, slots, "auto", layer._k_scale)


def test_an_fp8_cache_without_its_scale_is_refused(no_launches: None) -> None:
    trial = trial_of(cache_dtype=CacheDType.FP8)
    record = trial.build(trial.builder())
    cache, impl, inputs = trial.cache(), trial.impl, trial.inputs
    rows = trial._parts(inputs.key)
    slots, query = inputs.batch.slot_mapping, inputs.query
    wrong = {
        "None": None,
        r"\[3\] of torch.float32": torch.ones(3),
        r"\[\] of torch.float16": torch.ones(()).half(),
    }
    for got, scale in wrong.items():
        problem = f"k_scale must be a float32 scalar for kv_cache_dtype 'fp8', got {got}"
        layer: Any = Layer(torch.ones(()), scale, scale)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=problem):
            impl.do_kv_cache_update(*rows, cache, slots, "fp8", scale)
        with pytest.raises(ValueError, match=problem):
            impl.forward_mqa(query[:1, :, :96], cache, record, layer)
        with pytest.raises(ValueError, match=problem):
            impl.forward_mha(query, *rows, cache, record, scale, query.flatten(1))


def test_the_impl_refuses_a_model_dtype_that_no_kernel_takes() -> None:
    impl = trial_of().impl
    with pytest.raises(ValueError, match="model dtype"):
        impl.process_weights_after_loading(torch.float64)


def test_another_groups_table_reaches_every_part() -> None:
    trial = trial_of()
    builder = trial.builder()
    record = trial.build(builder)
    table = torch.zeros_like(trial.inputs.batch.block_table_tensor)
    slots = torch.full_like(record.slot_mapping, -1)
    other = builder.update_block_table(record, table, slots)
    assert not other.decode.block_table.any()
    assert not other.prefill.context.block_table.any()
    assert other.prefill.context.step.block_table is record.prefill.context.step.block_table
    assert (other.slot_mapping == -1).all()
    assert replace(record).decode.block_table.data_ptr() != other.decode.block_table.data_ptr()
