"""TRTLLM_MHA's records: their contents, which kernel takes which requests, and refusals."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.errors import UnsupportedError
from attn.impls.base import LayerScales
from attn.impls.vendor.trtllm_mha import TrtllmMhaImpl
from attn.registry import AttentionBackendEnum
from attn.selector import explain, select
from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from builders.drafts.advance import advance
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.trtllm_mha import TrtllmMhaMetadataBuilder
from builders.vendor.trtllm_parts.mha_choice import (
    Phase,
    VendorKernel,
    capability_of,
    missing_reason,
    most_tokens_with_sinks,
    phase_notes,
    rule_of,
    stride_reason,
)
from builders.vendor.trtllm_parts.mha_split import causal_mask, ragged_mask, split_step
from specs.attention import AttentionCGSupport, AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES, ComputeCapability, Device
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from specs.layouts import KVOrder, KVPacking
from tests.builders.test_common import IN_BOTH_VERSIONS, stand_in_for_vllm
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device
from tests.emulators.trtllm_emulator import NEW, OLD, emulated

P = 16
H200, B200, PRO = (KNOWN_DEVICES[name] for name in ("h200", "b200", "rtx-pro-6000"))
SPEC = FullAttentionSpec(block_size=P, dtype=DType.BFLOAT16, num_kv_heads=2, head_size=64)
FP8 = SPEC.replace(cache_dtype=CacheDType.FP8)
CONFIG = EngineConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, num_heads=8)
VERIFY = SpeculativeConfig(num_speculative_tokens=3)


def window_spec(window: int = 20, **changes: Any) -> SlidingWindowSpec:
    fields = SPEC.model_dump(exclude={"kind", "dcp_sharded"})
    return SlidingWindowSpec(**{**fields, **changes}, sliding_window=window)


def builder_of(spec: Any = SPEC, **settings: Any) -> TrtllmMhaMetadataBuilder:
    return TrtllmMhaMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def batch_of(query_lens: list[int], seq_lens: list[int], page: int = P) -> CommonAttentionMetadata:
    columns = max(-(-length // page) for length in [*seq_lens, 1])
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, page)


# -- The kernel of each phase on each device.


@pytest.mark.parametrize(
    ("capability", "prefill", "decode"),
    [
        ("8.0", None, None),
        ("8.9", None, None),
        ("9.0", VendorKernel.FMHA_V2, VendorKernel.XQA),
        ("10.0", VendorKernel.TRTLLM_GEN, VendorKernel.TRTLLM_GEN),
        ("10.3", VendorKernel.TRTLLM_GEN, VendorKernel.TRTLLM_GEN),
        ("11.0", None, None),
        ("12.0", VendorKernel.FMHA_V2, VendorKernel.XQA),
        ("12.1", VendorKernel.FMHA_V2, VendorKernel.XQA),
    ],
)
def test_each_phase_has_its_kernel_on_its_gpus(
    capability: str, prefill: VendorKernel | None, decode: VendorKernel | None
) -> None:
    found = ComputeCapability.model_validate(capability)
    for phase, kernel in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        rule = rule_of(phase, found)
        assert (None if rule is None else rule.kernel) is kernel
        if rule is None:
            reason = missing_reason(phase, found)
            assert capability in reason
            assert "trtllm-gen needs 10.0 to 10.3" in reason


@pytest.mark.parametrize("device", [H200, B200, PRO])
def test_the_selector_says_which_phase_runs_by_what(device: Device) -> None:
    request = AttentionSelectorConfig(head_size=128, dtype=DType.BFLOAT16)
    report = explain(request, device, "TRTLLM_MHA")
    (own,) = (one for one in report.candidates if one.name == "TRTLLM_MHA")
    if device is B200:
        assert "decode by trtllm-gen" in own.reasons
        assert "prefill by trtllm-gen" in own.reasons
        return
    assert "decode by xqa" in own.reasons
    assert "prefill by fmha_v2" in own.reasons
    refused = "prefill by trtllm-gen refused: it needs compute capability 10.0 to 10.3"
    assert any(reason.startswith(refused) for reason in own.reasons)
    assert not any(reason.startswith("decode by xqa refused") for reason in own.reasons)


def test_it_is_chosen_by_name_alone() -> None:
    request = AttentionSelectorConfig(head_size=128, dtype=DType.BFLOAT16)
    for device in (H200, B200, PRO):
        assert select(request, device).get_name() == "TRITON_ATTN"


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_the_selector_knows_what_the_installed_version_prefills(device: str, version: str) -> None:
    found = KNOWN_DEVICES[device]
    config = AttentionSelectorConfig(
        head_size=128, dtype=DType.BFLOAT16, kv_cache_dtype=CacheDType.FP8
    )
    with emulated(found, version):
        reasons = TrtllmMhaBackend.validate_configuration(
            **{name: getattr(config, name) for name in type(config).model_fields},
            device_capability=found.compute_capability,
        )
    refused = device == "h200" and version == OLD
    assert any("install flashinfer-python>=0.7" in reason for reason in reasons) == refused
    assert bool(reasons) == refused


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("a100", {}, "compute capability 8.0: 9.0, 10.0 to 10.3, 12.0"),
        ("h200", {"use_mla": True}, "MLA not supported"),
        ("h200", {"head_size": 72}, "head_size 72: multiples of 16 from 16 to 256"),
        ("h200", {"head_size": 16}, "head_size must be one of 32, 48, .* for prefill by fmha_v2"),
        ("b200", {"head_size": 80}, "head_size must be one of 64, 128, 256 for prefill by trtllm"),
        ("rtx-pro-6000", {"head_size": 96}, "one of 64, 128, 256 for prefill by fmha_v2"),
        (
            "rtx-pro-6000",
            {"kv_cache_dtype": CacheDType.FP8},
            "must not be quantised for prefill by fmha_v2 on compute capability 12.0",
        ),
        ("h200", {"kv_cache_dtype": CacheDType.FLOAT16}, "must be the model's dtype"),
        ("h200", {"kv_cache_dtype": CacheDType.FP8_E5M2}, "kv_cache_dtype fp8_e5m2: auto, float16"),
        ("h200", {"block_size": 8}, "block_size 8: 16, 32, 64, 128"),
        ("h200", {"dtype": DType.FLOAT16}, "dtype float16: bfloat16"),
        ("h200", {"use_logits_soft_cap": True}, "logits soft cap not supported"),
        ("h200", {"use_dcp": True}, "DCP not supported"),
    ],
)
def test_what_no_kernel_serves_is_refused_by_the_selector(
    device: str, changes: dict[str, Any], reason: str
) -> None:
    if AttentionBackendEnum["TRTLLM_MHA"].missing():
        pytest.skip("flashinfer is not installed")
    request = AttentionSelectorConfig(head_size=128, dtype=DType.BFLOAT16).replace(**changes)
    with pytest.raises(UnsupportedError, match=reason):
        select(request, KNOWN_DEVICES[device], "TRTLLM_MHA")


def test_a_dense_model_is_not_given_a_latent_backend() -> None:
    request = AttentionSelectorConfig(head_size=128, dtype=DType.BFLOAT16)
    with pytest.raises(UnsupportedError, match="non-MLA not supported"):
        select(request, H200, "TRITON_MLA")


@pytest.mark.parametrize(
    ("device", "spec", "settings", "reason"),
    [
        (
            H200,
            SPEC.replace(block_size=48),
            {},
            "block_size must be one of 16, 32, 64, 128, got 48",
        ),
        (H200, SPEC.replace(block_size=256), {}, "one of 16, 32, 64, 128, got 256"),
        (
            H200,
            SPEC.replace(head_size=72),
            {},
            "head_size must be one of multiples of 16 .* got 72",
        ),
        (H200, SPEC.replace(head_size_v=96), {}, r"head_size_v must be head_size \(64\), got 96"),
        (H200, SPEC.replace(dtype=DType.FLOAT32), {}, "model dtype must be one of .*float32"),
        (H200, SPEC.replace(dtype=DType.FLOAT16), {}, "torch.bfloat16 for prefill by fmha_v2"),
        (PRO, FP8, {}, "kv_cache_dtype must not be quantised for prefill by fmha_v2"),
        (H200, SPEC.replace(cache_dtype=CacheDType.FP8_E5M2), {}, "one of auto.* got 'fp8_e5m2'"),
        (H200, SPEC, {"num_heads": None}, "num_heads is needed by TRTLLM_MHA, got None"),
        (H200, SPEC, {"num_heads": 7}, r"num_heads \(7\) must be a multiple"),
        (H200, SPEC, {"batch_invariant": True}, "batch_invariant must be False, got True"),
        (H200, SPEC, {"logits_soft_cap": 8.0}, "logits_soft_cap must be None, got 8.0"),
        (
            H200,
            SPEC,
            {"parallel": ParallelConfig(decode_context_parallel_size=2)},
            "decode_context_parallel_size must be 1, got 2",
        ),
        (
            B200,
            SPEC.replace(block_size=128),
            {"num_heads": 2},
            "block_size must be at most 64 for trtllm-gen with one query head",
        ),
        (
            H200,
            SPEC.replace(page_size_padded=SPEC.page_size_bytes + 256),
            {},
            "page_size_padded must be None for prefill by fmha_v2",
        ),
        (
            H200,
            MLAAttentionSpec(block_size=64, dtype=DType.BFLOAT16),
            {},
            "must be of full or sliding-window attention for TRTLLM_MHA, got MLAAttentionSpec",
        ),
        (KNOWN_DEVICES["a100"], SPEC, {}, "no decode kernel for compute capability 8.0"),
        (KNOWN_DEVICES["cpu"], SPEC, {}, "compute capability a device without any"),
    ],
)
def test_what_no_kernel_serves_is_refused_at_construction(
    device: Device, spec: Any, settings: dict[str, Any], reason: str
) -> None:
    with emulated(device), pytest.raises(ValueError, match=reason):
        builder_of(spec, **settings)


def test_xqa_finds_pages_of_whole_rows_only() -> None:
    rule = rule_of(Phase.DECODE, ComputeCapability(major=9, minor=0))
    spec = SPEC.replace(head_size=80)
    assert stride_reason(rule, spec) is None
    row = 80 * spec.dtype.itemsize
    padded = spec.replace(page_size_padded=spec.page_size_bytes + 2 * row)
    assert stride_reason(rule, padded) is None
    padded = spec.replace(page_size_padded=spec.page_size_bytes + 256)
    said = stride_reason(rule, padded)
    assert said is not None
    assert f"({row} bytes), got {spec.page_size_bytes + 256} bytes" in said
    assert stride_reason(None, padded) is None


def test_old_versions_prefill_no_fp8_on_hopper() -> None:
    with (
        emulated(H200, OLD),
        pytest.raises(ValueError, match=r"0\.6\.14.* flashinfer-python>=0\.7"),
    ):
        builder_of(FP8)
    with emulated(H200, NEW):
        builder_of(FP8)
    with emulated(B200, OLD):
        builder_of(FP8)


def test_a_missing_flashinfer_or_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def missing() -> None:
        raise compat.FlashInferUnavailableError("flashinfer is not installed: pip install it")

    monkeypatch.setattr(compat, "load_calls", missing)
    assert TrtllmMhaBackend.unavailable_reason() == "flashinfer is not installed: pip install it"
    monkeypatch.setattr(compat, "load_calls", lambda: None)
    monkeypatch.setattr(compat, "compiler_reason", lambda: "no nvcc")
    assert TrtllmMhaBackend.unavailable_reason() == "no nvcc"


# -- How a step is split.


@pytest.mark.parametrize(
    ("lens", "threshold", "is_ragged", "rows", "longest", "behind"),
    [
        ([1, 1, 1], 1, False, (0, 1, 2), 1, 0),
        ([1, 1, 9, 30], 1, False, (0, 1), 1, 30),
        ([1, 0, 1, 5], 1, False, (0, 2), 1, 5),
        ([4, 4, 30], 4, False, (0, 1), 4, 30),
        ([4, 4, 0, 0], 4, False, (0, 1), 4, 0),
        ([3, 3], 4, False, (), 0, 3),
        ([1, 4], 4, False, (0,), 1, 4),
        ([1, 2, 3, 9], 4, True, (0, 1, 2), 4, 9),
        ([1, 1, 0], 4, True, (0, 1), 1, 0),
        ([4, 4, 9], 4, True, (0, 1), 4, 9),
        ([3, 3], 4, True, (0, 1), 4, 0),
        ([9], 4, True, (), 0, 9),
        ([1, 1], 0, False, (), 0, 1),
        ([], 1, False, (), 0, 0),
        ([0, 0], 1, False, (), 0, 0),
    ],
)
def test_leading_requests_are_decodes(
    lens: list[int],
    threshold: int,
    is_ragged: bool,
    rows: tuple[int, ...],
    longest: int,
    behind: int,
) -> None:
    split = split_step(lens, threshold, is_ragged)
    assert (split.num_decodes, split.num_listed) == (len(rows), max(rows, default=-1) + 1)
    assert split.num_decode_tokens == sum(lens[row] for row in rows)
    assert (split.decode_query_len, split.max_prefill_len) == (longest, behind)
    assert split.num_tokens == sum(lens)


def test_old_versions_send_verifies_that_xqa_gets_wrong_to_the_prefill_kernel() -> None:
    batch = batch_of([4, 4], [30, 20])
    for version, spec, by_xqa in (
        (OLD, SPEC, True),
        (OLD, window_spec(), False),
        (NEW, window_spec(), True),
        (NEW, FP8, True),
    ):
        with emulated(H200, version):
            record = builder_of(spec, speculative=VERIFY).build(0, batch)
        assert (record.decode is not None) == by_xqa
        assert (record.prefill is None) == by_xqa


# -- Arguments of the calls.


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 40])
def test_bits_of_the_mask_are_causal(length: int) -> None:
    mask = causal_mask(3, length)
    assert mask.dtype == torch.uint16
    assert mask.shape == (3, length, -(-length // 32) * 2)
    bits = (mask.int()[..., None] >> torch.arange(16) & 1).flatten(2)
    expected = torch.zeros_like(bits)
    expected[:, :, :length] = torch.ones(length, length, dtype=bits.dtype).tril()
    assert torch.equal(bits, expected)


def test_ragged_requests_have_the_rows_of_their_own_masks() -> None:
    mask, lens = causal_mask(1, 40)[0], [3, 0, 40, 1, 0, 17]
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    bits = ragged_mask(mask, starts, sum(lens))
    assert torch.equal(
        bits.view(torch.uint16).int(), torch.cat([mask[:length] for length in lens]).int()
    )


@pytest.mark.parametrize("lens", [[1, 4, 2], [3, 3], [1, 0, 4, 0, 3, 0]])
def test_verifies_of_different_lengths_are_one_call_where_the_version_has_it(
    lens: list[int],
) -> None:
    batch = batch_of(lens, [40 + length if length else 0 for length in lens])
    seen: list[dict[str, Any]] = []

    def look(kernel: str, given: dict[str, Any]) -> None:
        seen.append({"kernel": kernel, **given})

    with emulated(H200, NEW, look):
        record = builder_of(speculative=VERIFY).build(0, batch)
        attend(impl_of(), SPEC, (lens, batch.seq_lens.tolist()), record=record)
    assert record.prefill is None
    assert [one["kernel"] for one in seen] == ["ragged_xqa"]
    live = [length for length in lens if length]
    # One kernel is compiled for all these batches.
    assert seen[0]["q_len_per_req"] == 4
    assert seen[0]["q_cu_seq_lens"].tolist() == [sum(live[:row]) for row in range(len(live) + 1)]
    assert seen[0]["mask"].shape == (sum(lens), 2)
    with emulated(H200, OLD):
        record = builder_of(speculative=VERIFY).build(0, batch)
    assert record.prefill is not None


def test_a_ragged_batch_is_rewritten_in_place() -> None:
    with emulated(H200, NEW):
        builder = builder_of(speculative=VERIFY)
        first = builder.build(0, batch_of([1, 4, 2], [40, 41, 42])).decode
        second = builder.build(0, batch_of([2, 3, 2], [40, 41, 42])).decode
    assert first is not None
    assert second is not None
    for name in ("pages", "kv_lens", "mask", "query_starts"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr(), name


def test_padding_reads_as_many_keys_as_a_captured_verify_has_rows() -> None:
    with emulated(H200):
        builder = builder_of(speculative=VERIFY)
        captured = builder.build_for_cudagraph_capture(batch_of([4, 4], [40, 40])).decode
        assert captured is not None
        builder.build(0, batch_of([0, 0], [0, 0]))
    assert captured.kv_lens.tolist() == [4, 4]


@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_tables_are_of_the_whole_model_and_of_int32(page: int) -> None:
    with emulated(H200):
        record = builder_of(SPEC.replace(block_size=page)).build(
            0, batch_of([1, 1, 30], [100, 257, 30], page)
        )
    for part, reqs in ((record.decode, 2), (record.prefill, 1)):
        assert part is not None
        # XQA reads lengths as unsigned numbers of the same bytes.
        wanted = torch.uint32 if part.rule.kernel is VendorKernel.XQA else torch.int32
        assert (part.pages.dtype, part.kv_lens.dtype) == (torch.int32, wanted)
        assert part.pages.shape == (reqs, 512 // page)
        assert part.pages.is_contiguous()
        assert part.max_kv_len == 512


def test_window_tables_hold_the_visible_pages_alone() -> None:
    with emulated(H200):
        record = builder_of(window_spec(20)).build(0, batch_of([1, 40], [400, 300]))
    decode, prefill = record.decode, record.prefill
    assert decode is not None
    assert prefill is not None
    # 20 keys lie in at most 3 pages; the last of 400 keys ends a page.
    assert decode.pages.shape == (1, 3)
    assert decode.kv_lens.tolist() == [32]
    assert decode.pages[0, :2].tolist() == [24, 25]
    assert prefill.kv_lens.tolist() == [300 - 240 // 16 * 16]
    assert prefill.max_kv_len == prefill.pages.shape[1] * P == (-(-(19 + 128) // P) + 1) * P


def test_a_rebuild_writes_in_place_and_bounds_do_not_move() -> None:
    with emulated(H200):
        builder = builder_of(speculative=VERIFY)
        first = builder.build_for_cudagraph_capture(batch_of([4, 4], [4, 4]))
        second = builder.build(0, batch_of([4, 4], [90, 400]))
    assert first.decode is not None
    assert second.decode is not None
    for name in ("pages", "kv_lens", "mask", "workspace", "query"):
        one, other = getattr(first.decode, name), getattr(second.decode, name)
        assert one.data_ptr() == other.data_ptr(), name
    assert first.decode.kv_lens.tolist() == [90, 400]
    assert first.decode.max_kv_len == second.decode.max_kv_len


def test_padding_behind_a_captured_batch_reads_page_0() -> None:
    with emulated(H200):
        builder = builder_of(speculative=VERIFY)
        captured = builder.build_for_cudagraph_capture(batch_of([4, 4, 4], [40, 40, 40])).decode
        assert captured is not None
        builder.build(0, batch_of([4, 0, 0], [50, 0, 0]))
        assert captured.kv_lens.tolist() == [50, 4, 4]
        assert captured.pages[1:].eq(0).all()
        builder.build(0, batch_of([0, 0, 0], [0, 0, 0]))
        assert captured.pages.eq(0).all()
        with pytest.raises(ValueError, match=r"same number of tokens, got \[4, 1\]"):
            builder.build_for_cudagraph_capture(batch_of([4, 1], [40, 40]))


@pytest.mark.parametrize("device", [H200, B200])
def test_no_scratch_is_shared_and_all_of_it_is_zero(device: Device) -> None:
    with emulated(device):
        record = builder_of().build(0, batch_of([1, 30], [30, 30]))
    assert record.decode is not None
    assert record.prefill is not None
    scratch = [
        getattr(part, name)
        for part in (record.decode, record.prefill)
        for name in ("workspace", "counters")
    ]
    assert len({one.data_ptr() for one in scratch}) == 4
    assert not any(one.any() for one in scratch)


def test_graph_support_is_of_uniform_batches() -> None:
    level = TrtllmMhaMetadataBuilder.get_cudagraph_support(CONFIG, SPEC)
    assert level is AttentionCGSupport.UNIFORM_BATCH
    assert TrtllmMhaBackend.cudagraph_support() is level


@pytest.mark.parametrize("spec", [SPEC, window_spec()], ids=["full", "window"])
@pytest.mark.parametrize("device", [H200, B200])
@pytest.mark.parametrize("lens", [([1, 1], [30, 40]), ([1, 4, 2, 30], [9, 30, 20, 30])])
def test_a_build_reads_nothing_of_the_device(
    spec: Any, device: Device, lens: tuple[list[int], list[int]]
) -> None:
    batch = batch_of(*lens)
    given = {
        item.name: on_device(getattr(batch, item.name))
        for item in dataclasses.fields(batch)
        if isinstance(getattr(batch, item.name), torch.Tensor) and not item.name.endswith("_cpu")
        if item.name != "seq_lens_cpu_upper_bound"
    }
    with emulated(device), MadeOnDevice():
        builder = builder_of(spec, speculative=VERIFY)
        record = builder.build(0, batch.replace(**given))
    assert isinstance(record.seq_lens, OnDevice)


def test_host_lengths_of_keys_decide_nothing() -> None:
    batch = batch_of([1, 1, 30], [100, 257, 30])
    with emulated(H200):
        builder = builder_of(exact_host_lengths=False)
        wrong = batch.replace(
            max_seq_len=511, seq_lens_cpu_upper_bound=torch.full((3,), 511, dtype=torch.int32)
        )
        right = builder.build(0, batch)
        lens = right.decode and right.decode.kv_lens.tolist()
        other = builder.build(0, wrong)
    assert lens == [100, 257]
    assert other.decode is not None
    assert other.decode.kv_lens.tolist() == lens


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"causal": False}, NotImplementedError, "causal batches, got causal=False"),
        ({"mm_req_doc_ranges": {0: [(1, 3)]}}, NotImplementedError, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.zeros(2)}, NotImplementedError, "rswa_prefix_lens"),
        ({"num_actual_tokens": 1}, ValueError, r"num_actual_tokens \(1\), got 2"),
    ],
)
def test_batches_that_kernels_do_not_take_are_refused(
    changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with emulated(H200), pytest.raises(error, match=reason):
        builder_of().build(0, batch_of([1, 1], [30, 40]).replace(**changes))


# -- The impl.


def impl_of(**changes: Any) -> TrtllmMhaImpl:
    arguments: dict[str, Any] = {
        "num_heads": 8,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        **changes,
    }
    return TrtllmMhaImpl(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"head_size": 72}, ValueError, "head_size must be one of multiples of 16 .* got 72"),
        ({"head_size_v": 128}, ValueError, r"head_size_v must be head_size \(64\) .* got 128"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "kv_cache_dtype must be one of .*'fp8_e5m2'"),
        ({"logits_soft_cap": 8.0}, NotImplementedError, "logits_soft_cap .* got 8.0"),
        ({"alibi_slopes": [0.5] * 8}, NotImplementedError, "alibi_slopes"),
        ({"attention_chunk_size": 16}, NotImplementedError, "attention_chunk_size"),
        ({"attn_type": "encoder_only"}, NotImplementedError, "attn_type must be decoder"),
    ],
)
def test_layers_that_no_kernel_takes_are_refused(
    changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        impl_of(**changes)


def test_dtypes_are_checked_when_weights_are_there() -> None:
    with pytest.raises(ValueError, match=r"one of torch\.bfloat16, .* got torch\.float32"):
        impl_of().process_weights_after_loading(torch.float32)
    with pytest.raises(ValueError, match="must be the model's dtype"):
        impl_of(kv_cache_dtype="float16").process_weights_after_loading(torch.bfloat16)
    assert not impl_of().fused_output_quant_supported(object())


def attend(impl: TrtllmMhaImpl, spec: Any, lens: tuple[list[int], list[int]], **given: Any) -> Any:
    """Run one forward over a cache of zeros."""
    batch = batch_of(*lens)
    builder = builder_of(spec)
    packing = given.pop("packing", KVPacking.SPLIT)
    order = given.pop("order", KVOrder.NHD)
    cache = spec.layout(packing, order).allocate(80)
    tokens = sum(lens[0])
    layer = given.pop("layer", LayerScales.of())
    query = given.pop("query", torch.ones(tokens, 8, 64, dtype=torch.bfloat16))
    output = given.pop("output", torch.empty(tokens, 8, 64, dtype=torch.bfloat16))
    record = given.pop("record", None) or builder.build(0, batch)
    return impl.forward(layer, query, None, None, cache, record, output, **given)


def test_a_log_sum_exp_is_refused_where_a_call_has_none() -> None:
    lse = torch.empty(1, 8)
    with emulated(H200), pytest.raises(NotImplementedError, match="xqa returns no log-sum-exp"):
        attend(impl_of(), SPEC, ([1], [9]), output_lse=lse)
    lse = torch.empty(9, 8)
    with emulated(H200), pytest.raises(NotImplementedError, match="fmha_v2 returns no log-sum"):
        attend(impl_of(), SPEC, ([9], [9]), output_lse=lse)
    with emulated(B200):
        attend(impl_of(), SPEC, ([9], [9]), output_lse=lse)
        with pytest.raises(NotImplementedError, match="output_lse with sinks"):
            attend(impl_of(sinks=torch.zeros(8)), SPEC, ([9], [9]), output_lse=lse)
    assert torch.allclose(lse, torch.arange(1.0, 10).log()[:, None].expand(-1, 8))


def test_a_packed_cache_is_refused_by_fmha_v2_and_taken_by_xqa() -> None:
    with emulated(H200):
        attend(impl_of(), SPEC, ([1], [9]), packing=KVPacking.PACKED)
        with pytest.raises(ValueError, match=r"kv_cache must be split .* choose another prefill"):
            attend(impl_of(), SPEC, ([9], [9]), packing=KVPacking.PACKED)


def test_an_fp8_query_needs_its_scale() -> None:
    class NoScale:
        _k_scale = _v_scale = torch.ones(())

    impl = impl_of(kv_cache_dtype="fp8")
    with emulated(B200), pytest.raises(ValueError, match="_q_scale of the layer is needed"):
        attend(impl, FP8, ([1], [9]), layer=NoScale())
    per_head = LayerScales(torch.ones(8), torch.ones(()), torch.ones(()))
    with emulated(B200), pytest.raises(ValueError, match="_q_scale must be a float32 scalar"):
        attend(impl, FP8, ([1], [9]), layer=per_head)
    # For XQA the query keeps the model's type.
    with emulated(H200, NEW):
        attend(impl_of(kv_cache_dtype="fp8"), FP8, ([1], [9]), layer=NoScale())


def test_an_fp8_query_saturates() -> None:
    seen = []

    def look(kernel: str, given: dict[str, Any]) -> None:
        seen.append(given["query"].float())

    query = torch.full((1, 8, 64), 1e4, dtype=torch.bfloat16)
    with emulated(B200, NEW, look):
        attend(impl_of(kv_cache_dtype="fp8"), FP8, ([1], [9]), query=query)
    assert seen[0].unique().tolist() == [448.0]


def test_one_kv_head_has_canonical_strides() -> None:
    seen = []

    def look(kernel: str, given: dict[str, Any]) -> None:
        seen.append([view.stride() for view in given["kv_cache"]])

    spec = SPEC.replace(num_kv_heads=1)
    for order in KVOrder:
        with emulated(H200, mutation=look):
            attend(impl_of(num_kv_heads=1), spec, ([1], [9]), order=order)
    assert seen == [[(2 * P * 64, 64, 64, 1)] * 2] * 2
    one = torch.empty(1, P, 1, 64).as_strided((1, P, 1, 64), (7, 64, 3, 1))
    assert compat.canonical_strides(one).stride() == (P * 64, 64, 64, 1)


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"output_scale": torch.ones(())}, NotImplementedError, "TRTLLM_MHA has none"),
        ({"query": torch.ones(1, 8, 64)}, ValueError, r"query and output must be of one type"),
        (
            {"output": torch.empty(0, 8, 64, dtype=torch.bfloat16)},
            ValueError,
            r"output must have at least num_actual_tokens \(1\) rows, got 0",
        ),
        (
            {"query": torch.ones(1, 8, 128, dtype=torch.bfloat16)[..., ::2]},
            ValueError,
            "query must be contiguous in its last dimension",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    given: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with emulated(H200), pytest.raises(error, match=reason):
        attend(impl_of(), SPEC, ([1], [9]), **given)


def test_a_window_that_pages_were_not_cut_to_is_refused() -> None:
    with emulated(H200):
        with pytest.raises(ValueError, match=r"pages were cut to \(20\), got None"):
            attend(impl_of(), window_spec(20), ([1], [90]))
        # Full tables serve a layer with a window too.
        attend(impl_of(sliding_window=20), SPEC, ([1], [90]))


def test_a_window_beside_full_pages_is_refused_where_xqa_misplaces_it() -> None:
    for version in (OLD, NEW):
        with emulated(H200, version):
            record = builder_of(speculative=VERIFY).build(0, batch_of([4], [90]))
            lens, impl = ([4], [90]), impl_of(sliding_window=20)
            if version == NEW:
                attend(impl, SPEC, lens, record=record)
                continue
            with pytest.raises(NotImplementedError, match=r"sliding_window 20 of rows of 4 tokens"):
                attend(impl, SPEC, lens, record=record)


# -- Draft steps.


def same_calls(one: Any, other: Any) -> bool:
    """Check that two records give their decode kernel the same arguments."""
    parts = one.decode, other.decode
    return all(
        torch.equal(getattr(parts[0], name), getattr(parts[1], name))
        for name in ("pages", "kv_lens")
    ) and torch.equal(one.slot_mapping, other.slot_mapping)


DRAFTED = ([3, 1, 0, 2], [40, 510, 0, 33])
"""After two steps one request is at the model's maximum length; one request is padding."""


def drafted_batch() -> CommonAttentionMetadata:
    table = 1 + torch.randperm(4 * 32, dtype=torch.int32).view(4, 32)
    return CommonAttentionMetadata.from_lengths(*DRAFTED, table, P)


@pytest.mark.parametrize("spec", [SPEC, window_spec()], ids=["full", "window"])
@pytest.mark.parametrize("device", [H200, B200])
def test_draft_steps_made_at_once_are_those_made_one_by_one(device: Device, spec: Any) -> None:
    batch = drafted_batch()
    with emulated(device):
        builder = builder_of(spec, speculative=VERIFY)
        steps = builder.build_draft_steps(batch, 4)
        advanced = batch
        for step in steps:
            advanced = advance(advanced, P, CONFIG.max_model_len)
            alone = builder_of(spec, speculative=VERIFY).build_for_drafting(advanced, 0)
            assert same_calls(step, alone)
            assert torch.equal(step.seq_lens, advanced.seq_lens)
            assert step.keyless is not None
            assert alone.keyless is not None
            assert torch.equal(step.keyless, alone.keyless)
    lens = [step.seq_lens.tolist() for step in steps]
    assert lens[0] == [41, 511, 0, 34]
    assert lens[3] == [44, 0, 0, 37]


def test_draft_steps_are_rewritten_in_place() -> None:
    with emulated(H200):
        builder = builder_of(speculative=VERIFY)
        first = builder.build_draft_steps(drafted_batch(), 2)
        pages = [step.decode.pages.data_ptr() for step in first if step.decode is not None]
        again = builder.build_draft_steps(batch_of([1, 1, 1, 1], [9, 9, 9, 9]), 2)
    assert len(set(pages)) == 2
    assert [step.decode.pages.data_ptr() for step in again if step.decode is not None] == pages
    for step, length in zip(first, (10, 11), strict=True):
        assert step.decode is not None
        assert step.decode.kv_lens.tolist() == [length] * 4
        assert not step.keyless.any() if step.keyless is not None else False


def test_a_draft_record_is_brought_up_to_date_from_its_own_tensors() -> None:
    batch = batch_of([1, 1], [30, 40])
    with emulated(H200):
        builder = builder_of(speculative=VERIFY)
        record = builder.build_for_drafting(batch, 0)
        batch.seq_lens.copy_(torch.tensor([31, 0], dtype=torch.int32))
        decode = record.decode
        builder.update_draft_decode_metadata(record)
    assert builder.supports_draft_decode_metadata_update
    assert record.decode is decode
    assert decode is not None
    assert decode.kv_lens.tolist() == [31, 1]
    assert record.keyless is not None
    assert record.keyless.flatten().tolist() == [False, True]


# -- Window layers with a block pool of their own.


def test_a_pool_of_its_own_gives_tables_and_slots_of_that_pool() -> None:
    batch = batch_of([1, 1, 30], [100, 47, 30])
    # A permutation of blocks that keeps 0 in place, which is no block.
    block_map = (torch.arange(64) * 37 % 64).int()
    # The engine has released the blocks before the window.
    gone = batch.block_table_tensor[0, :4].long()
    pool = block_map.clone()
    pool[gone] = 0
    table = block_map[batch.block_table_tensor.long()]
    direct = batch.replace(
        block_table_tensor=table,
        slot_mapping=block_map[batch.slot_mapping // P].long() * P + batch.slot_mapping % P,
    )
    with emulated(H200):
        own = builder_of(window_spec())
        own.use_pool(pool)
        record = own.build(0, batch)
        expected = builder_of(window_spec()).build(0, direct)
        assert same_calls(record, expected)
        assert record.prefill is not None
        assert expected.prefill is not None
        assert torch.equal(record.prefill.pages, expected.prefill.pages)
        address = record.slot_mapping.data_ptr()
        # Blocks move between steps; a graph finds the slots at the same addresses.
        pool.copy_(pool.roll(1))
        assert own.build(0, batch).slot_mapping.data_ptr() == address
        other = own.update_block_table(record, batch.block_table_tensor, batch.slot_mapping)
        assert torch.equal(other.slot_mapping, own.build(0, batch).slot_mapping)
        block = int(batch.block_table_tensor[0, 100 // P])
        # The block must not be 0, which would be none.
        pool[block] = 5
        steps = own.build_draft_steps(batch, 1)
    assert steps[0].slot_mapping[0] == 5 * P + 100 % P


# -- Facts about a device.


def test_the_capability_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert capability_of(torch.device("cpu")) is None
    assert str(capability_of(torch.device("cuda", 0))) == "9.0"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert capability_of(torch.device("cuda", 0)) is None


def test_notes_name_phases_without_a_kernel() -> None:
    notes = phase_notes(ComputeCapability.model_validate("8.0"))
    assert [note.split(" for ")[0] for note in notes] == ["no prefill kernel", "no decode kernel"]


def test_without_a_host_bound_rows_are_taken_to_have_keys() -> None:
    with emulated(H200):
        builder = builder_of()
        batch = batch_of([1, 1], [30, 1])
        assert builder.build(0, batch.replace(seq_lens_cpu_upper_bound=None)).keyless is None
        bound = torch.tensor([30, 0], dtype=torch.int32)
        assert builder.build(0, batch.replace(seq_lens_cpu_upper_bound=bound)).keyless is not None


def test_a_builder_of_prefills_alone_has_no_decodes() -> None:
    backend = TrtllmMhaBackend.for_phase("prefill")
    assert backend is not None
    with emulated(H200):
        builder = backend.get_builder_cls()(SPEC, [], CONFIG, "cpu")
        record = builder.build(0, batch_of([1, 9], [30, 30]))
    assert record.decode is None
    assert record.prefill.num_tokens == 10


def test_vllms_own_batch_gives_the_same_calls() -> None:
    batch = batch_of([1, 1, 9], [30, 40, 20])
    other = stand_in_for_vllm(batch, IN_BOTH_VERSIONS)
    with emulated(H200):
        expected = builder_of().build(0, batch)
        record = builder_of().build(0, other)
    assert same_calls(record, expected)
    assert record.split == expected.split


def test_the_builder_has_vllms_arguments() -> None:
    for method in ("__init__", "build", "build_for_cudagraph_capture", "build_for_drafting"):
        own, base = (
            list(inspect.signature(getattr(cls, method)).parameters)
            for cls in (TrtllmMhaMetadataBuilder, AttentionMetadataBuilder)
        )
        assert own == base


# -- Sinks of verifies.


@pytest.mark.parametrize(
    ("group", "most", "right"),
    [(1, 9, 9), (4, 9, 9), (7, 9, 4), (7, 3, 3), (3, 20, 10)],
)
def test_sinks_are_found_where_a_program_has_whole_tokens(
    group: int, most: int, right: int
) -> None:
    assert most_tokens_with_sinks(group, most) == right
    # Check every row that the limit counts on, by its place in a program of 32 rows.
    for row in range(right * group):
        program = 0 if right * group <= 32 else row // 32
        assert (row - 32 * program) % group == row % group


def test_rows_whose_sinks_xqa_does_not_find_are_prefills() -> None:
    longer = SpeculativeConfig(num_speculative_tokens=6)
    spec = SPEC.replace(num_kv_heads=1)
    with emulated(H200, NEW):
        for heads, has_sinks, most in ((7, True, 4), (7, False, 7), (8, True, 7)):
            given = {"num_heads": heads, "has_sinks": has_sinks, "speculative": longer}
            builder = builder_of(spec, **given)
            assert builder.reorder_batch_threshold == most
            record = builder.build(0, batch_of([4, 5], [20, 20]))
            assert record.split.num_decodes == (1 if most == 4 else 2)


def test_a_layer_with_sinks_refuses_rows_that_were_planned_without() -> None:
    longer = SpeculativeConfig(num_speculative_tokens=6)
    spec = SPEC.replace(num_kv_heads=1)
    with emulated(H200, NEW):
        builder = builder_of(spec, num_heads=7, speculative=longer)
        record = builder.build(0, batch_of([5, 5], [20, 20]))
        impl = TrtllmMhaImpl(7, 64, 0.125, 1, sinks=torch.zeros(7))
        cache = spec.layout().allocate(8, "cpu")
        query = torch.zeros(10, 7, 64, dtype=torch.bfloat16)
        with pytest.raises(NotImplementedError, match=r"sinks of rows of 7 tokens.*has_sinks=True"):
            impl.forward(
                LayerScales.of(), query, None, None, cache, record, torch.empty_like(query)
            )
