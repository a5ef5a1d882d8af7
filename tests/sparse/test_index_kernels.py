"""The indexer's operations on keys, logits and lists, in Triton's interpreter and in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops import indexer
from attn.ops.dispatch import has_kernel
from attn.ops.indexer import (
    paged_index_logits,
    ragged_index_logits,
    select_topk,
    select_widths,
    write_index_keys,
)
from attn.testing import oracle
from builders.sparse.arguments import RequestPages
from builders.sparse.tiles import IndexTile

E4M3 = torch.float8_e4m3fn
PAGE, WIDTH = 64, 128
WILD = 2**30
SMALL = IndexTile(
    pages=1, steps=2, keys=64, rows=4, num_stages=2, select_short=128, select_long=256
)


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(indexer, "has_kernel", lambda rows: False)
    elif not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


def real_keys(cache: Tensor) -> Tensor:
    """Keys ``[N, 64, 128]`` float64, read by offset: the data of a page's tokens, then their
    scales.
    """
    flat = cache.reshape(len(cache), -1)
    data = flat[:, : PAGE * WIDTH].view(E4M3).reshape(-1, PAGE, WIDTH).double()
    scale = flat[:, PAGE * WIDTH :].contiguous().view(torch.float32).double()
    return data * scale[..., None]


def poisoned(blocks: int) -> Tensor:
    return torch.full((blocks, PAGE, WIDTH + 4), 0xFF, dtype=torch.uint8)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_keys_are_written_with_powers_of_two(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(9, WIDTH, generator=generator)
    keys = keys * torch.exp2(torch.arange(-16, 11, 3))[:, None]
    keys = keys.to(dtype)
    keys[2], keys[3, 7] = 0, 448.0
    if dtype == torch.float32:
        keys[4, 1], keys[5] = 3e38, 1e-41
    cache = poisoned(3)
    slots = torch.tensor([70, -1, 129, 0, 63, 64, 190, 1])
    write_index_keys(keys, cache, slots)
    flat = cache.view(3, -1)
    scale = flat[:, PAGE * WIDTH :].contiguous().view(torch.float32).flatten()
    real = real_keys(cache).view(-1, WIDTH)
    for key, slot in zip(keys.double(), slots.tolist(), strict=False):
        if slot < 0:
            continue
        mantissa, exponent = torch.frexp(scale[slot])
        assert mantissa == 0.5
        largest = float(key.abs().max())
        if largest > 0:
            assert largest / float(scale[slot]) <= 448
            assert largest / float(scale[slot]) > 223 or (exponent == -21 and largest < 1e-4)
        step = torch.exp2(key.abs().clamp(min=2.0**-6 * float(scale[slot])).log2().floor() - 4)
        assert bool(((real[slot] - key).abs() <= step).all())
    untouched = torch.ones(3 * PAGE, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert bool(real[untouched].isnan().all())
    assert bool(scale[untouched].isnan().all())


def test_kernel_and_twin_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    keys = torch.randn(130, WIDTH) * torch.exp2(torch.randint(-40, 40, (130, 1)).float())
    slots = torch.randperm(192)[:130]
    found = []
    for is_kernel in (True, False):
        monkeypatch.setattr(indexer, "has_kernel", lambda rows, is_kernel=is_kernel: is_kernel)
        cache = poisoned(3)
        write_index_keys(keys, cache, slots)
        found.append(cache)
    assert torch.equal(*found)


class Paged:
    """Requests of several lengths over permuted pages, with poison everywhere else."""

    def __init__(self, lens: tuple[int, ...], heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(heads)
        self.lens = lens
        blocks = [-(-length // PAGE) for length in lens]
        ids = 1 + torch.randperm(sum(blocks) + 2, generator=generator)
        self.cache = poisoned(len(ids) + 1)
        flat = self.cache.view(len(self.cache), -1)
        self.table = torch.full((len(lens), max(blocks) + 1), WILD, dtype=torch.int32)
        at = 0
        for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
            self.table[row, :count] = ids[at : at + count]
            for token in range(length):
                block, offset = int(self.table[row, token // PAGE]), token % PAGE
                data = torch.randn(WIDTH, generator=generator).to(E4M3).view(torch.uint8)
                flat[block, offset * WIDTH : (offset + 1) * WIDTH] = data
                scale = torch.exp2(torch.randint(-3, 4, (1,), generator=generator)).float()
                first = PAGE * WIDTH + 4 * offset
                flat[block, first : first + 4] = scale.view(torch.uint8)
            at += count
        self.query = torch.randn(len(lens), heads, WIDTH, generator=generator).to(dtype)
        self.weights = torch.randn(len(lens), heads, generator=generator)

    def keys(self, row: int) -> Tensor:
        """Keys of a request, float64 ``[length, 128]``."""
        length = self.lens[row]
        pages = self.table[row, : -(-length // PAGE)].long()
        return real_keys(self.cache[pages]).view(-1, WIDTH)[:length]

    def expected(self, row: int, request: int, count: int) -> tuple[Tensor, Tensor]:
        """Logits, and the sum of their parts' sizes, float64 ``[count]``."""
        query, weights = self.query[row : row + 1].double(), self.weights[row : row + 1].double()
        keys = self.keys(request)[:count]
        # The query comes after all keys, and sees them.
        logits = oracle.index_logits(query, keys, weights, max(count - 1, 0))[0]
        sizes = torch.einsum("hd,sd->hs", query[0].abs(), keys.abs())
        return logits, (weights[0].abs()[:, None] * sizes).sum(0)


def near(found: Tensor, wanted: tuple[Tensor, Tensor], narrow: float = 2.0**-22) -> bool:
    """Logits may differ by a fraction of the sum of sizes: fp32 sums have about 2**13 terms."""
    logits, sizes = wanted
    return bool(((found.double() - logits).abs() <= sizes * narrow).all())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("heads", [1, 20, 64])
@pytest.mark.parametrize("dtype", [E4M3, torch.float16])
def test_paged_logits_are_those_of_the_definition(heads: int, dtype: torch.dtype) -> None:
    given = Paged((130, 1, 64, 65), heads, dtype)
    logits = torch.full((4, 256), float("nan"))
    lens = torch.tensor(given.lens, dtype=torch.int32)
    arguments = (given.query, given.weights, given.cache, given.table)
    paged_index_logits(*arguments, None, lens, logits, SMALL)
    for row, length in enumerate(given.lens):
        assert near(logits[row, :length], given.expected(row, row, length))
        assert bool(logits[row, length:].isnan().all())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("columns", [70, 130, 190])
def test_a_length_beyond_the_logits_is_cut_there(columns: int) -> None:
    """Columns end inside a program's keys; columns beyond belong to another token's logits, or to
    nobody.
    """
    given = Paged((200, 200), 8, E4M3)
    wide = torch.full((2, 256), float("nan"))
    lens = torch.tensor(given.lens, dtype=torch.int32)
    logits = wide[:, :columns]
    paged_index_logits(
        given.query, given.weights, given.cache, given.table, None, lens, logits, SMALL
    )
    for row in range(2):
        assert near(logits[row], tuple(x[:columns] for x in given.expected(row, row, 200)))
    assert bool(wide[:, columns:].isnan().all())


@pytest.mark.usefixtures("path")
def test_a_length_beyond_the_table_is_cut_there() -> None:
    """An entry past the end of a row of the table is the next row's, and is not read."""
    given = Paged((250, 250), 8, E4M3)
    table = given.table[:, :3]
    logits = torch.full((2, 256), float("nan"))
    lens = torch.tensor(given.lens, dtype=torch.int32)
    paged_index_logits(given.query, given.weights, given.cache, table, None, lens, logits, SMALL)
    for row in range(2):
        wanted = given.expected(row, row, 250)
        assert near(logits[row, : 3 * PAGE], tuple(x[: 3 * PAGE] for x in wanted))
    assert bool(logits[:, 3 * PAGE :].isnan().all())


@pytest.mark.usefixtures("path")
def test_rows_of_one_request_see_more_and_more_keys() -> None:
    given = Paged((130, 66), 8, E4M3)
    given.query = torch.randn(4, 8, WIDTH).to(E4M3)
    given.weights = torch.randn(4, 8)
    requests = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    lens = torch.tensor([65, 129, 66, 0], dtype=torch.int32)
    logits = torch.full((4, 130), float("nan"))
    paged_index_logits(given.query, given.weights, given.cache, given.table, requests, lens, logits)
    for row in range(4):
        count = int(lens[row])
        assert near(logits[row, :count], given.expected(row, int(requests[row]), count))
        assert bool(logits[row, count:].isnan().all())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [E4M3, torch.float16, torch.float32])
def test_ragged_logits_start_at_the_request(dtype: torch.dtype) -> None:
    given = Paged((150, 70), 5, dtype)
    keys = torch.cat([given.keys(0), given.keys(1)])
    scale = torch.exp2(torch.randint(-2, 3, (220,)).float())
    data = (keys / keys.abs().amax(1, keepdim=True) * 200).float().to(E4M3)
    real = data.double() * scale[:, None].double()
    # Causal ends of the last rows of two requests, a row without keys among them.
    starts = torch.tensor([0, 0, 0, 150, 150, 150, 7], dtype=torch.int32)
    ends = torch.tensor([148, 149, 150, 218, 219, 220, 7], dtype=torch.int32)
    query = torch.randn(7, 5, WIDTH).to(dtype)
    weights = torch.randn(7, 5)
    logits = torch.full((7, 150), float("nan"))
    ragged_index_logits(query, weights, data, scale, starts, ends, logits, SMALL)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        one = slice(row, row + 1)
        seen, heads = real[start:end], weights[one].double()
        wanted = oracle.index_logits(query[one].double(), seen, heads, end)[0]
        sizes = query[row].double().abs() @ seen.abs().T
        assert near(logits[row, : end - start], (wanted, heads[0].abs() @ sizes))
        assert bool(logits[row, end - start :].isnan().all())


# -- Selection.


def by_sorting(row: list[float], topk: int) -> list[int]:
    """The definition: largest first, ties to the lower position, then in rising order."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:topk]
    return sorted(order)


def rows_of_logits(generator: torch.Generator) -> tuple[Tensor, list[int]]:
    width = 700
    logits = torch.full((9, width), float("nan"))
    lens = [700, 333, 64, 65, 0, 1, 700, 700, 600]
    for row, length in enumerate(lens):
        logits[row, :length] = torch.randn(length, generator=generator)
    # Logits have hundreds of ties, zeros of both signs, one single value, infinities, tiny
    # differences.
    logits[0] = torch.randint(-2, 3, (width,), generator=generator).float()
    logits[1, :333] = torch.where(torch.rand(333, generator=generator) < 0.5, -0.0, 0.0)
    logits[6] = -1.25
    logits[7, ::3], logits[7, 1::50] = float("-inf"), float("inf")
    logits[8, :600] = 1 + torch.randint(0, 40, (600,), generator=generator) * 2.0**-23
    return logits, lens


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "tile",
    [SMALL, IndexTile(select_short=512, select_long=1024), IndexTile(select_short=1024)],
    ids=["rows in segments", "long rows whole", "all rows are short"],
)
@pytest.mark.parametrize("topk", [64, 40])
def test_the_largest_are_selected_and_ties_go_to_the_lower_position(
    topk: int, tile: IndexTile
) -> None:
    logits, lens = rows_of_logits(torch.Generator().manual_seed(topk))
    out = torch.full((len(lens), topk), 77, dtype=torch.int32)
    out_lens = torch.full((len(lens),), 77, dtype=torch.int32)
    select_topk(logits, torch.tensor(lens, dtype=torch.int32), out, out_lens, tile=tile)
    for row, length in enumerate(lens):
        wanted = by_sorting(logits[row, :length].tolist(), topk)
        assert out[row].tolist() == wanted + [-1] * (topk - len(wanted))
        assert int(out_lens[row]) == len(wanted)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("tile", [SMALL, IndexTile()], ids=["small", "usual"])
def test_nan_is_selected_last_and_short_rows_list_themselves(tile: IndexTile) -> None:
    # A search whose last rounds asked for minus infinity lost the one NaN that is wanted here.
    seeds = [1085, 1747, 1830, 1903, 2390, 2485, 0]
    logits = torch.stack(
        [torch.randn(2, 100, generator=torch.Generator().manual_seed(seed))[0] for seed in seeds]
    )
    logits[:-1, 10:40] = float("nan")
    logits[:-1, 50] = float("-inf")
    logits[-1] = float("nan")
    lens = torch.tensor([100] * (len(seeds) - 1) + [50], dtype=torch.int32)
    out = torch.zeros(len(seeds), 71, dtype=torch.int32)
    select_topk(logits, lens, out, tile=tile)
    for row in out[:-1]:
        assert row.tolist() == [*range(11), *range(40, 100)]
    assert out[-1].tolist() == [*range(50), *[-1] * 21]


@pytest.mark.usefixtures("path")
def test_positions_become_slots_or_are_moved() -> None:
    logits = torch.randn(3, 200)
    lens = torch.tensor([200, 30, 129], dtype=torch.int32)
    plain = torch.zeros(3, 48, dtype=torch.int32)
    select_topk(logits, lens, plain, tile=SMALL)
    table = torch.full((2, 5), WILD, dtype=torch.int32)
    table[0, :4] = torch.tensor([9, 3, 7, 1])
    table[1, 0] = 5
    requests = torch.tensor([0, 1, 0], dtype=torch.int32)
    slots = torch.zeros_like(plain)
    select_topk(logits, lens, slots, pages=RequestPages(table, requests, block_size=64), tile=SMALL)
    moved = torch.zeros_like(plain)
    offsets = torch.tensor([0, 1000, 5], dtype=torch.int32)
    select_topk(logits, lens, moved, offsets=offsets, tile=SMALL)
    for row in range(3):
        for entry, position in enumerate(plain[row].tolist()):
            if position < 0:
                assert slots[row, entry] == -1
                assert moved[row, entry] == -1
                continue
            block = int(table[requests[row], position // 64])
            assert int(slots[row, entry]) == block * 64 + position % 64
            assert int(moved[row, entry]) == position + int(offsets[row])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("spread", ["even", "normal", "from 1e-38 to 1e38", "few values"])
def test_any_spread_of_logits_is_searched(spread: str) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (3, 250)
    made = {
        "even": lambda: torch.rand(shape, generator=generator) + 1000,
        "normal": lambda: torch.randn(shape, generator=generator),
        "from 1e-38 to 1e38": lambda: (
            torch.randn(shape, generator=generator).sign()
            * 10.0 ** (76 * torch.rand(shape, generator=generator) - 38)
        ),
        "few values": lambda: torch.randint(-1, 2, shape, generator=generator) * 3e38,
    }
    logits = made[spread]()
    for topk in (1, 40, 249):
        out = torch.zeros(3, topk, dtype=torch.int32)
        select_topk(logits, torch.full((3,), 250, dtype=torch.int32), out, tile=SMALL)
        for row in range(3):
            assert out[row].tolist() == by_sorting(logits[row].tolist(), topk)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("width", [256, 257, 1000, 2500])
@pytest.mark.parametrize("topk", [64, 33])
def test_rows_of_any_width_are_selected_from(
    topk: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to two launches leave candidates; 16 bytes are loaded at once where rows begin there."""
    empty = Tensor.new_empty

    def poisoned_memory(given: Tensor, *shape: int, **options: Any) -> Tensor:
        made = empty(given, *shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else WILD)

    monkeypatch.setattr(Tensor, "new_empty", poisoned_memory)
    generator = torch.Generator().manual_seed(width + topk)
    lens = [width, width - 1, 256 if width > 256 else 200, topk + 1, width // 2, topk, width, width]
    logits = torch.randn(len(lens), width, generator=generator)
    logits[1] = torch.randint(-2, 3, (width,), generator=generator).float()
    logits[4] = torch.where(logits[4] < 1.5, float("-inf"), logits[4])
    logits[6] = torch.where(logits[6] < 1.5, float("nan"), logits[6])
    logits[6, width // 3 :: 7] = float("-inf")
    logits[7] = torch.where(logits[7] < 0, 0.0, logits[7])
    for row, length in enumerate(lens):
        logits[row, length:] = 1e30 if row % 2 else float("nan")
    out = torch.zeros(len(lens), topk, dtype=torch.int32)
    given = logits.clone()
    select_topk(given, torch.tensor(lens, dtype=torch.int32), out, tile=SMALL)
    assert torch.equal(given.nan_to_num(), logits.nan_to_num())
    for row, length in enumerate(lens):
        last = [(x != x, -x if x == x else 0.0) for x in logits[row, :length].tolist()]
        order = sorted(range(length), key=lambda i: (last[i], i))[:topk]
        assert out[row].tolist() == sorted(order) + [-1] * (topk - len(order)), row


@pytest.mark.usefixtures("path")
def test_candidates_become_slots_or_are_moved() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(3))
    lens = torch.tensor([900, 30, 257], dtype=torch.int32)
    plain, moved, slots = (torch.zeros(3, 48, dtype=torch.int32) for _ in range(3))
    select_topk(logits, lens, plain, tile=SMALL)
    offsets = torch.tensor([1000, 0, 5], dtype=torch.int32)
    select_topk(logits, lens, moved, offsets=offsets, tile=SMALL)
    table = torch.randperm(45, generator=torch.Generator().manual_seed(4)).int().view(3, 15)
    select_topk(logits, lens, slots, pages=RequestPages(table, None, block_size=64), tile=SMALL)
    listed = plain >= 0
    assert int(plain[0].max()) > 256
    assert torch.equal(moved, torch.where(listed, plain + offsets[:, None], -1))
    blocks = table.gather(1, (plain.clamp(min=0) // 64).long())
    assert torch.equal(slots, torch.where(listed, blocks * 64 + plain % 64, -1))


def test_a_warm_up_selects_from_long_rows_where_rows_can_be_long() -> None:
    short, segment = IndexTile().select_short, IndexTile().segment_of(2048)
    assert select_widths(short, 2048) == ()
    assert select_widths(short + 1, 2048) == (short + 4,)
    assert select_widths(segment, 2048) == (short + 4,)
    assert select_widths(1 << 20, 2048) == (short + 4, segment + 4, 8 * segment + 4)


def test_the_whole_selection_is_that_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Paged((190,), 4, torch.float32)
    wanted = oracle.index_topk(given.query.double(), given.keys(0), given.weights.double(), 189, 50)
    for is_kernel in (has_kernel(torch.ones(1)), False):
        monkeypatch.setattr(indexer, "has_kernel", lambda rows, is_kernel=is_kernel: is_kernel)
        logits = torch.full((1, 190), float("nan"))
        lens = torch.tensor([190], dtype=torch.int32)
        arguments = (given.query, given.weights, given.cache, given.table, None, lens)
        paged_index_logits(*arguments, logits)
        out = torch.zeros(1, 50, dtype=torch.int32)
        select_topk(logits, lens, out)
        assert out[0].tolist() == sorted(wanted[0].tolist())


MUTATIONS: dict[str, Callable[[Paged], None]] = {
    "no weights": lambda given: given.weights.fill_(1.0),
    "another query": lambda given: given.query.copy_(given.query.flip(1)),
    "pages exchanged": lambda given: given.table[0, :2].copy_(given.table[0, :2].flip(0).clone()),
    "scales of the next token": lambda given: given.cache.view(len(given.cache), -1)[
        :, PAGE * WIDTH :
    ].copy_(given.cache.view(len(given.cache), -1)[:, PAGE * WIDTH :].roll(4, 1).clone()),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "has_kernel", lambda rows: False)
    given = Paged((130,), 6, torch.float16)
    wanted = given.expected(0, 0, 130)
    MUTATIONS[name](given)
    logits = torch.full((1, 130), float("nan"))
    lens = torch.tensor([130], dtype=torch.int32)
    arguments = (given.query, given.weights, given.cache, given.table, None, lens)
    paged_index_logits(*arguments, logits)
    assert not near(logits[0], wanted)
    assert not near(torch.zeros(130), wanted)


def bad(name: str) -> tuple[Callable[..., None], dict[str, Any], str]:
    query, weights = torch.zeros(2, 4, WIDTH).half(), torch.zeros(2, 4)
    paged = {
        "q_index": query, "weights": weights, "kv_cache": poisoned(2),
        "block_table": torch.zeros(2, 1, dtype=torch.int32), "requests": None,
        "kv_lens": torch.ones(2, dtype=torch.int32), "logits": torch.zeros(2, 64),
    }  # fmt: skip
    rows = torch.zeros(2, 100)
    select = {"logits": rows, "lens": paged["kv_lens"], "out": torch.zeros(2, 8).int()}
    small = torch.zeros(4, 32, WIDTH + 4, dtype=torch.uint8)
    cases: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
        "page": (
            write_index_keys,
            {"k_index": query[0], "kv_cache": small, "slots": torch.zeros(1).long()},
            "planar, of 64 tokens",
        ),
        "page of logits": (paged_index_logits, paged | {"kv_cache": small}, "of 64 tokens"),
        "width": (paged_index_logits, paged | {"q_index": query[..., :64]}, "rows of 68 bytes"),
        "weights": (paged_index_logits, paged | {"weights": weights[:, :3]}, "weights must be"),
        "query": (paged_index_logits, paged | {"q_index": query.long()}, "q_index must be"),
        "logits": (paged_index_logits, paged | {"logits": rows[:1]}, "logits must be"),
        "out": (select_topk, select | {"out": torch.zeros(2, 8)}, "out must be int32"),
        "half": (select_topk, select | {"logits": rows.half()}, "logits must be float32"),
        "both": (
            select_topk,
            select | {"pages": RequestPages(paged["block_table"]), "offsets": paged["kv_lens"]},
            "must not both be given",
        ),
        "keys": (
            write_index_keys,
            {"k_index": query[0].T[:WIDTH, :128].T, "kv_cache": poisoned(1),
             "slots": torch.zeros(9).long()},
            "k_index must be",
        ),
    }  # fmt: skip
    return cases[name]


@pytest.mark.parametrize(
    "name",
    [
        "page",
        "page of logits",
        "width",
        "weights",
        "query",
        "logits",
        "out",
        "half",
        "both",
        "keys",
    ],
)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, given, problem = bad(name)
    with pytest.raises(ValueError, match=problem):
        call(**given)
