"""Two backends in one step: what is refused, which backend runs which rows, and conformance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.backends.flashinfer import FlashInferBackend
from attn.backends.mixed import mix
from attn.backends.torch_ref import TorchRefBackend
from attn.backends.torch_ref_mla import TorchRefMLABackend
from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.errors import MissingDependencyError, UnsupportedError
from attn.registry import AttentionBackendEnum, BackendRow, register_mix
from attn.selector import explain, select
from attn.testing import cases
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, Case, cases_for
from attn.testing.conformance import check_case
from attn.testing.trial import PAGE_PADDING
from builders.batch import CommonAttentionMetadata
from builders.mixed import MixedMetadataBuilder, rows_of
from specs.attention import AttentionCGSupport, AttentionSelectorConfig, BackendCapabilities
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec
from specs.layouts import KVPacking
from tests.emulators.trtllm_emulator import NEW, OLD, emulated

H200 = KNOWN_DEVICES["h200"]
ASKED = AttentionSelectorConfig(head_size=64, dtype=DType.BFLOAT16, block_size=16)
MIXED = mix("TRITON_XQA", TritonAttentionBackend, TrtllmMhaBackend)


class RefOnH200(TorchRefBackend):
    """The reference backend on GPUs with XQA, without the features that XQA's mask lacks."""

    capabilities: BackendCapabilities = TorchRefBackend.capabilities  # type: ignore[misc]


EMULATED = mix("REF_XQA", RefOnH200, TrtllmMhaBackend)


def emulated_cases() -> list[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "detect_device", lambda: H200)
        return [one for one in cases_for(EMULATED) if isinstance(one, Case)]


CASES = emulated_cases()[::2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mix_conforms_over_emulated_decodes(case: Case) -> None:
    with emulated(H200, NEW) as calls:
        if case.padded_pages and PAGE_PADDING % (case.heads.head_size * 2):
            with pytest.raises(ValueError, match="pages of whole rows for xqa"):
                check_case(EMULATED, case)
            return
        check_case(EMULATED, case)
    assert set(calls.called) <= {"xqa"}


def test_the_cases_mix_kernels_types_and_layouts() -> None:
    assert {case.dtype for case in CASES} == {DType.FLOAT16, DType.BFLOAT16}
    assert {case.packing for case in CASES} == set(KVPacking)
    assert {True, False} == {case.padded_pages for case in CASES}
    assert {"mixed", "speculative_verify"} <= {case.batch.name for case in CASES}


def test_triton_prefills_beside_xqa_decodes() -> None:
    """The library's own prefill kernel runs in Triton's interpreter, beside emulated XQA."""
    for name in ("causal", "window", "sinks"):
        case = Case(FEATURES[name], BATCHES["mixed"], dtype=DType.FLOAT16)
        with emulated(H200, OLD) as calls:
            check_case(MIXED, case)
        assert "xqa" in calls.called


# -- What the two backends have in common.


def test_the_mix_declares_what_both_do() -> None:
    own, prefill = MIXED.capabilities, TritonAttentionBackend.capabilities
    assert set(own.dtypes) == {DType.FLOAT16, DType.BFLOAT16}
    assert own.block_sizes == (16, 32, 64, 128)
    assert 48 in own.head_sizes
    assert 24 not in own.head_sizes
    assert 512 not in own.head_sizes
    assert own.sink
    assert own.sliding_window
    assert prefill.logits_soft_cap > own.logits_soft_cap
    assert prefill.device_cpu_query_lens_mismatch > own.device_cpu_query_lens_mismatch
    assert own.cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    with_plan = mix("FI_XQA", FlashInferBackend, TrtllmMhaBackend).capabilities
    assert with_plan.needs_host_lengths
    assert with_plan.head_sizes.values == (64, 128, 256)
    assert not with_plan.sink


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (TritonAttentionBackend, TritonMLABackend, "have dense and latent KV caches"),
        (TorchRefMLABackend, TrtllmMhaBackend, "have latent and dense KV caches"),
        (TritonMLABackend, TorchRefMLABackend, "TRITON_MLA has no prefill phase of its own"),
        (TrtllmMhaBackend, TrtllmMhaBackend, "both phases are TRTLLM_MHA's"),
    ],
)
def test_impossible_pairs_are_refused_with_the_reason(
    prefill: type[AttentionBackend], decode: type[AttentionBackend], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        mix("PAIR", prefill, decode)


def changed(**changes: Any) -> type[TorchRefBackend]:
    class Other(TorchRefBackend):
        capabilities = TorchRefBackend.capabilities.replace(**changes)

        @staticmethod
        def get_name() -> str:
            return "OTHER"

    return Other


class OfOtherStrides(changed()):  # type: ignore[misc]
    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> Any:
        return (0, 1, 3, 2, 4)


class OfOtherShape(changed()):  # type: ignore[misc]
    @classmethod
    def get_kv_cache_shape(cls, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return (1, 2, 3)


class ThatWrites(changed()):  # type: ignore[misc]
    forward_includes_kv_cache_update = True


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        (OfOtherStrides, "KV cache strides of OTHER and TRTLLM_MHA differ"),
        (OfOtherShape, "KV cache shapes of OTHER and TRTLLM_MHA differ"),
        (ThatWrites, "must leave the cache write to the caller"),
        (changed(block_sizes=(48,)), "block sizes of OTHER and TRTLLM_MHA have nothing in common"),
        (
            changed(kv_cache_dtypes=(CacheDType.FP8_E5M2,)),
            "KV cache dtypes of OTHER and TRTLLM_MHA have nothing in common",
        ),
        (changed(dtypes=(DType.FLOAT32,)), "dtypes have nothing in common"),
    ],
)
def test_caches_that_do_not_agree_are_refused(prefill: type[AttentionBackend], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        mix("PAIR", prefill, TrtllmMhaBackend)


# -- In the registry.


@pytest.fixture
def registered() -> Iterator[str]:
    if AttentionBackendEnum["TRTLLM_MHA"].missing():
        pytest.skip("flashinfer is not installed")
    register_mix("TRITON_XQA", prefill="TRITON_ATTN", decode="TRTLLM_MHA")
    yield "TRITON_XQA"
    AttentionBackendEnum.remove("TRITON_XQA")


def test_a_registered_mix_is_chosen_by_name_and_says_who_does_what(registered: str) -> None:
    backend = select(ASKED, H200, registered)
    assert backend.get_name() == registered
    assert backend is AttentionBackendEnum[registered].get_class()
    (own,) = (one for one in explain(ASKED, H200, registered).candidates if one.name == registered)
    assert "prefill rows by TRITON_ATTN" in own.reasons
    assert "decode rows by TRTLLM_MHA" in own.reasons
    assert "decode by xqa" in own.reasons
    assert not any("fmha_v2" in reason for reason in own.reasons)
    assert select(ASKED, H200).get_name() == "TRITON_ATTN"


def test_a_mix_serves_what_one_backend_alone_does_not(registered: str) -> None:
    for changes in ({"dtype": DType.FLOAT16}, {"head_size": 112}):
        asked = ASKED.replace(**changes)
        assert select(asked, H200, registered).get_name() == registered
        with pytest.raises(UnsupportedError):
            select(asked, H200, "TRTLLM_MHA")


def test_a_mix_refuses_what_either_does(registered: str) -> None:
    for changes, device, reason in (
        ({}, "a100", "compute capability 8.0: 9.0, "),
        ({"use_logits_soft_cap": True}, "h200", "logits soft cap not supported"),
        ({"head_size": 80}, "b200", "decode by TRTLLM_MHA: head_size must be one of 64, 128, 256"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            select(ASKED.replace(**changes), KNOWN_DEVICES[device], registered)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (BackendRow("X", prefill="TRITON_ATTN"), "both prefill and decode, got path=''"),
        (BackendRow("X", "a:B", prefill="TRITON_ATTN", decode="FLASHINFER"), "got path='a:B'"),
        (BackendRow("X", prefill="NOBODY", decode="TRTLLM_MHA"), "prefill must be a registered"),
        (BackendRow("X", prefill="TRITON_ATTN", decode="NOBODY"), "decode must be a registered"),
        (BackendRow("X"), "backend path must be"),
    ],
)
def test_rows_that_name_no_pair_are_refused(row: BackendRow, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AttentionBackendEnum.add(row)
    assert "X" not in AttentionBackendEnum


def test_a_mix_of_a_mix_is_refused(registered: str) -> None:
    with pytest.raises(ValueError, match="must be no mix of two backends itself"):
        register_mix("X", prefill=registered, decode="TRTLLM_MHA")


def test_a_pair_that_cannot_be_is_not_registered() -> None:
    with pytest.raises(UnsupportedError, match="have dense and latent"):
        register_mix("X", prefill="TORCH_REF", decode="TORCH_REF_MLA")
    assert "X" not in AttentionBackendEnum


def test_a_mix_needs_the_packages_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = BackendRow("GONE", "a.b:C", requires=("no_such_package",))
    AttentionBackendEnum.add(missing)
    try:
        with pytest.raises(MissingDependencyError, match="no_such_package"):
            register_mix("X", prefill="TORCH_REF", decode="GONE")
    finally:
        AttentionBackendEnum.remove("GONE")


def test_a_machine_that_lacks_one_lacks_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrtllmMhaBackend, "unavailable_reason", classmethod(lambda _: "no nvcc"))
    assert MIXED.unavailable_reason() == "no nvcc"


# -- Which backend runs which rows.

SPEC = FullAttentionSpec(block_size=16, dtype=DType.BFLOAT16, num_kv_heads=2, head_size=64)
CONFIG = EngineConfig(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=128, num_heads=8)


def build(lens: list[int], seq_lens: list[int], **settings: Any) -> Any:
    table = 1 + torch.arange(len(lens) * 8, dtype=torch.int32).view(-1, 8)
    batch = CommonAttentionMetadata.from_lengths(lens, seq_lens, table, 16)
    with emulated(H200, NEW):
        builder_cls = EMULATED.get_builder_cls()
        builder = builder_cls(SPEC, [], CONFIG.replace(**settings), "cpu")
        assert isinstance(builder, MixedMetadataBuilder)
        return builder, builder.build(0, batch)


@pytest.mark.parametrize(
    ("lens", "settings", "decodes"),
    [
        ([1, 1, 9], {}, 2),
        ([9, 1], {}, 0),
        ([1, 1, 0], {}, 3),
        ([0, 0], {}, 0),
        ([4, 4, 9], {"speculative": SpeculativeConfig(num_speculative_tokens=3)}, 2),
        ([3, 3], {"speculative": SpeculativeConfig(num_speculative_tokens=3)}, 0),
        ([2, 2], {}, 0),
    ],
)
def test_leading_rows_of_one_length_are_decodes(
    lens: list[int], settings: dict[str, Any], decodes: int
) -> None:
    _, record = build(lens, [length and 40 for length in lens], **settings)
    assert record.num_decodes == decodes
    assert (record.decode is not None) == (decodes > 0)
    assert (record.prefill is not None) == (sum(lens[decodes:]) > 0)
    assert record.num_decode_tokens == sum(lens[:decodes])


def test_draft_steps_are_the_decode_builders() -> None:
    builder, _ = build([1, 1], [40, 40])
    table = 1 + torch.arange(16, dtype=torch.int32).view(2, 8)
    batch = CommonAttentionMetadata.from_lengths([1, 1], [41, 41], table, 16)
    with emulated(H200, NEW):
        record = builder.build_for_drafting(batch, 1)
    assert record.prefill is None
    assert record.decode.decode.kv_lens.tolist() == [41, 41]


def test_a_decode_builder_takes_no_prefills() -> None:
    builder, _ = build([1], [40])
    table = 1 + torch.arange(8, dtype=torch.int32).view(1, 8)
    batch = CommonAttentionMetadata.from_lengths([9], [40], table, 16)
    with pytest.raises(ValueError, match="takes decodes alone, got one of 9"):
        builder.decode.build(0, batch)


def test_rows_of_a_batch_start_at_0() -> None:
    table = 1 + torch.arange(24, dtype=torch.int32).view(3, 8)
    batch = CommonAttentionMetadata.from_lengths([1, 4, 9], [20, 30, 9], table, 16)
    own = rows_of(batch, 1, 3, 1, 14)
    assert own.query_start_loc.tolist() == own.query_start_loc_cpu.tolist() == [0, 4, 13]
    assert own.seq_lens.tolist() == [30, 9]
    assert torch.equal(own.slot_mapping, batch.slot_mapping[1:])
    assert (own.num_reqs, own.num_actual_tokens, own.max_query_len) == (2, 13, 9)
    assert batch.query_start_loc.tolist() == [0, 1, 5, 14]


def test_decodes_are_captured_by_the_decode_builder() -> None:
    table = 1 + torch.arange(16, dtype=torch.int32).view(2, 8)
    batch = CommonAttentionMetadata.from_lengths([1, 1], [41, 7], table, 16)
    with emulated(H200, NEW):
        builder = MIXED.get_builder_cls()(SPEC, [], CONFIG, "cpu")
        level = builder.get_cudagraph_support(CONFIG, SPEC)
        record = builder.build_for_cudagraph_capture(batch)
    assert level is AttentionCGSupport.UNIFORM_BATCH
    assert record.prefill is None
    assert record.decode.decode.kv_lens.tolist() == [41, 7]
