"""Block tables of latent decodes, and rows padded to one length."""

from __future__ import annotations

import math

import pytest
import torch

from attn.ops.dispatch import has_kernel
from builders.latent.rows import pad_rows, unpad_rows
from builders.latent.tables import (
    BURST,
    NO_BLOCK,
    SEQ_LEN_FILL,
    LatentTables,
    launch_latent_table,
    table_width,
    write_latent_table,
)

PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("burst", [1, 64, 48, 128])
def test_tables_hold_every_block_in_whole_steps_and_bursts(page: int, burst: int) -> None:
    for length in (1, page, page + 1, 127, 128, 129, 4095, 4096, 4097, 163_840):
        width = table_width(length, page, burst)
        assert width * page >= length
        assert width % max(1, 128 // page) == 0
        assert width % burst == 0
        unit = math.lcm(max(1, 128 // page), burst)
        assert (width - unit) * page < length


@pytest.mark.parametrize(
    ("length", "page", "width"),
    [(1, 32, 64), (2048, 32, 64), (2049, 32, 128), (4096, 64, 64), (4097, 64, 128), (1, 1, 128)],
)
def test_known_widths_of_bursts_of_64(length: int, page: int, width: int) -> None:
    assert BURST == 64
    assert table_width(length, page) == width


def filled(reqs: int, page: int, launch: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(reqs)
    table = torch.randint(2**20, 2**30, (reqs, 7), dtype=torch.int32, generator=generator)
    query_lens = torch.randint(0, 3, (reqs,), dtype=torch.int32, generator=generator)
    seq_lens = torch.randint(0, 7 * page, (reqs,), dtype=torch.int32, generator=generator)
    pages = torch.full((reqs, table_width(9 * page, page)), 77, dtype=torch.int32)
    kv_lens = torch.full((reqs,), 77, dtype=torch.int32)
    write = launch_latent_table if launch else write_latent_table
    write(table, query_lens, seq_lens, pages, kv_lens, page, 3)
    live = (query_lens > 0) & (seq_lens > 0)
    for row in range(reqs):
        length = int(seq_lens[row]) if live[row] else 3
        used = -(-length // page)
        wanted = table[row, :used] if live[row] else torch.zeros(used, dtype=torch.int32)
        assert torch.equal(pages[row, :used], wanted)
        assert bool((pages[row, used:] == NO_BLOCK).all())
        assert int(kv_lens[row]) == length
    return pages, kv_lens


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize("reqs", [1, 5, 33])
def test_kernel_and_twin_fill_the_same(reqs: int, page: int) -> None:
    expected = filled(reqs, page)
    if has_kernel(expected[0]):
        found = filled(reqs, page, launch=True)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_steps_are_written_in_place() -> None:
    tables = LatentTables(4, 200, 32, "cpu")
    assert tables.width == 64
    table = torch.arange(1, 29, dtype=torch.int32).view(4, 7)
    one = torch.ones(4, dtype=torch.int32)
    pages, lens = tables.fill(table, one, torch.tensor([200, 33, 0, 32], dtype=torch.int32))
    assert pages.shape == (4, 64)
    assert lens.tolist() == [200, 33, SEQ_LEN_FILL, 32]
    assert pages[1, :3].tolist() == [8, 9, NO_BLOCK]
    assert pages[2, :2].tolist() == [0, NO_BLOCK]
    again, other = tables.fill(table[:2], one[:2], torch.tensor([1, 1], dtype=torch.int32))
    assert (again.data_ptr(), other.data_ptr()) == (pages.data_ptr(), lens.data_ptr())
    assert pages[0, :2].tolist() == [1, NO_BLOCK]
    with pytest.raises(ValueError, match="was declared"):
        tables.fill(table.repeat(2, 1), one.repeat(2), one.repeat(2))


def test_rows_of_several_lengths_stand_at_the_end_of_a_block() -> None:
    starts = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    padded = pad_rows(starts, 3, torch.empty(9, dtype=torch.int32))
    assert padded.tolist() == [-1, -1, 0, -1, 1, 2, 3, 4, 5]
    rows = unpad_rows(starts, 3, torch.empty(8, dtype=torch.int32))
    assert rows.tolist() == [2, 4, 5, 6, 7, 8, -1, -1]
    assert padded[rows[:6].long()].tolist() == list(range(6))
