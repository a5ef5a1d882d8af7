"""Portable latent decode over keys that are cut: tiles of 16 and 64 rows, states and segment
groups.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import builders.latent.triton_mla
from attn.backends.triton_mla import TritonMLABackend
from attn.kernels.latent.launcher import FINISH_CELLS
from attn.reference import cache as reference
from attn.testing.batches import BatchSpec
from attn.testing.cases import LatentCase
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult
from builders.dense.choice import (
    LayerRequirements,
)
from builders.latent.choice import latent_kernel_of
from builders.latent.tiles import LatentShape, latent_tile
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.splitkv import segments
from builders.splitkv.record import (
    latent_states,
)
from builders.splitkv.segments import SEGMENTS_PER_GROUP
from builders.splitkv.tiles import (
    DenseShape,
)
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig
from specs.kv_cache import MLAAttentionSpec
from tests.tools.gpus import hopper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = 3
"""Groups of programs that share the work in these tests, whatever the device."""
SHORT = BatchSpec("short_rows", (1, 1, 1), (40, 520, 0))
LONG = BatchSpec("long_rows", (1,) * 3, (2700, 40, 2100))
TURNS = BatchSpec("long_turns", (1, 1), (2100, 40))
LONGER = BatchSpec("longer_rows", (1, 1), (5300, 1100))
VERIFY = BatchSpec("long_verify", (4, 1, 3), (2603, 1049, 300), num_speculative_tokens=3)
"""Segments have 512 tokens with tiles of 16 rows, 1024 with 64."""


@pytest.fixture(autouse=True)
def _a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a few programs of Hopper, so that work items are cut; the reference writes the cache."""
    monkeypatch.setattr(builders.latent.triton_mla, "device_facts", lambda _: hopper(GROUPS))
    monkeypatch.setattr("attn.impls.latent.base.write_kv", reference.write_kv)


def trial_of(batch: BatchSpec, heads: int, **given: Any) -> LatentTrial:
    known = {"dtype": DType.FLOAT16, "rank": 32, "rope_size": 32}
    trial = LatentTrial(
        TritonMLABackend, LatentCase(batch=batch, num_heads=heads, **{**known, **given}), DEVICE
    )
    trial.write()
    return trial


def smaller_segment_groups(monkeypatch: pytest.MonkeyPatch, segment_group: int) -> None:
    """Make segment groups small, so that work items of a few segments have several."""
    if DEVICE.type == "cuda":
        pytest.skip("compiled kernels do not change their constants")
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", segment_group)


def check(trial: LatentTrial, record: Any) -> None:
    plan = record.decode.split
    for scratch in (plan.states, plan.sums):
        scratch.fill_(float("nan"))
    result = CaseResult()
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    assert result.findings == {}
    assert not bool(plan.counters.any())


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "segment_group", "given"),
    [
        (LONG, 3, 16, 2, {}),
        (LONGER, 20, 64, SEGMENTS_PER_GROUP, {"block_size": 48}),
        (VERIFY, 5, 64, 2, {"cache_dtype": CacheDType.FP8}),
        (SHORT, 70, 64, SEGMENTS_PER_GROUP, {}),
        (LONG, 3, 16, SEGMENTS_PER_GROUP, {"sliding_window": 1300}),
        (VERIFY, 20, 64, SEGMENTS_PER_GROUP, {"sliding_window": 1100, "block_size": 48}),
    ],
    ids=[
        *("16 rows", "64 rows", "verify fp8", "two tiles of heads"),
        *("16 rows window", "64 rows verify window"),
    ],
)
def test_cut_rows_are_right(
    monkeypatch: pytest.MonkeyPatch,
    batch: BatchSpec,
    heads: int,
    rows: int,
    segment_group: int,
    given: dict[str, Any],
) -> None:
    if segment_group != SEGMENTS_PER_GROUP:
        smaller_segment_groups(monkeypatch, segment_group)
    trial = trial_of(batch, heads, **given)
    record = trial.build(trial.builder())
    assert record.decode.split.tile.rows == rows
    check(trial, record)


@pytest.mark.parametrize(
    ("batch", "heads", "segment_group", "given"),
    [
        # One item has more segments than are held at once; then one has just so many, and one has
        # one more.
        (BatchSpec("whole_16", (1,) * 3, (4096, 2048, 2049)), 16, SEGMENTS_PER_GROUP, {}),
        (BatchSpec("whole_64", (1,), (5121,)), 20, SEGMENTS_PER_GROUP, {"rank": 128}),
        (
            BatchSpec("whole_fp8", (1,), (2600,)),
            16,
            SEGMENTS_PER_GROUP,
            {"cache_dtype": CacheDType.FP8},
        ),
        # One program has all segment groups and folds them as they come.
        (BatchSpec("whole_segment_groups", (1,), (2600,)), 16, 2, {}),
    ],
    ids=["16 rows", "64 rows", "fp8", "segment_groups"],
)
def test_what_is_folded_where_it_lies_is_right(
    monkeypatch: pytest.MonkeyPatch,
    batch: BatchSpec,
    heads: int,
    segment_group: int,
    given: dict[str, Any],
) -> None:
    """Each work item belongs to one program, and its states are wider than what is folded at a
    time.
    """
    if segment_group != SEGMENTS_PER_GROUP:
        smaller_segment_groups(monkeypatch, segment_group)
    facts = hopper(len(batch.query_lens))
    monkeypatch.setattr(builders.latent.triton_mla, "device_facts", lambda _: facts)
    trial = trial_of(batch, heads, **{"rank": 256, **given})
    record = trial.build(trial.builder())
    tile = record.decode.split.tile
    assert tile.tile_heads * tile.query_tokens * trial.case.rank > FINISH_CELLS
    check(trial, record)


@pytest.mark.parametrize(
    ("heads", "batch", "window", "segment_group"),
    [
        (3, VERIFY, None, SEGMENTS_PER_GROUP),
        (20, LONG, None, SEGMENTS_PER_GROUP),
        (3, VERIFY, 1100, SEGMENTS_PER_GROUP),
        # Segment groups belong to several programs, or to one program, which folds them as they
        # come. In one case a program takes two tiles of heads in turn.
        (3, LONG, None, 2),
        (70, TURNS, None, 1),
    ],
)
def test_where_rows_are_cut_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    batch: BatchSpec,
    window: int | None,
    segment_group: int,
) -> None:
    seen = []
    if segment_group != SEGMENTS_PER_GROUP:
        smaller_segment_groups(monkeypatch, segment_group)
    trial = trial_of(batch, heads, sliding_window=window)
    for multiprocessors in (1, 5):
        facts = hopper(multiprocessors)
        monkeypatch.setattr(
            builders.latent.triton_mla, "device_facts", lambda _, facts=facts: facts
        )
        record = trial.build(trial.builder())
        check(trial, record)
        results = trial.attend(record, trial.inputs, trial.cache())
        seen.append({name: rows.clone() for name, rows in results.items()})
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_a_window_is_the_plain_kernels() -> None:
    shape = DenseShape(16, 1, 576, 512, 2, 16)
    given = (shape, DeviceKind.SM90, 64, 1)
    tile, why = latent_kernel_of(*given, LayerRequirements(is_local=True), DecodeKernel.AUTO)
    assert (tile, why) == (None, "the Hopper kernel does not serve: a sliding window")
    problem = "kernels.latent.decode 'hopper' does not serve this latent layer: a sliding window"
    with pytest.raises(ValueError, match=problem):
        latent_kernel_of(*given, LayerRequirements(is_local=True), DecodeKernel.HOPPER)
    tile, _ = latent_kernel_of(*given, LayerRequirements(), DecodeKernel.HOPPER)
    assert tile is not None


def test_rows_that_are_planned_whole_serve_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller_segment_groups(monkeypatch, 2)
    trial = trial_of(LONGER, 3, sliding_window=1100)
    trial.spec = MLAAttentionSpec(
        block_size=16, dtype=DType.FLOAT16, kv_lora_rank=32, qk_rope_head_dim=32
    )
    record = trial.build(trial.builder())
    assert record.decode.split.segment_groups > 1
    check(trial, record)


@pytest.mark.parametrize(
    ("heads", "length", "lent", "own", "mebibytes"),
    [
        (128, 8192, 8, 4, 199),
        (128, 131072, 16 + 8, 5, 481),
        (128, 262144, 16 + 16, 5, 613),
        (16, 131072, 16 + 16, 5, 154),
    ],
)
def test_scratch_is_what_must_exist_at_once(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    length: int,
    lent: int,
    own: int,
    mebibytes: int,
) -> None:
    monkeypatch.setattr(builders.latent.triton_mla, "device_facts", lambda _: hopper(132))
    found = []
    for requests in (8, 512):
        limits = {"max_num_seqs": requests, "max_num_batched_tokens": 8192}
        config = EngineConfig(num_heads=heads, max_model_len=length, **limits)
        spec = MLAAttentionSpec(block_size=64)
        planner = TritonMLAMetadataBuilder(spec, ["layer"], config, "meta").planner
        assert latent_states(planner.slots, planner.segment_groups, planner.head_loops) == (
            lent,
            own,
        )
        found.append(planner.scratch_bytes)
    assert found[0] == found[1]
    rows = min(heads, 64)
    assert found[0] == 132 * (lent + own) * rows * (512 + 2) * 4 <= mebibytes << 20


@pytest.mark.parametrize("device", [name for name in KNOWN_DEVICES if name != "cpu"])
@pytest.mark.parametrize(("itemsize", "bits"), [(2, 16), (2, 8), (4, 32), (4, 8)])
def test_every_number_of_heads_has_a_tile_that_fits(device: str, itemsize: int, bits: int) -> None:
    gpu = KNOWN_DEVICES[device].facts
    for heads in range(1, 129):
        for tokens in (1, 4, 16):
            shape = LatentShape(heads, 512, 64, itemsize, bits)
            tile = latent_tile(shape, gpu, tokens)
            assert tile.tile_heads * tile.query_tokens <= tile.rows
            assert 0 <= tile.head_tiles * tile.tile_heads - heads < tile.tile_heads
            # With one stage a tile passes through registers.
            stages = (tile.num_stages - 1) * tile.kv_tile * shape.row_bytes
            assert stages + tile.rows * 576 * itemsize <= gpu.shared_memory
