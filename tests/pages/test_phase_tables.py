"""Tables of the decode and prefill phases: the launch, its twin in torch, and loops agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders.device import interprets
from builders.pages.phase_tables import (
    PAGE_SIZES,
    PhaseTable,
    StepRows,
    fill_tables,
    launch_tables,
    write_tables,
)

WILD = 2**30
WRITERS = [pytest.param(write_tables, id="torch")]
if interprets() or torch.cuda.is_available():
    marks = [pytest.mark.gpu] if torch.cuda.is_available() else []
    WRITERS.append(pytest.param(launch_tables, id="kernel", marks=marks))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("pages", "kv_lens", "query_starts", "kv_starts")


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def step_of(
    seed: int, decodes: int, prefills: int, page: int, most: int, idle: bool, least: int = 1
) -> StepRows:
    """A step with decodes of one to four tokens and longer prefills.

    Its block table is strided, and unused entries are out of range.
    """
    chance = random.Random(f"{seed} {decodes} {prefills} {page}")
    counts = [chance.randrange(1, 5) for _ in range(decodes)]
    counts += [chance.randrange(5, 40) for _ in range(prefills)]
    lens = [count + chance.randrange(0, most - count) for count in counts]
    for row in range(1, len(counts), 3) if idle else ():
        counts[row] = lens[row] = 0
    columns = -(-most // page)
    whole = torch.full((len(counts), columns + 3), WILD, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(-(-length // page)):
            whole[row, 1 + column] = chance.randrange(1, 1000)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    table = whole.to(DEVICE)[:, 1 : 1 + columns]
    return StepRows(table, int32(lens), starts, decodes, least)


def poisoned(num_reqs: int, most: int, page: int) -> PhaseTable:
    table = PhaseTable(num_reqs, most, page, DEVICE)
    for name in NAMES:
        getattr(table, name).fill_(-7)
    return table


def listed(
    step: StepRows, order: list[int], page: int, width: int, window: int | None
) -> tuple[list[list[int]], list[int], list[int]]:
    """Pages, keys and tokens of requests in the given order, computed by loops."""
    counts, lens = step.query_start_loc.diff().tolist(), step.seq_lens.tolist()
    blocks, rows, keys, tokens = step.block_table.tolist(), [], [], []
    for row in order:
        first = 0
        if window is not None:
            first = max(0, lens[row] - counts[row] - window + 1) // page
        used = blocks[row][first : -(-lens[row] // page)]
        rows.append((used + [0] * width)[:width])
        keys.append(lens[row] - first * page)
        tokens.append(counts[row])
    return rows, keys, tokens


def sums(values: list[int]) -> list[int]:
    return [sum(values[:stop]) for stop in range(len(values) + 1)]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(
    ("decodes", "prefills", "most"),
    [(1, 0, 60), (0, 1, 5000), (3, 2, 300), (7, 0, 300), (0, 4, 300), (40, 24, 700)],
)
def test_tables_are_those_of_loops_over_requests(
    write: Callable[..., None],
    page: int,
    window: int | None,
    decodes: int,
    prefills: int,
    most: int,
) -> None:
    for idle, least in ((False, 1), (True, 4)):
        step = step_of(5, decodes, prefills, page, most, idle, least)
        reqs = decodes + prefills
        # Decodes under a window list fewer pages than prefills do.
        bounds = [most + 200] * 2 if window is None else [window + page + 3, window + page + 40]
        first, second = (poisoned(reqs + 1, bound + page, page) for bound in bounds)
        given = first if decodes else None, second if prefills else None
        write(step, *given, window)
        counts = step.query_start_loc.diff().tolist()
        order = sorted(range(decodes), key=lambda row: counts[row] == 0)
        for table, own in ((first, order), (second, list(range(decodes, reqs)))):
            pages, keys, tokens = listed(step, own, page, table.width, window)
            assert table.pages[: len(own)].tolist() == pages
            is_decode = table is first
            if is_decode:
                keys = [max(n, least, q) for n, q in zip(keys, tokens, strict=True)]
            assert table.kv_lens[: len(own)].tolist() == keys
            if own:
                assert table.query_starts[: len(own) + 1].tolist() == sums(tokens)
            if own and not is_decode:
                assert table.kv_starts[: len(own) + 1].tolist() == sums(keys)
            for name in NAMES:
                behind = len(own) + (name.endswith("starts") and bool(own))
                assert getattr(table, name)[behind:].eq(-7).all(), name


@pytest.mark.gpu
def test_a_graph_that_fills_tables_follows_their_inputs() -> None:
    step = step_of(1, 5, 3, 16, 300, idle=False)
    other = step_of(2, 5, 3, 16, 300, idle=False)
    tables = poisoned(8, 300, 16), poisoned(8, 300, 16)
    fill_tables(step, *tables, 40)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_tables(step, *tables, 40)
    for name in ("block_table", "seq_lens", "query_start_loc"):
        getattr(step, name).copy_(getattr(other, name))
    graph.replay()
    alone = poisoned(8, 300, 16), poisoned(8, 300, 16)
    fill_tables(other, *alone, 40)
    for one, expected in zip(tables, alone, strict=True):
        for name in NAMES:
            assert torch.equal(getattr(one, name), getattr(expected, name)), name


@pytest.mark.parametrize("write", WRITERS)
def test_a_step_without_requests_writes_nothing(write: Callable[..., None]) -> None:
    step, table = step_of(1, 1, 0, 16, 60, idle=False), poisoned(2, 60, 16)
    none = StepRows(step.block_table[:0], step.seq_lens[:0], step.query_start_loc[:1], 0, 1)
    write(none, table, None, None)
    for name in NAMES:
        assert getattr(table, name).eq(-7).all()


@pytest.mark.parametrize("page", [8, 48, 256])
def test_a_page_size_outside_the_set_is_refused_with_the_set(page: int) -> None:
    with pytest.raises(ValueError, match=f"one of 16, 32, 64, 128, got {page}"):
        PhaseTable(4, 100, page, "cpu")


def test_more_requests_than_declared_are_refused() -> None:
    step = step_of(1, 3, 0, 16, 60, idle=False)
    with pytest.raises(ValueError, match="at most 2, got 3 and 3"):
        fill_tables(step, PhaseTable(2, 60, 16, DEVICE), None, None)
    short = replace(step, block_table=step.block_table[:2])
    with pytest.raises(ValueError, match="at most 4, got 3 and 2"):
        fill_tables(short, PhaseTable(4, 60, 16, DEVICE), None, None)
