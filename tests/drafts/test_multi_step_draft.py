"""Draft steps of one ``MultiStepDraft`` equal fresh builds, for dense and latent triples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from attn.registry import AttentionBackendEnum
from attn.testing.conformance import contents
from builders.batch import CommonAttentionMetadata
from builders.dense.torch_ref import TorchRefMetadataBuilder
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.drafts.advance import advance
from builders.drafts.multi_step import MultiStepDraft
from builders.latent.torch_ref_mla import (
    TorchRefMLAMetadataBuilder,
    TorchRefSparseMLAMetadataBuilder,
)
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.mixed import MixedMetadataBuilder
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from builders.vendor.flashinfer import FlashInferMetadataBuilder
from builders.vendor.flashinfer_mla import FlashInferMlaMetadataBuilder
from builders.vendor.trtllm_mha import TrtllmMhaMetadataBuilder
from builders.vendor.trtllm_mla import TrtllmMlaMetadataBuilder
from specs.attention import MlaKernel
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.engine import EngineConfig, Kernels
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec
from tests.emulators import (
    flashinfer_emulator,
    flashinfer_mla_emulator,
    trtllm_emulator,
    trtllm_mla_emulator,
)

P, STEPS, REQS = 32, 5, 64
DENSE = FullAttentionSpec(block_size=P, dtype=DType.BFLOAT16, num_kv_heads=2, head_size=64)
LATENT = MLAAttentionSpec(block_size=P, dtype=DType.BFLOAT16)
CONFIG = EngineConfig(
    max_model_len=160,
    max_num_seqs=REQS,
    max_num_batched_tokens=4 * REQS,
    num_heads=4,
    softmax_scale=192**-0.5,
    skip_prefill=True,
)
TRIPLES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "TRITON_ATTN": (TritonAttentionMetadataBuilder, DENSE, {}),
    "TRTLLM_MHA": (TrtllmMhaMetadataBuilder, DENSE, {}),
    "TORCH_REF": (TorchRefMetadataBuilder, DENSE, {}),
    "TRITON_MLA": (TritonMLAMetadataBuilder, LATENT, {}),
    "TRTLLM_MLA": (TrtllmMlaMetadataBuilder, LATENT, {}),
    "TRTLLM_MLA_triton": (
        TrtllmMlaMetadataBuilder,
        LATENT,
        {"kernels": Kernels.own(rows=MlaKernel.TRITON)},
    ),
    "TORCH_REF_MLA": (TorchRefMLAMetadataBuilder, LATENT, {}),
    "SPARSE_MLA": (SparseMLAMetadataBuilder, LATENT.replace(topk=8), {"index_topk": 8}),
    "TORCH_REF_SPARSE_MLA": (
        TorchRefSparseMLAMetadataBuilder,
        LATENT.replace(topk=8),
        {"index_topk": 8},
    ),
    "FLASHINFER": (FlashInferMetadataBuilder, DENSE, {}),
    "FLASHINFER_MLA": (FlashInferMlaMetadataBuilder, LATENT, {}),
}
HOST = ("FLASHINFER", "FLASHINFER_MLA", "TRITON_FLASHINFER")
"""Backends whose builders plan on the host."""


class Mixed(MixedMetadataBuilder):
    prefill_cls = TritonAttentionMetadataBuilder
    decode_cls = FlashInferMetadataBuilder


TRIPLES["TRITON_FLASHINFER"] = (Mixed, DENSE, {})


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(trtllm_emulator.emulated(KNOWN_DEVICES["b200"], "0.7.2.post1"))
        stack.enter_context(trtllm_mla_emulator.emulated("0.7.2.post1"))
        stack.enter_context(flashinfer_mla_emulator.emulated("0.7.2.post1"))
        stack.enter_context(flashinfer_emulator.emulated("0.7.2.post1"))
        yield


def builder_of(name: str) -> Any:
    cls, spec, settings = TRIPLES[name]
    return cls(spec, ["layers.0"], CONFIG.replace(**settings), "cpu")


def verified() -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
    """A verify of four tokens for each of 64 requests, and its refused tokens on device and host.

    Some requests end at the model's limit, and some are padding.
    """
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(4, 161, (REQS,), generator=generator).tolist()
    lens[:4] = [160, 159, 157, 4]
    query_lens = [4] * REQS
    for row in (REQS - 2, REQS - 1):
        query_lens[row] = lens[row] = 0
    table = 1 + torch.randperm(5 * REQS, generator=generator).view(REQS, 5).int()
    batch = CommonAttentionMetadata.from_lengths(query_lens, lens, table, P)
    rejected = torch.randint(0, 4, (REQS,), dtype=torch.int32, generator=generator)
    rejected[:4] = torch.tensor([0, 1, 3, 3])
    return batch, rejected, rejected.clone()


def used(record: Any) -> Any:
    """Contents of a record that decide results, without scratch and host sizes."""
    kept = contents(record)
    kept["planned"] = contents(planned_of(record))
    for name in ("query", "workspace", "counters"):
        if isinstance(kept.get("decode"), dict):
            kept["decode"].pop(name, None)
    return kept


def planned_of(record: Any) -> Any:
    """The arguments with which a record's FlashInfer wrappers were planned."""
    decode = getattr(record, "decode", None)
    parts = decode, getattr(record, "prefill", None), getattr(decode, "decode", None)
    wrappers = [getattr(part, "wrapper", None) for part in parts]
    return [wrapper.planned for wrapper in wrappers if wrapper is not None]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(
            one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)
        )
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", TRIPLES)
def test_steps_equal_fresh_builds(name: str) -> None:
    batch, *rejected = verified()
    draft = MultiStepDraft(builder_of(name), STEPS)
    fresh_batch, addresses = batch, set()
    none = torch.zeros_like(rejected[1])
    for step in range(STEPS):
        record = draft.begin(batch, *rejected) if step == 0 else draft.next()
        counts = (rejected[1] if step == 0 else none) if name in HOST else None
        fresh_batch = advance(fresh_batch, P, 160, None if step else rejected[0], counts)
        fresh_batch = fresh_batch.replace(max_seq_len=160)
        assert same(contents(draft.batch), contents(fresh_batch))
        if name in HOST:
            assert same(draft.batch.seq_lens_cpu_upper_bound, draft.batch.seq_lens)
            fresh = builder_of(name).build(0, fresh_batch)
            assert len(used(fresh)["planned"]) == 1
        else:
            fresh = builder_of(name).build_for_drafting(fresh_batch, step)
        assert same(used(record), used(fresh))
        assert record.slot_mapping.tolist() == fresh.slot_mapping.tolist()
        addresses.add(record.slot_mapping.data_ptr())
    # A graph of all steps finds the slots of every step at one address.
    assert len(addresses) == 1


@pytest.mark.parametrize("name", TRIPLES)
def test_the_bound_of_lengths_holds_for_every_step_of_one_record(name: str) -> None:
    """The bound is the model's limit, since a graph of all steps replays batches of any length."""
    batch, rejected, counts = verified()
    # Lengths are far from the model's limit, so a bound from the batch would be exceeded.
    lens = batch.seq_lens.clamp(max=100)
    short = batch.replace(seq_lens=lens, seq_lens_cpu_upper_bound=lens, max_seq_len=int(lens.max()))
    draft = MultiStepDraft(builder_of(name), STEPS)
    for step in range(STEPS):
        record = draft.begin(short, rejected, counts) if step == 0 else draft.next()
        longest = int(draft.batch.seq_lens.max())
        assert draft.batch.max_seq_len == CONFIG.max_model_len
        bounds = bounds_of(contents(record))
        assert all(bound >= longest for bound in bounds), (bounds, longest)
    assert longest > int(lens.max())


def bounds_of(fields: Any) -> list[int]:
    """Every ``max_seq_len`` of a record and its parts."""
    if not isinstance(fields, dict):
        return []
    own = [fields["max_seq_len"]] if isinstance(fields.get("max_seq_len"), int) else []
    return own + [bound for part in fields.values() for bound in bounds_of(part)]


@pytest.mark.parametrize("name", TRIPLES)
def test_a_second_draft_starts_anew_in_the_same_tensors(name: str) -> None:
    given = verified()
    draft = MultiStepDraft(builder_of(name), 3)
    first = draft.begin(*given)
    address, kept = first.slot_mapping.data_ptr(), used(first)
    draft.next()
    draft.next()
    again = draft.begin(*given)
    assert again.slot_mapping.data_ptr() == address
    assert same(used(again), kept)


def test_a_tree_of_candidates_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"topk must be 1, got 4: .* tree mask"):
        MultiStepDraft(builder_of("TRITON_MLA"), 3, topk=4)


def test_more_steps_than_declared_are_refused() -> None:
    draft = MultiStepDraft(builder_of("TRITON_MLA"), 2)
    with pytest.raises(ValueError, match="begin must be called before the first step"):
        draft.next()
    draft.begin(*verified())
    draft.next()
    with pytest.raises(ValueError, match=r"num_steps \(2\) draft steps were declared.*step 2"):
        draft.next()
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        MultiStepDraft(builder_of("TRITON_MLA"), 0)


def test_every_registered_triple_is_among_them() -> None:
    found = {row.get_class().get_builder_cls() for row in AttentionBackendEnum}
    assert found == {cls for cls, _, _ in TRIPLES.values() if cls is not Mixed}
    hosts = {TRIPLES[name][0] for name in HOST} - {Mixed}
    assert {cls for cls in found if cls.plans_on_host} == hosts


@pytest.mark.parametrize("name", HOST)
def test_what_the_host_is_not_told_is_refused_with_the_reason(name: str) -> None:
    batch, rejected, counts = verified()
    draft = MultiStepDraft(builder_of(name), 2)
    with pytest.raises(NotImplementedError, match=r"not exact.*give num_rejected_tokens_cpu"):
        draft.begin(batch, rejected)
    with pytest.raises(ValueError, match=r"seq_lens_cpu_upper_bound is needed by .*got None"):
        draft.begin(batch.replace(seq_lens_cpu_upper_bound=None), rejected, counts)
    with pytest.raises(ValueError, match="of 64 requests on the host, got 63 beside 64"):
        draft.begin(batch, rejected, counts[1:])
    with pytest.raises(ValueError, match="of 64 requests on the host, got 64 beside none"):
        draft.begin(batch, None, counts)
    # Draft steps that an engine builds by itself have no lengths on the host.
    with pytest.raises(NotImplementedError, match=r"cannot plan draft step 1.*MultiStepDraft"):
        builder_of(name).build_for_drafting(batch, 1)


@pytest.mark.parametrize("name", HOST)
def test_drafts_that_are_all_accepted_need_no_counts(name: str) -> None:
    batch, _, _ = verified()
    draft = MultiStepDraft(builder_of(name), 2)
    draft.begin(batch)
    record = draft.next()
    lens = [length + 2 if 0 < length < 159 else 0 for length in batch.seq_lens.tolist()]
    assert draft.batch.seq_lens.tolist() == lens
    assert draft.batch.seq_lens_cpu_upper_bound.tolist() == lens
    assert record.slot_mapping.tolist() == draft.batch.slot_mapping.tolist()


@pytest.mark.parametrize("name", HOST)
def test_plans_of_the_host_are_not_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = verified()
    draft = MultiStepDraft(builder_of(name), 3)
    draft.begin(*given)
    monkeypatch.setattr(draft.builder, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for capture in (lambda: draft.begin(*given), draft.next):
        with pytest.raises(NotImplementedError, match="plans on the host, which a graph does not"):
            capture()
