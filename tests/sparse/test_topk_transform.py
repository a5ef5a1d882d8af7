"""Top-k lists translated to slots and to rows of a buffer: kernel and torch twin against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.ops import topk_transform as ops
from attn.ops.topk_transform import transform_topk
from attn.testing.batches import WILD_BLOCK
from builders.sparse.arguments import TopkLists
from specs.sparse_mla import IndexKind
from tests.sparse.sparse_cases import PATHS, use

P = 4


class Case:
    """Lists of a few requests, whose tables hold wild ids past their last block."""

    def __init__(self, seed: int, rows: int, topk: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def numbers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

        self.lens = numbers(0, 30, 3)
        self.table = torch.full((3, 9), WILD_BLOCK, dtype=torch.int32)
        for req, length in enumerate(self.lens.tolist()):
            used = -(-length // P)
            self.table[req, :used] = numbers(1, 1000, used)
        self.reqs = numbers(0, 3, rows)
        self.visible = torch.minimum(self.lens[self.reqs.long()], numbers(0, 31, rows))
        # Some entries are empty, some are listed twice, and some keys are invisible.
        wide = numbers(-2, 34, rows, topk + 3)
        self.ids = wide[:, :topk]
        self.offsets = numbers(0, 10_000, 3)

    def entry(self, row: int, column: int, kind: IndexKind) -> int:
        token, req = int(self.ids[row, column]), int(self.reqs[row])
        if not 0 <= token < int(self.visible[row]):
            return -1
        if kind is IndexKind.RAGGED:
            return token + int(self.offsets[req])
        return int(self.table[req, token // P]) * P + token % P

    def lists(self, kind: IndexKind, width: int, compact: bool) -> list[list[int]]:
        found = []
        for row in range(len(self.ids)):
            entries = [self.entry(row, column, kind) for column in range(self.ids.shape[1])]
            if compact:
                entries.sort(key=lambda entry: entry < 0)
            found.append(entries + [-1] * (width - len(entries)))
        return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", list(IndexKind))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**30), rows=st.integers(0, 5), topk=st.integers(1, 20))
def test_lists_are_those_of_a_loop(
    kind: IndexKind, compact: bool, path: str, seed: int, rows: int, topk: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(path, ops, monkeypatch)
        case, width = Case(seed, rows, topk), topk + seed % 5
        out = torch.full((rows, width), 77, dtype=torch.int32)
        slots = torch.full_like(out, 77) if kind is IndexKind.GATHERED else None
        counts = torch.full((rows,), 77, dtype=torch.int32) if compact else None
        given_ids = case.ids.clone()
        transform_topk(
            *(TopkLists(case.ids, case.visible, case.reqs), kind, out),
            block_table=None if kind is IndexKind.RAGGED else case.table,
            block_size=P,
            offsets=case.offsets if kind is IndexKind.RAGGED else None,
            slots=slots,
            counts=counts,
        )
        wanted = torch.tensor(case.lists(kind, width, compact), dtype=torch.int32).view_as(out)
        assert torch.equal(case.ids, given_ids)
        if slots is not None:
            assert torch.equal(slots, wanted)
            places = torch.arange(out.numel(), dtype=torch.int32).view_as(out)
            wanted = torch.where(wanted >= 0, places, -1)
        assert torch.equal(out, wanted)
        if counts is not None:
            assert counts.tolist() == (wanted >= 0).sum(1).tolist()


@pytest.mark.parametrize("path", PATHS)
def test_slots_are_counted_beyond_tables_and_32_bit_rows(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, ops, monkeypatch)
    ids = torch.tensor([[0, 63, 64, 127, 128]], dtype=torch.int32)
    table = torch.tensor([[20_000_000, 5]], dtype=torch.int32)
    out, one = torch.empty_like(ids), torch.zeros(1, dtype=torch.int32)
    # A length beyond the table must lead nowhere past the table's end.
    lists = TopkLists(ids, one + 200, one)
    transform_topk(lists, IndexKind.PAGED, out, block_table=table, block_size=64)
    assert out.tolist() == [[1_280_000_000, 1_280_000_063, 320, 383, -1]]


def test_lists_that_do_not_fit_are_refused() -> None:
    ids, one = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    out, paged = torch.empty_like(ids), IndexKind.PAGED
    lists = TopkLists(ids, one, one)
    with pytest.raises(ValueError, match=r"ids must be \[T, topk\] int32 with dense rows"):
        transform_topk(lists._replace(ids=ids.long()), paged, out, block_table=ids)
    with pytest.raises(ValueError, match=r"out must be \[2, width\] with a width of at least 4"):
        transform_topk(lists, paged, out[:, :3], block_table=ids)
    with pytest.raises(ValueError, match=r"out must be contiguous int32 \[2, 4\]"):
        transform_topk(lists, paged, out.long(), block_table=ids)
    with pytest.raises(ValueError, match=r"visible_lens must be contiguous int32 \[2\], got \[1\]"):
        transform_topk(lists._replace(visible_lens=one[:1]), paged, out, block_table=ids)
    with pytest.raises(ValueError, match=r"counts must be contiguous int32 \[2\]"):
        transform_topk(lists, paged, out, block_table=ids, counts=one.long())
    for kind, name in (
        (paged, "block_table"),
        (IndexKind.RAGGED, "offsets"),
        (IndexKind.GATHERED, "block_table"),
    ):
        message = f"{name} must be int32 with dense rows for {kind.value} entries, got None"
        with pytest.raises(ValueError, match=message):
            transform_topk(lists, kind, out)
    with pytest.raises(ValueError, match="slots must be int32"):
        transform_topk(lists, IndexKind.GATHERED, out, block_table=ids)


@pytest.mark.parametrize("bad", [-2, 5])
def test_ids_that_a_row_does_not_see_are_found_when_debugging(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    ids = torch.tensor([[-1, bad], [4, bad]], dtype=torch.int32)
    visible, reqs = torch.tensor([0, 5], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    out, table = torch.empty_like(ids), torch.ones(1, 2, dtype=torch.int32)
    arguments = {"block_table": table, "block_size": P}
    message = rf"ids\[1, 1\] must be -1 or below visible_lens\[1\] \(5\), got {bad}"
    with pytest.raises(ValueError, match=message):
        transform_topk(TopkLists(ids, visible, reqs), IndexKind.PAGED, out, **arguments)
    # Padding lists what was there before.
    visible[1] = 0
    transform_topk(TopkLists(ids, visible, reqs), IndexKind.PAGED, out, **arguments)
    assert out.tolist() == [[-1, -1], [-1, -1]]
