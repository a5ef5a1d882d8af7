"""FLASHINFER_MLA's builder: it reads nothing back; its refusals; the selector's verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn.errors import UnsupportedError
from attn.registry import AttentionBackendEnum
from attn.selector import Verdict, explain, select
from builders.batch import CommonAttentionMetadata
from builders.latent.rows import flag_keyless
from builders.vendor.flashinfer_mla import FlashInferMlaMetadataBuilder
from specs.attention import AttentionSelectorConfig
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device
from tests.emulators.flashinfer_mla_emulator import VERSIONS, emulated

P = 16
SPEC = MLAAttentionSpec(block_size=P, dtype=DType.BFLOAT16)
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_heads=3,
    softmax_scale=192**-0.5,
    speculative=SpeculativeConfig(num_speculative_tokens=1),
)
ASKED = AttentionSelectorConfig(head_size=576, dtype=DType.BFLOAT16, use_mla=True)


@pytest.fixture(autouse=True, params=VERSIONS)
def flashinfer(request: pytest.FixtureRequest) -> Iterator[None]:
    with emulated(request.param):
        yield


def builder_of(spec: Any = SPEC, **settings: Any) -> FlashInferMlaMetadataBuilder:
    return FlashInferMlaMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def batch_of(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    columns = max(-(-length // P) for length in [*seq_lens, 1])
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, P)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of([1, 2, 2], [40, 33, 2]),
        batch_of([1, 0, 2, 9], [40, 33, 7, 30]),
        batch_of([2, 2, 0], [40, 33, 0]),
        batch_of([1, 9], [17, 90]),
    ],
    ids=["decodes", "mixed", "padding", "context"],
)
def test_a_build_reads_nothing_back(batch: CommonAttentionMetadata) -> None:
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    given, captured = (
        one.replace(**{name: on_device(getattr(one, name)) for name in names})
        for one in (batch, batch_of([2, 2, 2], [40, 33, 16]))
    )
    builder = builder_of()
    with MadeOnDevice():
        record = builder.build(0, given)
        builder.update_block_table(record, given.block_table_tensor + 1, given.slot_mapping)
        builder.build_for_cudagraph_capture(captured)
        builder.build(0, captured)
        builder.build(0, given)
    assert record.decode is not None
    assert isinstance(record.decode.indices, OnDevice)


def test_rows_that_nobody_owns_are_flagged() -> None:
    starts = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)
    lens = torch.tensor([9, 0, 0, 7], dtype=torch.int32)
    out = torch.zeros(7, dtype=torch.bool)
    assert flag_keyless(starts, lens, out) is out
    assert out.tolist() == [False, False, True, False, False, True, True]
    assert flag_keyless(starts[:1], lens[:0], out).all()


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (SPEC, {"num_heads": None}, "num_heads is needed"),
        (SPEC, {"num_heads": 129}, "num_heads must be at most 128.*got 129"),
        (SPEC, {"softmax_scale": None}, "softmax_scale is needed.*got None"),
        (SPEC, {"exact_host_lengths": False}, "exact_host_lengths must be True.*got False"),
        (SPEC, {"batch_invariant": True}, "batch_invariant must be False"),
        (
            SPEC,
            {"parallel": ParallelConfig(decode_context_parallel_size=2)},
            "decode_context_parallel_size must be 1.*got 2",
        ),
        (SPEC.replace(kv_lora_rank=64), {}, "kv_lora_rank must be one of 128, 256, 512.*got 64"),
        (SPEC.replace(qk_rope_head_dim=32), {}, "qk_rope_head_dim 64.*512 and 32"),
        (
            SPEC.replace(kv_lora_rank=256, cache_dtype=CacheDType.FP8),
            {},
            "kv_lora_rank must be 512.*'fp8'.*got 256",
        ),
        (
            SPEC.replace(dtype=DType.FLOAT16, cache_dtype=CacheDType.FP8),
            {},
            r"model dtype must be torch\.bfloat16.*got torch\.float16",
        ),
        (SPEC.replace(cache_dtype=CacheDType.FLOAT16), {}, "kv_cache_dtype must be the model's"),
        (SPEC.replace(block_size=8), {}, "block_size must be a multiple of 16.*got 8"),
        (SPEC.replace(topk=64), {}, "topk must be None.*got 64"),
        (SPEC, {"num_heads": 128, "max_num_seqs": 4096}, "must take at most 15872 tiles.*16384"),
        (
            FullAttentionSpec(block_size=P, dtype=DType.BFLOAT16, num_kv_heads=1, head_size=64),
            {},
            "must be MLAAttentionSpec.*FullAttentionSpec",
        ),
    ],
)
def test_what_the_wrapper_does_not_serve_is_refused(
    spec: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of(spec, **settings)


def test_batches_that_cannot_be_planned_are_refused() -> None:
    builder, batch = builder_of(), batch_of([1, 1], [40, 33])
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound is needed by FLASHINFER_MLA"):
        builder.build(0, batch.replace(seq_lens_cpu_upper_bound=None))
    with pytest.raises(NotImplementedError, match="causal=False"):
        builder.build(0, batch.replace(causal=False))
    with pytest.raises(NotImplementedError, match=r"draft step 2.*host lengths are not exact"):
        builder.build_for_drafting(batch, 2)
    with pytest.raises(ValueError, match=r"num_reqs \(9\) exceeds max_num_seqs \(8\)"):
        builder.build(0, batch_of([1] * 9, [5] * 9))
    with pytest.raises(ValueError, match=r"same number of tokens, got \[1, 2\]"):
        builder.build_for_cudagraph_capture(batch_of([1, 2], [40, 33]))


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("h200", {"head_size": 192}, None),
        ("h200", {"kv_cache_dtype": CacheDType.FP8}, None),
        ("h200", {"head_size": 128}, "head_size 128: 192, 320, 576"),
        ("h200", {"use_sparse": True}, "sparse not supported"),
        ("h200", {"use_mla": False}, "non-MLA not supported"),
        ("h200", {"use_adaptive_verification": True}, "device-cpu query lens mismatch"),
        ("h200", {"head_size": 320, "kv_cache_dtype": CacheDType.FP8}, "head_size must be 576"),
        ("b200", {"kv_cache_dtype": CacheDType.FP8}, "needs compute capability 9.0.*10.0"),
    ],
)
def test_the_selector_says_what_is_served(
    device: str, changes: dict[str, Any], reason: str | None
) -> None:
    if AttentionBackendEnum["FLASHINFER_MLA"].missing():
        pytest.skip("flashinfer is not installed")
    asked = ASKED.replace(**changes)
    if reason is None:
        assert select(asked, KNOWN_DEVICES[device], "FLASHINFER_MLA").get_name() == "FLASHINFER_MLA"
        return
    with pytest.raises(UnsupportedError, match=reason):
        select(asked, KNOWN_DEVICES[device], "FLASHINFER_MLA")


def test_it_is_chosen_only_by_name_and_says_its_kernel() -> None:
    if AttentionBackendEnum["FLASHINFER_MLA"].missing():
        pytest.skip("flashinfer is not installed")
    h200 = KNOWN_DEVICES["h200"]
    verdicts = {item.name: item for item in explain(ASKED, h200).candidates}
    assert verdicts["FLASHINFER_MLA"].verdict is Verdict.NOT_ASKED
    found = explain(ASKED, h200, "FLASHINFER_MLA")
    chosen = {item.name: item for item in found.candidates}["FLASHINFER_MLA"]
    assert chosen.reasons == ("asked for by name", "decode by fa3: fa3 is made for sm90")
