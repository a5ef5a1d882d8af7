"""Prompts of a batch-invariant engine on the Hopper prefill kernel, computed by numpy.

Decodes, and the prompts that they are compared with, are the portable kernels' in Triton's
interpreter. Products, exponents and sums have the same order in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.backends.triton_attn import TritonAttentionBackend
from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.reference import cache as reference
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import CaseResult, Trial
from builders.dense.choice import LayerRequirements, hopper_tile, prefill_kernel_of
from builders.launch.call import KernelCall, is_by_ptxas_13
from builders.splitkv import segments
from builders.splitkv.tiles import DenseShape, HopperTile, invariant_split_tile
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import PrefillKernel
from tests.dense.chunked import Prompt, Rows, Setup, differing, products_in_order
from tests.dense.test_hopper_prefill import IN_REGISTERS
from tests.tools import gluon_in_numpy
from tests.tools.gpus import hopper

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_gpu_invariance.py is for a GPU"
)
CPU = torch.device("cpu")
SMALL = Setup(
    heads=(2, 1, 64), dtype=DType.FLOAT16, keys=2300, queries=150, max_len=4096, beside=2000
)
"""Its keys are five segments, in three segment groups of two; its queries two or three tiles."""
LAYERS = {
    "causal": SMALL,
    "no group": replace(SMALL, heads=(1, 1, 64), keys=1100),
    "seven heads": replace(SMALL, heads=(7, 1, 64), keys=1100, queries=70),
    "window": replace(SMALL, window=700),
    "narrow window": replace(SMALL, window=100, sinks=True, keys=1100),
    "chunk": replace(SMALL, chunk=1024),
    "cap and sinks": replace(SMALL, soft_cap=30.0, sinks=True, keys=1100),
    "128": replace(SMALL, heads=(2, 1, 128)),
    "128 window": replace(SMALL, heads=(2, 1, 128), window=700),
    # A verify has 64 rows, whose segments have 4096 keys.
    "tall": replace(SMALL, heads=(16, 1, 64), keys=4200, queries=61, max_len=8192),
    "two products": replace(SMALL, heads=(2, 1, 96), queries=70),
    "stored": replace(SMALL, heads=(2, 1, 256), queries=70),
    "stored in two products": replace(SMALL, heads=(2, 1, 192), queries=70),
}


def _product(
    left: Any, right: Any, total: Any, use_acc: bool = True, is_async: bool = False
) -> Any:
    """A product whose terms are added one after the other, as :func:`products_in_order` adds."""
    a, b = (
        np.asarray(part.load(None) if hasattr(part, "load") else part, np.float32)
        for part in (left, right)
    )
    result = np.asarray(total).astype(np.float32) if use_acc else np.zeros(total.shape, np.float32)
    for k in range(a.shape[1]):
        result = result + a[:, k, None] * b[None, k]
    return gluon_in_numpy.value(result)


@pytest.fixture(autouse=True)
def _short_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segment groups of two segments, and products whose order is that of a GPU's."""
    monkeypatch.setattr(segments, "SEGMENTS_PER_GROUP", 2)
    with products_in_order():
        yield


@pytest.fixture
def instead(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Functions that replace functions of the kernel; a test may give them."""
    return getattr(request, "param", {})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any]) -> list[KernelCall]:
    """The kernel's launches so far, which numpy runs."""
    functions = IN_REGISTERS | {"warpgroup_mma": _product} | instead
    translation = gluon_in_numpy.Translation(**functions)
    return gluon_in_numpy.take_over(monkeypatch, hopper_prefill_kernel, translation)


def both(setup: Setup) -> tuple[Prompt, Prompt]:
    """A prompt of the portable kernels, and the same one of the Hopper kernel."""
    return Prompt(setup, CPU), Prompt(replace(setup, prefill=PrefillKernel.HOPPER), CPU)


def part(rows: Rows, start: int, stop: int) -> Rows:
    return rows[0][start:stop], rows[1][start:stop]


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_have_the_bits_of_the_portable_kernels(layer: str, launched: list[KernelCall]) -> None:
    portable, prompt = both(LAYERS[layer])
    last = prompt.setup.queries
    whole = prompt.rows(0, last)
    assert len(launched) == 1
    assert differing(portable.rows(0, last), whole) == 0
    assert differing(portable.in_chunks(1, last - 2), part(whole, last - 2, last)) == 0
    assert differing(prompt.in_chunks(33, last - 60), part(whole, last - 60, last)) == 0
    assert len(launched) > 1


@pytest.mark.parametrize("layer", ["causal", "128", "stored"])
def test_what_comes_late_is_waited_for(
    layer: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon_in_numpy.delay(monkeypatch)
    portable, prompt = both(replace(LAYERS[layer], keys=1300, queries=140))
    assert differing(portable.rows(0, 140), prompt.rows(0, 140)) == 0
    assert launched


@pytest.mark.parametrize("programs", [1, 2])
@pytest.mark.parametrize("layer", ["causal", "stored"])
def test_programs_that_take_several_tiles_read_no_state_of_the_tile_before(
    layer: str, programs: int, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    portable, prompt = both(replace(LAYERS[layer], queries=150))
    expected = portable.rows(0, 150, ((33, 1500),))
    planner = prompt.builder.planner
    monkeypatch.setattr(planner, "num_multiprocessors", programs)
    planner.buffers["prefill_states"].fill_(float("nan"))
    planner.buffers["prefill_sums"].fill_(float("nan"))
    assert differing(prompt.rows(0, 150, ((33, 1500),)), expected) == 0
    assert [call.grid for call in launched] == [(programs,)]


# -- Right results.

LONG = BatchSpec("long_queries", (140, 1, 70), (1300, 1100, 530))
"""Two prompts of the Hopper kernel, whose keys fill up to three segments, and a decode."""


@pytest.mark.parametrize(
    "feature",
    [
        "causal",
        "non_causal",
        "causal_per_request_window",
        "window",
        "chunked_lookback",
        "sinks",
        "soft_cap_window",
        "mm_prefix",
        "mm_prefix_clamped",
    ],
)
def test_every_mask_is_right(
    feature: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn.impls.dense.cached.write_kv", reference.write_kv)
    monkeypatch.setattr(Trial, "prefill_kernel", PrefillKernel.HOPPER)
    case = Case(FEATURES[feature], LONG, Heads(2, 1, 64), DType.FLOAT16)
    trial = DenseTrial(TritonAttentionBackend, case, CPU)
    trial.config = trial.config.replace(batch_invariant=True)
    trial.write()
    record = trial.build(trial.builder())
    assert record.prefill.hopper.segmented is not None
    results = trial.attend(record, trial.inputs, trial.cache())
    result = CaseResult()
    trial.judge(results, record, result)
    trial.check_padding(results, result)
    assert result.findings == {}
    assert "output" in result.checked
    assert launched


# -- Seeded faults: each makes bits differ.


def _forgets(m: Any, m_new: Any) -> tuple[Any, Any, Any]:
    """Factors of a fold that takes the new state for all there is."""
    return m_new, gluon_in_numpy.value(np.zeros_like(m)), gluon_in_numpy.value(np.ones_like(m))


def _half_a_segment(number: Any, parts: Any) -> Any:
    return gluon_in_numpy.value(np.int32(number // 2 * 2 + 2))


def _nothing_before(low: Any, tile: Any, follows: Any, parts: Any) -> Any:
    """A run without the segment groups before it."""
    high = min(int(tile.high), (int(low) * parts.UNIT // 1024 + 1) * 1024 // parts.UNIT)
    made = type("Run", (), {"low": low, "high": gluon_in_numpy.value(np.int32(high))})
    return type("Run", (made,), {"end": tile.high, "follows": gluon_in_numpy.value(False)})


def _maxima(most: Any, m: Any, factor: Any) -> Any:
    """Rows' maxima so far, by thread, where references are wanted."""
    largest = (np.asarray(most).max(1, keepdims=True) * np.float32(factor)).astype(np.float32)
    return gluon_in_numpy.value(np.maximum(m, largest))


@pytest.mark.parametrize(
    "instead",
    [
        {"fold_factors": _forgets},
        {"_behind": _half_a_segment},
        {"_run_from": _nothing_before},
        {"_clear_tail": lambda *_: None},
        {"referred": _maxima},
    ],
    indirect=True,
    ids=[
        "forgets segments",
        "short segments",
        "forgets groups",
        "values that nobody wrote",
        "maxima for references",
    ],
)
def test_faults_show(launched: list[KernelCall]) -> None:
    portable, prompt = both(LAYERS["causal"])
    assert differing(portable.rows(0, 150), prompt.rows(0, 150)) != 0
    assert launched


# -- References of weights.


def _with_rising_scores(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a prompt keys whose scores rise by 5.5 in a tile of 128, in units of log 2.

    So references are exceeded, are kept for a tile, and are then replaced.

    Returns:
        Keys and values, ``[keys, 64]`` float64, of the only KV head.
    """
    setup, dtype = prompt.setup, prompt.setup.dtype.torch
    key = prompt._normal(setup.keys, 1, 64) * 0.02
    key[:, 0, 0] = 0.03 * torch.arange(setup.keys, dtype=torch.float32).to(dtype)
    value = prompt._normal(setup.keys, 1, 64)
    slots = (prompt.table[0, :, None].long() * 16 + torch.arange(16)).ravel()[: setup.keys]
    prompt.impl.do_kv_cache_update(prompt.layer, key, value, prompt.cache, slots)
    prompt.query[:] = 0
    prompt.query[..., 0] = 8
    return key[:, 0].double(), value[:, 0].double()


def test_scores_may_rise_from_tile_to_tile(launched: list[KernelCall]) -> None:
    portable, prompt = both(replace(SMALL, keys=1300, queries=70))
    key, value = _with_rising_scores(prompt)
    portable.cache.copy_(prompt.cache)
    portable.query.copy_(prompt.query)
    found, lse = prompt.rows(0, 70)
    assert differing(portable.rows(0, 70), (found, lse)) == 0
    assert differing(portable.in_chunks(1, 66), part((found, lse), 66, 70)) == 0
    scores = prompt.query[:, 0].double() @ key.T * 64**-0.5
    seen = torch.arange(1300)[None] <= torch.arange(1230, 1300)[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ value
    for head in range(2):
        error = (found[:, head].double() - expected).norm() / expected.norm()
        # Weights are rounded to fp16, by half of this at most.
        assert error < torch.finfo(torch.float16).eps
        rounding = 64 * torch.finfo(torch.float32).eps
        expected_lse = scores.logsumexp(-1)
        torch.testing.assert_close(lse[:, head].double(), expected_lse, rtol=rounding, atol=0)
    assert launched


# -- Which layers have it.

SHAPE = DenseShape(32, 8, 128, 128, 2, 16)
ASKED = LayerRequirements(True, query=DType.BFLOAT16, cache_dtype=CacheDType.AUTO)


@pytest.mark.parametrize("size", [64, 80, 96, 128, 160, 192, 256])
def test_its_tiles_have_the_keys_of_decodes_and_fit(size: int) -> None:
    shape, gpu = replace(SHAPE, head_size=size, head_size_v=size), hopper(132)
    for tokens, window in ((1, None), (8, None), (1, 128)):
        keys = invariant_split_tile(shape, gpu, tokens, window).kv_tile
        tile = hopper_tile(shape, DeviceKind.SM90, 16, replace(ASKED, kv_tile=keys))
        assert isinstance(tile, HopperTile)
        assert (tile.kv_tile, tile.run) == (keys, 16)
        row = 2 * (tile.width + tile.extra)
        queries = tile.query_stages * tile.warp_groups * 64
        assert row * (queries + 2 * tile.num_stages * keys) < 225 * 1024
        assert tile.stores_totals == (tile.width + tile.extra > (64 if is_by_ptxas_13() else 128))


@pytest.mark.parametrize(
    ("shape", "asks", "said"),
    [
        (SHAPE, ASKED, "every row has the bits of the split-KV kernel"),
        (replace(SHAPE, head_size=192), replace(ASKED, kv_tile=64), "heads of 192 and 128"),
        (SHAPE, replace(ASKED, kv_tile=64, alibi=True), "ALiBi"),
        (replace(SHAPE, stored_bits=8), replace(ASKED, kv_tile=128), "a cache of 8 bits"),
    ],
)
def test_layers_whose_prompts_it_leaves_to_other_kernels(
    shape: DenseShape, asks: LayerRequirements, said: str
) -> None:
    tile, why = prefill_kernel_of(shape, DeviceKind.SM90, 16, asks, PrefillKernel.AUTO)
    assert tile is None
    assert said in why
    with pytest.raises(ValueError, match="does not serve") as error:
        prefill_kernel_of(shape, DeviceKind.SM90, 16, asks, PrefillKernel.HOPPER)
    assert said in str(error.value)


def test_left_to_itself_an_engine_takes_it() -> None:
    asks = replace(ASKED, kv_tile=64)
    tile, why = prefill_kernel_of(SHAPE, DeviceKind.SM90, 16, asks, PrefillKernel.AUTO)
    assert tile is not None
    assert tile.kv_tile == 64
    assert "it serves this layer" in why


@pytest.mark.parametrize(
    ("setup", "slots"),
    [
        # Slots of 64 rows, two for each of three programs: none, for segment groups, and for the
        # segments of a group besides.
        (replace(SMALL, keys=400, max_len=1024), 0),
        (SMALL, 6),
        (replace(SMALL, heads=(2, 1, 256)), 12),
    ],
)
def test_scratch_has_a_slot_for_each_warp_group(setup: Setup, slots: int) -> None:
    planner = Prompt(replace(setup, prefill=PrefillKernel.HOPPER), CPU).builder.planner
    sizes = [planner.buffers[name].numel() for name in ("prefill_states", "prefill_sums")]
    assert sizes[0] >= slots * 64 * setup.heads[2]
    assert sizes[1] >= slots * 64 * 2
    assert bool(sizes[0]) == bool(slots)
