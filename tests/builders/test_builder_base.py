"""Every builder makes one record per step, writes nothing on the batch, and takes vLLM's own."""

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.registry import AttentionBackendEnum
from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from builders.dense.torch_ref import TorchRefMetadataBuilder
from builders.latent.torch_ref_mla import (
    TorchRefMLAMetadataBuilder,
    TorchRefSparseMLAMetadataBuilder,
)
from specs.attention import AttentionCGSupport
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
)
from tests.builders.test_common import IN_BOTH_VERSIONS, make_batch, same, stand_in_for_vllm

CONFIG = EngineConfig(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, num_heads=4)
DENSE = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
# Two decodes, a short extend, a long one, a prefill, a padding row.
QUERY_LENS = (1, 1, 2, 6, 5, 0)
SEQ_LENS = (9, 33, 6, 30, 5, 0)


def spec_of(backend: type[AttentionBackend]) -> AnyKVCacheSpec:
    """Spec of a layer that the backend serves, with a block size that its kernel takes."""
    block_size = backend.get_preferred_block_size(16)
    dtype = backend.capabilities.dtypes[0]
    if backend.is_mla():
        topk = 16 if backend.is_sparse() else None
        return MLAAttentionSpec(block_size=block_size, dtype=dtype, topk=topk)
    head_size = next(size for size in (128, 64, 256) if backend.supports_head_size(size))
    return FullAttentionSpec(
        block_size=block_size, dtype=dtype, num_kv_heads=2, head_size=head_size
    )


def builder_of(name: str) -> AttentionMetadataBuilder[Any]:
    """The builder of a registered backend; skips where the backend's packages are missing."""
    member = AttentionBackendEnum[name]
    if member.missing():
        pytest.skip(f"{name} needs {', '.join(member.missing())}")
    backend = member.get_class()
    if "flashinfer" in member.row.requires:
        pytest.skip(f"{name} calls FlashInfer, which emulators of other tests stand in for")
    return backend.get_builder_cls()(spec_of(backend), ["layers.0"], CONFIG, "cpu")


def batch_for(builder: AttentionMetadataBuilder[Any]) -> CommonAttentionMetadata:
    """A mixed batch in blocks of the builder's layer; unused table entries are out of range."""
    return make_batch(QUERY_LENS, SEQ_LENS, builder.kv_cache_spec.block_size)


def contents(value: Any) -> Any:
    """All contents of a record as values that can be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: contents(getattr(value, field.name)) for field in fields}
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return value


def unchanged(batch: CommonAttentionMetadata, before: CommonAttentionMetadata) -> list[str]:
    """Names of the fields that differ; [] when nothing was written."""
    names = [field.name for field in dataclasses.fields(CommonAttentionMetadata)]
    return [name for name in names if not same(getattr(batch, name), getattr(before, name))]


every_backend = pytest.mark.parametrize("name", [member.name for member in AttentionBackendEnum])


# -- Every registered builder.


@every_backend
def test_the_batch_is_not_written_and_the_record_carries_its_slots(name: str) -> None:
    builder = builder_of(name)
    batch = batch_for(builder)
    before = copy.deepcopy(batch)
    records = [
        builder.build(0, batch),
        builder.build(common_prefix_len=0, common_attn_metadata=batch, fast_build=True),
        builder.build_for_cudagraph_capture(batch),
        builder.build_for_drafting(batch, 0),
        builder.build_for_drafting(batch, draft_index=1),
    ]
    assert unchanged(batch, before) == []
    for record in records:
        assert isinstance(record, AttentionMetadata)
        assert torch.equal(record.slot_mapping[: batch.num_actual_tokens], batch.slot_mapping)


@every_backend
def test_vllms_own_batch_gives_the_same_record(name: str) -> None:
    builder = builder_of(name)
    batch = batch_for(builder)
    expected = contents(builder.build(0, batch))
    stale = torch.full((len(SEQ_LENS),), -99)
    other = stand_in_for_vllm(
        batch, IN_BOTH_VERSIONS, _num_computed_tokens_cache=stale, _token_to_req_indices_cache=stale
    )
    before = copy.deepcopy(other)
    assert contents(builder.build(0, other)) == expected
    assert contents(builder.build_for_drafting(other, 0)) == contents(
        builder.build_for_drafting(batch, 0)
    )
    for attribute in vars(before):
        assert same(getattr(other, attribute), getattr(before, attribute)), attribute


@every_backend
def test_a_new_block_table_gives_the_record_of_a_batch_with_that_table(name: str) -> None:
    builder = builder_of(name)
    if not builder.supports_update_block_table:
        pytest.skip(f"{name} rebuilds instead")
    batch = batch_for(builder)
    other = batch.replace(
        block_table_tensor=batch.block_table_tensor + 7, slot_mapping=batch.slot_mapping + 100
    )
    expected = contents(builder.build(0, other))
    record = builder.build(0, batch)
    added = object()
    record.added_by_a_wrapper = added  # type: ignore[attr-defined]
    before = contents(record)
    updated = builder.update_block_table(record, other.block_table_tensor, other.slot_mapping)
    assert contents(updated) == expected
    assert type(updated) is type(record)
    assert updated.added_by_a_wrapper is added
    assert updated is not record
    assert contents(record) == before
    assert before != expected


@every_backend
def test_a_batch_without_requests_has_a_record(name: str) -> None:
    builder = builder_of(name)
    batch = make_batch((), (), builder.kv_cache_spec.block_size)
    assert builder.build(0, batch).slot_mapping.shape == (0,)


@every_backend
def test_builders_have_vllms_arguments(name: str) -> None:
    cls = type(builder_of(name))
    expected = {
        "__init__": ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"],
        "build": ["self", "common_prefix_len", "common_attn_metadata", "fast_build"],
        "build_for_cudagraph_capture": ["self", "common_attn_metadata"],
        "build_for_drafting": ["self", "common_attn_metadata", "draft_index"],
        "get_cudagraph_support": ["vllm_config", "kv_cache_spec"],
    }
    found = {
        method: list(inspect.signature(getattr(cls, method)).parameters) for method in expected
    }
    assert found == expected
    assert inspect.signature(cls.build).parameters["fast_build"].default is False


@every_backend
def test_graph_support_of_the_builder_is_at_most_what_the_backend_declares(name: str) -> None:
    builder = builder_of(name)
    declared = AttentionBackendEnum[name].get_class().cudagraph_support()
    assert builder.get_cudagraph_support(CONFIG, builder.kv_cache_spec) <= declared


@every_backend
def test_builders_can_be_subclassed_as_vllms_wrappers_do(name: str) -> None:
    builder = builder_of(name)
    cls: Any = type(builder)

    class Wrapper(cls):
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            batch = common_attn_metadata.replace(max_seq_len=4096)
            record = super().build(common_prefix_len, batch, fast_build)
            record.wrapped = True
            return record

    wrapper = Wrapper(builder.kv_cache_spec, ["layers.0"], CONFIG, torch.device("cpu"))
    assert wrapper.build_for_drafting(batch_for(builder), 0).wrapped
    assert wrapper.build_for_cudagraph_capture(batch_for(builder)).wrapped


# -- The base.


@dataclasses.dataclass
class _Record(AttentionMetadata):
    block_table: torch.Tensor
    calls: tuple[int, bool]


class _Builder(AttentionMetadataBuilder[_Record]):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> _Record:
        batch = common_attn_metadata
        calls = (common_prefix_len, fast_build)
        return _Record(batch.slot_mapping, batch.block_table_tensor, calls)


def test_a_builder_keeps_what_it_was_given() -> None:
    builder = _Builder(DENSE, ("a", "b"), CONFIG, "cpu")
    assert builder.kv_cache_spec is DENSE
    assert builder.layer_names == ["a", "b"]
    assert builder.vllm_config is CONFIG
    assert builder.device == torch.device("cpu")


def test_defaults_promise_no_graphs_and_no_order() -> None:
    assert _Builder.get_cudagraph_support(CONFIG, DENSE) is AttentionCGSupport.NEVER
    assert _Builder.reorder_batch_threshold is None
    assert _Builder.supports_update_block_table


def test_capture_builds_in_full_and_drafting_builds_fast() -> None:
    builder = _Builder(DENSE, [], CONFIG, "cpu")
    batch = make_batch()
    assert builder.build(5, batch).calls == (5, False)
    assert builder.build_for_cudagraph_capture(batch).calls == (0, False)
    assert builder.build_for_drafting(batch, 3).calls == (0, True)


def test_the_base_cannot_be_built_without_build() -> None:
    with pytest.raises(TypeError, match="build"):
        AttentionMetadataBuilder(DENSE, [], CONFIG, "cpu")  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("threshold", "verify_rows_decode", "num_speculative_tokens", "expected"),
    [
        (1, False, None, 1),
        (1, True, None, 1),
        (1, False, 3, 1),
        (1, True, 3, 4),
        (8, True, 3, 8),
        (None, True, 3, None),
    ],
)
def test_verify_rows_raise_the_decode_threshold_where_the_kernel_takes_them(
    threshold: int | None,
    verify_rows_decode: bool,
    num_speculative_tokens: int | None,
    expected: int | None,
) -> None:
    speculative = (
        None
        if num_speculative_tokens is None
        else SpeculativeConfig(num_speculative_tokens=num_speculative_tokens)
    )
    builder = _Builder(DENSE, [], CONFIG.replace(speculative=speculative), "cpu")
    builder._init_reorder_batch_threshold(threshold, verify_rows_decode)
    assert builder.reorder_batch_threshold == expected
    assert _Builder.reorder_batch_threshold is None


# -- The reference's records.


def test_the_dense_reference_reads_exact_lengths() -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS).replace(
        # Host values that an asynchronous engine may have wrong.
        seq_lens_cpu_upper_bound=torch.full((6,), 99, dtype=torch.int32),
        max_seq_len=99,
        rswa_prefix_lens=torch.arange(6, dtype=torch.int32),
        mm_req_doc_ranges={3: [(1, 2)]},
        causal=torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.int32),
    )
    config = CONFIG.replace(exact_host_lengths=False, rswa_window=4)
    record = TorchRefMetadataBuilder(DENSE, [], config, "cpu").build(8, batch)
    assert record.kv_lens == list(SEQ_LENS)
    assert record.query_starts == [0, 1, 2, 4, 10, 15, 15]
    assert record.causal == [True, False, True, True, False, True]
    assert record.rswa_prefix_lens == [0, 1, 2, 3, 4, 5]
    assert record.rswa_window == 4
    assert record.mm_ranges == {3: [(1, 2)]}
    assert record.common_prefix_len == 8
    assert record.num_actual_tokens == 15


@pytest.mark.parametrize("causal", [True, False])
def test_one_causal_flag_holds_for_every_request(causal: bool) -> None:
    batch = make_batch().replace(causal=causal)
    record = TorchRefMetadataBuilder(DENSE, [], CONFIG, "cpu").build(0, batch)
    assert record.causal == [causal] * 4
    assert record.mm_ranges == {}
    assert record.rswa_prefix_lens is None


def test_cross_attention_is_not_causal_and_has_the_encoders_lengths() -> None:
    spec = CrossAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
    builder = TorchRefMetadataBuilder(spec, [], CONFIG, "cpu")
    batch = make_batch()
    assert builder.build(0, batch).kv_lens == batch.seq_lens.tolist()
    encoder = torch.tensor([2, 9, 3, 0], dtype=torch.int32)
    record = builder.build(0, batch.replace(encoder_seq_lens=encoder))
    assert record.kv_lens == [2, 9, 3, 0]
    assert record.seq_lens is encoder
    assert record.causal == [False] * 4


def test_encoders_are_not_causal() -> None:
    spec = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=2, head_size=8)
    record = TorchRefMetadataBuilder(spec, [], CONFIG, "cpu").build(0, make_batch())
    assert record.causal == [False] * 4


LATENT = MLAAttentionSpec(block_size=4)


@pytest.mark.parametrize(
    ("num_speculative_tokens", "decodes", "decode_tokens"), [(None, 2, 2), (1, 3, 4), (5, 6, 15)]
)
def test_the_latent_reference_splits_the_batch_after_the_verify_rows(
    num_speculative_tokens: int | None, decodes: int, decode_tokens: int
) -> None:
    speculative = (
        None
        if num_speculative_tokens is None
        else SpeculativeConfig(num_speculative_tokens=num_speculative_tokens)
    )
    config = CONFIG.replace(speculative=speculative)
    batch = make_batch(QUERY_LENS, SEQ_LENS)
    record = TorchRefMLAMetadataBuilder(LATENT, [], config, "cpu").build(0, batch)
    assert (record.num_decodes, record.num_prefills) == (decodes, 6 - decodes)
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (
        decode_tokens,
        15 - decode_tokens,
    )
    starts = [0, 1, 2, 4, 10, 15, 15]
    assert record.decode is not None
    assert record.decode.query_starts == starts[: decodes + 1]
    assert record.decode.kv_lens == list(SEQ_LENS[:decodes])
    assert torch.equal(record.decode.block_table, batch.block_table_tensor[:decodes])
    assert (record.prefill is None) == (decodes == 6)
    if record.prefill is not None:
        assert record.prefill.query_starts == [at - decode_tokens for at in starts[decodes:]]
        assert record.prefill.kv_lens == list(SEQ_LENS[decodes:])
        assert torch.equal(record.prefill.block_table, batch.block_table_tensor[decodes:])


def test_a_batch_of_prefills_has_no_decode_part() -> None:
    builder = TorchRefMLAMetadataBuilder(LATENT, [], CONFIG, "cpu")
    batch = make_batch((3, 6), (3, 14))
    record = builder.build(0, batch)
    assert record.decode is None
    assert record.prefill is not None
    assert record.prefill.query_starts == [0, 3, 9]
    table = batch.block_table_tensor + 3
    updated = builder.update_block_table(record, table, batch.slot_mapping)
    assert updated.decode is None
    assert updated.prefill is not None
    assert torch.equal(updated.prefill.block_table, table)


def test_the_sparse_reference_decodes_every_row() -> None:
    builder = TorchRefSparseMLAMetadataBuilder(LATENT, [], CONFIG, "cpu")
    batch = make_batch(QUERY_LENS, SEQ_LENS)
    record = builder.build(0, batch)
    assert (record.num_decodes, record.num_prefills, record.prefill) == (6, 0, None)
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (15, 0)
    table = batch.block_table_tensor + 3
    updated = builder.update_block_table(record, table, batch.slot_mapping)
    assert updated.decode is not None
    assert torch.equal(updated.decode.block_table, table)
