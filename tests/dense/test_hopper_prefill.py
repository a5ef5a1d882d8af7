"""The Hopper prefill kernel's results, computed by numpy.

``tests/tools/gluon_in_numpy.py`` says what numpy does not show.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.backends.triton_mla import TritonMLABackend
from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case, LatentCase
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult, Trial
from builders.launch.call import KernelCall
from builders.splitkv.planner import (
    SplitPlanner,
)
from specs.dtypes import CacheDType, DType
from specs.engine import PrefillKernel
from specs.layouts import KVPacking
from tests.conformance.test_random_attention import findings
from tests.tools import gluon_in_numpy

# A program has several query tiles here, with one or several key tiles each. Some last key tiles
# end within a page. In some tiles, some rows see no key of a tile that other rows see.
BATCH = BatchSpec("several", (140, 33, 20), (300, 33, 180))
WITHOUT_PAGES = BatchSpec("without_pages", (140, 33, 1), (140, 33, 1))
WHOLE = Case(heads=Heads(8, 2, 128), dtype=DType.FLOAT16, batch=BATCH)
CASES = {
    "causal": WHOLE,
    "no_group": replace(WHOLE, heads=Heads(2, 2, 128)),
    # These have more heads than are walked together: with a KV head each, or seven per KV head.
    "twelve_heads": replace(WHOLE, heads=Heads(12, 12, 64)),
    "twice_seven": replace(WHOLE, heads=Heads(28, 4, 64)),
    "seven": replace(WHOLE, heads=Heads(7, 1, 64)),
    "d256": replace(WHOLE, heads=Heads(4, 2, 256)),
    # Heads whose columns are multiplied in two parts: 64 or 128, and what is left.
    "d72": replace(WHOLE, heads=Heads(4, 2, 72)),
    "d80": replace(WHOLE, heads=Heads(4, 2, 80), block_size=48),
    "d96": replace(WHOLE, heads=Heads(4, 2, 96)),
    "d160_sinks": replace(WHOLE, heads=Heads(4, 2, 160), feature=FEATURES["sinks"]),
    "d192": replace(WHOLE, heads=Heads(2, 1, 192)),
    "d192_window": replace(WHOLE, heads=Heads(2, 1, 192), feature=FEATURES["window"]),
    "expanded": replace(WHOLE, heads=Heads(2, 2, 192, 128), packing=KVPacking.PACKED),
    "expanded_encoder": replace(
        WHOLE, heads=Heads(2, 2, 192, 128), feature=FEATURES["encoder_only"], batch=WITHOUT_PAGES
    ),
    "encoder_window": replace(
        WHOLE, heads=Heads(4, 2, 64), feature=FEATURES["encoder_only_window"], batch=WITHOUT_PAGES
    ),
    "fp8": replace(WHOLE, cache_dtype=CacheDType.FP8),
    "fp8_d256": replace(WHOLE, heads=Heads(4, 2, 256), cache_dtype=CacheDType.FP8),
    "fp8_d80": replace(WHOLE, heads=Heads(4, 2, 80), cache_dtype=CacheDType.FP8, block_size=48),
    "fp8_window": replace(
        WHOLE, heads=Heads(4, 2, 64), cache_dtype=CacheDType.FP8, feature=FEATURES["window"]
    ),
    "fp8_d64": replace(WHOLE, heads=Heads(4, 1, 64), cache_dtype=CacheDType.FP8),
    **{
        name: replace(WHOLE, heads=Heads(4, 2, 64), feature=FEATURES[name])
        for name in ("window", "chunked_lookback", "mm_prefix_window", "soft_cap", "sinks")
    },
}


def _e4m3(words: Any, kind: int, dtype: Any) -> Any:
    raw = np.ascontiguousarray(words).view(np.uint8)
    numbers = torch.from_numpy(raw).view(torch.float8_e4m3fn).float()
    return gluon_in_numpy.value(numbers.numpy().astype(dtype).view(np.int32))


def _kept(scores: Any, seen: Any) -> Any:
    return gluon_in_numpy.value(np.where(seen, scores, -np.inf).astype(np.float32))


def _referred(most: Any, m: Any, factor: Any) -> Any:
    """New references ``[64, 4]``: the former ones of rows that exceed them by at most 2^8."""
    largest = (np.asarray(most).max(1, keepdims=True) * np.float32(factor)).astype(np.float32)
    return gluon_in_numpy.value(np.where(largest - m <= 8, m, largest))


IN_REGISTERS: dict[str, Any] = {
    "pack": lambda weights, dtype, tile: weights,
    "unpack": lambda pairs, dtype, tile, layout: pairs.astype(dtype),
    "anew": lambda place, asm: place,
    "computed": lambda sums: sums,
    "computed_pairs": lambda pairs: pairs,
    "rescaled": lambda x, factors: x * factors,
    "referred": _referred,
    "_behind_stores": lambda slot: slot,
    "_up_to": lambda scores, key, last: _kept(scores, key <= last),
    "_within": lambda scores, key, query, window: _kept(
        scores, (query - key >= 0) & (query - key < window)
    ),
    "_dequantised": _e4m3,
    "_layout": lambda rows, width: None,
}
"""What inline assembly computes, and what is only about registers."""


@pytest.fixture
def instead(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Functions that replace functions of the kernel; a test may give them."""
    return getattr(request, "param", {})


@pytest.fixture
def programs() -> int:
    """The number of programs of a launch; a test may override this."""
    return 2


@pytest.fixture
def launched(
    monkeypatch: pytest.MonkeyPatch, instead: dict[str, Any], programs: int
) -> list[KernelCall]:
    """The kernel's launches so far, which numpy runs."""
    make = SplitPlanner.prefill_plan

    def of_few(planner: SplitPlanner, *given: Any) -> Any:
        plan = make(planner, *given)
        if plan is None or plan.hopper is None:
            return plan
        return replace(plan, hopper=replace(plan.hopper, programs=programs))

    monkeypatch.setattr(SplitPlanner, "prefill_plan", of_few)
    monkeypatch.setattr(Trial, "prefill_kernel", PrefillKernel.HOPPER)
    translation = gluon_in_numpy.Translation(**IN_REGISTERS | instead)
    return gluon_in_numpy.take_over(monkeypatch, hopper_prefill_kernel, translation)


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_it_serves(name: str, launched: list[KernelCall]) -> None:
    assert findings(CASES[name]) == {}
    (call,) = launched
    assert call.grid == (2,)


@pytest.mark.parametrize("name", ["causal", "seven", "d80", "d192", "d256", "fp8", "expanded"])
def test_what_comes_late_is_waited_for(
    name: str, launched: list[KernelCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon_in_numpy.delay(monkeypatch)
    assert findings(CASES[name]) == {}
    assert launched


@pytest.mark.parametrize("programs", [1, 2, 3, 500])
@pytest.mark.parametrize("name", ["causal", "fp8"])
def test_any_number_of_programs_takes_every_tile_once(
    name: str, programs: int, launched: list[KernelCall]
) -> None:
    assert findings(CASES[name]) == {}
    (call,) = launched
    assert call.grid == (programs,)
    # Programs count tiles, and the program that counts the last sets the count back to 0.
    assert call.arguments["counter_ptr"].item() == 0


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_it_computes_latent_attention_expanded(
    cache_dtype: CacheDType, launched: list[KernelCall]
) -> None:
    batch = BatchSpec("contexts", (40, 20, 1), (200, 20, 90))
    case = LatentCase(
        batch=batch, num_heads=2, dtype=DType.FLOAT16, cache_dtype=cache_dtype, rank=64
    )
    trial, result = LatentTrial(TritonMLABackend, case, torch.device("cpu")), CaseResult()
    trial.write()
    record = trial.build(trial.builder())
    trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
    assert result.findings == {}
    # New tokens attend to each other in one launch, and to cached tokens in the other.
    own, context = launched
    assert (own.arguments["BLOCK_SIZE"], own.arguments["CAUSAL"]) == (0, 1)
    assert (context.arguments["BLOCK_SIZE"], context.arguments["CAUSAL"]) == (16, 0)


def _first_columns_only(values: Any, stage: Any, live: Any) -> None:
    """Clear a tail without the columns of the second product."""
    runs = values.KV_TILE // values.RUN
    run = live // values.RUN
    for half in range(values.HALVES):
        box = values.runs.index((stage * values.HALVES + half) * runs + run)
        rows = box.load(None)
        rows[live % values.RUN :] = 0
        box.store(rows)


NO_TAIL, HALF_A_TAIL = {"_clear_tail": lambda *_: None}, {"_clear_tail": _first_columns_only}


@pytest.mark.parametrize(
    ("instead", "name", "shows"),
    [
        (NO_TAIL, "causal", True),
        (NO_TAIL, "d96", True),
        (HALF_A_TAIL, "causal", False),
        (HALF_A_TAIL, "d96", True),
    ],
    indirect=["instead"],
)
def test_values_that_nobody_wrote_would_show(
    instead: dict[str, Any], name: str, shows: bool, launched: list[KernelCall]
) -> None:
    assert bool(findings(CASES[name])) == shows
    assert launched
