"""Decodes of a batch-invariant engine on the Hopper split-KV kernel, computed by numpy.

The rows that they are compared with are the portable kernels' in Triton's interpreter. Products,
exponents and sums have the same order in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from builders.launch.call import KernelCall
from builders.splitkv import segments
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel
from tests.dense.chunked import Prompt, Rows, Setup, differing, products_in_order
from tests.tools import gluon_in_numpy

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_gpu_invariance.py is for a GPU"
)
CPU = torch.device("cpu")
SMALL = Setup(
    heads=(2, 1, 128), dtype=DType.FLOAT16, keys=2300, queries=40, max_len=4096, beside=2000
)
"""Its keys are five segments, in three segment groups of two."""
FP8 = replace(SMALL, cache_dtype=CacheDType.FP8)
LAYERS = {
    "causal": SMALL,
    "seven heads": replace(SMALL, heads=(7, 1, 128), keys=1100),
    "window": replace(SMALL, window=700),
    "chunk": replace(SMALL, chunk=1024),
    "cap and sinks": replace(SMALL, soft_cap=30.0, sinks=True, keys=1100),
    "64": replace(SMALL, heads=(2, 1, 64)),
    "96": replace(SMALL, heads=(2, 1, 96), keys=1100),
    "256": replace(SMALL, heads=(2, 1, 256), keys=1100),
    # A verify has 32 rows, whose segments have 2048 keys.
    "tall": replace(SMALL, heads=(8, 1, 128)),
    "tall 64": replace(SMALL, heads=(16, 1, 64), soft_cap=30.0, window=700),
    "fp8": FP8,
    "fp8 scales of heads": replace(FP8, heads=(4, 2, 128), head_scales=True, keys=1100),
    "fp8 cap and sinks": replace(FP8, soft_cap=30.0, sinks=True, keys=1100),
    "fp8 window": replace(FP8, window=700),
    "fp8 192": replace(FP8, heads=(2, 1, 192), keys=1100),
}


def _product(left: Any, right: Any, total: Any, *_: Any, **keywords: Any) -> Any:
    """A product whose terms are added one after the other, as :func:`products_in_order` adds."""
    a, b = (
        np.asarray(part.load(None) if hasattr(part, "load") else part, np.float32)
        for part in (left, right)
    )
    uses = keywords.get("use_acc", True)
    result = np.asarray(total).astype(np.float32) if uses else np.zeros(total.shape, np.float32)
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
    products = {"mma_v2": _product, "warpgroup_mma": _product}
    translation = gluon_in_numpy.Translation(**products | instead)
    return gluon_in_numpy.take_over(monkeypatch, hopper_decode_kernel, translation)


def both(setup: Setup) -> tuple[Prompt, Prompt]:
    """A prompt of the portable kernels, and the same one with decodes of the Hopper kernel."""
    return Prompt(setup, CPU), Prompt(replace(setup, decode=DecodeKernel.HOPPER), CPU)


def part(rows: Rows, start: int, stop: int) -> Rows:
    return rows[0][start:stop], rows[1][start:stop]


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_have_the_bits_of_the_portable_kernels(layer: str, launched: list[KernelCall]) -> None:
    portable, decoded = both(LAYERS[layer])
    last = portable.setup.queries
    whole = portable.rows(0, last)
    assert differing(decoded.in_chunks(1, last - 3), part(whole, last - 3, last)) == 0
    assert differing(decoded.in_chunks(4, last - 8), part(whole, last - 8, last)) == 0
    assert len(launched) == 5


# -- Seeded faults: each makes bits differ.


def _sum_from_the_left(x: Any, columns: Any) -> Any:
    total = np.zeros(x.shape[0], np.float32)
    for column in np.asarray(x).T:
        total = total + column
    return gluon_in_numpy.value(total)


def _maxima(scores: Any, m: Any, most: Any, scale: Any, simple: Any, masked: Any) -> Any:
    """Weights relative to the largest score so far, in place of a reference that seldom changes."""
    scores, m, scale = (np.asarray(x, np.float32) for x in (scores, m, scale))
    top = np.maximum(m, np.asarray(most) * scale)
    weights = np.exp2(scores * scale[:, None] - top[:, None])
    return tuple(gluon_in_numpy.value(x) for x in (weights, np.exp2(m - top), top))


FAULTS: dict[str, dict[str, Any]] = {
    "sums from the left": {"sum_of_columns": _sum_from_the_left},
    "maxima in place of references": {"referred_weights": _maxima},
}


@pytest.mark.parametrize("instead", FAULTS.values(), ids=FAULTS, indirect=True)
def test_a_fault_makes_bits_differ(launched: list[KernelCall]) -> None:
    portable, decoded = both(SMALL)
    last = portable.setup.queries
    expected = part(portable.rows(0, last), last - 4, last)
    assert differing(decoded.in_chunks(1, last - 4), expected) > 0
    assert len(launched) == 4
