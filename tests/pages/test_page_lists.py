"""Page lists: the kernel, its twin in torch, and loops over pages agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders.device import interprets
from builders.pages.lists import RequestPlaces, launch_page_list, list_pages
from builders.pages.phase_tables import PAGE_SIZES

WILD = 2**30
LISTERS = [pytest.param(list_pages, id="torch")]
if interprets() or torch.cuda.is_available():
    marks = [pytest.mark.gpu] if torch.cuda.is_available() else []
    LISTERS.append(pytest.param(launch_page_list, id="kernel", marks=marks))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def ragged(num_reqs: int, block_size: int, most: int) -> tuple[torch.Tensor, list[int]]:
    """A strided table whose unused entries are out of range, and lengths.

    One length is zero, and one is the largest that the table allows.
    """
    chance = random.Random(f"{num_reqs} {block_size}")
    lens = [chance.randrange(1, most + 1) for _ in range(num_reqs)]
    lens[0] = most
    lens[-1] = lens[-1] if num_reqs < 3 else 0
    columns = -(-most // block_size)
    whole = torch.full((num_reqs, columns + 3), WILD, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(-(-length // block_size)):
            whole[row, 1 + column] = chance.randrange(1, 1000)
    return whole.to(DEVICE)[:, 1 : 1 + columns], lens


@pytest.mark.parametrize("lister", LISTERS)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(("num_reqs", "most"), [(1, 1), (1, 5000), (5, 300), (64, 700)])
def test_lists_are_those_of_a_loop_over_pages(
    lister: Callable[..., torch.Tensor],
    skips: bool,
    page_size: int,
    num_reqs: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Entries that the kernel should clear and does not become visible.
    monkeypatch.setattr(torch, "empty", lambda size, **given: torch.full((size,), -7, **given))
    table, lens = ragged(num_reqs, page_size, most)
    pages = [-(-length // page_size) for length in lens]
    skipped = [row % (count + 1) if skips else 0 for row, count in enumerate(pages)]
    given = int32(skipped) if skips else None
    found = lister(table, int32(lens), page_size, given, 64).tolist()
    expected = [
        page
        for row, count, first in zip(table.tolist(), pages, skipped, strict=True)
        for page in row[first:count]
    ]
    assert found == expected + [0] * (table.numel() - len(expected))


@pytest.mark.parametrize("lister", LISTERS)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("num_reqs", "leading"), [(1, 0), (1, 1), (5, 2), (64, 64), (64, 0)])
def test_places_count_from_zero_in_both_parts(
    lister: Callable[..., torch.Tensor], skips: bool, num_reqs: int, leading: int
) -> None:
    table, lens = ragged(num_reqs, 16, 700)
    pages = [-(-length // 16) for length in lens]
    skipped = [row % (count + 1) if skips else 0 for row, count in enumerate(pages)]
    rows = [row % 4 for row in range(num_reqs)]
    starts = int32([0, *torch.tensor(rows).cumsum(0).tolist()])
    places = RequestPlaces(int32([-7] * (3 * num_reqs + 4)), leading)
    lister(table, int32(lens), 16, int32(skipped) if skips else None, 64, places, starts)
    for found, own in ((places.leading, slice(leading)), (places.behind, slice(leading, None))):
        counts = [count - first for count, first in zip(pages[own], skipped[own], strict=True)]
        if not counts:
            continue
        last = [
            length - 16 * (count - 1) if listed else 0
            for length, count, listed in zip(lens[own], pages[own], counts, strict=True)
        ]
        expected = (
            [0, *torch.tensor(rows[own]).cumsum(0).tolist()],
            [0, *torch.tensor(counts).cumsum(0).tolist()],
            last,
        )
        assert tuple(one.tolist() for one in found) == expected


@pytest.mark.parametrize("lister", LISTERS)
def test_a_length_beyond_the_table_lists_what_there_is(lister: Callable[..., torch.Tensor]) -> None:
    table = int32([[3, 4], [5, 6]])
    assert lister(table, int32([1000, 17]), 16, None, 4).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("lister", LISTERS)
def test_a_step_without_requests_lists_nothing(lister: Callable[..., torch.Tensor]) -> None:
    assert lister(int32([[1]])[:0], int32([]), 16, None, 4).tolist() == []
