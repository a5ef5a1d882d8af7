"""FLASHINFER_MLA with the real package, beyond the conformance suite.

No call waits for the GPU, heads that fill no tile lose no key, and graphs replay batches with
padding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.bench.measure.timing import waits_are_errors
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES, BatchSpec
from attn.testing.cases import LatentCase, device_for
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult
from specs.dtypes import CacheDType, DType

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAMES = ("uniform_decode", "ragged_decode", "mixed", "speculative_verify", "chunked_prefill")
CACHES = (CacheDType.AUTO, CacheDType.FP8)
EDGE = BatchSpec("edge_of_a_tile", (6, 6, 6, 6), (65, 130, 68, 69), num_speculative_tokens=5)
BACKEND = FlashInferMlaBackend


@pytest.fixture(autouse=True)
def needs_flashinfer() -> None:
    if device_for(AttentionBackendEnum["FLASHINFER_MLA"]) is None:
        pytest.skip(BACKEND.unavailable_reason() or "flashinfer is not installed")


def case_of(batch: BatchSpec, cache: CacheDType, heads: int = 16) -> LatentCase:
    case = LatentCase(
        batch, num_heads=heads, dtype=DType.BFLOAT16, cache_dtype=cache, block_size=64
    )
    if not case.is_served_by(BACKEND):
        pytest.skip("not served on this GPU")
    return case


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_build_and_forward_wait_for_nothing(name: str, cache: CacheDType) -> None:
    trial = LatentTrial(BACKEND, case_of(BATCHES[name], cache), CUDA)
    trial.write()
    builder, kept = trial.builder(), trial.cache()
    # The first call compiles kernels and reads scales, so it may wait for the GPU.
    trial.attend(trial.build(builder), trial.inputs, kept)
    torch.cuda.synchronize()
    with waits_are_errors():
        trial.attend(trial.build(builder), trial.inputs, kept)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("heads", [1, 7, 12, 24, 48, 64, 96, 128])
def test_no_key_is_dropped_whatever_the_heads(heads: int, cache: CacheDType) -> None:
    for batch in (EDGE, BATCHES["ragged_verify"], BATCHES["block_boundary"]):
        check_case(BACKEND, case_of(batch, cache, heads), CUDA)


@pytest.mark.parametrize("cache", CACHES)
def test_a_graph_replays_batches_with_padding(cache: CacheDType) -> None:
    lens = (20, 4, 51, 0, 0)
    live = tuple(4 if length else 0 for length in lens)
    spec = BatchSpec(
        "replayed",
        live,
        lens,
        num_padding_tokens=20 - sum(live),
        pads_num_actual_tokens=True,
        num_speculative_tokens=3,
    )
    full = BatchSpec("captured", (4,) * 5, (50,) * 5, num_speculative_tokens=3)
    case = case_of(spec, cache)
    trial = LatentTrial(BACKEND, case, CUDA)
    first = LatentTrial(BACKEND, replace(case, batch=full), CUDA)
    trial.write()
    config = trial.config.replace(max_model_len=128)
    builder, kept = trial.builder(config), trial.cache()
    record = builder.build_for_cudagraph_capture(first.inputs.batch)
    query = trial._absorbed(trial.inputs.query)
    trial.impl.forward_mqa(query, kept, record, trial.layer)
    torch.cuda.synchronize()
    builder.build(0, first.inputs.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = trial.impl.forward_mqa(query, kept, record, trial.layer)
    eager = trial.attend(trial.build(trial.builder(config)), trial.inputs, kept)
    trial.build(builder)
    graph.replay()
    torch.cuda.synchronize()
    count = sum(live)
    assert torch.equal(out[:count], eager["latent"][:count])
    assert torch.equal(lse[:count], eager["lse"][:count])
    assert not out[count:].any()
    result = CaseResult()
    trial.judge(eager, trial.build(trial.builder(config)), result)
    assert result.findings == {}
