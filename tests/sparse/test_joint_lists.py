"""Joint lists of neighbouring tokens: kernel and torch twin against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.ops import joint_lists as ops
from attn.ops.joint_lists import join_lists
from attn.testing.batches import WILD_BLOCK
from builders.sparse.arguments import JointLists, TopkLists
from builders.splitkv.stripe import Stripe
from tests.sparse.sparse_cases import PATHS, use

P = 4
WINDOW = 16


class Case:
    """Tokens of three requests side by side, whose tables hold wild ids past their last block."""

    def __init__(self, seed: int, rows: int, topk: int, page: int) -> None:
        self.page = page
        random = torch.Generator().manual_seed(seed)

        def numbers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

        self.lens = numbers(0, 50, 3)
        self.table = torch.full((3, -(-52 // page)), WILD_BLOCK, dtype=torch.int32)
        for req, length in enumerate(self.lens.tolist()):
            used = -(-length // page)
            self.table[req, :used] = numbers(1, 1000, used)
        self.reqs = numbers(0, 3, rows).sort().values
        self.visible = torch.minimum(self.lens[self.reqs.long()], numbers(0, 51, rows))
        # Some entries are empty, some are listed twice, and some keys are invisible.
        self.ids = numbers(-2, 54, rows, topk + 3)[:, :topk]

    def wanted(self, tokens: int) -> list[list[int]]:
        """For each group the slots by rising position, with the tokens that list them."""
        found = []
        for first in range(0, len(self.ids), tokens):
            members: dict[tuple[int, int], int] = {}
            for bit, token in enumerate(range(first, min(first + tokens, len(self.ids)))):
                for position in self.ids[token].tolist():
                    if 0 <= position < int(self.visible[token]):
                        key = int(self.reqs[token]), position
                        members[key] = members.get(key, 0) | 1 << bit
            entries = []
            for (req, position), bits in sorted(members.items()):
                block, offset = divmod(position, self.page)
                slot = int(self.table[req, block]) * self.page + offset
                entries.append(slot | bits << (32 - tokens))
            found.append(entries)
        return found


def room(rows: int, topk: int, tokens: int, programs: int = 3) -> JointLists:
    groups = -(-rows // tokens)
    return JointLists(
        tokens,
        torch.full((groups, tokens * topk), 77, dtype=torch.int32),
        torch.full((groups,), 77, dtype=torch.int32),
        torch.zeros(programs, WINDOW // 4, dtype=torch.int32),
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tokens", [2, 4, 8])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**30),
    rows=st.integers(0, 21),
    topk=st.integers(1, 20),
    page=st.sampled_from([3, 4, 16]),
)
def test_lists_are_those_of_a_loop(
    path: str, tokens: int, seed: int, rows: int, topk: int, page: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(path, ops, monkeypatch)
        case, joint = Case(seed, rows, topk, page), room(rows, topk, tokens)
        given_ids = case.ids.clone()
        join_lists(TopkLists(case.ids, case.visible, case.reqs), case.table, page, joint)
        assert torch.equal(case.ids, given_ids)
        assert not joint.marks.any()
        wanted = case.wanted(tokens)
        assert joint.counts.tolist() == [len(entries) for entries in wanted]
        for entries, row in zip(wanted, joint.entries.tolist(), strict=True):
            assert [entry % 2**32 for entry in row[: len(entries)]] == entries
            assert set(row[len(entries) :]) <= {77}


@pytest.mark.parametrize("path", PATHS)
def test_positions_beyond_the_table_are_left_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(path, ops, monkeypatch)
    ids = torch.tensor([[0, 3, 4, 7, 8]] * 2, dtype=torch.int32)
    table = torch.tensor([[9, 5]], dtype=torch.int32)
    joint, one = room(2, 5, 2), torch.zeros(2, dtype=torch.int32)
    # A mark past the table must not stay for the next launch either.
    ids[:, 4] = 14
    join_lists(TopkLists(ids, one + 200, one), table, P, joint)
    assert not joint.marks.any()
    assert joint.counts.tolist() == [4]
    assert [entry & 0x3FFFFFFF for entry in joint.entries[0, :4].tolist()] == [36, 39, 20, 23]


def test_lists_that_do_not_fit_are_refused() -> None:
    ids, one = torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    lists, joint = TopkLists(ids, one, one), room(4, 4, 2)
    with pytest.raises(ValueError, match="tokens must be 2, 4 or 8, got 3"):
        join_lists(lists, ids, P, joint._replace(tokens=3))
    with pytest.raises(ValueError, match="lists must be of a rank that has all keys"):
        join_lists(lists._replace(stripe=Stripe(2, 0, 1)), ids, P, joint)
    with pytest.raises(ValueError, match=r"ids must be \[T, topk\] int32 with dense rows"):
        join_lists(lists._replace(ids=ids.long()), ids, P, joint)
    with pytest.raises(
        ValueError, match=r"entries must be contiguous int32 \[2, 8\], got \[2, 7\]"
    ):
        join_lists(lists, ids, P, joint._replace(entries=joint.entries[:, :7]))
    with pytest.raises(ValueError, match=r"counts must be contiguous int32 \[2\]"):
        join_lists(lists, ids, P, joint._replace(counts=one.long()))
    with pytest.raises(ValueError, match=r"marks must be contiguous int32 \[3, 4\]"):
        join_lists(lists, ids, P, joint._replace(marks=joint.marks.long()))
    with pytest.raises(ValueError, match="block_table must be int32 with dense rows"):
        join_lists(lists, ids.long(), P, joint)
