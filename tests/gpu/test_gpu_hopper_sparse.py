"""Sparse latent attention by the Hopper kernels, on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.device import device_facts
from builders.sparse.hopper_tiles import hopper_sparse_tile, usual_options
from builders.sparse.launches import workspace_for
from builders.sparse.tiles import SparseShape, SparseTile
from specs.devices import DeviceKind
from specs.rows import LatentFormat
from tests.sparse.sparse_cases import LAYOUTS, SparseCase, SparseTrial, attend

DEVICE = torch.device("cuda")
TOPK = 640
# Some lists are no multiple of a tile or of a block; one is empty, and one has a single entry.
LENS = (640, 0, 129, 1, 512, 639, 300, 64, 65, 128)
HEADS = (1, 8, 16, 20, 64, 65, 128)
SERVED = (LAYOUTS[0], LAYOUTS[2])
"""Layouts that the kernel for many heads serves; the kernel for few heads serves every layout."""
FEW = 32
LAUNCHES = 60
COPIES = 40
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"early": True},
    {"early": False},
    {"programs_per_sm": None},
    {"early": True, "programs_per_sm": None},
    {"balanced": True},
    {"balanced": True, "early": True},
)

FEW_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"balanced": False},
    {"balanced": True},
    {"second_registers": 208, "producer_registers": 88},
    {"second_registers": 216, "producer_registers": 72},
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if device_facts(DEVICE).kind is not DeviceKind.SM90:
        pytest.skip("it is for Hopper")


def case_of(layout: LatentFormat, heads: int, **given: Any) -> SparseCase:
    known = {
        "lens": LENS, "topk": TOPK, "rank": 512, "rope_size": 64, "block_size": 64,
        "num_blocks": 40, "dtype": torch.bfloat16, "device": "cuda",
    }  # fmt: skip
    return SparseCase(layout, heads, **{**known, **given})


def tile_of(case: SparseCase, rows: int, **changes: Any) -> SparseTile:
    """The tile for a number of rows, with some options changed.

    With few heads, fewer than 8 rows get the tile of 8.
    """
    shape = SparseShape(case.num_heads, case.topk, case.layout)
    options = replace(usual_options(shape), **changes)
    if case.num_heads <= FEW:
        rows = max(rows, 8)
    tile = hopper_sparse_tile(shape, device_facts(DEVICE).num_multiprocessors, rows, options)
    assert tile.hopper == options
    return tile


def options_of(heads: int) -> tuple[dict[str, Any], ...]:
    return FEW_OPTIONS if heads <= FEW else OPTIONS


def served(*heads: int) -> list[Any]:
    """Parameters of a test: pairs of a layout and a number of heads that a Hopper kernel serves."""
    return [
        pytest.param(layout, count, id=f"{layout.value}-{count}")
        for layout in LAYOUTS
        for count in heads
        if count <= FEW or layout in SERVED
    ]


def run(trial: SparseTrial, tile: SparseTile, **changes: Any) -> tuple[Tensor, Tensor]:
    out, lse = trial.results()
    attend(**{**trial.arguments(), **changes}, output=out, lse=lse, tile=tile)
    return out, lse


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("layout", "heads"), served(*HEADS))
def test_states_whole_and_split(layout: LatentFormat, heads: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    for rows in (10**6, 40, 1):
        tile = tile_of(trial.case, rows)
        assert trial.misses(*run(trial, tile)) == {}, (rows, tile.segments(TOPK))


@pytest.mark.parametrize(("layout", "heads"), served(8, 40, 128))
def test_every_option(layout: LatentFormat, heads: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    for rows in (10**6, 1):
        for changes in options_of(heads):
            tile = tile_of(trial.case, rows, **changes)
            assert trial.misses(*run(trial, tile)) == {}, (rows, changes)


@pytest.mark.parametrize(("layout", "heads"), served(20, 128))
def test_sinks_padded_blocks_and_another_page(layout: LatentFormat, heads: int) -> None:
    for given in (
        {"sinks": True},
        {"padded_blocks": True},
        {"block_size": 16, "num_blocks": 160, "padded_blocks": True, "sinks": True},
    ):
        trial = SparseTrial(case_of(layout, heads, **given))
        for rows in (10**6, 1):
            assert trial.misses(*run(trial, tile_of(trial.case, rows))) == {}, given


@pytest.mark.parametrize(("layout", "heads"), [(0, 70), (0, 16), (1, 16)])
def test_fp16(layout: int, heads: int) -> None:
    trial = SparseTrial(case_of(LAYOUTS[layout], heads, dtype=torch.float16))
    for rows in (10**6, 1):
        assert trial.misses(*run(trial, tile_of(trial.case, rows))) == {}


@pytest.mark.parametrize("heads", [16, 64])
def test_all_entries_count_without_lengths(heads: int) -> None:
    trial = SparseTrial(case_of(LAYOUTS[0], heads))
    ids = trial.indices.clone()
    for row, length in enumerate(LENS):
        ids[row, length:] = -1
    found = run(trial, tile_of(trial.case, 10**6), indices=ids.cuda(), topk_lens=None)
    assert trial.misses(*found) == {}


@pytest.mark.parametrize("rows", [1, 10**6])
@pytest.mark.parametrize(("layout", "heads"), served(8, 16, 128))
def test_every_launch_gives_the_same_bits(layout: LatentFormat, heads: int, rows: int) -> None:
    trial = SparseTrial(case_of(layout, heads))
    given = trial.arguments()
    for name in ("query", "rotary", "indices", "topk_lens"):
        given[name] = torch.cat([given[name]] * COPIES)
    once = trial.results()
    for changes in options_of(heads):
        tile, first = tile_of(trial.case, rows, **changes), None
        if tile.shares:
            # With balanced cuts, a row's place in the batch decides where its list is cut.
            continue
        for _ in range(LAUNCHES):
            out, lse = (torch.cat([tensor] * COPIES) for tensor in once)
            attend(**given, output=out, lse=lse, tile=tile)
            for copy in zip(out.chunk(COPIES), lse.chunk(COPIES), strict=True):
                first = first or copy
                assert same(first, copy), changes
        assert first is not None
        assert trial.misses(*first) == {}, changes


@pytest.mark.parametrize("copies", [7, 14, COPIES])
@pytest.mark.parametrize(("layout", "heads"), served(8, 16, 20, 64, 128))
def test_bits_do_not_depend_on_who_is_last(layout: LatentFormat, heads: int, copies: int) -> None:
    """Bits do not depend on which of two programs with parts of a list arrives last."""
    trial = SparseTrial(case_of(layout, heads))
    given = trial.arguments()
    for name in ("query", "rotary", "indices", "topk_lens"):
        given[name] = torch.cat([given[name]] * copies)
    rows = len(given["query"])
    once = trial.results()
    more = ({"balanced": True, "early": False},) if heads > FEW else ()
    for changes in ({"balanced": True}, *more):
        tile, first = tile_of(trial.case, rows, **changes), None
        workspace = workspace_for(tile, rows, heads, TOPK, 512, DEVICE)
        assert workspace.counters is not None
        for launch in range(2 * LAUNCHES):
            # Fill the workspace anew: a launch must not read what the one before it left.
            for poison in (workspace.states, workspace.sums):
                poison.fill_(float("nan") if launch % 2 else 0.0)
            out, lse = (torch.cat([tensor] * copies) for tensor in once)
            attend(**given, output=out, lse=lse, tile=tile, workspace=workspace)
            first = first or (out, lse)
            assert same(first, (out, lse)), (changes, launch)
            assert not workspace.counters.any(), (changes, launch)
        assert first is not None
        for copy in zip(*(tensor.chunk(copies) for tensor in first), strict=True):
            assert trial.misses(*copy) == {}, changes


@pytest.mark.parametrize(("layout", "heads"), served(16, 128))
def test_a_graph_replays_other_lists(layout: LatentFormat, heads: int) -> None:
    trials = [SparseTrial(case_of(layout, heads), seed) for seed in range(3)]
    trials.append(SparseTrial(case_of(layout, heads, lens=(0,) * len(LENS)), 3))
    static = trials[0].arguments()
    for name in ("query", "rotary", "kv_cache"):
        static[name] = static[name].clone()
    out, lse = trials[0].results()
    for rows, changes in ((1, {}), (10**6, {}), (10**6, {"balanced": True})):
        tile = tile_of(trials[0].case, rows, **changes)
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
            if any(trial.case.lens):
                assert trial.misses(out, lse) == {}
            else:
                assert not out.any()
                assert bool((lse == float("-inf")).all())


def test_rows_far_into_a_large_cache() -> None:
    """Rows at offsets beyond 2^31 bytes and beyond 2^31 elements are read."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 24 * 2**30:
        pytest.skip("needs 10 GiB")
    for layout, heads in ((LAYOUTS[0], 64), (LAYOUTS[1], 16), (LAYOUTS[2], 64), (LAYOUTS[2], 16)):
        trial = SparseTrial(case_of(layout, heads))
        block, row = trial.cache.shape[1:]
        blocks = 2**33 // (block * row) + 9
        large = torch.full((blocks, block, row), 0xFF, dtype=torch.uint8, device=DEVICE)
        first = blocks - trial.case.num_blocks
        large[first:] = trial.cache
        ids = trial.arguments()["indices"]
        ids = torch.where((ids >= 0) & (ids < first), ids + first * block, ids).int()
        tile = tile_of(trial.case, 10**6)
        assert same(run(trial, tile, kv_cache=large, indices=ids), run(trial, tile))
        del large
