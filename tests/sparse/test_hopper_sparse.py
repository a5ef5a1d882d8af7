"""The Hopper kernels of sparse latent attention, tested without a GPU: whom they serve, what they
compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl

from attn.kernels.lang import packed
from attn.kernels.sparse import hopper_launch as sparse_launch
from attn.kernels.sparse.hopper_narrow import operands as sparse_operands
from attn.kernels.sparse.hopper_narrow.kernel import hopper_narrow_sparse_kernel
from attn.kernels.sparse.hopper_narrow.shrink import shrink_text
from attn.kernels.sparse.hopper_wide import dequantise as sparse_dequantise
from attn.kernels.sparse.hopper_wide import finish as sparse_finish
from attn.kernels.sparse.hopper_wide import parts as sparse_parts
from attn.kernels.sparse.hopper_wide.kernel import hopper_sparse_kernel
from attn.kernels.sparse.launcher import sparse_calls
from attn.kernels.sparse.layer import SparseLayer, SparseTensors
from builders.launch.call import KernelCall
from builders.launch.launcher import launch
from builders.sparse.hopper_tiles import (
    hopper_misfit,
    hopper_sparse_tile,
    sparse_kernel_of,
    usual_options,
)
from builders.sparse.joint import joint_tile, joint_tokens
from builders.sparse.tiles import (
    HopperSparseTile,
    NarrowSparseTile,
    SparseShape,
    SparseTile,
    sparse_tile,
)
from specs.devices import DeviceKind
from specs.dtypes import DType
from specs.engine import DecodeKernel, PrefillKernel
from specs.layouts import latent_views
from specs.rows import LatentFormat
from tests.lang.far_memory import spread
from tests.sparse.sparse_cases import LAYOUTS, SparseCase, SparseTrial
from tests.tools import gluon_in_numpy

BF16, E4M3, SCALED = LAYOUTS
SHAPE = SparseShape(128, 2048)
HOPPER = DeviceKind.SM90


@pytest.mark.parametrize(
    ("changes", "kind", "dtype", "said"),
    [
        ({}, DeviceKind.SM100, DType.BFLOAT16, "the device is sm100, not sm90"),
        ({"rank": 256}, HOPPER, DType.BFLOAT16, "rows of 256 latent and 64 rotary columns"),
        ({}, HOPPER, DType.FLOAT32, "a query of float32"),
        ({"layout": SCALED}, HOPPER, DType.FLOAT16, "multiplied as bfloat16, not float16"),
        ({"layout": E4M3}, HOPPER, DType.BFLOAT16, "more than 32 heads, of which there are 128"),
        ({"batch_invariant": True}, HOPPER, DType.BFLOAT16, "bits are to be a row's own"),
    ],
)
def test_what_it_does_not_take_is_left_with_a_reason(
    changes: dict[str, Any], kind: DeviceKind, dtype: DType, said: str
) -> None:
    sizes = {name: value for name, value in changes.items() if name != "batch_invariant"}
    is_invariant = "batch_invariant" in changes
    given = replace(SHAPE, **sizes), kind, dtype, is_invariant
    options, why = sparse_kernel_of(*given, "kernels.sparse.own_decode", DecodeKernel.AUTO)
    assert options is None
    assert said in why
    with pytest.raises(ValueError, match="own_prefill 'hopper' does not serve this sparse") as e:
        sparse_kernel_of(*given, "kernels.sparse.own_prefill", PrefillKernel.HOPPER)
    assert said in str(e.value)


def test_what_it_serves_it_is_given_unless_the_plain_one_is_asked_for() -> None:
    for layout, heads in ((BF16, 128), (SCALED, 33), (BF16, 32), (E4M3, 1), (SCALED, 16)):
        shape = replace(SHAPE, layout=layout, num_heads=heads)
        given = shape, HOPPER, DType.BFLOAT16, False, "kernels.sparse.own_decode"
        options = sparse_kernel_of(*given, DecodeKernel.AUTO)[0]
        assert options == usual_options(shape)
        assert isinstance(options, NarrowSparseTile if heads <= 32 else HopperSparseTile)
        assert sparse_kernel_of(*given, DecodeKernel.TRITON)[0] is None


def test_few_rows_are_cut_into_parts_and_many_are_not() -> None:
    for layout in (BF16, SCALED):
        shape = replace(SHAPE, layout=layout)
        assert hopper_misfit(shape, HOPPER, DType.BFLOAT16) is None
        for rows, parts in ((1, 16), (8, 8), (66, 1), (128, 1), (4096, 1)):
            tile = hopper_sparse_tile(shape, 132, rows)
            assert tile.programs(2048) == tile.segments(2048) == parts
            assert tile.segment % 128 == 0


def test_few_heads_have_tiles_of_their_own_and_few_rows_of_them_the_plain_kernels() -> None:
    for layout in LAYOUTS:
        shape = replace(SHAPE, num_heads=20, layout=layout)
        for rows, parts in ((16, 4), (64, 1), (4096, 1)):
            tile = hopper_sparse_tile(shape, 132, rows)
            assert tile.hopper is not None
            assert tile.programs(2048) == parts
            assert (tile.segment // tile.kv_tile) % 2 == 0
        assert hopper_sparse_tile(shape, 132, 1) == sparse_tile(shape, HOPPER, 132, 1)


# -- What the kernel computes, by numpy. tests.tools.gluon_in_numpy says what that does not see.


def weighted(x: np.ndarray, at: np.ndarray, by_x: np.ndarray, by_y: np.ndarray) -> np.ndarray:
    """With cells that lie in memory, two of which are a word there."""
    words = at.item()
    cells = 2 * words.offset + np.arange(x.shape[1]) % 2
    return x * by_x + words.storage.view(np.float32)[cells] * by_y


@pytest.fixture(autouse=True)
def _assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, meaning in {
        sparse_finish._WEIGHTED: lambda x, y, by_x, by_y: x * by_x + y * by_y,
        sparse_finish._WEIGHTED_PAIR: weighted,
    }.items():
        monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, text.value, meaning)


CASES = {
    "64 heads": SparseCase(BF16, 64, (300, 0, 1, 129), 300, 512, 64),
    "128 heads": SparseCase(BF16, 128, (257, 128), 260, 512, 64),
    "8 heads": SparseCase(BF16, 8, (0, 256), 256, 512, 64),
    "80 heads, sinks": SparseCase(BF16, 80, (200, 5), 200, 512, 64, sinks=True),
    "padded": SparseCase(BF16, 20, (130,), 130, 512, 64, padded_blocks=True),
}


def tiles_of(case: SparseCase) -> dict[str, SparseTile]:
    shape = SparseShape(case.num_heads, case.topk, case.layout)
    options = HopperSparseTile()
    return {
        "persistent": hopper_sparse_tile(shape, 1, 99, replace(options, balanced=False)),
        "early": hopper_sparse_tile(shape, 1, 99, replace(options, early=True)),
        "a program for each": hopper_sparse_tile(
            shape, 1, 99, replace(options, programs_per_sm=None)
        ),
        "balanced": hopper_sparse_tile(shape, 4, 99, replace(options, balanced=True)),
        "split": hopper_sparse_tile(shape, 132, 1, options),
        "split persistent": hopper_sparse_tile(shape, 132, 3, options),
    }


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_states_are_the_oracles(
    case: SparseCase, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three programs on three multiprocessors store the oracle's states, in any order."""
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 3)
    translation = gluon_in_numpy.Translation()
    calls = gluon_in_numpy.take_over(monkeypatch, hopper_sparse_kernel, translation)
    if is_late:
        gluon_in_numpy.delay(monkeypatch)
    for name, tile in tiles_of(case).items():
        trial = SparseTrial(case)
        assert trial.misses(*launched(trial, tile)) == {}, name
    assert len(calls) == len(tiles_of(case))


@pytest.mark.parametrize("name", ["128 heads", "8 heads"])
def test_offsets_of_rows_may_need_more_than_32_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 3)
    calls = gluon_in_numpy.take_over(
        monkeypatch, hopper_sparse_kernel, gluon_in_numpy.Translation()
    )
    case = CASES[name]
    trial, tile = SparseTrial(case), tiles_of(case)["persistent"]
    one = trial.cache.reshape(1, -1, trial.cache.shape[2])
    # In a cache of one page, an id times the stride is the offset of a row. Offsets are in units
    # of 16 bytes.
    for cache in (spread(trial.cache, 0, 1 << 33), spread(one, 1, 1 << 29)):
        assert trial.misses(*launched(trial, tile, kv_cache=cache)) == {}
    assert len(calls) == 2


def launched(
    trial: SparseTrial, tile: SparseTile, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The trial with a fold of few programs; other tests judge the fold as it is launched."""
    case, given = trial.case, trial.arguments() | changes
    tile = replace(tile, finish_rows=tile.rows, finish_width=case.rank)
    out, lse = trial.results()
    layer = SparseLayer(case.num_heads, case.scale, case.layout, case.rank, case.rope_size)
    counts = tile.state_floats(len(case.lens), case.num_heads, case.topk, case.rank)
    names = ("query", "rotary", "kv_cache", "indices", "topk_lens")
    tensors = SparseTensors(
        *(given[name] for name in names),
        out,
        lse,
        sinks=given["sinks"],
        k_scale=given["k_scale"],
        states=torch.full((counts[0],), float("nan")),
        sums=torch.full((counts[1],), float("nan")),
        counters=torch.zeros(tile.counters, dtype=torch.int32),
    )
    for call in sparse_calls(layer, tile, tensors, hardware_e4m3=True):
        launch(call)
    assert tensors.counters is not None
    assert not tensors.counters.any()
    return out, lse


# -- Lists that lie in two programs' shares.

SHARED = {
    "64 heads": SparseCase(BF16, 64, (300, 300, 129, 300, 260), 300, 512, 64),
    "80 heads, sinks": SparseCase(BF16, 80, (257, 0, 384), 384, 512, 64, sinks=True),
    "short lists": SparseCase(BF16, 8, (1, 130, 0, 200, 384, 1, 129), 384, 512, 64),
    "a list for each": SparseCase(BF16, 8, (384, 256), 384, 512, 64),
    "one list": SparseCase(BF16, 80, (384,), 384, 512, 64),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_programs_that_walk_equally_many_tiles(
    case: SparseCase, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits do not depend on the order in which programs run."""
    calls = gluon_in_numpy.take_over(
        monkeypatch, hopper_sparse_kernel, gluon_in_numpy.Translation()
    )
    if is_late:
        gluon_in_numpy.delay(monkeypatch)
    shape = SparseShape(case.num_heads, case.topk, case.layout)
    for multiprocessors in (2, 4, 6):
        tile = hopper_sparse_tile(shape, multiprocessors, 99, HopperSparseTile(balanced=True))
        assert tile.shares == multiprocessors
        trial = SparseTrial(case)
        first = launched(trial, tile)
        assert trial.misses(*first) == {}, multiprocessors
        for _ in range(2):
            assert all(map(torch.equal, first, launched(trial, tile)))
    assert len(calls) == 9


def test_programs_take_whole_lists_where_these_are_too_few() -> None:
    options = HopperSparseTile(balanced=True)
    for rows, shares in ((1, 0), (65, 0), (66, 132), (4096, 132)):
        tile = hopper_sparse_tile(SHAPE, 132, rows, options)
        assert (tile.shares, tile.counters) == (shares, 2 * shares)
        assert tile.state_floats(rows, 128, 2048) != (0, 0) or rows == 65
        assert hopper_sparse_tile(SHAPE, 132, rows).shares == 0
    # The tile is balanced without being asked where a second round would be short.
    assert hopper_sparse_tile(SHAPE, 132, 80).shares == 132
    assert hopper_sparse_tile(SHAPE, 132, 128).shares == 0


# -- Rows of e4m3 that are converted (dequantised).

DEQUANTISED = {
    "64 heads": SparseCase(SCALED, 64, (300, 0, 1, 129), 300, 512, 64),
    "80 heads, sinks": SparseCase(SCALED, 80, (200, 5), 200, 512, 64, sinks=True),
    "padded": SparseCase(SCALED, 128, (64, 65), 130, 512, 64, padded_blocks=True),
}


def dequantised(words: np.ndarray, pairs: np.ndarray) -> tuple[np.ndarray, ...]:
    """Words of four e4m3 times a factor, as words of two fp16."""
    real = bytes_of(words) * np.ascontiguousarray(pairs).view(np.float32)[..., None]
    halves = np.ascontiguousarray(real.astype(np.float16)).view(np.int32)
    return halves[..., 0], halves[..., 1]


DEQUANTISING = {
    sparse_dequantise._SCALED.value: dequantised,
    sparse_dequantise._PAIR.value: lambda x: x.view(np.int32),
}


def set_rope_to_fp16(trial: SparseTrial) -> None:
    """Store the cache's rotary parts in the type that the emulated query has."""
    case = trial.case
    row = case.layout.row(case.rank, case.rope_size, DType.BFLOAT16)
    rope = latent_views(trial.cache, row)["rope"]
    rope.copy_(rope.half().view(torch.bfloat16))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", DEQUANTISED.values(), ids=DEQUANTISED)
def test_states_of_dequantised_rows_are_the_oracles(
    case: SparseCase, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are fp16 throughout, which the launcher would refuse beside rows of bf16."""
    monkeypatch.setattr(sparse_launch, "hopper_misfit", lambda *_: None)
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 3)
    for text, meaning in DEQUANTISING.items():
        monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, text, meaning)
    translation = gluon_in_numpy.Translation()
    calls = gluon_in_numpy.take_over(monkeypatch, hopper_sparse_kernel, translation)
    if is_late:
        gluon_in_numpy.delay(monkeypatch)
    for name, tile in tiles_of(case).items():
        trial = SparseTrial(case)
        set_rope_to_fp16(trial)
        assert trial.misses(*launched(trial, tile)) == {}, name
    assert len(calls) == len(tiles_of(case))


# -- Tokens that attend together, over joint lists.

JOINT = {
    "16 heads": (4, SparseCase(BF16, 16, (300, 0, 1, 129, 64, 200), 300, 512, 64)),
    "8 heads": (8, SparseCase(BF16, 8, (5, 0, 256, 100, 99, 98, 97, 96, 130), 256, 512, 64)),
    "20 heads, sinks": (2, SparseCase(BF16, 20, (200, 5, 7), 200, 512, 64, sinks=True)),
    "5 heads, padded": (4, SparseCase(BF16, 5, (130, 131, 0), 131, 512, 64, padded_blocks=True)),
    "no keys": (4, SparseCase(BF16, 16, (0, 0, 0, 0, 0), 64, 512, 64)),
    "scaled, 16 heads": (4, SparseCase(SCALED, 16, (300, 0, 1, 129, 64), 300, 512, 64)),
    "scaled, 6 heads": (8, SparseCase(SCALED, 6, (70,) * 9, 70, 512, 64, padded_blocks=True)),
}


def joint_lists(trial: SparseTrial, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The trial's lists joined, in no order, and their lengths; wild entries past the lengths.

    A joint list has a row once: of rows that a token lists several times, all but one leave the
    trial's lists.
    """
    random = torch.Generator().manual_seed(7)
    case = trial.case
    groups = -(-len(case.lens) // tokens)
    entries = torch.full((groups, tokens * case.topk), 2**30 - 1, dtype=torch.int32)
    counts = torch.zeros(groups, dtype=torch.int32)
    for group in range(groups):
        members: dict[int, int] = {}
        for bit, row in enumerate(range(group * tokens, min((group + 1) * tokens, len(case.lens)))):
            seen: set[int] = set()
            for place, listed in enumerate(trial.indices[row, : case.lens[row]].tolist()):
                if listed < 0 or listed in seen:
                    trial.indices[row, place] = -1
                    continue
                seen.add(listed)
                members[listed] = members.get(listed, 0) | 1 << bit
        packed = [slot | bits << (32 - tokens) for slot, bits in members.items()]
        mixed = torch.randperm(len(packed), generator=random).tolist()
        signed = [(packed[at] ^ 1 << 31) - (1 << 31) for at in mixed]
        entries[group, : len(packed)] = torch.tensor(signed, dtype=torch.int64).int()
        counts[group] = len(packed)
    return entries, counts


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(("tokens", "case"), JOINT.values(), ids=JOINT)
def test_tokens_that_attend_together_have_the_oracles_states(
    tokens: int, case: SparseCase, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_launch, "hopper_misfit", lambda *_: None)
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 2)
    for text, meaning in DEQUANTISING.items():
        monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, text, meaning)
    translation = gluon_in_numpy.Translation()
    calls = gluon_in_numpy.take_over(monkeypatch, hopper_sparse_kernel, translation)
    if is_late:
        gluon_in_numpy.delay(monkeypatch)
    trial = SparseTrial(case)
    if case.layout is SCALED:
        set_rope_to_fp16(trial)
    entries, counts = joint_lists(trial, tokens)
    tile = tile_of_joint_lists(case, tokens)
    assert tile.tokens == tokens
    assert trial.misses(*launched(trial, tile, indices=entries, topk_lens=counts)) == {}
    # A token that listed a row of another token would be off by far.
    entries[0, : counts[0]] |= -(1 << (32 - tokens))
    if counts[0]:
        assert trial.misses(*launched(trial, tile, indices=entries, topk_lens=counts)) != {}
    assert len(calls) == (2 if counts[0] else 1)


def tile_of_joint_lists(case: SparseCase, tokens: int) -> SparseTile:
    return joint_tile(SparseShape(case.num_heads, case.topk, case.layout), tokens, 2)


def test_joint_lists_that_do_not_fit_are_refused() -> None:
    tokens, case = JOINT["16 heads"]
    trial = SparseTrial(case)
    entries, counts = joint_lists(trial, tokens)
    tile = tile_of_joint_lists(case, tokens)
    with pytest.raises(ValueError, match="query must be"):
        launched(trial, tile, indices=entries[:1], topk_lens=counts[:1])
    with pytest.raises(ValueError, match=r"topk_lens must be contiguous int32 \[2\]"):
        launched(trial, tile, indices=entries, topk_lens=counts[:1])


def test_joint_lists_serve_few_heads_of_rows_that_the_kernel_converts_or_copies() -> None:
    for layout, heads, tokens in (
        *((BF16, 1, 8), (BF16, 8, 8), (BF16, 9, 4), (BF16, 16, 4), (BF16, 17, 2), (BF16, 32, 2)),
        *((BF16, 33, 1), (SCALED, 16, 4), (E4M3, 16, 1)),
    ):
        shape = SparseShape(heads, 2048, layout)
        assert joint_tokens(shape, usual_options(shape)) == tokens
        assert joint_tokens(shape, None) == 1


# -- Few heads.

FEW = {
    "16 heads": SparseCase(BF16, 16, (300, 0, 1, 64, 65, 129), 300, 512, 64),
    "20 heads, sinks": SparseCase(BF16, 20, (200, 5), 200, 512, 64, sinks=True),
    "e4m3": SparseCase(E4M3, 8, (300, 1, 64, 128), 300, 512, 64, padded_blocks=True),
    "e4m3, sinks": SparseCase(E4M3, 17, (130, 0), 130, 512, 64, sinks=True),
    "scaled": SparseCase(SCALED, 16, (300, 0, 1, 64, 65), 300, 512, 64),
    "scaled, one head": SparseCase(SCALED, 1, (200,), 200, 512, 64, padded_blocks=True),
}


def bytes_of(words: np.ndarray) -> np.ndarray:
    """The e4m3 bytes of words as fp16; a last dimension holds the four bytes of a word."""
    parts = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return torch.from_numpy(parts).view(torch.float8_e4m3fn).half().numpy()


def halves_of(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.int16).reshape(*words.shape, 2)


def woven_pairs(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, ...]:
    x, y = halves_of(first), halves_of(second)
    return tuple(part[..., i] for i in range(2) for part in (x, y))


def shrunk(o: np.ndarray, by: np.ndarray) -> np.ndarray:
    """What stands beside cell c of a block is the factor of head c, for as many as there are."""
    heads = o.shape[2]
    return o * by[:, None, :heads, 0]


def of_bf16(words: np.ndarray) -> tuple[np.ndarray, ...]:
    """The two bf16 of a word as fp16 of the same bits, since numpy has no bf16."""
    pairs = torch.from_numpy(halves_of(words)).view(torch.bfloat16).half().view(torch.int16)
    return tuple(pairs[..., i].numpy() for i in range(2))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("case", FEW.values(), ids=FEW)
def test_states_of_few_heads_are_the_oracles(
    case: SparseCase, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives right results for whole lists and for lists in parts.

    Queries are fp16 throughout, which the launcher would refuse beside bf16.
    """
    monkeypatch.setattr(sparse_launch, "hopper_misfit", lambda *_: None)
    for text, meaning in {
        sparse_operands._WOVEN_PAIRS: woven_pairs,
        sparse_parts._LOG2: np.log2,
        sparse_parts._EXP2: np.exp2,
        **{tl.constexpr(shrink_text(cells)): shrunk for cells in (32, 64)},
        **({packed.SPLIT_HALVES: of_bf16} if case.layout is SCALED else {}),
    }.items():
        monkeypatch.setitem(gluon_in_numpy.ASSEMBLY, text.value, meaning)
    translation = gluon_in_numpy.Translation()
    calls = gluon_in_numpy.take_over(monkeypatch, hopper_narrow_sparse_kernel, translation)
    if is_late:
        gluon_in_numpy.delay(monkeypatch)
    shape = SparseShape(case.num_heads, case.topk, case.layout)
    tiles = [hopper_sparse_tile(shape, *sizes) for sizes in ((1, 99), (132, 8))]
    for tile in tiles:
        trial = SparseTrial(case)
        assert trial.misses(*launched(trial, tile)) == {}
    assert len(calls) == len(tiles)


@pytest.fixture
def trial() -> SparseTrial:
    return SparseTrial(CASES["8 heads"])


def test_all_entries_count_without_lengths(
    trial: SparseTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 3)
    gluon_in_numpy.take_over(monkeypatch, hopper_sparse_kernel, gluon_in_numpy.Translation())
    lens = trial.lens
    ids = trial.indices.clone()
    for row, length in enumerate(lens.tolist()):
        ids[row, length:] = -1
    tile = tiles_of(trial.case)["persistent"]
    found = launched(trial, tile, indices=ids, topk_lens=None)
    assert trial.misses(*found) == {}


def test_rows_that_are_not_aligned_are_refused(
    trial: SparseTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_launch, "_multiprocessors", lambda _: 3)
    query = torch.zeros(2, 8, 577, dtype=torch.float16)[..., 1:]
    tile = tiles_of(trial.case)["persistent"]
    with pytest.raises(ValueError, match="query must have rows at multiples of 16 bytes"):
        launched(trial, tile, query=query[..., :512])
    layer = SparseLayer(8, 0.1, LatentFormat.FP8_NOPE_FP8_ROPE)
    case = replace(trial.case, layout=layer.layout)
    with pytest.raises(ValueError, match="the kernel for few heads, or the portable kernel"):
        launched_of_e4m3(SparseTrial(case), tile)


def launched_of_e4m3(trial: SparseTrial, tile: SparseTile) -> tuple[KernelCall, ...]:
    given = trial.arguments()
    out, lse = trial.results()
    case = trial.case
    layer = SparseLayer(case.num_heads, case.scale, case.layout, case.rank, case.rope_size)
    names = ("query", "rotary", "kv_cache", "indices", "topk_lens")
    tensors = SparseTensors(*(given[name] for name in names), out, lse, given["k_scale"])
    return sparse_calls(layer, tile, tensors, hardware_e4m3=True)
