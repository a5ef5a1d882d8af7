"""Batch invariance on a GPU: a token has the same bits however its prompt is cut into chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders.device import device_facts
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, PrefillKernel
from tests.dense.chunked import Prompt, Rows, Setup, differing

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GQA = Setup(heads=(32, 8, 128))
FP8 = replace(GQA, cache_dtype=CacheDType.FP8)
INT8 = replace(GQA, cache_dtype=CacheDType.INT8_PER_TOKEN_HEAD)
LAYERS = {
    "64": replace(GQA, heads=(32, 8, 64)),
    "96": replace(GQA, heads=(32, 8, 96)),
    "128": GQA,
    "256": replace(GQA, heads=(16, 8, 256)),
    "fp16": replace(GQA, heads=(8, 1, 128), dtype=DType.FLOAT16),
    # A verify of 16 heads has 64 rows, whose products are by warp group on Hopper.
    "tall": replace(GQA, heads=(16, 1, 128)),
    "192": replace(GQA, heads=(16, 8, 192)),
    "256 window and cap": replace(GQA, heads=(16, 8, 256), window=1000, soft_cap=30.0),
    "256 groups": replace(GQA, heads=(16, 8, 256), keys=30000),
    "window": replace(GQA, window=1000),
    "narrow window and sinks": replace(GQA, heads=(32, 8, 64), window=100, sinks=True),
    "chunk": replace(GQA, chunk=4096),
    "cap and sinks": replace(GQA, soft_cap=30.0, sinks=True),
    "alibi": replace(GQA, alibi=True),
    "fp8": FP8,
    "fp8 64": replace(FP8, heads=(32, 8, 64)),
    "fp8 256": replace(FP8, heads=(16, 8, 256)),
    "fp8 fp16, scales of heads": replace(FP8, dtype=DType.FLOAT16, head_scales=True),
    "fp8 window": replace(FP8, window=1000),
    "fp8 cap and sinks": replace(FP8, soft_cap=30.0, sinks=True),
    "fp8 tall": replace(FP8, heads=(16, 1, 128)),
    "fp8 groups": replace(FP8, keys=30000),
    "e5m2": replace(GQA, cache_dtype=CacheDType.FP8_E5M2),
    "int8": INT8,
    "int8 64": replace(INT8, heads=(32, 8, 64)),
    "int8 alibi": replace(INT8, alibi=True),
    "fp8 per token": replace(GQA, cache_dtype=CacheDType.FP8_PER_TOKEN_HEAD),
    "groups": replace(GQA, keys=30000),
    "octaves": replace(GQA, heads=(8, 1, 128), keys=150000, max_len=160000),
}

OF_HOPPER = [
    name
    for name, setup in LAYERS.items()
    if not (setup.alibi or setup.cache_dtype is not CacheDType.AUTO)
]
"""Layers whose prompts the Hopper kernel serves."""
DECODED_BY_HOPPER = [
    name
    for name, setup in LAYERS.items()
    if not setup.alibi and setup.cache_dtype in (CacheDType.AUTO, CacheDType.FP8)
]
"""Layers whose decodes the Hopper kernel serves."""


def part(rows: Rows, start: int, stop: int) -> Rows:
    return rows[0][start:stop], rows[1][start:stop]


@pytest.mark.parametrize("layer", LAYERS)
def test_decodes_verifies_and_chunks_have_the_bits_of_the_whole_prompt(layer: str) -> None:
    prompt = Prompt(LAYERS[layer], DEVICE)
    last = prompt.setup.queries
    whole = prompt.rows(0, last)
    assert differing(whole, whole) == 0
    for size, start in ((1, last - 40), (4, last - 100), (7, 300), (64, 0), (300, 0)):
        found = prompt.in_chunks(size, start)
        assert differing(found, part(whole, start, last)) == 0, size


@pytest.mark.skipif(device_facts(DEVICE).kind is not DeviceKind.SM90, reason="needs a Hopper GPU")
@pytest.mark.parametrize("layer", OF_HOPPER)
def test_both_kernels_of_prompts_have_the_same_bits(layer: str) -> None:
    kernels = PrefillKernel.HOPPER, PrefillKernel.TRITON
    hopper, portable = (Prompt(replace(LAYERS[layer], prefill=k), DEVICE) for k in kernels)
    last = hopper.setup.queries
    whole = hopper.rows(0, last)
    assert differing(whole, portable.rows(0, last)) == 0
    assert differing(hopper.in_chunks(1, last - 20), part(whole, last - 20, last)) == 0


@pytest.mark.skipif(device_facts(DEVICE).kind is not DeviceKind.SM90, reason="needs a Hopper GPU")
@pytest.mark.parametrize("layer", DECODED_BY_HOPPER)
def test_both_kernels_of_decodes_have_the_same_bits(layer: str) -> None:
    setup = LAYERS[layer]
    hopper, portable = (
        Prompt(replace(setup, decode=kernel), DEVICE)
        for kernel in (DecodeKernel.AUTO, DecodeKernel.TRITON)
    )
    last = setup.queries
    for size, start in ((1, last - 20), (4, last - 100)):
        found = hopper.in_chunks(size, start)
        assert differing(found, portable.in_chunks(size, start)) == 0, size


@pytest.mark.parametrize("layer", ["64", "128", "256", "fp8", "fp8 64", "int8"])
def test_a_prompt_of_8192_tokens_has_the_bits_of_its_decodes(layer: str) -> None:
    prompt = Prompt(replace(LAYERS[layer], keys=8192, queries=8192, max_len=16384), DEVICE)
    whole = prompt.rows(0, 8192)
    assert differing(prompt.in_chunks(2048), whole) == 0
    for start in (0, 511, 512, 4000, 8150):
        found = prompt.in_chunks(1, start, start + 20)
        assert differing(found, part(whole, start, start + 20)) == 0, start


@pytest.mark.parametrize("layer", ["128", "window", "groups", "fp8", "int8"])
def test_other_requests_of_the_step_change_no_bit(layer: str) -> None:
    prompt = Prompt(replace(LAYERS[layer], beside=2000), DEVICE)
    whole = prompt.rows(0, 600)
    for turn in range(20):
        others = ((1, 8000 - 97 * turn), (50, 5000), (1 + turn, 900 + turn))[: 1 + turn % 3]
        assert differing(prompt.rows(0, 600, others), whole) == 0, turn
        assert differing(prompt.rows(599, 600, others * 3), part(whole, 599, 600)) == 0, turn
