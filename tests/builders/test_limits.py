"""Builders take batches at every limit and refuse batches beyond it.

This holds for lengths that the host knows. A bound on the host that exceeds a limit is no reason to
refuse a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from attn.registry import AttentionBackendEnum
from builders.batch import CommonAttentionMetadata
from builders.checks.step_limits import StepLimits
from builders.dense.torch_ref import TorchRefMetadataBuilder
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.drafts.advance import advance
from builders.drafts.multi_step import MultiStepDraft
from builders.sparse.indexer import IndexerMetadataBuilder
from specs.devices import KNOWN_DEVICES
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import CrossAttentionSpec, EncoderOnlyAttentionSpec, IndexerSpec
from tests.drafts import test_multi_step_draft as drafts
from tests.drafts.test_multi_step_draft import HOST
from tests.emulators import (
    flashinfer_emulator,
    flashinfer_mla_emulator,
    trtllm_emulator,
    trtllm_mla_emulator,
)

P, REQS, TOKENS = 64, 4, 200
LONGEST = 5 * P
DENSE = drafts.DENSE.replace(block_size=P)
CONFIG = EngineConfig(
    max_model_len=LONGEST,
    max_num_seqs=REQS,
    max_num_batched_tokens=TOKENS,
    num_heads=4,
    softmax_scale=192**-0.5,
)
BUILDERS = {
    **{
        name: (cls, spec.replace(block_size=P), settings)
        for name, (cls, spec, settings) in drafts.TRIPLES.items()
    },
    "indexer": (IndexerMetadataBuilder, IndexerSpec(), {"index_topk": 8}),
}
BOUNDED = [name for name in BUILDERS if name not in HOST]
"""Builders that serve an engine whose host has only bounds of the lengths."""
UPDATING = [name for name in BOUNDED if BUILDERS[name][0].supports_draft_decode_metadata_update]
"""Builders whose records follow lengths that a draft step moves on the device."""


@pytest.fixture(autouse=True)
def flashinfer() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(trtllm_emulator.emulated(KNOWN_DEVICES["b200"], "0.7.2.post1"))
        stack.enter_context(trtllm_mla_emulator.emulated("0.7.2.post1"))
        stack.enter_context(flashinfer_mla_emulator.emulated("0.7.2.post1"))
        stack.enter_context(flashinfer_emulator.emulated("0.7.2.post1"))
        yield


def builder_of(name: str, **settings: Any) -> Any:
    cls, spec, own = BUILDERS[name]
    return cls(spec, ["layers.0"], CONFIG.replace(**{**own, **settings}), "cpu")


def batch_of(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], columns: int = 5
) -> CommonAttentionMetadata:
    table = 1 + torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
    # from_lengths wants a table that is wide enough, which the table of a step need not be.
    wide = table.repeat(1, 2)
    batch = CommonAttentionMetadata.from_lengths(query_lens, seq_lens, wide, P)
    return batch.replace(block_table_tensor=table)


def bounded(batch: CommonAttentionMetadata, bound: int) -> CommonAttentionMetadata:
    """The batch with nothing but a bound of its lengths on the host."""
    bounds = torch.full_like(batch.seq_lens, bound)
    return batch.replace(max_seq_len=bound, seq_lens_cpu_upper_bound=bounds)


FULL = batch_of((1, 1, 98, 100), (LONGEST, LONGEST, LONGEST, LONGEST))
"""The largest step that the limits allow."""
BEYOND = {
    "requests": (batch_of((1,) * 5, (40,) * 5), r"num_reqs \(5\) exceeds max_num_seqs \(4\)"),
    "tokens": (
        batch_of((1, 1, 99, 100), (99, 9, 99, 100)),
        r"num_actual_tokens \(201\) exceeds max_num_batched_tokens \(200\)",
    ),
    "keys of a decode": (
        batch_of((1, 1), (40, LONGEST + 1), 6),
        r"seq_lens_cpu_upper_bound\[1\] \(321\) exceeds max_model_len \(320\)",
    ),
    "keys of a prefill": (
        batch_of((1, 9), (40, LONGEST + 1), 6),
        r"\(321\) exceeds max_model_len \(320\)",
    ),
    "columns": (
        batch_of((1, 9), (4 * P + 1, 40), 4),
        r"\(257\) needs 5 blocks of 64, block_table_tensor has 4 columns",
    ),
    "rows": (
        batch_of((1, 1), (40, 40)).replace(block_table_tensor=torch.ones(1, 5, dtype=torch.int32)),
        r"block_table_tensor must have at least num_reqs \(2\) rows, got 1",
    ),
    "a bound without lengths": (
        batch_of((1, 1), (40, 40)).replace(max_seq_len=321, seq_lens_cpu_upper_bound=None),
        r"max_seq_len \(321\) exceeds max_model_len \(320\)",
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_largest_step_is_built(name: str) -> None:
    assert builder_of(name).build(0, FULL).num_actual_tokens == TOKENS


@pytest.mark.parametrize("limit", BEYOND)
@pytest.mark.parametrize("name", BUILDERS)
def test_one_more_is_refused_with_both_values(name: str, limit: str) -> None:
    batch, message = BEYOND[limit]
    with pytest.raises(ValueError, match=message):
        builder_of(name).build(0, batch)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_bound_above_a_limit_is_no_length(name: str) -> None:
    # A graph is captured with bounds that may be larger than any limit.
    wide = FULL.replace(max_seq_len=10**6)
    assert builder_of(name).build(0, wide).num_actual_tokens == TOKENS
    decodes = batch_of((1, 1), (40, LONGEST)).replace(max_seq_len=10**6)
    builder_of(name).build_for_cudagraph_capture(decodes)


@pytest.mark.parametrize("bound", [LONGEST, LONGEST + 1, 999])
@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_of_an_engine_that_runs_ahead_are_never_refused(name: str, bound: int) -> None:
    builder = builder_of(name, exact_host_lengths=False)
    assert builder.build(0, bounded(FULL, bound)).num_actual_tokens == TOKENS
    narrow = bounded(batch_of((1, 9), (4 * P, 40), 4), bound)
    assert builder.build(0, narrow).num_actual_tokens == 10
    builder.build(0, narrow.replace(seq_lens_cpu_upper_bound=None))


@pytest.mark.parametrize("name", BOUNDED)
def test_draft_steps_have_bounds_alone(name: str) -> None:
    batch = bounded(batch_of((1, 1), (40, LONGEST)), LONGEST + 1)
    builder = builder_of(name)
    with pytest.raises(ValueError, match=r"\(321\) exceeds"):
        builder.build(0, batch)
    builder.build_for_drafting(batch, 1)


@pytest.mark.parametrize("name", BOUNDED)
def test_debugging_finds_lengths_of_the_device_beyond_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    builder = builder_of(name, exact_host_lengths=False)
    builder.build(0, bounded(FULL, 999))
    batch = bounded(batch_of((1, 1), (40, LONGEST + 1), 6), 999)
    with pytest.raises(ValueError, match=r"request 1 \(321\) exceeds max_model_len \(320\)"):
        builder.build(0, batch)


@pytest.mark.parametrize("name", UPDATING)
def test_debugging_finds_what_draft_steps_did_to_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    builder = builder_of(name)
    batch = batch_of((1, 1), (40, LONGEST - 1), 6)
    record = builder.build_for_drafting(batch, 0)
    batch.seq_lens[1] = LONGEST
    builder.update_draft_decode_metadata(record)
    batch.seq_lens[1] = LONGEST + 1
    with pytest.raises(ValueError, match=r"request 1 \(321\) exceeds max_model_len \(320\)"):
        builder.update_draft_decode_metadata(record)


# -- Draft steps of this library.


@pytest.mark.parametrize("name", [name for name in BUILDERS if name != "indexer"])
def test_drafts_end_where_the_model_does(name: str) -> None:
    settings = {"speculative": SpeculativeConfig(num_speculative_tokens=2), "skip_prefill": True}
    draft: Any = MultiStepDraft(builder_of(name, **settings), 2)
    batch = batch_of((3, 3, 3), (LONGEST - 2, LONGEST - 1, LONGEST))
    none = torch.zeros(3, dtype=torch.int32)
    draft.begin(batch, none, none)
    assert draft.batch.seq_lens.tolist() == [LONGEST - 1, LONGEST, 0]
    assert (draft.batch.slot_mapping == -1).tolist() == [False, False, True]
    draft.next()
    assert draft.batch.seq_lens.tolist() == [LONGEST, 0, 0]
    assert (draft.batch.slot_mapping == -1).tolist() == [False, True, True]


@pytest.mark.parametrize(("columns", "room"), [(4, 4 * P), (5, 300), (6, 300)])
def test_bounds_of_drafts_end_with_the_model_or_the_table(columns: int, room: int) -> None:
    batch = batch_of((1, 1), (4 * P - 1, 40), columns)
    for _ in range(60):
        batch = advance(batch, P, 300)
        assert batch.seq_lens_cpu_upper_bound is not None
        assert int(batch.seq_lens.max()) <= int(batch.seq_lens_cpu_upper_bound.max()) <= room
        assert batch.max_seq_len <= room


# -- Encoders.

CROSS = CrossAttentionSpec(block_size=P, num_kv_heads=2, head_size=64)
CROSS_BUILDERS = (TritonAttentionMetadataBuilder, TorchRefMetadataBuilder)


def cross_builder(cls: Any, **settings: Any) -> Any:
    return cls(CROSS, ["0"], CONFIG.replace(**{"max_encoder_len": 70, **settings}), "cpu")


def cross_batch(*lens: int, columns: int = 2, known: bool = True) -> CommonAttentionMetadata:
    """Decodes, each of its request's eighth token, with the given encoder lengths."""
    batch = batch_of((1,) * len(lens), (8,) * len(lens), columns)
    encoder_lens = torch.tensor(lens, dtype=torch.int32)
    on_host = np.array(lens, dtype=np.int32) if known else None
    return batch.replace(encoder_seq_lens=encoder_lens, encoder_seq_lens_cpu=on_host)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("cls", CROSS_BUILDERS)
def test_an_encoder_has_a_limit_of_its_own(cls: Any, is_exact: bool) -> None:
    builder = cross_builder(cls, exact_host_lengths=is_exact)
    assert builder.build(0, cross_batch(70, 0)).seq_lens.tolist() == [70, 0]
    message = r"encoder_seq_lens_cpu\[1\] \(71\) exceeds max_encoder_len \(70\)"
    with pytest.raises(ValueError, match=message):
        builder.build(0, cross_batch(0, 71))
    # Lengths of the decoder have another limit, so a bound on them is no reason to refuse.
    long = cross_batch(70, 3).replace(max_seq_len=10**6)
    assert builder.build(0, long).seq_lens.tolist() == [70, 3]
    with pytest.raises(ValueError, match=r"\(65\) needs 2 blocks of 64, .* has 1 columns"):
        builder.build(0, cross_batch(65, columns=1))


@pytest.mark.parametrize("cls", CROSS_BUILDERS)
def test_an_encoder_is_as_long_as_the_model_where_nothing_is_said(cls: Any) -> None:
    builder = cross_builder(cls, max_encoder_len=None)
    builder.build(0, cross_batch(LONGEST, columns=6))
    with pytest.raises(ValueError, match=r"\(321\) exceeds max_encoder_len \(320\)"):
        builder.build(0, cross_batch(LONGEST + 1, columns=6))


@pytest.mark.parametrize("cls", CROSS_BUILDERS)
def test_lengths_of_encoders_are_the_batch_s_where_no_others_are_given(cls: Any) -> None:
    builder = cross_builder(cls)
    builder.build(0, batch_of((1,), (70,), 2))
    with pytest.raises(ValueError, match=r"\(71\) exceeds max_encoder_len \(70\)"):
        builder.build(0, batch_of((1,), (71,), 2))


@pytest.mark.parametrize("cls", CROSS_BUILDERS)
def test_unknown_lengths_of_encoders_must_be_within_the_limit_by_the_table(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = cross_builder(cls)
    builder.build(0, cross_batch(70, known=False))
    message = r"encoder_seq_lens_cpu is needed .*\(192\) than max_encoder_len \(70\), got None"
    with pytest.raises(ValueError, match=message):
        builder.build(0, cross_batch(70, known=False, columns=3))
    ahead = cross_builder(cls, exact_host_lengths=False)
    wrong = cross_batch(3, 71, known=False, columns=3)
    ahead.build(0, wrong)
    monkeypatch.setenv("ATTN_DEBUG", "1")
    ahead.build(0, cross_batch(3, 70, known=False, columns=3))
    with pytest.raises(ValueError, match=r"request 1 \(71\) exceeds max_encoder_len \(70\)"):
        ahead.build(0, wrong)


def test_encoder_only_layers_have_no_table() -> None:
    spec = EncoderOnlyAttentionSpec(block_size=P, num_kv_heads=2, head_size=64)
    builder = TritonAttentionMetadataBuilder(spec, ["0"], CONFIG, "cpu")
    batch = batch_of((100, 100), (100, 100))
    one = torch.zeros(1, 1, dtype=torch.int32)
    assert builder.build(0, batch.replace(block_table_tensor=one)).num_reqs == 2


# -- The rest.


def test_a_column_holds_the_tokens_of_all_ranks() -> None:
    parallel = ParallelConfig(decode_context_parallel_size=2, tensor_parallel_size=2)
    config = CONFIG.replace(parallel=parallel)
    limits = StepLimits.of(DENSE.replace(dcp_sharded=True), config)
    limits.check(batch_of((1,), (LONGEST,), 5).replace(block_table_tensor=torch.ones(1, 3).int()))
    with pytest.raises(ValueError, match=r"\(320\) needs 3 blocks of 128, .* has 2 columns"):
        limits.check(
            batch_of((1,), (LONGEST,), 5).replace(block_table_tensor=torch.ones(1, 2).int())
        )
    assert StepLimits.of(DENSE, CONFIG).column_tokens == P


def test_room_for_verifies_counts_where_a_builder_has_it() -> None:
    limits = StepLimits.of(DENSE, CONFIG.replace(max_num_batched_tokens=9)).with_verifies(3)
    limits.check(batch_of((3,) * 4, (40,) * 4))
    message = r"num_actual_tokens \(13\) exceeds max_num_seqs \* 3 tokens of each \(12\)"
    with pytest.raises(ValueError, match=message):
        limits.check(batch_of((3, 3, 3, 4), (40,) * 4))
    assert StepLimits.of(DENSE, CONFIG).with_verifies(3).max_num_tokens == TOKENS


def test_an_engine_may_answer_for_its_tables() -> None:
    limits = StepLimits.of(DENSE, CONFIG).without_table()
    limits.check(batch_of((1,), (LONGEST,), 5).replace(block_table_tensor=torch.ones(1, 1).int()))
    with pytest.raises(ValueError, match=r"\(321\) exceeds max_model_len \(320\)"):
        limits.check(batch_of((1,), (LONGEST + 1,), 6))


def test_a_common_prefix_is_within_every_request_that_the_host_knows() -> None:
    batch = batch_of((1, 9, 0), (200, 3 * P + 8, 0))
    assert builder_of("TRITON_ATTN").build(2 * P, batch).shared is not None
    with pytest.raises(ValueError, match=r"computed tokens of every request, got 192 and 191"):
        builder_of("TRITON_ATTN").build(3 * P, batch)
    ahead = builder_of("TRITON_ATTN", exact_host_lengths=False)
    assert ahead.build(3 * P, bounded(batch, 200)).shared is not None


def test_every_builder_is_here() -> None:
    registered = {row.get_class().get_builder_cls() for row in AttentionBackendEnum}
    assert registered <= {cls for cls, _, _ in BUILDERS.values()}
