"""The boundary behind the decodes of a batch, and the reordering that puts decodes first."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from builders.batch import (
    BatchSplit,
    CommonAttentionMetadata,
    decode_first_order,
    reorder,
    split_decodes_and_prefills,
)
from builders.checks.invariants import check_invariants
from tests.builders.test_common import filled_batch, make_batch

# (new tokens, cached tokens, still prefilling)
requests_of = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 9), st.booleans()), min_size=0, max_size=7
)


def batch_of(requests: list[tuple[int, int, bool]]) -> CommonAttentionMetadata:
    """A batch of these requests, in this order."""
    batch = make_batch(
        tuple(new for new, _, _ in requests), tuple(new + cached for new, cached, _ in requests)
    )
    return batch.replace(is_prefilling=torch.tensor([flag for _, _, flag in requests], dtype=bool))


@given(
    requests=requests_of,
    threshold=st.integers(1, 5),
    require_uniform=st.booleans(),
    short_extends_decode=st.booleans(),
)
def test_the_boundary_is_the_first_row_that_is_no_decode(
    requests: list[tuple[int, int, bool]],
    threshold: int,
    require_uniform: bool,
    short_extends_decode: bool,
) -> None:
    lens = [new for new, _, _ in requests]
    # In a uniform batch padding follows the decodes, so it is never the first request of several.
    assume(not require_uniform or not any(lens) or lens[0] > 0)

    def is_decode(new: int, prefilling: bool) -> bool:
        if new > threshold or (prefilling and not short_extends_decode):
            return False
        return not require_uniform or new in (lens[0], 0)

    decodes = 0
    while decodes < len(requests) and is_decode(requests[decodes][0], requests[decodes][2]):
        decodes += 1
    decode_tokens, total = sum(lens[:decodes]), sum(lens)
    split = split_decodes_and_prefills(
        batch_of(requests), threshold, require_uniform, short_extends_decode
    )
    assert split == BatchSplit(
        num_decodes=decodes,
        num_prefills=len(requests) - decodes,
        num_decode_tokens=decode_tokens,
        num_prefill_tokens=total - decode_tokens,
    )


@pytest.mark.parametrize("require_uniform", [False, True])
@pytest.mark.parametrize("threshold", [1, 3])
def test_padding_rows_after_uniform_decodes_are_decodes(
    require_uniform: bool, threshold: int
) -> None:
    batch = make_batch((threshold, threshold, 0, 0), (9, 7, 0, 0))
    split = split_decodes_and_prefills(batch, threshold, require_uniform)
    assert split == BatchSplit(4, 0, 2 * threshold, 0)


def test_token_padding_is_counted_with_the_last_phase() -> None:
    decodes = make_batch((1, 1), (4, 5)).replace(num_actual_tokens=8)
    assert split_decodes_and_prefills(decodes) == BatchSplit(2, 0, 8, 0)
    mixed = make_batch((1, 5), (4, 5)).replace(num_actual_tokens=8)
    assert split_decodes_and_prefills(mixed) == BatchSplit(1, 1, 1, 7)


def test_uneven_verify_rows_are_decodes_unless_they_must_be_uniform() -> None:
    batch = make_batch((3, 2, 3), (9, 9, 9))
    assert split_decodes_and_prefills(batch, 3) == BatchSplit(3, 0, 8, 0)
    assert split_decodes_and_prefills(batch, 3, require_uniform=True) == BatchSplit(1, 2, 3, 5)


def test_short_extends_cannot_be_told_apart_without_is_prefilling() -> None:
    with pytest.raises(ValueError, match="is_prefilling is needed"):
        split_decodes_and_prefills(make_batch((1, 1), (4, 5)), treat_short_extends_as_decodes=False)


# -- Order.


def group(new: int, cached: int, threshold: int) -> str:
    """The place of a request in a decode-first batch."""
    if new == 0:
        return "padding"
    if cached == 0:
        return "prefill"
    if new == 1:
        return "decode"
    return "short extend" if new <= threshold else "long extend"


@given(requests=requests_of, threshold=st.integers(1, 4))
def test_decodes_come_first_and_requests_of_a_group_keep_their_order(
    requests: list[tuple[int, int, bool]], threshold: int
) -> None:
    query_lens = torch.tensor([new for new, _, _ in requests], dtype=torch.int32)
    context_lens = torch.tensor([cached for _, cached, _ in requests], dtype=torch.int32)
    order = decode_first_order(query_lens, context_lens, threshold)
    groups = ["decode", "short extend", "long extend", "prefill", "padding"]
    expected = sorted(
        range(len(requests)),
        key=lambda row: groups.index(group(requests[row][0], requests[row][1], threshold)),
    )
    assert order.tolist() == expected
    assert order.dtype == torch.int64


def test_many_requests_of_a_group_keep_their_order() -> None:
    query_lens = torch.tensor([1, 4], dtype=torch.int32).repeat(1000)
    order = decode_first_order(query_lens, torch.ones(2000, dtype=torch.int32))
    assert order.tolist() == [*range(0, 2000, 2), *range(1, 2000, 2)]


@given(requests=requests_of, threshold=st.integers(1, 4))
def test_after_ordering_all_decodes_are_found(
    requests: list[tuple[int, int, bool]], threshold: int
) -> None:
    batch = batch_of(requests)
    query_lens = batch.naive_query_lens()
    order = decode_first_order(query_lens, batch.compute_num_computed_tokens(), threshold)
    split = split_decodes_and_prefills(reorder(batch, order), threshold)
    short = [new for new, cached, _ in requests if 0 < new <= threshold and cached]
    assert split.num_decodes >= len(short)
    assert split.num_decode_tokens >= sum(short)


PER_REQUEST = [
    "seq_lens",
    "block_table_tensor",
    "causal",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
]
PER_TOKEN = ["slot_mapping", "positions"]


def request_of(batch: CommonAttentionMetadata, row: int) -> dict[str, Any]:
    """All values in a batch that belong to one request."""
    start, stop = batch.query_start_loc_cpu[row : row + 2].tolist()
    assert batch.query_start_loc[row : row + 2].tolist() == [start, stop]
    found = {name: getattr(batch, name)[row].tolist() for name in PER_REQUEST}
    found |= {name: getattr(batch, name)[start:stop].tolist() for name in PER_TOKEN}
    found["mm"] = (batch.mm_req_doc_ranges or {}).get(row)
    return found


@given(order=st.permutations(range(4)), padding=st.integers(0, 3))
def test_reordering_moves_requests_with_their_tokens_and_all_their_fields(
    order: list[int], padding: int
) -> None:
    batch = filled_batch().replace(logits_indices_padded=None)
    tail = torch.arange(1000, 1000 + padding)
    batch.slot_mapping = torch.cat([batch.slot_mapping, tail])
    moved = reorder(batch, torch.tensor(order))
    assert [request_of(moved, new) for new in range(4)] == [request_of(batch, old) for old in order]
    assert moved.slot_mapping.shape == batch.slot_mapping.shape
    assert moved.slot_mapping[10:].tolist() == tail.tolist()
    kept = ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "max_logits_per_req"]
    assert all(getattr(moved, name) == getattr(batch, name) for name in kept)
    check_invariants(moved.replace(slot_mapping=moved.slot_mapping[:10]), block_size=4)
    inverse = torch.tensor(order).argsort()
    back = reorder(moved, inverse)
    assert [request_of(back, row) for row in range(4)] == [
        request_of(batch, row) for row in range(4)
    ]


def test_reordering_leaves_absent_fields_absent() -> None:
    batch = make_batch().replace(positions=None, seq_lens_cpu_upper_bound=None)
    moved = reorder(batch, torch.tensor([3, 2, 1, 0]))
    optional = [*PER_REQUEST[3:], "positions", "mm_req_doc_ranges"]
    assert [getattr(moved, name) for name in optional] == [None] * len(optional)
    assert moved.causal is True
    assert moved.naive_query_lens().tolist() == [0, 6, 3, 1]


def test_an_empty_batch_can_be_reordered() -> None:
    moved = reorder(make_batch((), ()), torch.tensor([], dtype=torch.int64))
    assert (moved.num_reqs, moved.query_start_loc.tolist()) == (0, [0])


def test_a_batch_that_lists_wanted_logits_is_not_reordered() -> None:
    with pytest.raises(ValueError, match="logits_indices_padded counts tokens in the old order"):
        reorder(filled_batch(), torch.tensor([3, 2, 1, 0]))
