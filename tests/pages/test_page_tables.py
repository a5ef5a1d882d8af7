"""Page tables: the kernel, its twin in torch, and loops over pages agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from builders.device import interprets
from builders.pages.tables import (
    PAGE_SIZES,
    PageTable,
    PageTableBuffers,
    RequestPlaces,
    launch_page_list,
    launch_page_table,
    list_pages,
    write_page_table,
)

WILD = 2**30
WRITERS = [pytest.param(write_page_table, id="torch")]
LISTERS = [pytest.param(list_pages, id="torch")]
if interprets() or torch.cuda.is_available():
    marks = [pytest.mark.gpu] if torch.cuda.is_available() else []
    WRITERS.append(pytest.param(launch_page_table, id="kernel", marks=marks))
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


def poisoned(num_reqs: int, width: int) -> PageTable:
    pages = int32([[-7] * width] * num_reqs).view(num_reqs, width)
    return PageTable(pages, int32([-7] * num_reqs), int32([-7] * (num_reqs + 1)), 64)


def expected(
    table: torch.Tensor, lens: list[int], width: int, block_size: int, page_size: int, added: int
) -> tuple[list[list[int]], list[int], list[int]]:
    per_block, rows, starts = block_size // page_size, [], [0]
    kv_lens = [length + added if length else 0 for length in lens]
    for row, length in zip(table.tolist(), kv_lens, strict=True):
        pages = [0] * width
        for page in range(min(-(-length // page_size), len(row) * per_block, width)):
            pages[page] = row[page // per_block] * per_block + page % per_block
        rows.append(pages)
        starts.append(starts[-1] + length)
    return rows, kv_lens, starts


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("per_block", [1, 3])
@pytest.mark.parametrize(("num_reqs", "most"), [(1, 1), (1, 5000), (5, 300), (64, 700)])
def test_tables_are_those_of_a_loop_over_pages(
    write: Callable[..., None], page_size: int, per_block: int, num_reqs: int, most: int
) -> None:
    block_size = page_size * per_block
    table, lens = ragged(num_reqs, block_size, most)
    width = -(-(most + 40) // page_size)
    for added in (0, 1):
        out = poisoned(num_reqs, width)
        write(table, int32(lens), out, block_size, page_size, added)
        pages, kv_lens, starts = expected(table, lens, width, block_size, page_size, added)
        assert out.pages.tolist() == pages
        assert out.kv_lens.tolist() == kv_lens
        assert out.kv_starts.tolist() == starts


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_without_requests_has_a_table(write: Callable[..., None]) -> None:
    out = poisoned(0, 4)
    write(int32([[1]])[:0], int32([]), out, 16, 16)
    assert out.kv_starts.tolist() == [0]


def test_buffers_are_rewritten_in_place() -> None:
    buffers = PageTableBuffers(4, 100, 32, 16, DEVICE)
    first = buffers.fill(int32([[5, 6], [7, WILD]]), int32([40, 3]))
    assert first.pages.is_contiguous()
    assert first.pages.tolist() == [[10, 11, 12, 0, 0, 0, 0], [14, 0, 0, 0, 0, 0, 0]]
    second = buffers.fill(int32([[8, 9], [WILD, WILD]]), int32([33, 0]), added=2)
    assert second.pages.data_ptr() == first.pages.data_ptr()
    assert second.pages[:, :4].tolist() == [[16, 17, 18, 0], [0, 0, 0, 0]]
    assert second.kv_lens.tolist() == [35, 0]
    assert second.kv_starts.tolist() == [0, 35, 35]


@pytest.mark.gpu
def test_a_graph_that_fills_tables_follows_their_inputs() -> None:
    buffers = PageTableBuffers(4, 100, 32, 16, DEVICE)
    table, lens = int32([[5, 6], [7, WILD]]), int32([40, 3])
    buffers.fill(table, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = buffers.fill(table, lens)
    table.copy_(int32([[3, 4], [9, 2]]))
    lens.copy_(int32([20, 64]))
    graph.replay()
    assert captured.pages[:, :4].tolist() == [[6, 7, 0, 0], [18, 19, 4, 5]]
    assert captured.kv_starts.tolist() == [0, 20, 84]


@pytest.mark.parametrize("page_size", [8, 48, 256])
def test_a_page_size_outside_the_set_is_refused_with_the_set(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"one of 16, 32, 64, 128, got {page_size}"):
        PageTableBuffers(4, 100, 768, page_size, "cpu")


def test_blocks_that_pages_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of page_size \(32\), got 48"):
        PageTableBuffers(4, 100, 48, 32, "cpu")


def test_more_requests_than_declared_are_refused() -> None:
    buffers = PageTableBuffers(1, 100, 16, 16, DEVICE)
    with pytest.raises(ValueError, match="at most 1, got 2 and 2"):
        buffers.fill(int32([[1], [2]]), int32([3, 4]))


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
