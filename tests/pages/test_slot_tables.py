"""Block tables from slots: the launch and its twin agree with loops, in each kind of step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from builders.device import interprets
from builders.pages.slot_tables import SlotTables, StepSlots, launch_tables, write_tables

WRITERS = [pytest.param(write_tables, id="torch")]
if interprets() or torch.cuda.is_available():
    marks = [pytest.mark.gpu] if torch.cuda.is_available() else []
    WRITERS.append(pytest.param(launch_tables, id="kernel", marks=marks))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST, ROWS, POISON = 150, 6, 12345


def pages_in_any_order(page_size: int, chance: random.Random) -> tuple[Any, Any]:
    """Slots ``[ROWS, LONGEST]`` of pages in any order, and the second pool's slot of each slot."""
    columns = -(-LONGEST // page_size)
    pages = list(range(1, 1 + ROWS * columns))
    chance.shuffle(pages)
    others = pages[:]
    chance.shuffle(others)
    slots = torch.zeros(ROWS, columns * page_size, dtype=torch.int32)
    window = torch.full(((len(pages) + 1) * page_size,), -1, dtype=torch.int64)
    for place, (page, other) in enumerate(zip(pages, others, strict=True)):
        row, column = divmod(place, columns)
        for offset in range(page_size):
            slots[row, column * page_size + offset] = page * page_size + offset
            if chance.random() < 0.9 or offset:
                window[page * page_size + offset] = other * page_size + offset
    return slots[:, :LONGEST].to(DEVICE), window.to(DEVICE)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", ["decode", "verify", "extend"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_the_tables_of_a_step(write: Any, kind: str, apart: bool, page_size: int) -> None:
    chance = random.Random(f"{kind} {apart} {page_size}")
    slots, window = pages_in_any_order(page_size, chance)
    tables = SlotTables(slots, page_size, ROWS, window if apart else None)
    for one in (tables.table, tables.window_table, tables.kv_lens, tables.starts):
        if one is not None:
            one.fill_(POISON)
    rows = chance.sample(range(ROWS), 4)
    lens = [chance.randrange(1, LONGEST) for _ in rows]
    width = {"decode": 1, "verify": 3}.get(kind, 0)
    counts = [width or chance.randrange(0, length + 1) for length in lens]
    added = 3 if kind == "verify" else 0
    new = torch.tensor(
        [chance.choice([-1, *slots[0, :20].tolist()]) for _ in range(sum(counts))],
        dtype=torch.int64,
        device=DEVICE,
    )
    tables.reserve(len(new))
    step = StepSlots(
        rows=torch.tensor(rows, device=DEVICE),
        seq_lens=torch.tensor(lens, device=DEVICE),
        new_slots=new,
        query_len=width,
        query_lens=None if width else torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        added=added,
    )
    write(tables, step)
    total = [min(length + added, LONGEST) for length in lens]
    assert tables.kv_lens[:4].tolist() == total
    assert tables.starts[:5].tolist() == [sum(counts[:i]) for i in range(5)]
    for place, (row, length) in enumerate(zip(rows, total, strict=True)):
        firsts = [int(slots[row, start]) for start in range(0, length, page_size)]
        assert tables.table[place, : len(firsts)].tolist() == [x // page_size for x in firsts]
        if apart:
            assert tables.window_table is not None
            own = [max(int(window[x]), 0) // page_size for x in firsts]
            assert tables.window_table[place, : len(firsts)].tolist() == own
    if apart:
        wanted = [int(window[slot]) if slot >= 0 else -1 for slot in new.tolist()]
        assert tables.window_new[: len(new)].tolist() == wanted


def test_more_requests_than_declared_are_refused() -> None:
    tables = SlotTables(torch.zeros(4, 32, dtype=torch.int32), 16, 2)
    three = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 2 requests, got 3"):
        tables.fill(StepSlots(three, three, three, 1))


def test_a_step_without_requests_writes_nothing() -> None:
    tables = SlotTables(torch.zeros(4, 32, dtype=torch.int32), 16, 2)
    none = torch.zeros(0, dtype=torch.int64)
    tables.fill(StepSlots(none, none, none, 1))
    assert not tables.kv_lens.any()
