"""TRTLLM_MLA's builder: it reads nothing back; its refusals; the selector's verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn.errors import UnsupportedError
from attn.registry import AttentionBackendEnum
from attn.selector import Verdict, explain, select
from builders.batch import CommonAttentionMetadata
from builders.vendor.trtllm_mla import WORKSPACE_BYTES, TrtllmMlaMetadataBuilder
from specs.attention import AttentionSelectorConfig, MlaKernel
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels, ParallelConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device
from tests.emulators.trtllm_mla_emulator import VERSIONS, emulated

P = 32
SPEC = MLAAttentionSpec(block_size=P, dtype=DType.BFLOAT16)
CONFIG = EngineConfig(
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    num_heads=16,
    speculative=SpeculativeConfig(num_speculative_tokens=3),
)
ASKED = AttentionSelectorConfig(head_size=576, dtype=DType.BFLOAT16, use_mla=True)
BY_TRITON = ASKED.replace(mla_kernel=MlaKernel.TRITON)


@pytest.fixture(autouse=True, params=VERSIONS)
def flashinfer(request: pytest.FixtureRequest) -> Iterator[None]:
    with emulated(request.param):
        yield


def builder_of(spec: Any = SPEC, **settings: Any) -> TrtllmMlaMetadataBuilder:
    return TrtllmMlaMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def batch_of(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    columns = max(-(-length // P) for length in [*seq_lens, 1])
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, P)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of([1, 2, 4], [40, 33, 4]),
        batch_of([4, 0, 4, 9], [40, 33, 7, 30]),
        batch_of([2, 2, 0], [40, 33, 0]),
        batch_of([1, 9], [17, 90]),
    ],
    ids=["ragged", "mixed", "padding", "context"],
)
def test_a_build_reads_nothing_back(batch: CommonAttentionMetadata) -> None:
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    given, captured = (
        one.replace(**{name: on_device(getattr(one, name)) for name in names})
        for one in (batch.replace(seq_lens_cpu_upper_bound=None), batch_of([2, 2], [40, 33]))
    )
    with MadeOnDevice():
        builder = builder_of()
        record = builder.build(0, given)
        builder.update_block_table(record, given.block_table_tensor + 1, given.slot_mapping)
        builder.build_for_cudagraph_capture(captured)
        kept = builder.build(0, captured)
        builder.update_draft_decode_metadata(kept)
    assert record.decode is not None
    assert isinstance(record.decode.pages, OnDevice)


def test_one_buffer_serves_every_step_and_is_as_wide_as_the_model_is_long() -> None:
    builder = builder_of()
    first = builder.build(0, batch_of([1, 1], [40, 33])).decode
    second = builder.build(0, batch_of([1] * 5, [5] * 5)).decode
    assert first is not None
    assert second is not None
    assert first.pages.shape == (2, 64)
    assert first.pages.data_ptr() == second.pages.data_ptr()
    assert first.max_kv_len == second.max_kv_len == 512
    assert builder.workspace is not None
    assert builder.prefill_workspace is not None
    assert not builder.workspace.any()
    assert builder.workspace.data_ptr() != builder.prefill_workspace.data_ptr()
    assert WORKSPACE_BYTES == 128 << 20


def test_lengths_that_a_draft_changed_are_read_anew() -> None:
    builder, batch = builder_of(), batch_of([1, 1], [31, 64])
    batch = batch.replace(block_table_tensor=torch.tensor([[3, 4, 9], [5, 6, 7]]).int())
    record = builder.build(0, batch)
    assert record.decode is not None
    assert record.decode.pages[:, :3].tolist() == [[3, -1, -1], [5, 6, -1]]
    record.seq_lens.add_(2)
    builder.update_draft_decode_metadata(record)
    assert record.decode.kv_lens.tolist() == [33, 66]
    assert record.decode.pages[:, :3].tolist() == [[3, 4, -1], [5, 6, 7]]


def test_a_draft_model_s_layers_never_prefill() -> None:
    builder = builder_of(skip_prefill=True)
    assert builder.expanded is None
    assert builder.prefill_workspace is None
    assert builder.build(0, batch_of([4, 4], [40, 33])).prefill is None
    with pytest.raises(ValueError, match="at most 4 tokens where TRTLLM_MLA was told skip_prefill"):
        builder.build(0, batch_of([1, 5], [40, 33]))


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (SPEC, {"num_heads": None}, "num_heads is needed"),
        (SPEC, {"num_heads": 96}, "num_heads must be at most 64, or 128.*got 96"),
        (SPEC.replace(block_size=16), {}, "block_size must be 32 or 64, got 16"),
        (SPEC.replace(block_size=128), {}, "block_size must be 32 or 64, got 128"),
        (SPEC.replace(dtype=DType.FLOAT16), {}, "model dtype must be one of torch.bfloat16"),
        (SPEC.replace(cache_dtype=CacheDType.FLOAT16), {}, "kv_cache_dtype must be one of"),
        (SPEC.replace(kv_lora_rank=128), {}, r"one of 512 \+ 64, 256 \+ 64.*got 128 \+ 64"),
        (SPEC.replace(topk=8), {}, "topk must be None, got 8"),
        (SPEC, {"batch_invariant": True}, "batch_invariant must be False"),
        (
            SPEC,
            {"parallel": ParallelConfig(decode_context_parallel_size=2)},
            "decode_context_parallel_size must be 1, got 2",
        ),
        (
            FullAttentionSpec(block_size=P, dtype=DType.BFLOAT16, num_kv_heads=1, head_size=64),
            {},
            "must be MLAAttentionSpec.*FullAttentionSpec",
        ),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(
    spec: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of(spec, **settings)


def test_a_gpu_without_trtllm_gen_is_refused_with_the_way_out() -> None:
    with (
        emulated(device=KNOWN_DEVICES["h200"]),
        pytest.raises(ValueError, match=r'10\.0 to 10\.3, got 9\.0: ask for kernel "triton"'),
    ):
        builder_of()
    with emulated(device=KNOWN_DEVICES["h200"]):
        builder = builder_of(kernels=Kernels.own(rows=MlaKernel.TRITON), num_heads=96)
    assert builder.calls is None
    assert builder.workspace is None


def test_batches_that_cannot_be_taken_are_refused() -> None:
    builder, batch = builder_of(), batch_of([1, 1], [40, 33])
    with pytest.raises(NotImplementedError, match="causal=False"):
        builder.build(0, batch.replace(causal=False))
    with pytest.raises(ValueError, match=r"num_reqs \(9\) exceeds max_num_seqs \(8\)"):
        builder.build(0, batch_of([1] * 9, [5] * 9))
    with pytest.raises(ValueError, match=r"same number of tokens, got \[1, 2\]"):
        builder.build_for_cudagraph_capture(batch_of([1, 2], [40, 33]))


def test_the_selector_takes_it_by_name_and_by_kernel() -> None:
    if AttentionBackendEnum["TRTLLM_MLA"].missing():
        pytest.skip("flashinfer is not installed")
    h200, b200 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["b200"]
    assert select(ASKED, b200, "TRTLLM_MLA").get_name() == "TRTLLM_MLA"
    with pytest.raises(UnsupportedError, match=r"compute capability 9\.0: 10\.0 to 10\.3"):
        select(ASKED, h200, "TRTLLM_MLA")
    assert select(BY_TRITON, h200, "TRTLLM_MLA").get_name() == "TRTLLM_MLA"
    with pytest.raises(UnsupportedError, match="block_size 16: 32, 64"):
        select(BY_TRITON.replace(block_size=16), h200, "TRTLLM_MLA")
    with pytest.raises(UnsupportedError, match="kernel triton not supported"):
        select(BY_TRITON, h200, "FLASHINFER_MLA")


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_the_automatic_choice_never_comes_to_it(device: str) -> None:
    for request in (ASKED, BY_TRITON):
        found = explain(request, KNOWN_DEVICES[device])
        assert found.chosen != "TRTLLM_MLA"
        verdicts = {item.name: item.verdict for item in found.candidates}
        assert verdicts["TRTLLM_MLA"] in (Verdict.NOT_ASKED, Verdict.REFUSED)
