"""Query rows of sparse attention and slots of contexts: kernels and torch twins against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.ops.dispatch import has_kernel
from attn.testing.batches import WILD_BLOCK
from builders.sparse.rows import (
    RowLengths,
    context_slots,
    expand_rows,
    fill_rows,
    launch_context,
    launch_rows,
    list_context,
)

P, TOPK = 4, 6
MOST = 9


def rows_of(count: int) -> RowLengths:
    return RowLengths(*(torch.full((count,), 77, dtype=torch.int32) for _ in range(3)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Query lengths, KV lengths, first token of the phase and padding tokens of a batch."""
    reqs = draw(st.integers(1, MOST))
    query_lens = draw(st.lists(st.integers(0, 5), min_size=reqs, max_size=reqs))
    context = draw(st.lists(st.integers(0, 20), min_size=reqs, max_size=reqs))
    # Some are padding requests: they have no keys, whatever their tokens.
    gone = draw(st.lists(st.booleans(), min_size=reqs, max_size=reqs))
    seq_lens = [
        0 if empty else new + old for new, old, empty in zip(query_lens, context, gone, strict=True)
    ]
    return query_lens, seq_lens, draw(st.integers(0, 7)), draw(st.integers(0, 3))


@given(batches())
@settings(max_examples=40, deadline=None)
def test_every_row_sees_its_request_up_to_itself(
    batch: tuple[list[int], list[int], int, int],
) -> None:
    query_lens, seq_lens, first, padding = batch
    wanted: list[tuple[int, int, int]] = []
    for req, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for token in range(new):
            sees = length - new + token + 1 if length else 0
            wanted.append((req, sees, min(sees, TOPK)))
    count = len(wanted) + padding
    starts = first + torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    writers = [lambda rows: expand_rows(starts, lens, first, TOPK, rows)]
    writers.append(lambda rows: fill_rows(starts, lens, first, TOPK, rows, MOST))
    if has_kernel(lens):
        writers.append(lambda rows: launch_rows(starts, lens, first, TOPK, rows, MOST))
    for write in writers:
        if count == 0 and write is not writers[1]:
            continue
        rows = rows_of(count)
        write(rows)
        found = torch.stack([rows.reqs, rows.visible_lens, rows.topk_lens], 1).tolist()
        assert [tuple(row) for row in found[: len(wanted)]] == wanted
        for req, sees, listed in found[len(wanted) :]:
            assert 0 <= req < len(seq_lens)
            assert (sees, listed) == (0, 0)


def test_no_rows_and_no_requests_are_no_error() -> None:
    none, starts = torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    fill_rows(starts, none, 0, TOPK, rows_of(0), MOST)
    rows = rows_of(3)
    fill_rows(starts, none, 0, TOPK, rows, MOST)
    assert [part.tolist() for part in (rows.reqs, rows.visible_lens, rows.topk_lens)] == [
        [0] * 3
    ] * 3
    assert context_slots(none.view(0, 4), none, 0, P, MOST).shape == (0,)


@given(st.lists(st.integers(0, 14), min_size=1, max_size=MOST), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_contexts_follow_one_another_and_no_other_entry_is_read(
    lens: list[int], spare: int
) -> None:
    wide = torch.full((len(lens), 7), WILD_BLOCK, dtype=torch.int32)
    table, wanted = wide[:, 1:5], []
    for req, length in enumerate(lens):
        used = -(-length // P)
        table[req, :used] = 10 * req + torch.arange(1, used + 1, dtype=torch.int32)
        wanted += [(10 * req + 1 + at // P) * P + at % P for at in range(length)]
    rows = len(wanted) + spare
    ends = torch.tensor(lens).cumsum(0).int()

    def check(found: Tensor) -> None:
        assert found.tolist() == wanted + [-1] * spare

    if rows == 0:
        return
    check(context_slots(table, ends, rows, P, MOST))
    writers = [list_context, *([launch_context] if has_kernel(ends) else [])]
    for write in writers:
        slots = torch.full((rows,), 77, dtype=torch.int32)
        write(table, ends, slots, P, MOST)
        check(slots)


@pytest.mark.parametrize("write", [list_context, launch_context])
def test_keys_beyond_the_table_have_no_slot(write: object) -> None:
    if write is launch_context and not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    table = torch.tensor([[3], [5]], dtype=torch.int32)
    slots = torch.full((8,), 77, dtype=torch.int32)
    write(table, torch.tensor([6, 8], dtype=torch.int32), slots, P, MOST)  # type: ignore[operator]
    assert slots.tolist() == [12, 13, 14, 15, -1, -1, 20, 21]
