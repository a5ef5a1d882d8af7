"""Sparse latent attention and its indexer on a GPU, at the sizes of a serving engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.bench.results.tables.sparse import FEW, MANY
from attn.ops.indexer import (
    paged_index_logits,
    ragged_index_logits,
    select_topk,
    write_index_keys,
)
from attn.reference import indexer as reference
from builders.device import device_facts
from builders.sparse.arguments import RequestPages
from builders.sparse.launches import workspace_for
from builders.sparse.tiles import IndexTile, SparseShape, SparseTile, sparse_tile
from specs.devices import DeviceKind
from specs.rows import LatentFormat
from tests.sparse.sparse_cases import LAYOUTS, SparseCase, SparseTrial, attend

DEVICE = torch.device("cuda")
TOPK = 640
LENS = (640, 0, 129, 1, 512, 639, 300)
HEADS = (1, 2, 8, 16, 20, 64, 128)
E4M3 = torch.float8_e4m3fn
LAUNCHES = 120
COPIES = 40

pytestmark = pytest.mark.gpu


def case_of(layout: LatentFormat, heads: int, **given: Any) -> SparseCase:
    known = {
        "lens": LENS, "topk": TOPK, "rank": 512, "rope_size": 64, "block_size": 64,
        "num_blocks": 40, "dtype": torch.bfloat16, "device": "cuda",
    }  # fmt: skip
    return SparseCase(layout, heads, **{**known, **given})


def tile_of(case: SparseCase, rows: int, batch_invariant: bool = False) -> SparseTile:
    """The tile for a number of rows on this device."""
    gpu = device_facts(DEVICE)
    size = torch.empty((), dtype=case.dtype).element_size()
    shape = SparseShape(case.num_heads, case.topk, case.layout, size)
    return sparse_tile(shape, gpu.kind, gpu.num_multiprocessors, rows, batch_invariant)


def run(trial: SparseTrial, tile: SparseTile, **changes: Any) -> tuple[Tensor, Tensor]:
    out, lse = trial.results()
    arguments = {**trial.arguments(), **changes}
    rows = slice(0, len(arguments["query"]))
    attend(**arguments, output=out[rows], lse=lse[rows], tile=tile)
    return out[rows], lse[rows]


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_states_split_and_whole(layout: LatentFormat, heads: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    few, many = tile_of(trial.case, 1), tile_of(trial.case, 10**6)
    strict = tile_of(trial.case, 1, batch_invariant=True)
    assert few.programs(TOPK) > 1
    assert strict.programs(TOPK) > 1
    assert many.programs(TOPK) == 1
    results = [run(trial, tile) for tile in (strict, many, few)]
    for out, lse in results:
        assert trial.misses(out, lse) == {}
    if many.folds:
        assert same(*results[:2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("heads", [8, 128])
def test_other_types_sinks_and_padded_blocks(
    layout: LatentFormat, heads: int, dtype: torch.dtype
) -> None:
    trial = SparseTrial(case_of(layout, heads, dtype=dtype, sinks=True, padded_blocks=True))
    for rows in (1, 10**6):
        assert trial.misses(*run(trial, tile_of(trial.case, rows))) == {}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_alternatives_are_right_too(layout: LatentFormat, heads: int) -> None:
    if device_facts(DEVICE).kind is not DeviceKind.SM90:
        pytest.skip("they are for Hopper")
    trial = SparseTrial(case_of(layout, heads))
    for rows in (1, 10**6):
        for name, changes in (FEW if heads == 16 else MANY).items():
            tile = replace(tile_of(trial.case, rows), **changes)
            assert trial.misses(*run(trial, tile)) == {}, (rows, name)


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_bits_depend_on_the_row_alone(layout: LatentFormat, heads: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    given, rows = trial.arguments(), len(LENS)
    tile = tile_of(trial.case, rows, batch_invariant=True)
    together = run(trial, tile)
    for row in range(rows):
        alone = {
            name: given[name][row : row + 1] for name in ("query", "rotary", "indices", "topk_lens")
        }
        single = run(trial, tile_of(trial.case, 1, batch_invariant=True), **alone)
        assert same(single, (together[0][row : row + 1], together[1][row : row + 1]))


@pytest.mark.parametrize("rows", [1, 10**6])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_every_launch_gives_the_same_bits(layout: LatentFormat, heads: int, rows: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    tile, given = tile_of(trial.case, rows), trial.arguments()
    for name in ("query", "rotary", "indices", "topk_lens"):
        given[name] = torch.cat([given[name]] * COPIES)
    once = trial.results()

    def launch() -> list[tuple[Tensor, Tensor]]:
        out, lse = (torch.cat([tensor] * COPIES) for tensor in once)
        attend(**given, output=out, lse=lse, tile=tile)
        return list(zip(out.chunk(COPIES), lse.chunk(COPIES), strict=True))

    first = launch()[0]
    assert trial.misses(*first) == {}
    # Copies of the rows have the same bits, on whatever multiprocessor they run.
    for _ in range(LAUNCHES):
        assert all(same(first, copy) for copy in launch())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_a_graph_replays_other_lists(layout: LatentFormat, heads: int) -> None:
    trials = [SparseTrial(case_of(layout, heads), seed) for seed in range(3)]
    trials.append(SparseTrial(case_of(layout, heads, lens=(0,) * len(LENS)), 3))
    static = trials[0].arguments()
    static["query"] = static["query"].clone()
    static["rotary"] = static["rotary"].clone()
    static["kv_cache"] = static["kv_cache"].clone()
    out, lse = trials[0].results()
    for rows in (1, 10**6):
        tile = tile_of(trials[0].case, rows)
        workspace = workspace_for(tile, len(LENS), heads, TOPK, 512, DEVICE)
        given = {**static, "output": out, "lse": lse, "tile": tile, "workspace": workspace}
        attend(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(**given)
        for trial in (*trials[1:], trials[0]):
            for name, tensor in trial.arguments().items():
                if isinstance(static[name], Tensor) and name != "k_scale":
                    static[name].copy_(tensor)
            for poison in (out, lse, workspace.states, workspace.sums):
                poison.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert same((out, lse), run(trial, tile))
            if any(trial.case.lens):
                assert trial.misses(out, lse) == {}
            else:
                assert not out.any()
                assert bool((lse == float("-inf")).all())


def test_rows_far_into_a_large_cache() -> None:
    """Rows at offsets beyond 2^31 bytes and beyond 2^31 elements are read."""
    block, row = 64, 656
    blocks = 2**32 // (block * row) + 9
    if torch.cuda.get_device_properties(DEVICE).total_memory < 12 * 2**30:
        pytest.skip("needs 5 GiB")
    case = case_of(LAYOUTS[2], 8)
    trial = SparseTrial(case)
    large = torch.full((blocks, block, row), 0xFF, dtype=torch.uint8, device=DEVICE)
    first = blocks - case.num_blocks
    large[first:] = trial.cache
    given = trial.arguments()
    ids = given["indices"]
    ids = torch.where((ids >= 0) & (ids < first), ids + first * block, ids).int()
    found = run(trial, tile_of(case, 1), kv_cache=large, indices=ids)
    assert same(found, run(trial, tile_of(case, 1)))


# -- The indexer.


class Keys:
    """Paged index keys of requests with given lengths; unused slots hold NaN."""

    def __init__(self, lens: list[int], heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        counts = [-(-length // 64) for length in lens]
        ids = 1 + torch.randperm(sum(counts) + 3, device=DEVICE, generator=generator)
        shape = (int(ids.max()) + 1, 64, 132)
        self.cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
        self.table = torch.full((len(lens), max(counts)), 2**30, dtype=torch.int32, device=DEVICE)
        at = 0
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            pages = ids[at : at + count]
            self.table[row, :count] = pages
            slots = (pages[:, None] * 64 + torch.arange(64, device=DEVICE)).flatten()[:length]
            keys = torch.randn(length, 128, device=DEVICE, generator=generator).bfloat16()
            write_index_keys(keys, self.cache, slots)
            at += count
        query = torch.randn(len(lens), heads, 128, device=DEVICE, generator=generator)
        self.query = query.to(dtype)
        self.weights = torch.randn(len(lens), heads, device=DEVICE, generator=generator)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)

    def paged(self, tile: IndexTile | None = None) -> Tensor:
        most = int(self.lens.max())
        logits = torch.full((len(self.lens), most), float("nan"), device=DEVICE)
        paged_index_logits(
            *(self.query, self.weights, self.cache, self.table, None, self.lens, logits), tile
        )
        return logits

    def check(self, logits: Tensor, fraction: float) -> None:
        """Check that errors of logits are within a fraction of the sum of their absolute terms."""
        for row, length in enumerate(self.lens.tolist()):
            keys = reference.read_index_keys(self.cache, self.table[row], length, torch.float64)
            query, weights = self.query[row].double(), self.weights[row].double()
            wanted = (weights[:, None] * (query @ keys.T).relu()).sum(0)
            sizes = weights.abs() @ (query.abs() @ keys.abs().T)
            errors = (logits[row, :length].double() - wanted).abs()
            assert bool((errors <= fraction * sizes).all()), row
            assert bool(logits[row, length:].isnan().all())


def test_keys_are_the_twins_bytes() -> None:
    keys = torch.randn(3000, 128, device=DEVICE)
    keys = (keys * torch.exp2(torch.randint(-30, 30, (3000, 1), device=DEVICE))).bfloat16()
    keys[7] = 0
    slots = torch.randperm(64 * 64, device=DEVICE)[:3000]
    slots[5] = -1
    found = torch.full((64, 64, 132), 0xFF, dtype=torch.uint8, device=DEVICE)
    wanted = found.cpu()
    write_index_keys(keys, found, slots)
    reference.write_index_keys(keys.cpu(), wanted, slots.cpu())
    assert torch.equal(found.cpu(), wanted)


def share_of_terms(dtype: torch.dtype) -> float:
    """Largest error of the chosen kernel; on Hopper it multiplies e4m3 as e4m3."""
    is_hopper = device_facts(DEVICE).kind is DeviceKind.SM90
    return 2.0**-11 if is_hopper and dtype == E4M3 else 2.0**-20


@pytest.mark.parametrize("heads", [1, 32, 40, 64])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [None, IndexTile()], ids=["chosen", "plain"])
def test_paged_logits(heads: int, dtype: torch.dtype, tile: IndexTile | None) -> None:
    share = share_of_terms(dtype) if tile is None else 2.0**-20
    for lens in ([5000, 1, 64, 65, 0, 2048, 4097], [40000] * 20, [300]):
        keys = Keys(lens, heads, dtype)
        found = keys.paged(tile)
        keys.check(found, share)
        assert torch.equal(found.nan_to_num(), keys.paged(tile).nan_to_num())


def test_a_row_s_logits_are_its_own() -> None:
    keys = Keys([5000, 129, 2048, 4097], 64, E4M3)
    whole = keys.paged()
    for row, length in enumerate(keys.lens.tolist()):
        one = slice(row, row + 1)
        found = torch.empty(1, length, device=DEVICE)
        tensors = keys.query[one], keys.weights[one], keys.cache, keys.table[one]
        paged_index_logits(*tensors, None, keys.lens[one], found)
        assert torch.equal(found[0], whole[row, :length])


def test_logits_of_rows_that_are_not_aligned() -> None:
    keys = Keys([5000, 1, 65], 64, E4M3)
    wide = torch.zeros(3, 64, 136, device=DEVICE).to(E4M3)
    wide[..., 8:].copy_(keys.query)
    keys.query = wide[..., 8:]
    keys.check(keys.paged(), 2.0**-20)


def test_paged_logits_of_fp8_products() -> None:
    keys = Keys([5000, 1, 65], 64, E4M3)
    keys.check(keys.paged(IndexTile(fp8_products=True)), 2.0**-11)


class Gathered:
    """Rows of two requests over gathered keys; keys that no row sees are NaN."""

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        data = 100 * torch.randn(3000, 128, device=DEVICE, generator=generator)
        self.data = data.clamp(-448, 448).to(E4M3)
        scale = torch.randint(-3, 3, (3000,), device=DEVICE, generator=generator)
        self.scale = torch.exp2(scale.float())
        rows = 700
        self.starts = torch.where(torch.arange(rows, device=DEVICE) < 400, 0, 1234).int()
        seen = torch.arange(rows, device=DEVICE) % 400
        self.ends = (self.starts + 800 + seen).int().clamp(max=2990)
        # A row without keys.
        self.ends[17] = self.starts[17]
        self.data.view(torch.uint8)[int(self.ends.max()) :] = 0x7F
        self.scale[int(self.ends.max()) :] = float("nan")
        query = torch.randn(rows, heads, 128, device=DEVICE, generator=generator)
        self.query = query.to(dtype)
        self.weights = torch.randn(rows, heads, device=DEVICE, generator=generator)

    def logits(self, rows: slice = slice(None), tile: IndexTile | None = None) -> Tensor:
        found = torch.full((len(self.starts[rows]), 1301), float("nan"), device=DEVICE)
        ragged_index_logits(
            *(self.query[rows], self.weights[rows], self.data, self.scale),
            *(self.starts[rows], self.ends[rows], found, tile),
        )
        return found

    def check(self, logits: Tensor, fraction: float) -> None:
        """Check that errors of logits are within a fraction of the sum of their absolute terms."""
        real = self.data.double() * self.scale[:, None].double()
        for row in (17, *range(0, len(self.starts), 37)):
            keys = real[self.starts[row] : self.ends[row]]
            query, weights = self.query[row].double(), self.weights[row].double()
            wanted = weights @ (query @ keys.T).relu()
            sizes = weights.abs() @ (query.abs() @ keys.abs().T)
            errors = (logits[row, : len(keys)].double() - wanted).abs()
            assert bool((errors <= fraction * sizes).all()), row
            assert bool(logits[row, len(keys) :].isnan().all()), row


@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_ragged_logits_of_the_portable_kernel(dtype: torch.dtype) -> None:
    given = Gathered(64, dtype)
    given.check(given.logits(tile=IndexTile()), 2.0**-20)


@pytest.mark.parametrize("heads", [4, 20, 32, 64])
def test_ragged_logits_of_the_chosen_kernel(heads: int) -> None:
    """On Hopper it multiplies e4m3 as e4m3."""
    given = Gathered(heads, E4M3)
    found = given.logits()
    given.check(found, 2.0**-11)
    for _ in range(3):
        assert torch.equal(found.nan_to_num(), given.logits().nan_to_num())


def test_a_row_s_logits_over_gathered_keys_are_its_own() -> None:
    given = Gathered(64, E4M3)
    whole = given.logits()
    for rows in (slice(0, 1), slice(399, 401), slice(3, 90), slice(640, 700)):
        assert torch.equal(given.logits(rows).nan_to_num(), whole[rows].nan_to_num())


def test_a_captured_launch_over_gathered_keys_replays() -> None:
    given = Gathered(64, E4M3)
    wanted = given.logits()
    found = torch.full_like(wanted, float("nan"))
    arguments = (given.query, given.weights, given.data, given.scale, given.starts, given.ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ragged_index_logits(*arguments, found)
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("length", [2048, 2049, 4096, 5000, 8193, 16385, 32768, 131072, 300000])
def test_selection_is_that_of_a_stable_sort(length: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(length)
    rows, topk = 6, 2048
    logits = torch.randn(rows, length, device=DEVICE, generator=generator)
    logits[1] = torch.randint(-3, 3, (length,), device=DEVICE, generator=generator).float()
    logits[2] = 0.5
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    logits[4, : length // 2] = float("-inf")
    lens = torch.tensor([length] * 5 + [length // 2], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(rows, topk, dtype=torch.int32, device=DEVICE)
    out_lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    select_topk(logits, lens, out, out_lens)
    wanted = torch.zeros_like(out, device="cpu")
    wanted_lens = torch.zeros_like(out_lens, device="cpu")
    given = (logits.cpu(), lens.cpu(), wanted, wanted_lens)
    reference.select_topk(*given, None, None)
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(out_lens.cpu(), wanted_lens)
    for _ in range(LAUNCHES):
        again = torch.zeros_like(out)
        select_topk(logits, lens, again)
        assert torch.equal(again, out)


def test_a_graph_of_logits_and_selection_replays_other_lengths() -> None:
    keys = Keys([9000, 3000, 2048, 70], 64, E4M3)
    logits = torch.zeros(4, 9000, device=DEVICE)
    out = torch.zeros(4, 2048, dtype=torch.int32, device=DEVICE)
    lens = keys.lens.clone()

    def step(logits: Tensor, out: Tensor) -> None:
        paged_index_logits(keys.query, keys.weights, keys.cache, keys.table, None, lens, logits)
        select_topk(logits, lens, out, pages=RequestPages(keys.table))

    step(logits, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(logits, out)
    for change in ([9000, 3000, 2048, 70], [1, 0, 2048, 69], [8999, 2500, 1, 64], [0] * 4):
        lens.copy_(torch.tensor(change, dtype=torch.int32))
        logits.fill_(float("nan"))
        out.fill_(77)
        graph.replay()
        found = out.clone()
        step(torch.full_like(logits, float("nan")), out)
        assert torch.equal(found, out)
        counts = (found >= 0).sum(1).tolist()
        assert counts == [min(length, 2048) for length in change]
