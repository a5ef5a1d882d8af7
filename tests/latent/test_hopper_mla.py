"""The Hopper latent kernels, tested without a GPU: what they refuse, and what they compute."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl

import builders.latent.choice
import builders.latent.triton_mla
from attn.backends.triton_mla import TritonMLABackend
from attn.kernels.dense import hopper_launch
from attn.kernels.lang import packed
from attn.kernels.latent.hopper_narrow.kernel import hopper_mla_narrow_kernel
from attn.kernels.latent.hopper_wide import queries, scorer
from attn.kernels.latent.hopper_wide.kernel import hopper_mla_kernel
from attn.testing import batches, stored_rows
from attn.testing.batches import BATCHES, BatchSpec
from attn.testing.cases import LatentCase
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from builders.dense.choice import (
    LayerRequirements,
)
from builders.latent.choice import hopper_latent_tile, latent_kernel_of
from builders.launch.call import KernelCall
from builders.splitkv import segments
from builders.splitkv.segments import SEGMENT
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
)
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel
from tests.lang.far_memory import far_pages
from tests.tools import gluon_in_numpy
from tests.tools.gpus import hopper

CPU = torch.device("cpu")
SHAPE = DenseShape(128, 1, 576, 512, 2, 16)
HOPPER = DeviceKind.SM90


@pytest.mark.parametrize(
    ("shape", "kind", "block_size", "asks", "said"),
    [
        (SHAPE, DeviceKind.SM100, 64, LayerRequirements(), "the device is sm100, not sm90"),
        (replace(SHAPE, itemsize=4), HOPPER, 64, LayerRequirements(), "have 4 bytes, not 2"),
        (
            replace(SHAPE, stored_bits=4),
            HOPPER,
            64,
            LayerRequirements(),
            "have 4 bits, not 8 or 16",
        ),
        (
            replace(SHAPE, stored_bits=8),
            HOPPER,
            64,
            LayerRequirements(query=DType.BFLOAT16, cache_dtype=CacheDType.FP8_E5M2),
            "a cache of fp8_e5m2",
        ),
        (
            replace(SHAPE, head_size=320, head_size_v=256),
            HOPPER,
            64,
            LayerRequirements(),
            "rows of 320 columns, of which 256 are the value, are not 576 and 512",
        ),
        (SHAPE, HOPPER, 24, LayerRequirements(), "block size 24 is not a multiple of 16"),
        (SHAPE, HOPPER, 64, LayerRequirements(scale=-1.0), "scale -1.0 is not positive"),
        (
            SHAPE,
            HOPPER,
            64,
            LayerRequirements(query=DType.BFLOAT16, cache_dtype=CacheDType.FLOAT16),
            "a cache of float16 for a query of bfloat16",
        ),
    ],
)
def test_what_it_does_not_take_is_refused_with_both_values(
    shape: DenseShape, kind: DeviceKind, block_size: int, asks: LayerRequirements, said: str
) -> None:
    found = hopper_latent_tile(shape, kind, block_size, 1, asks)
    assert isinstance(found, str)
    assert said in found
    refused = "kernels.latent.decode 'hopper' does not serve this latent layer"
    with pytest.raises(ValueError, match=refused):
        latent_kernel_of(shape, kind, block_size, 1, asks, DecodeKernel.HOPPER)
    for wanted in (DecodeKernel.AUTO, DecodeKernel.TRITON):
        assert latent_kernel_of(shape, kind, block_size, 1, asks, wanted)[0] is None


def test_it_is_taken_unless_the_plain_one_is_wanted() -> None:
    for wanted in DecodeKernel:
        tile, why = latent_kernel_of(SHAPE, HOPPER, 64, 1, LayerRequirements(), wanted)
        assert (tile is None) == (wanted is DecodeKernel.TRITON)
        assert "it serves" in why or "'triton'" in why


@pytest.mark.parametrize("heads", [16, 17, 128])
@pytest.mark.parametrize("stored_bits", [8, 16])
def test_bits_of_a_row_alone_are_those_of_tiles_of_16_rows(heads: int, stored_bits: int) -> None:
    shape = replace(SHAPE, num_heads=heads, stored_bits=stored_bits)
    asks = LayerRequirements(batch_invariant=True)
    tile, _ = latent_kernel_of(shape, HOPPER, 64, 1, asks, DecodeKernel.HOPPER)
    assert tile is not None
    assert (tile.split.rows, tile.least_tiles) == (16, None)
    chosen, why = latent_kernel_of(shape, HOPPER, 64, 1, asks, DecodeKernel.AUTO)
    if heads > 16 and stored_bits == 16:
        assert chosen is None
        assert "read a latent row more often" in why
    else:
        assert chosen == tile


def test_queries_of_fp16_over_e4m3_take_narrow_tiles() -> None:
    """The wide kernel would keep fewer of their bits than fp16 has."""
    shape = replace(SHAPE, stored_bits=8)
    for dtype, rows in ((DType.BFLOAT16, 64), (DType.FLOAT16, 16)):
        tile = hopper_latent_tile(shape, HOPPER, 64, 1, LayerRequirements(query=dtype))
        assert isinstance(tile, HopperDecodeTile)
        assert tile.split.rows == rows


@pytest.mark.parametrize(
    ("changes", "asks", "rounds"),
    [
        ({}, {}, True),
        ({"num_heads": 33}, {}, True),
        ({"num_heads": 32}, {}, False),
        ({"stored_bits": 16}, {}, False),
        ({}, {"batch_invariant": True}, False),
        ({}, {"query": DType.FLOAT16}, False),
        ({}, {"fp8_queries": False}, False),
    ],
)
def test_queries_are_rounded_if_the_engine_says_so_and_products_take_e4m3(
    changes: dict[str, Any], asks: dict[str, Any], rounds: bool
) -> None:
    shape = replace(SHAPE, **({"stored_bits": 8} | changes))
    given = LayerRequirements(**{"query": DType.BFLOAT16, "fp8_queries": True} | asks)
    tile = hopper_latent_tile(shape, HOPPER, 64, 1, given)
    assert isinstance(tile, HopperDecodeTile)
    assert tile.rounds_queries is rounds


@pytest.mark.parametrize("stored_bits", [8, 16])
def test_any_number_of_heads_and_tokens_fits_a_tile_and_pages_are_whole_boxes(
    stored_bits: int,
) -> None:
    for heads in range(1, 129):
        for tokens in (1, 2, 4, 16):
            for block_size in (16, 48, 64, 528):
                shape = replace(SHAPE, num_heads=heads, stored_bits=stored_bits)
                tile = hopper_latent_tile(shape, HOPPER, block_size, tokens, LayerRequirements())
                assert isinstance(tile, HopperDecodeTile)
                split = tile.split
                is_narrow = heads * tokens <= (32 if stored_bits == 8 else 16)
                assert (tile.least_tiles is None) == is_narrow
                rows = 16 if is_narrow else 64
                assert split.head_tiles == -(-heads // rows)
                assert split.tile_heads * split.head_tiles >= heads
                assert 1 <= split.query_tokens <= tokens
                assert split.tile_heads * split.query_tokens <= split.rows == rows
                # A tile of 16 rows without room for a second token has 16 heads, present or not.
                assert not is_narrow or split.tile_heads <= 8 or split.tile_heads == 16
                assert block_size % tile.run == 0
                assert (128 if rows == 16 and stored_bits == 8 else 64) % tile.run == 0
                assert SEGMENT % split.segment_unit == 0
                reads_again = split.head_tiles > 1 or tokens > split.query_tokens
                assert tile.reads_again == (reads_again and not is_narrow)
                # A launcher knows query lengths only through the plan's tokens.
                found = hopper_latent_tile(
                    shape, HOPPER, block_size, split.query_tokens, LayerRequirements()
                )
                assert isinstance(found, HopperDecodeTile)
                assert replace(found, reads_again=tile.reads_again) == tile


@pytest.mark.parametrize("heads", [1, 16, 17, 40, 128])
@pytest.mark.parametrize("tokens", [1, 4])
def test_narrow_tiles_over_e4m3_have_128_keys(heads: int, tokens: int) -> None:
    shape = replace(SHAPE, num_heads=heads, stored_bits=8)
    asks = LayerRequirements(batch_invariant=heads * tokens > 16)
    for block_size, run in ((16, 16), (48, 16), (128, 128), (256, 128)):
        tile = hopper_latent_tile(shape, HOPPER, block_size, tokens, asks)
        assert isinstance(tile, HopperDecodeTile)
        assert (tile.run, tile.least_tiles, tile.split.rows, tile.num_stages) == (run, None, 16, 2)
        assert tile.split.kv_tile == 128
        assert tile.split.tile_heads * tile.split.query_tokens <= 16
        assert tile.split.tile_heads * tile.split.head_tiles >= heads


# -- What the kernel computes, by numpy. tests.tools.gluon_in_numpy says what that does not see.


@pytest.fixture
def instead() -> dict[str, Any]:
    """Functions of the kernel that a test replaces."""
    return {}


def votes_of(totals: np.ndarray) -> np.ndarray:
    """Whether some number of each warp is above 2^15, for each of its threads."""
    return np.broadcast_to((totals > 2**15).any((1, 2), keepdims=True), totals.shape).astype("i4")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]) -> list[KernelCall]:
    """Launches of the kernel; numpy runs each, with the programs in another order every time."""
    calls: list[KernelCall] = []
    translation, launch = gluon_in_numpy.Translation(**instead), KernelCall.launch_through_triton

    def run(call: KernelCall) -> None:
        if call.kernel not in (hopper_mla_kernel, hopper_mla_narrow_kernel):
            launch(call)
            return
        calls.append(call)
        programs = list(range(call.grid[0]))
        random.Random(len(calls)).shuffle(programs)
        gluon_in_numpy.run(call, programs, translation)

    monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, scorer.VOTE.value, votes_of)
    larger = queries.LARGER.value
    monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, larger, lambda *x: np.fmax(*map(np.abs, x)))
    monkeypatch.setitem(
        gluon_in_numpy.ASSEMBLY, queries.ROUNDED.value, gluon_in_numpy.rounded_to_e4m3
    )
    monkeypatch.setattr(KernelCall, "launch_through_triton", run)
    monkeypatch.setattr(hopper_launch, "_describe", lambda rows, box: rows)
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.HOPPER)
    return calls


def findings(case: LatentCase) -> dict[str, list[str]]:
    trial = LatentTrial(TritonMLABackend, case, CPU)
    trial.write()
    record = trial.build(trial.builder())
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    assert not record.decode.split.counters.any()
    return result.findings


KINDS = {
    "pages_of_16": LatentCase(BatchSpec("a", (1, 1), (5, 140)), 20, DType.FLOAT16),
    # The second of three programs begins in the middle of a work item.
    "in_parts": LatentCase(BatchSpec("b", (1, 1), (700, 33)), 17, DType.FLOAT16, block_size=64),
    "few_rows": LatentCase(BatchSpec("a", (1, 1), (5, 140)), 4, DType.FLOAT16),
    "few_rows_in_parts": LatentCase(
        BatchSpec("h", (1, 1), (1700, 33)), 16, DType.FLOAT16, block_size=64
    ),
    "few_rows_verify": LatentCase(
        BatchSpec("k", (2, 1, 1), (200, 40, 30), num_speculative_tokens=1),
        5,
        DType.FLOAT16,
        block_size=48,
    ),
    "verify": LatentCase(
        BatchSpec("d", (4, 2, 1), (200, 40, 30), num_speculative_tokens=3),
        5,
        DType.FLOAT16,
        block_size=32,
    ),
    # There are more query rows than a tile has.
    "two_tiles_of_tokens": LatentCase(
        BatchSpec("e", (4, 3), (70, 130), num_speculative_tokens=3), 20, DType.FLOAT16
    ),
    "two_tiles_of_heads": LatentCase(BatchSpec("f", (1,), (20,)), 70, DType.FLOAT16, block_size=64),
    "e4m3": LatentCase(
        BatchSpec("g", (1, 1), (5, 140)), 4, DType.FLOAT16, CacheDType.FP8_E4M3, block_size=16
    ),
    "e4m3_in_parts": LatentCase(
        BatchSpec("h", (1, 1), (1700, 33)), 16, DType.FLOAT16, CacheDType.FP8_E4M3, block_size=64
    ),
    "e4m3_two_tiles_of_heads": LatentCase(
        BatchSpec("a", (1, 1), (5, 140)), 20, DType.FLOAT16, CacheDType.FP8_E4M3, block_size=16
    ),
    "e4m3_verify": LatentCase(
        BatchSpec("i", (4, 2, 1), (200, 40, 30), num_speculative_tokens=3),
        4,
        DType.FLOAT16,
        CacheDType.FP8_E4M3,
        block_size=48,
    ),
    # Pages hold more keys than a tile.
    "wide_e4m3": LatentCase(
        BatchSpec("j", (1, 2), (300, 30), num_speculative_tokens=1),
        20,
        DType.BFLOAT16,
        CacheDType.FP8_E4M3,
        block_size=256,
    ),
    "wide_e4m3_pages_of_16": LatentCase(
        BatchSpec("a", (1, 1), (5, 140)), 33, DType.BFLOAT16, CacheDType.FP8_E4M3, block_size=16
    ),
    "wide_e4m3_in_parts": LatentCase(
        BatchSpec("b", (1, 1), (700, 33)), 33, DType.BFLOAT16, CacheDType.FP8_E4M3, block_size=64
    ),
    "wide_e4m3_verify": LatentCase(
        BatchSpec("d", (4, 2, 1), (200, 40, 30), num_speculative_tokens=3),
        9,
        DType.BFLOAT16,
        CacheDType.FP8_E4M3,
        block_size=48,
    ),
    "e4m3_fp16_h33": LatentCase(
        BatchSpec("a", (1, 1), (5, 140)), 33, DType.FLOAT16, CacheDType.FP8_E4M3, block_size=16
    ),
    "wide_e4m3_two_tiles_of_heads": LatentCase(
        BatchSpec("f", (1,), (20,)), 70, DType.BFLOAT16, CacheDType.FP8_E4M3, block_size=128
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_a_step_of_every_kind(kind: str, launched: list[KernelCall]) -> None:
    assert findings(KINDS[kind]) == {}
    is_narrow = kind.startswith(("e4m3", "few_rows"))
    wanted = hopper_mla_narrow_kernel if is_narrow else hopper_mla_kernel
    assert launched
    assert all(call.kernel is wanted for call in launched)


@pytest.mark.parametrize("kind", ["wide_e4m3_in_parts", "wide_e4m3_verify"])
@pytest.mark.parametrize("form", ["KEEPS_PLACE", "LOOPS"])
def test_sums_may_keep_their_place_or_come_in_a_loop(
    form: str, kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Triton 3.8 and 3.9."""
    monkeypatch.setattr(scorer, form, gl.constexpr(True))
    assert findings(KINDS[kind]) == {}
    assert launched


@pytest.mark.parametrize("rounds", [False, True])
def test_a_builder_says_whether_queries_are_rounded(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "decode_kernel", DecodeKernel.HOPPER)
    monkeypatch.setattr(Trial, "fp8_mla_queries", rounds)
    builder = LatentTrial(TritonMLABackend, KINDS["wide_e4m3"], CPU).builder()
    words = "hopper with queries rounded to e4m3" if rounds else "hopper"
    assert builder.phase_kernels["decode"] == words


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("wide_e4m3")])
def test_queries_may_be_rounded_to_e4m3(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "fp8_mla_queries", True)
    assert findings(KINDS[kind]) == {}
    assert launched
    assert all(call.arguments["TERMS"] == 1 for call in launched)


# Two decodes over 700 and 33 keys, whose queries happen to be rounded by little, do not show it.
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.startswith("wide_e4m3") and "in_parts" not in kind]
)
def test_an_oracle_of_exact_queries_shows_that_they_are_rounded(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trial, "fp8_mla_queries", True)
    monkeypatch.setattr(stored_rows, "rounded_queries", torch.Tensor.double)
    assert "stored" in findings(KINDS[kind])
    assert launched


@pytest.mark.parametrize("kind", ["pages_of_16", "few_rows", "e4m3", "wide_e4m3_pages_of_16"])
def test_offsets_of_pages_may_need_more_than_32_bits(kind: str, launched: list[KernelCall]) -> None:
    with far_pages():
        assert findings(replace(KINDS[kind], padded_pages=True)) == {}
    assert launched


def large_queries(monkeypatch: pytest.MonkeyPatch, kind: str) -> LatentCase:
    """A kind in bf16, with absorbed queries about 2^24 and a scale that makes up for it."""
    weights, scale = batches.latent_weights, batches.LatentWeights.scale

    def larger(*given: Any, **named: Any) -> batches.LatentWeights:
        found = weights(*given, **named)
        return replace(found, w_uk=found.w_uk * 2**24)

    monkeypatch.setattr(batches, "latent_weights", larger)
    smaller = property(lambda found: scale.fget(found) / 2**24)
    monkeypatch.setattr(batches.LatentWeights, "scale", smaller)
    return replace(KINDS[kind], dtype=DType.BFLOAT16)


@pytest.mark.parametrize("kind", ["e4m3", "wide_e4m3_pages_of_16", "wide_e4m3_verify"])
def test_queries_over_e4m3_may_be_larger_than_fp16_holds(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(large_queries(monkeypatch, kind)) == {}
    assert launched


@pytest.mark.parametrize("kind", ["e4m3", "wide_e4m3_pages_of_16"])
@pytest.mark.parametrize("instead", [{"power_of_two_guard": lambda most: (most * 0 + 1,) * 2}])
def test_queries_that_are_not_brought_into_fp16_s_range_would_show(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings(large_queries(monkeypatch, kind))
    assert launched


@pytest.mark.parametrize("element", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("column", [0, 300, 575])
def test_a_query_row_that_e4m3_cannot_hold_gives_nan(
    element: float, column: int, launched: list[KernelCall]
) -> None:
    """And no other row does."""
    trial = LatentTrial(TritonMLABackend, KINDS["wide_e4m3_pages_of_16"], CPU)
    trial.write()
    record = trial.build(trial.builder())
    query = trial._absorbed(trial.inputs.query)
    query[1, 7, column] = element
    cache = trial.cache()
    parts = query[..., :512], query[..., 512:]
    latent, _ = trial.impl.forward_mqa(parts, cache, record, trial.layer)
    assert latent[1, 7].isnan().all()
    latent[1, 7] = 0
    assert latent.isfinite().all()
    assert launched


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_late_is_waited_for(
    kind: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon_in_numpy.delay(monkeypatch)
    assert findings(KINDS[kind]) == {}
    assert launched


@pytest.mark.parametrize("heads", [1, 9])
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3])
@pytest.mark.parametrize("programs", [1, 9])
def test_one_program_has_all_of_a_row_or_many_a_part_each(
    programs: int,
    cache_dtype: CacheDType,
    heads: int,
    launched: list[KernelCall],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = hopper(programs)
    monkeypatch.setattr(builders.latent.triton_mla, "device_facts", lambda device: facts)
    lens = (2100, 40, 33) if programs > 1 else (521, 40, 33)
    batch = BatchSpec("c", (2, 1, 1), lens, num_speculative_tokens=1)
    case = LatentCase(batch, heads, DType.FLOAT16, cache_dtype, block_size=48)
    assert findings(case) == {}
    assert launched.pop().grid == (programs,)


def outputs(lens: tuple[int, ...], cache_dtype: CacheDType) -> torch.Tensor:
    """Output and LSE of a decode, which are checked."""
    case = LatentCase(
        BatchSpec("n", (1,) * len(lens), lens), 3, DType.FLOAT16, cache_dtype, block_size=64
    )
    trial = LatentTrial(TritonMLABackend, case, CPU)
    trial.write()
    record = trial.build(trial.builder())
    # No slot is read that this step did not fill.
    record.decode.split.states.fill_(float("nan"))
    record.decode.split.sums.fill_(float("nan"))
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    assert result.findings == {}
    assert not record.decode.split.counters.any()
    return torch.cat([results["latent"].float(), results["lse"][..., None]], -1)


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3])
def test_bits_do_not_depend_on_where_programs_begin(
    cache_dtype: CacheDType, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments are folded by blocks, which programs have whole, in part, or segment by segment."""
    found = []
    for programs in (1, 2, 7):
        facts = hopper(programs)
        monkeypatch.setattr(
            builders.latent.triton_mla, "device_facts", lambda device, facts=facts: facts
        )
        found.append(outputs((8000,), cache_dtype))
        assert launched.pop().grid == (programs,)
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3])
def test_many_segment_groups_are_folded_in_pieces_to_the_same_bits(
    cache_dtype: CacheDType, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a segment group is one segment, so 8300 keys have 17 of them."""
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", 1)
    found = []
    for programs in (1, 7, 30):
        facts = hopper(programs)
        monkeypatch.setattr(
            builders.latent.triton_mla, "device_facts", lambda device, facts=facts: facts
        )
        found.append(outputs((8300, 700), cache_dtype))
        assert launched.pop().arguments["SEGMENT_GROUPS"] == 17
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("instead", [{"_fold_piece": lambda *_: None}])
def test_pieces_that_nobody_folds_would_show(
    launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", 1)
    monkeypatch.setattr(builders.latent.triton_mla, "device_facts", lambda device: hopper(7))
    with pytest.raises(AssertionError):
        outputs((8300,), CacheDType.AUTO)
    assert launched


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8_E4M3])
@pytest.mark.parametrize("batch", ["keyless_rows", "padding_rows"])
def test_it_keeps_all_that_is_promised(
    batch: str, cache_dtype: CacheDType, launched: list[KernelCall]
) -> None:
    """Bits are the same when a request is alone, in a replay, and with another table."""
    check_case(TritonMLABackend, LatentCase(BATCHES[batch], 3, DType.FLOAT16, cache_dtype), CPU)
    assert launched


@pytest.mark.parametrize(
    "instead", [{"_clear_tail": lambda *_: None, "clear_tail": lambda *_: None}], indirect=False
)
@pytest.mark.parametrize("kind", ["pages_of_16", "few_rows", "e4m3"])
def test_values_that_nobody_wrote_would_show(kind: str, launched: list[KernelCall]) -> None:
    assert findings(KINDS[kind])
    assert launched


def test_values_that_nobody_wrote_would_show_over_e4m3(
    launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide kernel makes numbers of them."""
    assembly = gluon_in_numpy.ASSEMBLY
    monkeypatch.setitem(assembly, packed.WOVEN_NUMBERS.value, assembly[packed.WOVEN_E4M3.value])
    assert findings(KINDS["wide_e4m3_pages_of_16"])
    assert launched


def steep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make scores so large that the largest weight of a block is often too large."""
    queries = batches.peaked_queries
    monkeypatch.setattr(batches, "peaked_queries", lambda *given: 20 * queries(*given))


@pytest.mark.parametrize("kind", ["wide_e4m3_in_parts", "wide_e4m3_verify"])
@pytest.mark.parametrize("always", [False, True])
def test_references_follow_scores_that_grow(
    kind: str, always: bool, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every block is computed twice, whether or not a weight is too large."""
    steep(monkeypatch)
    if always:
        monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, scorer.VOTE.value, np.ones_like)
    assert findings(KINDS[kind]) == {}
    assert launched


def test_weights_that_are_too_large_would_show(
    launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    steep(monkeypatch)
    monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, scorer.VOTE.value, np.zeros_like)
    assert findings(KINDS["wide_e4m3_in_parts"])
    assert launched


@pytest.mark.parametrize("instead", [{"cache_scale": lambda *_: np.float32(1)}])
def test_scales_of_a_cache_that_are_left_out_would_show(launched: list[KernelCall]) -> None:
    assert findings(KINDS["wide_e4m3_pages_of_16"])
    assert launched


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every float tensor that ``new_empty`` makes with NaN."""
    made = torch.Tensor.new_empty

    def poisoned(like: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        found = made(like, *given, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def padding_of(heads: int, cache_dtype: CacheDType) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the rows that no request of a decode owns."""
    padding = {"num_padding_tokens": 3, "pads_num_actual_tokens": True}
    spec = BatchSpec("l", (1, 1), (5, 70), **padding)
    trial = LatentTrial(TritonMLABackend, LatentCase(spec, heads, DType.FLOAT16, cache_dtype), CPU)
    trial.write()
    record = trial.build(trial.builder())
    results = trial.attend(record, trial.inputs, trial.cache())
    assert not results["latent"][:2].isnan().any()
    out, lse = results["latent"][2:], results["lse"][2:]
    assert len(out) == len(lse) == 3
    return out, lse


PADDED = [
    (3, CacheDType.AUTO),
    (20, CacheDType.AUTO),
    (3, CacheDType.FP8_E4M3),
    (33, CacheDType.FP8_E4M3),
]
"""Heads and types of caches: the narrow kernel and the wide one, over 16 bits and over e4m3."""


@pytest.mark.parametrize(("heads", "cache_dtype"), PADDED)
def test_rows_that_no_request_owns_are_cleared_by_the_kernel(
    heads: int,
    cache_dtype: CacheDType,
    launched: list[KernelCall],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_new_tensors(monkeypatch)
    out, lse = padding_of(heads, cache_dtype)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    assert launched


@pytest.mark.parametrize("instead", [{"clear_padding": lambda *_: None}], indirect=False)
@pytest.mark.parametrize(("heads", "cache_dtype"), PADDED)
def test_rows_that_nobody_cleared_would_show(
    heads: int,
    cache_dtype: CacheDType,
    launched: list[KernelCall],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_new_tensors(monkeypatch)
    out, lse = padding_of(heads, cache_dtype)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert launched


@pytest.mark.parametrize(
    ("kind", "reads_again"),
    [("verify", False), ("two_tiles_of_heads", True), ("two_tiles_of_tokens", True)],
)
def test_keys_that_several_work_items_read_are_prefetched_and_freed_late(
    kind: str, reads_again: bool, launched: list[KernelCall]
) -> None:
    assert not findings(KINDS[kind])
    assert launched
    for call in launched:
        assert call.arguments["PREFETCH"] is reads_again
        assert call.arguments["EARLY"] is not reads_again


def odd(part: torch.Tensor, extra: int) -> torch.Tensor:
    """A copy of a query part in rows of ``extra`` more elements."""
    wide = torch.full((*part.shape[:2], part.shape[2] + extra), float("nan"), dtype=part.dtype)
    return wide[..., : part.shape[2]].copy_(part)


@pytest.mark.parametrize("kind", ["pages_of_16", "few_rows", "e4m3", "wide_e4m3_pages_of_16"])
@pytest.mark.parametrize("extra", [0, 8, 3])
def test_query_parts_may_have_any_strides(
    kind: str, extra: int, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at multiples of 16 bytes are read where they are, others are copied first."""
    trial = LatentTrial(TritonMLABackend, KINDS[kind], CPU)
    trial.write()
    record = trial.build(trial.builder())
    wanted = trial.attend(record, trial.inputs, trial.cache())
    absorbed = trial._absorbed(trial.inputs.query)
    parts = [odd(part, extra) for part in (absorbed[..., :512], absorbed[..., 512:])]
    launched.clear()
    found, lse = trial.impl.forward_mqa(tuple(parts), trial.cache(), record, trial.layer)
    assert torch.equal(found, wanted["latent"])
    assert lse is not None
    assert torch.equal(lse, wanted["lse"])
    (call,) = launched
    given = [call.arguments[name] for name in ("query_ptr", "rotary_ptr")]
    is_read = [one.data_ptr() == part.data_ptr() for one, part in zip(given, parts, strict=True)]
    assert is_read == [extra % 8 == 0] * 2
