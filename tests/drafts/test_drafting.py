"""A draft step moves every request on by one token, and writes on no tensor of the batch."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders.batch import CommonAttentionMetadata
from builders.checks.invariants import check_invariants
from builders.drafts.advance import advance
from tests.builders.test_common import (
    IN_BOTH_VERSIONS,
    filled_batch,
    make_batch,
    same,
    stand_in_for_vllm,
)

MAX_MODEL_LEN = 14

# (new tokens, cached tokens, rejected new tokens) of each request; (0, 0, 0) is padding.
requests_of = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9))
    .flatmap(lambda pair: st.tuples(st.just(pair), st.integers(0, max(pair[0] - 1, 0))))
    .map(lambda pair: (*pair[0], pair[1])),
    max_size=6,
)


def batch_with_room(
    requests: list[tuple[int, int, int]], block_size: int
) -> CommonAttentionMetadata:
    """A batch whose table has blocks up to the longest sequence allowed."""
    batch = make_batch(
        tuple(new for new, _, _ in requests),
        tuple(new + cached for new, cached, _ in requests),
        block_size,
    )
    width = -(-MAX_MODEL_LEN // block_size)
    table = torch.arange(1, 1 + len(requests) * width, dtype=torch.int32).view(-1, width)
    return CommonAttentionMetadata.from_lengths(
        batch.naive_query_lens().tolist(), batch.seq_lens.tolist(), table, block_size
    )


@given(requests=requests_of, block_size=st.integers(1, 5), steps=st.integers(1, 3))
def test_steps_are_those_of_a_loop_over_requests(
    requests: list[tuple[int, int, int]], block_size: int, steps: int
) -> None:
    batch = batch_with_room(requests, block_size)
    table = batch.block_table_tensor
    # A request without new tokens is padding, whatever its length.
    lens = [new + cached - rejected if new else 0 for new, cached, rejected in requests]
    rejected = torch.tensor([row[2] for row in requests], dtype=torch.int32)
    for step in range(steps):
        previous_max = batch.max_seq_len
        batch = advance(batch, block_size, MAX_MODEL_LEN, None if step else rejected)
        # A request without keys stays padding, and a request at the limit becomes padding.
        lens = [kept + 1 if 0 < kept < MAX_MODEL_LEN else 0 for kept in lens]
        slots = [
            int(table[row, (kv - 1) // block_size]) * block_size + (kv - 1) % block_size
            if kv
            else -1
            for row, kv in enumerate(lens)
        ]
        assert batch.seq_lens.tolist() == lens
        assert batch.slot_mapping.tolist() == slots
        assert batch.positions is not None
        assert batch.positions.tolist() == [max(kv - 1, 0) for kv in lens]
        starts = list(range(len(lens) + 1))
        assert batch.query_start_loc.tolist() == batch.query_start_loc_cpu.tolist() == starts
        assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len) == (
            len(lens),
            len(lens),
            1,
        )
        assert batch.max_seq_len == min(previous_max + 1, MAX_MODEL_LEN)
        assert batch.seq_lens_cpu_upper_bound is not None
        assert bool((batch.seq_lens_cpu_upper_bound >= batch.seq_lens).all())
        assert batch.block_table_tensor is table
        dtypes = [batch.seq_lens.dtype, batch.slot_mapping.dtype, batch.positions.dtype]
        assert dtypes == [torch.int32, torch.int64, torch.int64]
        check_invariants(batch, block_size=block_size, num_blocks=table.numel() + 1)


@given(requests=requests_of, block_size=st.integers(1, 5), steps=st.integers(1, 3))
def test_lengths_of_the_host_stay_exact_where_it_is_told(
    requests: list[tuple[int, int, int]], block_size: int, steps: int
) -> None:
    batch = batch_with_room(requests, block_size)
    batch = batch.replace(seq_lens_cpu_upper_bound=batch.seq_lens.clone())
    rejected = torch.tensor([row[2] for row in requests], dtype=torch.int32)
    for step in range(steps):
        counts = torch.zeros_like(rejected) if step else rejected
        given = None if step else rejected
        batch = advance(batch, block_size, MAX_MODEL_LEN, given, counts)
        assert batch.seq_lens_cpu_upper_bound is not None
        assert batch.seq_lens_cpu_upper_bound.dtype == torch.int32
        assert batch.seq_lens_cpu_upper_bound.tolist() == batch.seq_lens.tolist()


def test_rejected_tokens_make_room_below_the_limit() -> None:
    batch = batch_with_room([(4, 10, 0), (4, 10, 3)], 4)
    rejected = torch.tensor([0, 3], dtype=torch.int32)
    assert advance(batch, 4, MAX_MODEL_LEN, rejected).seq_lens.tolist() == [0, 12]


def test_a_row_with_everything_rejected_becomes_padding() -> None:
    batch = batch_with_room([(2, 0, 0), (2, 3, 0)], 4)
    moved = advance(batch, 4, MAX_MODEL_LEN, torch.tensor([2, 2], dtype=torch.int32))
    assert moved.seq_lens.tolist() == [0, 4]
    assert moved.slot_mapping.tolist()[0] == -1


def test_the_batch_before_is_not_written() -> None:
    batch = filled_batch()
    before = copy.deepcopy(batch)
    advance(batch, 4, MAX_MODEL_LEN + 100, torch.ones(4, dtype=torch.int32))
    for field in dataclasses.fields(batch):
        assert same(getattr(batch, field.name), getattr(before, field.name)), field.name


def test_values_of_the_step_before_are_dropped_and_those_of_the_request_kept() -> None:
    batch = filled_batch()
    moved = advance(batch, 4, MAX_MODEL_LEN + 100)
    dropped = [
        "logits_indices_padded",
        "num_logits_indices",
        "max_logits_per_req",
        "dcp_local_seq_lens",
        "dcp_local_seq_lens_cpu_upper_bound",
        "is_prefilling",
    ]
    assert [getattr(moved, name) for name in dropped] == [None] * len(dropped)
    assert moved.causal is True
    kept = ["req_idx", "rswa_prefix_lens", "mm_req_doc_ranges", "replayssm_decode_base_cpu"]
    assert all(getattr(moved, name) is getattr(batch, name) for name in kept)


def test_without_a_host_bound_none_is_invented() -> None:
    batch = make_batch().replace(seq_lens_cpu_upper_bound=None)
    assert advance(batch, 4, 100).seq_lens_cpu_upper_bound is None


@pytest.mark.parametrize(
    "caches",
    [
        # 0.26, then 0.33: what vLLM's class remembers of lengths.
        [
            "dcp_local_seq_lens_cpu",
            "_seq_lens_cpu",
            "_num_computed_tokens_cpu",
            "_num_computed_tokens_cache",
            "_token_to_req_indices_cache",
        ],
        ["_num_computed_tokens_cache", "_token_to_req_indices_cache"],
    ],
    ids=["0.26", "0.33"],
)
def test_vllms_own_batch_advances_and_forgets_its_caches(caches: list[str]) -> None:
    batch = batch_with_room([(2, 3, 0), (1, 5, 0), (0, 0, 0)], 4)
    stale = torch.tensor([1, 2, 3])
    other = stand_in_for_vllm(batch, IN_BOTH_VERSIONS, **dict.fromkeys(caches, stale))
    moved = advance(other, 4, MAX_MODEL_LEN)
    expected = advance(batch, 4, MAX_MODEL_LEN)
    assert type(moved) is type(other)
    for name in IN_BOTH_VERSIONS:
        assert same(getattr(moved, name), getattr(expected, name)), name
    assert [getattr(moved, name) for name in caches] == [None] * len(caches)
    assert all(getattr(other, name) is stale for name in caches)


def test_a_draft_past_the_block_table_gets_no_slot() -> None:
    table = torch.tensor([[3]], dtype=torch.int32)
    full = CommonAttentionMetadata.from_lengths([4], [4], table, 4)
    after = advance(full, 4, MAX_MODEL_LEN)
    assert after.slot_mapping.tolist() == [-1]
    assert after.seq_lens.tolist() == [0]
