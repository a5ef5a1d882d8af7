"""The Hopper kernel of the indexer's logits over pages, by numpy, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from attn.kernels.sparse.indexer import hopper_launch
from attn.kernels.sparse.indexer.hopper_logits import hopper_paged_logits_kernel
from attn.ops.indexer import paged_index_logits
from attn.testing import oracle
from builders.launch.call import KernelCall
from builders.sparse.hopper_tiles import index_programs
from builders.sparse.tiles import IndexTile
from specs.base import cdiv
from specs.rows import LatentFormat
from tests.tools import gluon_in_numpy

E4M3 = torch.float8_e4m3fn
PAGE, WIDTH = 64, 128
ROW = LatentFormat.INDEXER_FP8.row(WIDTH).nbytes
NO_BLOCK = 2**30
"""An entry of a block table that nobody may follow."""
TILE = IndexTile(takes_hopper=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
    """The launches that numpy has run."""
    translation = gluon_in_numpy.Translation()
    return gluon_in_numpy.take_over(monkeypatch, hopper_paged_logits_kernel, translation)


@dataclass
class Paged:
    """Requests over permuted pages; memory that is not theirs is NaN."""

    lens: tuple[int, ...]
    """Cached keys of each request."""
    heads: int = 64
    seen: tuple[tuple[int, int], ...] = ()
    """The request of each query token and the keys that it sees; all of each request's keys by
    default."""
    seed: int = 0
    query: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    table: Tensor = field(init=False)
    data: list[Tensor] = field(init=False)
    """Real keys of each request, float64 ``[keys, 128]``."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.seen = self.seen or tuple(enumerate(self.lens))
        counts = [cdiv(keys, PAGE) for keys in self.lens]
        blocks = torch.randperm(sum(counts) + 3, generator=generator).split([*counts, 3])
        self.cache = torch.full((sum(counts) + 3, PAGE, ROW), 0x7F, dtype=torch.uint8)
        pages = self.cache.view(len(self.cache), -1)
        pages[:, PAGE * WIDTH :].view(torch.float32).fill_(float("nan"))
        self.table = torch.full((len(self.lens), max(counts) + 1), NO_BLOCK, dtype=torch.int32)
        self.data = []
        for request, (keys, mine) in enumerate(zip(self.lens, blocks, strict=False)):
            self.table[request, : len(mine)] = mine
            data = torch.randn(keys, WIDTH, generator=generator).to(E4M3)
            scale = torch.exp2(torch.randint(-3, 3, (keys,), generator=generator).float())
            for key in range(keys):
                page, place = pages[mine[key // PAGE]], key % PAGE
                page[place * WIDTH :][:WIDTH] = data[key].view(torch.uint8)
                page[PAGE * WIDTH :].view(torch.float32)[place] = scale[key]
            self.data.append(data.double() * scale[:, None].double())
        shape = (len(self.seen), self.heads, WIDTH)
        self.query = torch.randn(shape, generator=generator).to(E4M3)
        self.weights = torch.randn(shape[:2], generator=generator)

    def logits(self, rows: slice = slice(None)) -> Tensor:
        requests, lens = torch.tensor(self.seen, dtype=torch.int32)[rows].unbind(1)
        found = torch.full((len(lens), max(int(lens.max()), 1) + 3), float("nan"))
        paged_index_logits(
            *(self.query[rows], self.weights[rows], self.cache, self.table),
            *(requests.contiguous(), lens.contiguous(), found, TILE),
        )
        return found

    def is_right(self, logits: Tensor) -> bool:
        for row, (request, seen) in enumerate(self.seen):
            keys, one = self.data[request][:seen], slice(row, row + 1)
            query, weights = self.query[one].double(), self.weights[one].double()
            wanted = oracle.index_logits(query, keys, weights, max(seen - 1, 0))[0]
            sizes = weights[0].abs() @ (query[0].abs() @ keys.abs().T)
            errors = (logits[row, :seen].double() - wanted).abs()
            # Written so that NaN is an error.
            if not bool((errors <= sizes * 2.0**-20).all()):
                return False
            if not bool(logits[row, seen:].isnan().all()):
                return False
        return True


LENS = (130, 1, 64, 65, 0, 700)
"""Lengths that end inside a page and at its end, and one for which all stages are used anew."""


def launch_programs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(hopper_launch, "index_programs", lambda *_: count)


@pytest.mark.parametrize("programs", [7, 8, 13, 40])
@pytest.mark.parametrize("heads", [20, 64])
def test_logits_are_those_of_the_definition(
    heads: int, programs: int, calls: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_programs(monkeypatch, programs)
    given = Paged(LENS, heads)
    assert given.is_right(given.logits())
    assert [call.grid for call in calls] == [(programs,)]


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("rows", [127, 128, 129, 300])
def test_rows_are_counted_in_turns(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the first and of later turns, rows that see nothing between them."""
    launch_programs(monkeypatch, rows + 5)
    some = {0: (0, 130), 126: (0, 64), 127: (0, 65), 128: (0, 1), 299: (0, 129)}
    given = Paged((130,), 8, tuple(some.get(row, (0, 0)) for row in range(rows)))
    assert given.is_right(given.logits())


@pytest.mark.parametrize(
    ("rows", "programs"), [(1, 660), (64, 660), (110, 660), (111, 1320), (1024, 6600)]
)
def test_programs_are_whole_rounds(rows: int, programs: int) -> None:
    assert index_programs(132, rows) == programs


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_copies_may_come_late(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gluon_in_numpy.delay(monkeypatch, share)
    launch_programs(monkeypatch, 3)
    given = Paged((700, 300), 8)
    assert given.is_right(given.logits())


@pytest.mark.usefixtures("calls")
def test_tokens_of_one_request_see_more_and_more_keys() -> None:
    given = Paged((130, 200), 8, ((1, 127), (0, 0), (1, 128), (1, 129), (0, 64), (1, 200)))
    assert given.is_right(given.logits())


@pytest.mark.usefixtures("calls")
def test_a_row_s_bits_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Paged((300, 65, 190), 16)
    launch_programs(monkeypatch, 5)
    whole = given.logits()
    launch_programs(monkeypatch, 30)
    for row, (_, seen) in enumerate(given.seen):
        alone = given.logits(slice(row, row + 1))
        assert torch.equal(alone[0, :seen], whole[row, :seen])


def test_one_kernel_serves_every_number_of_rows(calls: list[KernelCall]) -> None:
    given = Paged((65, 1, 130), 8)
    for rows in (1, 2, 3):
        given.logits(slice(rows))
    assert [call.arguments["rows"] for call in calls] == [1, 2, 3]
    assert len({call.variant for call in calls}) == 1


def test_strides_of_one_entry_are_not_passed_on(calls: list[KernelCall]) -> None:
    """Copies of 16 bytes need strides that are multiples of it."""
    given = Paged((65,), 1)
    given.query = given.query.as_strided((1, 1, WIDTH), (WIDTH + 1, WIDTH + 3, 1))
    assert given.is_right(given.logits())
    assert [calls[0].arguments[name] for name in ("q_token", "q_head")] == [0, 0]


def moved(x: Tensor, places: int, dim: int = 1) -> None:
    x.copy_(x.roll(places, dim))


FAULTS: dict[str, Callable[[Paged], None]] = {
    "another key": lambda given: moved(given.cache.flatten(1)[:, : PAGE * WIDTH], WIDTH),
    "another scale": lambda given: moved(given.cache.flatten(1)[:, PAGE * WIDTH :], 4),
    "another head": lambda given: moved(given.weights, 1),
    "another row": lambda given: moved(given.weights, 1, 0),
    "another page": lambda given: moved(given.table[:, :2], 1),
}


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    given, wrong = (Paged((128, 100), 8) for _ in range(2))
    FAULTS[fault](wrong)
    assert not given.is_right(wrong.logits())
