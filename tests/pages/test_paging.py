"""Slots and page lists against loops over tokens and pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from builders.pages.paging import (
    block_table_to_csr,
    check_block_table,
    check_slots,
    compute_slot_mapping,
    split_blocks,
)

WILD = 777_777
# (new tokens, cached tokens) of each request; (0, 0) is a padding request.
rows_of = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 11)), max_size=6)


def int32(values: list[int]) -> torch.Tensor:
    """A small int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def table_of(seq_lens: list[int], block_size: int, extra_columns: int = 1) -> torch.Tensor:
    """A table of distinct blocks in descending order; unused entries are out of range."""
    blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    table = torch.full(
        (len(seq_lens), max(blocks, default=0) + extra_columns), WILD, dtype=torch.int32
    )
    used = sum(blocks)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(used, used - count, -1, dtype=torch.int32)
        used -= count
    return table


@given(rows=rows_of, block_size=st.integers(1, 5), padding=st.integers(0, 3))
def test_slots_are_those_of_a_loop_over_tokens(
    rows: list[tuple[int, int]], block_size: int, padding: int
) -> None:
    seq_lens = [new + cached for new, cached in rows]
    table = table_of(seq_lens, block_size)
    starts, expected = [0], []
    for row, (new, cached) in enumerate(rows):
        starts.append(starts[-1] + new)
        for position in range(cached, cached + new):
            block = int(table[row, position // block_size])
            expected.append(block * block_size + position % block_size)
    expected += [-1] * padding
    slots = compute_slot_mapping(
        table, int32(starts), int32(seq_lens), starts[-1] + padding, block_size
    )
    assert slots.tolist() == expected
    assert slots.dtype == torch.int64


def test_tokens_of_rows_without_a_kv_length_have_no_slot() -> None:
    slots = compute_slot_mapping(
        int32([[5], [6], [7]]), int32([0, 1, 3, 4]), int32([2, 0, 1]), 4, 4
    )
    assert slots.tolist() == [5 * 4 + 1, -1, -1, 7 * 4]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_an_empty_table_has_no_slots(shape: tuple[int, int]) -> None:
    table = torch.zeros(shape, dtype=torch.int32)
    starts = torch.zeros(shape[0] + 1, dtype=torch.int32)
    slots = compute_slot_mapping(table, starts, starts[1:], 3, 4)
    assert slots.tolist() == [-1, -1, -1]
    assert slots.dtype == torch.int64


def test_slots_beyond_32_bits_do_not_wrap() -> None:
    block = 2**31 - 1
    slots = compute_slot_mapping(int32([[block]]), int32([0, 1]), int32([3]), 1, 64)
    assert slots.tolist() == [block * 64 + 2]


@given(
    seq_lens=st.lists(st.integers(0, 17), max_size=6),
    block_size=st.integers(1, 5),
    extra=st.integers(0, 2),
)
def test_page_lists_are_those_of_a_loop_over_pages(
    seq_lens: list[int], block_size: int, extra: int
) -> None:
    table = table_of(seq_lens, block_size, extra)
    indptr, indices, last = [0], [], []
    for row, seq_len in enumerate(seq_lens):
        pages = -(-seq_len // block_size)
        indices += table[row, :pages].tolist()
        indptr.append(len(indices))
        last.append(seq_len - (pages - 1) * block_size if pages else 0)
    paged = block_table_to_csr(table, int32(seq_lens), block_size)
    assert paged.indptr.tolist() == indptr
    assert paged.indices.tolist() == indices + [0] * (table.numel() - len(indices))
    assert paged.last_page_len.tolist() == last
    assert {tensor.dtype for tensor in paged} == {torch.int32}
    assert all(1 <= length <= block_size for length in last if length)


@given(
    factor=st.integers(1, 4),
    kernel_block=st.integers(1, 4),
    seq_lens=st.lists(st.integers(0, 17), min_size=1, max_size=4),
)
def test_split_blocks_name_the_same_tokens(
    factor: int, kernel_block: int, seq_lens: list[int]
) -> None:
    manager_block = factor * kernel_block
    table = table_of(seq_lens, manager_block)
    split = split_blocks(table, manager_block, kernel_block)
    assert split.shape == (len(seq_lens), table.shape[1] * factor)
    assert split.dtype == torch.int32
    for row, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            coarse = int(table[row, position // manager_block]) * manager_block
            fine = int(split[row, position // kernel_block]) * kernel_block
            assert coarse + position % manager_block == fine + position % kernel_block


def test_blocks_of_the_kernels_size_are_not_copied() -> None:
    table = table_of([5, 9], 4)
    assert split_blocks(table, 4, 4) is table


@pytest.mark.parametrize(("manager", "kernel"), [(48, 32), (16, 64)])
def test_blocks_that_kernel_blocks_do_not_divide_are_refused(manager: int, kernel: int) -> None:
    expected = f"manager block size {manager} is not a multiple of the kernel's {kernel}"
    with pytest.raises(ValueError, match=expected):
        split_blocks(table_of([5], 4), manager, kernel)


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        ([4, 13], "2 columns; request 1 of length 13 needs 4 blocks of 4"),
        ([9, 13, 8], "2 columns; request 1 of length 13 needs 4 blocks of 4"),
    ],
)
def test_a_length_beyond_its_row_is_reported(seq_lens: list[int], message: str) -> None:
    table = torch.ones(len(seq_lens), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"block_table_tensor has {message}"):
        check_block_table(table, int32(seq_lens), 4)


@pytest.mark.parametrize(("bad", "row", "column"), [(-1, 0, 0), (8, 1, 1), (WILD, 1, 0)])
def test_a_used_entry_outside_the_cache_is_reported(bad: int, row: int, column: int) -> None:
    table, seq_lens = table_of([3, 7], 4), int32([3, 7])
    check_block_table(table, seq_lens, 4, num_blocks=8)
    table[row, column] = bad
    expected = rf"block_table_tensor\[{row}, {column}\] must be in \[0, 8\), got {bad}"
    with pytest.raises(ValueError, match=expected):
        check_block_table(table, seq_lens, 4, num_blocks=8)
    check_block_table(table, seq_lens, 4)


def test_the_last_block_and_the_last_slot_of_the_cache_are_allowed() -> None:
    check_block_table(int32([7]).view(1, 1), int32([4]), 4, num_blocks=8)
    check_slots(torch.tensor([-1, 0, 31]), 4, 8)


def test_a_batch_without_requests_passes_the_checks() -> None:
    check_block_table(torch.zeros(0, 3, dtype=torch.int32), int32([]), 4, num_blocks=8)
    check_slots(torch.tensor([], dtype=torch.int64), 4, 8)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, -1, -2], "slot_mapping must hold -1 or a slot, got -2 at token 2"),
        ([3, 32], r"slot_mapping must be below 32 \(8 blocks of 4\), got 32 at token 1"),
    ],
)
def test_a_slot_outside_the_cache_is_reported(slots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_slots(torch.tensor(slots), 4, 8)


@pytest.mark.parametrize(("block_size", "num_blocks"), [(None, 8), (4, None), (None, None)])
def test_without_the_caches_size_only_the_sign_is_checked(
    block_size: int | None, num_blocks: int | None
) -> None:
    check_slots(torch.tensor([10**9]), block_size, num_blocks)
    with pytest.raises(ValueError, match="got -5"):
        check_slots(torch.tensor([-5]), block_size, num_blocks)


def test_a_token_past_the_table_has_no_slot() -> None:
    table = torch.tensor([[3]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    slots = compute_slot_mapping(table, starts, lens, 6, 4)
    assert slots.tolist() == [12, 13, 14, 15, -1, -1]


def test_a_length_past_the_table_lists_no_page_that_is_not_there() -> None:
    pages = block_table_to_csr(
        torch.tensor([[3]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), 4
    )
    assert pages.indptr.tolist() == [0, 1]
