"""Launches of the library's own sparse kernel: one scratch for steps of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.impls.sparse import sparse_mla
from attn.kernels.sparse import topk_transform
from attn.ops.topk_transform import topk_launch, transform_topk
from builders.buffers import GraphBuffers
from builders.launch.launcher import Launch
from builders.sparse import launches as sparse_launches
from builders.sparse.arguments import TopkLists
from builders.sparse.hopper_tiles import (
    FEWEST_NARROW_PROGRAMS,
    HopperOptions,
    index_tile_of,
    index_tokens,
)
from builders.sparse.launches import SparseLaunches
from builders.sparse.tiles import HopperSparseTile, IndexTile, NarrowSparseTile, SparseShape
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import DType
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS, SparsePhase
from tests.sparse.sparse_layers import Sizes, SparseLayer

TOPK = 2048
PREFILL, DECODE = SparsePhase.PREFILL, SparsePhase.DECODE
H200 = KNOWN_DEVICES["h200"].facts


@pytest.fixture(params=[H200, KNOWN_DEVICES["a100"].facts], ids=["h200", "a100"])
def facts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sparse_launches, "device_facts", lambda device: request.param)
    return request.param


def launches(
    heads: int, most: int, is_invariant: bool, hopper: HopperOptions | None = None
) -> tuple[SparseLaunches, GraphBuffers]:
    # The meta device stands for a GPU: sizes are counted, and nothing is allocated.
    buffers = GraphBuffers("meta")
    shape, phases = SparseShape(heads, TOPK), {PREFILL: hopper, DECODE: None}
    return SparseLaunches(shape, most, is_invariant, phases, buffers), buffers


@pytest.mark.parametrize(
    ("is_invariant", "hopper"),
    [
        (False, None),
        (True, None),
        (False, HopperSparseTile()),
        (False, HopperSparseTile(balanced=True)),
        (False, NarrowSparseTile()),
    ],
)
@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
def test_scratch_holds_every_step_and_is_bounded(
    facts: Any, heads: int, is_invariant: bool, hopper: HopperOptions | None
) -> None:
    made, buffers = launches(heads, 8192, is_invariant, hopper)
    scratch = buffers["states"].numel(), buffers["sums"].numel()
    assert sum(scratch) * 4 <= sparse_launches.STATE_BYTES
    for rows in (0, 1, 2, 7, 31, 32, 33, 66, 131, 132, 133, 500, 4096, 8192):
        for phase in SparsePhase:
            launch = made.of(rows, phase)
            assert launch.workspace.states is buffers["states"]
            assert 1 <= launch.rows <= max(rows, 1)
            most = 0
            for tile in (launch.tile, launch.twin):
                needed = tile.state_floats(launch.rows, heads, TOPK)
                assert all(one <= held for one, held in zip(needed, scratch, strict=True))
                assert tile.counters <= buffers["counters"].numel()
                if not tile.shares:
                    most = max(most, sum(tile.state_floats(launch.rows + 1, heads, TOPK)))
            # Query tokens are taken in turn only where their states would not fit at once.
            assert launch.rows >= rows or most * 4 > sparse_launches.STATE_BYTES
            is_hopper = phase is PREFILL and hopper is not None
            if isinstance(hopper, NarrowSparseTile):
                is_hopper &= max(rows, 1) * -(-heads // 16) >= FEWEST_NARROW_PROGRAMS
            assert (launch.tile.hopper is not None) == is_hopper
            assert launch.twin.hopper is None
    assert made.of(5, DECODE).tile == made.of(5, DECODE).tile


def test_rows_whose_bits_are_their_own_are_taken_in_turn(facts: Any) -> None:
    made, _ = launches(128, 8192, True)
    one, many = made.of(1, DECODE), made.of(8192, DECODE)
    # Segments are folded in registers or after they are stored, and by programs of different heads;
    # the bits are the same.
    alike = {"span": 1, "hastens": one.tile.hastens, "finish_rows": one.tile.finish_rows}
    assert replace(one.tile, span=1) == replace(many.tile, **alike)
    assert one.tile.finish_rows == (1 if facts == H200 else 4)
    # On Hopper states of 64 rows are too large to be kept for all.
    assert (many.rows < 8192) == (facts == H200)


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_rows_in_turn_are_the_same_rows(
    layout: LatentFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(num_heads=20, rank=128, rope=32, nope=16, topk=300, longest=384)
    parts = [(0, 0, 3), (1, 0, 9), (2, 0, 1)]
    outputs, taken = [], []
    for states in (sparse_launches.STATE_BYTES, 0):
        monkeypatch.setattr(sparse_launches, "STATE_BYTES", states)
        layer = SparseLayer(layout, sizes=sizes, batch_invariant=True)
        layer.fill()
        step = layer.step([(req, 320, new) for req, _, new in parts])
        outputs.append(layer.run(step))
        layer.check(step, outputs[-1])
        record, _ = layer.records(step)
        assert record.prefill_rows is not None
        assert record.prefill_rows.launch is not None
        taken.append(record.prefill_rows.launch.rows)
    assert taken == [10, 1]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("has_launch", [True, False])
def test_only_the_library_s_own_kernel_may_start_while_its_list_is_made_ready(
    has_launch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls take :meth:`SparseMLAImpl._call`, whose kernels may not wait by themselves."""
    hastens = []

    def prepare(lists: TopkLists, *given: Any, **named: Any) -> Launch | None:
        hastens.append(lists.hastens)
        return topk_launch(lists, *given, **named) if has_launch else None

    def transform(lists: TopkLists, *given: Any, **named: Any) -> None:
        hastens.append(lists.hastens)
        transform_topk(lists, *given, **named)

    monkeypatch.setattr(sparse_mla, "topk_launch", prepare)
    monkeypatch.setattr(sparse_mla, "transform_topk", transform)
    layer = SparseLayer(LatentFormat.BF16)
    layer.fill()
    step = layer.step([(0, 40, 1)])
    layer.check(step, layer.run(step))
    assert hastens == ([True] if has_launch else [True, False])


@pytest.mark.parametrize("hastens", [False, True])
def test_a_launch_lets_the_next_kernel_start_if_it_is_told_to(hastens: bool) -> None:
    launcher = topk_transform._launcher("paged", 8, 8, 64, None, (None,), hastens)
    assert launcher.arguments["HASTENS"] is hastens


@pytest.mark.parametrize(
    ("rows", "keys", "tokens"),
    [
        (16384, 4096, 128),
        (4096, 12288, 128),
        (8192, 4096, 64),
        (2048, 4096, 64),
        (100, 4096, 32),
        (1, 1, 32),
    ],
)
def test_programs_of_logits_take_tokens_once_there_are_many(
    rows: int, keys: int, tokens: int
) -> None:
    tile = index_tile_of(DeviceKind.SM90, DType.FLOAT8_E4M3FN, 64, 128)
    assert index_tokens(tile, 132, rows, keys) == tokens


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "width"),
    [
        (DeviceKind.SM100, DType.FLOAT8_E4M3FN, 64, 128),
        (DeviceKind.SM90, DType.BFLOAT16, 64, 128),
        (DeviceKind.SM90, DType.FLOAT8_E4M3FN, 65, 128),
        (DeviceKind.SM90, DType.FLOAT8_E4M3FN, 64, 64),
    ],
)
def test_what_the_kernel_for_hopper_does_not_serve_goes_to_the_plain_one(
    kind: DeviceKind, dtype: DType, heads: int, width: int
) -> None:
    assert index_tile_of(kind, dtype, heads, width) == IndexTile()


@pytest.mark.parametrize(
    "hopper", [None, HopperSparseTile(), HopperSparseTile(balanced=True), NarrowSparseTile()]
)
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_variants_are_what_any_number_of_rows_is_launched_by(
    facts: Any, heads: int, hopper: HopperOptions | None
) -> None:
    made, _ = launches(heads, 8192, False, hopper)
    variants = {(one.tile, one.twin) for one in made.variants(PREFILL)}
    reached = {(one.tile, one.twin) for one in (made.of(rows, PREFILL) for rows in range(1, 8193))}
    assert variants == reached
    assert len(made.variants(PREFILL)) == len(variants) <= 20
