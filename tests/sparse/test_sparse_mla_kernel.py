"""Sparse latent attention in Triton's interpreter and in torch, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.ops import sparse_mla as ops
from attn.ops.dispatch import has_kernel
from attn.ops.sparse_mla import tile_for
from builders.sparse.launches import SparseWorkspace
from builders.sparse.tiles import SparseShape, SparseTile, sparse_tile
from specs.devices import DeviceKind
from specs.rows import LatentFormat
from tests.sparse.sparse_cases import LAYOUTS, SparseCase, SparseTrial, attend

LENS = (96, 0, 33, 1, 64, 95)
ENOUGH = 4
"""Query tokens whose lists are not split, on the device that a CPU stands for."""


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(ops, "has_kernel", lambda rows: False)
    elif not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


def run(trial: SparseTrial, tile: SparseTile | None = None, **changes: Any) -> dict[str, float]:
    """Run the kernel; return results that exceed their budget."""
    out, lse = trial.results()
    attend(**{**trial.arguments(), **changes}, output=out, lse=lse, tile=tile)
    return trial.misses(out, lse)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 70])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_listed_rows_are_attended_and_no_others(layout: LatentFormat, heads: int) -> None:
    assert run(SparseTrial(SparseCase(layout, heads, LENS))) == {}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("padded_blocks", [False, True])
def test_wide_rows_sinks_and_fp32(layout: LatentFormat, padded_blocks: bool) -> None:
    case = SparseCase(
        layout, 6, (200, 0, 130), 200, rank=256, rope_size=64, sinks=True,
        padded_blocks=padded_blocks, dtype=torch.float32,
    )  # fmt: skip
    assert run(SparseTrial(case)) == {}


@pytest.mark.usefixtures("path")
def test_one_block_of_compact_rows_and_no_lengths() -> None:
    case = SparseCase(LAYOUTS[2], 4, (70, 70), 70, block_size=160, num_blocks=2)
    trial = SparseTrial(case)
    one = trial.cache.reshape(1, 320, -1)
    assert run(trial, kv_cache=one) == {}
    assert run(trial, topk_lens=None) == {}


TILES = {
    "split": SparseTile(16, 16, 32, 1, 4, 2),
    "spans of two": SparseTile(16, 16, 32, 2, 4, 2),
    "whole": SparseTile(16, 16, 32, 99, 4, 2),
    "ids by the compiler": SparseTile(16, 16, 32, 1, 4, 2, carries_ids=False),
    "held": SparseTile(16, 16, 32, 99, 4, 2, holds_next=True),
    "many": SparseTile(64, 16, 64, 1, 4, 2, many=True),
    "many, no whole steps": SparseTile(64, 64, 64, 1, 4, 2, many=True),
    "many, whole": SparseTile(64, 16, 1 << 16, 1, 4, 2, many=True),
    "another finish": SparseTile(32, 32, 96, 1, 4, 2, finish_rows=8, finish_width=64),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
def test_every_variant_of_a_tile_is_right(layout: LatentFormat, name: str) -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    assert run(SparseTrial(SparseCase(layout, 20, LENS, sinks=True)), TILES[name]) == {}


def states(trial: SparseTrial, tile: SparseTile | None = None, **changes: Any) -> torch.Tensor:
    out, lse = trial.results()
    arguments = {**trial.arguments(), **changes}
    keep = slice(0, len(arguments["query"]))
    attend(**arguments, output=out[keep], lse=lse[keep], tile=tile)
    return torch.cat([out[keep].float(), lse[keep][..., None]], -1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("heads", [3, 20])
def test_bits_depend_on_the_row_alone(layout: LatentFormat, heads: int) -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    trial = SparseTrial(SparseCase(layout, heads, (160, 20, 131, 160), 160))
    given = trial.arguments()
    shape = SparseShape(heads, 160, layout, 2, 128, 32)
    fixed = sparse_tile(shape, DeviceKind.SM100, 4, 1), sparse_tile(shape, DeviceKind.SM100, 4, 99)
    assert [tile.programs(160) for tile in fixed] == [2, 1]
    together = states(trial, fixed[1])
    assert torch.equal(states(trial, fixed[0]), together)
    for row in range(4):
        alone = {
            name: given[name][row : row + 1] for name in ("query", "rotary", "indices", "topk_lens")
        }
        assert torch.equal(states(trial, fixed[0], **alone), together[row : row + 1])


def test_the_tile_follows_heads_rows_and_device() -> None:
    few, many = (SparseShape(16, 2048), SparseShape(128, 2048))
    sm90 = DeviceKind.SM90
    assert sparse_tile(few, sm90, 132, 1).programs(2048) == 32
    assert sparse_tile(few, sm90, 132, 2).programs(2048) == 16
    assert sparse_tile(few, sm90, 132, 128).programs(2048) == 1
    assert sparse_tile(many, sm90, 132, 1).programs(2048) == 8
    assert sparse_tile(many, sm90, 132, 66).programs(2048) == 1
    assert sparse_tile(many, sm90, 132, 66, batch_invariant=True).programs(2048) == 8
    for heads, rows in ((1, 16), (8, 16), (17, 32), (33, 64), (64, 64), (128, 64)):
        assert sparse_tile(SparseShape(heads, 2048), sm90, 132, 9).rows == rows
        assert sparse_tile(SparseShape(heads, 2048), DeviceKind.SM120, 132, 9).rows == 16
    for heads in (8, 16):
        assert sparse_tile(SparseShape(heads, 2048), sm90, 132, 128).kv_tile == 64
        assert (
            sparse_tile(SparseShape(heads, 2048), sm90, 132, 9, batch_invariant=True).kv_tile == 64
        )
        assert sparse_tile(SparseShape(heads, 2048), sm90, 132, 9).kv_tile == 128
        assert sparse_tile(SparseShape(heads, 2048), DeviceKind.SM100, 132, 9).kv_tile == 32
    block_scaled = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    assert sparse_tile(SparseShape(20, 2048, block_scaled), sm90, 132, 9).rows == 64
    assert sparse_tile(SparseShape(128, 2048, block_scaled), sm90, 132, 9).many
    assert sparse_tile(SparseShape(128, 2048), sm90, 132, 9).many
    assert not sparse_tile(SparseShape(16, 2048), sm90, 132, 9).many
    for tile, problem in (
        ({"segment": 40}, "segment must be a multiple of kv_tile"),
        ({"rows": 64, "span": 2}, "span must be 1 for tiles of more than 16 rows, got 2"),
        ({"holds_next": True, "carries_ids": False}, "holds_next needs carries_ids"),
    ):
        with pytest.raises(ValueError, match=problem):
            replace(SparseTile(16, 16, 32, 1, 4, 2), **tile)  # type: ignore[arg-type]


def test_graphs_bound_their_scratch() -> None:
    tile = SparseTile(16, 16, 32, 1, 4, 2)
    assert tile.state_floats(3, 20, 96, 128) == (3 * 2 * 3 * 16 * 128, 3 * 2 * 3 * 32)
    assert replace(tile, span=3).state_floats(3, 20, 96, 128) == (0, 0)


MUTATIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "the last entry is dropped": lambda given: given["topk_lens"].sub_(1).clamp_(min=0),
    "ids are off by one row": lambda given: given["indices"].add_(
        (given["indices"] >= 0) & (given["indices"] < 180)
    ),
    "no sinks": lambda given: given.update(sinks=None),
    "another scale": lambda given: given.update(scale=given["scale"] * 1.1),
    "heads are exchanged": lambda given: given.update(query=given["query"].flip(1)),
    "no rotary part": lambda given: given.update(rotary=torch.zeros_like(given["rotary"])),
    "duplicates count once": lambda given: given["indices"][:, 2].fill_(-1),
    "block scales are those of the next row": lambda given: given["kv_cache"][..., 128:132].copy_(
        given["kv_cache"][..., 128:132].roll(1, 1).clone()
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_kernel", lambda rows: False)
    trial = SparseTrial(SparseCase(LAYOUTS[2], 3, (96, 33, 64), sinks=True))
    trial.cache[trial.cache == 0xFF] = 0
    given = trial.arguments()
    given["indices"] = torch.where(given["indices"] > 10**6, -1, given["indices"])
    MUTATIONS[name](given)
    assert run(trial, **given) != {}


def test_results_that_are_not_written_are_found() -> None:
    trial = SparseTrial(SparseCase(LAYOUTS[0], 3, (96, 33, 64)))
    out, lse = trial.results()
    assert set(trial.misses(out, lse)) == {"output", "lse"}
    assert set(trial.misses(torch.zeros_like(out), torch.zeros_like(lse))) == {"output", "lse"}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"indices": torch.zeros(3, 96, dtype=torch.int64)}, "indices must be int32"),
    "lens": ({"topk_lens": torch.zeros(2, dtype=torch.int32)}, r"topk_lens must be .*int32 \[3\]"),
    "query": ({"query": torch.zeros(3, 4, 64).half()}, r"query must be \[3, 4, 128\]"),
    "dtype": ({"rotary": torch.zeros(3, 4, 32)}, "in common, got torch.float16, torch.float32"),
    "scale": ({"scale": 0.0}, "scale must be positive, got 0.0"),
    "cache": ({"kv_cache": torch.zeros(2, 16, 640, dtype=torch.uint8)}, "for rows of 196 bytes"),
    "k_scale": (
        {"layout": LAYOUTS[1], "k_scale": None, "kv_cache": torch.zeros(2, 16, 160).byte()},
        "k_scale must be a scalar for fp8_nope_fp8_rope rows, got none",
    ),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks must be \[4\], got \[3\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    changes, problem = BAD[name]
    trial = SparseTrial(SparseCase(LAYOUTS[2], 4, (96, 33, 64)))
    out, lse = trial.results()
    if name == "query":
        out = torch.zeros(3, 4, 128).half()
        changes = {**changes, "tile": TILES["whole"]}
        with pytest.raises(ValueError, match=r"output must be|query must be|rows of"):
            attend(**{**trial.arguments(), **changes}, output=out, lse=lse)
        return
    with pytest.raises(ValueError, match=problem):
        attend(**{**trial.arguments(), **changes}, output=out, lse=lse)


def test_sizes_that_no_tile_holds_are_refused() -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    trial = SparseTrial(SparseCase(LAYOUTS[0], 4, (96,), rope_size=48))
    out, lse = trial.results()
    with pytest.raises(NotImplementedError, match="qk_rope_head_dim must be a power of two"):
        attend(**trial.arguments(), output=out, lse=lse)


def test_scratch_that_is_too_small_is_refused() -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    trial = SparseTrial(SparseCase(LAYOUTS[0], 4, (96,)))
    out, lse = trial.results()
    tile = tile_for(trial.arguments()["query"], trial.indices, LAYOUTS[0])
    small = SparseWorkspace(torch.empty(7), torch.empty(7))
    with pytest.raises(ValueError, match="states must hold"):
        attend(**trial.arguments(), output=out, lse=lse, workspace=small, tile=TILES["split"])
    assert tile.rows == 16
