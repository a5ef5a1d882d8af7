"""FLASHINFER's plans: kernels, page lists, graphs, refusals, and no wait for the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn.impls.base import LayerScales
from attn.impls.vendor.flashinfer import FlashInferImpl
from builders.batch import CommonAttentionMetadata
from builders.drafts.advance import advance
from builders.pages.paging import block_table_to_csr
from builders.splitkv.tiles import DenseShape
from builders.vendor.flashinfer import DecodeRows, FlashInferMetadataBuilder, PrefillRows
from builders.vendor.flashinfer_parts.choice import (
    WrapperKernel,
    decode_kernel_of,
    prefill_kernel_of,
)
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig
from specs.kv_cache import (
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from tests.emulators.flashinfer_emulator import (
    VERSIONS,
    MadeOnDevice,
    OnDevice,
    emulated,
    on_device,
)

P = 16
SPEC = FullAttentionSpec(block_size=P, dtype=DType.FLOAT16, num_kv_heads=2, head_size=64)
WINDOW = SlidingWindowSpec(**SPEC.model_dump(exclude={"kind", "dcp_sharded"}), sliding_window=20)
CONFIG = EngineConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=128, num_heads=8)
SHAPE = DenseShape(8, 2, 64, 64, itemsize=2, stored_bits=16)


@pytest.fixture(autouse=True, params=VERSIONS)
def flashinfer(request: pytest.FixtureRequest) -> Iterator[None]:
    with emulated(request.param):
        yield


def builder_of(spec: Any = SPEC, **settings: Any) -> FlashInferMetadataBuilder:
    return FlashInferMetadataBuilder(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def batch_of(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    columns = max(-(-length // P) for length in [*seq_lens, 1])
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, P)


# -- Which kernel.


@pytest.mark.parametrize(
    ("changes", "kind", "tokens", "reqs", "kernel", "reason"),
    [
        ({}, DeviceKind.SM90, 640, 10, "fa3", "640 tokens in 10 requests"),
        ({}, DeviceKind.SM90, 160, 10, "fa3", "fill tiles of fa3"),
        ({}, DeviceKind.SM90, 159, 10, "fa2", "fewer than 16 each"),
        ({}, DeviceKind.SM80, 640, 10, "fa2", "the device is sm80"),
        ({}, DeviceKind.SM100, 640, 10, "fa2", "the device is sm100"),
        ({"stored_bits": 8}, DeviceKind.SM90, 640, 10, "fa2", "keys of the query's type"),
    ],
)
def test_the_kernel_of_prefills_follows_from_shape_and_device(
    changes: dict[str, Any], kind: DeviceKind, tokens: int, reqs: int, kernel: str, reason: str
) -> None:
    choice = prefill_kernel_of(dataclasses.replace(SHAPE, **changes), kind, tokens, reqs)
    assert choice.kernel is WrapperKernel(kernel)
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("heads", "stored_bits", "tensor_cores"),
    [(2, 16, False), (6, 16, False), (8, 16, True), (14, 16, True), (2, 8, True)],
)
def test_decodes_take_tensor_cores_where_heads_fill_a_tile(
    heads: int, stored_bits: int, tensor_cores: bool
) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=heads, stored_bits=stored_bits)
    choice = decode_kernel_of(shape)
    assert (choice.kernel, choice.use_tensor_cores) == (WrapperKernel.FA2, tensor_cores)
    assert choice.reason


def test_the_plan_says_which_kernel_and_why() -> None:
    record = builder_of().build(0, batch_of([1, 1, 40], [30, 5, 60]))
    assert isinstance(record.decode, DecodeRows)
    assert isinstance(record.prefill, PrefillRows)
    assert record.prefill.choice.kernel is WrapperKernel.FA3
    assert "40 tokens in 1 requests" in record.prefill.choice.reason
    assert record.prefill.wrapper.backend == "fa3"
    assert record.decode.wrapper.backend == "fa2"


# -- Split and page lists.


@pytest.mark.parametrize(
    ("query_lens", "decodes", "prefill_tokens"),
    [
        ([1, 1, 1], 3, 0),
        ([1, 1, 5, 7], 2, 12),
        ([4, 4], 0, 8),
        ([1, 0, 1, 5], 1, 6),
        ([1, 1, 0, 0], 2, 0),
        ([0, 0], 0, 0),
    ],
)
def test_rows_of_one_token_come_first(
    query_lens: list[int], decodes: int, prefill_tokens: int
) -> None:
    record = builder_of().build(0, batch_of(query_lens, [20] * len(query_lens)))
    assert (record.decode.num_tokens if record.decode else 0) == decodes
    assert (record.prefill.num_tokens if record.prefill else 0) == prefill_tokens
    if record.prefill is not None:
        assert record.prefill.first_token == decodes
    assert record.num_actual_tokens == sum(query_lens)


def test_a_window_lists_no_block_before_it() -> None:
    # The first of 4 queries at position 96 sees keys from 77 on: pages 4 and later.
    record = builder_of(WINDOW).build(0, batch_of([1, 4], [40, 100]))
    assert record.decode is not None
    assert record.prefill is not None
    assert record.decode.indices[:2].tolist() == [2, 3]
    assert record.prefill.indices[:3].tolist() == [12, 13, 14]
    assert record.prefill.wrapper.planned["window_left"] == 19
    assert record.prefill.wrapper.planned["last"].tolist() == [4]


def test_csr_lists_can_leave_leading_pages_out() -> None:
    table = torch.tensor([[5, 6, 7, -9], [8, 9, -9, -9], [3, -9, -9, -9]], dtype=torch.int32)
    lens, skipped = (torch.tensor(x, dtype=torch.int32) for x in ([40, 20, 16], [1, 0, 1]))
    pages = block_table_to_csr(table, lens, 16, skipped)
    assert pages.indptr.tolist() == [0, 2, 4, 4]
    assert pages.indices[:4].tolist() == [6, 7, 8, 9]
    assert pages.last_page_len.tolist() == [8, 4, 0]


def test_a_common_prefix_is_planned_once_for_all() -> None:
    batch = batch_of([1, 3], [40, 50])
    table = batch.block_table_tensor.clone()
    table[:, :2] = table[0, :2]
    record = builder_of().build(32, batch.replace(block_table_tensor=table))
    shared = record.shared
    assert shared is not None
    assert record.decode is None
    assert record.prefill is None
    assert shared.prefix.indices.tolist() == table[0, :2].tolist()
    assert not shared.prefix.wrapper.planned["causal"]
    assert shared.own.wrapper.planned["seq_lens"].tolist() == [8, 18]
    assert shared.outputs.shape == (2, 4, 8, 64)


# -- Graphs.


def test_graphs_replay_padded_batches_in_place() -> None:
    builder = builder_of()
    captured = builder.build_for_cudagraph_capture(batch_of([1] * 4, [1] * 4))
    assert captured.decode is not None
    address = captured.decode.indices.data_ptr()
    batch = batch_of([1, 1, 1, 0], [33, 5, 16, 0])
    record = builder.build(0, batch)
    assert record.decode is not None
    assert record.decode.wrapper is captured.decode.wrapper
    assert record.decode.indices.data_ptr() == address
    assert record.decode.wrapper.planned["kv"].tolist() == [0, 3, 4, 5, 5]
    assert record.decode.num_tokens == 4
    eager = builder.build(0, batch_of([1, 1, 1], [33, 5, 16]))
    assert eager.decode is not None
    assert eager.decode.wrapper is not captured.decode.wrapper
    assert eager.decode.num_tokens == 3


def test_verifies_have_graphs_of_their_own() -> None:
    builder = builder_of()
    captured = builder.build_for_cudagraph_capture(batch_of([4] * 3, [4] * 3))
    assert captured.prefill is not None
    assert captured.prefill.choice.kernel is WrapperKernel.FA2
    record = builder.build(0, batch_of([4, 4, 0], [30, 17, 0]))
    assert record.prefill is not None
    assert record.prefill.wrapper is captured.prefill.wrapper
    assert record.prefill.num_tokens == 8


def test_a_batch_of_several_lengths_is_not_captured() -> None:
    with pytest.raises(ValueError, match=r"same number of tokens, got \[1, 2\] of 3"):
        builder_of().build_for_cudagraph_capture(batch_of([1, 2], [3, 3]))


# -- Values that the host never waits for.


@pytest.mark.parametrize("spec", [SPEC, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("prefix", [0, P])
def test_build_reads_no_device_value(spec: Any, prefix: int) -> None:
    batch = batch_of([1, 1, 4], [40, 33, 50])
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    uniform = batch_of([1, 1], [40, 33])
    given, captured = (
        one.replace(**{name: on_device(getattr(one, name)) for name in names})
        for one in (batch, uniform)
    )
    builder = builder_of(spec)
    with MadeOnDevice():
        record = builder.build(prefix, given)
        builder.update_block_table(record, given.block_table_tensor + 1, given.slot_mapping)
        builder.build_for_cudagraph_capture(captured)
        builder.build(0, captured)
    parts = [record.decode, record.prefill, *(vars(record.shared or record).values())]
    planned = [part for part in parts if isinstance(part, DecodeRows | PrefillRows)]
    assert planned
    assert all(isinstance(part.indices, OnDevice) for part in planned)


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "nonzero", "__bool__", "__int__"])
def test_the_stand_in_for_device_tensors_sees_every_read(read: str) -> None:
    one = on_device(torch.ones(1)) + 1
    with pytest.raises(AssertionError, match="waits for the GPU"):
        getattr(one, read)()


# -- Refusals.


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (SPEC, {"num_heads": None}, "num_heads is needed"),
        (SPEC, {"num_heads": 7}, r"num_heads \(7\) must be a multiple .* \(2\)"),
        (SPEC, {"exact_host_lengths": False}, r"exact_host_lengths must be True.*got False"),
        (SPEC, {"batch_invariant": True}, "batch_invariant must be False"),
        (
            SPEC,
            {"parallel": ParallelConfig(decode_context_parallel_size=2)},
            "decode_context_parallel_size must be 1.*got 2",
        ),
        (SPEC.replace(head_size=80), {}, "head_size must be one of 64, 128, 256.*got 80"),
        (SPEC.replace(head_size_v=128), {}, r"head_size_v must be head_size \(64\).*got 128"),
        (SPEC.replace(block_size=8), {}, "block_size must be a multiple of 16.*got 8"),
        (SPEC.replace(dtype=DType.FLOAT32), {}, "model dtype must be one of.*float32"),
        (
            SPEC.replace(cache_dtype=CacheDType.BFLOAT16),
            {},
            r"kv_cache_dtype must be the model's dtype \(torch.float16\).*'bfloat16'",
        ),
        (
            SPEC.replace(cache_dtype=CacheDType.INT8_PER_TOKEN_HEAD),
            {},
            "kv_cache_dtype must be one of .*int8_per_token_head",
        ),
        (
            CrossAttentionSpec(block_size=P, num_kv_heads=2, head_size=64, dtype=DType.FLOAT16),
            {},
            "full or sliding-window attention.*CrossAttentionSpec",
        ),
    ],
)
def test_a_group_that_is_not_served_is_refused(
    spec: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of(spec, **settings)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seq_lens_cpu_upper_bound": None}, ValueError, "seq_lens_cpu_upper_bound is needed"),
        (
            {"seq_lens_cpu_upper_bound": torch.tensor([20, 3], dtype=torch.int32)},
            ValueError,
            r"seq_lens_cpu_upper_bound\[1\] must be at least the query length 4, got 3",
        ),
        (
            {"seq_lens_cpu_upper_bound": torch.tensor([20, 90], dtype=torch.int32)},
            ValueError,
            "up to 90 needs 6 blocks of 16, block_table_tensor has 2 columns",
        ),
        (
            {"seq_lens_cpu_upper_bound": torch.tensor([20], dtype=torch.int32)},
            ValueError,
            r"at least num_reqs \(2\) and num_reqs \+ 1 elements, got 1 and 3",
        ),
        ({"causal": False}, NotImplementedError, "causal=False"),
        ({"mm_req_doc_ranges": {0: [(1, 2)]}}, NotImplementedError, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.ones(2)}, NotImplementedError, "rswa_prefix_lens"),
        ({"dcp_local_seq_lens": torch.ones(2)}, NotImplementedError, "dcp_local_seq_lens"),
    ],
)
def test_a_batch_that_cannot_be_planned_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    batch = batch_of([1, 4], [20, 30])
    with pytest.raises(error, match=message):
        builder_of().build(0, batch.replace(**changes))


def test_a_batch_of_too_many_requests_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_reqs \(9\) exceeds max_num_seqs \(8\)"):
        builder_of().build(0, batch_of([1] * 9, [20] * 9))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [(8, r"multiple of block_size \(16\).*got 8"), (32, "computed tokens.*got 32 and 19")],
)
def test_a_wrong_common_prefix_is_refused(prefix: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder_of().build(prefix, batch_of([1, 4], [20, 30]))


def test_draft_steps_are_refused_with_the_reason() -> None:
    step = advance(batch_of([1, 1], [20, 30]), P, 512)
    with pytest.raises(NotImplementedError, match=r"draft step 1.*not exact"):
        builder_of().build_for_drafting(step, 1)


def test_debugging_compares_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    batch = batch_of([1, 4], [20, 30])
    builder_of().build(0, batch)
    bound = torch.tensor([21, 30], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"bound\[0\] must be exact.*got 21 for the device's 20"):
        builder_of().build(0, batch.replace(seq_lens_cpu_upper_bound=bound))


def impl_of(**changes: Any) -> FlashInferImpl:
    given: dict[str, Any] = {
        **{"num_heads": 8, "head_size": 64, "scale": 0.125, "num_kv_heads": 2},
        **changes,
    }
    return FlashInferImpl(**given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"head_size": 96}, ValueError, "head_size must be one of"),
        ({"head_size_v": 128}, ValueError, r"head_size_v must be head_size \(64\).*128"),
        ({"sinks": torch.zeros(8)}, NotImplementedError, "sinks"),
        ({"alibi_slopes": [0.5] * 8}, NotImplementedError, "alibi_slopes"),
        ({"attention_chunk_size": 32}, NotImplementedError, "attention_chunk_size"),
        ({"attn_type": "encoder_only"}, NotImplementedError, "attn_type.*encoder_only"),
        ({"kv_cache_dtype": "int8_per_token_head"}, ValueError, "kv_cache_dtype must be one of"),
    ],
)
def test_a_layer_that_is_not_served_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        impl_of(**changes)


def step_of(
    impl: FlashInferImpl, spec: Any = SPEC, dtype: torch.dtype = torch.float16, **settings: Any
) -> Any:
    """A forward over a small cache, as a function of changed arguments."""
    record = builder_of(spec, **settings).build(0, batch_of([1, 4], [20, 30]))
    cache = spec.layout().allocate(num_blocks=8).zero_()
    tensors = {
        "layer": LayerScales.of(k=0.5, v=2.0),
        "query": torch.zeros(5, 8, 64, dtype=dtype),
        "kv_cache": cache,
        "attn_metadata": record,
        "output": torch.full((5, 8, 64), float("nan"), dtype=dtype),
    }

    def forward(**changes: Any) -> torch.Tensor:
        return impl.forward(key=None, value=None, **{**tensors, **changes})

    return forward


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"num_heads": 4}, r"num_heads of the layer .* \(8\), got 4"),
        ({"sliding_window": 7}, r"sliding_window of the layer .* \(None\), got 7"),
        ({"logits_soft_cap": 30.0}, r"logits_soft_cap of the layer .* \(None\), got 30.0"),
    ],
)
def test_a_step_planned_for_another_layer_is_refused(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(impl_of(**layer))()


def test_a_step_with_the_layers_soft_cap_is_run() -> None:
    output = step_of(impl_of(logits_soft_cap=30.0), logits_soft_cap=30.0)()
    # Queries of zeros weigh every key alike, whatever the soft cap; a cache of zeros gives zeros.
    assert output.shape == (5, 8, 64)
    assert not output.any()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": torch.zeros(4, 8, 64).half()}, ValueError, r"query .* \(5\) rows, got 4"),
        ({"query": torch.zeros(5, 8, 64)}, ValueError, "query and output must be torch.float16"),
        (
            {"output": torch.zeros(5, 64, 8).half().transpose(1, 2)},
            ValueError,
            "output must be contiguous, got strides",
        ),
        (
            {"output_lse": torch.zeros(8, 5).T},
            ValueError,
            "output_lse must be contiguous, got strides",
        ),
        ({"output_scale": torch.ones(())}, NotImplementedError, "output_scale"),
        (
            {"kv_cache": SPEC.replace(block_size=32).layout().allocate(8)},
            ValueError,
            "blocks of 16",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_step_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        step_of(impl_of())(**changes)


FP8 = SPEC.replace(cache_dtype=CacheDType.FP8)


def test_scales_are_read_once_a_layer_and_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = []
    read = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or read(self))
    forward = step_of(impl_of(kv_cache_dtype="fp8"), FP8)
    for _ in range(3):
        forward()
    assert len(reads) == 2
    scales = LayerScales.of(k=0.5, v=2.0)
    forward(layer=scales)
    forward(layer=scales)
    assert len(reads) == 4
    scales._k_scale.fill_(0.25)
    forward(layer=scales)
    assert len(reads) == 5


def test_scales_that_a_layer_has_on_the_host_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.Tensor) -> float:
        raise AssertionError("read")

    monkeypatch.setattr(torch.Tensor, "__float__", refuse)
    layer: Any = LayerScales.of(k=0.5, v=2.0)
    layer._k_scale_float, layer._v_scale_float = 0.5, 2.0
    output = step_of(impl_of(kv_cache_dtype="fp8"), FP8)(layer=layer)
    assert not output.any()


def test_scales_per_head_are_refused() -> None:
    layer = LayerScales(torch.ones(()), torch.ones(2), torch.ones(()))
    with pytest.raises(ValueError, match=r"_k_scale must be a float32 scalar.*\[2\]"):
        step_of(impl_of(kv_cache_dtype="fp8"), FP8)(layer=layer)
