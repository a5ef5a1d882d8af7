"""The Hopper kernel of the indexer's logits over gathered keys, by numpy, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from attn.kernels.sparse.indexer import hopper_launch, hopper_ragged
from attn.kernels.sparse.indexer.hopper_ragged import hopper_ragged_logits_kernel
from attn.ops.indexer import ragged_index_logits
from attn.testing import oracle
from builders.launch.call import KernelCall
from builders.sparse.tiles import IndexTile
from tests.tools import gluon_in_numpy

E4M3 = torch.float8_e4m3fn
WIDTH = 128
TILES = {
    "2 at once": IndexTile(hopper_rows=32, hopper_stages=2, hopper_at_once=2),
    "4 at once": IndexTile(hopper_rows=96, hopper_stages=8, hopper_at_once=4),
}


def exchanged(x: np.ndarray, y: np.ndarray, lanes: np.ndarray, bit: np.ndarray) -> np.ndarray:
    other = np.arange(4) ^ int(bit)
    return np.where(lanes & bit, y + y[..., other], x + x[..., other])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """The launches that numpy has run."""
    monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, hopper_ragged.EXCHANGE.value, exchanged)
    monkeypatch.setattr(hopper_launch, "_described", lambda rows, box, swizzle: rows)
    translation = gluon_in_numpy.Translation()
    return gluon_in_numpy.take_over(monkeypatch, hopper_ragged_logits_kernel, translation)


@dataclass
class Prompts:
    """Rows of requests over gathered keys; memory that is not theirs is NaN."""

    spans: tuple[tuple[int, int, int], ...]
    """The keys of each request, its rows, and the keys that its first row sees."""
    heads: int
    seed: int = 0
    query: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    data: Tensor = field(init=False)
    scale: Tensor = field(init=False)
    starts: Tensor = field(init=False)
    ends: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        starts, ends, at = [], [], 0
        for keys, rows, seen in self.spans:
            starts += [at] * rows
            ends += [at + min(seen + row, keys) if seen else at for row in range(rows)]
            at += keys
        self.starts, self.ends = (torch.tensor(x, dtype=torch.int32) for x in (starts, ends))
        shape = (len(starts), self.heads, WIDTH)
        self.query = torch.randn(shape, generator=generator).to(E4M3)
        self.weights = torch.randn(shape[:2], generator=generator)
        # Keys that no row sees may hold anything.
        self.data = (torch.randn(at + 70, WIDTH, generator=generator) * 90).to(E4M3)
        self.scale = torch.exp2(torch.randint(-3, 3, (at + 70,), generator=generator).float())
        self.data.view(torch.uint8)[at:], self.scale[at:] = 0x7F, float("nan")

    def logits(self, tile: IndexTile, rows: slice = slice(None)) -> Tensor:
        width = max(int((self.ends - self.starts)[rows].max()), 1)
        found = torch.full((len(self.starts[rows]), width + 3), float("nan"))
        ragged_index_logits(
            *(self.query[rows], self.weights[rows], self.data, self.scale),
            *(self.starts[rows], self.ends[rows], found, tile),
        )
        return found

    def is_right(self, logits: Tensor) -> bool:
        real = self.data.double() * self.scale[:, None].double()
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            one, seen = slice(row, row + 1), real[start:end]
            query, weights = self.query[one].double(), self.weights[one].double()
            wanted = oracle.index_logits(query, seen, weights, int(end))[0]
            sizes = weights[0].abs() @ (query[0].abs() @ seen.abs().T)
            errors = (logits[row, : len(seen)].double() - wanted).abs()
            # Written so that NaN is an error.
            if not bool((errors <= sizes * 2.0**-20).all()):
                return False
            if not bool(logits[row, len(seen) :].isnan().all()):
                return False
        return True


CASES = {
    "requests share blocks": ((300, 40, 261), (150, 50, 101), (10, 3, 8)),
    "rows without keys": ((130, 5, 126), (0, 40, 0), (520, 9, 512)),
    "one row": ((385, 1, 385),),
    "one key": ((1, 1, 1), (2, 2, 1)),
    "no key at all": ((7, 33, 0),),
}


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("spans", CASES.values(), ids=CASES)
def test_logits_are_those_of_the_definition(
    spans: tuple[tuple[int, int, int], ...], tile: IndexTile, calls: list[KernelCall]
) -> None:
    given = Prompts(spans, 64)
    assert given.is_right(given.logits(tile))
    assert len(calls) == 1


@pytest.mark.parametrize("heads", [4, 20, 32])
def test_heads_that_are_not_there_add_nothing(heads: int, calls: list[KernelCall]) -> None:
    given = Prompts(CASES["requests share blocks"], heads)
    assert given.is_right(given.logits(TILES["2 at once"]))
    assert len(calls) == 1


@pytest.mark.usefixtures("calls")
def test_loads_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    gluon_in_numpy.delay(monkeypatch)
    given = Prompts(CASES["requests share blocks"], 8)
    for tile in TILES.values():
        assert given.is_right(given.logits(tile))


@pytest.mark.usefixtures("calls")
def test_a_row_s_bits_are_its_own() -> None:
    given = Prompts(CASES["requests share blocks"], 16)
    tile = TILES["2 at once"]
    whole = given.logits(tile)
    for row in (0, 39, 40, 60, 92):
        seen = int(given.ends[row] - given.starts[row])
        alone = given.logits(tile, slice(row, row + 1))
        assert torch.equal(alone[0, :seen], whole[row, :seen])


@pytest.mark.parametrize("heads", [1, 5])
def test_what_tma_cannot_load_goes_to_the_portable_kernel(
    heads: int, calls: list[KernelCall]
) -> None:
    """Rows of weights begin at multiples of 16 bytes for 4, 8, 12 ... heads."""
    given = Prompts(CASES["one key"], heads)
    assert given.is_right(given.logits(TILES["2 at once"]))
    assert calls == []


FAULTS: dict[str, Callable[[Prompts], None]] = {
    "another key": lambda given: given.data.view(torch.uint8).copy_(
        given.data.view(torch.uint8).roll(1, 0)
    ),
    "another head": lambda given: given.weights.copy_(given.weights.roll(1, 1)),
    "another row": lambda given: given.weights.copy_(given.weights.roll(1, 0)),
    "a scale": lambda given: given.scale[3:4].mul_(2),
    "one key fewer": lambda given: given.ends[:1].sub_(1),
    "one key more": lambda given: given.ends[:1].add_(1),
}


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    given, wrong = (Prompts(((60, 20, 30),), 8) for _ in range(2))
    FAULTS[fault](wrong)
    assert not given.is_right(wrong.logits(TILES["2 at once"])[:, :60])
