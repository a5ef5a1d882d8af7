"""Steps of vLLM's sparse layers: what their records say, and what captured steps read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.integrations.vllm import compat
from attn.integrations.vllm.latent import warm_up
from specs.sparse_mla import SparseKernel
from tests.vllm.runner import NAME
from tests.vllm.sparse.sparse_runner import (
    NARROW,
    TOPK,
    WILD,
    Sequences,
    SparseRunner,
    expected_dense,
    expected_rows,
)

DRAFTS = 3


def with_drafts(config: Any) -> None:
    config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)


def padded(batch: Any, tokens: int) -> Any:
    """The batch with tokens that belong to no request."""
    slots = torch.cat([batch.slot_mapping, torch.full((tokens,), -1)])
    count = batch.num_actual_tokens + tokens
    return replace(batch, slot_mapping=slots, num_actual_tokens=count)


def new_rows(sequences: Sequences, query_lens: list[int], seq_lens: list[int]) -> list[Tensor]:
    """Queries and latent rows of a step's new tokens."""
    parts = list(zip(sequences.requests, query_lens, seq_lens, strict=True))
    return [
        torch.cat([getattr(one, name)[length - count : length] for one, count, length in parts])
        for name in ("query", "key")
    ]


def write_context(runner: SparseRunner, sequences: Sequences, lens: list[int]) -> None:
    rows = [row for row, length in enumerate(lens) if length]
    table, runner.table = runner.table, runner.table[rows]
    runner.attend(sequences.take(rows), [lens[row] for row in rows], [lens[row] for row in rows])
    runner.table = table


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_verify_with_padding_is_right(
    runner_of: Callable[..., SparseRunner], cache_dtype: str
) -> None:
    """Requests differ in tokens, one request has none, and tokens of no request follow."""
    runner = runner_of(cache_dtype=cache_dtype, prepare=with_drafts)
    query_lens, seq_lens = [4, 2, 1, 4, 0], [40, 33, 9, 4, 0]
    sequences = Sequences.random([40, 33, 9, 4, 1], NARROW, runner.dtype)
    before = [length - count for length, count in zip(seq_lens, query_lens, strict=True)]
    write_context(runner, sequences, before)
    runner.indexer.fill(sequences.of_step(query_lens, seq_lens))
    batch = padded(runner.batch(query_lens, seq_lens), 5)
    record = runner.builder.build(0, batch)
    assert record.num_decode_tokens == 16
    query, key = new_rows(sequences, query_lens, seq_lens)
    rows = [torch.cat([part, part[:5]]) for part in (query, key)]
    output = runner.call(record, *rows, None, batch)
    answer = expected_rows(sequences, NARROW, query_lens, seq_lens, cache_dtype)
    answer.assert_is(output[:11])
    assert not bool(output[11:].any())


def test_a_record_has_the_fields_that_vllm_reads(
    runner_of: Callable[..., SparseRunner],
) -> None:
    runner = runner_of(prepare=with_drafts)
    assert runner.builder.reorder_batch_threshold == 1 + DRAFTS
    batch = runner.batch([4, 1, 9, 5], [40, 30, 9, 14])
    record = runner.builder.build(0, batch)
    numbers = {
        "num_actual_tokens": 19,
        "num_decodes": 2,
        "num_prefills": 2,
        "num_decode_tokens": 5,
        "num_prefill_tokens": 14,
        "prefill_max_seq_len": 14,
        "topk_tokens": TOPK,
    }
    assert {name: getattr(record, name) for name in numbers} == numbers
    assert record.prefill.use_dense_mha
    assert record.prefill.max_query_len == 9
    assert record.prefill.chunked_context is record.prefill.context
    assert record.prefill.context is not None
    assert record.prefill_rows is None
    assert record.slot_mapping is batch.slot_mapping
    decode = record.decode
    assert decode.num_rows == 5
    assert decode.lengths.visible_lens.tolist() == [37, 38, 39, 40, 30]
    assert decode.lengths.reqs.tolist() == [0, 0, 0, 0, 1]
    assert decode.lengths.topk_lens.tolist() == [TOPK] * 5
    # The device's own tensors: nothing is copied, so a graph's replay reads the next step's.
    for mine, theirs in (
        (decode.seq_lens, batch.seq_lens),
        (decode.block_table, batch.block_table_tensor),
        (decode.query_start_loc, batch.query_start_loc),
    ):
        assert mine.data_ptr() == theirs.data_ptr()

    longer = runner.builder.build(0, runner.batch([4, 9, 5], [40, 9, TOPK + 1]))
    assert (longer.prefill, longer.prefill_max_seq_len) == (None, 0)
    assert (longer.num_decodes, longer.num_decode_tokens, longer.num_prefills) == (3, 18, 0)
    assert longer.prefill_rows.num_rows == 14
    assert longer.decode.num_rows == 4


def test_no_kernel_of_a_vendor_is_planned(runner_of: Callable[..., SparseRunner]) -> None:
    runner = runner_of()
    assert {plan.kernel for plan in runner.builder._plans} == {SparseKernel.TRITON_SPARSE}


def test_short_prompts_attend_lists_where_vllm_or_the_engine_says_so(
    runner_of: Callable[..., SparseRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def force(config: Any) -> None:
        config.attention_config.sparse_mla_force_mqa = True

    lens = [9, 14]
    sequences = Sequences.random(lens, NARROW, torch.bfloat16)

    def check(runner: SparseRunner) -> None:
        assert runner.builder.expanded is None
        record = runner.builder.build(0, runner.batch(lens, lens))
        assert (record.prefill, record.num_decode_tokens) == (None, 23)
        expected_rows(sequences, NARROW, lens, lens).assert_is(runner.attend(sequences, lens, lens))

    check(runner_of(prepare=force))
    # A row's bits must not depend on the other prompts of a step.
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    check(runner_of())


def test_a_layer_without_an_indexer_reads_another_layers_lists(
    runner_of: Callable[..., SparseRunner],
) -> None:
    runner = runner_of(is_shared=True)
    assert runner.layer.impl.topk_indices_buffer is runner.indexer.topk_indices_buffer
    sequences = Sequences.random((30, 40), NARROW, runner.dtype)
    output = runner.attend(sequences, [30, 40], [30, 40])
    expected_rows(sequences, NARROW, [30, 40], [30, 40]).assert_is(output)


def test_a_buffer_that_an_indexer_gets_later_is_the_one_that_is_read(
    runner_of: Callable[..., SparseRunner],
) -> None:
    """vLLM gives a draft's indexers the target's buffer after the layers were made."""
    runner = runner_of()
    old = runner.indexer.topk_indices_buffer
    runner.indexer.topk_indices_buffer = torch.full_like(old, WILD)
    sequences = Sequences.random((30,), NARROW, runner.dtype)
    output = runner.attend(sequences, [30], [30])
    assert bool((old == WILD).all())
    expected_rows(sequences, NARROW, [30], [30]).assert_is(output)


def test_a_buffer_that_is_given_to_the_impl_is_read_in_place_of_the_indexer_s(
    runner_of: Callable[..., SparseRunner],
) -> None:
    """vLLM 0.33 gives it to the impls of HYV4's drafts, which are no modules."""
    runner = runner_of()
    indexer, impl = runner.indexer, runner.layer.impl
    given = torch.full_like(indexer.topk_indices_buffer, WILD)
    impl.topk_indices_buffer = given
    assert impl.topk_indices_buffer is given
    sequences = Sequences.random((30,), NARROW, runner.dtype)
    indexer.fill(sequences.of_step([30], [30]))
    given.copy_(indexer.topk_indices_buffer)
    indexer.topk_indices_buffer.fill_(WILD)
    output = runner.step(sequences.tokens(), [30], [30])
    expected_rows(sequences, NARROW, [30], [30]).assert_is(output)


def test_draft_steps_are_planned_anew_in_place(runner_of: Callable[..., SparseRunner]) -> None:
    runner = runner_of(prepare=with_drafts)
    sequences = Sequences.random((40, 33), NARROW, runner.dtype)
    write_context(runner, sequences, [37, 30])
    batch = runner.batch([1, 1], [38, 31])
    record = runner.builder.build_for_drafting(batch, 1)
    assert runner.builder.supports_draft_decode_metadata_update
    for step in range(2):
        seq_lens = [38 + step, 31 + step]
        # vLLM's runner writes lengths and slots in place between the drafts of a graph.
        now = runner.batch([1, 1], seq_lens)
        batch.seq_lens.copy_(now.seq_lens)
        batch.slot_mapping.copy_(now.slot_mapping)
        runner.builder.update_draft_decode_metadata(record)
        runner.indexer.fill(sequences.of_step([1, 1], seq_lens))
        query, key = new_rows(sequences, [1, 1], seq_lens)
        output = runner.call(record, query, key, None, batch)
        expected_rows(sequences, NARROW, [1, 1], seq_lens).assert_is(output)


def test_a_captured_step_is_replayed_with_other_tokens_per_request(
    runner_of: Callable[..., SparseRunner],
) -> None:
    """What a graph holds is the captured record; a later build only fills what it reads."""
    runner = runner_of(prepare=with_drafts)
    level = type(runner.builder).get_cudagraph_support(runner.config, runner.spec)
    assert level.name == "UNIFORM_BATCH"
    if not compat.BACKENDS_SHAPE_CACHES:
        most = type(runner.builder).get_varlen_cudagraph_max_query_len
        assert most(runner.config, runner.spec) == 1 + DRAFTS
    sequences = Sequences.random((40, 33, 9), NARROW, runner.dtype)
    query_lens, seq_lens = [4, 1, 3], [40, 33, 9]
    write_context(runner, sequences, [36, 32, 6])
    captured_batch = runner.batch([4, 4, 4], [4, 4, 4])
    captured = runner.builder.build_for_cudagraph_capture(captured_batch)
    batch = padded(runner.batch(query_lens, seq_lens), 4)
    # The runner's own tensors, which the graph reads, hold the new step.
    captured_batch.seq_lens.copy_(batch.seq_lens)
    captured_batch.query_start_loc.copy_(batch.query_start_loc)
    runner.builder.build(0, batch)
    captured.slot_mapping = batch.slot_mapping
    runner.indexer.fill(sequences.of_step(query_lens, seq_lens))
    runner.indexer.topk_indices_buffer[8:12] = -1
    query, key = new_rows(sequences, query_lens, seq_lens)
    rows = [torch.cat([part, part[:4]]) for part in (query, key)]
    output = runner.call(captured, *rows, None, batch)
    expected_rows(sequences, NARROW, query_lens, seq_lens).assert_is(output[:8])
    assert not bool(output[8:].any())


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_the_warm_up_runs_every_road(
    runner_of: Callable[..., SparseRunner], monkeypatch: pytest.MonkeyPatch, cache_dtype: str
) -> None:
    runner = runner_of(cache_dtype=cache_dtype, topk=64)
    ran: list[tuple[bool, bool, bool]] = []
    impl = type(runner.layer.impl)
    attend, expand = impl.forward_mqa, impl.forward_mha

    def mqa(self: Any, q: Any, cache: Any, record: Any, layer: Any) -> Any:
        ran.append((record.decode is not None, record.prefill_rows is not None, False))
        return attend(self, q, cache, record, layer)

    def mha(self: Any, *given: Any, **outputs: Any) -> Any:
        ran.append((False, False, given[4].prefill.context is not None))
        return expand(self, *given, **outputs)

    monkeypatch.setattr(impl, "forward_mqa", mqa)
    monkeypatch.setattr(impl, "forward_mha", mha)
    warm_up(runner.builder, [runner.layer], False)
    assert {(True, False, False), (False, True, False), (False, False, False)} <= {*ran}
    assert (False, False, True) in ran
    sequences = Sequences.random((9,), NARROW, runner.dtype)
    output = runner.step(sequences.tokens(), [9], [9])
    expected_dense(sequences, NARROW, [9], [9], cache_dtype).assert_is(output)
    assert runner.builder.layer_names == [NAME]
